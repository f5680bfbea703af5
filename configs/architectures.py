"""What a Hugging Face config.json says about a hybrid model's layers, one reader a family.

Field names, and the defaults of fields that a config.json may leave out, are those of transformers' configuration
classes (Qwen3NextConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig, NemotronHConfig, GraniteMoeHybridConfig), as vLLM's
models of these families read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from replayssm_orch.configs.errors import ConfigError

LayerKind = Literal["gdn", "mamba2", "attention", "other"]
HfConfig = Mapping[str, Any]

# transformers 5 renames "mamba" and "attention" (its _LEGACY_LAYER_TYPE_REMAP); published files hold either.
_GDN_KINDS: dict[str, LayerKind] = {"linear_attention": "gdn", "full_attention": "attention"}
_MAMBA2_KINDS: dict[str, LayerKind] = {
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "other",
    "moe": "other",
}
_PATTERN_KINDS: dict[str, LayerKind] = {"M": "mamba2", "*": "attention", "-": "other", "E": "other"}


@dataclass(frozen=True, slots=True)
class GdnGeometry:
    """Whole-model head counts and dimensions of the Gated DeltaNet layers; `conv_kernel` in tokens."""

    value_heads: int
    key_heads: int
    head_dim_v: int
    head_dim_k: int
    conv_kernel: int


@dataclass(frozen=True, slots=True)
class Mamba2Geometry:
    """Whole-model head and group counts and dimensions of the Mamba2 layers; `conv_kernel` in tokens."""

    heads: int
    head_dim: int
    d_state: int
    groups: int
    conv_kernel: int


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Whole-model head counts of the attention layers."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerReading:
    """The layers of one model: a kind per hidden layer, the geometry of each kind that occurs, the state's dtype.

    `state_dtype` is what the file asks for the recurrent state; None leaves it to vLLM (`mamba_ssm_cache_dtype=auto`).
    """

    kinds: tuple[LayerKind, ...]
    gdn: GdnGeometry | None
    mamba2: Mamba2Geometry | None
    attention: AttentionGeometry
    state_dtype: str | None


def _read_gdn(config: HfConfig, *, default_layers: int, default_kv_heads: int) -> LayerReading:
    """Qwen3-Next and Qwen3.5; the two defaults are where their configuration classes differ."""
    layers = int(config.get("num_hidden_layers", default_layers))
    interval = int(config.get("full_attention_interval", 4))
    regular = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    return LayerReading(
        kinds=_kinds(config.get("layer_types") or regular, _GDN_KINDS, "layer_types", layers),
        gdn=GdnGeometry(
            value_heads=int(config.get("linear_num_value_heads", 32)),
            key_heads=int(config.get("linear_num_key_heads", 16)),
            head_dim_v=int(config.get("linear_value_head_dim", 128)),
            head_dim_k=int(config.get("linear_key_head_dim", 128)),
            conv_kernel=int(config.get("linear_conv_kernel_dim", 4)),
        ),
        mamba2=None,
        attention=AttentionGeometry(
            heads=int(config.get("num_attention_heads", 16)),
            kv_heads=int(config.get("num_key_value_heads", default_kv_heads)),
            head_dim=int(config.get("head_dim") or 256),
        ),
        state_dtype=config.get("mamba_ssm_dtype"),
    )


def _read_nemotron_h(config: HfConfig) -> LayerReading:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3; the layer list alone says how many layers there are."""
    pattern = config.get("hybrid_override_pattern")
    names = config.get("layers_block_type") or config.get("layer_types")
    if names is not None:
        kinds = _kinds(names, _MAMBA2_KINDS, "layers_block_type")
    elif isinstance(pattern, str):
        kinds = _kinds(pattern, _PATTERN_KINDS, "hybrid_override_pattern")
    else:
        raise ConfigError("config.json has neither layers_block_type nor hybrid_override_pattern; add one of them")
    heads = int(config.get("num_attention_heads", 32))
    return LayerReading(
        kinds=kinds,
        gdn=None,
        mamba2=Mamba2Geometry(
            heads=int(config.get("mamba_num_heads", 128)),
            head_dim=int(config.get("mamba_head_dim", 64)),
            d_state=int(config.get("ssm_state_size", 128)),
            groups=int(config.get("mamba_n_groups", config.get("n_groups", 8))),
            conv_kernel=int(config.get("mamba_d_conv", config.get("conv_kernel", 4))),
        ),
        attention=AttentionGeometry(
            heads=heads,
            kv_heads=_kv_heads(config, heads, default=8),
            head_dim=int(config.get("head_dim") or 128),
        ),
        # vllm.model_executor.models.config.NemotronHForCausalLMConfig: float32 unless the file says otherwise.
        state_dtype=str(config.get("mamba_ssm_cache_dtype", "float32")),
    )


def _read_granite(config: HfConfig) -> LayerReading:
    """Granite 4 hybrids (GraniteMoeHybrid)."""
    layers = int(config.get("num_hidden_layers", 32))
    hidden = int(config.get("hidden_size", 4096))
    heads = int(config.get("num_attention_heads", 32))
    mamba_heads = int(config.get("mamba_n_heads", 128))
    head_dim = config.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = int(config.get("mamba_expand", 2)) * hidden // mamba_heads
    return LayerReading(
        kinds=_kinds(config.get("layer_types") or ["mamba"] * layers, _MAMBA2_KINDS, "layer_types", layers),
        gdn=None,
        mamba2=Mamba2Geometry(
            heads=mamba_heads,
            head_dim=int(head_dim),
            d_state=int(config.get("mamba_d_state", 256)),
            groups=int(config.get("mamba_n_groups", 1)),
            conv_kernel=int(config.get("mamba_d_conv", 4)),
        ),
        attention=AttentionGeometry(
            heads=heads, kv_heads=_kv_heads(config, heads, default=heads), head_dim=hidden // heads
        ),
        state_dtype=None,
    )


# The names that vLLM's model registry holds for these families.
_READERS: Mapping[str, Callable[[HfConfig], LayerReading]] = {
    "Qwen3NextForCausalLM": partial(_read_gdn, default_layers=48, default_kv_heads=2),
    "Qwen3_5ForCausalLM": partial(_read_gdn, default_layers=32, default_kv_heads=4),
    "Qwen3_5MoeForCausalLM": partial(_read_gdn, default_layers=40, default_kv_heads=2),
    "NemotronHForCausalLM": _read_nemotron_h,
    "GraniteMoeHybridForCausalLM": _read_granite,
}

# Image-and-text wrappers and the text model inside, which holds every recurrent layer.
_TEXT_ARCHITECTURE = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}


def text_config(config: HfConfig) -> dict[str, Any]:
    """The configuration of the text model alone: `config` itself, or a wrapper's `text_config` made to stand alone.

    Raises ConfigError for an architecture that is not supported.
    """
    architecture = str((config.get("architectures") or ["none"])[0])
    if architecture in _READERS:
        return dict(config)
    text = config.get("text_config")
    if architecture in _TEXT_ARCHITECTURE and isinstance(text, Mapping):
        dtype = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
        return {**dtype, **text, "architectures": [_TEXT_ARCHITECTURE[architecture]]}
    supported = ", ".join([*_READERS, *_TEXT_ARCHITECTURE])
    raise ConfigError(f"architecture {architecture}: not supported; supported hybrids are {supported}")


def read_layers(config: HfConfig) -> LayerReading:
    """The layers of a text configuration (see `text_config`); raises ConfigError where they make no sense."""
    reading = _READERS[config["architectures"][0]](config)
    for geometry in (reading.gdn, reading.mamba2, reading.attention):
        for name, count in asdict(geometry).items() if geometry else ():
            if count < 1:
                raise ConfigError(f"{type(geometry).__name__} {name} {count}: must be at least 1; correct config.json")
    return reading


def _kinds(
    names: Iterable[str], known: Mapping[str, LayerKind], field: str, layers: int | None = None
) -> tuple[LayerKind, ...]:
    names = tuple(names)
    if layers is not None and len(names) != layers:
        raise ConfigError(f"{field} has {len(names)} entries where num_hidden_layers is {layers}; make them equal")
    for layer, name in enumerate(names):
        if name not in known:
            raise ConfigError(f"{field}[{layer}] {name}: unknown layer type; known are {', '.join(known)}")
    return tuple(known[name] for name in names)


def _kv_heads(config: HfConfig, heads: int, default: int) -> int:
    """KV heads, where an explicit null means one for each attention head."""
    return int(config.get("num_key_value_heads", default) or heads)
