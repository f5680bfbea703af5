"""The actors of a run: one shard a rank and the engine host, in one placement group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from replayssm_orch.actors.engine_host import EngineHost
from replayssm_orch.actors.failures import failure_of
from replayssm_orch.actors.rank_log import log_directory
from replayssm_orch.actors.records import Device, EngineSpec, EngineStatus, Request, ShardIdentity
from replayssm_orch.actors.shard import Shard
from replayssm_orch.configs.errors import CannotRun
from replayssm_orch.configs.schema import WarmConfig
from replayssm_orch.orchestrator.cluster import Cluster
from replayssm_orch.orchestrator.failures import RunFailed
from replayssm_orch.orchestrator.placement import Placement, describe_bundles, describe_nodes

# Calls that only read what an actor already holds answer within this, or the actor is taken for dead.
_ANSWER_SECONDS = 60.0
_ENVIRONMENT = {
    # The engine core stays in the engine host's process, where its executor finds the shards.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Paged GDN pools; FlashInfer reads it at import and vLLM requires it.
    "SGLANG_GDN_WY_STRIDED_QKV": "1",
}
# The engine host has no GPU of its own, but vLLM's configuration asks NVML about the node's.
_HOST_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class ShardGroup:
    """Handles to a run's actors. The driver's only way to them; it never reaches into a shard's internals."""

    def __init__(self, placement_group: Any, shards: tuple[Any, ...], host: Any, run_id: str, tp: int) -> None:
        self._placement_group = placement_group
        self._shards = shards
        self._host = host
        self._run_id = run_id
        self._tp = tp
        self._bundle_nodes: dict[int, str] = {}
        self._bundle_of_rank: tuple[int, ...] = ()

    @classmethod
    def create(
        cls, cluster: Cluster, placement: Placement, config: WarmConfig, run_id: str, device: Device, timeout: float
    ) -> ShardGroup:
        """Reserve the placement group and spawn the actors in it.

        Raises CannotRun when the cluster cannot hold the placement within `timeout` seconds; nothing is left then.
        """
        import ray
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        reserved = placement_group([dict(b) for b in placement.bundles], strategy=placement.strategy)
        try:
            if not reserved.wait(timeout):
                raise CannotRun(_no_capacity(placement, cluster, config.start_timeout))
            table = placement_group_table(reserved)
            options = {"max_restarts": 0, "max_task_retries": 0}
            shards = tuple(
                ray.remote(Shard)
                .options(
                    num_cpus=placement.per_rank["CPU"],
                    num_gpus=placement.per_rank.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, bundle),
                    runtime_env=_runtime_env(_ENVIRONMENT),
                    **options,
                )
                .remote(ShardIdentity(run_id, rank, tp_rank=rank % config.tp, pp_rank=rank // config.tp))
                for rank, bundle in enumerate(placement.bundle_of_rank)
            )
            host = (
                ray.remote(EngineHost)
                .options(
                    num_cpus=0,
                    max_concurrency=4,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, 0),
                    runtime_env=_runtime_env(_ENVIRONMENT | (_HOST_ENVIRONMENT if device == "cuda" else {})),
                    **options,
                )
                .remote(run_id)
            )
        except BaseException:
            remove_placement_group(reserved)
            raise
        group = cls(reserved, shards, host, run_id, config.tp)
        group._bundle_nodes = dict(table["bundles_to_node_id"])
        group._bundle_of_rank = placement.bundle_of_rank
        return group

    def start(self, spec: EngineSpec) -> Any:
        """Start the engine over the shards; the reference is ready when vLLM's warm-up is over, or it failed."""
        return self._host.start.remote(spec, self._shards)

    def places(self) -> list[Any]:
        """References to where each rank runs."""
        return [shard.place.remote() for shard in self._shards]

    def status(self, since: int) -> EngineStatus:
        """The engine host's events from number `since` on. Raises RunFailed when it died."""
        import ray

        try:
            status: EngineStatus = ray.get(self._host.status.remote(since), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            raise RunFailed(failure_of(error, None, None, "engine")) from error
        return status

    def release(self) -> None:
        """End the hold before vLLM's warm-up."""
        self._host.release.remote()

    def warm(self) -> list[Any]:
        """References to every rank's warmup outcomes."""
        return [shard.warm.remote() for shard in self._shards]

    def arm_monitors(self) -> list[Any]:
        """References to every rank's armed compilation monitor."""
        return [shard.arm_monitor.remote() for shard in self._shards]

    def take_compilations(self) -> list[Any]:
        """References to what every rank's monitor counted since the last call."""
        return [shard.take_compilations.remote() for shard in self._shards]

    def serve(self, requests: Sequence[Request]) -> Any:
        """Reference to the number of tokens that the batch gave."""
        return self._host.serve.remote(tuple(requests))

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """(ready, pending) after at most `timeout` seconds or as soon as one is ready."""
        import ray

        ready, pending = ray.wait(refs, num_returns=1, timeout=timeout)
        return ready, pending

    def result(self, ref: Any, rank: int | None, step: str) -> Any:
        """A ready reference's value. Raises RunFailed naming the rank (None: the engine host) when the call failed."""
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            stage = None if rank is None else rank // self._tp
            raise RunFailed(failure_of(error, rank, stage, step)) from error

    def log_files(self) -> dict[str, tuple[str, str]]:
        """For each log of the run, the node that has it and its path there."""
        directory = log_directory(self._run_id)
        files = {
            f"rank-{rank}": (self._bundle_nodes[bundle], str(directory / f"rank-{rank}.log"))
            for rank, bundle in enumerate(self._bundle_of_rank)
        }
        return files | {"engine": (self._bundle_nodes[0], str(directory / "engine.log"))}

    def kill(self) -> None:
        """End every actor at once, answering or not."""
        import ray

        for actor in (self._host, *self._shards):
            ray.kill(actor, no_restart=True)

    def remove(self) -> None:
        """Give the placement group back to the cluster."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._placement_group)


def _runtime_env(environment: dict[str, str]) -> dict[str, Any]:
    """A runtime environment with our variables; what the user's environment already sets stays."""
    return {"env_vars": {name: value for name, value in environment.items() if name not in os.environ}}


def _no_capacity(placement: Placement, cluster: Cluster, start_timeout: float) -> str:
    import ray

    free = ray.available_resources()
    return (
        f"--start-timeout {start_timeout:g}: asked for {describe_bundles(placement)} ({placement.strategy}); "
        f"the cluster has {describe_nodes(cluster.capacities())}, free now {free.get('CPU', 0):g} CPU and "
        f"{free.get('GPU', 0):g} GPU; free or add nodes, or lower --tp or --pp"
    )
