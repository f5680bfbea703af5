"""Commands as users run them, up to the point where Ray would be started."""

import json
import subprocess
import sys

import pytest

ORCH = [sys.executable, "-m", "replayssm_orch.orchestrator"]


def run(*args, cwd, **environment):
    import os

    return subprocess.run(
        [*ORCH, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize("args", [["--help"], ["warm", "--help"], ["report", "--help"], ["warm", "--tp", "3"]])
def test_nothing_heavy_is_imported_before_the_work(args, tmp_path):
    code = (
        "import sys; from replayssm_orch.orchestrator.__main__ import main\n"
        f"try: main({args!r})\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'vllm', 'flashinfer', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["warm", "--tp", "3"], ["--tp 3", "16 GDN value heads", "use --tp 1, 2, 4 or 8"]),
        (["warm", "--tp", "0"], ["--tp 0", "at least 1"]),
        (["warm", "--max-num-seqs", "-1"], ["--max-num-seqs -1", "at least 1"]),
        (["warm", "--pp", "4"], ["--pp 4", "attention", "use --pp"]),
        (["warm", "tiny-gnd"], ["tiny-gnd", "tiny-gdn"]),
        (["warm", "--placement", "packed"], ["--placement packed", "pack"]),
        (["warm", "--engine-arg", "max_modl_len=3"], ["max_modl_len", "max_model_len"]),
        (["warm", "--address", "http://head:8265"], ["http://head:8265", "host:6379"]),
        (["warm", "--target", "h201"], ["--target h201", "h200"]),
        (["warm", "--engine", "layout", "--engine-arg", "enforce_eager=true"], ["enforce_eager", "--engine vllm"]),
        (["warm", "--nope"], ["--nope", "warm --help"]),
        (["wram"], ["wram", "--help"]),
        (["report", "nowhere"], ["nowhere", "report.json"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2_and_leaves_nothing(args, names, tmp_path):
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert all(name in line for name in names), line
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_key_in_the_file_names_key_and_file(tmp_path):
    (tmp_path / "run.yaml").write_text("tp: 2\nmax_seqs: 3\n")
    done = run("warm", "--config", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "max_seqs in run.yaml" in done.stderr
    assert "max_num_seqs" in done.stderr


def test_a_hub_id_without_network_or_copy_is_exit_3_with_the_way_out(tmp_path):
    done = run("warm", "nobody/no-such-model", cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert "nobody/no-such-model" in line
    assert "config.json" in line


def test_an_unwritable_runs_dir_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("warm", "--runs-dir", "file", cwd=tmp_path)
    assert done.returncode == 2
    assert "--runs-dir file" in done.stderr


def test_a_report_of_another_schema_version_is_refused(tmp_path):
    (tmp_path / "report.json").write_text(json.dumps({"schema_version": 2}))
    done = run("report", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert "schema_version 2" in done.stderr
