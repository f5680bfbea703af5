"""What the installed packages can do, read from their files: importing vLLM or FlashInfer takes seconds."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from replayssm_orch.actors.node_probe import installed_versions
from replayssm_orch.actors.vllm_adapter import EXECUTOR_HOOKS, EXTENSION_POINTS, MAMBA2_FLASHINFER
from replayssm_orch.orchestrator.diagnosis import Capability

_DISPATCH = "vllm.model_executor.layers.mamba.ops.ssu_dispatch"
# What -> where it is defined: module, and the name in it. A dotted name goes into a class, or on to a parameter.
VLLM_LIFECYCLE = "ReplaySSM lifecycle"
VLLM_GDN = "GDN ReplaySSM"
VLLM_MAMBA2 = "Mamba2 ReplaySSM over FlashInfer"
VLLM_DUMMY_SLOTS = "dummy runs on real state slots"
VLLM_GROWABLE = "growable KV caches"
FLASHINFER_GDN = "GDN decode kernel"
FLASHINFER_MATERIALIZER = "GDN materializer"
FLASHINFER_MAMBA2 = "Mamba2 decode kernel"
FLASHINFER_MAMBA2_MATERIALIZER = "Mamba2 materializer"
_CAPABILITIES: dict[str, tuple[str, str]] = {
    VLLM_LIFECYCLE: (_DISPATCH, "ReplaySSMModelContext"),
    VLLM_GDN: ("vllm.config.vllm", "VllmConfig.is_gdn_replayssm_enabled"),
    VLLM_MAMBA2: MAMBA2_FLASHINFER,
    VLLM_DUMMY_SLOTS: ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner._dummy_run.valid_dummy_state_slots"),
    VLLM_GROWABLE: ("vllm.v1.worker.extensible_kv_cache", "ensure_kv_cache_blocks"),
    FLASHINFER_GDN: (
        "flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush",
        "gated_delta_rule_mtp_ucache_flush",
    ),
    FLASHINFER_MATERIALIZER: ("flashinfer.gdn_kernels.gdn_prefix_materialize", "gdn_prefix_materialize"),
    FLASHINFER_MAMBA2: ("flashinfer.mamba.checkpointing_ssu", "checkpointing_ssu"),
    FLASHINFER_MAMBA2_MATERIALIZER: ("flashinfer.mamba.replayssm_materialize", "replayssm_materialize"),
}
# PyPI's builds of these load CUDA libraries that the CPU build of torch does not bring.
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Installed:
    """What is installed. `extension_points` names those that vLLM lacks; `misfits` the companions of another torch
    build; `nvcc`: FlashInfer can build its nvcc modules, or finds them built."""

    versions: dict[str, str]
    vllm_build: Literal["cpu", "cuda"] | None
    torch_build: Literal["cpu", "cuda"] | None
    capabilities: tuple[Capability, ...]
    extension_points: tuple[str, ...]
    misfits: tuple[str, ...]
    nvcc: bool

    def lacks(self, *whats: str) -> tuple[str, ...]:
        """One line for each capability of `whats` that is missing."""
        return tuple(
            f"{c.package} has no {c.what} ({c.name})" for c in self.capabilities if c.what in whats and not c.present
        )


def look() -> Installed:
    """What this environment has."""
    versions = installed_versions()
    return Installed(
        versions=versions,
        vllm_build=_vllm_build(versions.get("vllm")),
        torch_build=_torch_build() if "torch" in versions else None,
        capabilities=tuple(
            Capability(module.partition(".")[0], what, f"{module}.{name}", defines(module, name))
            for what, (module, name) in _CAPABILITIES.items()
        ),
        extension_points=_missing_extension_points() if "vllm" in versions else (),
        misfits=_misfits(versions.get("torch", "")),
        nvcc=_has_nvcc(),
    )


def defines(module: str, name: str) -> bool:
    """Whether the source of `module` defines `name`; `Class.method.parameter` looks into its members.

    Nothing is imported. False where the package or the file is missing or cannot be parsed.
    """
    head, *members = name.split(".")
    found = [node for node in _top_level(module) if head in _names(node)]
    for member in members:
        found = [inner for node in found for inner in _members(node) if member in _names(inner)]
    return bool(found)


@cache
def _top_level(module: str) -> tuple[ast.AST, ...]:
    """The statements of `module`, those under `if` and `try` included."""
    source = _source(module)
    if source is None:
        return ()
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError):
        return ()
    return tuple(_flat(tree.body))


def _source(module: str) -> Path | None:
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder).joinpath(*parts)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([*node.body, *node.orelse])


def _members(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.ClassDef):
        return list(_flat(node.body))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return []


def _names(node: ast.AST) -> set[str]:
    """The names that one statement, or parameter, binds."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _missing_extension_points() -> tuple[str, ...]:
    missing = [
        f"{module}.{name}" for module, names in EXTENSION_POINTS.items() for name in names if not defines(module, name)
    ]
    executor = "vllm.v1.executor.abstract"
    missing += [f"Executor.{hook}" for hook in EXECUTOR_HOOKS if not defines(executor, f"Executor.{hook}")]
    return tuple(missing)


def _vllm_build(version: str | None) -> Literal["cpu", "cuda"] | None:
    """vLLM's own rule (`vllm.platforms.vllm_version_matches_substr`): the CPU build says so in its version."""
    if version is None:
        return None
    try:
        return "cpu" if "cpu" in metadata.version("vllm") else "cuda"
    except metadata.PackageNotFoundError:
        return "cpu"


def _torch_build() -> Literal["cpu", "cuda"] | None:
    """From `torch/version.py`: `cuda` is None in a CPU build."""
    for node in _top_level("torch.version"):
        if isinstance(node, ast.Assign | ast.AnnAssign) and "cuda" in _names(node):
            return "cpu" if node.value is None or ast.literal_eval(node.value) is None else "cuda"
    return None


def _misfits(torch_version: str) -> tuple[str, ...]:
    """torch's companions that are not of the CPU build, where torch is PyTorch's `+cpu` one."""
    if not torch_version.endswith("+cpu"):
        return ()
    found = []
    for package in _TORCH_COMPANIONS:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if not version.endswith("+cpu"):
            found.append(f"{package} {version}")
    return tuple(found)


def _has_nvcc() -> bool:
    """Whether FlashInfer would find nvcc (`flashinfer.jit.cpp_ext.get_cuda_path`) or its prebuilt modules."""
    named = os.environ.get("FLASHINFER_NVCC")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = named or (str(Path(home) / "bin/nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    return shutil.which(nvcc) is not None or importlib.util.find_spec("flashinfer_jit_cache") is not None
