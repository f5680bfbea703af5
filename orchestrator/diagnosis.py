"""The records of `doctor`: what one machine, and the cluster it was pointed at, can do. `--json` dumps `Diagnosis`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from replayssm_orch.actors.records import Device


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU: `memory` in bytes, `profile` the `--target` that is this part (None where no profile is)."""

    name: str
    arch: str
    memory: int
    profile: str | None


@dataclass(frozen=True, slots=True)
class Capability:
    """A name that some warmup or engine needs of a package, and whether the installed package defines it."""

    package: str
    what: str
    name: str
    present: bool


@dataclass(frozen=True, slots=True)
class Warmup:
    """Whether one warmup could run on an engine here; `reasons` say why not, and are empty where it could."""

    name: str
    can_run: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """Whether an engine could run on a device of this machine; `reasons` are empty where it could."""

    name: Literal["vllm", "layout"]
    device: Device
    can_run: bool
    reasons: tuple[str, ...]
    warmups: tuple[Warmup, ...]


@dataclass(frozen=True, slots=True)
class Cache:
    """One directory cache. `variable` is the environment variable that moves it.

    `bytes` is its size on disk, None where the directory does not exist; with `bytes_complete` false it holds at least
    that much. `file_system` (the kernel's type), `free_bytes` and `writable` are those of the directory, or of the
    nearest one above that exists. `kernels`: it holds compiled kernels, which want a local disk.
    """

    name: str
    variable: str
    path: str
    exists: bool
    kernels: bool
    bytes: int | None
    bytes_complete: bool
    writable: bool
    file_system: str
    network: bool
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """One node: CPUs and GPUs in Ray's units, the GPUs' names, and its packages' versions."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    gpu_names: tuple[str, ...]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The cluster at `address`; with `address` None the one node that a local Ray would have (none is started).

    `version_conflicts` is one line for each package whose versions differ between nodes, or from the driver's.
    `unanswered` says why the nodes could not be asked for their versions, None where they were.
    """

    address: str | None
    nodes: tuple[Node, ...]
    version_conflicts: tuple[str, ...] = ()
    unanswered: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is missing or in the way, and what to do about it; one line each."""

    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `doctor` found. `versions` has None for a package that is not installed; `shared_memory_bytes` is what is
    free in /dev/shm, None where there is none."""

    schema_version: int
    versions: Mapping[str, str | None]
    gpus: tuple[Gpu, ...]
    engines: tuple[Engine, ...]
    capabilities: tuple[Capability, ...]
    caches: tuple[Cache, ...]
    shared_memory_bytes: int | None
    cluster: ClusterShape
    problems: tuple[Problem, ...]
