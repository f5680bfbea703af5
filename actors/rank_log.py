"""Each actor's own log file on its node, complete also when the process dies."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
from pathlib import Path


def log_directory(run_id: str) -> Path:
    """Where the actors of a run write their logs on each node until the driver has collected them."""
    return Path(tempfile.gettempdir()) / f"replayssm-orch-{os.getuid()}" / run_id


def redirect_output(run_id: str, name: str) -> str:
    """Send this process's standard output and error, C libraries' too, to `name`.log; returns the file's path."""
    directory = log_directory(run_id)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"{name}.log"
    target = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    # Ray replaced sys.stdout by a writer of its own per-worker file: bring Python's streams back to the descriptors.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    print(f"{name} of run {run_id}: pid {os.getpid()} on {socket.gethostname()}, code from {Path(__file__).parent}")
    return str(path)


def take_log(path: str, limit: int) -> bytes:
    """The last `limit` bytes of a log on this node, which is then removed; empty if there is none."""
    log = Path(path)
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            content = file.read()
    except FileNotFoundError:
        return b""
    log.unlink(missing_ok=True)
    # The last of a run's logs on this node takes the folder with it; another task may have been faster.
    with contextlib.suppress(OSError):
        log.parent.rmdir()
    return content
