"""What a run has found out, whether every rank is warm, and the report made of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from replayssm_orch.actors.node_probe import installed_versions
from replayssm_orch.actors.records import (
    Compilation,
    Device,
    NodeInfo,
    RankFailure,
    RankLayouts,
    ShardPlace,
    WarmupOutcome,
)
from replayssm_orch.configs.schema import WarmConfig
from replayssm_orch.configs.targets import Target
from replayssm_orch.orchestrator.dedup import Dedup
from replayssm_orch.orchestrator.report import (
    SCHEMA_VERSION,
    CapacityReport,
    ClusterReport,
    DedupReport,
    GroupReport,
    NodeReport,
    RankReport,
    Report,
    RunState,
    SecondPass,
    SignatureReport,
    StageReport,
    TargetReport,
    TensorReport,
    WarmupReport,
)


@dataclass
class RunFacts:
    """Filled in as the run goes; the one mutable record of the driver, which never leaves it."""

    run_id: str
    command: str
    config: WarmConfig
    target: Target | None
    device: Device | None = None
    nodes: tuple[Mapping[str, Any], ...] = ()
    node_infos: tuple[NodeInfo, ...] = ()
    places: tuple[ShardPlace, ...] = ()
    layouts: tuple[RankLayouts, ...] = ()
    dedup: Dedup | None = None
    warmups: dict[int, tuple[WarmupOutcome, ...]] = field(default_factory=dict)
    first_pass: dict[int, tuple[Compilation, ...]] = field(default_factory=dict)
    second_pass: dict[int, tuple[Compilation, ...]] = field(default_factory=dict)
    failure: RankFailure | None = None
    warnings: tuple[str, ...] = ()
    _seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    _running: dict[int, str] = field(default_factory=dict)

    def phase(self, rank: int, phase: str, seconds: float | None) -> None:
        """Take note that a phase of a rank began (`seconds` None) or ended; a phase that comes again adds up."""
        if seconds is None:
            self._running[rank] = phase
            return
        self._running.pop(rank, None)
        of_rank = self._seconds.setdefault(rank, {})
        of_rank[phase] = of_rank.get(phase, 0.0) + seconds

    def phase_seconds(self, rank: int) -> Mapping[str, float]:
        """Seconds by phase of one rank."""
        return self._seconds.get(rank, {})

    def unfinished_phases(self) -> Mapping[int, str]:
        """The phase that each rank is in, for the ranks that are in one."""
        return dict(self._running)


def rank_problems(facts: RunFacts) -> tuple[str, ...]:
    """Why ranks are not warm (on the CPU: not prepared), one line each; empty when all are."""
    problems = []
    for rank in range(facts.config.tp * facts.config.pp):
        outcomes = facts.warmups.get(rank)
        if outcomes is None:
            problems.append(f"rank {rank}: the warmups did not run")
            continue
        problems += [f"rank {rank}: warmup {o.name} failed: {o.reason}" for o in outcomes if o.state == "failed"]
        compiled = facts.second_pass.get(rank, ())
        if compiled:
            problems.append(f"rank {rank}: the second pass compiled {len(compiled)}: {kernel_names(compiled)}")
        if facts.device == "cuda" and rank not in facts.second_pass:
            problems.append(f"rank {rank}: not verified")
    return tuple(problems)


def kernel_names(compiled: Iterable[Compilation]) -> str:
    """`CuTeDSL a, Triton b`: each kernel once."""
    return ", ".join(sorted({f"{c.backend} {c.kernel}" for c in compiled}))


def build_report(facts: RunFacts, state: RunState, error: str | None, started: float, ended: float) -> Report:
    """The report of what is known; `started` and `ended` are Unix times in seconds."""
    dedup = facts.dedup
    target = facts.target
    return Report(
        schema_version=SCHEMA_VERSION,
        run_id=facts.run_id,
        state=state,
        command=facts.command,
        config=facts.config.model_dump(mode="json"),
        versions=facts.node_infos[0].versions if facts.node_infos else installed_versions(),
        started=datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        seconds=round(ended - started, 3),
        target=TargetReport(target.name, target.arch, target.multiprocessors) if target else None,
        capacity=CapacityReport(measured=min((r.num_blocks for r in facts.layouts), default=None)),
        stages=_stages(facts),
        groups=_groups(facts),
        cluster=_cluster(facts),
        ranks=tuple(_rank(facts, rank) for rank in range(facts.config.tp * facts.config.pp)),
        signatures=_signatures(dedup),
        dedup=_dedup(facts),
        warnings=facts.warnings,
        error=error,
    )


def _rank(facts: RunFacts, rank: int) -> RankReport:
    tp = facts.config.tp
    place = next((p for p in facts.places if p.rank == rank), None)
    compiled = facts.second_pass.get(rank)
    failure = facts.failure if facts.failure and facts.failure.rank == rank else None
    return RankReport(
        rank=rank,
        tp_rank=rank % tp,
        pp_rank=rank // tp,
        dp_rank=0,
        node=place.node_id if place else "",
        device=place.device_name if place else "",
        arch=place.arch if place else "",
        engine=facts.config.engine,
        phases={name: round(seconds, 3) for name, seconds in facts.phase_seconds(rank).items()},
        signatures=facts.dedup.by_rank.get(rank, ()) if facts.dedup else (),
        keys=(),
        warmups=tuple(
            WarmupReport(o.name, o.state, o.reason, round(o.seconds, 3)) for o in facts.warmups.get(rank, ())
        ),
        loaded=0,
        built=0,
        compiled_in_process=len(facts.first_pass.get(rank, ())),
        second_pass=SecondPass(monitor_compilations=None if compiled is None else len(compiled)),
        error=f"{failure.error}\n{failure.traceback}".rstrip() if failure else None,
    )


def _stages(facts: RunFacts) -> tuple[StageReport, ...]:
    tp = facts.config.tp
    stages: dict[int, set[str]] = {}
    for layouts in facts.layouts:
        stages.setdefault(layouts.rank // tp, set()).update(layer.layer for layer in layouts.layers)
    return tuple(StageReport(stage, tuple(sorted(names, key=_layer_order))) for stage, names in sorted(stages.items()))


def _groups(facts: RunFacts) -> tuple[GroupReport, ...]:
    tp = facts.config.tp
    groups: dict[tuple[int, int], tuple[str, set[str]]] = {}
    for layouts in facts.layouts:
        for layer in layouts.layers:
            _, names = groups.setdefault((layouts.rank // tp, layer.group), (layer.family, set()))
            names.add(layer.layer)
    return tuple(
        GroupReport(f"{stage}.{group}", kind, tuple(sorted(names, key=_layer_order)))
        for (stage, group), (kind, names) in sorted(groups.items())
    )


def _layer_order(name: str) -> tuple[tuple[int, str], ...]:
    """`model.layers.10.attn` after `model.layers.9.attn`."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


def _cluster(facts: RunFacts) -> ClusterReport:
    versions = {info.node_id: info.versions for info in facts.node_infos}
    return ClusterReport(
        tuple(
            NodeReport(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                versions=dict(versions.get(node["NodeID"], {})),
            )
            for node in facts.nodes
        )
    )


def _dedup(facts: RunFacts) -> DedupReport:
    if facts.dedup is None:
        return DedupReport()
    return DedupReport(
        signatures_seen=facts.dedup.seen,
        signatures_unique=len(facts.dedup.unique),
        compilations=sum(map(len, facts.first_pass.values())),
    )


def _signatures(dedup: Dedup | None) -> tuple[SignatureReport, ...]:
    if dedup is None:
        return ()
    return tuple(
        SignatureReport(
            id=unique.id,
            family=unique.family,
            arch=unique.arch,
            tensors=tuple(TensorReport(**dataclasses.asdict(tensor)) for tensor in unique.tensors),
            layers=tuple(sorted(unique.layers, key=_layer_order)),
            ranks=unique.ranks,
        )
        for unique in dedup.unique
    )
