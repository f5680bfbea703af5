"""The kernel contracts served by the float32 references, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replayssm_orch.actors.layout_layers import (
    GdnInputs,
    LayoutGdnLayer,
    LayoutLayer,
    LayoutMamba2Layer,
    Mamba2Inputs,
)
from replayssm_orch.actors.reference_gdn import gdn_decode, gdn_materialize
from replayssm_orch.actors.reference_mamba2 import mamba2_decode, mamba2_materialize
from replayssm_orch.actors.warmups.capabilities import Unavailable


class ReferenceKernels:
    """`RecurrentKernels` in PyTorch; every width executes."""

    def decode_unavailable(self, layer: type[LayoutLayer], width: int) -> Unavailable | None:
        return None

    def materializer_unavailable(self, layer: type[LayoutLayer]) -> Unavailable | None:
        return None

    def gdn_decode(self, layer: LayoutGdnLayer, inputs: GdnInputs, slots: torch.Tensor) -> torch.Tensor:
        u_ring, k_ring, g_ring = layer.replayssm_rings
        return gdn_decode(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            a=inputs.a,
            b=inputs.b,
            a_log=layer.a_log,
            dt_bias=layer.dt_bias,
            state=layer.kv_cache[1],
            slots=torch.where(slots > 0, slots, -1),
            u_ring=u_ring,
            k_ring=k_ring,
            g_ring=g_ring,
            hist_len=layer.trackers.committed[slots.long()],
            cache_base=layer.trackers.ring_start[slots.long()],
        )

    gdn_materialize = staticmethod(gdn_materialize)

    def mamba2_decode(self, layer: LayoutMamba2Layer, inputs: Mamba2Inputs, slots: torch.Tensor) -> torch.Tensor:
        x_ring, dt_ring, b_ring = layer.rings
        return mamba2_decode(
            state=layer.kv_cache[1],
            x_ring=x_ring,
            dt_ring=dt_ring,
            b_ring=b_ring,
            ring_start=layer.trackers.ring_start,
            committed=layer.trackers.committed,
            x=inputs.x,
            dt=inputs.dt,
            a=layer.a,
            b=inputs.b,
            c=inputs.c,
            d=layer.d,
            dt_bias=layer.dt_bias,
            slots=slots,
        )

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
    ) -> None:
        mamba2_materialize(
            states=[layer.kv_cache[1] for layer in layers],
            x_rings=[layer.rings[0] for layer in layers],
            dt_rings=[layer.rings[1] for layer in layers],
            b_rings=[layer.rings[2] for layer in layers],
            a=[layer.a for layer in layers],
            src_slots=src_slots,
            dst_slots=dst_slots,
            ring_start=ring_start,
            replay_prefix_len=replay_prefix_len,
            active_request_indices=active_request_indices,
            max_window=max_window,
        )
