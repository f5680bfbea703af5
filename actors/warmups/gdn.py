"""The GDN decode warmup, and inside its guard the materializer's where prefixes are published."""

from __future__ import annotations

import time

from replayssm_orch.actors.records import WarmupOutcome
from replayssm_orch.actors.warmups.capabilities import Capabilities, Unavailable
from replayssm_orch.actors.warmups.decode import executed_width, run_decode_steps
from replayssm_orch.actors.warmups.materializer import warm_materializer
from replayssm_orch.actors.warmups.protocol import Runner


def warm_gdn(runner: Runner, capabilities: Capabilities) -> tuple[str | None, WarmupOutcome]:
    """Run the GDN decode kernel at every captured batch size, then in align mode the materializer.

    Returns why the decode part did nothing (None when it ran) and what became of the materializer.

    Raises:
        AssertionError: the query is wider than the kernel executes, or the runner has no CUDA-graph manager.
        ValueError: no state slot can be committed beside the padding slot.
    """
    config = runner.vllm_config
    if not config.is_gdn_replayssm_enabled():
        reason = capabilities.no_gdn_replayssm if config.use_flashinfer_replayssm else capabilities.no_replayssm
        return reason, _materializer_skipped(reason)
    query_len = config.num_speculative_tokens + 1
    width = executed_width(config.num_speculative_tokens)
    assert query_len <= width, f"a query of {query_len} tokens exceeds the executed width {width} of the GDN kernel"
    unavailable = capabilities.decode_kernel(width)
    if unavailable is not None:
        return unavailable.reason, _materializer_skipped(unavailable.reason)

    outcome = _materializer_skipped("only mamba_cache_mode 'align' publishes prefix states")

    def materialize_prefixes(max_num_reqs: int) -> None:
        nonlocal outcome
        if isinstance(capabilities.materialize, Unavailable):
            outcome = _materializer_skipped(capabilities.materialize.reason)
            return
        start = time.perf_counter()
        warm_materializer(runner, capabilities, capabilities.materialize, max_num_reqs)
        outcome = WarmupOutcome("materializer", "done", seconds=time.perf_counter() - start)

    align = config.cache_config.mamba_cache_mode == "align"
    run_decode_steps(runner, capabilities, query_len, materialize_prefixes if align else None)
    return None, outcome


def _materializer_skipped(reason: str) -> WarmupOutcome:
    return WarmupOutcome("materializer", "skipped", reason)
