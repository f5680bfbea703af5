"""One rank's warmups as the driver runs them on all ranks: decide, agree, run one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from replayssm_orch.actors.records import StepDecisions, WarmupOutcome
from replayssm_orch.actors.warmups.capabilities import Capabilities, Unavailable
from replayssm_orch.actors.warmups.decode import executed_width
from replayssm_orch.actors.warmups.protocol import Runner
from replayssm_orch.actors.warmups.run import run_step


class WarmupSession:
    """The warmups of one runner. Numbers that depend on memory are the ones agreed over all ranks, never its own."""

    def __init__(self, rank: int, runner: Runner, capabilities: Capabilities) -> None:
        self._rank = rank
        self._runner = runner
        self._capabilities = capabilities

    def committable_blocks(self) -> int:
        """How many cache blocks this rank can commit, the padding block included."""
        return self._capabilities.num_committable_blocks(self._runner)

    def decisions(self) -> StepDecisions:
        """Everything beside the agreed blocks on which the steps' conditions and sizes depend."""
        config = self._runner.vllm_config
        capabilities = self._capabilities
        inputs: dict[str, Any] = {
            "use_flashinfer_replayssm": config.use_flashinfer_replayssm,
            "is_gdn_replayssm_enabled": config.is_gdn_replayssm_enabled(),
            "num_speculative_tokens": config.num_speculative_tokens,
            "mamba_cache_mode": config.cache_config.mamba_cache_mode,
            "max_num_seqs": self._runner.scheduler_config.max_num_seqs,
            "max_num_tokens": self._runner.max_num_tokens,
            "capture sizes": self._capture_sizes(),
            "lifecycle": _reason(capabilities.create_lifecycle),
            "materializer": _reason(capabilities.materialize),
            "decode kernel": _reason(capabilities.decode_kernel(executed_width(config.num_speculative_tokens))),
        }
        return StepDecisions(self._rank, tuple((name, str(value)) for name, value in inputs.items()))

    def run(self, step: str, agreed_blocks: int) -> tuple[WarmupOutcome, ...]:
        """Run one step with the number of blocks that every rank agreed to. Raises WarmupFailed."""
        agreed = replace(self._capabilities, num_committable_blocks=lambda runner: agreed_blocks)
        return run_step(step, self._runner, agreed)

    def _capture_sizes(self) -> tuple[tuple[int, int], ...]:
        manager = getattr(self._runner, "cudagraph_manager", None)
        if manager is None:
            return ()
        return tuple(
            sorted(
                {
                    (d.num_reqs or 0, d.uniform_token_count or 0)
                    for group in manager._capture_descs.values()
                    for d in group
                }
            )
        )


def _reason(capability: object) -> str:
    return capability.reason if isinstance(capability, Unavailable) else "there"
