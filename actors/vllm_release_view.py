"""The runner protocol over vLLM's releases (0.29 to 0.33), which spell FlashInfer ReplaySSM in other names.

There, ReplaySSM is `cache_config.use_replayssm` with `mamba_config.backend` FLASHINFER, its layers are `MambaMixer2`
with `use_replayssm`, and they have a third tracker (`_replayssm_prev_query_len`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from replayssm_orch.actors.warmups.capabilities import TRACKERS, Unavailable

RELEASE_TRACKERS = (*TRACKERS, "_replayssm_prev_query_len")
_VALID_SLOTS = "valid_dummy_state_slots"


class MixerView:
    """A `MambaMixer2` of a vLLM release as a recurrent layer of the protocol; attributes pass through."""

    def __init__(self, mixer: Any) -> None:
        self._mixer = mixer

    @property
    def use_flashinfer_replayssm(self) -> bool:
        return bool(self._mixer.use_replayssm) and _is_flashinfer(self._mixer.mamba_config)

    @property
    def kv_cache(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._mixer.kv_cache)

    @property
    def _replayssm_ring_start(self) -> torch.Tensor:
        return self._tracker("_replayssm_ring_start")

    @property
    def _replayssm_prev_num_accepted(self) -> torch.Tensor:
        return self._tracker("_replayssm_prev_num_accepted")

    @property
    def _replayssm_prev_query_len(self) -> torch.Tensor:
        return self._tracker("_replayssm_prev_query_len")

    def _tracker(self, name: str) -> torch.Tensor:
        tracker: torch.Tensor = getattr(self._mixer, name)
        return tracker


class _ModelView:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def modules(self) -> Iterator[object]:
        for module in self._model.modules():
            is_mixer = hasattr(module, "use_replayssm") and hasattr(module, "mamba_config")
            yield MixerView(module) if is_mixer else module


class _ConfigView:
    def __init__(self, config: Any) -> None:
        self.num_speculative_tokens: int = config.num_speculative_tokens
        self.cache_config: Any = config.cache_config
        self.compilation_config: Any = config.compilation_config
        self.use_flashinfer_replayssm = bool(
            getattr(config.cache_config, "use_replayssm", False) and _is_flashinfer(config.mamba_config)
        )

    def is_gdn_replayssm_enabled(self) -> bool:
        return False


class RunnerView:
    """A model runner of a vLLM release behind the runner protocol; what it lacks, only the rule that asks misses."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._dummy_run_flags = _flags(runner._dummy_run)
        self.vllm_config = _ConfigView(runner.vllm_config)
        self.scheduler_config: Any = runner.scheduler_config
        self.max_num_tokens: int = runner.max_num_tokens
        self.max_num_reqs: int = runner.max_num_reqs
        self.kv_cache_config: Any = runner.kv_cache_config

    @property
    def decode_query_len(self) -> int:
        query_len: int = self._runner.decode_query_len
        return query_len

    @property
    def block_tables(self) -> Any:
        return self._runner.block_tables

    @property
    def cudagraph_manager(self) -> Any:
        return self._runner.cudagraph_manager

    def get_model(self) -> _ModelView:
        return _ModelView(self._runner.get_model())

    def _dummy_run(self, *, num_tokens: int, **flags: bool) -> None:
        """vLLM's own dummy run, with those of the flags that this release's signature names."""
        known = {name: value for name, value in flags.items() if name in self._dummy_run_flags}
        self._runner._dummy_run(num_tokens=num_tokens, **known)


def missing_decode_support(runner: Any) -> Unavailable | None:
    """Why a decode step cannot be dummy-run on real state slots of this runner, or None."""
    if not hasattr(runner, "block_tables") or not hasattr(runner, "decode_query_len"):
        return Unavailable(
            f"{type(runner).__module__}.{type(runner).__name__} is model runner V1; the decode warmup needs V2 "
            "(VLLM_USE_V2_MODEL_RUNNER=1)"
        )
    if _VALID_SLOTS not in _flags(runner._dummy_run):
        return Unavailable(f"this vLLM's _dummy_run has no {_VALID_SLOTS}, so it would not touch a state slot")
    return None


def _flags(dummy_run: Any) -> frozenset[str]:
    return frozenset(inspect.signature(dummy_run).parameters)


def _is_flashinfer(mamba_config: Any) -> bool:
    backend = getattr(mamba_config, "backend", None)
    return getattr(backend, "name", None) == "FLASHINFER"
