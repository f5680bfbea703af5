"""The Mamba2 decode warmup: checkpointing SSU at every captured batch size."""

from __future__ import annotations

from replayssm_orch.actors.warmups.capabilities import Capabilities
from replayssm_orch.actors.warmups.decode import run_decode_steps
from replayssm_orch.actors.warmups.protocol import Runner


def warm_mamba2_decode(runner: Runner, capabilities: Capabilities) -> str | None:
    """Dummy-run the decode batch sizes of a model with Mamba2 ReplaySSM layers; returns why nothing was done, or None.

    Raises: as `run_decode_steps`.
    """
    if not runner.vllm_config.use_flashinfer_replayssm:
        return capabilities.no_replayssm
    # Asked of the model, not of this shard: every rank must take part in what follows, or none.
    if runner.vllm_config.is_gdn_replayssm_enabled():
        return "this model's ReplaySSM layers are Gated DeltaNet"
    unavailable = capabilities.decode_kernel(runner.decode_query_len)
    if unavailable is not None:
        return unavailable.reason
    run_decode_steps(runner, capabilities, runner.decode_query_len)
    return None
