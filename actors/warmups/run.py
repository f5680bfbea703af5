"""The warmups in their order, each with an outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from replayssm_orch.actors.records import WarmupOutcome
from replayssm_orch.actors.warmups.capabilities import Capabilities
from replayssm_orch.actors.warmups.gdn import warm_gdn
from replayssm_orch.actors.warmups.lifecycle import warm_lifecycle
from replayssm_orch.actors.warmups.mamba2 import warm_mamba2_decode
from replayssm_orch.actors.warmups.protocol import Runner


class WarmupFailed(RuntimeError):
    """A warmup raised; `warmup` is its name, `reason` what it raised, and `__cause__` that exception."""

    def __init__(self, warmup: str, reason: str) -> None:
        super().__init__(warmup, reason)
        self.warmup = warmup
        self.reason = reason

    def __str__(self) -> str:
        return f"warmup {self.warmup!r} failed: {self.reason}"


Step = Callable[[Runner, Capabilities], tuple[WarmupOutcome, ...]]


def _single(name: str, warm: Callable[[Runner, Capabilities], str | None]) -> Step:
    def step(runner: Runner, capabilities: Capabilities) -> tuple[WarmupOutcome, ...]:
        start = time.perf_counter()
        reason = warm(runner, capabilities)
        return (_outcome(name, reason, time.perf_counter() - start),)

    return step


def _gdn_and_materializer(runner: Runner, capabilities: Capabilities) -> tuple[WarmupOutcome, ...]:
    start = time.perf_counter()
    reason, materializer = warm_gdn(runner, capabilities)
    seconds = time.perf_counter() - start - materializer.seconds
    return _outcome("gdn", reason, seconds), materializer


def _outcome(name: str, reason: str | None, seconds: float) -> WarmupOutcome:
    return WarmupOutcome(name, "done" if reason is None else "skipped", reason, seconds if reason is None else 0.0)


STEPS: Final[dict[str, Step]] = {
    "lifecycle": _single("lifecycle", warm_lifecycle),
    "gdn": _gdn_and_materializer,
    "mamba2-decode": _single("mamba2-decode", warm_mamba2_decode),
}
"""Step name to step, in the order in which every rank runs them; "gdn" also answers for "materializer"."""


def run_step(name: str, runner: Runner, capabilities: Capabilities) -> tuple[WarmupOutcome, ...]:
    """Run one step of `STEPS`. Raises `WarmupFailed` when it raised."""
    try:
        # vLLM may have made its caches in inference mode, and then nothing else may write them.
        with torch.inference_mode():
            return STEPS[name](runner, capabilities)
    except Exception as error:
        raise WarmupFailed(name, f"{type(error).__name__}: {error}") from error


def run_warmups(runner: Runner, capabilities: Capabilities) -> tuple[WarmupOutcome, ...]:
    """Run every warmup; what does not apply is skipped with a reason. Raises `WarmupFailed` at the first failure."""
    return tuple(outcome for name in STEPS for outcome in run_step(name, runner, capabilities))
