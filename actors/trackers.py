"""Tracker arithmetic of ReplaySSM slots: ring start and committed count, as vLLM's development branch advances them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOGICAL_WINDOW = 16
"""Ring entries that a GDN checkpoint may lag behind (FlashInfer's W_RING)."""


@dataclass(frozen=True, slots=True)
class ReplayWindow:
    """How one cache group's trackers move: physical ring length, logical window and tokens per executed step.

    `absorbs` marks the GDN width-1 kernel, whose flush folds the current token too and whose ring never rotates.
    """

    ring_len: int
    window: int
    width: int
    absorbs: bool = False

    def flushes(self, committed: torch.Tensor) -> torch.Tensor:
        """Whether a step that starts with `committed` entries folds them into the checkpoint (bool, same shape)."""
        return committed + self.width > self.window - int(self.absorbs)


def advance(
    ring_start: torch.Tensor,
    committed: torch.Tensor,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    window: ReplayWindow,
) -> None:
    """Advance the int32 trackers `[num_blocks]` of `slots` `[B]` by one decode step that kept `accepted` `[B]` tokens.

    Slots at or below 0 (padding) are left alone; the others must be distinct.
    """
    index = slots.clamp(min=0).long()
    start, old = ring_start[index], committed[index]
    flushed = window.flushes(old)
    if window.absorbs:
        next_start, next_committed = start, torch.where(flushed, 0, old + accepted)
    else:
        next_start = torch.where(flushed, (start + old) % window.ring_len, start)
        next_committed = torch.where(flushed, accepted, old + accepted)
    live = slots > 0
    ring_start[index] = torch.where(live, next_start, start).to(ring_start.dtype)
    committed[index] = torch.where(live, next_committed, old).to(committed.dtype)


def reset(ring_start: torch.Tensor, committed: torch.Tensor, slots: torch.Tensor) -> None:
    """Zero the trackers of `slots` `[B]` (prefill, or a destination that becomes canonical); padding is left alone."""
    index = slots.clamp(min=0).long()
    live = slots > 0
    ring_start[index] = ring_start[index].masked_fill(live, 0)
    committed[index] = committed[index].masked_fill(live, 0)
