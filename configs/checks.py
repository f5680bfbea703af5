"""Combinations of model, parallel degrees and sizes that cannot run, refused before anything is started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal

from replayssm_orch.configs.errors import ConfigError
from replayssm_orch.configs.models import ModelSpec
from replayssm_orch.configs.schema import WarmConfig, option_name, speculative_tokens

# Speculative tokens whose decode step fits the width that FlashInfer's GDN kernel then executes: 1, 4 or 8 tokens.
_GDN_SPECULATIVE_TOKENS = (0, 1, 2, 3, 7)


def check_parallel(spec: ModelSpec, config: WarmConfig, device: Literal["cuda", "cpu"] | None = None) -> None:
    """Raise ConfigError, naming field, value and fix, if `config` cannot run `spec`.

    `device` is the resolved device; None takes `config.device`, and then `auto` skips what only CUDA forbids.
    """
    device = device or (None if config.device == "auto" else config.device)
    replayssm = config.engine == "vllm" and _uses_replayssm(spec, config, device)
    if problem := _tp_problem(spec, config.tp, replayssm):
        valid = [tp for tp in range(1, spec.attention.heads + 1) if _tp_problem(spec, tp, replayssm) is None]
        raise ConfigError(f"{config.shown('tp')}: {problem}; use {option_name('tp')} {_either(valid)}")
    _check_stages(spec, config)
    _check_device_share(config, device)
    _check_sizes(spec, config)


def stage_layers(num_layers: int, pp: int) -> tuple[tuple[int, int], ...]:
    """The hidden layers [start, end) of each pipeline stage.

    The split is that of vllm.distributed.utils.get_pp_indices: an even one, whose remainder goes to the stages before
    the last, from the back; or the one that the environment variable VLLM_PP_LAYER_PARTITION gives. Raises ConfigError
    where that variable does not fit.
    """
    sizes = _partition_from_environment(num_layers, pp)
    if sizes is None:
        sizes = [num_layers // pp] * pp
        for from_the_back in range(2, num_layers % pp + 2):
            sizes[-from_the_back] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(pp)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _tp_problem(spec: ModelSpec, tp: int, replayssm: bool) -> str | None:
    """Why the model cannot be split over `tp` ranks, or None.

    Recurrent heads and attention heads divide evenly. KV heads and Mamba groups may be replicated: vLLM's attention
    layers ask that one of KV heads and TP divides the other, its MambaMixer2 that TP divides the groups or there is
    one group; with ReplaySSM its B ring (MambaStateShapeCalculator.append_replayssm_ring) is never replicated.
    """
    counts: list[tuple[str, int]] = [("attention heads", spec.attention.heads)]
    if spec.gdn:
        counts = [("GDN value heads", spec.gdn.value_heads), ("GDN key heads", spec.gdn.key_heads), *counts]
    if spec.mamba2:
        counts = [("Mamba2 heads", spec.mamba2.heads), *counts]
    for what, count in counts:
        if count % tp:
            return f"{count} {what} cannot be divided over {tp} ranks"
    kv_heads = spec.attention.kv_heads
    if kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} attention KV heads can be neither divided over nor replicated to {tp} ranks"
    if spec.mamba2 and spec.mamba2.groups % tp:
        if replayssm:
            return f"{spec.mamba2.groups} Mamba groups cannot be divided over {tp} ranks, which vLLM's ReplaySSM needs"
        if spec.mamba2.groups != 1:
            return f"{spec.mamba2.groups} Mamba groups can be neither divided over nor replicated to {tp} ranks"
    return None


def _uses_replayssm(spec: ModelSpec, config: WarmConfig, device: Literal["cuda", "cpu"] | None) -> bool:
    preset = spec.vllm_engine_args.get(device, {}) if device else {}
    return bool({**preset, **config.engine_args}.get("use_replayssm"))


def _check_stages(spec: ModelSpec, config: WarmConfig) -> None:
    layers = len(spec.layer_kinds)
    if problem := _pp_problem(spec, config.pp):
        valid = [pp for pp in range(1, layers + 1) if _pp_works(spec, pp)]
        fix = f"use {option_name('pp')} {_either(valid)}" if valid else "correct or unset VLLM_PP_LAYER_PARTITION"
        raise ConfigError(f"{config.shown('pp')}: {problem}; {fix}")


def _pp_problem(spec: ModelSpec, pp: int) -> str | None:
    """Why the model cannot be split into `pp` stages, or None; vLLM's stages must agree on the KV-cache layout."""
    layers = len(spec.layer_kinds)
    if pp > layers:
        return f"more stages than the model's {layers} layers"
    for stage, (start, end) in enumerate(stage_layers(layers, pp)):
        if "attention" not in spec.layer_kinds[start:end]:
            held = f"layers {start} to {end - 1}" if end > start else "no layers"
            return f"stage {stage} ({held}) holds no attention layer"
    return None


def _pp_works(spec: ModelSpec, pp: int) -> bool:
    try:
        return _pp_problem(spec, pp) is None
    except ConfigError:  # VLLM_PP_LAYER_PARTITION is made for another number of stages
        return False


def _check_device_share(config: WarmConfig, device: Literal["cuda", "cpu"] | None) -> None:
    ranks = config.tp * config.pp
    if device == "cuda" and config.engine == "vllm" and config.gpus_per_rank < 1 and ranks > 1:
        raise ConfigError(
            f"{config.shown('gpus_per_rank')}: NCCL refuses two of the {ranks} ranks on one GPU; "
            f"use {option_name('engine')} layout, or {option_name('gpus_per_rank')} 1"
        )


def _check_sizes(spec: ModelSpec, config: WarmConfig) -> None:
    query_len = speculative_tokens(config) + 1
    if config.engine == "layout" and spec.gdn and speculative_tokens(config) not in _GDN_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"{config.shown('num_speculative_tokens')}: no GDN kernel executes steps of {query_len} tokens; "
            f"use {option_name('num_speculative_tokens')} {_either(_GDN_SPECULATIVE_TOKENS)}"
        )
    # vllm.config.scheduler.SchedulerConfig asks for the same.
    if config.engine == "vllm" and config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"{config.shown('max_num_batched_tokens')}: less than {config.shown('max_num_seqs')}; "
            f"use {option_name('max_num_batched_tokens')} {config.max_num_seqs} or more"
        )
    largest = max(config.capture_sizes, default=1)
    if largest * query_len > config.max_num_batched_tokens:
        raise ConfigError(
            f"{config.shown('max_num_batched_tokens')}: a step of {largest} requests has {largest * query_len} tokens; "
            f"use {option_name('max_num_batched_tokens')} {largest * query_len} or more"
        )


def _partition_from_environment(num_layers: int, pp: int) -> list[int] | None:
    text = os.environ.get("VLLM_PP_LAYER_PARTITION")
    if text is None:
        return None
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise ConfigError(f"VLLM_PP_LAYER_PARTITION {text}: not numbers with commas; correct or unset it") from None
    if len(sizes) != pp:
        raise ConfigError(
            f"VLLM_PP_LAYER_PARTITION {text}: {len(sizes)} stages where {option_name('pp')} is {pp}; make them equal"
        )
    if sum(sizes) != num_layers:
        raise ConfigError(
            f"VLLM_PP_LAYER_PARTITION {text}: {sum(sizes)} layers where the model has {num_layers}; correct or unset it"
        )
    return sizes


def _either(values: Iterable[int]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
