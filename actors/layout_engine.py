"""The layout engine: one shard's recurrent caches with no model and no weights, driven like vLLM's model runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import torch

from replayssm_orch.actors.cache_pool import allocate_pool, layer_layouts
from replayssm_orch.actors.layout_inputs import gdn_inputs, mamba2_inputs, recurrent_layer
from replayssm_orch.actors.layout_layers import (
    LayoutGdnLayer,
    LayoutLayer,
    LayoutMamba2Layer,
    RecurrentKernels,
    Trackers,
)
from replayssm_orch.actors.layout_plan import LayoutPlan
from replayssm_orch.actors.lifecycle_context import ReplayLifecycle
from replayssm_orch.actors.records import LayerLayout
from replayssm_orch.actors.warmups.capabilities import Capabilities, Unavailable
from replayssm_orch.actors.warmups.protocol import GatedDeltaNetLayer, RecurrentLayer, Runner


@dataclass(frozen=True, slots=True)
class _MambaSpec:
    block_size: int
    mamba_cache_mode: str


@dataclass(frozen=True, slots=True)
class _Group:
    layer_names: tuple[str, ...]
    kv_cache_spec: _MambaSpec


@dataclass(frozen=True, slots=True)
class _KVCacheConfig:
    num_blocks: int
    kv_cache_groups: tuple[_Group, ...]


@dataclass(frozen=True, slots=True)
class _CacheConfig:
    mamba_cache_mode: str


@dataclass(frozen=True, slots=True)
class _CompilationConfig:
    static_forward_context: Mapping[str, LayoutLayer]


@dataclass(frozen=True, slots=True)
class _SchedulerConfig:
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class _VllmConfig:
    use_flashinfer_replayssm: bool
    gdn_replayssm: bool
    num_speculative_tokens: int
    cache_config: _CacheConfig
    compilation_config: _CompilationConfig

    def is_gdn_replayssm_enabled(self) -> bool:
        return self.gdn_replayssm


@dataclass(frozen=True, slots=True)
class _Model:
    layers: tuple[LayoutLayer, ...]

    def modules(self) -> tuple[LayoutLayer, ...]:
        return self.layers


@dataclass(frozen=True, slots=True)
class CaptureDescriptor:
    """A uniform decode graph of `num_reqs` requests with `uniform_token_count` tokens each."""

    num_reqs: int | None
    uniform_token_count: int | None


@dataclass(frozen=True, slots=True)
class _CudaGraphManager:
    _capture_descs: Mapping[str, Sequence[CaptureDescriptor]]


@dataclass(frozen=True, slots=True)
class _BlockTables:
    input_block_tables: tuple[torch.Tensor, ...]

    def get_dummy_block_tables(self, num_reqs: int, /) -> tuple[torch.Tensor, ...]:
        """The first `num_reqs` rows of every group's persistent table, set to the padding slot."""
        for table in self.input_block_tables:
            table[:num_reqs].zero_()
        return tuple(table[:num_reqs] for table in self.input_block_tables)


class LayoutEngine:
    """One shard's caches on one device. Offers the runner protocol of `warmups.protocol`.

    Attributes are vLLM's names; see `LayoutPlan` for what they are made from.
    """

    def __init__(self, plan: LayoutPlan, kernels: RecurrentKernels) -> None:
        self.plan = plan
        self.kernels = kernels
        self._views = allocate_pool(plan)
        trackers = [Trackers.zeros(plan.num_blocks, plan.device) for _ in range(plan.num_groups)]
        self.layers = {
            layer.name: recurrent_layer(layer, plan.page, self._views[layer.name], trackers[layer.group])
            for layer in plan.layers
            if layer.family != "attention"
        }
        groups = tuple(
            _Group(
                tuple(layer.name for layer in plan.layers if layer.group == index),
                _MambaSpec(plan.mamba_block_size, plan.mamba_cache_mode),
            )
            for index in range(plan.num_groups)
        )
        self.kv_cache_config = _KVCacheConfig(plan.num_blocks, groups)
        replayssm = plan.page.window is not None
        self.vllm_config = _VllmConfig(
            use_flashinfer_replayssm=replayssm,
            gdn_replayssm=replayssm and plan.page.family == "gdn",
            num_speculative_tokens=plan.num_speculative_tokens,
            cache_config=_CacheConfig(plan.mamba_cache_mode),
            compilation_config=_CompilationConfig(self.layers),
        )
        self.scheduler_config = _SchedulerConfig(plan.max_num_seqs)
        self.max_num_tokens = plan.max_num_batched_tokens
        self.max_num_reqs = plan.max_num_seqs
        self.decode_query_len = plan.query_len
        self.block_tables = _BlockTables(
            tuple(
                torch.zeros(plan.max_num_seqs, plan.blocks_per_request, dtype=torch.int32, device=plan.device)
                for _ in groups
            )
        )
        self.cudagraph_manager = _CudaGraphManager(
            {"FULL": tuple(CaptureDescriptor(size, plan.query_len) for size in plan.capture_sizes)}
        )

    def get_model(self) -> _Model:
        return _Model(tuple(self.layers.values()))

    def layouts(self) -> tuple[LayerLayout, ...]:
        """Layouts of all layers of the stage, attention included, in model order."""
        return layer_layouts(self.plan, self._views)

    def recurrent_groups(self) -> dict[int, tuple[LayoutLayer, ...]]:
        """The stage's recurrent layers by KV-cache group index; groups without any are left out."""
        members: dict[int, list[LayoutLayer]] = {}
        for layer in self.plan.layers:
            if layer.family != "attention":
                members.setdefault(layer.group, []).append(self.layers[layer.name])
        return {index: tuple(layers) for index, layers in members.items()}

    def decode_unavailable(self) -> Unavailable | None:
        """Why this shard's decode steps cannot run (no such kernel here, no rings), or None."""
        window = self.plan.page.window
        if window is None:
            return Unavailable("the caches have no ReplaySSM rings")
        return self.kernels.decode_unavailable(_layer_type(self.plan), window.width)

    def decode_step(self, slots: Mapping[int, torch.Tensor], *, randomize: bool = True) -> None:
        """Launch every recurrent layer's decode kernel once; trackers stay (the lifecycle advances them).

        `slots` maps a group index to its live slots, int32 `[B]`, 0 for padding rows. Inputs are random or zeros.
        """
        for index, layers in self.recurrent_groups().items():
            for layer in layers:
                if isinstance(layer, LayoutGdnLayer):
                    assert layer.window is not None
                    inputs = gdn_inputs(layer, len(slots[index]), layer.window.width, randomize)
                    self.kernels.gdn_decode(layer, inputs, slots[index])
                elif isinstance(layer, LayoutMamba2Layer):
                    self.kernels.mamba2_decode(
                        layer,
                        mamba2_inputs(layer, len(slots[index]), self.decode_query_len, randomize),
                        slots[index],
                    )

    def _dummy_run(self, *, num_tokens: int, **flags: bool) -> None:
        """One uniform decode step of `num_tokens // decode_query_len` requests.

        With `valid_dummy_state_slots` the requests use slots 1, 2, …; without it every row is padding. The other flags
        of vLLM's runner name parts that a shard without a model does not have.
        """
        assert flags.get("uniform_decode"), "a layout engine only decodes: it has no model to prefill"
        num_reqs, rest = divmod(num_tokens, self.decode_query_len)
        assert rest == 0, f"{num_tokens} tokens are no whole queries of {self.decode_query_len}"
        assert num_tokens <= self.max_num_tokens, f"{num_tokens} tokens exceed max_num_tokens {self.max_num_tokens}"
        tables = self.block_tables.get_dummy_block_tables(num_reqs)
        if flags.get("valid_dummy_state_slots"):
            slots = torch.arange(1, num_reqs + 1, dtype=torch.int32, device=self.plan.device)
            for table in tables:
                table[:, 0] = slots
        self.decode_step(
            {index: tables[index][:, 0].contiguous() for index in self.recurrent_groups()},
            randomize=flags.get("randomize_inputs", False),
        )


def layout_capabilities(engine: LayoutEngine, committable_blocks: int | None = None) -> Capabilities:
    """What a layout engine can do; `committable_blocks` is the minimum over all ranks (default: the engine's own)."""
    blocks = engine.plan.num_blocks if committable_blocks is None else min(committable_blocks, engine.plan.num_blocks)
    layer_type = _layer_type(engine.plan)

    def decode_kernel(width: int) -> Unavailable | None:
        return engine.kernels.decode_unavailable(layer_type, width)

    def ensure_blocks(runner: Runner, num_blocks: int) -> None:
        assert num_blocks <= runner.kv_cache_config.num_blocks, f"{num_blocks} blocks were never allocated"

    materializer_missing = engine.kernels.materializer_unavailable(layer_type)
    publishes = engine.plan.mamba_cache_mode == "align"
    lifecycle = partial(ReplayLifecycle.create, kernels=engine.kernels)
    return Capabilities(
        is_recurrent=_is_recurrent,
        is_gdn=_is_gdn,
        num_committable_blocks=lambda runner: blocks,
        ensure_blocks=ensure_blocks,
        create_lifecycle=materializer_missing if publishes and materializer_missing else lifecycle,
        materialize=materializer_missing or engine.kernels.gdn_materialize,
        decode_kernel=decode_kernel,
    )


def _layer_type(plan: LayoutPlan) -> type[LayoutLayer]:
    return LayoutGdnLayer if plan.page.family == "gdn" else LayoutMamba2Layer


def _is_recurrent(module: object) -> TypeGuard[RecurrentLayer]:
    return isinstance(module, LayoutLayer)


def _is_gdn(module: object) -> TypeGuard[GatedDeltaNetLayer]:
    return isinstance(module, LayoutGdnLayer)
