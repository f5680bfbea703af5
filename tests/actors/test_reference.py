"""The float32 references against the plain sequential recurrences, and the tracker arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_orch.actors.reference_gdn import gdn_decode, gdn_materialize, l2_normalise
from replayssm_orch.actors.reference_mamba2 import mamba2_decode, mamba2_materialize
from replayssm_orch.actors.trackers import ReplayWindow, advance, reset

HV, H, K = 4, 2, 8
RING = {1: 16, 4: 32, 8: 32}


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def gdn_pool(width: int, num_blocks: int = 6) -> dict[str, torch.Tensor]:
    ring = RING[width]
    return {
        "state": torch.randn(num_blocks, HV, K, K),
        "u_ring": torch.full((num_blocks, HV, ring, K), float("nan")),
        "k_ring": torch.full((num_blocks, H, ring, K), float("nan")),
        "g_ring": torch.full((num_blocks, HV, ring), float("nan")),
    }


def gdn_step(state: torch.Tensor, token: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]):
    """One token of the recurrence by its definition: state `[HV, V, K]`, token rows without batch and time."""
    k, q = (l2_normalise(token[name]).repeat_interleave(HV // H, 0) for name in ("k", "q"))
    decay = (-weights["a_log"].exp() * F.softplus(token["a"] + weights["dt_bias"])).exp()
    state = state * decay[:, None, None]
    u = token["b"].sigmoid()[:, None] * (token["v"] - (state * k[:, None]).sum(-1))
    state = state + u[:, :, None] * k[:, None]
    return state, (state * q[:, None]).sum(-1) * K**-0.5


def gdn_tokens(batch: int, width: int) -> dict[str, torch.Tensor]:
    return {
        "q": torch.randn(batch, width, H, K),
        "k": torch.randn(batch, width, H, K),
        "v": torch.randn(batch, width, HV, K),
        "a": torch.randn(batch, width, HV),
        "b": torch.randn(batch, width, HV),
    }


@pytest.mark.parametrize("width", [1, 4, 8])
def test_gdn_ring_decode_is_the_sequential_recurrence(width: int) -> None:
    torch.manual_seed(width)
    weights = {"a_log": torch.rand(HV), "dt_bias": torch.randn(HV)}
    pool = gdn_pool(width)
    ring_start, committed = torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    slots = int32(3, 1, 5)
    window = ReplayWindow(RING[width], 16, width, absorbs=width == 1)
    truth = {slot: pool["state"][slot].clone() for slot in slots.tolist()}
    flushes = 0
    for _ in range(40):
        tokens = gdn_tokens(3, width)
        accepted = torch.randint(1, width + 1, (3,), dtype=torch.int32)
        flushes += int(window.flushes(committed[slots.long()]).sum())
        out = gdn_decode(
            **tokens,
            **weights,
            **pool,
            slots=slots,
            hist_len=committed[slots.long()],
            cache_base=ring_start[slots.long()],
        )
        for row, slot in enumerate(slots.tolist()):
            state = truth[slot]
            for t in range(width):
                state, expected = gdn_step(state, {n: x[row, t] for n, x in tokens.items()}, weights)
                torch.testing.assert_close(out[row, t], expected, atol=2e-4, rtol=2e-4)
                if t == int(accepted[row]) - 1:
                    truth[slot] = state
        advance(ring_start, committed, slots, accepted, window)
    assert flushes > 3


@given(count=st.integers(0, 16), base=st.integers(0, 31), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_gdn_materialization_of_n_entries_is_n_plain_steps(count: int, base: int, seed: int) -> None:
    torch.manual_seed(seed)
    weights = {"a_log": torch.rand(HV), "dt_bias": torch.randn(HV)}
    pool = gdn_pool(8)
    expected = pool["state"][2].clone()
    tokens = gdn_tokens(1, 16)
    for done in (0, 8):
        half = {name: x[:, done : done + 8] for name, x in tokens.items()}
        gdn_decode(**half, **weights, **pool, slots=int32(2), hist_len=int32(done), cache_base=int32(base))
    for t in range(count):
        expected, _ = gdn_step(expected, {name: x[0, t] for name, x in tokens.items()}, weights)
    before = pool["state"].clone()
    gdn_materialize(
        state=pool["state"],
        src_slots=int32(2, 1),
        dst_slots=int32(4, 3),
        k_cache=pool["k_ring"],
        u_cache=pool["u_ring"],
        g_cache=pool["g_ring"],
        cache_base=int32(base, 0),
        count=int32(count, 3),
        active_request_indices=int32(0, -1),
        num_active=int32(1),
    )
    torch.testing.assert_close(pool["state"][4], expected, atol=1e-4, rtol=1e-4)
    if count == 0:
        assert torch.equal(pool["state"][4], before[2])
    untouched = [0, 1, 2, 3, 5]
    assert torch.equal(pool["state"][untouched], before[untouched])


@pytest.mark.parametrize(
    "skipped", [{"src": -1}, {"dst": -1}, {"count": -1}, {"count": 17}, {"active": -1}, {"num_active": 0}]
)
def test_gdn_materialization_skips_what_is_inactive(skipped: dict[str, int]) -> None:
    pool = gdn_pool(4)
    before = pool["state"].clone()
    request = {"src": 2, "dst": 4, "count": 3, "active": 0, "num_active": 1} | skipped
    gdn_materialize(
        state=pool["state"],
        src_slots=int32(request["src"]),
        dst_slots=int32(request["dst"]),
        k_cache=pool["k_ring"],
        u_cache=pool["u_ring"],
        g_cache=pool["g_ring"],
        cache_base=int32(0),
        count=int32(request["count"]),
        active_request_indices=int32(request["active"]),
        num_active=int32(request["num_active"]),
    )
    assert torch.equal(pool["state"], before)


HEADS, GROUPS, DIM, STATE = 4, 2, 6, 5


def mamba2_pool(width: int) -> dict[str, torch.Tensor]:
    ring = 16 + width
    return {
        "state": torch.randn(6, HEADS, DIM, STATE),
        "x_ring": torch.full((6, HEADS, ring, DIM), float("nan")),
        "dt_ring": torch.full((6, HEADS, ring), float("nan")),
        "b_ring": torch.full((6, GROUPS, ring, STATE), float("nan")),
    }


def mamba2_tokens(batch: int, width: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(batch, width, HEADS, DIM),
        "dt": torch.randn(batch, width, HEADS),
        "b": torch.randn(batch, width, GROUPS, STATE),
        "c": torch.randn(batch, width, GROUPS, STATE),
    }


def mamba2_weights() -> dict[str, torch.Tensor]:
    return {"a": -torch.rand(HEADS), "d": torch.randn(HEADS), "dt_bias": torch.randn(HEADS)}


def mamba2_step(state: torch.Tensor, token: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]):
    dt = F.softplus(token["dt"] + weights["dt_bias"])
    b, c = (token[name].repeat_interleave(HEADS // GROUPS, 0) for name in ("b", "c"))
    state = state * (weights["a"] * dt).exp()[:, None, None]
    state = state + (dt[:, None] * token["x"])[:, :, None] * b[:, None]
    return state, (state * c[:, None]).sum(-1) + weights["d"][:, None] * token["x"]


@pytest.mark.parametrize("width", [1, 4])
def test_mamba2_ring_decode_is_the_sequential_recurrence(width: int) -> None:
    torch.manual_seed(width)
    weights, pool = mamba2_weights(), mamba2_pool(width)
    ring_start, committed = torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    slots = int32(3, 0, 5)
    window = ReplayWindow(16 + width, 16, width)
    truth = {slot: pool["state"][slot].clone() for slot in (3, 5)}
    padding = {name: x[0].clone() for name, x in pool.items()}
    flushes = 0
    for _ in range(60):
        tokens = mamba2_tokens(3, width)
        accepted = torch.randint(1, width + 1, (3,), dtype=torch.int32)
        flushes += int(window.flushes(committed[[3, 5]]).sum())
        out = mamba2_decode(**tokens, **weights, **pool, slots=slots, ring_start=ring_start, committed=committed)
        for row, slot in ((0, 3), (2, 5)):
            state = truth[slot]
            for t in range(width):
                state, expected = mamba2_step(state, {n: x[row, t] for n, x in tokens.items()}, weights)
                torch.testing.assert_close(out[row, t], expected, atol=2e-4, rtol=2e-4)
                if t == int(accepted[row]) - 1:
                    truth[slot] = state
        advance(ring_start, committed, slots, accepted, window)
    assert flushes > 3
    assert all(torch.equal(pool[name][0].nan_to_num(7), padding[name].nan_to_num(7)) for name in pool)
    assert ring_start[0] == committed[0] == 0


@given(count=st.integers(0, 16), start=st.integers(0, 16), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_mamba2_materialization_of_n_entries_is_n_plain_steps(count: int, start: int, seed: int) -> None:
    torch.manual_seed(seed)
    weights, pool = mamba2_weights(), mamba2_pool(1)
    ring_start, committed = torch.full((6,), start, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    checkpoint = pool["state"][2].clone()
    tokens = [mamba2_tokens(1, 1) for _ in range(16)]
    for token in tokens:
        mamba2_decode(**token, **weights, **pool, slots=int32(2), ring_start=ring_start, committed=committed)
        advance(ring_start, committed, int32(2), int32(1), ReplayWindow(17, 16, 1))
    assert torch.equal(pool["state"][2], checkpoint)
    expected = checkpoint
    for token in tokens[:count]:
        expected, _ = mamba2_step(expected, {name: x[0, 0] for name, x in token.items()}, weights)
    mamba2_materialize(
        states=[pool["state"]],
        x_rings=[pool["x_ring"]],
        dt_rings=[pool["dt_ring"]],
        b_rings=[pool["b_ring"]],
        a=[weights["a"]],
        src_slots=int32(1, 2)[None],
        dst_slots=int32(3, 4)[None],
        ring_start=int32(0, start),
        replay_prefix_len=int32(0, count),
        active_request_indices=int32(1, -1),
        max_window=16,
    )
    torch.testing.assert_close(pool["state"][4], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("window", "start", "committed", "accepted", "expected"),
    [
        (ReplayWindow(32, 16, 4), 3, 13, 1, (16, 1)),
        (ReplayWindow(32, 16, 8), 3, 9, 1, (12, 1)),
        (ReplayWindow(32, 16, 4), 30, 13, 4, (11, 4)),
        (ReplayWindow(32, 16, 4), 3, 12, 4, (3, 16)),
        (ReplayWindow(16, 16, 1, absorbs=True), 0, 14, 1, (0, 15)),
        (ReplayWindow(16, 16, 1, absorbs=True), 0, 15, 1, (0, 0)),
        (ReplayWindow(17, 16, 1), 5, 15, 1, (5, 16)),
        (ReplayWindow(17, 16, 1), 5, 16, 1, (4, 1)),
        (ReplayWindow(20, 16, 4), 10, 13, 2, (3, 2)),
    ],
)
def test_tracker_arithmetic(
    window: ReplayWindow, start: int, committed: int, accepted: int, expected: tuple[int, int]
) -> None:
    starts, counts = int32(9, 9, start), int32(9, 9, committed)
    advance(starts, counts, int32(2, 0), int32(accepted, accepted), window)
    assert (starts.tolist(), counts.tolist()) == ([9, 9, expected[0]], [9, 9, expected[1]])


def test_reset_leaves_other_slots_and_padding() -> None:
    starts, counts = int32(4, 5, 6), int32(7, 8, 9)
    reset(starts, counts, int32(2, 0, -1))
    assert (starts.tolist(), counts.tolist()) == ([4, 5, 0], [7, 8, 0])
