"""Serving-shaped traffic on the layout engine."""

import pytest
import torch
from layouts import MINI_GDN, MINI_MAMBA2, layout_engine, layout_plan

from replayssm_orch.actors.layout_engine import LayoutEngine
from replayssm_orch.actors.reference_kernels import ReferenceKernels
from replayssm_orch.actors.serving import serve
from replayssm_orch.actors.warmups.capabilities import Unavailable


@pytest.mark.parametrize("shape", [MINI_GDN, MINI_MAMBA2])
@pytest.mark.parametrize("spec", [0, 3])
def test_traffic_has_flushes_moves_publications_and_only_captured_sizes(shape, spec: int) -> None:
    engine = layout_engine(shape, num_speculative_tokens=spec, mamba_cache_mode="align", num_blocks=32)
    padding = [view[0].clone() for layer in engine.layers.values() for view in layer.kv_cache]
    traffic = serve(engine, 100, seed=3)
    assert traffic.decode_steps == len(traffic.batch_sizes) == 100
    assert set(traffic.batch_sizes) == {1, 2, 4}
    assert traffic.flushes > 5
    assert traffic.moves > 0
    assert traffic.publications > 0
    assert traffic.resets > 4
    after = [view[0] for layer in engine.layers.values() for view in layer.kv_cache]
    assert all(map(torch.equal, after, padding))
    assert all(view.isfinite().all() for layer in engine.layers.values() for view in layer.kv_cache)


def test_without_align_nothing_moves() -> None:
    traffic = serve(layout_engine(num_blocks=32), 60)
    assert (traffic.moves, traffic.publications) == (0, 0)
    assert traffic.flushes > 5


def test_the_same_seed_gives_the_same_traffic() -> None:
    assert serve(layout_engine(num_blocks=32), 20, seed=5) == serve(layout_engine(num_blocks=32), 20, seed=5)


def test_fewer_blocks_make_smaller_batches() -> None:
    traffic = serve(layout_engine(num_blocks=8), 20)
    assert set(traffic.batch_sizes) == {1, 2}


def test_no_fitting_capture_size_is_skipped_with_the_reason() -> None:
    traffic = serve(layout_engine(num_blocks=8, capture_sizes=(4,)), 1)
    assert traffic.decode_steps == 0
    assert "no capture size of (4,) fits 2 requests" in str(traffic.skipped)


class NoDecode(ReferenceKernels):
    """As FlashInfer on Hopper at width 1: the kernel is not there."""

    def decode_unavailable(self, layer, width: int) -> Unavailable:
        return Unavailable(f"no kernel of width {width}")

    def gdn_decode(self, *args) -> None:
        raise AssertionError("launched a kernel that is not there")


def test_a_decode_kernel_that_is_not_there_is_not_launched() -> None:
    engine = LayoutEngine(layout_plan(MINI_GDN, num_speculative_tokens=0, num_blocks=32), NoDecode())
    traffic = serve(engine, 10)
    assert (traffic.decode_steps, traffic.skipped) == (0, "no kernel of width 1")
