"""GPU profiles that kernels can be compiled for without having the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from replayssm_orch.configs.errors import ConfigError
from replayssm_orch.configs.presets import did_you_mean

_PROFILES = Path(__file__).parent / "targets.yaml"


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU profile; `gpu` is NVML's name, `arch` the compiler's (`sm_90a`), both memories are in bytes."""

    name: str
    gpu: str
    arch: str
    multiprocessors: int
    shared_memory_per_multiprocessor: int
    memory: int


def target_names() -> tuple[str, ...]:
    """The names that `--target` may be."""
    return tuple(_targets())


def load_target(name: str, shown: str | None = None) -> Target:
    """The profile called `name`; raises ConfigError listing the profiles where there is none.

    `shown` is the option and its value as the user typed them, `--target NAME` where it is left out.
    """
    targets = _targets()
    if name not in targets:
        shown = shown or f"--target {name}"
        closest = did_you_mean(name, targets)
        raise ConfigError(f"{shown}: unknown GPU profile{closest}; profiles are {', '.join(targets)}")
    return targets[name]


def target_of_gpu(gpu_name: str) -> Target | None:
    """The profile of a GPU by NVML's name of it (`NVIDIA H200`), None where no profile is of that part."""
    part = gpu_name.removeprefix("NVIDIA ")
    return next((t for t in _targets().values() if part == t.gpu or part.startswith(f"{t.gpu} ")), None)


@cache
def _targets() -> dict[str, Target]:
    profiles = yaml.safe_load(_PROFILES.read_text(encoding="utf-8"))
    return {
        name: Target(name=name, memory=profile.pop("memory_mib") << 20, **profile) for name, profile in profiles.items()
    }
