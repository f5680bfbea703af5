"""Cache shapes of one rank and the page that holds them, as vLLM sizes both.

Sources: `MambaStateShapeCalculator` and `MambaStateDtypeCalculator` (vllm.model_executor.layers.mamba.mamba_utils),
`Platform._align_hybrid_block_size` (vllm.platforms.interface) and `_get_kv_cache_groups_uniform_page_size`
(vllm.v1.core.kv_cache_planning). The GDN rings are those of vLLM's development branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from replayssm_orch.actors.records import Family
from replayssm_orch.actors.trackers import LOGICAL_WINDOW, ReplayWindow
from replayssm_orch.actors.warmups.decode import executed_width
from replayssm_orch.configs.architectures import AttentionGeometry, GdnGeometry, Mamba2Geometry

Device = Literal["cpu", "cuda"]

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
# Smallest kernel block that the attention backend takes, or vLLM's default block size where that is larger:
# CPUAttentionBackend with the CPU platform's 128, FlashAttention (and FlashInfer) with CacheConfig's 16.
_ATTENTION_BLOCK_ALIGNMENT: dict[Device, int] = {"cpu": 128, "cuda": 16}


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What, beside the heads, decides cache shapes. `replayssm` adds the rings; vLLM's CPU build never has them.

    `state_dtype` is what the model asks for the recurrent state on CUDA; None is its family's default.
    """

    device: Device
    tp: int
    replayssm: bool
    num_speculative_tokens: int = 0
    window: int = LOGICAL_WINDOW
    state_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a page: `shape` after the slot dimension, `dtype` without the `torch.` prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """One rank's page: the recurrent tensors one after the other, padded to the size of an attention page.

    `block_size` is in tokens, `page_bytes` is the slot stride, `window` says how the trackers move (None: no rings),
    `kv` is the attention tensor of the same page, `[heads, block_size, 2 * head_dim]`.
    """

    family: Family
    tensors: tuple[CacheTensor, ...]
    window: ReplayWindow | None
    block_size: int
    page_bytes: int
    kv: CacheTensor


def page_geometry(
    recurrent: GdnGeometry | Mamba2Geometry, attention: AttentionGeometry, options: CacheOptions
) -> PageGeometry:
    """The page of one rank of a hybrid model.

    Raises ValueError when `options.tp` does not divide the recurrent heads.
    """
    family: Family
    if isinstance(recurrent, GdnGeometry):
        family = "gdn"
        tensors, window = gdn_tensors(recurrent, options)
    else:
        family = "mamba2"
        tensors, window = mamba2_tensors(recurrent, options)
    kv_heads = max(1, attention.kv_heads // options.tp)
    token_bytes = 2 * kv_heads * attention.head_dim * _ITEM_BYTES["bfloat16"]
    alignment = _ATTENTION_BLOCK_ALIGNMENT[options.device]
    content = sum(tensor.num_bytes for tensor in tensors)
    block_size = alignment * -(-content // (alignment * token_bytes))
    kv = CacheTensor("kv", "bfloat16", (kv_heads, block_size, 2 * attention.head_dim))
    return PageGeometry(family, tensors, window, block_size, block_size * token_bytes, kv)


def gdn_tensors(shape: GdnGeometry, options: CacheOptions) -> tuple[tuple[CacheTensor, ...], ReplayWindow | None]:
    """conv `[conv - 1 + spec, 2 H K + HV V]`, state `[HV, V, K]`, and with ReplaySSM u, k and g rings."""
    hv = _divide(shape.value_heads, options.tp, "value heads")
    h = _divide(shape.key_heads, options.tp, "key heads")
    spec = options.num_speculative_tokens
    conv_dim = 2 * h * shape.head_dim_k + hv * shape.head_dim_v
    tensors = (
        CacheTensor("convolution", "bfloat16", (shape.conv_kernel - 1 + spec, conv_dim)),
        CacheTensor("state", _state_dtype(options, "bfloat16"), (hv, shape.head_dim_v, shape.head_dim_k)),
    )
    if not options.replayssm:
        return tensors, None
    width = executed_width(spec)
    ring = 16 if width == 1 else 32
    rings = (
        CacheTensor("u_ring", "bfloat16", (hv, ring, shape.head_dim_v)),
        CacheTensor("k_ring", "bfloat16", (h, ring, shape.head_dim_k)),
        CacheTensor("g_ring", "float32", (hv, ring)),
    )
    return (*tensors, *rings), ReplayWindow(ring, options.window, width, absorbs=width == 1)


def mamba2_tensors(shape: Mamba2Geometry, options: CacheOptions) -> tuple[tuple[CacheTensor, ...], ReplayWindow | None]:
    """conv `[conv - 1 + spec, heads D + 2 G N]`, state `[heads, D, N]`, and with ReplaySSM x, dt and B rings."""
    heads = _divide(shape.heads, options.tp, "Mamba heads")
    # Groups are replicated until every rank has one (MambaStateShapeCalculator.extra_groups_for_head_shards).
    groups = shape.groups if shape.groups % options.tp == 0 else options.tp
    groups //= options.tp
    spec = options.num_speculative_tokens
    tensors = (
        CacheTensor(
            "convolution",
            "bfloat16",
            (shape.conv_kernel - 1 + spec, heads * shape.head_dim + 2 * groups * shape.d_state),
        ),
        CacheTensor("state", _state_dtype(options, "float32"), (heads, shape.head_dim, shape.d_state)),
    )
    if not options.replayssm:
        return tensors, None
    ring = options.window + 1 + spec
    rings = (
        CacheTensor("x_ring", "bfloat16", (heads, ring, shape.head_dim)),
        CacheTensor("dt_ring", "float32", (heads, ring)),
        CacheTensor("b_ring", "bfloat16", (groups, ring, shape.d_state)),
    )
    return (*tensors, *rings), ReplayWindow(ring, options.window, 1 + spec)


def kv_cache_groups(layers: Sequence[tuple[str, Family]]) -> tuple[tuple[str, ...], ...]:
    """The KV-cache groups of the whole model, in vLLM's order; a stage holds its own layers of each group.

    `layers` are the cache-bearing layers of all stages, in model order.
    """
    buckets: dict[Family, list[str]] = {}
    for name, family in layers:
        buckets.setdefault(family, []).append(name)
    sizes = [len(names) for names in buckets.values()]
    group_size = max(sizes) if max(sizes) < min(sizes) * 1.5 else min(sizes)
    groups: list[tuple[str, ...]] = []
    for names in buckets.values():
        num_groups = -(-len(names) // group_size)
        groups.extend(tuple(names[index::num_groups]) for index in range(num_groups))
    return tuple(groups)


def _state_dtype(options: CacheOptions, family_default: str) -> str:
    # vLLM's CPU platform asks for float32 states where the CPU has AVX-512 BF16.
    if options.device == "cpu":
        import torch

        if torch.cpu._is_avx512_bf16_supported():
            return "float32"
    return options.state_dtype or family_default


def _divide(heads: int, tp: int, what: str) -> int:
    if heads % tp:
        raise ValueError(f"{heads} {what} are not divisible by tensor parallel size {tp}")
    return heads // tp
