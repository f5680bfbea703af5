"""vLLM's executor over shard actors: the extension point through which vLLM's engine core drives a run's shards.

vLLM is given the class and constructs it itself, so the shards reach it through `attach`, called once in the engine
host's process before the engine is made. One engine a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor

from replayssm_orch.actors.failures import ShardFailed, failure_of
from replayssm_orch.actors.records import PhaseEvent

# The worker call that vLLM issues last in its start-up: the hold is before it.
HOLD_BEFORE = "compile_or_warm_up_model"
# Per-step calls: too many to be phases.
_UNTIMED = frozenset({"execute_model", "sample_tokens", "take_draft_token_ids", "execute_dummy_batch"})


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a run gives its executor: shard handles by rank, where phase events go, and the hold."""

    shards: tuple[Any, ...]
    tp: int
    on_event: Callable[[PhaseEvent], None]
    hold: Callable[[], None]


_attachment: Attachment | None = None


def attach(attachment: Attachment) -> None:
    """Set the shards that the next executor of this process drives."""
    global _attachment  # noqa: PLW0603 - vLLM constructs the class with its own configuration and nothing else
    _attachment = attachment


class ShardExecutor(Executor):  # type: ignore[misc]
    """Runs every worker call on all shards; the first rank that fails ends the call."""

    supports_pp = True

    def _init_executor(self) -> None:
        if _attachment is None:
            raise RuntimeError("ShardExecutor needs attach() before vLLM makes it")
        self._attached = _attachment
        # One thread: answers are awaited in the order of the calls, so that a failed `execute_model` is seen before the
        # `sample_tokens` that follows it (vLLM queues both and reads only the second).
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard-rpc")
        self._failed: ShardFailed | None = None
        # The rank whose outputs are the model's: the first of the last stage, as in vLLM's own executors.
        self._output_rank = self.parallel_config.world_size - self.parallel_config.tensor_parallel_size
        rendezvous = ray.get(self._attached.shards[0].rendezvous.remote())
        places = ray.get([shard.place.remote() for shard in self._attached.shards])
        workers = [
            {
                "vllm_config": self.vllm_config,
                "local_rank": local_rank,
                "rank": rank,
                "distributed_init_method": rendezvous,
                "is_driver_worker": rank % self.parallel_config.tensor_parallel_size == 0,
            }
            for rank, local_rank in enumerate(local_ranks([place.node_id for place in places], self._one_gpu_each))
        ]
        self.collective_rpc("init_worker", args=(workers,))
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")
        self.collective_rpc(_update_block_size)
        # The scheduler reads the block size from this process's configuration.
        current_platform.update_block_size_for_backend(self.vllm_config)

    @property
    def _one_gpu_each(self) -> bool:
        return bool(current_platform.device_type == "cuda")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """vLLM's worker call on all ranks, results by rank. Raises ShardFailed, or TimeoutError after `timeout` s."""
        if method == HOLD_BEFORE:
            self._attached.hold()
        phase = method if isinstance(method, str) else getattr(method, "__name__", "callable").strip("_")
        refs = self._submit(method, args, kwargs or {})
        if non_block:
            return self._pool.submit(self._gather, phase, refs, timeout)
        return self._gather(phase, refs, timeout)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self._output_of("execute_model", (scheduler_output,), non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._output_of("sample_tokens", (grammar_output,), non_block)

    def _output_of(self, method: str, args: tuple[Any, ...], non_block: bool) -> Any:
        refs = self._submit(method, args, {})
        if non_block:
            future: Future[Any] = self._pool.submit(lambda: self._gather(method, refs, None)[self._output_rank])
            return future
        return self._gather(method, refs, None)[self._output_rank]

    def _submit(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        # One object store entry for all ranks instead of one copy of the arguments each.
        shared_args, shared_kwargs = ray.put(args), ray.put(dict(kwargs))
        return [shard.call.remote(method, shared_args, shared_kwargs) for shard in self._attached.shards]

    def _gather(self, phase: str, refs: list[Any], timeout: float | None) -> list[Any]:
        if self._failed is not None:
            raise self._failed
        started = time.time()
        deadline = None if timeout is None else started + timeout
        timed = phase not in _UNTIMED
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        if timed:
            for rank in rank_of.values():
                self._attached.on_event(PhaseEvent(rank, phase, started))
        pending, results = list(refs), [None] * len(refs)
        while pending:
            remaining = None if deadline is None else max(0.0, deadline - time.time())
            done, pending = ray.wait(pending, num_returns=1, timeout=remaining)
            if not done:
                waiting = sorted(rank_of[ref] for ref in pending)
                raise TimeoutError(f"{phase}: ranks {waiting} did not answer within {timeout} s")
            rank = rank_of[done[0]]
            results[rank] = self._result(done[0], rank, phase)
            if timed:
                self._attached.on_event(PhaseEvent(rank, phase, started, time.time() - started))
        return results

    def _result(self, ref: Any, rank: int, phase: str) -> Any:
        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            self._failed = ShardFailed(failure_of(error, rank, rank // self._attached.tp, phase))
            raise self._failed from error

    def check_health(self) -> None:
        ray.get([shard.place.remote() for shard in self._attached.shards], timeout=10)

    def shutdown(self) -> None:
        """Ends the call pool only: the run's driver owns the shards and ends them, also when they no longer answer."""
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _update_block_size(worker: Any) -> None:
    current_platform.update_block_size_for_backend(worker.vllm_config)


def local_ranks(nodes: list[str], one_gpu_each: bool) -> list[int]:
    """vLLM's local rank of each rank: its index among its node's ranks, or 0 where each actor sees one GPU only."""
    if one_gpu_each:
        return [0] * len(nodes)
    return [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
