"""The layout engine against a real vLLM engine on the CPU: equal layouts, groups and block sizes."""

import pytest
from layouts import ATTENTION, TINY_GDN, TINY_MAMBA2
from vllm_engines import NEMOTRON_H, QWEN3_NEXT, layer_tensors, shut_down, start_engine

from replayssm_orch.actors.cache_geometry import CacheOptions, page_geometry
from replayssm_orch.actors.layout_engine import LayoutEngine
from replayssm_orch.actors.layout_plan import LayoutPlan, stage_layers
from replayssm_orch.actors.reference_kernels import ReferenceKernels
from replayssm_orch.actors.vllm_capabilities import adapt_runner
from replayssm_orch.actors.warmups.run import run_warmups

pytestmark = pytest.mark.vllm

CASES = {
    "gdn-align": (QWEN3_NEXT, TINY_GDN, {}),
    "mamba2-align": (NEMOTRON_H, TINY_MAMBA2, {}),
    "mamba2-none": (NEMOTRON_H, TINY_MAMBA2, {"enable_prefix_caching": False}),
}


@pytest.fixture(scope="module", params=CASES)
def running(request, tmp_path_factory):
    config, shape, options = CASES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        engine, runner = start_engine(tmp_path_factory.mktemp(request.param), config, **options)
        yield shape, runner
        shut_down(engine)


def engine_like(shape, runner) -> LayoutEngine:
    config = runner.vllm_config
    family = "gdn" if shape is TINY_GDN else "mamba2"
    layers = [(name, "attention" if "attn" in name.split(".")[-1] and "linear" not in name else family)
              for name in layer_tensors(runner)]  # fmt: skip
    planned, num_groups = stage_layers(layers)
    plan = LayoutPlan(
        device="cpu",
        layers=planned,
        num_groups=num_groups,
        page=page_geometry(shape, ATTENTION, CacheOptions("cpu", tp=1, replayssm=False)),
        num_blocks=runner.kv_cache_config.num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        max_model_len=512,
        capture_sizes=(1, 2, 4),
        mamba_cache_mode=config.cache_config.mamba_cache_mode,
    )
    return LayoutEngine(plan, ReferenceKernels())


def test_layouts_are_those_of_the_real_engine(running) -> None:
    shape, runner = running
    engine = engine_like(shape, runner)
    ours = {
        layout.layer: [(tensor.dtype, tensor.shape, tensor.stride) for tensor in layout.tensors]
        for layout in engine.layouts()
    }
    assert ours == layer_tensors(runner)


def test_groups_and_block_sizes_are_those_of_the_real_engine(running) -> None:
    shape, runner = running
    engine = engine_like(shape, runner)
    real = runner.kv_cache_config.kv_cache_groups
    assert [group.layer_names for group in engine.kv_cache_config.kv_cache_groups] == [
        tuple(group.layer_names) for group in real
    ]
    assert engine.plan.page.block_size == real[-1].kv_cache_spec.block_size
    assert [group.kv_cache_spec.page_size_bytes for group in real] == [engine.plan.page.page_bytes] * len(real)
    assert engine.plan.mamba_block_size == real[0].kv_cache_spec.block_size


def test_overlaid_groups_start_where_the_real_ones_do(running) -> None:
    """Byte distances between the layers' first tensors."""
    shape, runner = running
    engine = engine_like(shape, runner)
    context = runner.vllm_config.compilation_config.static_forward_context
    ours = [layer.kv_cache[0].data_ptr() for layer in engine.layers.values()]
    theirs = [context[name].kv_cache[0].data_ptr() for name in engine.layers]
    assert [address - ours[0] for address in ours] == [address - theirs[0] for address in theirs]


def test_on_the_cpu_every_warmup_is_skipped_with_a_reason(running) -> None:
    _, runner = running
    outcomes = run_warmups(*adapt_runner(runner))
    assert [outcome.name for outcome in outcomes] == ["lifecycle", "gdn", "materializer", "mamba2-decode"]
    assert {outcome.state for outcome in outcomes} == {"skipped"}
    assert {outcome.reason for outcome in outcomes} == {"no ReplaySSM kernel runs on device cpu"}
