"""What the adapters need of the installed vLLM, FlashInfer and CuTe DSL: fails by name when upstream moves."""

import sys

import pytest

from replayssm_orch.actors.flashinfer_monitor import FlashInferMonitor
from replayssm_orch.actors.vllm_adapter import (
    MAMBA2_FLASHINFER,
    SUPPORTED_VLLM,
    CompilationMonitor,
    engine_arguments,
    missing_capabilities,
    require_vllm,
)
from replayssm_orch.configs.errors import CannotRun, ConfigError

FLASHINFER_REPLAYSSM = {"use_replayssm": True, "mamba_backend": "flashinfer"}


@pytest.fixture
def unplanned_kernel(monkeypatch):
    """Compiles a kernel that nobody planned, really, for a GPU that need not be here."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")

    def compile_it() -> None:
        import cutlass
        from cutlass import cute

        @cute.kernel
        def fill(out: cute.Tensor):
            out[cute.arch.thread_idx()[0]] = cutlass.Float32(1.0)

        @cute.jit
        def launch(out: cute.Tensor):
            fill(out).launch(grid=(1, 1, 1), block=(32, 1, 1))

        cute.compile(launch, cute.runtime.make_fake_compact_tensor(cutlass.Float32, (32,)))

    return compile_it


def test_every_extension_point_is_there():
    assert missing_capabilities() == ()


@pytest.mark.parametrize(
    "name",
    [
        "vllm.v1.worker.worker_base.WorkerWrapperBase",
        "vllm.utils.jit_monitor._handle_jit_event",
        "vllm.platforms.interface.Platform.update_block_size_for_backend",
        "vllm.v1.executor.abstract.Executor.get_class",
    ],
)
def test_a_vllm_without_an_extension_point_cannot_run_and_says_which(name, monkeypatch):
    monkeypatch.delattr(name)
    with pytest.raises(CannotRun) as refused:
        require_vllm("cpu")
    assert refused.value.exit_code == 3
    assert name.removeprefix("vllm.v1.executor.abstract.") in str(refused.value)
    assert f"use vLLM {SUPPORTED_VLLM}" in str(refused.value)


def test_a_vllm_without_a_whole_module_cannot_run_and_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.serial_utils", None)
    with pytest.raises(CannotRun, match=r"lacks vllm\.v1\.serial_utils .*; use vLLM"):
        require_vllm("cpu")


def test_optional_arguments_are_left_out_by_name_and_required_ones_refused():
    args, notes = engine_arguments({"max_num_seqs": 4}, {"use_replayssm": True, "no_such_argument": 1})
    assert args == {"max_num_seqs": 4, "use_replayssm": True}
    assert notes == ("engine argument no_such_argument was left out: it is unknown to this vLLM",)
    with pytest.raises(ConfigError, match="no_such_argument"):
        engine_arguments({"no_such_argument": 1}, {})


def test_flashinfer_replayssm_is_asked_for_where_vllm_dispatches_to_it(monkeypatch):
    monkeypatch.setattr(".".join(MAMBA2_FLASHINFER), object(), raising=False)
    assert engine_arguments({}, FLASHINFER_REPLAYSSM) == (FLASHINFER_REPLAYSSM, ())


@pytest.mark.parametrize(
    ("asked", "optional", "given", "left_out"),
    [
        ({}, FLASHINFER_REPLAYSSM, {}, ["mamba_backend", "use_replayssm"]),
        ({"mamba_backend": "triton"}, {"use_replayssm": True}, {"mamba_backend": "triton", "use_replayssm": True}, []),
        ({"use_replayssm": True}, {"mamba_backend": "flashinfer"}, {"use_replayssm": True}, ["mamba_backend"]),
        (FLASHINFER_REPLAYSSM, {}, FLASHINFER_REPLAYSSM, []),
    ],
    ids=["preset", "triton asked for", "replayssm asked for", "both asked for: vLLM's own error"],
)
def test_a_preset_does_not_ask_for_flashinfer_replayssm_where_vllm_refuses_it(
    asked, optional, given, left_out, monkeypatch
):
    monkeypatch.delattr(".".join(MAMBA2_FLASHINFER), raising=False)
    args, notes = engine_arguments(asked, optional)
    assert args == given
    assert [note.split()[2] for note in notes] == left_out
    assert all("no ReplaySSM over FlashInfer" in note for note in notes)


@pytest.mark.parametrize("monitor_type", [CompilationMonitor, FlashInferMonitor])
def test_the_monitor_trips_on_an_unplanned_kernel(monitor_type, unplanned_kernel, monkeypatch):
    from cutlass import cute
    from flashinfer.jit.core import JitSpecNvcc
    from vllm.utils import jit_monitor

    # Both monitors hook for the life of a process: bring everything back for the tests after this one.
    monkeypatch.setattr(cute, "compile", cute.compile)
    monkeypatch.setattr(JitSpecNvcc, "build", JitSpecNvcc.build)
    monkeypatch.setattr(jit_monitor, "_handle_jit_event", jit_monitor._handle_jit_event)
    monkeypatch.setattr(jit_monitor, "_active", False)
    monkeypatch.setattr(jit_monitor, "_cutedsl_hook_installed", False)

    monitor = monitor_type()
    unplanned_kernel()
    monitor.arm()
    assert monitor.take() == ()
    unplanned_kernel()
    (seen,) = monitor.take()
    assert (seen.backend, seen.kernel) == ("CuTeDSL", "launch")
    assert monitor.take() == ()
