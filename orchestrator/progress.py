"""Progress of a run on standard error: one live line a rank on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.table import Table

from replayssm_orch.orchestrator.report import STEPS

# The phases that people wait for; all of them are in events.jsonl.
SHOWN_PHASES = (
    "place",
    "init_worker",
    "init_device",
    "load_model",
    "determine_available_memory",
    "initialize_from_config",
    "allocate",
    "compile_or_warm_up_model",
    *STEPS,
    "serve",
)


class Progress(Protocol):
    """Where a run says what it is doing."""

    def say(self, text: str) -> None:
        """One line about the run as a whole."""

    def phase(self, rank: int, phase: str, seconds: float | None) -> None:
        """A rank entered (`seconds` None) or finished a phase."""


class PlainProgress:
    """Plain lines, each with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:7.1f}s  {text}", file=sys.stderr, flush=True)

    def phase(self, rank: int, phase: str, seconds: float | None) -> None:
        # A step that only found that it does not apply is in the summary.
        if seconds is not None and phase in SHOWN_PHASES and (seconds >= 0.005 or phase not in STEPS):
            self.say(f"rank {rank}  {phase}  {seconds:.2f} s")


class LiveProgress:
    """One live line a rank with its current phase; lines about the whole run scroll above."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._started = time.monotonic()
        self._console = Console(stderr=True)
        self._current: dict[int, tuple[str, float, float | None]] = {}
        self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=4)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(f"{time.monotonic() - self._started:7.1f}s  {text}", highlight=False, markup=False)

    def phase(self, rank: int, phase: str, seconds: float | None) -> None:
        if phase in SHOWN_PHASES:
            self._current[rank] = (phase, time.monotonic(), seconds)

    def _table(self) -> Table:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for rank, (phase, since, seconds) in sorted(self._current.items()):
            done = f"{seconds:.2f} s" if seconds is not None else f"… {time.monotonic() - since:.0f} s"
            table.add_row(f"rank {rank}", phase, done)
        return table


@contextmanager
def progress() -> Iterator[Progress]:
    """The progress that suits standard error."""
    if sys.stderr.isatty():
        with LiveProgress() as live:
            yield live
    else:
        yield PlainProgress()
