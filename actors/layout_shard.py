"""The shard actor of the layout engine: one rank's recurrent caches with no weights and no vLLM."""

from __future__ import annotations

import os

from replayssm_orch.actors.failures import sendable
from replayssm_orch.actors.node_probe import arch_of, cpu_arch
from replayssm_orch.actors.rank_log import redirect_output
from replayssm_orch.actors.records import (
    Compilation,
    LayoutSpec,
    RankLayouts,
    ShardIdentity,
    ShardPlace,
    StepDecisions,
    Traffic,
    WarmupOutcome,
)


class LayoutShard:
    """Owns one layout engine. Offers the driver what `Shard` offers, less vLLM's worker calls."""

    def __init__(self, identity: ShardIdentity, spec: LayoutSpec) -> None:
        redirect_output(identity.run_id, f"rank-{identity.rank}")
        self._identity = identity
        self._spec = spec
        from replayssm_orch.actors.flashinfer_monitor import FlashInferMonitor

        self._monitor = FlashInferMonitor() if spec.device == "cuda" else None

    def place(self) -> ShardPlace:
        """Where this shard runs."""
        import ray
        import torch

        context = ray.get_runtime_context()
        cuda = self._spec.device == "cuda"
        return ShardPlace(
            rank=self._identity.rank,
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            device=self._spec.device,
            device_name=torch.cuda.get_device_name() if cuda else "cpu",
            gpu_ids=tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ())),
            arch=arch_of(*torch.cuda.get_device_capability()) if cuda else cpu_arch(),
        )

    @sendable
    def layouts(self) -> RankLayouts:
        """Allocate the caches and tell their layouts."""
        from replayssm_orch.actors.layout_engine import LayoutEngine, layout_capabilities
        from replayssm_orch.actors.layout_kernels import kernels_for
        from replayssm_orch.actors.layout_plan import plan_of
        from replayssm_orch.actors.warmup_session import WarmupSession

        plan = plan_of(self._spec)
        self._engine = LayoutEngine(plan, kernels_for(plan.device))
        self._session = WarmupSession(self._identity.rank, self._engine, layout_capabilities(self._engine))
        return RankLayouts(self._identity.rank, self._engine.layouts(), plan.num_blocks)

    def committable_blocks(self) -> int:
        """Cache blocks that this rank can commit."""
        return self._session.committable_blocks()

    def decisions(self) -> StepDecisions:
        """What decides the warmup steps on this rank."""
        return self._session.decisions()

    @sendable
    def run_step(self, step: str, agreed_blocks: int) -> tuple[WarmupOutcome, ...]:
        """Run one warmup step, to the end of its kernels."""
        outcomes = self._session.run(step, agreed_blocks)
        self._synchronize()
        return outcomes

    @sendable
    def serve(self, decode_steps: int) -> Traffic:
        """Serving-shaped traffic on this rank's caches, the same on every rank."""
        from replayssm_orch.actors.serving import serve

        traffic = serve(self._engine, decode_steps)
        self._synchronize()
        return traffic

    def _synchronize(self) -> None:
        if self._spec.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def arm_monitor(self) -> None:
        """Count this process's kernel compilations from now on; on the CPU nothing compiles."""
        if self._monitor is not None:
            self._monitor.arm()

    def take_compilations(self) -> tuple[Compilation, ...]:
        """The compilations counted since the last call."""
        return self._monitor.take() if self._monitor is not None else ()
