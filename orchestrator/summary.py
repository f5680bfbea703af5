"""A finished run for people: the same text after `warm` and from `report RUN`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from replayssm_orch.orchestrator.report import STEPS, RankReport, Report, SignatureReport

_WARM_UP = frozenset({"compile_or_warm_up_model", *STEPS})
_AFTER = frozenset({"agree", "monitor", "serve"})
_RANK_COLUMNS = ("rank", "stage", "node", "device", "start s", "warm-up s", "compiled", "second pass")


def summarize(report: Report) -> str:
    """The report as plain text, a screen for a small run."""
    lines = [
        f"run {report.run_id}: {report.state} in {report.seconds:.1f} s",
        f"  model {report.config['model']}  tp {report.config['tp']}  pp {report.config['pp']}  "
        f"engine {report.config['engine']}  {_target(report)}",
        f"  {_versions(report)}",
    ]
    if report.capacity.measured is not None:
        lines.append(f"  capacity: {report.capacity.measured} cache blocks, the smallest over ranks")
    addresses = {node.id: node.address for node in report.cluster.nodes}
    lines += _table("ranks", _RANK_COLUMNS, (_rank(rank, addresses) for rank in report.ranks))
    lines += _warmups(report.ranks)
    lines += _table(
        "signatures", ("id", "family", "layers", "ranks", "tensors (dtype shape)"), map(_signature, report.signatures)
    )
    if report.dedup.signatures_seen:
        lines.append(f"  dedup: {report.dedup.signatures_seen} layouts seen, {report.dedup.signatures_unique} distinct")
    lines += [f"  stage {stage.pp_rank}: {_shorten(stage.layers)}" for stage in report.stages if len(report.stages) > 1]
    lines += [f"  warning: {warning}" for warning in report.warnings]
    if report.error:
        lines.append(f"  error: {report.error}")
    return "\n".join(lines)


def _target(report: Report) -> str:
    if report.target is None:
        return ""
    return f"target {report.target.profile} ({report.target.arch}, {report.target.multiprocessors} multiprocessors)"


def _versions(report: Report) -> str:
    return "  ".join(f"{name} {version}" for name, version in sorted(report.versions.items()))


def _rank(rank: RankReport, addresses: Mapping[str, str]) -> tuple[str, ...]:
    warm_up = [seconds for phase, seconds in rank.phases.items() if phase in _WARM_UP]
    start = sum(seconds for phase, seconds in rank.phases.items() if phase not in _WARM_UP | _AFTER)
    compiled = rank.second_pass.monitor_compilations
    return (
        str(rank.rank),
        str(rank.pp_rank),
        addresses.get(rank.node, "-"),
        f"{rank.device} {rank.arch}" if rank.arch else "-",
        f"{start:.2f}" if rank.phases else "-",
        f"{sum(warm_up):.2f}" if warm_up else "-",
        "-" if compiled is None else str(rank.compiled_in_process),
        "-" if compiled is None else str(compiled),
    )


def _warmups(ranks: Iterable[RankReport]) -> list[str]:
    """One line for each distinct outcome of a warmup, with the ranks that share it."""
    shared: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        for warmup in rank.warmups:
            shared.setdefault((warmup.name, warmup.state, warmup.reason or ""), []).append(rank.rank)
    return [
        f"  warmup {name}: {state}{f' ({reason})' if reason else ''} on rank{'s' if len(on) > 1 else ''} {_ranges(on)}"
        for (name, state, reason), on in shared.items()
    ]


def _signature(signature: SignatureReport) -> tuple[str, ...]:
    tensors = "; ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in signature.tensors)
    return (signature.id[:12], signature.family, str(len(signature.layers)), _ranges(signature.ranks), tensors)


def _ranges(ranks: Iterable[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _shorten(names: tuple[str, ...], limit: int = 4) -> str:
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[: limit - 1])}, … {names[-1]} ({len(names)} layers)"


def _table(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Aligned columns under a header; nothing when there are no rows."""
    body = list(rows)
    if not body:
        return []
    widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *body)
    ]
    return [f"  {title}:", *(f"    {line}" for line in lines)]
