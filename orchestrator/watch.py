"""Bounded waits on a run's shards, with every failure and time-out naming rank and phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from replayssm_orch.actors.records import EngineStatus, RankFailure
from replayssm_orch.configs.errors import CannotRun, UserError
from replayssm_orch.orchestrator.failures import RunFailed
from replayssm_orch.orchestrator.outcome import RunFacts
from replayssm_orch.orchestrator.progress import Progress
from replayssm_orch.orchestrator.report import RunFolder
from replayssm_orch.orchestrator.shards import ShardGroup

POLL_SECONDS = 0.25


class Bound:
    """A wait's end: the option that sets it, its length in seconds, and what is left of it."""

    def __init__(self, option: str, seconds: float) -> None:
        self.option = option
        self.seconds = seconds
        self.exit_code = CannotRun.exit_code if option == "--start-timeout" else UserError.exit_code
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never quite none."""
        return max(0.1, self._deadline - time.monotonic())

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._deadline


class Watch:
    """A run's eyes: what the shards do goes into the facts, the event file and the progress."""

    def __init__(self, facts: RunFacts, folder: RunFolder, progress: Progress) -> None:
        self.facts = facts
        self.folder = folder
        self.progress = progress
        self._events_seen = 0

    def results(self, group: ShardGroup, refs: list[Any], bound: Bound, step: str) -> list[Any]:
        """The result of every rank's reference, by rank; the first failure, or the bound, ends the wait."""
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        started = time.time()
        results: dict[int, Any] = {}
        for rank in rank_of.values():
            self.facts.phase(rank, step, None)
        pending = list(refs)
        while pending:
            ready, pending = group.wait(pending, POLL_SECONDS)
            for ref in ready:
                rank = rank_of[ref]
                results[rank] = group.result(ref, rank, step)
                self._phase(rank, step, started, time.time() - started)
            self.poll(group)
            if pending and bound.over():
                self.time_out(step, bound)
        return [results[rank] for rank in range(len(refs))]

    def result(self, group: ShardGroup, ref: Any, bound: Bound, step: str) -> Any:
        """The engine host's answer. Raises RunFailed when it is a RankFailure."""
        while not group.wait([ref], POLL_SECONDS)[0]:
            self.poll(group)
            if bound.over():
                self.time_out(step, bound)
        self.poll(group)
        answer = group.result(ref, None, step)
        if isinstance(answer, RankFailure):
            raise RunFailed(answer)
        return answer

    def poll(self, group: ShardGroup) -> EngineStatus:
        """Take in what the engine host has seen since the last time."""
        status = group.status(self._events_seen)
        self._events_seen += len(status.events)
        for event in status.events:
            self._phase(event.rank, event.phase, event.at, event.seconds)
        return status

    def _phase(self, rank: int, phase: str, at: float, seconds: float | None) -> None:
        self.facts.phase(rank, phase, seconds)
        self.progress.phase(rank, phase, seconds)
        if seconds is not None:
            self.folder.event(phase, rank=rank, seconds=seconds, at=at + seconds)

    def time_out(self, step: str, bound: Bound) -> NoReturn:
        """End the run: `step` is not finished within `bound`."""
        unfinished = self.facts.unfinished_phases()
        waiting = ", ".join(f"rank {rank} in {phase}" for rank, phase in sorted(unfinished.items()))
        error = (
            f"not finished within {bound.option} {bound.seconds:g} s ({waiting or 'no rank answered'}); "
            "raise it or see the ranks' logs"
        )
        rank = min(unfinished, default=None)
        stage = None if rank is None else rank // self.facts.config.tp
        raise RunFailed(RankFailure(rank, stage, step, error, exit_code=bound.exit_code))

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """An event of the run as a whole, with its seconds."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.folder.event(step, seconds=time.monotonic() - started)
