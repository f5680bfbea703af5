"""From a run's configuration to what the engine host starts."""

from __future__ import annotations

from typing import Any

from replayssm_orch.actors.records import Device, EngineSpec, Request
from replayssm_orch.configs.models import ModelSpec
from replayssm_orch.configs.schema import WarmConfig, capture_sizes, speculative_tokens

# A CPU run shows layouts and lifecycle, it serves nobody: a small cache and no graph compilation keep it short.
_CPU_ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 256 * 2**20}


def engine_spec(config: WarmConfig, spec: ModelSpec, device: Device) -> EngineSpec:
    """vLLM's engine arguments for `config`; `--engine-arg` wins over all of them."""
    speculative = speculative_tokens(config)
    args: dict[str, Any] = {
        "skip_tokenizer_init": not config.weights,
        "load_format": "auto" if config.weights else "dummy",
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.mamba_cache_mode != "none",
    }
    if config.mamba_cache_mode != "none":
        args["mamba_cache_mode"] = config.mamba_cache_mode
    if speculative:
        # The one method that needs no draft model and no draft weights.
        args["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": speculative,
            "prompt_lookup_max": speculative + 1,
        }
    if device == "cpu":
        args |= _CPU_ARGS
    else:
        # vLLM counts capture sizes in tokens, the options in requests.
        sizes = [requests * (speculative + 1) for requests in capture_sizes(config)]
        args["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    if device == "cuda" and config.tp > 1:
        # Each actor sees its own GPU only; vLLM's custom all-reduce wants to see its peers'.
        args["disable_custom_all_reduce"] = True
    optional = spec.vllm_engine_args.get(device, {})
    return EngineSpec(
        model=config.model,
        hf_config=None if config.weights else spec.hf_config,
        device=device,
        tp=config.tp,
        pp=config.pp,
        args=args | config.engine_args,
        optional_args={name: value for name, value in optional.items() if name not in config.engine_args},
        hold_timeout=config.step_timeout,
    )


def verification_requests(config: WarmConfig) -> tuple[tuple[Request, ...], ...]:
    """Batches of a few real requests: one short, several of unlike lengths, one long enough to be its own prefill."""
    several = min(3, config.max_num_seqs)
    return (
        (Request(prompt_tokens=5, max_tokens=8),),
        tuple(Request(prompt_tokens=length, max_tokens=12) for length in (3, 40, 130)[:several]),
        (Request(prompt_tokens=min(512, config.max_num_batched_tokens), max_tokens=4),),
    )
