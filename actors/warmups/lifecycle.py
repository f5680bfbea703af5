"""The lifecycle warmup: one request exactly at a block boundary, so that the publish path compiles too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replayssm_orch.actors.warmups.capabilities import Capabilities, Unavailable
from replayssm_orch.actors.warmups.guard import guarded_slots, layer_trackers
from replayssm_orch.actors.warmups.protocol import KVCacheGroup, MambaSpec, RecurrentLayer, Runner


def warm_lifecycle(runner: Runner, capabilities: Capabilities) -> str | None:
    """Run reset and postprocess of one request on scratch slots; returns why nothing was done, or None."""
    if not runner.vllm_config.use_flashinfer_replayssm:
        return capabilities.no_replayssm
    create = capabilities.create_lifecycle
    if isinstance(create, Unavailable):
        return create.reason
    num_slots = min(capabilities.num_committable_blocks(runner) - 1, 2)
    if num_slots <= 0:
        return "no committable state slot beside the padding slot"
    found = _first_replayssm_group(runner, capabilities)
    if found is None:
        return "no KV-cache group of this shard holds FlashInfer ReplaySSM layers"
    index, layers, spec = found
    scratch = scratch_block_table(runner.block_tables.input_block_tables[index], num_slots)
    align = spec.mamba_cache_mode == "align"

    capabilities.ensure_blocks(runner, 1 + num_slots)
    with guarded_slots(runner, capabilities, num_slots, rebuild_block_tables=False):
        for layer in layers:
            for view in layer.kv_cache:
                view[1 : num_slots + 1].zero_()
            for tracker in layer_trackers(layer, capabilities):
                tracker.zero_()
        context = create([(layers, spec, scratch)], runner.max_num_reqs)

        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=scratch.device)

        request = torch.zeros(1, dtype=torch.int64, device=scratch.device)
        if align:
            context.reset_new_slots(idx_mapping=request, src_cols=int32(-1), dst_cols=int32(1), num_reqs=1)
        context.postprocess(
            idx_mapping=request,
            query_metadata=int32(0, runner.decode_query_len),
            query_metadata_is_cumulative=True,
            num_computed_tokens=int32(spec.block_size),
            num_computed_is_post_step=True,
            num_accepted_tokens=int32(1),
            is_prefilling=torch.zeros(1, dtype=torch.bool, device=scratch.device),
            live_cols=int32(1) if align else None,
            num_reqs=1,
        )
    return None


def scratch_block_table(table: torch.Tensor, num_slots: int) -> torch.Tensor:
    """A table `[[1, num_slots]]` with the strides, dtype and device of `table`, in memory of its own."""
    scratch = torch.empty_strided((1, 2), table.stride(), dtype=table.dtype, device=table.device)
    scratch.copy_(torch.tensor([[1, num_slots]], dtype=table.dtype))
    return scratch


def _first_replayssm_group(
    runner: Runner, capabilities: Capabilities
) -> tuple[int, Sequence[RecurrentLayer], MambaSpec] | None:
    # One group is enough: layer and group counts are runtime values, not JIT keys, and a second
    # group could overlap the first one's scratch pages.
    context = runner.vllm_config.compilation_config.static_forward_context
    for index, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        members = [(name, context.get(name)) for name in group.layer_names]
        layers = [
            (name, layer)
            for name, layer in members
            if capabilities.is_recurrent(layer) and layer.use_flashinfer_replayssm
        ]
        if layers:
            return index, [layer for _, layer in layers], _layer_spec(group, layers[0][0])
    return None


def _layer_spec(group: KVCacheGroup, layer: str) -> MambaSpec:
    # vLLM wraps the specs of a group of one type but several sizes (UniformTypeKVCacheSpecs).
    wrapped: dict[str, Any] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    spec: MambaSpec = group.kv_cache_spec if wrapped is None else wrapped[layer]
    return spec
