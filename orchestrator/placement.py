"""Placement arithmetic: the placement group's bundles for a run's ranks. Pure; Ray does the placing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Resources = dict[str, float]


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """What one node of the cluster has in all, in Ray's units."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Bundles and Ray strategy, and for each rank the index of its bundle."""

    bundles: tuple[Resources, ...]
    strategy: Literal["PACK", "SPREAD"]
    bundle_of_rank: tuple[int, ...]
    per_rank: Resources


def rank_resources(device: str, gpus_per_rank: float) -> Resources:
    """What one rank asks Ray for: one CPU, and on CUDA its GPU or share of one."""
    return {"CPU": 1.0, "GPU": gpus_per_rank} if device == "cuda" else {"CPU": 1.0}


def place(tp: int, pp: int, per_rank: Resources, nodes: Sequence[NodeCapacity], spread: bool) -> Placement:
    """One bundle a stage where some node can hold a whole TP group (Ray never splits a bundle), else one a rank.

    `spread` spreads the bundles: stages over nodes, or ranks where a TP group fits on no node. With no node that has
    the resource yet (a cluster that scales up from nothing) a TP group is taken to fit.
    """
    stage = {name: amount * tp for name, amount in per_rank.items()}
    candidates = [node for node in nodes if _has(node, {k: v for k, v in per_rank.items() if k != "CPU"})]
    whole_stage = not candidates or any(_has(node, stage) for node in candidates)
    ranks = range(tp * pp)
    return Placement(
        bundles=tuple(dict(stage) for _ in range(pp)) if whole_stage else tuple(dict(per_rank) for _ in ranks),
        strategy="SPREAD" if spread else "PACK",
        bundle_of_rank=tuple(rank // tp if whole_stage else rank for rank in ranks),
        per_rank=dict(per_rank),
    )


def _has(node: NodeCapacity, amounts: Resources) -> bool:
    return node.cpus >= amounts.get("CPU", 0.0) and node.gpus >= amounts.get("GPU", 0.0)


def shortage(placement: Placement, nodes: Sequence[NodeCapacity]) -> str | None:
    """Why the nodes, all free, could not hold the placement, or None. First-fit: exact for the equal bundles used."""
    free = [[node.cpus, node.gpus] for node in nodes]
    for bundle in placement.bundles:
        cpu, gpu = bundle.get("CPU", 0.0), bundle.get("GPU", 0.0)
        for node in free:
            if node[0] >= cpu and node[1] >= gpu:
                node[0] -= cpu
                node[1] -= gpu
                break
        else:
            return f"asked for {describe_bundles(placement)}; the cluster has {describe_nodes(nodes)}"
    return None


def describe_bundles(placement: Placement) -> str:
    """`2 bundles of 4 CPU and 4 GPU`."""
    bundle = placement.bundles[0]
    parts = " and ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
    count = len(placement.bundles)
    return f"{count} bundle{'s' if count > 1 else ''} of {parts}"


def describe_nodes(nodes: Sequence[NodeCapacity]) -> str:
    """`2 nodes: 16 CPU and 1 GPU, 8 CPU and 0 GPU`."""
    each = ", ".join(f"{node.cpus:g} CPU and {node.gpus:g} GPU" for node in nodes) or "nothing"
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}: {each}"
