"""The materializer warmup: one inactive launch per cache layout."""

from __future__ import annotations

import torch

from replayssm_orch.actors.warmups.capabilities import Capabilities, Materialize
from replayssm_orch.actors.warmups.protocol import GatedDeltaNetLayer, Runner

LayoutSignature = tuple[tuple[torch.device, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]


def layout_signature(layer: GatedDeltaNetLayer) -> LayoutSignature:
    """(device, dtype, shape, stride) of the state and of the u, k and g rings: what the kernel is specialised on."""
    tensors = (layer.kv_cache[1], *layer.replayssm_rings)
    return tuple((t.device, t.dtype, tuple(t.shape), tuple(t.stride())) for t in tensors)


def warm_materializer(
    runner: Runner, capabilities: Capabilities, materialize: Materialize, max_num_reqs: int
) -> tuple[LayoutSignature, ...]:
    """Launch `materialize` once per layout with every request inactive: it compiles and touches no state.

    Returns the launched signatures in launch order. Nothing is remembered between calls.
    """
    launched: list[LayoutSignature] = []
    for layer in runner.get_model().modules():
        if not (capabilities.is_gdn(layer) and layer.use_replayssm):
            continue
        signature = layout_signature(layer)
        if signature in launched:
            continue
        state, (u_ring, k_ring, g_ring) = layer.kv_cache[1], layer.replayssm_rings
        inactive = torch.full((max_num_reqs,), -1, dtype=torch.int32, device=state.device)
        materialize(
            state=state,
            src_slots=inactive,
            dst_slots=inactive.clone(),
            k_cache=k_ring,
            u_cache=u_ring,
            g_cache=g_ring,
            cache_base=torch.zeros_like(inactive),
            count=inactive.clone(),
            active_request_indices=inactive.clone(),
            num_active=torch.zeros(1, dtype=torch.int32, device=state.device),
        )
        launched.append(signature)
    return tuple(launched)
