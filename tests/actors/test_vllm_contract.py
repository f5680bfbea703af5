"""What the adapters need of the installed vLLM, FlashInfer and CuTe DSL: fails by name when upstream moves."""

import pytest

from replayssm_orch.actors.flashinfer_monitor import FlashInferMonitor
from replayssm_orch.actors.vllm_adapter import CompilationMonitor, engine_arguments, missing_capabilities
from replayssm_orch.configs.errors import ConfigError


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


def test_optional_arguments_are_dropped_by_name_and_required_ones_refused():
    args, dropped = engine_arguments({"max_num_seqs": 4}, {"use_replayssm": True, "no_such_argument": 1})
    assert args == {"max_num_seqs": 4, "use_replayssm": True}
    assert dropped == ("no_such_argument",)
    with pytest.raises(ConfigError, match="no_such_argument"):
        engine_arguments({"no_such_argument": 1}, {})


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
