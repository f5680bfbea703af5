"""Model specs: presets against transformers' own reading, directories, Hugging Face ids, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from replayssm_orch.configs.architectures import AttentionGeometry, GdnGeometry, Mamba2Geometry
from replayssm_orch.configs.errors import CannotRun, ConfigError
from replayssm_orch.configs.models import ModelSpec, load_model_spec, write_model_dir
from replayssm_orch.configs.presets import preset_names, read_preset
from replayssm_orch.configs.schema import load_config


def model_dir(path: Path, config: object) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(path)


def transformers_reading(spec: ModelSpec, path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoConfig.from_pretrained(write_model_dir(spec.hf_config, path))


def test_the_presets_of_the_command_reference_are_there() -> None:
    names = set(preset_names())
    assert {"tiny-gdn", "tiny-mamba2", "qwen3-next-80b-a3b"} <= names
    assert len(names) >= 5


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_hybrid_with_valid_defaults(name: str) -> None:
    spec = load_model_spec(name)
    assert (spec.name, spec.source) == (name, "preset")
    assert "attention" in spec.layer_kinds
    assert {"gdn", "mamba2"} & set(spec.layer_kinds)
    load_config({"model": name, "engine_args": spec.vllm_engine_args.get("cuda", {})})


@pytest.mark.parametrize("name", preset_names())
def test_transformers_reads_the_same_model_from_the_written_directory(name: str, tmp_path: Path) -> None:
    spec = load_model_spec(name)
    config = transformers_reading(spec, tmp_path)
    assert config.architectures == spec.hf_config["architectures"]
    recurrent = "gdn" if spec.gdn else "mamba2"
    kinds = {"linear_attention": recurrent, "full_attention": "attention", "mlp": "other", "moe": "other"}
    assert tuple(kinds[layer] for layer in config.layer_types) == spec.layer_kinds
    assert spec.attention == AttentionGeometry(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert (spec.hidden_size, spec.vocab_size) == (config.hidden_size, config.vocab_size)
    assert spec.max_position == config.max_position_embeddings
    assert spec.dtype == str(config.dtype).removeprefix("torch.")
    if spec.gdn:
        assert spec.gdn == GdnGeometry(
            config.linear_num_value_heads,
            config.linear_num_key_heads,
            config.linear_value_head_dim,
            config.linear_key_head_dim,
            config.linear_conv_kernel_dim,
        )
    if spec.mamba2:
        assert spec.mamba2 == Mamba2Geometry(
            config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, config.n_groups, config.conv_kernel
        )


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3Next", "Qwen3_5", "Qwen3_5Moe", "NemotronH", "GraniteMoeHybrid"],
)
def test_left_out_fields_take_the_defaults_of_transformers(architecture: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model_type, layers = {
        "Qwen3Next": ("qwen3_next", {}),
        "Qwen3_5": ("qwen3_5_text", {}),
        "Qwen3_5Moe": ("qwen3_5_moe_text", {}),
        "NemotronH": ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}),
        "GraniteMoeHybrid": ("granitemoehybrid", {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}),
    }[architecture]
    defaults = transformers.AutoConfig.for_model(model_type, **layers)
    sparse = {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "hidden_size": defaults.hidden_size,
        "vocab_size": defaults.vocab_size,
        "max_position_embeddings": defaults.max_position_embeddings,
        **layers,
    }
    full = {**defaults.to_dict(), "architectures": sparse["architectures"]}
    from_sparse = load_model_spec(model_dir(tmp_path / "sparse", sparse))
    from_full = load_model_spec(model_dir(tmp_path / "full", full))
    assert from_sparse.layer_kinds == from_full.layer_kinds
    assert (from_sparse.gdn, from_sparse.mamba2) == (from_full.gdn, from_full.mamba2)
    assert from_sparse.attention == from_full.attention


def test_tiny_gdn_has_the_shape_that_two_stages_need() -> None:
    spec = load_model_spec("tiny-gdn")
    assert [layer for layer, kind in enumerate(spec.layer_kinds) if kind == "attention"] == [3, 7]
    assert spec.gdn == GdnGeometry(value_heads=16, key_heads=8, head_dim_v=128, head_dim_k=128, conv_kernel=4)
    assert spec.attention.heads == 8


def test_tiny_mamba2_has_the_measured_cache_shape() -> None:
    mamba2 = load_model_spec("tiny-mamba2").mamba2
    assert mamba2 is not None
    assert (mamba2.heads, mamba2.head_dim, mamba2.d_state, mamba2.groups) == (8, 64, 128, 1)
    convolution = mamba2.heads * mamba2.head_dim + 2 * mamba2.groups * mamba2.d_state
    assert (mamba2.conv_kernel - 1, convolution) == (3, 768)


def test_a_directory_is_read_and_written_back(tmp_path: Path) -> None:
    config = read_preset("tiny-mamba2").hf_config
    spec = load_model_spec(model_dir(tmp_path / "model", config))
    assert spec.source == "directory"
    assert spec.layer_kinds == load_model_spec("tiny-mamba2").layer_kinds
    again = load_model_spec(str(write_model_dir(spec.hf_config, tmp_path / "copy")))
    assert again.hf_config == spec.hf_config == config


def test_a_wrapper_is_read_as_its_text_model(tmp_path: Path) -> None:
    text = {key: value for key, value in read_preset("qwen3.5-35b-a3b").hf_config.items() if key != "dtype"}
    wrapper = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "float16",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"depth": 27},
    }
    spec = load_model_spec(model_dir(tmp_path, wrapper))
    assert spec.hf_config == {**text, "dtype": "float16"}
    assert spec.layer_kinds == load_model_spec("qwen3.5-35b-a3b").layer_kinds
    assert (spec.dtype, spec.state_dtype) == ("float16", "float32")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1], "holds no JSON object"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "LlamaForCausalLM: not supported; supported hybrids are",
        ),
        ({"model_type": "qwen3_next"}, "architecture none: not supported"),
        ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "Qwen3_5ForConditionalGeneration: not supported"),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 1, "layer_types": ["full_attention"]},
            "no recurrent",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 1, "layer_types": ["linear_attention"]},
            "no attention layer",
        ),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 1, "layer_types": ["x"]},
            r"layer_types\[0\] x: unknown layer type",
        ),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "config.json has no hidden_size"),
        ({"architectures": ["Qwen3NextForCausalLM"], "num_attention_heads": "a"}, "an impossible value"),
        ({"architectures": ["Qwen3NextForCausalLM"], "full_attention_interval": 0}, "an impossible value"),
        ({"architectures": ["Qwen3NextForCausalLM"], "num_key_value_heads": 0}, "kv_heads 0: must be at least 1"),
        ({"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["full_attention"]}, "num_hidden_layers is 48"),
        ({"architectures": ["NemotronHForCausalLM"]}, "neither layers_block_type nor hybrid_override_pattern"),
        ({"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*Q"}, r"pattern\[2\] Q: unknown"),
    ],
)
def test_a_directory_that_is_no_supported_hybrid_is_refused(config: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"MODEL .*{message}"):
        load_model_spec(model_dir(tmp_path, config))


def test_a_directory_without_a_readable_config_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ConfigError, match=r"no config\.json there \(it holds weights\.bin\)"):
        load_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text('{\n"a": }', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json, line 2: not valid JSON"):
        load_model_spec(str(tmp_path))


def test_paths_and_names_that_are_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for model, message in (
        (str(tmp_path / "file"), "not a directory"),
        (str(tmp_path / "nowhere"), "no such directory"),
        ("a/b/c", "unknown preset"),
        ("tiny-mamba", r"did you mean tiny-mamba2\?"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_model_spec(model)


def load_in_new_process(model: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    script = (
        "import sys\n"
        "from replayssm_orch.configs.errors import UserError\n"
        "from replayssm_orch.configs.models import load_model_spec\n"
        "try: print(len(load_model_spec(sys.argv[1]).layer_kinds))\n"
        "except UserError as error: print(error); sys.exit(error.exit_code)\n"
    )
    command = [sys.executable, "-c", script, model]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_a_hugging_face_id_is_read_from_the_local_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--acme--hybrid"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    (repository / "snapshots").mkdir()
    model_dir(repository / "snapshots" / commit, read_preset("tiny-gdn").hf_config)
    result = load_in_new_process("acme/hybrid", {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert (result.returncode, result.stdout.strip()) == (0, "8"), result.stderr


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_no_network_and_no_copy_cannot_run_and_says_the_way_out(environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    result = load_in_new_process("acme/hybrid", {"HF_HOME": str(tmp_path), **environment})
    assert result.returncode == CannotRun.exit_code, result.stderr
    assert result.stdout.count("\n") == 1
    for part in ("MODEL acme/hybrid", "hf download acme/hybrid config.json", "HF_HOME", "directory"):
        assert part in result.stdout
