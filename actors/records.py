"""The frozen records that cross process boundaries between shards, engine host and driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from replayssm_orch.configs.architectures import AttentionGeometry, GdnGeometry, Mamba2Geometry

Device = Literal["cpu", "cuda"]
Family = Literal["gdn", "mamba2", "attention"]
WarmupState = Literal["done", "skipped", "failed"]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Layout of one cache tensor: `shape` and `stride` in elements, `dtype` without the `torch.` prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The cache tensors of one layer on one rank; `group` is the index of its KV-cache group."""

    layer: str
    group: int
    family: Family
    tensors: tuple[TensorLayout, ...]


@dataclass(frozen=True, slots=True)
class WarmupOutcome:
    """What became of one warmup on one rank; `reason` says why it was skipped or how it failed."""

    name: str
    state: WarmupState
    reason: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ShardIdentity:
    """Which shard of which run an actor is. `rank = pp_rank * tp + tp_rank`, as vLLM numbers its workers."""

    run_id: str
    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a shard runs. `device_name` and `gpu_ids` are for people; only `arch` enters signatures."""

    rank: int
    node_id: str
    address: str
    pid: int
    device: Device
    device_name: str
    gpu_ids: tuple[str, ...]
    arch: str


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """One phase of one rank, as the executor saw it. `seconds` is None while it runs; `at` is Unix time in seconds."""

    rank: int
    phase: str
    at: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a run cannot go on: the rank (None: the engine itself), its stage and phase, one line, and the traceback."""

    rank: int | None
    stage: int | None
    phase: str
    error: str
    traceback: str = ""
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the engine host starts: vLLM engine arguments and, for random weights, the Hugging Face configuration.

    `model` is a hub id or directory when the real weights are loaded; otherwise `hf_config` is written to a directory
    of the host and `model` only names it. `args` are `vllm.EngineArgs` fields; `optional_args` are left out where
    the installed vLLM cannot have them. `hold_timeout` bounds the hold before `compile_or_warm_up_model`, in seconds.
    """

    model: str
    hf_config: Mapping[str, Any] | None
    device: Device
    tp: int
    pp: int
    args: Mapping[str, Any]
    optional_args: Mapping[str, Any]
    hold_timeout: float


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """What a layout shard is made from: the model's heads before tensor parallelism, its layers, vLLM's limits.

    `model_layers` are the cache-bearing layers of all stages as (name, family), in model order; `held` names this
    stage's. `state_dtype` None is the family's default; `num_blocks` None is enough for `max_num_seqs` requests.
    `capture_sizes` are in requests.
    """

    device: Device
    tp: int
    recurrent: GdnGeometry | Mamba2Geometry
    attention: AttentionGeometry
    state_dtype: str | None
    replayssm: bool
    model_layers: tuple[tuple[str, Family], ...]
    held: frozenset[str]
    num_blocks: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    capture_sizes: tuple[int, ...]
    num_speculative_tokens: int
    mamba_cache_mode: Literal["none", "align", "all"]


@dataclass(frozen=True, slots=True)
class StepDecisions:
    """What decides, on one rank, whether and how a warmup step runs; it must be equal on every rank."""

    rank: int
    inputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a stretch of serving-shaped traffic did; `flushes` and `publications` are per request, over one group.

    `skipped` says why there was none: the decode kernel does not exist here, or no capture size fits.
    """

    decode_steps: int = 0
    batch_sizes: tuple[int, ...] = ()
    resets: int = 0
    moves: int = 0
    flushes: int = 0
    publications: int = 0
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class RankLayouts:
    """Every cache layout of one rank and the number of cache blocks (slots) it was given."""

    rank: int
    layers: tuple[LayerLayout, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine host has seen since the event number that was asked for."""

    events: tuple[PhaseEvent, ...]
    held: tuple[RankLayouts, ...] | None


@dataclass(frozen=True, slots=True)
class Compilation:
    """One compilation that a monitor saw: the compiler, what happened, and the kernel's name."""

    backend: str
    event: str
    kernel: str


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the verification pass, in tokens."""

    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU of a node: `memory` in bytes, `arch` as compilers name it (`sm_90a`)."""

    name: str
    arch: str
    memory: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What one node has, read without importing torch or vLLM. `versions` maps installed packages to versions."""

    node_id: str
    address: str
    hostname: str
    cores: int
    gpus: tuple[GpuInfo, ...]
    versions: Mapping[str, str]
