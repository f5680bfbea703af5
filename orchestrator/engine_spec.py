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
    if config.num_blocks is not None:
        args["num_gpu_blocks_override"] = config.num_blocks
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


def _batch(*prompt_tokens: int) -> tuple[Request, ...]:
    return tuple(Request(prompt_tokens=tokens, max_tokens=6) for tokens in prompt_tokens)


# vLLM's own warm-up leaves kernel variants to the first requests: Triton kernels specialise on tile configurations
# that depend on the number of tokens, and on whether it is a multiple of 16. So the warm pass serves, in every octave
# up to a prefill chunk, its power of two and an odd length in its middle, and a few requests together.
_OCTAVES = tuple(2**octave for octave in range(13))
WARM_UP = (
    *(_batch(length) for length in sorted({*_OCTAVES, *(power + power // 2 + 1 for power in _OCTAVES)})),
    _batch(1, 16, 40),
    _batch(2, 130, 256),
)
# Other lengths than the warm pass had: nothing may be left to compile.
VERIFICATION = (_batch(11), _batch(48), _batch(3, 33, 64), _batch(200, 9, 400), _batch(777), _batch(3000))
