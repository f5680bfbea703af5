"""The ReplaySSM warmups over all ranks: agree first, then every rank runs the same step, bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from replayssm_orch.actors.records import RankFailure, StepDecisions, WarmupOutcome
from replayssm_orch.orchestrator.failures import RunFailed
from replayssm_orch.orchestrator.report import STEPS
from replayssm_orch.orchestrator.shards import ShardGroup
from replayssm_orch.orchestrator.watch import Bound, Watch


def run_warmups(watch: Watch, group: ShardGroup, new_bound: Callable[[], Bound]) -> list[tuple[WarmupOutcome, ...]]:
    """Run every step on all ranks; returns each rank's outcomes.

    No rank enters a step before all have agreed: the decisions must be equal on every rank, and the number of blocks
    is the minimum over all. The first rank that fails ends the step for all (the run ends every shard).
    """
    blocks: list[int] = watch.results(group, group.on_every_rank("committable_blocks"), new_bound(), "agree")
    decisions: list[StepDecisions] = watch.results(group, group.on_every_rank("decisions"), new_bound(), "agree")
    check_agreement(decisions, watch.facts.config.tp)
    agreed = min(blocks)
    outcomes: list[tuple[WarmupOutcome, ...]] = [() for _ in blocks]
    for step in STEPS:
        try:
            done = watch.results(group, group.on_every_rank("run_step", step, agreed), new_bound(), step)
        except RunFailed as failed:
            _note_failure(watch, outcomes, step, failed.failure)
            raise
        outcomes = [before + new for before, new in zip(outcomes, done, strict=True)]
    return outcomes


def check_agreement(decisions: Sequence[StepDecisions], tp: int) -> None:
    """Raises RunFailed naming the first rank whose decisions differ from rank 0's, and the first that does."""
    first = dict(decisions[0].inputs)
    for other in decisions[1:]:
        for name, value in other.inputs:
            if first.get(name) != value:
                there = f"{first.get(name)!r} on rank {decisions[0].rank}"
                error = f"{name} is {value!r} here and {there}; make the nodes equal"
                raise RunFailed(RankFailure(other.rank, other.rank // tp, "agree", error))


def _note_failure(watch: Watch, outcomes: list[tuple[WarmupOutcome, ...]], step: str, failure: RankFailure) -> None:
    for rank, before in enumerate(outcomes):
        watch.facts.warmups[rank] = before
    if failure.rank is not None:
        failed = WarmupOutcome(step, "failed", failure.error)
        watch.facts.warmups[failure.rank] = (*outcomes[failure.rank], failed)
