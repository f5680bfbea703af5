"""The two engines of a run as the driver sees them: bring up, tell layouts, warm, serve to verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from replayssm_orch.actors.records import Device, RankFailure, Request, Traffic
from replayssm_orch.configs.models import ModelSpec
from replayssm_orch.configs.schema import WarmConfig
from replayssm_orch.orchestrator.engine_spec import VERIFICATION, WARM_UP, engine_spec
from replayssm_orch.orchestrator.failures import RunFailed
from replayssm_orch.orchestrator.layout_spec import layout_specs
from replayssm_orch.orchestrator.shards import ShardGroup
from replayssm_orch.orchestrator.watch import POLL_SECONDS, Bound, Watch

_TRAFFIC_STEPS = 100


class Engine(ABC):
    """One engine over a run's shards; the methods are called in this order, the last two on CUDA only."""

    def __init__(self, watch: Watch, group: ShardGroup, config: WarmConfig) -> None:
        self.watch = watch
        self.group = group
        self.config = config

    @abstractmethod
    def bring_up(self, bound: Bound) -> None:
        """Start the shards up to the hold: caches allocated, `facts.places` and `facts.layouts` known."""

    @abstractmethod
    def release(self, bound: Bound) -> None:
        """End the hold: what the engine itself does before it serves."""

    @abstractmethod
    def first_requests(self, bound: Bound) -> None:
        """Traffic that belongs to the warm pass."""

    @abstractmethod
    def more_requests(self, bound: Bound) -> None:
        """Traffic of the second pass, which must compile nothing."""


class VllmEngine(Engine):
    """A real vLLM engine in the engine host, over worker shards."""

    def __init__(self, watch: Watch, group: ShardGroup, config: WarmConfig, spec: ModelSpec, device: Device) -> None:
        super().__init__(watch, group, config)
        group.spawn_vllm(device)
        self._started = group.start(engine_spec(config, spec, device))

    def bring_up(self, bound: Bound) -> None:
        facts = self.watch.facts
        facts.places = tuple(self.watch.results(self.group, self.group.on_every_rank("place"), bound, "place"))
        while (held := self.watch.poll(self.group).held) is None:
            if self.group.wait([self._started], POLL_SECONDS)[0]:
                self.watch.result(self.group, self._started, bound, "engine start")
                raise RunFailed(RankFailure(None, None, "engine start", "vLLM started without reaching the hold"))
            if bound.over():
                self.watch.time_out("engine start", bound)
        facts.layouts = held

    def release(self, bound: Bound) -> None:
        self.group.release()
        self.watch.facts.warnings += self.watch.result(self.group, self._started, bound, "compile_or_warm_up_model")

    def first_requests(self, bound: Bound) -> None:
        self._serve(WARM_UP, bound)

    def more_requests(self, bound: Bound) -> None:
        self._serve(VERIFICATION, bound)

    def _serve(self, batches: Sequence[tuple[Request, ...]], bound: Bound) -> None:
        for batch in batches:
            fitting = batch[: self.config.max_num_seqs]
            self.watch.result(self.group, self.group.serve(fitting), bound, "serve")


class LayoutEngineRun(Engine):
    """Layout shards: only the model's recurrent caches, driven by the same warmups."""

    def __init__(self, watch: Watch, group: ShardGroup, config: WarmConfig, spec: ModelSpec, device: Device) -> None:
        super().__init__(watch, group, config)
        group.spawn_layout(layout_specs(config, spec, device))

    def bring_up(self, bound: Bound) -> None:
        facts = self.watch.facts
        facts.places = tuple(self.watch.results(self.group, self.group.on_every_rank("place"), bound, "place"))
        facts.layouts = tuple(self.watch.results(self.group, self.group.on_every_rank("layouts"), bound, "allocate"))

    def release(self, bound: Bound) -> None:
        """A layout shard has no start-up beyond its caches."""

    def first_requests(self, bound: Bound) -> None:
        """The warmups alone are a layout shard's warm pass: its traffic must find everything compiled."""

    def more_requests(self, bound: Bound) -> None:
        refs = self.group.on_every_rank("serve", _TRAFFIC_STEPS)
        traffic: list[Traffic] = self.watch.results(self.group, refs, bound, "serve")
        first = traffic[0]
        if first.skipped is not None:
            self.watch.facts.warnings += (f"no traffic in the second pass: {first.skipped}",)
            return
        self.watch.progress.say(
            f"served {first.decode_steps} decode steps a rank: {first.flushes} flushes, "
            f"{first.publications} publications"
        )
