"""The warmups on the real model runner of a vLLM with FlashInfer ReplaySSM (0.33), and the layouts that it allocates.

Run: python -m pytest -m gpu tests/actors/test_gpu_vllm.py   (REPLAYSSM_GPU_RESULTS=FILE collects one JSON line a case)
"""

import pytest
import torch
from gpu_results import measured
from layouts import ATTENTION, TINY_MAMBA2
from vllm_engines import NEMOTRON_H, layer_tensors, shut_down, start_engine

from replayssm_orch.actors.cache_geometry import CacheOptions, kv_cache_groups, page_geometry
from replayssm_orch.actors.layout_engine import LayoutEngine
from replayssm_orch.actors.layout_kernels import kernels_for
from replayssm_orch.actors.layout_plan import LayoutPlan, stage_layers
from replayssm_orch.actors.vllm_capabilities import adapt_runner
from replayssm_orch.actors.warmups.guard import guarded_slots, layer_trackers, replayssm_layers
from replayssm_orch.actors.warmups.run import run_warmups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine, runner = start_engine(
            tmp_path_factory.mktemp("mamba2"),
            NEMOTRON_H,
            use_replayssm=True,
            mamba_backend="flashinfer",
            attention_backend="TRITON_ATTN",
            enable_prefix_caching=False,
        )
        yield runner
        shut_down(engine)


def test_the_decode_warmup_is_done_on_the_real_runner(runner) -> None:
    with measured("vllm mamba2 warmups") as numbers:
        outcomes = {outcome.name: outcome for outcome in run_warmups(*adapt_runner(runner))}
        numbers |= {name: outcome.state for name, outcome in outcomes.items()}
        assert outcomes["mamba2-decode"].state == "done", outcomes["mamba2-decode"].reason
        assert all(outcome.reason for outcome in outcomes.values() if outcome.state == "skipped")


@torch.inference_mode()
def test_the_guard_holds_around_a_real_decode_step(runner) -> None:
    view, capabilities = adapt_runner(runner)
    layers = replayssm_layers(view, capabilities)
    assert len(layers) == 4
    assert len(capabilities.trackers) == 3
    num_slots = 2
    with measured("vllm guard", layers=len(layers), slots=num_slots) as numbers:
        for layer in layers:
            for cache in layer.kv_cache:
                cache.normal_()
        kept = [0, *range(num_slots + 1, layers[0].kv_cache[0].shape[0])]
        before = [cache[kept].clone() for layer in layers for cache in layer.kv_cache]
        with guarded_slots(view, capabilities, num_slots):
            view._dummy_run(
                num_tokens=num_slots * view.decode_query_len,
                uniform_decode=True,
                skip_eplb=True,
                is_profile=True,
                randomize_inputs=True,
                valid_dummy_state_slots=True,
            )
            touched = any(bool(tracker.any()) for layer in layers for tracker in layer_trackers(layer, capabilities))
        numbers["trackers_moved_inside"] = touched
        assert touched, "the dummy run did not reach the decode kernel"
        caches = [cache for layer in layers for cache in layer.kv_cache]
        assert all(torch.equal(cache[kept], old) for cache, old in zip(caches, before, strict=True))
        assert not any(cache[1 : num_slots + 1].any() for cache in caches)
        assert not any(tracker.any() for layer in layers for tracker in layer_trackers(layer, capabilities))


def test_recurrent_layouts_are_those_of_the_layout_engine(runner) -> None:
    names = sorted(layer_tensors(runner), key=lambda name: int(name.split(".")[2]))
    layers = [(name, "attention" if "attn" in name else "mamba2") for name in names]
    planned, num_groups = stage_layers(layers)
    plan = LayoutPlan(
        device="cuda",
        layers=planned,
        num_groups=num_groups,
        page=page_geometry(TINY_MAMBA2, ATTENTION, CacheOptions("cuda", tp=1, replayssm=True)),
        num_blocks=runner.kv_cache_config.num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        max_model_len=512,
        capture_sizes=(1, 2, 4),
    )
    ours = {
        layout.layer: [(tensor.dtype, tensor.shape, tensor.stride) for tensor in layout.tensors]
        for layout in LayoutEngine(plan, kernels_for("cuda")).layouts()
        if layout.family == "mamba2"
    }
    theirs = {name: tensors for name, tensors in layer_tensors(runner).items() if name in ours}
    with measured("vllm layout parity", num_blocks=plan.num_blocks, page_bytes=plan.page.page_bytes):
        assert ours == theirs
        assert [group.layer_names for group in runner.kv_cache_config.kv_cache_groups] == [
            list(names) for names in kv_cache_groups(layers)
        ]
