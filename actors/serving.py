"""Serving-shaped traffic on a layout engine: resets, decode steps of changing batch sizes, moves and publications."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from replayssm_orch.actors.layout_engine import LayoutEngine
from replayssm_orch.actors.lifecycle_context import ReplayLifecycle
from replayssm_orch.actors.records import Traffic

_FINISH_CHANCE = 0.01


@dataclass(slots=True)
class _Request:
    """A live request in row `row` of the block tables; `computed` tokens, its state in column `column`."""

    row: int
    computed: int
    column: int = 0


@dataclass(slots=True)
class _Counts:
    batch_sizes: list[int] = field(default_factory=list)
    resets: int = 0
    moves: int = 0
    flushes: int = 0
    publications: int = 0


@torch.inference_mode()
def serve(engine: LayoutEngine, decode_steps: int, seed: int = 0) -> Traffic:
    """Decode `decode_steps` steps with random accepted lengths on as many requests as the blocks allow.

    Batch sizes are drawn from the plan's capture sizes that fit, and from no other, since only those are warm. In align
    mode each request starts shortly before a block boundary, moves to its next block when a step may reach it, and has
    the finished block published. Requests finish at random, or when their blocks are used up, and new ones take over.

    Where the decode kernel does not run on this shard, or no capture size fits into the blocks and the limits of the
    plan, nothing is done and the result says why.
    """
    unavailable = engine.decode_unavailable()
    if unavailable is not None:
        return Traffic(skipped=unavailable.reason)
    rng = random.Random(seed)
    groups = engine.recurrent_groups()
    columns = 2 if engine.plan.mamba_cache_mode == "align" else 1
    num_requests = min(engine.max_num_reqs, (engine.plan.num_blocks - 1) // (columns * len(groups)))
    limit = min(num_requests, engine.max_num_tokens // engine.decode_query_len)
    sizes = [size for size in engine.plan.capture_sizes if size <= limit]
    if not sizes:
        return Traffic(skipped=f"no capture size of {engine.plan.capture_sizes} fits {limit} requests")
    traffic = _TrafficGenerator(engine, num_requests, columns, rng)
    requests = [traffic.new_request(row) for row in range(num_requests)]
    for _ in range(decode_steps):
        traffic.step(rng.sample(requests, rng.choice(sizes)))
        requests = [traffic.successor(request) for request in requests]
    counts = traffic.counts
    return Traffic(
        decode_steps, tuple(counts.batch_sizes), counts.resets, counts.moves, counts.flushes, counts.publications
    )


class _TrafficGenerator:
    def __init__(self, engine: LayoutEngine, num_requests: int, columns: int, rng: random.Random) -> None:
        self.engine = engine
        self.groups = groups = tuple(engine.recurrent_groups())
        self.columns = columns
        self.rng = rng
        self.counts = _Counts()
        self.block_size = engine.plan.mamba_block_size
        # Rows own distinct blocks in every group, because the groups alias one pool.
        blocks = 1 + torch.arange(len(groups) * num_requests * columns, dtype=torch.int32, device=engine.plan.device)
        self.tables = dict(zip(groups, blocks.view(len(groups), num_requests, columns), strict=True))
        members = engine.recurrent_groups()
        self.lifecycle = ReplayLifecycle.create(
            [
                (members[group], engine.kv_cache_config.kv_cache_groups[group].kv_cache_spec, self.tables[group])
                for group in groups
            ],
            engine.max_num_reqs,
            kernels=engine.kernels,
        )

    def new_request(self, row: int) -> _Request:
        """A request after its prefill: trackers reset, a state written; in align mode shortly before a boundary."""
        few = self.rng.randint(1, 4 * self.engine.decode_query_len)
        request = _Request(row, computed=max(1, self.block_size - few) if self.columns == 2 else few)
        self._reset([request], src=-1, dst=0)
        for group, layers in self.engine.recurrent_groups().items():
            slot = int(self.tables[group][row, 0])
            for layer in layers:
                layer.kv_cache[1][slot].normal_()
        self.counts.resets += 1
        return request

    def successor(self, request: _Request) -> _Request:
        """`request`, or a new one in its row when its blocks are used up or it finished by chance."""
        full = request.computed + self.engine.decode_query_len >= self.columns * self.block_size
        return self.new_request(request.row) if full or self.rng.random() < _FINISH_CHANCE else request

    def step(self, batch: Sequence[_Request]) -> None:
        """One decode step of `batch` and its lifecycle."""
        query_len = self.engine.decode_query_len
        if self.columns == 2:
            moving = [r for r in batch if r.column == 0 and r.computed + query_len >= self.block_size]
            if moving:
                self._reset(moving, src=0, dst=1)
                self.counts.moves += len(moving)
                for request in moving:
                    request.column = 1
        rows = torch.tensor([request.row for request in batch], device=self.engine.plan.device)
        live = self._int32([request.column for request in batch])
        slots = {group: self.tables[group][rows, live.long()] for group in self.groups}
        self.counts.flushes += self._flushing(slots[self.groups[0]])
        self.engine.decode_step(slots)
        accepted = [self.rng.randint(1, query_len) for _ in batch]
        for request, count in zip(batch, accepted, strict=True):
            before = request.computed // self.block_size
            request.computed += count
            self.counts.publications += int(self.columns == 2 and request.computed // self.block_size > before)
        self.lifecycle.postprocess(
            idx_mapping=rows,
            query_metadata=self._int32([index * query_len for index in range(len(batch) + 1)]),
            query_metadata_is_cumulative=True,
            num_computed_tokens=self._int32([request.computed for request in batch]),
            num_computed_is_post_step=True,
            num_accepted_tokens=self._int32(accepted),
            is_prefilling=torch.zeros(len(batch), dtype=torch.bool, device=self.engine.plan.device),
            live_cols=live if self.columns == 2 else None,
            num_reqs=len(batch),
        )
        self.counts.batch_sizes.append(len(batch))

    def _flushing(self, slots: torch.Tensor) -> int:
        layer = self.engine.recurrent_groups()[self.groups[0]][0]
        assert layer.window is not None, f"{layer.name} has no ReplaySSM rings"
        return int(layer.window.flushes(layer.trackers.committed[slots.long()]).sum())

    def _reset(self, requests: Sequence[_Request], src: int, dst: int) -> None:
        self.lifecycle.reset_new_slots(
            idx_mapping=torch.tensor([request.row for request in requests], device=self.engine.plan.device),
            src_cols=self._int32([src] * len(requests)),
            dst_cols=self._int32([dst] * len(requests)),
            num_reqs=len(requests),
        )

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.engine.plan.device)
