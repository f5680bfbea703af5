"""Rule 1: the state guard."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import MINI_GDN, MINI_MAMBA2, layout_engine

from replayssm_orch.actors.layout_engine import LayoutEngine, layout_capabilities
from replayssm_orch.actors.warmups.guard import guarded_slots


def backing_bytes(engine: LayoutEngine) -> torch.Tensor:
    """The whole pool, `[regions, num_blocks, page bytes]`, as one byte view."""
    view = next(iter(engine.layers.values())).kv_cache[0]
    pool = torch.empty(0, dtype=torch.int8).set_(view.untyped_storage())
    return pool.view(-1, engine.plan.num_blocks, engine.plan.page.page_bytes)


def scramble(engine: LayoutEngine) -> None:
    backing_bytes(engine).random_(-128, 128)
    for layer in engine.layers.values():
        layer.trackers.ring_start.random_(1, 32)
        layer.trackers.committed.random_(1, 16)


def content_bytes(engine: LayoutEngine) -> int:
    return sum(tensor.num_bytes for tensor in engine.plan.page.tensors)


@given(
    num_blocks=st.integers(2, 12), data=st.data(), shape=st.sampled_from([MINI_GDN, MINI_MAMBA2]), fails=st.booleans()
)
@settings(max_examples=30, deadline=None)
def test_only_the_guarded_rows_are_cleared(num_blocks, data, shape, fails) -> None:
    num_slots = data.draw(st.integers(1, num_blocks - 1))
    engine = layout_engine(shape, num_blocks=num_blocks, max_num_seqs=num_blocks)
    scramble(engine)
    before = backing_bytes(engine).clone()
    try:
        with guarded_slots(engine, layout_capabilities(engine), num_slots):
            for layer in engine.layers.values():
                for view in layer.kv_cache:
                    view[1 : num_slots + 1].fill_(3)
            if fails:
                raise RuntimeError("inside")
    except RuntimeError:
        assert fails
    after = backing_bytes(engine)
    content = content_bytes(engine)
    assert torch.equal(after[:, 0], before[:, 0])
    assert torch.equal(after[:, num_slots + 1 :], before[:, num_slots + 1 :])
    assert torch.equal(after[..., content:], before[..., content:])
    assert not after[:, 1 : num_slots + 1, :content].any()
    for layer in engine.layers.values():
        assert not layer.trackers.ring_start.any()
        assert not layer.trackers.committed.any()


def test_the_exception_comes_through() -> None:
    engine = layout_engine()
    with pytest.raises(RuntimeError, match="inside"), guarded_slots(engine, layout_capabilities(engine), 2):
        raise RuntimeError("inside")


@given(
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    num_blocks=st.integers(2, 9),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_overlaid_groups_of_different_widths_are_both_cleared(widths, num_blocks, data) -> None:
    """Views at one address with one slot stride: no byte outside the union of their guarded rows changes."""
    num_slots = data.draw(st.integers(1, num_blocks - 1))
    page = max(widths) + data.draw(st.integers(0, 8))
    pool = torch.randint(-128, 128, (num_blocks, page), dtype=torch.int8)
    before = pool.clone()
    layers = [
        SimpleNamespace(
            use_flashinfer_replayssm=True,
            kv_cache=(pool[:, :width], torch.empty(0)),
            _replayssm_ring_start=torch.ones(num_blocks, dtype=torch.int32),
            _replayssm_prev_num_accepted=torch.ones(num_blocks, dtype=torch.int32),
        )
        for width in widths
    ]
    runner = SimpleNamespace(get_model=lambda: SimpleNamespace(modules=lambda: layers))
    capabilities = replace(layout_capabilities(layout_engine()), is_recurrent=lambda module: True)
    with guarded_slots(runner, capabilities, num_slots, rebuild_block_tables=False):
        pool[1 : num_slots + 1].fill_(5)
        pool[1 : num_slots + 1, max(widths) :] = before[1 : num_slots + 1, max(widths) :]
    assert not pool[1 : num_slots + 1, : max(widths)].any()
    pool[1 : num_slots + 1, : max(widths)] = before[1 : num_slots + 1, : max(widths)]
    assert torch.equal(pool, before)
    assert not any(layer._replayssm_ring_start.any() for layer in layers)


def test_block_tables_are_rebuilt_only_when_asked() -> None:
    engine = layout_engine(max_num_seqs=3)
    for rebuild, left in ((False, [7, 7, 7]), (True, [0, 0, 7])):
        for table in engine.block_tables.input_block_tables:
            table.fill_(7)
        with guarded_slots(engine, layout_capabilities(engine), 2, rebuild_block_tables=rebuild):
            pass
        assert [table[:, 0].tolist() for table in engine.block_tables.input_block_tables] == [left] * 4


def test_layers_without_replayssm_are_not_touched() -> None:
    engine = layout_engine(replayssm=False)
    backing_bytes(engine).random_(-128, 128)
    before = backing_bytes(engine).clone()
    with guarded_slots(engine, layout_capabilities(engine), 3):
        pass
    assert torch.equal(backing_bytes(engine), before)
