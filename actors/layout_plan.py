"""Everything that a layout engine is built from: one shard's caches, with no model and no weights."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

from replayssm_orch.actors.cache_geometry import CacheOptions, Device, PageGeometry, kv_cache_groups, page_geometry
from replayssm_orch.actors.records import Family, LayoutSpec

MambaCacheMode = Literal["none", "align", "all"]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One cache-bearing layer of the stage; `group` indexes the whole model's KV-cache groups."""

    name: str
    family: Family
    group: int


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """One shard: its stage's layers in model order, its rank's page, and the limits that vLLM's options set.

    `capture_sizes` are in requests; `num_blocks` includes the padding slot 0. Whether there is ReplaySSM is the page's
    affair (`page.window`).
    """

    device: Device
    layers: tuple[LayerPlan, ...]
    num_groups: int
    page: PageGeometry
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    capture_sizes: tuple[int, ...]
    num_speculative_tokens: int = 0
    mamba_cache_mode: MambaCacheMode = "none"

    @property
    def query_len(self) -> int:
        """Tokens per request in a decode step."""
        return self.num_speculative_tokens + 1

    @property
    def mamba_block_size(self) -> int:
        """Tokens per recurrent block: the page's in align mode, else a whole request (as vLLM's MambaModelConfig)."""
        return self.page.block_size if self.mamba_cache_mode == "align" else self.max_model_len

    @property
    def blocks_per_request(self) -> int:
        """Columns of a recurrent group's block table: one per position in align mode, else one."""
        return -(-self.max_model_len // self.mamba_block_size)


def plan_of(spec: LayoutSpec) -> LayoutPlan:
    """The shard that `spec` describes, on the host that this runs on (its CPU decides the CPU's state dtype)."""
    layers, num_groups = stage_layers(spec.model_layers, spec.held)
    options = CacheOptions(
        device=spec.device,
        tp=spec.tp,
        replayssm=spec.replayssm,
        num_speculative_tokens=spec.num_speculative_tokens,
        state_dtype=spec.state_dtype,
    )
    # A request holds a block of every group, in align mode also the block that it fills next; block 0 is padding.
    columns = 2 if spec.mamba_cache_mode == "align" else 1
    return LayoutPlan(
        device=spec.device,
        layers=layers,
        num_groups=num_groups,
        page=page_geometry(spec.recurrent, spec.attention, options),
        num_blocks=spec.num_blocks or 1 + spec.max_num_seqs * columns * num_groups,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=spec.max_model_len,
        capture_sizes=spec.capture_sizes,
        num_speculative_tokens=spec.num_speculative_tokens,
        mamba_cache_mode=spec.mamba_cache_mode,
    )


def stage_layers(
    model_layers: Sequence[tuple[str, Family]], held: Container[str] | None = None
) -> tuple[tuple[LayerPlan, ...], int]:
    """The layers in `held` (a stage; None: all) with the groups of the whole model, and how many groups that has.

    `model_layers` are the cache-bearing layers of all stages, in model order.
    """
    groups = kv_cache_groups(model_layers)
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    layers = (LayerPlan(name, family, group_of[name]) for name, family in model_layers if held is None or name in held)
    return tuple(layers), len(groups)
