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
from replayssm_orch.actors.records import (
    Compilation,
    Device,
    EngineStatus,
    NodeInfo,
    RankFailure,
    RankLayouts,
    WarmupOutcome,
)
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
    read_remote_logs,
    resolve_address,
)
from replayssm_orch.orchestrator.dedup import Dedup, deduplicate
from replayssm_orch.orchestrator.engine_spec import engine_spec, verification_requests
from replayssm_orch.orchestrator.failures import RunFailed
from replayssm_orch.orchestrator.outcome import RunFacts, build_report, rank_problems
from replayssm_orch.orchestrator.placement import place, rank_resources, shortage
from replayssm_orch.orchestrator.progress import Progress
from replayssm_orch.orchestrator.report import Report, RunFolder, RunState
from replayssm_orch.orchestrator.shards import ShardGroup

_POLL_SECONDS = 0.25
_LOG_BYTES = 32 * 2**20
_CLEANUP_SECONDS = 10.0


def warm(config: WarmConfig, command: str, progress: Progress) -> tuple[Report, int, Path]:
    """Run the main job; returns the report, the exit code and the run folder, which holds the report in every case.

    Raises ConfigError or CannotRun (nothing was started, no run folder) for what can be known beforehand.
    """
    address = resolve_address(config.address)
    spec = load_model_spec(config.model)
    check_parallel(spec, config)
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
        self._events_seen = 0
        self.facts = RunFacts(run_id=run_id, command=command, config=config, target=target)

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
        except KeyboardInterrupt:
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
        with self._timed("connect"):
            cluster = cleanup.enter_context(connect(self._address, config.tp * config.pp, start.left()))
        _on_signals_interrupt()  # Ray's driver installs a SIGTERM handler of its own
        facts.nodes = cluster.nodes()
        device = self._device(cluster)
        with self._timed("probe"):
            self._check_cluster(probe_nodes(cluster, start.left()), device)
        check_parallel(self._spec, config, device)
        facts.device = device
        group = self._place(cluster, device, start)
        cleanup.callback(self._clean_up, cluster, group)
        self._start(group, device, start)
        self._warm_up(group)
        if device == "cuda":
            self._verify(group)

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
        with self._timed("place"):
            return ShardGroup.create(cluster, placement, config, self.facts.run_id, device, bound.left())

    def _start(self, group: ShardGroup, device: Device, bound: Bound) -> None:
        """Bring the engine up to the hold, collect the layouts, dedup them."""
        self._started = group.start(engine_spec(self._config, self._spec, device))
        self.facts.places = tuple(self._await(group, group.places(), bound, "start", by_rank=True))
        self._await_hold(group, bound)
        held = self.facts.layouts
        self.facts.dedup = deduplicate(held, {place.rank: place.arch for place in self.facts.places})
        self._say_dedup(self.facts.dedup, held)

    def _await_hold(self, group: ShardGroup, bound: Bound) -> None:
        while not self.facts.layouts:
            status = self._poll(group)
            if status.held is not None:
                self.facts.layouts = status.held
                self._folder.event("hold")
                return
            if group.wait([self._started], _POLL_SECONDS)[0]:
                self._finish_start(group)
                raise RunFailed(RankFailure(None, None, "engine start", "vLLM started without the hold being reached"))
            if bound.over():
                self._time_out("engine start", bound)

    def _warm_up(self, group: ShardGroup) -> None:
        """Release the hold: vLLM's own warm-up and graph capture, then the ReplaySSM warmups on every rank."""
        group.release()
        with self._timed("vllm warm-up"):
            self._await(group, [self._started], self._step_bound(), "compile_or_warm_up_model")
            self._finish_start(group)
        with self._timed("warmups"):
            outcomes: list[tuple[WarmupOutcome, ...] | RankFailure] = self._await(
                group, group.warm(), self._step_bound(), "warmups", by_rank=True
            )
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, RankFailure):
                raise RunFailed(outcome)
            self.facts.warmups[rank] = outcome

    def _verify(self, group: ShardGroup) -> None:
        """Serve a few real requests with every rank's compilation monitor armed."""
        bound = self._step_bound()
        with self._timed("verify"):
            self._await(group, group.arm_monitors(), bound, "verify", by_rank=True)
            for batch in verification_requests(self._config):
                (served,) = self._await(group, [group.serve(batch)], bound, "verify")
                if isinstance(served, RankFailure):
                    raise RunFailed(served)
            compilations: list[tuple[Compilation, ...]] = self._await(
                group, group.take_compilations(), bound, "verify", by_rank=True
            )
        self.facts.compilations = dict(enumerate(compilations))

    def _finish_start(self, group: ShardGroup) -> None:
        result = group.result(self._started, None, "engine start")
        if isinstance(result, RankFailure):
            raise RunFailed(result)
        self.facts.warnings += result

    def _step_bound(self) -> Bound:
        return Bound("--step-timeout", self._config.step_timeout)

    def _await(self, group: ShardGroup, refs: list[Any], bound: Bound, step: str, by_rank: bool = False) -> list[Any]:
        """Every result by position (`by_rank`: one a rank); the first failure, or the bound, ends the wait."""
        rank_of = {ref: rank if by_rank else None for rank, ref in enumerate(refs)}
        results: dict[Any, Any] = {}
        pending = list(refs)
        while pending:
            ready, pending = group.wait(pending, _POLL_SECONDS)
            for ref in ready:
                results[ref] = group.result(ref, rank_of[ref], step)
            self._poll(group)
            if pending and bound.over():
                self._time_out(step, bound)
        return [results[ref] for ref in refs]

    def _time_out(self, step: str, bound: Bound) -> NoReturn:
        unfinished = self.facts.unfinished_phases()
        waiting = (
            ", ".join(f"rank {rank} in {phase}" for rank, phase in sorted(unfinished.items())) or "no rank answered"
        )
        error = f"not finished within {bound.option} {bound.seconds:g} s ({waiting}); raise it or see the ranks' logs"
        rank = min(unfinished, default=None)
        stage = None if rank is None else rank // self._config.tp
        raise RunFailed(RankFailure(rank, stage, step, error, exit_code=bound.exit_code))

    def _poll(self, group: ShardGroup) -> EngineStatus:
        status = group.status(self._events_seen)
        self._events_seen += len(status.events)
        for event in status.events:
            self.facts.phase(event)
            self._progress.phase(event.rank, event.phase, event.seconds)
            if event.seconds is not None:
                self._folder.event(event.phase, rank=event.rank, seconds=event.seconds, at=event.at + event.seconds)
        return status

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._folder.event(step, seconds=time.monotonic() - started)

    def _say_dedup(self, dedup: Dedup, held: tuple[RankLayouts, ...]) -> None:
        blocks = min(layouts.num_blocks for layouts in held)
        self._progress.say(
            f"layouts: {dedup.seen} layers on {len(held)} ranks, {len(dedup.unique)} distinct, {blocks} blocks"
        )

    def _clean_up(self, cluster: Cluster, group: ShardGroup) -> None:
        """End the actors, then bring their logs into the run folder."""
        group.kill()
        logs = read_remote_logs(cluster, group.log_files(), _LOG_BYTES, _CLEANUP_SECONDS)
        for name in group.log_files():
            content = logs.get(name)
            if content is None:
                self.facts.warnings += (f"the log of {name} is out of reach: its node did not answer",)
                continue
            (self._folder.logs / f"{name}.log").write_bytes(content)
        group.remove()


class Bound:
    """A wait's end: the option that sets it, its length in seconds, and what is left of it."""

    def __init__(self, option: str, seconds: float) -> None:
        self.option = option
        self.seconds = seconds
        self.exit_code = CannotRun.exit_code if option == "--start-timeout" else UserError.exit_code
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never quite none."""
        return max(0.1, self._deadline - time.monotonic())

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._deadline


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
