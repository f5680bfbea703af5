"""Rules 2 to 4 on the layout engine with the float32 references, and their order and outcomes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import MINI_GDN, MINI_MAMBA2, layout_engine

from replayssm_orch.actors.layout_engine import CaptureDescriptor, LayoutEngine, layout_capabilities
from replayssm_orch.actors.layout_layers import LayoutGdnLayer
from replayssm_orch.actors.reference_kernels import ReferenceKernels
from replayssm_orch.actors.warmups.capabilities import Unavailable
from replayssm_orch.actors.warmups.decode import decode_batch_sizes
from replayssm_orch.actors.warmups.gdn import warm_gdn
from replayssm_orch.actors.warmups.lifecycle import scratch_block_table, warm_lifecycle
from replayssm_orch.actors.warmups.materializer import layout_signature, warm_materializer
from replayssm_orch.actors.warmups.run import WarmupFailed, run_step, run_warmups


class RecordingKernels(ReferenceKernels):
    """The references, which also write down what was launched."""

    def __init__(self) -> None:
        self.decoded: list[tuple[str, list[int], int]] = []
        self.materialized: list[dict[str, torch.Tensor]] = []

    def gdn_decode(self, layer, inputs, slots):
        self.decoded.append((layer.name, slots.tolist(), inputs.q.shape[1]))
        return super().gdn_decode(layer, inputs, slots)

    def mamba2_decode(self, layer, inputs, slots):
        self.decoded.append((layer.name, slots.tolist(), inputs.x.shape[1]))
        return super().mamba2_decode(layer, inputs, slots)

    def gdn_materialize(self, **tensors):
        self.materialized.append(tensors)
        return ReferenceKernels.gdn_materialize(**tensors)


def recording(shape=MINI_GDN, **fields) -> tuple[LayoutEngine, RecordingKernels]:
    engine = layout_engine(shape, **fields)
    engine.kernels = RecordingKernels()
    return engine, engine.kernels


def sizes(kernels: RecordingKernels) -> list[int]:
    first = kernels.decoded[0][0]
    return [len(slots) for name, slots, _ in kernels.decoded if name == first]


def outcomes(engine: LayoutEngine, **changes) -> dict[str, tuple[str, str | None]]:
    capabilities = replace(layout_capabilities(engine), **changes)
    return {outcome.name: (outcome.state, outcome.reason) for outcome in run_warmups(engine, capabilities)}


# Rule 2


@pytest.mark.parametrize(("committable", "slots"), [(0, 0), (1, 0), (2, 1), (3, 2), (8, 2)])
@pytest.mark.parametrize("mode", ["none", "align"])
def test_lifecycle_uses_at_most_two_committable_slots(committable: int, slots: int, mode: str) -> None:
    engine, kernels = recording(mamba_cache_mode=mode)
    reason = warm_lifecycle(engine, layout_capabilities(engine, committable))
    if slots == 0:
        assert reason == "no committable state slot beside the padding slot"
        assert not kernels.materialized
        return
    assert reason is None
    if mode == "none":
        assert not kernels.materialized
        return
    first_group = engine.kv_cache_config.kv_cache_groups[0].layer_names
    assert len(kernels.materialized) == len(first_group)
    for launch in kernels.materialized:
        assert (launch["src_slots"][0], launch["dst_slots"][0], launch["count"][0]) == (slots, 1, 1)
        assert launch["num_active"].tolist() == [1]
        assert len(launch["count"]) == engine.max_num_reqs


@given(
    fill=st.integers(-(2**31), 2**31 - 1), rows=st.integers(1, 5), columns=st.integers(1, 6), slots=st.integers(1, 2)
)
def test_scratch_table_has_the_strides_of_the_real_one_and_memory_of_its_own(fill, rows, columns, slots) -> None:
    wide = torch.full((rows, columns + 3), fill, dtype=torch.int32)
    table = wide[:, :columns]
    scratch = scratch_block_table(table, slots)
    assert scratch.tolist() == [[1, slots]]
    assert (scratch.stride(), scratch.dtype, scratch.device) == (table.stride(), table.dtype, table.device)
    scratch.fill_(9)
    assert (wide == fill).all()


def test_lifecycle_never_writes_the_real_block_table_and_leaves_no_state() -> None:
    engine, _ = recording(mamba_cache_mode="align")
    for table in engine.block_tables.input_block_tables:
        table.random_(1, 8)
    before = [table.clone() for table in engine.block_tables.input_block_tables]
    assert warm_lifecycle(engine, layout_capabilities(engine)) is None
    assert all(map(torch.equal, engine.block_tables.input_block_tables, before))
    for layer in engine.layers.values():
        assert not any(view[1:3].any() for view in layer.kv_cache)
        assert not layer.trackers.committed.any()


def test_lifecycle_without_replayssm_groups_is_skipped() -> None:
    engine, _ = recording()
    reason = warm_lifecycle(engine, replace(layout_capabilities(engine), is_recurrent=lambda module: False))
    assert reason == "no KV-cache group of this shard holds FlashInfer ReplaySSM layers"


# Rule 3


@pytest.mark.parametrize(("committable", "expected"), [(2, [1]), (3, [1, 2]), (8, [1, 2, 4])])
def test_gdn_runs_the_captured_sizes_that_fit_in_ascending_order(committable: int, expected: list[int]) -> None:
    engine, kernels = recording(capture_sizes=(4, 1, 2, 1))
    assert warm_gdn(engine, layout_capabilities(engine, committable))[0] is None
    assert sizes(kernels) == expected
    assert {slots == list(range(1, len(slots) + 1)) for _, slots, _ in kernels.decoded} == {True}
    assert {name for name, _, _ in kernels.decoded} == set(engine.layers)


@pytest.mark.parametrize("committable", [0, 1])
def test_gdn_without_a_free_slot_names_it(committable: int) -> None:
    engine, kernels = recording()
    with pytest.raises(ValueError, match=f"non-padding state slot, but only {committable} KV-cache blocks"):
        warm_gdn(engine, layout_capabilities(engine, committable))
    assert not kernels.decoded


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"capture_sizes": ()}, [4]),
        ({"capture_sizes": (), "max_num_seqs": 1}, [1]),
        ({"capture_sizes": (1, 2, 4), "max_num_seqs": 1}, [1]),
        ({"capture_sizes": (8, 16)}, [4]),
        ({"capture_sizes": (), "max_num_batched_tokens": 11}, [2]),
    ],
)
def test_gdn_falls_back_to_the_largest_batch(fields: dict, expected: list[int]) -> None:
    engine, kernels = recording(**fields)
    assert warm_gdn(engine, layout_capabilities(engine))[0] is None
    assert sizes(kernels) == expected


def test_gdn_runs_nothing_when_a_step_has_fewer_tokens_than_one_query() -> None:
    engine, kernels = recording(max_num_batched_tokens=3, mamba_cache_mode="align")
    reason, materializer = warm_gdn(engine, layout_capabilities(engine))
    assert (reason, materializer.state) == (None, "done")
    assert not kernels.decoded
    assert len(kernels.materialized[0]["count"]) == 4


@pytest.mark.parametrize(("spec", "width"), [(0, 1), (1, 4), (2, 4), (3, 4), (7, 8)])
def test_gdn_executes_the_width_of_the_kernel(spec: int, width: int) -> None:
    engine, kernels = recording(num_speculative_tokens=spec)
    assert warm_gdn(engine, layout_capabilities(engine))[0] is None
    assert {executed for _, _, executed in kernels.decoded} == {width}


@pytest.mark.parametrize("spec", [4, 5, 6, 8])
def test_gdn_asserts_on_a_query_wider_than_the_kernel_executes(spec: int) -> None:
    engine, _ = recording(num_speculative_tokens=spec)
    with pytest.raises(AssertionError, match=f"a query of {spec + 1} tokens exceeds the executed width 4"):
        warm_gdn(engine, layout_capabilities(engine))


def test_gdn_asserts_that_there_is_a_cuda_graph_manager() -> None:
    engine, _ = recording()
    engine.cudagraph_manager = None
    with pytest.raises(AssertionError, match="CUDA-graph manager"):
        warm_gdn(engine, layout_capabilities(engine))


def test_a_width_without_a_kernel_is_skipped_with_its_reason() -> None:
    engine, kernels = recording(num_speculative_tokens=0, mamba_cache_mode="align")
    states = outcomes(engine, decode_kernel=lambda width: Unavailable(f"no kernel of width {width}"))
    assert states["gdn"] == ("skipped", "no kernel of width 1")
    assert states["materializer"] == ("skipped", "no kernel of width 1")
    assert not kernels.decoded


@given(
    descriptors=st.lists(st.tuples(st.none() | st.integers(-1, 9), st.none() | st.integers(0, 5))),
    query_len=st.integers(1, 5),
    limit=st.integers(0, 9),
)
def test_batch_sizes_are_distinct_ascending_and_within_the_limit(descriptors, query_len, limit) -> None:
    chosen = decode_batch_sizes([CaptureDescriptor(*d) for d in descriptors], query_len, limit)
    fitting = {reqs for reqs, count in descriptors if count == query_len and reqs is not None and 0 < reqs <= limit}
    assert chosen == (tuple(sorted(fitting)) or ((limit,) if limit else ()))


# Rule 4


def test_equal_layouts_launch_once_per_call_and_again_in_a_later_call() -> None:
    engine, kernels = recording(max_num_seqs=3)
    capabilities = layout_capabilities(engine)
    for call in (1, 2):
        launched = warm_materializer(engine, capabilities, capabilities.materialize, 3)
        assert len(launched) == 1
        assert len(kernels.materialized) == call
    launch = kernels.materialized[0]
    for name in ("src_slots", "dst_slots", "count", "active_request_indices"):
        assert launch[name].tolist() == [-1, -1, -1]
        assert launch[name].dtype == torch.int32
    assert launch["cache_base"].tolist() == [0, 0, 0]
    assert launch["num_active"].tolist() == [0]


def test_every_layout_of_a_shard_launches() -> None:
    """A layer whose ring depth differs from the others' is a second signature."""
    engine, kernels = recording()
    other = layout_engine(num_speculative_tokens=0)
    engine.layers["other"] = next(iter(other.layers.values()))
    capabilities = layout_capabilities(engine)
    launched = warm_materializer(engine, capabilities, capabilities.materialize, 2)
    assert len(launched) == len(set(launched)) == len(kernels.materialized) == 2


def test_changed_capacity_is_another_signature() -> None:
    signatures = set()
    for num_blocks in (8, 8, 9):
        layer = next(iter(layout_engine(num_blocks=num_blocks).layers.values()))
        assert isinstance(layer, LayoutGdnLayer)
        signatures.add(layout_signature(layer))
    assert len(signatures) == 2


def test_the_materializer_warmup_changes_no_byte() -> None:
    engine, _ = recording()
    capabilities = layout_capabilities(engine)
    for layer in engine.layers.values():
        for view in layer.kv_cache:
            view.normal_()
    before = [view.clone() for layer in engine.layers.values() for view in layer.kv_cache]
    warm_materializer(engine, capabilities, capabilities.materialize, 4)
    after = [view for layer in engine.layers.values() for view in layer.kv_cache]
    assert all(map(torch.equal, after, before))


# Order and outcomes


@pytest.mark.parametrize(
    ("shape", "fields", "done"),
    [
        (MINI_GDN, {"mamba_cache_mode": "align"}, {"lifecycle", "gdn", "materializer"}),
        (MINI_GDN, {}, {"lifecycle", "gdn"}),
        (MINI_MAMBA2, {"mamba_cache_mode": "align"}, {"lifecycle", "mamba2-decode"}),
        (MINI_MAMBA2, {"num_speculative_tokens": 0}, {"lifecycle", "mamba2-decode"}),
        (MINI_GDN, {"replayssm": False}, set()),
        (MINI_MAMBA2, {"replayssm": False}, set()),
    ],
)
def test_what_applies_is_done_and_the_rest_skipped_with_a_reason(shape, fields: dict, done: set[str]) -> None:
    engine, _ = recording(shape, **fields)
    states = outcomes(engine)
    assert list(states) == ["lifecycle", "gdn", "materializer", "mamba2-decode"]
    assert {name for name, (state, _) in states.items() if state == "done"} == done
    assert all(reason if state == "skipped" else reason is None for state, reason in states.values())
    for layer in engine.layers.values():
        assert not any(view[1:].any() for view in layer.kv_cache)
        assert not layer.trackers.committed.any()


def test_a_missing_materializer_is_skipped_while_gdn_is_done() -> None:
    engine, kernels = recording(mamba_cache_mode="align")
    states = outcomes(engine, materialize=Unavailable("no gdn_prefix_materialize"))
    assert states["gdn"] == ("done", None)
    assert states["materializer"] == ("skipped", "no gdn_prefix_materialize")
    assert kernels.decoded


def test_a_failure_carries_the_name_of_its_warmup() -> None:
    engine, _ = recording()
    with pytest.raises(WarmupFailed, match=r"warmup 'gdn' failed: ValueError: .*non-padding") as failure:
        run_step("gdn", engine, layout_capabilities(engine, 1))
    assert failure.value.warmup == "gdn"
    assert isinstance(failure.value.__cause__, ValueError)


@given(committable=st.integers(2, 8), shape=st.sampled_from([MINI_GDN, MINI_MAMBA2]), spec=st.sampled_from([0, 3]))
@settings(max_examples=15, deadline=None)
def test_warmups_never_touch_padding_or_what_is_not_committed(committable: int, shape, spec: int) -> None:
    engine = layout_engine(shape, num_speculative_tokens=spec, mamba_cache_mode="align")
    for layer in engine.layers.values():
        for view in layer.kv_cache:
            view.normal_()
    rows = [0, *range(committable, 8)]
    before = [view[rows].clone() for layer in engine.layers.values() for view in layer.kv_cache]
    run_warmups(engine, layout_capabilities(engine, committable))
    after = [view[rows] for layer in engine.layers.values() for view in layer.kv_cache]
    assert all(map(torch.equal, after, before))
