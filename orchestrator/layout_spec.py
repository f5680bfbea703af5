"""From a run's configuration to what layout shards are made from."""

from __future__ import annotations

from replayssm_orch.actors.records import Device, Family, LayoutSpec
from replayssm_orch.configs.checks import stage_layers
from replayssm_orch.configs.errors import ConfigError
from replayssm_orch.configs.models import ModelSpec
from replayssm_orch.configs.schema import WarmConfig, capture_sizes, speculative_tokens

# How vLLM's model classes name their cache-bearing layers, by the architecture's recurrent family.
_LAYER_NAMES: dict[tuple[Family, Family], str] = {
    ("gdn", "gdn"): "model.layers.{}.linear_attn",
    ("gdn", "attention"): "model.layers.{}.self_attn.attn",
    ("mamba2", "mamba2"): "model.layers.{}.mixer",
    ("mamba2", "attention"): "model.layers.{}.mixer.attn",
}
# vLLM engine arguments that mean the same to the layout engine.
_SHARED_ENGINE_ARGS = frozenset({"use_replayssm", "max_model_len"})


def check_layout_arguments(config: WarmConfig) -> None:
    """Raises ConfigError for an engine argument that the layout engine does not have, or of the wrong type."""
    unknown = sorted(set(config.engine_args) - _SHARED_ENGINE_ARGS)
    if unknown:
        raise ConfigError(
            f"--engine-arg {unknown[0]}: the layout engine has no model and takes only "
            f"{' and '.join(sorted(_SHARED_ENGINE_ARGS))}; remove it, or use --engine vllm"
        )
    replayssm = config.engine_args.get("use_replayssm", True)
    if not isinstance(replayssm, bool):
        raise ConfigError(f"--engine-arg use_replayssm={replayssm}: must be true or false")
    length = config.engine_args.get("max_model_len", 1)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"--engine-arg max_model_len={length}: must be a whole number of at least 1")


def layout_specs(config: WarmConfig, spec: ModelSpec, device: Device) -> tuple[LayoutSpec, ...]:
    """One specification a stage, of a configuration that `check_layout_arguments` accepts."""
    recurrent = spec.gdn or spec.mamba2
    assert recurrent is not None, "load_model_spec refuses models without recurrent layers"
    family: Family = "gdn" if spec.gdn else "mamba2"
    named = [
        (index, _LAYER_NAMES[family, kind].format(index), kind)
        for index, kind in enumerate(spec.layer_kinds)
        if kind != "other"
    ]
    return tuple(
        LayoutSpec(
            device=device,
            tp=config.tp,
            recurrent=recurrent,
            attention=spec.attention,
            state_dtype=spec.state_dtype,
            replayssm=config.engine_args.get("use_replayssm", True),
            model_layers=tuple((name, kind) for _, name, kind in named),
            held=frozenset(name for index, name, _ in named if start <= index < end),
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.engine_args.get("max_model_len", spec.max_position),
            capture_sizes=capture_sizes(config),
            num_speculative_tokens=speculative_tokens(config),
            mamba_cache_mode=config.mamba_cache_mode,
        )
        for start, end in stage_layers(len(spec.layer_kinds), config.pp)
    )
