"""Our calls through FlashInfer's own wrappers, with no GPU: accepted, and compiled as often as expected."""

from dataclasses import replace

import pytest
import torch
from cuda_stand_in import flashinfer_without_a_gpu
from layouts import TINY_GDN, TINY_MAMBA2, layout_plan

from replayssm_orch.actors.flashinfer_adapter import FlashInferKernels, flashinfer_kernels
from replayssm_orch.actors.layout_engine import LayoutEngine, layout_capabilities
from replayssm_orch.actors.layout_kernels import kernels_for
from replayssm_orch.actors.layout_layers import LayoutGdnLayer, LayoutMamba2Layer
from replayssm_orch.actors.reference_kernels import ReferenceKernels
from replayssm_orch.actors.serving import serve
from replayssm_orch.actors.warmups.capabilities import Unavailable
from replayssm_orch.actors.warmups.run import run_warmups

pytest.importorskip("flashinfer.gdn_kernels.gdn_prefix_materialize")


def engine_on(kernels: FlashInferKernels, shape, **fields) -> LayoutEngine:
    return LayoutEngine(layout_plan(shape, device="cuda", mamba_cache_mode="align", **fields), kernels)


def states(engine: LayoutEngine) -> dict[str, tuple[str, str | None]]:
    return {
        outcome.name: (outcome.state, outcome.reason) for outcome in run_warmups(engine, layout_capabilities(engine))
    }


@pytest.mark.parametrize("spec", [3, 7])
@pytest.mark.parametrize("tp", [1, 4])
def test_gdn_compiles_once_a_size_and_then_nothing_while_serving(spec: int, tp: int) -> None:
    with flashinfer_without_a_gpu() as (kernels, compiled):
        engine = engine_on(kernels, TINY_GDN, num_speculative_tokens=spec, tp=tp, num_blocks=25)
        assert states(engine)["gdn"] == states(engine)["materializer"] == ("done", None)
        assert sorted(compiled.kernels) == ["Decode"] * 3 + ["Materialize"]
        traffic = serve(engine, 40)
        assert set(traffic.batch_sizes) == {1, 2, 4}
        assert traffic.publications > 0
        assert compiled.launches.count("Decode") >= 40 * len(engine.layers)
        assert len(compiled.kernels) == 4


def test_padding_reaches_the_gdn_kernel_as_a_negative_slot() -> None:
    with flashinfer_without_a_gpu() as (kernels, compiled):
        engine = engine_on(kernels, TINY_GDN)
        slots = torch.tensor([3, 0, 1], dtype=torch.int32)
        engine.decode_step(dict.fromkeys(engine.recurrent_groups(), slots))
        # The ninth tensor of the launch is initial_state_indices.
        assert compiled.last_tensors[8].tolist() == [3, -1, 1]


def test_another_capacity_compiles_again() -> None:
    with flashinfer_without_a_gpu() as (kernels, compiled):
        for num_blocks in (8, 8, 9):
            states(engine_on(kernels, TINY_GDN, num_blocks=num_blocks))
        assert sorted(compiled.kernels) == ["Decode"] * 6 + ["Materialize"] * 2


def test_width_one_is_skipped_by_name() -> None:
    with flashinfer_without_a_gpu() as (kernels, compiled):
        outcome = states(engine_on(kernels, TINY_GDN, num_speculative_tokens=0))
        assert outcome["gdn"][0] == "skipped"
        assert "executes widths (4, 8), not 1" in outcome["gdn"][1]
        assert "Decode" not in compiled.kernels


@pytest.mark.parametrize("spec", [0, 3])
@pytest.mark.parametrize("tp", [1, 4])
def test_mamba2_arguments_are_accepted_with_one_set_of_jit_keys(spec: int, tp: int) -> None:
    with flashinfer_without_a_gpu() as (kernels, compiled):
        engine = engine_on(kernels, TINY_MAMBA2, num_speculative_tokens=spec, tp=tp, num_blocks=25)
        assert states(engine)["mamba2-decode"] == ("done", None)
        serve(engine, 20)
        keys = {tuple(jit.items()) for _, jit in compiled.mamba2_decodes}
        assert len(keys) == 1
        jit = dict(keys.pop())
        assert (jit["dim"], jit["dstate"], jit["npredicted"], jit["max_window"]) == (64, 128, spec + 1, 16)
        assert (jit["state_dtype"], jit["input_dtype"], jit["matrixA_dtype"]) == (
            torch.float32,
            torch.bfloat16,
            torch.float32,
        )
        assert compiled.mamba2_materializations


@pytest.mark.parametrize("tp", [1, 4])
def test_mamba2_strides_are_those_that_the_kernel_checks(tp: int) -> None:
    """The stride rules of FlashInfer's checkpointing_ssu.cu, which only the compiled module checks."""
    with flashinfer_without_a_gpu() as (kernels, compiled):
        states(engine_on(kernels, TINY_MAMBA2, tp=tp))
        args, _ = compiled.mamba2_decodes[0]
        state, x, dt, a, b, c, out, x_ring, b_ring, dt_ring, ring_start, committed, d, _, dt_bias = args[:15]
        heads, dim, d_state = state.shape[1:]
        assert state.stride()[1:] == (dim * d_state, d_state, 1)
        assert (x.stride(3), x.stride(2), out.stride(3), out.stride(2)) == (1, dim, 1, dim)
        assert (dt.stride(2), dt.stride(3)) == (1, 0)
        assert a.stride() == (1, 0, 0)
        assert (b.stride(3), b.stride(2), c.stride(3), c.stride(2)) == (1, d_state, 1, d_state)
        assert (x_ring.stride(3), x_ring.stride(2), b_ring.stride(3), b_ring.stride(2)) == (1, dim, 1, d_state)
        assert dt_ring.stride(2) == 1
        assert d.stride() == dt_bias.stride() == (1, 0)
        assert ring_start.shape == committed.shape == state.shape[:1]
        assert heads == 8 // tp


@pytest.mark.parametrize(
    ("field", "shape", "skipped"),
    [
        ("gdn_decode_module", TINY_GDN, {"gdn", "materializer", "mamba2-decode"}),
        ("gdn_materialize_module", TINY_GDN, {"lifecycle", "materializer", "mamba2-decode"}),
        ("mamba2_decode_module", TINY_MAMBA2, {"gdn", "materializer", "mamba2-decode"}),
        ("mamba2_materialize_module", TINY_MAMBA2, {"lifecycle", "gdn", "materializer"}),
    ],
)
def test_a_missing_module_skips_what_needs_it(field: str, shape, skipped: set[str]) -> None:
    with flashinfer_without_a_gpu() as (kernels, _):
        outcome = states(engine_on(replace(kernels, **{field: Unavailable("not there")}), shape))
        assert {name for name, (state, _) in outcome.items() if state == "skipped"} == skipped
        reasons = [reason for state, reason in outcome.values() if state == "skipped"]
        assert "not there" in reasons


def test_without_a_cuda_device_there_are_no_kernels() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    missing = Unavailable("FlashInfer's kernels need a CUDA device")
    assert flashinfer_kernels().decode_unavailable(LayoutGdnLayer, 4) == missing
    assert flashinfer_kernels().materializer_unavailable(LayoutMamba2Layer) == missing


def test_a_cpu_engine_gets_the_references() -> None:
    assert isinstance(kernels_for("cpu"), ReferenceKernels)
    assert isinstance(kernels_for("cuda"), FlashInferKernels)


def test_questions_about_other_families_are_kept_apart() -> None:
    kernels = FlashInferKernels(*(Unavailable(name) for name in ("decode", "materialize", "ssu", "replay")))
    assert kernels.decode_unavailable(LayoutGdnLayer, 4) == Unavailable("decode")
    assert kernels.decode_unavailable(LayoutMamba2Layer, 4) == Unavailable("ssu")
    assert kernels.materializer_unavailable(LayoutGdnLayer) == Unavailable("materialize")
    assert kernels.materializer_unavailable(LayoutMamba2Layer) == Unavailable("replay")
