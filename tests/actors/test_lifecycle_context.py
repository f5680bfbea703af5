"""The layout engine's own lifecycle: resets, moves, tracker advance and prefix publication."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import MINI_GDN, MINI_MAMBA2, layout_engine

from replayssm_orch.actors.layout_engine import LayoutEngine
from replayssm_orch.actors.layout_inputs import gdn_inputs, mamba2_inputs
from replayssm_orch.actors.lifecycle_context import ReplayLifecycle

GROUP = 0


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def lifecycle(engine: LayoutEngine, table: torch.Tensor) -> ReplayLifecycle:
    spec = engine.kv_cache_config.kv_cache_groups[GROUP].kv_cache_spec
    layers = engine.recurrent_groups()[GROUP]
    return ReplayLifecycle.create([(layers, spec, table)], engine.max_num_reqs, kernels=engine.kernels)


def group_layer(engine: LayoutEngine):
    return engine.recurrent_groups()[GROUP][0]


def step(engine: LayoutEngine, context: ReplayLifecycle, slot: int, **changes) -> None:
    """One decode step of the request in row 0, column 0 (or `live_col`), then its postprocess."""
    settings_ = {"accepted": 1, "computed": 5, "prefilling": False, "query_len": None, "live_col": 0} | changes
    engine.decode_step({GROUP: int32(slot)} | {g: int32(0) for g in engine.recurrent_groups() if g != GROUP})
    query_len = engine.decode_query_len if settings_["query_len"] is None else settings_["query_len"]
    context.postprocess(
        idx_mapping=torch.tensor([0]),
        query_metadata=int32(0, query_len),
        query_metadata_is_cumulative=True,
        num_computed_tokens=int32(settings_["computed"]),
        num_computed_is_post_step=True,
        num_accepted_tokens=int32(settings_["accepted"]),
        is_prefilling=torch.tensor([settings_["prefilling"]]),
        live_cols=int32(settings_["live_col"]),
        num_reqs=1,
    )


def cursor(engine: LayoutEngine, slot: int) -> tuple[int, int]:
    trackers = group_layer(engine).trackers
    return int(trackers.ring_start[slot]), int(trackers.committed[slot])


def test_a_new_request_starts_with_trackers_at_zero_and_leaves_the_state_alone() -> None:
    engine = layout_engine(mamba_cache_mode="align")
    trackers = group_layer(engine).trackers
    trackers.ring_start.fill_(9)
    trackers.committed.fill_(5)
    context = lifecycle(engine, int32(1, 2, 0)[None])
    context.reset_new_slots(idx_mapping=torch.tensor([0]), src_cols=int32(-1), dst_cols=int32(1), num_reqs=1)
    assert cursor(engine, 2) == (0, 0)
    assert cursor(engine, 1) == cursor(engine, 0) == (9, 5)


@pytest.mark.parametrize("shape", [MINI_GDN, MINI_MAMBA2])
def test_moving_a_live_request_carries_state_rings_and_both_trackers(shape) -> None:
    engine = layout_engine(shape, mamba_cache_mode="align")
    layers = engine.recurrent_groups()[GROUP]
    for layer in layers:
        for view in layer.kv_cache:
            view.normal_()
    trackers = layers[0].trackers
    trackers.ring_start[3], trackers.committed[3] = 7, 4
    moved = [view[3].clone() for layer in layers for view in layer.kv_cache]
    others = [view[[0, 1, 2, 4, 6, 7]].clone() for layer in layers for view in layer.kv_cache]
    context = lifecycle(engine, int32(3, 5)[None])
    context.reset_new_slots(idx_mapping=torch.tensor([0]), src_cols=int32(0), dst_cols=int32(1), num_reqs=1)
    assert all(map(torch.equal, (view[5] for layer in layers for view in layer.kv_cache), moved))
    assert all(map(torch.equal, (view[[0, 1, 2, 4, 6, 7]] for layer in layers for view in layer.kv_cache), others))
    assert cursor(engine, 5) == (7, 4)


def test_a_prefill_resets_and_an_idle_request_is_left_alone() -> None:
    engine = layout_engine()
    trackers = group_layer(engine).trackers
    context = lifecycle(engine, int32(2)[None])
    trackers.ring_start[2], trackers.committed[2] = 7, 4
    step(engine, context, 2, query_len=0)
    assert cursor(engine, 2) == (7, 4)
    step(engine, context, 2, prefilling=True, query_len=40)
    assert cursor(engine, 2) == (0, 0)


@pytest.mark.parametrize(
    ("spec", "before", "accepted", "after"),
    [(3, (3, 13), 1, (16, 1)), (7, (3, 9), 1, (12, 1)), (3, (3, 8), 3, (3, 11)), (0, (0, 14), 1, (0, 15)),
     (0, (0, 15), 1, (0, 0))],
)  # fmt: skip
def test_postprocess_advances_the_trackers(spec: int, before, accepted: int, after) -> None:
    engine = layout_engine(num_speculative_tokens=spec)
    trackers = group_layer(engine).trackers
    trackers.ring_start[2], trackers.committed[2] = before
    step(engine, lifecycle(engine, int32(2)[None]), 2, accepted=accepted)
    assert cursor(engine, 2) == after
    assert cursor(engine, 0) == cursor(engine, 1) == (0, 0)


def decode_across_the_boundary(shape, spec: int, accepted: list[int], overshoot: int) -> LayoutEngine:
    """Decode a request in slot 4 until its last step ends `overshoot` tokens beyond block 0, whose slot is 3."""
    torch.manual_seed(1)
    engine = layout_engine(shape, num_speculative_tokens=spec, mamba_cache_mode="align")
    layer = group_layer(engine)
    layer.kv_cache[1][4].normal_()
    layer.trackers.ring_start[3], layer.trackers.committed[3] = 6, 6
    context = lifecycle(engine, int32(3, 4)[None])
    computed = engine.plan.page.block_size + overshoot - sum(accepted)
    for count in accepted:
        assert not layer.kv_cache[1][3].any()
        computed += count
        step(engine, context, 4, accepted=count, computed=computed, live_col=1)
    return engine


@given(
    shape=st.sampled_from([MINI_GDN, MINI_MAMBA2]),
    spec=st.sampled_from([0, 3]),
    accepted=st.lists(st.integers(1, 4), min_size=1, max_size=14),
    overshoot=st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)
def test_what_is_published_stops_at_the_boundary(shape, spec, accepted, overshoot) -> None:
    """Tokens accepted beyond the boundary do not show in the published state, and its slot inherits no cursor."""
    accepted = [min(count, spec + 1) for count in accepted]
    overshoot = min(overshoot, accepted[-1] - 1)
    engine = decode_across_the_boundary(shape, spec, accepted, overshoot)
    exact = decode_across_the_boundary(shape, spec, [*accepted[:-1], accepted[-1] - overshoot], 0)
    published = group_layer(engine).kv_cache[1][3]
    assert published.any()
    assert torch.equal(published, group_layer(exact).kv_cache[1][3])
    assert cursor(engine, 3) == (0, 0)


@pytest.mark.parametrize("shape", [MINI_GDN, MINI_MAMBA2])
def test_the_published_state_decodes_like_the_live_one(shape) -> None:
    """Exactly at the boundary, the next tokens give the same outputs from the published slot as from the live one."""
    engine = decode_across_the_boundary(shape, 3, [4, 3, 4, 2], 0)
    layer = group_layer(engine)
    make = gdn_inputs if shape is MINI_GDN else mamba2_inputs
    decode = engine.kernels.gdn_decode if shape is MINI_GDN else engine.kernels.mamba2_decode
    inputs = make(layer, 1, 4, randomize=True)
    published, live = decode(layer, inputs, int32(3)), decode(layer, inputs, int32(4))
    # The published state is rounded to the state dtype, the live one is replayed from its rings.
    torch.testing.assert_close(published, live, atol=2e-2, rtol=2e-2)
    assert live.abs().max() > 0.1


def test_nothing_is_published_inside_a_block_or_without_align() -> None:
    for mode, offset in (("align", 1), ("align", -1), ("none", 0)):
        engine = layout_engine(num_speculative_tokens=0, mamba_cache_mode=mode)
        layer = group_layer(engine)
        layer.kv_cache[1][4].normal_()
        before = layer.kv_cache[1].clone()
        context = lifecycle(engine, int32(3, 4)[None])
        step(engine, context, 4, computed=engine.plan.page.block_size + offset, live_col=1)
        assert torch.equal(layer.kv_cache[1], before)


def test_a_request_beyond_the_boundary_is_never_published_onto_itself() -> None:
    engine = layout_engine(mamba_cache_mode="align")
    layer = group_layer(engine)
    layer.kv_cache[1][4].normal_()
    before = layer.kv_cache[1].clone()
    context = lifecycle(engine, int32(4, 0)[None])
    step(engine, context, 4, accepted=3, computed=engine.plan.page.block_size + 1, live_col=0)
    assert torch.equal(layer.kv_cache[1], before)
    assert cursor(engine, 4) == (0, 3)
