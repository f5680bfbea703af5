"""Runs of the real command, and the processes they leave (none, if all is well)."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

ORCH = [sys.executable, "-m", "replayssm_orch.orchestrator"]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A `warm` that has ended: exit code, its output, its run folder and report (None where there is none)."""

    code: int
    stdout: str
    stderr: str
    folder: Path | None
    report: dict | None


class Running:
    """A `warm` in its own process group, started in `cwd`."""

    started: ClassVar[list[Running]] = []

    def __init__(self, cwd: Path, *args: str, **environment: str) -> None:
        self.cwd = cwd
        self.out, self.err = cwd / "stdout", cwd / "stderr"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*ORCH, "warm", *args],
                cwd=cwd,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        Running.started.append(self)

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Until standard error holds `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.err.read_text():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.err.read_text()}"
            time.sleep(0.1)

    def descendants(self) -> list[psutil.Process]:
        """Every process under the command: Ray's servers and workers included."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, seconds: float = 240) -> Finished:
        code = self.process.wait(seconds)
        folders = sorted((self.cwd / "runs").glob("*")) if (self.cwd / "runs").is_dir() else []
        folder = folders[-1] if folders else None
        file = folder / "report.json" if folder else None
        report = json.loads(file.read_text()) if file and file.exists() else None
        return Finished(code, self.out.read_text(), self.err.read_text(), folder, report)


def assert_all_gone(processes: list[psutil.Process], seconds: float = 15) -> None:
    """Every one of `processes` ends within `seconds` (a zombie has ended)."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, [p.cmdline() for p in alive]


@pytest.fixture(autouse=True)
def no_run_outlives_its_test():
    """A test that fails while its run goes on ends it."""
    yield
    while Running.started:
        process = Running.started.pop().process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)


@pytest.fixture(scope="module")
def warm_once(tmp_path_factory):
    """`warm` with given arguments, to its end."""

    def start(*args: str, **environment: str) -> Finished:
        return Running(tmp_path_factory.mktemp("warm"), *args, **environment).finish()

    return start
