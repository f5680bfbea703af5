"""From exceptions that Ray brings back from an actor to records that say which rank failed, where and why."""

from __future__ import annotations

from replayssm_orch.actors.records import RankFailure


class ShardFailed(RuntimeError):
    """A call failed on a rank; `failure` says which and how."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(f"rank {failure.rank} failed in {failure.phase}: {failure.error}")
        self.failure = failure


def failure_of(error: BaseException, rank: int | None, stage: int | None, phase: str) -> RankFailure:
    """The record of a Ray error: the remote error's own first line, its traceback, and its exit code if it has one."""
    import ray

    cause = getattr(error, "cause", None) or error
    if isinstance(error, ray.exceptions.RayActorError) and "creation task" not in str(error):
        summary = "its process died (killed, out of memory, or crashed): see its log"
    else:
        lines = [line.strip() for line in f"{type(cause).__name__}: {cause}".splitlines() if line.strip()]
        summary = lines[-1] if isinstance(error, ray.exceptions.RayActorError) else lines[0]
    return RankFailure(
        rank=rank,
        stage=stage,
        phase=phase,
        error=summary,
        traceback=str(error),
        exit_code=int(getattr(cause, "exit_code", 1)),
    )
