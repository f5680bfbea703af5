"""Checks of `--engine-arg` keys against the installed vLLM, without importing it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from replayssm_orch.configs.errors import ConfigError
from replayssm_orch.configs.presets import did_you_mean

# Engine arguments that the orchestrator gives itself, and what to use instead.
_OWNED = {
    "model": "the MODEL argument",
    "tokenizer": "MODEL (no tokenizer is needed to warm)",
    "skip_tokenizer_init": "nothing: warming needs no tokenizer",
    "load_format": "--weights for the model's real weights",
    "tensor_parallel_size": "--tp",
    "pipeline_parallel_size": "--pp",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "cudagraph_capture_sizes": "--capture-sizes",
    "max_cudagraph_capture_size": "--capture-sizes",
    "mamba_cache_mode": "--mamba-cache-mode",
    "distributed_executor_backend": "nothing: ranks run in the orchestrator's own actors",
    "worker_cls": "nothing: ranks run in the orchestrator's own actors",
    "worker_extension_cls": "nothing: ranks run in the orchestrator's own actors",
    "nnodes": "--address and --placement: Ray places the ranks",
    "node_rank": "--address and --placement: Ray places the ranks",
    "master_addr": "--address and --placement: Ray places the ranks",
    "master_port": "--address and --placement: Ray places the ranks",
    "device_ids": "--gpus-per-rank and --placement: Ray places the ranks",
}


@cache
def engine_arg_names() -> frozenset[str] | None:
    """The field names of the installed vLLM's `EngineArgs`, read from its source; None where it cannot be found."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        names = _annotated_fields(Path(folder) / "engine" / "arg_utils.py", "EngineArgs")
        if names:
            return names
    return None


def check_engine_args(keys: Iterable[str], file: Path | None = None) -> None:
    """Raise ConfigError for a key that the orchestrator sets itself or that the installed vLLM does not have.

    `file` is the configuration file that the keys came from, if they did. Where vLLM or its source is not found the
    second check is left to the engine.
    """
    for key in keys:
        shown = f"engine_args: {key} in {file}" if file else f"--engine-arg {key}"
        if key in _OWNED:
            raise ConfigError(f"{shown}: set by the orchestrator; use {_OWNED[key]}")
        known = engine_arg_names()
        if known is not None and key not in known:
            raise ConfigError(
                f"{shown}: not an engine argument of the installed vLLM{did_you_mean(key, known)}; "
                "`vllm serve --help=all` lists them"
            )


def _annotated_fields(source: Path, class_name: str) -> frozenset[str]:
    """Names that the class body annotates; empty where the file or the class is missing or cannot be parsed."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError):
        return frozenset()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            return frozenset(target.id for target in fields if isinstance(target, ast.Name))
    return frozenset()
