"""Float32 reference of FlashInfer's Mamba2 ring contracts: `checkpointing_ssu` and `replayssm_materialize`.

Per head: S <- exp(A dt) S + dt x B^T, y = S C + D x, with dt = softplus(dt + dt_bias). Rings keep x, B and the
processed dt. A step of T tokens folds its P committed entries into the checkpoint first when P + T exceeds the window,
which is the ring length minus T.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from replayssm_orch.actors.trackers import ReplayWindow


def mamba2_decode(
    *,
    state: torch.Tensor,
    x_ring: torch.Tensor,
    dt_ring: torch.Tensor,
    b_ring: torch.Tensor,
    ring_start: torch.Tensor,
    committed: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    slots: torch.Tensor,
    pad_slot: int = 0,
) -> torch.Tensor:
    """Decode T tokens per request, append them to the ring, and fold a full ring into the checkpoint first.

    Args:
        state: `[N, heads, head_dim, d_state]`; x_ring: `[N, heads, L, head_dim]`; dt_ring: float32 `[N, heads, L]`;
            b_ring: `[N, groups, L, d_state]`; all in place.
        ring_start, committed: int32 trackers `[N]`; not advanced here (`trackers`).
        x: `[B, T, heads, head_dim]`; dt: `[B, T, heads]`; b, c: `[B, T, groups, d_state]`; a, d, dt_bias: `[heads]`.
        slots: int `[B]`; rows at `pad_slot` are skipped.

    Returns the outputs `[B, T, heads, head_dim]` in float32; skipped rows are zero.
    """
    width, heads = x.shape[1:3]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    rows = torch.nonzero(slots != pad_slot).flatten()
    if not len(rows):
        return out
    slot = slots[rows].long()
    start, old = ring_start[slot].long(), committed[slot].long()
    ring_len = x_ring.shape[2]
    window = ReplayWindow(ring_len, ring_len - width, width)
    a = a.float()
    current = replay(state, (x_ring, dt_ring, b_ring), a, slot=slot, start=start, count=old, window=window.window)
    flushed = window.flushes(old)
    state[slot[flushed]] = current[flushed].to(state.dtype)

    step = F.softplus(dt[rows].float() + dt_bias.float())
    repeat = heads // b.shape[2]
    b_heads, c_heads = (t[rows].float().repeat_interleave(repeat, 2) for t in (b, c))
    inputs = x[rows].float()
    for t in range(width):
        decay = (a * step[:, t]).exp()[..., None, None]
        current = decay * current + (step[:, t][..., None] * inputs[:, t])[..., None] * b_heads[:, t][:, :, None, :]
        out[rows, t] = torch.einsum("bhdn,bhn->bhd", current, c_heads[:, t]) + d.float()[:, None] * inputs[:, t]
        at = (start + old + t) % ring_len
        x_ring[slot, :, at] = x[rows, t].to(x_ring.dtype)
        dt_ring[slot, :, at] = step[:, t]
        b_ring[slot, :, at] = b[rows, t].to(b_ring.dtype)
    return out


def mamba2_materialize(
    *,
    states: Sequence[torch.Tensor],
    x_rings: Sequence[torch.Tensor],
    dt_rings: Sequence[torch.Tensor],
    b_rings: Sequence[torch.Tensor],
    a: Sequence[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    ring_start: torch.Tensor,
    replay_prefix_len: torch.Tensor,
    active_request_indices: torch.Tensor,
    max_window: int,
    pad_slot: int = 0,
) -> None:
    """Replay a ring prefix onto each layer's source slot, into its destination slot.

    Tensors are one per layer; `src_slots`, `dst_slots` are int32 `[layers, B]`, the other request tensors int32 `[B]`.
    `active_request_indices` lists the requests, ended by the first -1. Prefix 0 copies byte for byte.
    """
    ended = (active_request_indices < 0).int().cumsum(0) > 0
    listed = active_request_indices[~ended].long()
    start, prefix = ring_start[listed].long(), replay_prefix_len[listed].long()
    for layer, state in enumerate(states):
        src, dst = src_slots[layer, listed].long(), dst_slots[layer, listed].long()
        taken = (src != pad_slot) & (dst != pad_slot)
        if not taken.any():
            continue
        replayed = replay(
            state,
            (x_rings[layer], dt_rings[layer], b_rings[layer]),
            a[layer].float(),
            slot=src[taken],
            start=start[taken],
            count=prefix[taken],
            window=max_window,
        )
        copied = state[src[taken]]
        state[dst[taken]] = torch.where((prefix[taken] == 0)[:, None, None, None], copied, replayed.to(state.dtype))


def replay(
    state: torch.Tensor,
    rings: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    a: torch.Tensor,
    *,
    slot: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """The float32 states `[B, heads, head_dim, d_state]` after `count` `[B]` entries of the (x, dt, B) rings."""
    x_ring, dt_ring, b_ring = rings
    entry = torch.arange(window, device=slot.device)
    at = (start[:, None] + entry) % x_ring.shape[2]
    rows = slot[:, None]
    live = (entry < count[:, None])[..., None]
    step = dt_ring[rows, :, at].masked_fill(~live, 0.0)
    x = x_ring[rows, :, at].float().masked_fill(~live[..., None], 0.0)
    b = b_ring[rows, :, at].float().masked_fill(~live[..., None], 0.0)
    b = b.repeat_interleave(x.shape[2] // b.shape[2], 2)
    total = step.cumsum(1)
    weight = (a * (total[:, -1:] - total)).exp() * step
    folded = torch.einsum("bjh,bjhd,bjhn->bhdn", weight, x, b)
    return (a * total[:, -1]).exp()[..., None, None] * state[slot].float() + folded
