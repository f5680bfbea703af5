"""Everything that a layout engine is built from: one shard's caches, with no model and no weights."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

from replayssm_orch.actors.cache_geometry import Device, PageGeometry, kv_cache_groups
from replayssm_orch.actors.records import Family

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
