"""The decode warmups: GDN (with the materializer in align mode) and Mamba2, over the captured batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from replayssm_orch.actors.warmups.capabilities import Capabilities
from replayssm_orch.actors.warmups.guard import guarded_slots
from replayssm_orch.actors.warmups.protocol import CaptureDescriptor, Runner


def executed_width(num_speculative_tokens: int) -> int:
    """Tokens per request that the GDN kernel executes: 1 without speculation, 8 for 7 speculative tokens, else 4."""
    return {0: 1, 7: 8}.get(num_speculative_tokens, 4)


def decode_batch_sizes(
    descriptors: Iterable[CaptureDescriptor], query_len: int, max_decode_reqs: int
) -> tuple[int, ...]:
    """Ascending request counts to run: the captured uniform decode sizes that fit, else `max_decode_reqs` alone."""
    captured = {
        descriptor.num_reqs
        for descriptor in descriptors
        if descriptor.uniform_token_count == query_len
        and descriptor.num_reqs is not None
        and 0 < descriptor.num_reqs <= max_decode_reqs
    }
    if captured:
        return tuple(sorted(captured))
    return (max_decode_reqs,) if max_decode_reqs > 0 else ()


def run_decode_steps(
    runner: Runner, capabilities: Capabilities, query_len: int, inside_guard: Callable[[int], None] | None = None
) -> tuple[int, ...]:
    """Dummy-run every decode batch size inside the guard; returns the sizes, in request counts, ascending.

    `inside_guard` is called with the maximal number of requests after the last step, before the guard restores.

    Raises:
        AssertionError: the runner has no CUDA-graph manager.
        ValueError: no state slot can be committed beside the padding slot.
    """
    manager = runner.cudagraph_manager
    assert manager is not None, "the decode warmup needs the runner's CUDA-graph manager"
    committable = capabilities.num_committable_blocks(runner)
    max_num_reqs = min(runner.scheduler_config.max_num_seqs, committable - 1)
    if max_num_reqs <= 0:
        raise ValueError(
            f"the decode warmup needs a non-padding state slot, but only {committable} KV-cache blocks can be "
            f"committed for max_num_seqs={runner.scheduler_config.max_num_seqs}"
        )
    max_decode_reqs = min(max_num_reqs, runner.max_num_tokens // query_len)
    descriptors = (descriptor for group in manager._capture_descs.values() for descriptor in group)
    sizes = decode_batch_sizes(descriptors, query_len, max_decode_reqs)

    capabilities.ensure_blocks(runner, 1 + max_decode_reqs)
    with guarded_slots(runner, capabilities, max_decode_reqs):
        for num_reqs in sizes:
            runner._dummy_run(
                num_tokens=num_reqs * query_len,
                uniform_decode=True,
                skip_eplb=True,
                is_profile=True,
                randomize_inputs=True,
                valid_dummy_state_slots=True,
            )
        if inside_guard is not None:
            inside_guard(max_num_reqs)
    return sizes
