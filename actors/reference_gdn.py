"""Float32 reference of FlashInfer's GDN ring contracts: decode with ring append and flush, and prefix materialization.

Contracts: `gated_delta_rule_mtp_ucache_flush` and `gdn_prefix_materialize` of FlashInfer 0.7.4. Per value head, the
recurrence is S <- exp(g) S + u k^T with u = beta (v - exp(g) S k), g = -exp(A_log) softplus(a + dt_bias),
beta = sigmoid(b), and the output is scale S q; q and k are L2-normalised (epsilon 1e-6). Rings keep u, the normalised k
and G, the log decay accumulated since the checkpoint.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from replayssm_orch.actors.trackers import LOGICAL_WINDOW, ReplayWindow

_L2_EPSILON = 1e-6


def gdn_decode(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    slots: torch.Tensor,
    u_ring: torch.Tensor,
    k_ring: torch.Tensor,
    g_ring: torch.Tensor,
    hist_len: torch.Tensor,
    cache_base: torch.Tensor,
) -> torch.Tensor:
    """Decode T tokens per request, append them to the ring, and fold a full ring into the checkpoint first.

    Args:
        q, k: `[B, T, H, K]`; v: `[B, T, HV, V]`; a, b: `[B, T, HV]`; a_log, dt_bias: `[HV]`.
        state: `[N, HV, V, K]`, written in place where a request flushes; slots: int `[B]`, negative rows are skipped.
        u_ring: `[N, HV, R, V]`; k_ring: `[N, H, R, K]`; g_ring: float32 `[N, HV, R]`; appended in place.
        hist_len, cache_base: int `[B]`, live entries and their origin in the ring; not advanced here (`trackers`).

    Returns the outputs `[B, T, HV, V]` in float32; skipped rows are zero.
    """
    width = q.shape[1]
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    rows = torch.nonzero(slots >= 0).flatten()
    if not len(rows):
        return out
    slot, committed, base = slots[rows].long(), hist_len[rows].long(), cache_base[rows].long()
    window = ReplayWindow(k_ring.shape[2], LOGICAL_WINDOW, width, absorbs=width == 1)
    replayed, last_g = replay(state, (u_ring, k_ring, g_ring), slot, base, committed)
    flushed = window.flushes(committed)
    folded = slot[flushed]
    if not window.absorbs:
        state[folded] = replayed[flushed].to(state.dtype)

    repeat = v.shape[2] // k.shape[2]
    log_decay = -a_log.float().exp() * F.softplus(a[rows].float() + dt_bias.float(), threshold=1e9)
    beta = b[rows].float().sigmoid()
    keys, queries = l2_normalise(k[rows]), l2_normalise(q[rows])
    keys_v, queries_v = keys.repeat_interleave(repeat, 2), queries.repeat_interleave(repeat, 2)
    # A flush makes the folded state the new checkpoint, so the decay of what follows starts from 0.
    total_g = torch.where(flushed[:, None] & (not window.absorbs), 0.0, last_g)
    current = replayed
    for t in range(width):
        current = log_decay[:, t].exp()[..., None, None] * current
        predicted = torch.einsum("bhvk,bhk->bhv", current, keys_v[:, t])
        u = beta[:, t][..., None] * (v[rows, t].float() - predicted)
        current = current + u[..., None] * keys_v[:, t][:, :, None, :]
        out[rows, t] = torch.einsum("bhvk,bhk->bhv", current, queries_v[:, t]) * q.shape[-1] ** -0.5
        total_g = total_g + log_decay[:, t]
        keep = ~flushed if window.absorbs else torch.ones_like(flushed)
        at = ((base + committed + t) % window.ring_len)[keep]
        u_ring[slot[keep], :, at] = u[keep].to(u_ring.dtype)
        k_ring[slot[keep], :, at] = keys[keep, t].to(k_ring.dtype)
        g_ring[slot[keep], :, at] = total_g[keep]
    if window.absorbs:
        state[folded] = current[flushed].to(state.dtype)
    return out


def gdn_materialize(
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
) -> torch.Tensor:
    """Replay the first `count` ring entries onto the checkpoint of the source slot, into the destination slot.

    Request tensors are int32 `[B]`, `num_active` `[1]`; shapes of the pools as in `gdn_decode`. A request is skipped
    when it is not listed, a slot or its count is negative, or its count exceeds 16. Count 0 copies the state byte for
    byte. Returns `state`, written in place at the destinations.
    """
    listed = active_request_indices[: int(num_active)].long()
    listed = listed[listed >= 0]
    src, dst, prefix = src_slots[listed].long(), dst_slots[listed].long(), count[listed].long()
    taken = (src >= 0) & (dst >= 0) & (prefix >= 0) & (prefix <= LOGICAL_WINDOW)
    src, dst, prefix, base = src[taken], dst[taken], prefix[taken], cache_base[listed].long()[taken]
    if len(src):
        replayed, _ = replay(state, (u_cache, k_cache, g_cache), src, base, prefix)
        copied = state[src]
        state[dst] = torch.where((prefix == 0)[:, None, None, None], copied, replayed.to(state.dtype))
    return state


def replay(
    state: torch.Tensor,
    rings: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    slot: torch.Tensor,
    base: torch.Tensor,
    count: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(G_C) S0 + sum_j exp(G_C - g_j) u_j k_j^T over the first `count` `[B]` entries of each slot's (u, k, g).

    Returns the states `[B, HV, V, K]` and G_C `[B, HV]`, both float32.
    """
    u_ring, k_ring, g_ring = rings
    entry = torch.arange(LOGICAL_WINDOW, device=slot.device)
    at = (base[:, None] + entry) % k_ring.shape[2]
    rows = slot[:, None]
    u, g = u_ring[rows, :, at].float(), g_ring[rows, :, at]
    keys = k_ring[rows, :, at].float().repeat_interleave(u.shape[2] // k_ring.shape[1], 2)
    live = (entry < count[:, None])[..., None]
    last = g.gather(1, (count - 1).clamp(min=0)[:, None, None].expand(-1, 1, g.shape[2]))[:, 0]
    last = torch.where((count > 0)[:, None], last, 0.0)
    # Stale entries may hold anything: mask before exp, and mask the operands too, since 0 * inf is not 0.
    weight = torch.where(live, (last[:, None] - g).masked_fill(~live, 0.0).exp(), 0.0)
    u, keys = u.masked_fill(~live[..., None], 0.0), keys.masked_fill(~live[..., None], 0.0)
    folded = torch.einsum("bjh,bjhv,bjhk->bhvk", weight, u, keys)
    return last.exp()[..., None, None] * state[slot].float() + folded, last


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPSILON)
