"""The diagnosis: what this machine, and the cluster it is pointed at, can do. Starts nothing, imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata

from replayssm_orch.actors.node_probe import PACKAGES, visible_gpus
from replayssm_orch.configs.errors import CannotRun
from replayssm_orch.configs.targets import target_of_gpu
from replayssm_orch.orchestrator.abilities import engines
from replayssm_orch.orchestrator.advice import problems
from replayssm_orch.orchestrator.caches import look_at_caches
from replayssm_orch.orchestrator.cluster import connect, probe_nodes, resolve_address, version_conflicts
from replayssm_orch.orchestrator.diagnosis import ClusterShape, Diagnosis, Gpu, Node
from replayssm_orch.orchestrator.installed import look

SCHEMA_VERSION = 1
_ANSWER_SECONDS = 60.0
_PROBE_SECONDS = 60.0


def diagnose(address: str | None) -> Diagnosis:
    """What can be done here, and in the cluster at `address` (None: RAY_ADDRESS, else no cluster).

    Raises ConfigError for an address of the wrong kind and CannotRun when no cluster answers there.
    """
    found = look()
    gpus = assignable_gpus(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    resolved = resolve_address(address)
    cluster = _local_shape(gpus, found.versions) if resolved is None else _borrowed_shape(resolved, found.versions)
    caches = look_at_caches(os.environ)
    shared_memory = _shared_memory()
    return Diagnosis(
        schema_version=SCHEMA_VERSION,
        versions={
            "python": found.versions["python"],
            "replayssm-orch": _own_version(),
            **{package: found.versions.get(package) for package in PACKAGES},
        },
        gpus=gpus,
        engines=engines(found, gpus),
        capabilities=found.capabilities,
        caches=caches,
        shared_memory_bytes=shared_memory,
        cluster=cluster,
        problems=problems(found, gpus, caches, cluster, shared_memory),
    )


def assignable_gpus(gpus: Sequence[Gpu], visible: str | None) -> tuple[Gpu, ...]:
    """Those of `gpus` (in NVML's order) that CUDA_VISIBLE_DEVICES = `visible` leaves.

    As CUDA reads it: entries count until the first that names no GPU. An entry by UUID cannot be told apart here and
    takes the next GPU.
    """
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        index = len(chosen) if entry.startswith(("GPU-", "MIG-")) else int(entry) if entry.isdecimal() else -1
        if not 0 <= index < len(gpus):
            break
        chosen.append(gpus[index])
    return tuple(chosen)


def _gpus() -> tuple[Gpu, ...]:
    targets = ((gpu, target_of_gpu(gpu.name)) for gpu in visible_gpus())
    return tuple(Gpu(gpu.name, gpu.arch, gpu.memory, target.name if target else None) for gpu, target in targets)


def _own_version() -> str | None:
    try:
        return metadata.version("replayssm-orch")
    except metadata.PackageNotFoundError:
        return None


def _local_shape(gpus: Sequence[Gpu], versions: Mapping[str, str]) -> ClusterShape:
    names = tuple(gpu.name for gpu in gpus)
    return ClusterShape(None, (Node("", "local", float(os.cpu_count() or 1), float(len(gpus)), names, versions),))


def _borrowed_shape(address: str, versions: Mapping[str, str]) -> ClusterShape:
    with connect(address, 1, _ANSWER_SECONDS) as cluster:
        unanswered = None
        try:
            infos = {info.node_id: info for info in probe_nodes(cluster, _PROBE_SECONDS)}
        except CannotRun as error:
            infos, unanswered = {}, str(error)
        nodes = []
        for node in cluster.nodes():
            info = infos.get(node["NodeID"])
            nodes.append(
                Node(
                    node_id=node["NodeID"],
                    address=node["NodeManagerAddress"],
                    cpus=node["Resources"].get("CPU", 0.0),
                    gpus=node["Resources"].get("GPU", 0.0),
                    gpu_names=tuple(gpu.name for gpu in info.gpus) if info else (),
                    versions=info.versions if info else {},
                )
            )
    return ClusterShape(address, tuple(nodes), version_conflicts(tuple(infos.values()), versions), unanswered)


def _shared_memory() -> int | None:
    try:
        memory = os.statvfs("/dev/shm")
    except OSError:
        return None
    return memory.f_bavail * memory.f_frsize
