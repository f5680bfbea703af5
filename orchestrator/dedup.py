"""Dedup of layout signatures across layers, KV-cache groups, ranks and stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from replayssm_orch.actors.records import Family, RankLayouts, TensorLayout
from replayssm_orch.actors.signatures import signature_of


@dataclass(frozen=True, slots=True)
class UniqueSignature:
    """One distinct layout, the layers that have it (any rank) and the ranks that need it, both sorted."""

    id: str
    family: Family
    arch: str
    tensors: tuple[TensorLayout, ...]
    layers: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dedup:
    """`seen` counts layer layouts over all ranks; `unique` is sorted by id; `by_rank` gives each rank's ids, sorted."""

    seen: int
    unique: tuple[UniqueSignature, ...]
    by_rank: Mapping[int, tuple[str, ...]]


def deduplicate(layouts: Iterable[RankLayouts], arch_of_rank: Mapping[int, str]) -> Dedup:
    """Every distinct signature among `layouts`; the result does not depend on the order of ranks or layers."""
    signatures: dict[str, tuple[Family, str, tuple[TensorLayout, ...]]] = {}
    layers: dict[str, set[str]] = {}
    ranks: dict[str, set[int]] = {}
    by_rank: dict[int, set[str]] = {}
    seen = 0
    for rank_layouts in layouts:
        arch = arch_of_rank[rank_layouts.rank]
        by_rank.setdefault(rank_layouts.rank, set())
        for layer in rank_layouts.layers:
            signature = signature_of(layer, arch)
            key = signature.id
            signatures[key] = (signature.family, arch, signature.tensors)
            layers.setdefault(key, set()).add(layer.layer)
            ranks.setdefault(key, set()).add(rank_layouts.rank)
            by_rank[rank_layouts.rank].add(key)
            seen += 1
    unique = tuple(
        UniqueSignature(key, *signatures[key], layers=tuple(sorted(layers[key])), ranks=tuple(sorted(ranks[key])))
        for key in sorted(signatures)
    )
    return Dedup(seen=seen, unique=unique, by_rank={rank: tuple(sorted(ids)) for rank, ids in sorted(by_rank.items())})
