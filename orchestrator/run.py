"""The state machine of `warm`: connect, place, start, hold, collect, release, warm, verify, report, clean up."""

from __future__ import annotations

import secrets
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from replayssm_orch.actors.failures import one_line
from replayssm_orch.actors.leftovers import mapped_segments, remove_segments
from replayssm_orch.actors.rank_log import take_log
from replayssm_orch.actors.records import Device, NodeInfo, RankFailure
from replayssm_orch.configs.checks import check_parallel
from replayssm_orch.configs.errors import CannotRun, UserError
from replayssm_orch.configs.models import ModelSpec, load_model_spec
from replayssm_orch.configs.schema import WarmConfig
from replayssm_orch.configs.targets import Target, load_target, target_of_gpu
from replayssm_orch.orchestrator.cluster import (
    Cluster,
    check_nodes,
    connect,
    probe_nodes,
    resolve_address,
    run_on_nodes,
)
from replayssm_orch.orchestrator.dedup import deduplicate
from replayssm_orch.orchestrator.engines import Engine, LayoutEngineRun, VllmEngine
from replayssm_orch.orchestrator.failures import RunFailed
from replayssm_orch.orchestrator.layout_spec import check_layout_arguments
from replayssm_orch.orchestrator.outcome import RunFacts, build_report, kernel_names, rank_problems
from replayssm_orch.orchestrator.placement import place, rank_resources, shortage
from replayssm_orch.orchestrator.progress import Progress
from replayssm_orch.orchestrator.report import Report, RunFolder, RunState
from replayssm_orch.orchestrator.shards import ShardGroup
from replayssm_orch.orchestrator.warming import run_warmups
from replayssm_orch.orchestrator.watch import Bound, Watch

_LOG_BYTES = 32 * 2**20
_CLEANUP_SECONDS = 10.0


def warm(config: WarmConfig, command: str, progress: Progress) -> tuple[Report, int, Path]:
    """Run the main job; returns the report, the exit code and the run folder, which holds the report in every case.

    Raises ConfigError or CannotRun (nothing was started, no run folder) for what can be known beforehand.
    """
    address = resolve_address(config.address)
    spec = load_model_spec(config.model)
    check_parallel(spec, config)
    if config.engine == "layout":
        check_layout_arguments(config)
    target = load_target(config.target, config.shown("target")) if config.target else None
    run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    folder = RunFolder(config.runs_dir, run_id)
    run = WarmRun(config, spec, target, address, folder, run_id, command, progress)
    try:
        report, code = run.execute()
    finally:
        folder.close()
    return report, code, folder.path


class WarmRun:
    """One run of `warm`. What has been found out is in `facts`, so that a report exists however the run ends."""

    def __init__(
        self,
        config: WarmConfig,
        spec: ModelSpec,
        target: Target | None,
        address: str | None,
        folder: RunFolder,
        run_id: str,
        command: str,
        progress: Progress,
    ) -> None:
        self._config = config
        self._spec = spec
        self._address = address
        self._folder = folder
        self._progress = progress
        self.facts = RunFacts(run_id=run_id, command=command, config=config, target=target)
        self._watch = Watch(self.facts, folder, progress)

    def execute(self) -> tuple[Report, int]:
        """The whole run, bounded; everything that it started is ended before this returns."""
        started = time.time()
        code: int
        error: str | None
        state: RunState = "failed"
        try:
            with _interruptible(), ExitStack() as cleanup:
                try:
                    self._steps(cleanup)
                finally:
                    _ignore_interrupts()
            problems = rank_problems(self.facts)
            state = ("warm" if self.facts.device == "cuda" else "prepared") if not problems else "failed"
            code, error = (0, None) if not problems else (1, problems[0])
        except (KeyboardInterrupt, SystemExit):
            # SystemExit: until Ray's start-up is over, its own handler has SIGTERM.
            code, error, state = 130, "interrupted; everything that the run started was ended", "interrupted"
        except RunFailed as failed:
            self.facts.failure = failed.failure
            code, error = failed.exit_code, str(failed)
        except UserError as known:
            code, error = known.exit_code, str(known)
        except Exception as unexpected:
            self.facts.failure = RankFailure(None, None, "driver", one_line(unexpected), traceback.format_exc())
            code, error = 1, f"driver failed: {self.facts.failure.error}"
        report = build_report(self.facts, state, error, started, time.time())
        self._folder.write(report)
        return report, code

    def _steps(self, cleanup: ExitStack) -> None:
        config, facts = self._config, self.facts
        start = Bound("--start-timeout", config.start_timeout)
        with self._watch.timed("connect"):
            cluster = cleanup.enter_context(connect(self._address, config.tp * config.pp, start.left()))
        _on_signals_interrupt()  # Ray's driver installs a SIGTERM handler of its own
        facts.nodes = cluster.nodes()
        device = self._device(cluster)
        with self._watch.timed("probe"):
            self._check_cluster(probe_nodes(cluster, start.left()), device)
        check_parallel(self._spec, config, device)
        facts.device = device
        group = self._place(cluster, device, start)
        cleanup.callback(self._clean_up, group)
        run_engine = LayoutEngineRun if config.engine == "layout" else VllmEngine
        engine = run_engine(self._watch, group, config, self._spec, device)
        engine.bring_up(start)
        self._collect()
        with self._watch.timed("release"):
            engine.release(self._step_bound())
        self._warm_pass(engine, device)
        if device == "cuda":
            self._second_pass(engine)

    def _device(self, cluster: Cluster) -> Device:
        gpus = sum(node.gpus for node in cluster.capacities())
        if self._config.device == "cuda" and not gpus and not cluster.borrowed:
            raise CannotRun("--device cuda: no GPU on this machine; use --device cpu, or --address of a GPU cluster")
        if self._config.device == "auto":
            return "cuda" if gpus else "cpu"
        return self._config.device

    def _check_cluster(self, nodes: tuple[NodeInfo, ...], device: Device) -> None:
        with_gpu = {n["NodeID"] for n in self.facts.nodes if n["Resources"].get("GPU")}
        holders = tuple(n for n in nodes if device == "cpu" or n.node_id in with_gpu)
        check_nodes(holders, self._config.engine)
        self.facts.node_infos = nodes
        if self.facts.target is None:
            self.facts.target = self._own_target(holders) if device == "cuda" else load_target("h200")

    def _own_target(self, nodes: tuple[NodeInfo, ...]) -> Target | None:
        """The profile of the GPUs that hold the shards, or None with a warning."""
        names = sorted({gpu.name for node in nodes for gpu in node.gpus})
        targets = [target_of_gpu(name) for name in names]
        if len(names) != 1 or targets[0] is None:
            self.facts.warnings += (
                f"no one GPU profile fits {', '.join(names) or 'the GPUs'}; name one with --target",
            )
            return None
        return targets[0]

    def _place(self, cluster: Cluster, device: Device, bound: Bound) -> ShardGroup:
        config = self._config
        resources = rank_resources(device, config.gpus_per_rank)
        placement = place(config.tp, config.pp, resources, cluster.capacities(), config.placement == "spread")
        lacking = shortage(placement, cluster.capacities())
        if lacking and not cluster.borrowed:
            raise CannotRun(f"--tp {config.tp} --pp {config.pp}: {lacking}; lower them, or use --address of a cluster")
        ranks = config.tp * config.pp
        self._progress.say(f"placing {ranks} rank{'s' if ranks > 1 else ''}: {config.placement}, device {device}")
        with self._watch.timed("reserve"):
            return ShardGroup.reserve(cluster, placement, config, self.facts.run_id, bound.left())

    def _collect(self) -> None:
        """At the hold: dedup what every rank's caches look like."""
        facts = self.facts
        self._folder.event("hold")
        dedup = deduplicate(facts.layouts, {place.rank: place.arch for place in facts.places})
        facts.dedup = dedup
        blocks = min(layouts.num_blocks for layouts in facts.layouts)
        ranks = len(facts.layouts)
        self._progress.say(
            f"layouts: {dedup.seen} layers on {ranks} rank{'s' if ranks > 1 else ''}, "
            f"{len(dedup.unique)} distinct, {blocks} blocks"
        )

    def _warm_pass(self, engine: Engine, device: Device) -> None:
        """The warmups and, on CUDA, first traffic; what they compile is counted and reported."""
        with self._watch.timed("warm pass"):
            if device == "cuda":
                self._on_every_rank(engine, "arm_monitor")
            outcomes = run_warmups(self._watch, engine.group, self._step_bound)
            self.facts.warmups = dict(enumerate(outcomes))
            if device == "cuda":
                engine.first_requests(self._step_bound())
                self.facts.first_pass = dict(enumerate(self._on_every_rank(engine, "take_compilations")))
                self._warn_of_first_requests()

    def _warn_of_first_requests(self) -> None:
        """vLLM's own warm-up should have left nothing to compile: name what it did leave."""
        compiled = [compilation for of_rank in self.facts.first_pass.values() for compilation in of_rank]
        if self._config.engine == "vllm" and compiled:
            self.facts.warnings += (
                f"vLLM's own warm-up left {len(compiled)} compilations to the warm pass ({kernel_names(compiled)}): "
                "without it the first requests would have paid for them",
            )

    def _second_pass(self, engine: Engine) -> None:
        """The same warmups and more traffic: an independent monitor must see no compilation."""
        with self._watch.timed("second pass"):
            run_warmups(self._watch, engine.group, self._step_bound)
            engine.more_requests(self._step_bound())
            self.facts.second_pass = dict(enumerate(self._on_every_rank(engine, "take_compilations")))

    def _on_every_rank(self, engine: Engine, method: str) -> list[Any]:
        return self._watch.results(engine.group, engine.group.on_every_rank(method), self._step_bound(), "monitor")

    def _step_bound(self) -> Bound:
        return Bound("--step-timeout", self._config.step_timeout)

    def _clean_up(self, group: ShardGroup) -> None:
        """End the actors, then bring their logs into the run folder and remove the shared memory that they leave."""
        pids: dict[str, list[int]] = {}
        for shard in self.facts.places:
            pids.setdefault(shard.node_id, []).append(shard.pid)
        segments = run_on_nodes(
            mapped_segments, {node: (node, (of_node,)) for node, of_node in pids.items()}, _CLEANUP_SECONDS
        )
        group.kill()
        logs = run_on_nodes(
            take_log,
            {name: (node, (path, _LOG_BYTES)) for name, (node, path) in group.log_files().items()},
            _CLEANUP_SECONDS,
        )
        run_on_nodes(
            remove_segments, {node: (node, (paths,)) for node, paths in segments.items() if paths}, _CLEANUP_SECONDS
        )
        for name in group.log_files():
            content = logs.get(name)
            if content is None:
                self.facts.warnings += (f"the log of {name} is out of reach: its node did not answer",)
                continue
            (self._folder.logs / f"{name}.log").write_bytes(content)
        group.remove()


def _raise_interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _on_signals_interrupt() -> None:
    signal.signal(signal.SIGINT, _raise_interrupt)
    signal.signal(signal.SIGTERM, _raise_interrupt)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt; the handlers of before come back at the end."""
    before: Mapping[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _on_signals_interrupt()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
