"""The layers of a layout engine: caches, trackers and the small weights that the kernels read, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from replayssm_orch.actors.trackers import ReplayWindow
from replayssm_orch.actors.warmups.capabilities import Unavailable


@dataclass(frozen=True, slots=True, eq=False)
class Trackers:
    """The cursors that the layers of one KV-cache group share, int32 `[num_blocks]` each."""

    ring_start: torch.Tensor
    committed: torch.Tensor

    @classmethod
    def zeros(cls, num_blocks: int, device: str) -> Trackers:
        return cls(*(torch.zeros(num_blocks, dtype=torch.int32, device=device) for _ in range(2)))


@dataclass(frozen=True, eq=False)
class LayoutLayer:
    """A recurrent layer; `window` is None where its page has no rings (then there are no trackers to move)."""

    name: str
    kv_cache: tuple[torch.Tensor, ...]
    trackers: Trackers
    window: ReplayWindow | None

    @property
    def use_flashinfer_replayssm(self) -> bool:
        return self.window is not None

    @property
    def _replayssm_ring_start(self) -> torch.Tensor:
        return self.trackers.ring_start

    @property
    def _replayssm_prev_num_accepted(self) -> torch.Tensor:
        return self.trackers.committed


@dataclass(frozen=True, eq=False)
class LayoutGdnLayer(LayoutLayer):
    """Caches (conv, state, u, k, g). Weights `[HV]`: a_log float32, dt_bias bfloat16."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor

    @property
    def use_replayssm(self) -> bool:
        return self.window is not None

    @property
    def replayssm_rings(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        u_ring, k_ring, g_ring = self.kv_cache[2:]
        return u_ring, k_ring, g_ring


@dataclass(frozen=True, eq=False)
class LayoutMamba2Layer(LayoutLayer):
    """Caches (conv, state, x, dt, B). Weights `[heads]`: a float32 and negative, d and dt_bias bfloat16."""

    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor

    @property
    def rings(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x_ring, dt_ring, b_ring = self.kv_cache[2:]
        return x_ring, dt_ring, b_ring


@dataclass(frozen=True, slots=True, eq=False)
class GdnInputs:
    """q, k `[B, T, H, K]`, v `[B, T, HV, V]`: slices of one fused tensor, one token stride; a, b `[B, T, HV]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Inputs:
    """x `[B, T, heads, head_dim]`, b, c `[B, T, groups, d_state]`: slices of one fused tensor; dt `[B, T, heads]`."""

    x: torch.Tensor
    dt: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor


class RecurrentKernels(Protocol):
    """The four kernel contracts; FlashInfer's on CUDA, the float32 references elsewhere.

    Slot tensors are int32 `[B]`; slot 0 is padding and its rows are skipped. No call moves a tracker.
    """

    def decode_unavailable(self, layer: type[LayoutLayer], width: int) -> Unavailable | None:
        """Why the decode kernel of `layer` cannot execute `width` tokens per request here, or None."""
        ...

    def materializer_unavailable(self, layer: type[LayoutLayer]) -> Unavailable | None:
        """Why the materializer of `layer` cannot run here, or None."""
        ...

    def gdn_decode(self, layer: LayoutGdnLayer, inputs: GdnInputs, slots: torch.Tensor) -> torch.Tensor: ...

    def gdn_materialize(
        self,
        *,
        state: torch.Tensor,
        src_slots: torch.Tensor,
        dst_slots: torch.Tensor,
        k_cache: torch.Tensor,
        u_cache: torch.Tensor,
        g_cache: torch.Tensor,
        cache_base: torch.Tensor,
        count: torch.Tensor,
        active_request_indices: torch.Tensor,
        num_active: torch.Tensor,
    ) -> object: ...

    def mamba2_decode(self, layer: LayoutMamba2Layer, inputs: Mamba2Inputs, slots: torch.Tensor) -> torch.Tensor: ...

    def mamba2_materialize(
        self,
        layers: Sequence[LayoutMamba2Layer],
        *,
        src_slots: torch.Tensor,
        dst_slots: torch.Tensor,
        ring_start: torch.Tensor,
        replay_prefix_len: torch.Tensor,
        active_request_indices: torch.Tensor,
        max_window: int,
    ) -> None: ...
