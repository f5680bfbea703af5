"""The error that ends a run because a rank or a step failed."""

from __future__ import annotations

from replayssm_orch.actors.records import RankFailure
from replayssm_orch.configs.errors import UserError


class RunFailed(UserError):
    """A rank or a step failed; `failure` has the details, the message is the one line for the user."""

    def __init__(self, failure: RankFailure) -> None:
        where = "engine" if failure.rank is None else f"rank {failure.rank} (stage {failure.stage})"
        super().__init__(f"{where} failed in {failure.phase}: {failure.error}")
        self.failure = failure
        self.exit_code = failure.exit_code
