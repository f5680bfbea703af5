"""`warm` on the CPU with a real Ray and real vLLM engines: what a run finds, and what its folder holds."""

import importlib.util
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from replayssm_orch.orchestrator.__main__ import main

pytestmark = [pytest.mark.vllm, pytest.mark.ray]


def vllm_with_renamed(path: str, name: str, root: Path) -> Path:
    """Under `root`, the installed vLLM (links) with `name` renamed in the module file `path`; returns `root`."""
    (installed,) = importlib.util.find_spec("vllm").submodule_search_locations
    source, target = Path(installed), root / "vllm"
    for part in Path(path).parts:
        target.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.name != part:
                (target / entry.name).symlink_to(entry)
        source, target = source / part, target / part
    target.write_text(source.read_text().replace(name, f"Renamed{name}"))
    return root


@pytest.fixture(scope="module")
def two_by_two(warm_once):
    """One run of the default preset in two stages of two ranks."""
    return warm_once("--tp", "2", "--pp", "2", "--max-num-seqs", "8")


def test_the_run_is_prepared_and_says_which_warmups_the_cpu_skips(two_by_two):
    assert two_by_two.code == 0, two_by_two.stderr
    report = two_by_two.report
    assert (report["state"], report["error"]) == ("prepared", None)
    for rank in report["ranks"]:
        skipped = {w["name"]: w["reason"] for w in rank["warmups"] if w["state"] == "skipped"}
        assert {"lifecycle", "gdn", "materializer"} <= set(skipped)
        assert all("cpu" in reason for reason in skipped.values())


def test_every_stage_has_its_layers(two_by_two):
    stages = {stage["pp_rank"]: stage["layers"] for stage in two_by_two.report["stages"]}
    assert {stage: [int(name.split(".")[2]) for name in names] for stage, names in stages.items()} == {
        0: [0, 1, 2, 3],
        1: [4, 5, 6, 7],
    }


def test_signatures_are_shared_across_ranks_and_stages(two_by_two):
    report = two_by_two.report
    families = {s["family"]: s for s in report["signatures"]}
    assert set(families) == {"gdn", "attention"}
    gdn = families["gdn"]
    assert gdn["ranks"] == [0, 1, 2, 3]
    assert [name.split(".")[2] for name in gdn["layers"]] == ["0", "1", "2", "4", "5", "6"]
    assert report["dedup"]["signatures_seen"] == 2 * 4 * 2
    assert report["dedup"]["signatures_unique"] == 2
    # 16 value heads and 8 key heads of 128 over two ranks: 8 states a slot, and 3 rows of q, k and v convolution.
    tensors = {t["name"]: t for t in gdn["tensors"]}
    blocks = report["capacity"]["measured"]
    assert tensors["state"]["shape"] == [blocks, 8, 128, 128]
    assert tensors["convolution"]["shape"] == [blocks, 3, 8 * 128 + 2 * 4 * 128]
    # Both lie in one page of a slot: the slot stride spans more than the tensor.
    assert tensors["state"]["stride"][0] > 8 * 128 * 128


def test_ranks_are_numbered_as_vllm_numbers_them(two_by_two):
    ranks = [(r["rank"], r["tp_rank"], r["pp_rank"]) for r in two_by_two.report["ranks"]]
    assert ranks == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]


def test_vllms_own_start_up_ran_on_every_rank(two_by_two):
    phases = {"init_worker", "init_device", "load_model", "initialize_from_config", "compile_or_warm_up_model"}
    assert all(phases <= set(rank["phases"]) for rank in two_by_two.report["ranks"])


def test_the_hold_came_after_the_caches_and_before_vllms_warm_up(two_by_two):
    events = [json.loads(line) for line in (two_by_two.folder / "events.jsonl").read_text().splitlines()]
    order = [event["phase"] for event in events]
    assert max(i for i, p in enumerate(order) if p == "initialize_from_config") < order.index("hold")
    assert order.index("hold") < order.index("compile_or_warm_up_model")


def test_each_ranks_log_is_in_the_run_folder(two_by_two):
    logs = sorted(path.name for path in (two_by_two.folder / "logs").iterdir())
    assert logs == ["engine.log", "rank-0.log", "rank-1.log", "rank-2.log", "rank-3.log"]
    assert all(path.stat().st_size for path in (two_by_two.folder / "logs").iterdir())


def test_report_prints_the_run_as_warm_did(two_by_two):
    printed = CliRunner().invoke(main, ["report", str(two_by_two.folder)])
    assert printed.exit_code == 0
    assert printed.output in two_by_two.stdout
    assert "16 layouts seen, 2 distinct" in printed.output


def test_report_json_is_the_file(two_by_two):
    printed = CliRunner().invoke(main, ["report", str(two_by_two.folder / "report.json"), "--json"])
    assert json.loads(printed.stdout) == two_by_two.report


def test_the_mamba2_preset_runs_and_json_is_alone_on_stdout(warm_once):
    done = warm_once("tiny-mamba2", "--tp", "2", "--json", "--max-num-seqs", "8")
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    (mamba2,) = (s for s in report["signatures"] if s["family"] == "mamba2")
    assert mamba2["ranks"] == [0, 1]
    assert {t["name"]: t["shape"][1:] for t in mamba2["tensors"]}["state"] == [4, 64, 128]


def test_an_engine_that_refuses_its_arguments_fails_with_its_own_words(warm_once):
    done = warm_once("--engine-arg", "max_model_len=123456789")
    assert done.code == 1
    assert done.report["state"] == "failed"
    assert "max_model_len" in done.report["error"]
    assert (done.folder / "logs" / "engine.log").exists()


def test_a_vllm_without_an_extension_point_ends_with_exit_3_and_its_name(warm_once, tmp_path):
    other = vllm_with_renamed("v1/worker/worker_base.py", "WorkerWrapperBase", tmp_path)
    path = os.pathsep.join([str(other), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = warm_once("--tp", "1", PYTHONPATH=path)
    assert done.code == 3, done.stderr
    assert "lacks vllm.v1.worker.worker_base.WorkerWrapperBase" in done.report["error"]
    assert "use vLLM 0.29 to 0.33" in done.report["error"]
