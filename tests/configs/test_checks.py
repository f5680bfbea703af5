"""Impossible combinations, against vLLM's own arithmetic where it has a function for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayssm_orch.configs.architectures import AttentionGeometry, Mamba2Geometry
from replayssm_orch.configs.checks import check_parallel, stage_layers
from replayssm_orch.configs.errors import ConfigError
from replayssm_orch.configs.models import ModelSpec, load_model_spec
from replayssm_orch.configs.presets import preset_names
from replayssm_orch.configs.schema import WarmConfig, load_config

GDN = load_model_spec("tiny-gdn")
MAMBA2 = load_model_spec("tiny-mamba2")


@pytest.fixture(autouse=True)
def _no_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)


def error_of(spec: ModelSpec, device: Any = None, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_parallel(spec, load_config(options), device)
    return str(caught.value)


def runs(spec: ModelSpec, device: Any = None, **options: Any) -> bool:
    try:
        check_parallel(spec, WarmConfig(**options), device)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_runs_with_its_own_defaults(name: str) -> None:
    check_parallel(load_model_spec(name), load_config({"model": name}), "cuda")


def test_the_degrees_of_the_demos_run() -> None:
    for tp, pp in ((1, 1), (2, 1), (2, 2), (4, 2), (8, 1)):
        assert runs(GDN, "cpu", tp=tp, pp=pp)
        assert runs(MAMBA2, "cpu", tp=tp, pp=pp)
    assert runs(GDN, "cuda", engine="layout", tp=8, gpus_per_rank=0.125)


def test_heads_that_tp_does_not_divide_are_named_with_the_degrees_that_work() -> None:
    assert error_of(GDN, tp=3) == "--tp 3: 16 GDN value heads cannot be divided over 3 ranks; use --tp 1, 2, 4 or 8"
    assert error_of(GDN, tp=16).startswith("--tp 16: 8 GDN key heads cannot be divided over 16 ranks")
    assert error_of(MAMBA2, tp=3).startswith("--tp 3: 8 Mamba2 heads cannot be divided over 3 ranks")
    narrow = dataclasses.replace(GDN, attention=AttentionGeometry(heads=2, kv_heads=2, head_dim=64))
    assert error_of(narrow, tp=4) == "--tp 4: 2 attention heads cannot be divided over 4 ranks; use --tp 1 or 2"


def test_kv_heads_are_divided_or_replicated_but_not_both() -> None:
    def allowed(kv_heads: int, tp: int) -> bool:
        attention = AttentionGeometry(heads=24, kv_heads=kv_heads, head_dim=64)
        mamba2 = Mamba2Geometry(heads=24, head_dim=64, d_state=128, groups=1, conv_kernel=4)
        return runs(dataclasses.replace(MAMBA2, attention=attention, mamba2=mamba2), tp=tp)

    assert allowed(kv_heads=2, tp=8)
    assert allowed(kv_heads=8, tp=2)
    assert not allowed(kv_heads=2, tp=3)
    assert not allowed(kv_heads=6, tp=4)


def test_mamba_groups_follow_vllms_replication_rule() -> None:
    eight_groups = load_model_spec("nemotron-h-8b")
    assert runs(eight_groups, tp=8)
    assert "8 Mamba groups can be neither divided over nor replicated to 16 ranks" in error_of(eight_groups, tp=16)
    assert runs(MAMBA2, "cpu", tp=2)
    assert "1 Mamba groups cannot be divided over 2 ranks, which vLLM's ReplaySSM needs" in error_of(
        MAMBA2, "cuda", tp=2
    )
    assert runs(MAMBA2, "cuda", tp=2, engine_args={"use_replayssm": False})
    assert runs(MAMBA2, "cuda", tp=2, engine="layout")


@pytest.mark.parametrize("groups", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8, 12])
def test_replayssm_groups_are_those_that_vllm_can_shape(groups: int, tp: int) -> None:
    mamba_utils = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
    calculator = mamba_utils.MambaStateShapeCalculator
    try:
        base = calculator.mamba2_state_shape(
            tp_world_size=tp,
            intermediate_size=24 * 64,
            n_groups=groups,
            num_heads=24,
            head_dim=64,
            state_size=128,
            conv_kernel=4,
        )
        calculator.append_replayssm_ring(base, groups, tp, 16, mamba_utils.MambaBackendEnum.FLASHINFER)
        shaped = True
    except AssertionError:
        shaped = False
    spec = dataclasses.replace(
        MAMBA2,
        mamba2=Mamba2Geometry(heads=24, head_dim=64, d_state=128, groups=groups, conv_kernel=4),
        attention=AttentionGeometry(heads=24, kv_heads=1, head_dim=64),
    )
    assert runs(spec, "cuda", tp=tp) == shaped


def test_a_stage_without_attention_is_named_with_the_degrees_that_work() -> None:
    message = "--pp 4: stage 0 (layers 0 to 1) holds no attention layer; use --pp 1 or 2"
    assert error_of(GDN, pp=4) == message
    assert error_of(GDN, pp=9) == "--pp 9: more stages than the model's 8 layers; use --pp 1 or 2"


def test_a_partition_from_the_environment_is_honoured_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,7")
    assert stage_layers(8, 2) == ((0, 1), (1, 8))
    assert error_of(GDN, pp=2).endswith("holds no attention layer; correct or unset VLLM_PP_LAYER_PARTITION")
    for text, problem in (("4,4,4", "3 stages where --pp is 2"), ("4,5", "9 layers"), ("4,x", "not numbers")):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", text)
        assert error_of(GDN, pp=2).startswith(f"VLLM_PP_LAYER_PARTITION {text}: {problem}")


@pytest.mark.parametrize("partition", [None, "1,2,3,94", "25,25,25,25"])
def test_stages_are_exactly_vllms(partition: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    get_pp_indices = pytest.importorskip("vllm.distributed.utils").get_pp_indices
    if partition is None:
        sizes = [(layers, pp) for layers in range(1, 101) for pp in range(1, min(layers, 20) + 1)]
    else:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        sizes = [(100, 4)]
    for layers, pp in sizes:
        expected = tuple(get_pp_indices(layers, rank, pp) for rank in range(pp))
        assert stage_layers(layers, pp) == expected, (layers, pp)


@given(st.integers(min_value=1, max_value=300), st.integers(min_value=1, max_value=40))
def test_stages_cover_every_layer_once_in_order(layers: int, pp: int) -> None:
    stages = stage_layers(layers, pp)
    assert [layer for start, end in stages for layer in range(start, end)] == list(range(layers))
    lengths = [end - start for start, end in stages]
    assert max(lengths) - min(lengths) <= 1


def test_two_vllm_ranks_on_one_gpu_are_refused() -> None:
    message = error_of(GDN, tp=2, gpus_per_rank=0.5, device="cuda")
    assert message.startswith("--gpus-per-rank 0.5: NCCL refuses two of the 2 ranks on one GPU; use --engine layout")
    assert runs(GDN, "cpu", tp=2, gpus_per_rank=0.5)
    assert runs(GDN, "cuda", tp=1, gpus_per_rank=0.5)


def test_sizes_that_do_not_fit_each_other_are_named() -> None:
    assert error_of(GDN, max_num_batched_tokens=32) == (
        "--max-num-batched-tokens 32: less than --max-num-seqs 64; use --max-num-batched-tokens 64 or more"
    )
    message = error_of(GDN, engine="layout", capture_sizes="8,16", max_num_batched_tokens=63)
    assert message == (
        "--max-num-batched-tokens 63: a step of 16 requests has 64 tokens; use --max-num-batched-tokens 64 or more"
    )
    assert runs(GDN, engine="layout", capture_sizes=(8, 16), max_num_batched_tokens=64)


def test_speculative_tokens_that_no_gdn_kernel_width_executes_are_refused() -> None:
    works = [tokens for tokens in range(12) if runs(GDN, engine="layout", num_speculative_tokens=tokens)]
    assert works == [0, 1, 2, 3, 7]
    message = error_of(GDN, engine="layout", num_speculative_tokens=5)
    assert message.startswith("--num-speculative-tokens 5: no GDN kernel executes steps of 6 tokens; use")
    assert runs(MAMBA2, engine="layout", num_speculative_tokens=5)
