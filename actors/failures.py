"""From exceptions that Ray brings back from an actor to records that say which rank failed, where and why."""

from __future__ import annotations

import functools
import pickle
import re
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from replayssm_orch.actors.records import RankFailure

P = ParamSpec("P")
R = TypeVar("R")


class ShardFailed(RuntimeError):
    """A call failed on a rank; `failure` says which and how."""

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(f"rank {failure.rank} failed in {failure.phase}: {failure.error}")
        self.failure = failure


def one_line(error: BaseException, limit: int = 400) -> str:
    """The error's type and message, folded into one line of at most `limit` characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def sendable(method: Callable[P, R]) -> Callable[P, R]:
    """An actor method whose exceptions survive the way to the driver: one that cannot be pickled becomes its text."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                raise RuntimeError(f"{one_line(error)}\n{traceback.format_exc()}") from None
            raise

    return call


def failure_of(error: BaseException, rank: int | None, stage: int | None, phase: str) -> RankFailure:
    """The record of a Ray error: the remote error's own message, its traceback, and its exit code if it has one."""
    import ray

    cause = getattr(error, "cause", None) or error
    if isinstance(error, ray.exceptions.RayActorError) and "creation task" not in str(error):
        summary = "its process died (killed, out of memory, or crashed): see its log"
    else:
        text = str(cause).strip()
        # An actor whose constructor raised carries the remote traceback; its last line is the error.
        summary = text.splitlines()[-1] if isinstance(error, ray.exceptions.RayActorError) else one_line(cause)
    return RankFailure(
        rank=rank,
        stage=stage,
        phase=phase,
        error=summary,
        # Ray colours the remote traceback for terminals.
        traceback=re.sub(r"\x1b\[[0-9;]*m", "", str(error)),
        exit_code=int(getattr(cause, "exit_code", 1)),
    )
