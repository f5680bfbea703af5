"""The report of a run (`report.json`, schema version 1) and its run folder."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from replayssm_orch.configs.errors import ConfigError

SCHEMA_VERSION = 1
# The steps of `actors.warmups.run.STEPS`, in order; a test holds the two equal (that module imports torch).
STEPS = ("lifecycle", "gdn", "mamba2-decode")
RunState = Literal["warm", "prepared", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class TargetReport:
    """The GPU profile that the run's kernels are for."""

    profile: str
    arch: str
    multiprocessors: int


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Cache blocks: as measured (the minimum over ranks), as pinned, and the grid that pinned them."""

    measured: int | None = None
    pinned: int | None = None
    grid: int | None = None


@dataclass(frozen=True, slots=True)
class StageReport:
    """One pipeline stage and the layers with a cache on it."""

    pp_rank: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One KV-cache group of a stage: `id` is `<pp_rank>.<group>`, `kind` a family."""

    id: str
    kind: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node of the cluster; `versions` by package."""

    id: str
    address: str
    cpus: float
    gpus: float
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The nodes of the cluster that the run saw."""

    nodes: tuple[NodeReport, ...] = ()


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """One warmup on one rank."""

    name: str
    state: str
    reason: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SecondPass:
    """Compilations of the second pass: by the kernel store, and by the independent monitor. None: not counted."""

    store_compilations: int | None = None
    monitor_compilations: int | None = None


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank: where it ran, what it did, how long each phase took (seconds), and its error if it failed.

    `node` is an id of `cluster.nodes`.
    """

    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    node: str
    device: str
    arch: str
    engine: str
    phases: Mapping[str, float]
    signatures: tuple[str, ...]
    keys: tuple[str, ...]
    warmups: tuple[WarmupReport, ...]
    loaded: int
    built: int
    compiled_in_process: int
    second_pass: SecondPass
    error: str | None


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One cache tensor of a signature, in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SignatureReport:
    """One distinct layout signature, with the layers and ranks that have it."""

    id: str
    family: str
    arch: str
    tensors: tuple[TensorReport, ...]
    layers: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DedupReport:
    """What was seen over all ranks, what of it is distinct, and what compiling once saved."""

    signatures_seen: int = 0
    signatures_unique: int = 0
    keys_seen: int = 0
    keys_unique: int = 0
    compilations: int = 0
    compilations_avoided: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a run found out; `started` is an ISO 8601 time in UTC, `seconds` the run's length."""

    schema_version: int
    run_id: str
    state: RunState
    command: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    started: str
    seconds: float
    target: TargetReport | None = None
    capacity: CapacityReport = field(default_factory=CapacityReport)
    stages: tuple[StageReport, ...] = ()
    groups: tuple[GroupReport, ...] = ()
    cluster: ClusterReport = field(default_factory=ClusterReport)
    ranks: tuple[RankReport, ...] = ()
    signatures: tuple[SignatureReport, ...] = ()
    kernels: tuple[Mapping[str, Any], ...] = ()
    dedup: DedupReport = field(default_factory=DedupReport)
    warnings: tuple[str, ...] = ()
    error: str | None = None


def to_json(report: Report) -> str:
    """The report as `report.json` holds it."""
    return json.dumps(dataclasses.asdict(report), indent=1)


def read_report(path: Path) -> Report:
    """The report of a run folder or of a `report.json`.

    Raises ConfigError when there is none, or when it is not a report of this schema version.
    """
    from pydantic import TypeAdapter, ValidationError

    file = path / "report.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"RUN {path}: no report.json there; give a run folder such as runs/<run id>") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"RUN {path}: report.json cannot be read ({error})") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigError(f"RUN {path}: schema_version {version}; this version reads {SCHEMA_VERSION}")
    try:
        return TypeAdapter(Report).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"RUN {path}: not a report: {where}: {first['msg']}") from None


class RunFolder:
    """`RUNS/<run id>/`: `report.json`, `events.jsonl`, `logs/`."""

    def __init__(self, runs_dir: Path, run_id: str) -> None:
        """Raises ConfigError when the folder cannot be made."""
        self.path = runs_dir / run_id
        self.logs = self.path / "logs"
        try:
            self.logs.mkdir(parents=True)
            self._events = open(self.path / "events.jsonl", "a", buffering=1)  # noqa: SIM115 - open for the run
        except OSError as error:
            raise ConfigError(
                f"--runs-dir {runs_dir}: cannot write there ({error.strerror}); choose a writable folder"
            ) from None

    def event(self, phase: str, rank: int | None = None, seconds: float | None = None, at: float | None = None) -> None:
        """Append one event; `at` is Unix time in seconds, now if not given."""
        line = {
            "time": time.time() if at is None else at,
            "rank": rank,
            "phase": phase,
            "key": None,
            "seconds": seconds,
        }
        self._events.write(json.dumps(line) + "\n")

    def write(self, report: Report) -> None:
        """Write `report.json` whole or not at all."""
        handle, name = tempfile.mkstemp(dir=self.path, prefix=".report-")
        with os.fdopen(handle, "w") as file:
            file.write(to_json(report) + "\n")
        os.chmod(name, 0o644)
        os.replace(name, self.path / "report.json")

    def close(self) -> None:
        """Close the event file."""
        self._events.close()
