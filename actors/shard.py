"""The shard actor: one rank's part of the model, driven by vLLM's own worker."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from replayssm_orch.actors.failures import sendable
from replayssm_orch.actors.rank_log import redirect_output
from replayssm_orch.actors.records import (
    Compilation,
    RankLayouts,
    ShardIdentity,
    ShardPlace,
    StepDecisions,
    WarmupOutcome,
)

if TYPE_CHECKING:
    from replayssm_orch.actors.warmup_session import WarmupSession


class Shard:
    """Owns one vLLM worker process: created empty, then brought up by the executor's calls."""

    def __init__(self, identity: ShardIdentity) -> None:
        redirect_output(identity.run_id, f"rank-{identity.rank}")
        from replayssm_orch.actors.vllm_adapter import CompilationMonitor

        self._identity = identity
        self._monitor = CompilationMonitor()

    @cached_property
    def _worker(self) -> Any:
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        return WorkerWrapperBase(rpc_rank=self._identity.rank, global_rank=self._identity.rank)

    def place(self) -> ShardPlace:
        """Where this shard runs. Raises CannotRun where its vLLM lacks an extension point."""
        import ray

        from replayssm_orch.actors.vllm_adapter import device_identity, require_extension_points

        require_extension_points()
        context = ray.get_runtime_context()
        device, device_name, arch = device_identity()
        return ShardPlace(
            rank=self._identity.rank,
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            device=device,
            device_name=device_name,
            gpu_ids=tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ())),
            arch=arch,
        )

    def rendezvous(self) -> str:
        """An init method for torch.distributed on this shard's node, which rank 0 will serve."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return f"tcp://{ray.util.get_node_ip_address()}:{port}"

    @sendable
    def call(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One of vLLM's worker RPCs: a method name or a callable that takes the worker (vLLM's `collective_rpc`)."""
        from vllm.v1.outputs import AsyncModelRunnerOutput
        from vllm.v1.serial_utils import run_method

        from replayssm_orch.actors.vllm_adapter import adopt_logging

        if method == "init_worker":
            adopt_logging(args[0][self._identity.rank]["vllm_config"])
        result = run_method(self._worker, method, args, kwargs)
        return result.get_output() if isinstance(result, AsyncModelRunnerOutput) else result

    def layouts(self) -> RankLayouts:
        """The cache layouts of this rank, once the caches are allocated."""
        from replayssm_orch.actors.vllm_adapter import rank_layouts

        return rank_layouts(self._worker.worker, self._identity.rank)

    def committable_blocks(self) -> int:
        """Cache blocks that this rank can commit (a collective where vLLM's caches grow: call it on every rank)."""
        return self._session.committable_blocks()

    def decisions(self) -> StepDecisions:
        """What decides the warmup steps on this rank."""
        return self._session.decisions()

    @sendable
    def run_step(self, step: str, agreed_blocks: int) -> tuple[WarmupOutcome, ...]:
        """Run one ReplaySSM warmup step. Only where no request is live: the guard clears slots and trackers."""
        outcomes = self._session.run(step, agreed_blocks)
        self._worker.worker.synchronize_device()
        return outcomes

    @cached_property
    def _session(self) -> WarmupSession:
        from replayssm_orch.actors.vllm_capabilities import adapt_runner
        from replayssm_orch.actors.warmup_session import WarmupSession

        return WarmupSession(self._identity.rank, *adapt_runner(self._worker.worker.model_runner))

    def arm_monitor(self) -> None:
        """Count this process's kernel compilations from now on."""
        self._monitor.arm()

    def take_compilations(self) -> tuple[Compilation, ...]:
        """The compilations counted since the last call."""
        return self._monitor.take()
