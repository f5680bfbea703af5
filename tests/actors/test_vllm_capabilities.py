"""Detection by asking, and the view of vLLM's releases.

FlashInfer ReplaySSM needs a CUDA device, so the runner of such a release is a stand-in with its names and signatures;
`test_gpu_vllm.py` runs the real one.
"""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from layouts import MINI_MAMBA2, layout_engine

from replayssm_orch.actors.layout_engine import LayoutEngine
from replayssm_orch.actors.vllm_adapter import MAMBA2_FLASHINFER, NO_FLASHINFER_REPLAYSSM
from replayssm_orch.actors.vllm_capabilities import adapt_runner, growable_cache, vllm_lifecycle
from replayssm_orch.actors.warmups.capabilities import Unavailable
from replayssm_orch.actors.warmups.guard import guarded_slots
from replayssm_orch.actors.warmups.run import run_warmups

FLASHINFER = SimpleNamespace(name="FLASHINFER")
TRITON = SimpleNamespace(name="TRITON")


class Mixer(torch.nn.Module):
    """vLLM 0.33's `MambaMixer2` as far as its cache goes, over the caches of a layout engine's layer."""

    def __init__(self, layer, backend) -> None:
        super().__init__()
        self.use_replayssm = True
        self.mamba_config = SimpleNamespace(backend=backend)
        self.kv_cache = list(layer.kv_cache)
        self._replayssm_ring_start = layer.trackers.ring_start
        self._replayssm_prev_num_accepted = layer.trackers.committed
        self._replayssm_prev_query_len = torch.zeros_like(layer.trackers.committed)


class ReleaseRunner:
    """vLLM 0.33's model runner V2 by its names; its dummy run is the layout engine's and fills the third tracker."""

    def __init__(self, engine: LayoutEngine, backend=FLASHINFER, use_replayssm: bool = True) -> None:
        self._engine = engine
        self.model = torch.nn.ModuleList([torch.nn.Linear(1, 1), *(Mixer(m, backend) for m in engine.layers.values())])
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type="cuda"),
            cache_config=SimpleNamespace(use_replayssm=use_replayssm, mamba_cache_mode="none"),
            mamba_config=SimpleNamespace(backend=backend),
            num_speculative_tokens=engine.plan.num_speculative_tokens,
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        for name in ("scheduler_config", "max_num_tokens", "max_num_reqs", "decode_query_len", "kv_cache_config",
                     "block_tables", "cudagraph_manager"):  # fmt: skip
            setattr(self, name, getattr(engine, name))
        self.runs: list[tuple[int, dict]] = []

    def get_model(self) -> torch.nn.Module:
        return self.model

    @torch.inference_mode()
    def _dummy_run(self, num_tokens, uniform_decode=False, is_profile=False, valid_dummy_state_slots=False):
        self.runs.append((num_tokens, {"uniform_decode": uniform_decode, "is_profile": is_profile}))
        self._engine._dummy_run(
            num_tokens=num_tokens,
            uniform_decode=uniform_decode,
            valid_dummy_state_slots=valid_dummy_state_slots,
            randomize_inputs=True,
        )
        for mixer in self.mixers():
            mixer._replayssm_prev_query_len[1:3] = self.decode_query_len

    def mixers(self) -> list[Mixer]:
        return [module for module in self.model.modules() if isinstance(module, Mixer)]


class OldDummyRun(ReleaseRunner):
    def _dummy_run(self, num_tokens, uniform_decode=False):
        raise AssertionError("never reached")


def states(runner) -> dict[str, tuple[str, str | None]]:
    return {outcome.name: (outcome.state, outcome.reason) for outcome in run_warmups(*adapt_runner(runner))}


def test_the_decode_warmup_of_a_release_runs_with_the_flags_that_it_knows() -> None:
    runner = ReleaseRunner(layout_engine(MINI_MAMBA2))
    outcome = states(runner)
    assert outcome["mamba2-decode"] == ("done", None)
    assert {name: state for name, (state, _) in outcome.items() if name != "mamba2-decode"} == dict.fromkeys(
        ("lifecycle", "gdn", "materializer"), "skipped"
    )
    assert "is_gdn_replayssm_enabled" in outcome["gdn"][1]
    assert runner.runs == [(4 * n, {"uniform_decode": True, "is_profile": True}) for n in (1, 2, 4)]


def test_the_guard_clears_all_three_trackers_of_a_release() -> None:
    runner = ReleaseRunner(layout_engine(MINI_MAMBA2))
    view, capabilities = adapt_runner(runner)
    with guarded_slots(view, capabilities, 2):
        runner._dummy_run(8, uniform_decode=True, valid_dummy_state_slots=True)
        for mixer in runner.mixers():
            mixer._replayssm_ring_start.fill_(3)
            mixer._replayssm_prev_num_accepted.fill_(3)
        assert any(view[1:3].any() for mixer in runner.mixers() for view in mixer.kv_cache)
    for mixer in runner.mixers():
        assert not any(view[1:3].any() for view in mixer.kv_cache)
        assert not mixer._replayssm_ring_start.any()
        assert not mixer._replayssm_prev_num_accepted.any()
        assert not mixer._replayssm_prev_query_len.any()


@pytest.mark.parametrize("off", [{"use_replayssm": False}, {"backend": TRITON}])
def test_without_flashinfer_replayssm_nothing_runs(off, monkeypatch) -> None:
    monkeypatch.setattr(".".join(MAMBA2_FLASHINFER), object(), raising=False)
    runner = ReleaseRunner(layout_engine(MINI_MAMBA2), **off)
    outcome = states(runner)
    assert {reason for _, reason in outcome.values()} == {"FlashInfer ReplaySSM is off in this configuration"}
    assert not runner.runs


def test_a_release_with_replayssm_over_triton_only_says_so(monkeypatch) -> None:
    monkeypatch.delattr(".".join(MAMBA2_FLASHINFER), raising=False)
    runner = ReleaseRunner(layout_engine(MINI_MAMBA2), backend=TRITON)
    assert set(states(runner).values()) == {("skipped", NO_FLASHINFER_REPLAYSSM)}


def test_a_dummy_run_that_cannot_use_real_slots_is_a_skip() -> None:
    state, reason = states(OldDummyRun(layout_engine(MINI_MAMBA2)))["mamba2-decode"]
    assert state == "skipped"
    assert "valid_dummy_state_slots" in reason


def test_model_runner_v1_is_a_skip_that_names_the_way_out() -> None:
    runner = ReleaseRunner(layout_engine(MINI_MAMBA2))
    del runner.block_tables
    state, reason = states(runner)["mamba2-decode"]
    assert state == "skipped"
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in reason


def test_what_the_installed_vllm_lacks_is_reported() -> None:
    """The installed vLLM is asked, whatever its version: no module, no capability."""
    lifecycle = vllm_lifecycle()
    if importlib.util.find_spec("vllm") is None:
        assert isinstance(lifecycle, Unavailable)
        assert "cannot be imported" in lifecycle.reason
    else:
        from vllm.model_executor.layers.mamba.ops import ssu_dispatch

        assert isinstance(lifecycle, Unavailable) is not hasattr(ssu_dispatch, "ReplaySSMModelContext")


def test_a_cache_that_cannot_grow_commits_all_its_blocks() -> None:
    if importlib.util.find_spec("vllm.v1.worker.extensible_kv_cache"):
        pytest.skip("this vLLM has growable KV caches")
    ensure, committable = growable_cache()
    engine = layout_engine(num_blocks=7)
    ensure(engine, 7)
    assert committable(engine) == 7


def context_module(create) -> SimpleNamespace:
    return SimpleNamespace(ReplaySSMModelContext=SimpleNamespace(create=create))


@pytest.mark.parametrize(
    ("create", "reason"),
    [
        (lambda groups, max_num_reqs: None, None),
        (lambda config, ids, context, tables, max_num_reqs: None, "takes (config, ids, context, tables, max_num_reqs)"),
    ],
)
def test_a_lifecycle_of_another_signature_is_not_called(monkeypatch, create, reason) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: context_module(create))
    found = vllm_lifecycle()
    if reason is None:
        assert found is create
    else:
        assert reason in found.reason
