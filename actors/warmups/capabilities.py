"""What one runner's surroundings can do: asked once, handed to every rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch

from replayssm_orch.actors.warmups.protocol import GatedDeltaNetLayer, MambaSpec, RecurrentLayer, Runner

REPLAYSSM_OFF = "FlashInfer ReplaySSM is off in this configuration"
TRACKERS = ("_replayssm_ring_start", "_replayssm_prev_num_accepted")


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A capability that is not there, and why."""

    reason: str


class LifecycleContext(Protocol):
    """The request lifecycle of ReplaySSM slots; index tensors are on the runner's device."""

    def reset_new_slots(
        self, *, idx_mapping: torch.Tensor, src_cols: torch.Tensor, dst_cols: torch.Tensor, num_reqs: int
    ) -> None: ...

    def postprocess(
        self,
        *,
        idx_mapping: torch.Tensor,
        query_metadata: torch.Tensor,
        query_metadata_is_cumulative: bool,
        num_computed_tokens: torch.Tensor,
        num_computed_is_post_step: bool,
        num_accepted_tokens: torch.Tensor,
        is_prefilling: torch.Tensor,
        live_cols: torch.Tensor | None,
        num_reqs: int,
    ) -> None: ...


LifecycleGroup = tuple[Sequence[RecurrentLayer], MambaSpec, torch.Tensor]


class CreateLifecycle(Protocol):
    """`ReplaySSMModelContext.create`: groups of (layers, Mamba spec, block table) and the number of request rows."""

    def __call__(self, groups: Sequence[LifecycleGroup], max_num_reqs: int, /) -> LifecycleContext: ...


class Materialize(Protocol):
    """`gdn_prefix_materialize`: state `[N, HV, V, K]`, rings, and int32 request rows `[B]`."""

    def __call__(
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


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Callables that stand between a rule and the vLLM (or layout engine) it runs on.

    `num_committable_blocks` must answer the same number on every rank (the minimum over all of them).
    `decode_kernel` says why the decode kernel cannot execute that many tokens per request here, or None. The two
    reasons are reported where the runner's configuration says that there is no ReplaySSM, or no GDN ReplaySSM.
    """

    is_recurrent: Callable[[object], TypeGuard[RecurrentLayer]]
    is_gdn: Callable[[object], TypeGuard[GatedDeltaNetLayer]]
    num_committable_blocks: Callable[[Runner], int]
    ensure_blocks: Callable[[Runner, int], None]
    create_lifecycle: CreateLifecycle | Unavailable
    materialize: Materialize | Unavailable
    decode_kernel: Callable[[int], Unavailable | None]
    trackers: tuple[str, ...] = TRACKERS
    no_replayssm: str = REPLAYSSM_OFF
    no_gdn_replayssm: str = "this model has no Gated DeltaNet layers with ReplaySSM"
