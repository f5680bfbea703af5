"""Shared memory that killed vLLM workers leave on their node: nobody else removes it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

# Names that Python's SharedMemory (vLLM's message queues) and vLLM's CPU collectives give their segments.
_SEGMENT = re.compile(r"(/dev/shm/(?:psm_\w+|\S*cpushm_\d+))$")


def mapped_segments(pids: Sequence[int]) -> tuple[str, ...]:
    """The segments that these processes of this node have mapped; a process that is gone has none."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            found.update(match[1] for line in maps if (match := _SEGMENT.search(line.rstrip())))
    return tuple(sorted(found))


def remove_segments(paths: Sequence[str]) -> None:
    """Remove the segments that are still there, once the processes that mapped them have ended."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
