"""What the warmups ask of a runner: vLLM's names, and only the members that a rule reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch


class CaptureDescriptor(Protocol):
    """One CUDA-graph descriptor; both fields are None where the graph does not fix them."""

    @property
    def num_reqs(self) -> int | None: ...
    @property
    def uniform_token_count(self) -> int | None: ...


class CudaGraphManager(Protocol):
    @property
    def _capture_descs(self) -> Mapping[Any, Sequence[CaptureDescriptor]]: ...


class BlockTables(Protocol):
    @property
    def input_block_tables(self) -> Sequence[torch.Tensor]:
        """One int32 table `[max_num_reqs, max_blocks]` per KV-cache group."""
        ...

    def get_dummy_block_tables(self, num_reqs: int, /) -> object: ...


class MambaSpec(Protocol):
    @property
    def block_size(self) -> int: ...
    @property
    def mamba_cache_mode(self) -> str: ...


class KVCacheGroup(Protocol):
    @property
    def layer_names(self) -> Sequence[str]: ...
    @property
    def kv_cache_spec(self) -> Any: ...


class KVCacheConfig(Protocol):
    @property
    def num_blocks(self) -> int: ...
    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroup]: ...


class CacheConfig(Protocol):
    @property
    def mamba_cache_mode(self) -> str: ...


class CompilationConfig(Protocol):
    @property
    def static_forward_context(self) -> Mapping[str, Any]: ...


class SchedulerConfig(Protocol):
    @property
    def max_num_seqs(self) -> int: ...


class VllmConfig(Protocol):
    @property
    def use_flashinfer_replayssm(self) -> bool: ...
    def is_gdn_replayssm_enabled(self) -> bool: ...
    @property
    def num_speculative_tokens(self) -> int: ...
    @property
    def cache_config(self) -> CacheConfig: ...
    @property
    def compilation_config(self) -> CompilationConfig: ...


class Model(Protocol):
    def modules(self) -> Iterable[Any]: ...


class RecurrentLayer(Protocol):
    """A `MambaBase`: `kv_cache` holds paged views `[num_blocks, ...]`, the trackers one int32 entry a slot."""

    @property
    def use_flashinfer_replayssm(self) -> bool: ...
    @property
    def kv_cache(self) -> Sequence[torch.Tensor]: ...
    @property
    def _replayssm_ring_start(self) -> torch.Tensor: ...
    @property
    def _replayssm_prev_num_accepted(self) -> torch.Tensor: ...


class GatedDeltaNetLayer(RecurrentLayer, Protocol):
    """A GDN layer: `kv_cache[1]` is the state `[N, HV, V, K]`, `replayssm_rings` are (u, k, g)."""

    @property
    def use_replayssm(self) -> bool: ...
    @property
    def replayssm_rings(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class Runner(Protocol):
    """One process's model runner: it owns one shard on one GPU."""

    @property
    def vllm_config(self) -> VllmConfig: ...
    @property
    def scheduler_config(self) -> SchedulerConfig: ...
    @property
    def max_num_tokens(self) -> int: ...
    @property
    def max_num_reqs(self) -> int: ...
    @property
    def decode_query_len(self) -> int: ...
    @property
    def kv_cache_config(self) -> KVCacheConfig: ...
    @property
    def block_tables(self) -> BlockTables: ...
    @property
    def cudagraph_manager(self) -> CudaGraphManager | None: ...
    def get_model(self) -> Model: ...
    def _dummy_run(self, *, num_tokens: int, **flags: bool) -> object: ...
