"""The frozen records that cross process boundaries between shards, engine host and driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["gdn", "mamba2", "attention"]
WarmupState = Literal["done", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Layout of one cache tensor: `shape` and `stride` in elements, `dtype` without the `torch.` prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The cache tensors of one layer on one rank; `group` is the index of its KV-cache group."""

    layer: str
    group: int
    family: Family
    tensors: tuple[TensorLayout, ...]


@dataclass(frozen=True, slots=True)
class WarmupOutcome:
    """What became of one warmup on one rank; `reason` says why it was skipped or how it failed."""

    name: str
    state: WarmupState
    reason: str | None = None
    seconds: float = 0.0
