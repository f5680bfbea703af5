"""A diagnosis for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from replayssm_orch.orchestrator.diagnosis import Cache, ClusterShape, Diagnosis, Engine, Node


def render(diagnosis: Diagnosis) -> str:
    """The diagnosis as plain text, a screen or two."""
    return "\n".join(_lines(diagnosis))


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield "versions"
    yield "  " + "  ".join(f"{name} {version or '-'}" for name, version in diagnosis.versions.items())
    yield "GPUs"
    yield from [
        f"  {gpu.name}  {gpu.arch}  {gpu.memory >> 20} MiB  target {gpu.profile or '-'}" for gpu in diagnosis.gpus
    ] or ["  none"]
    yield "engines and warmups on this machine"
    for engine in diagnosis.engines:
        yield from _engine(engine)
    yield "what the packages have"
    for capability in diagnosis.capabilities:
        yield f"  {'yes' if capability.present else 'no ':3}  {capability.package}: {capability.what}"
    yield "caches"
    yield from _caches(diagnosis.caches)
    yield from _cluster(diagnosis.cluster)
    yield "problems" if diagnosis.problems else "no problems"
    yield from (f"  {found.problem} -> {found.advice}" for found in diagnosis.problems)


def _engine(engine: Engine) -> Iterator[str]:
    head = f"  {engine.name} on {engine.device}:"
    if not engine.can_run:
        yield f"{head} no: {'; '.join(engine.reasons)}"
        return
    yield f"{head} yes"
    shared: dict[tuple[str, ...], list[str]] = {}
    for warmup in engine.warmups:
        shared.setdefault(warmup.reasons, []).append(warmup.name)
    for reasons, names in shared.items():
        yield f"    {', '.join(names)}: {'no: ' + '; '.join(reasons) if reasons else 'yes'}"


def _caches(caches: Iterable[Cache]) -> Iterator[str]:
    rows = [(cache.name, _size_of(cache), _disk_of(cache), cache.path) for cache in caches]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True))
        yield "  " + "  ".join(cells)


def _size_of(cache: Cache) -> str:
    if cache.bytes is None:
        return "not made yet"
    return f"{'' if cache.bytes_complete else 'over '}{_size(cache.bytes)}"


def _disk_of(cache: Cache) -> str:
    writable = "writable" if cache.writable else "not writable"
    return f"{writable}, {cache.file_system}, {_size(cache.free_bytes)} free"


def _size(count: int) -> str:
    """`512 B`, `1.5 GiB`."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"


def _cluster(cluster: ClusterShape) -> Iterator[str]:
    if cluster.address is None:
        (local,) = cluster.nodes
        yield "Ray"
        yield (
            f"  no --address: a run would start a local Ray with {_count(local.cpus, 'CPU')} and "
            f"{_count(local.gpus, 'GPU')}"
        )
        return
    yield f"Ray cluster at {cluster.address}: {_count(len(cluster.nodes), 'node')}"
    yield from (f"  {_node(node)}" for node in cluster.nodes)


def _node(node: Node) -> str:
    names = f" ({', '.join(sorted(set(node.gpu_names)))})" if node.gpu_names else ""
    versions = "  ".join(f"{name} {version}" for name, version in sorted(node.versions.items()))
    shape = f"{_count(node.cpus, 'CPU')}, {_count(node.gpus, 'GPU')}{names}"
    return f"{node.address}  {shape}  {versions or 'versions unknown'}"


def _count(amount: float, noun: str) -> str:
    return f"{amount:g} {noun}{'' if amount == 1 else 's'}"
