"""What the installed vLLM can do for the warmups: found by asking for it, never by version."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeGuard, cast

from replayssm_orch.actors.flashinfer_adapter import gdn_materializer
from replayssm_orch.actors.vllm_adapter import NO_FLASHINFER_REPLAYSSM, has_flashinfer_replayssm
from replayssm_orch.actors.vllm_release_view import (
    RELEASE_TRACKERS,
    MixerView,
    RunnerView,
    missing_decode_support,
)
from replayssm_orch.actors.warmups.capabilities import REPLAYSSM_OFF, Capabilities, CreateLifecycle, Unavailable
from replayssm_orch.actors.warmups.protocol import GatedDeltaNetLayer, RecurrentLayer, Runner

_LIFECYCLE_MODULE = "vllm.model_executor.layers.mamba.ops.ssu_dispatch"
_GROWABLE_MODULE = "vllm.v1.worker.extensible_kv_cache"


def adapt_runner(runner: Any) -> tuple[Runner, Capabilities]:
    """The runner as the warmups see it, and what can run on it.

    A vLLM whose configuration answers `use_flashinfer_replayssm` speaks the protocol itself; every other one is seen
    through `RunnerView`. `runner` is a model runner of vLLM after its KV cache was initialised.
    """
    config = runner.vllm_config
    ensure, committable = growable_cache()
    if hasattr(config, "use_flashinfer_replayssm") and hasattr(config, "is_gdn_replayssm_enabled"):
        return runner, Capabilities(
            is_recurrent=_is_mamba_base,
            is_gdn=_is_gdn,
            num_committable_blocks=committable,
            ensure_blocks=ensure,
            create_lifecycle=vllm_lifecycle(),
            materialize=gdn_materializer(),
            decode_kernel=lambda width: None,
        )
    view = RunnerView(runner)
    no_gdn = Unavailable("this vLLM has no GDN ReplaySSM (VllmConfig.is_gdn_replayssm_enabled is missing)")
    missing = missing_decode_support(runner)
    capabilities = Capabilities(
        is_recurrent=_is_mixer_view,
        is_gdn=_is_never_gdn,
        num_committable_blocks=committable,
        ensure_blocks=ensure,
        create_lifecycle=vllm_lifecycle(),
        materialize=no_gdn,
        decode_kernel=lambda width: missing,
        trackers=RELEASE_TRACKERS,
        no_gdn_replayssm=no_gdn.reason,
    )
    return view, replace(capabilities, no_replayssm=_why_no_replayssm(config))


def _why_no_replayssm(config: Any) -> str:
    """What to report where the configuration says that there is no FlashInfer ReplaySSM."""
    device = config.device_config.device_type
    if device != "cuda":
        return f"no ReplaySSM kernel runs on device {device}"
    return REPLAYSSM_OFF if has_flashinfer_replayssm() else NO_FLASHINFER_REPLAYSSM


def vllm_lifecycle() -> CreateLifecycle | Unavailable:
    """vLLM's `ReplaySSMModelContext.create`, where there is one that takes (groups, max_num_reqs)."""
    try:
        module = importlib.import_module(_LIFECYCLE_MODULE)
    except ImportError as error:
        return Unavailable(f"{_LIFECYCLE_MODULE} cannot be imported: {error}")
    context = getattr(module, "ReplaySSMModelContext", None)
    if context is None:
        return Unavailable(f"this vLLM has no ReplaySSM request lifecycle ({_LIFECYCLE_MODULE}.ReplaySSMModelContext)")
    required = [
        parameter.name
        for parameter in inspect.signature(context.create).parameters.values()
        if parameter.default is parameter.empty
    ]
    if len(required) != 2:
        return Unavailable(f"ReplaySSMModelContext.create takes ({', '.join(required)}), not (groups, max_num_reqs)")
    return cast(CreateLifecycle, context.create)


def growable_cache() -> tuple[Callable[[Runner, int], None], Callable[[Runner], int]]:
    """(ensure blocks, committable blocks): vLLM's for growable KV caches, else those of a cache of fixed size."""
    try:
        module = importlib.import_module(_GROWABLE_MODULE)
        ensure, committable = module.ensure_kv_cache_blocks, module.num_committable_kv_blocks
    except (ImportError, AttributeError):
        return (lambda runner, num_blocks: None), (lambda runner: runner.kv_cache_config.num_blocks)
    return ensure, committable


def _is_mamba_base(module: object) -> TypeGuard[RecurrentLayer]:
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return isinstance(module, MambaBase) and hasattr(module, "use_flashinfer_replayssm")


def _is_gdn(module: object) -> TypeGuard[GatedDeltaNetLayer]:
    return _is_mamba_base(module) and hasattr(module, "replayssm_rings")


def _is_mixer_view(module: object) -> TypeGuard[RecurrentLayer]:
    return isinstance(module, MixerView)


def _is_never_gdn(module: object) -> TypeGuard[GatedDeltaNetLayer]:
    return False
