"""`warm --engine layout` on the CPU, alone and against the real vLLM engine."""

import os
import signal

import pytest
from conftest import Running, assert_all_gone

from replayssm_orch.actors.records import StepDecisions
from replayssm_orch.actors.warmups.run import STEPS as ACTOR_STEPS
from replayssm_orch.orchestrator.failures import RunFailed
from replayssm_orch.orchestrator.report import STEPS
from replayssm_orch.orchestrator.warming import check_agreement

pytestmark = [pytest.mark.ray]


def test_the_driver_runs_the_steps_that_the_actors_have():
    assert tuple(ACTOR_STEPS) == STEPS


def test_a_rank_that_decides_otherwise_is_named_before_any_step():
    alike = [StepDecisions(rank, (("max_num_seqs", "64"), ("lifecycle", "there"))) for rank in range(3)]
    check_agreement(alike, tp=2)
    other = StepDecisions(3, (("max_num_seqs", "64"), ("lifecycle", "no module")))
    with pytest.raises(RunFailed, match="rank 3 \\(stage 1\\) failed in agree: lifecycle is 'no module' here"):
        check_agreement([*alike, other], tp=2)


@pytest.mark.parametrize("model", ["tiny-gdn", "tiny-mamba2"])
def test_every_warmup_that_applies_is_done_on_every_rank(warm_once, model):
    done = warm_once(
        model, "--engine", "layout", "--device", "cpu", "--tp", "4" if model == "tiny-gdn" else "1", "--pp", "2",
        "--mamba-cache-mode", "align", "--max-num-seqs", "8",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    expected = {"lifecycle": "done", "gdn": "done", "materializer": "done", "mamba2-decode": "skipped"}
    if model == "tiny-mamba2":
        expected = {"lifecycle": "done", "gdn": "skipped", "materializer": "skipped", "mamba2-decode": "done"}
    for rank in done.report["ranks"]:
        assert {w["name"]: w["state"] for w in rank["warmups"]} == expected
        assert all(w["reason"] for w in rank["warmups"] if w["state"] == "skipped")


def test_a_capacity_without_a_free_slot_fails_with_the_rules_own_error(warm_once):
    done = warm_once("--engine", "layout", "--device", "cpu", "--tp", "2", "--num-blocks", "1")
    assert done.code == 1
    assert "non-padding state slot" in done.report["error"]
    assert "failed in gdn" in done.report["error"]
    failed = [w for rank in done.report["ranks"] for w in rank["warmups"] if w["state"] == "failed"]
    assert [w["name"] for w in failed] == ["gdn"]
    assert any("ValueError" in (rank["error"] or "") for rank in done.report["ranks"])


def test_a_rank_that_dies_in_a_step_ends_all_and_is_named(tmp_path):
    # Enough blocks and sizes that the decode step lasts for a while.
    run = Running(tmp_path, "--engine", "layout", "--device", "cpu", "--tp", "2", "--max-num-seqs", "512")
    run.wait_for("layouts:")
    processes = run.descendants()
    victim = next(p for p in processes if "ray::LayoutShard" in " ".join(p.cmdline()))
    victim.send_signal(signal.SIGKILL)
    done = run.finish(60)
    assert done.code == 1, done.stderr
    (failed,) = (rank for rank in done.report["ranks"] if rank["error"])
    assert f"rank {failed['rank']} (stage 0) failed in" in done.report["error"]
    assert "process died" in done.report["error"]
    assert_all_gone(processes)


def test_ctrl_c_in_a_step_ends_everything(tmp_path):
    run = Running(tmp_path, "--engine", "layout", "--device", "cpu", "--tp", "2", "--max-num-seqs", "512")
    run.wait_for("layouts:")
    processes = run.descendants()
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.finish(60).code == 130
    assert_all_gone(processes)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ("tiny-gdn", ("2", "2")),
        ("tiny-gdn", ("1", "1")),
        ("tiny-gdn", ("4", "1")),
        ("tiny-mamba2", ("2", "1")),
        ("tiny-mamba2", ("1", "2")),
    ],
)
def test_layouts_are_those_of_the_real_engine_at_the_same_capacity(warm_once, model, degrees):
    tp, pp = degrees
    shared = (model, "--tp", tp, "--pp", pp, "--device", "cpu", "--num-blocks", "203", "--max-num-seqs", "8")
    real = warm_once(*shared)
    # vLLM's CPU build has no ReplaySSM rings.
    ours = warm_once(
        *shared, "--engine", "layout", "--engine-arg", "use_replayssm=false", "--num-speculative-tokens", "0"
    )
    assert (real.code, ours.code) == (0, 0), real.stderr + ours.stderr
    assert real.report["capacity"]["measured"] == 203
    assert ours.report["signatures"] == real.report["signatures"]
    assert ours.report["groups"] == real.report["groups"]
    assert ours.report["stages"] == real.report["stages"]
