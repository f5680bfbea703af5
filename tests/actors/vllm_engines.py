"""Tiny hybrid models for an in-process vLLM engine on the CPU."""

import json
from pathlib import Path

import torch

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 4096,
}
NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "hybrid_override_pattern": "M-M*M-M*",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 1,
    "conv_kernel": 4,
    "chunk_size": 128,
    "max_position_embeddings": 4096,
}


def start_engine(directory: Path, config: dict, **options):
    """A real vLLM engine in this process with random weights, and its model runner."""
    from vllm import LLM

    (directory / "config.json").write_text(json.dumps(config))
    engine = LLM(
        model=str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        **options,
    )
    return engine, engine.llm_engine.model_executor.driver_worker.worker.model_runner


def shut_down(engine) -> None:
    engine.llm_engine.engine_core.shutdown()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def layer_tensors(runner) -> dict[str, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    """(dtype, shape, stride) of every cache tensor of every layer that has one."""
    tensors = {}
    for name, layer in runner.vllm_config.compilation_config.static_forward_context.items():
        cache = getattr(layer, "kv_cache", None)
        if cache is not None:
            views = [cache] if isinstance(cache, torch.Tensor) else cache
            tensors[name] = [
                (str(view.dtype).removeprefix("torch."), tuple(view.shape), tuple(view.stride())) for view in views
            ]
    return tensors
