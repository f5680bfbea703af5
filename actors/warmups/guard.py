"""The state guard: whatever a warmup step writes, live requests never see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from replayssm_orch.actors.warmups.capabilities import Capabilities
from replayssm_orch.actors.warmups.protocol import RecurrentLayer, Runner


def replayssm_layers(runner: Runner, capabilities: Capabilities) -> list[RecurrentLayer]:
    """The runner's recurrent layers that use FlashInfer ReplaySSM, in module order."""
    return [
        module
        for module in runner.get_model().modules()
        if capabilities.is_recurrent(module) and module.use_flashinfer_replayssm
    ]


def layer_trackers(layer: RecurrentLayer, capabilities: Capabilities) -> list[torch.Tensor]:
    return [getattr(layer, name) for name in capabilities.trackers]


@contextmanager
def guarded_slots(
    runner: Runner, capabilities: Capabilities, num_slots: int, *, rebuild_block_tables: bool = True
) -> Iterator[None]:
    """Leave rows 1..`num_slots` of every ReplaySSM cache view and all trackers zero, also when the body raises.

    Row 0 (padding) and the rows above `num_slots` keep their bytes. Each cache view is remembered on its own:
    two groups may be overlaid at one address with different widths.
    """
    layers = replayssm_layers(runner, capabilities)
    views = [view for layer in layers for view in layer.kv_cache if view.numel()]
    trackers = {
        tracker.data_ptr(): tracker
        for layer in layers
        for tracker in layer_trackers(layer, capabilities)
        if tracker.numel()
    }
    try:
        yield
    finally:
        if rebuild_block_tables:
            runner.block_tables.get_dummy_block_tables(num_slots)
        for view in views:
            view[1 : num_slots + 1].zero_()
        for tracker in trackers.values():
            tracker.zero_()
