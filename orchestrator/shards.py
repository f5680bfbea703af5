"""The actors of a run: one shard a rank and the engine host, in one placement group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replayssm_orch.actors.engine_host import EngineHost
from replayssm_orch.actors.failures import failure_of
from replayssm_orch.actors.layout_shard import LayoutShard
from replayssm_orch.actors.rank_log import log_directory
from replayssm_orch.actors.records import Device, EngineSpec, EngineStatus, LayoutSpec, Request, ShardIdentity
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

    def __init__(self, run_id: str, tp: int, placement: Placement, reserved: Any) -> None:
        from ray.util.placement_group import placement_group_table

        self._run_id = run_id
        self._tp = tp
        self._placement = placement
        self._reserved = reserved
        self._bundle_nodes: dict[int, str] = dict(placement_group_table(reserved)["bundles_to_node_id"])
        self._shards: tuple[Any, ...] = ()
        self._host: Any = None

    @classmethod
    def reserve(
        cls, cluster: Cluster, placement: Placement, config: WarmConfig, run_id: str, timeout: float
    ) -> ShardGroup:
        """Reserve the placement group.

        Raises CannotRun when the cluster cannot hold it within `timeout` seconds; nothing is left then.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        reserved = placement_group([dict(b) for b in placement.bundles], strategy=placement.strategy)
        try:
            if not reserved.wait(timeout):
                raise CannotRun(_no_capacity(placement, cluster, config.start_timeout))
            return cls(run_id, config.tp, placement, reserved)
        except BaseException:
            remove_placement_group(reserved)
            raise

    def spawn_vllm(self, device: Device) -> None:
        """Spawn a vLLM shard for each rank, and the engine host beside rank 0."""
        import ray

        self._shards = tuple(self._actor(Shard, rank).remote(identity) for rank, identity in self._identities())
        environment = _ENVIRONMENT | (_HOST_ENVIRONMENT if device == "cuda" else {})
        host = ray.remote(EngineHost).options(num_cpus=0, max_concurrency=4, **self._options(0, environment))
        self._host = host.remote(self._run_id)

    def spawn_layout(self, specs: Sequence[LayoutSpec]) -> None:
        """Spawn a layout shard for each rank; `specs` by stage."""
        self._shards = tuple(
            self._actor(LayoutShard, rank).remote(identity, specs[identity.pp_rank])
            for rank, identity in self._identities()
        )

    def _identities(self) -> Iterator[tuple[int, ShardIdentity]]:
        for rank in range(len(self._placement.bundle_of_rank)):
            yield rank, ShardIdentity(self._run_id, rank, tp_rank=rank % self._tp, pp_rank=rank // self._tp)

    def _actor(self, shard: type, rank: int) -> Any:
        import ray

        per_rank = self._placement.per_rank
        options = self._options(self._placement.bundle_of_rank[rank], _ENVIRONMENT)
        return ray.remote(shard).options(num_cpus=per_rank["CPU"], num_gpus=per_rank.get("GPU", 0), **options)

    def _options(self, bundle: int, environment: Mapping[str, str]) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # What the user's environment already sets stays.
        ours = {name: value for name, value in environment.items() if name not in os.environ}
        return {
            "max_restarts": 0,
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._reserved, bundle),
            "runtime_env": {"env_vars": ours},
        }

    def on_every_rank(self, method: str, *args: object) -> list[Any]:
        """References to the result of a shard method on every rank, by rank."""
        return [getattr(shard, method).remote(*args) for shard in self._shards]

    def start(self, spec: EngineSpec) -> Any:
        """Start vLLM's engine over the shards; ready when its warm-up is over, or when it failed."""
        return self._host.start.remote(spec, self._shards)

    def status(self, since: int) -> EngineStatus:
        """The engine host's events from number `since` on; none without a host. Raises RunFailed when it died."""
        import ray

        if self._host is None:
            return EngineStatus(events=(), held=None)
        try:
            status: EngineStatus = ray.get(self._host.status.remote(since), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            raise RunFailed(failure_of(error, None, None, "engine")) from error
        return status

    def release(self) -> None:
        """End the hold before vLLM's warm-up."""
        self._host.release.remote()

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
            for rank, bundle in enumerate(self._placement.bundle_of_rank)
        }
        if self._host is not None:
            files["engine"] = (self._bundle_nodes[0], str(directory / "engine.log"))
        return files

    def kill(self) -> None:
        """End every actor at once, answering or not."""
        import ray

        for actor in (*self._shards, *filter(None, [self._host])):
            ray.kill(actor, no_restart=True)

    def remove(self) -> None:
        """Give the placement group back to the cluster."""
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._reserved)


def _no_capacity(placement: Placement, cluster: Cluster, start_timeout: float) -> str:
    import ray

    free = ray.available_resources()
    return (
        f"--start-timeout {start_timeout:g}: asked for {describe_bundles(placement)} ({placement.strategy}); "
        f"the cluster has {describe_nodes(cluster.capacities())}, free now {free.get('CPU', 0):g} CPU and "
        f"{free.get('GPU', 0):g} GPU; free or add nodes, raise --start-timeout, or lower --tp or --pp"
    )
