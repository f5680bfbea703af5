"""What a Hugging Face config.json says about a hybrid model's layers, one reader a family.

Field names, and the defaults of fields that a config.json may leave out, are those of transformers' configuration
classes (Qwen3NextConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig, NemotronHConfig, GraniteMoeHybridConfig), as vLLM's
models of these families read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class GdnFamily:
    """Reader for Qwen3-Next and Qwen3.5; the fields are the configuration class's own defaults."""

    num_hidden_layers: int
    kv_heads: int

    def read(self, config: HfConfig) -> LayerReading:
        """The layers that a text configuration describes; raises ConfigError for a layer type it does not know."""
        layers = int(config.get("num_hidden_layers", self.num_hidden_layers))
        interval = int(config.get("full_attention_interval", 4))
        names = config.get("layer_types") or [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)
        ]
        return LayerReading(
            kinds=_kinds(names, _GDN_KINDS, "layer_types"),
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
                kv_heads=int(config.get("num_key_value_heads", self.kv_heads)),
                head_dim=int(config.get("head_dim") or 256),
            ),
            state_dtype=config.get("mamba_ssm_dtype"),
        )


@dataclass(frozen=True, slots=True)
class NemotronHFamily:
    """Reader for Nemotron-H, Nemotron Nano 2 and Nemotron 3."""

    def read(self, config: HfConfig) -> LayerReading:
        """The layers that a configuration describes; raises ConfigError for a layer letter or type it does not know."""
        pattern = config.get("hybrid_override_pattern")
        names = config.get("layers_block_type") or config.get("layer_types")
        if names is not None:
            kinds = _kinds(names, _MAMBA2_KINDS, "layers_block_type")
        elif isinstance(pattern, str):
            kinds = _kinds(pattern, _PATTERN_KINDS, "hybrid_override_pattern")
        else:
            raise ConfigError("config.json: neither layers_block_type nor hybrid_override_pattern; add one of them")
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
                kv_heads=int(config.get("num_key_value_heads") or (heads if "num_key_value_heads" in config else 8)),
                head_dim=int(config.get("head_dim") or 128),
            ),
            # vllm.model_executor.models.config.NemotronHForCausalLMConfig: float32 unless the file says otherwise.
            state_dtype=str(config.get("mamba_ssm_cache_dtype", "float32")),
        )


@dataclass(frozen=True, slots=True)
class GraniteHybridFamily:
    """Reader for Granite 4 hybrids (GraniteMoeHybrid)."""

    def read(self, config: HfConfig) -> LayerReading:
        """The layers that a configuration describes; raises ConfigError for a layer type it does not know."""
        layers = int(config.get("num_hidden_layers", 32))
        hidden = int(config.get("hidden_size", 4096))
        heads = int(config.get("num_attention_heads", 32))
        mamba_heads = int(config.get("mamba_n_heads", 128))
        head_dim = config.get("mamba_d_head", "auto")
        if head_dim == "auto":
            head_dim = int(config.get("mamba_expand", 2)) * hidden // mamba_heads
        return LayerReading(
            kinds=_kinds(config.get("layer_types") or ["mamba"] * layers, _MAMBA2_KINDS, "layer_types"),
            gdn=None,
            mamba2=Mamba2Geometry(
                heads=mamba_heads,
                head_dim=int(head_dim),
                d_state=int(config.get("mamba_d_state", 256)),
                groups=int(config.get("mamba_n_groups", 1)),
                conv_kernel=int(config.get("mamba_d_conv", 4)),
            ),
            attention=AttentionGeometry(
                heads=heads, kv_heads=int(config.get("num_key_value_heads") or heads), head_dim=hidden // heads
            ),
            state_dtype=None,
        )


_QWEN3_NEXT = GdnFamily(num_hidden_layers=48, kv_heads=2)
_QWEN3_5 = GdnFamily(num_hidden_layers=32, kv_heads=4)
_QWEN3_5_MOE = GdnFamily(num_hidden_layers=40, kv_heads=2)

# The names that vLLM's model registry holds for these families.
FAMILIES: Mapping[str, GdnFamily | NemotronHFamily | GraniteHybridFamily] = {
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "NemotronHForCausalLM": NemotronHFamily(),
    "GraniteMoeHybridForCausalLM": GraniteHybridFamily(),
}

# Image-and-text wrappers and the text model inside, which holds every recurrent layer.
_TEXT_ARCHITECTURE = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}


def text_config(config: HfConfig) -> dict[str, Any]:
    """The configuration of the text model alone: `config` itself, or a wrapper's `text_config` made to stand alone.

    Raises ConfigError for an architecture that is none of `FAMILIES`.
    """
    architecture = str((config.get("architectures") or ["none"])[0])
    if architecture in FAMILIES:
        return dict(config)
    text = config.get("text_config")
    if architecture in _TEXT_ARCHITECTURE and isinstance(text, Mapping):
        dtype = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
        return {**dtype, **text, "architectures": [_TEXT_ARCHITECTURE[architecture]]}
    supported = ", ".join([*FAMILIES, *_TEXT_ARCHITECTURE])
    raise ConfigError(f"architecture {architecture}: not supported; supported hybrids are {supported}")


def read_layers(config: HfConfig) -> LayerReading:
    """The layers of a text configuration (see `text_config`)."""
    return FAMILIES[config["architectures"][0]].read(config)


def _kinds(names: Iterable[str], known: Mapping[str, LayerKind], field: str) -> tuple[LayerKind, ...]:
    names = tuple(names)
    for layer, name in enumerate(names):
        if name not in known:
            raise ConfigError(f"{field}[{layer}] {name}: unknown layer type; known are {', '.join(known)}")
    return tuple(known[name] for name in names)
