"""Options of `warm`: precedence of flags, file and preset, and one clear line for every mistake."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayssm_orch.configs.errors import CannotRun, ConfigError
from replayssm_orch.configs.schema import (
    WarmConfig,
    capture_sizes,
    load_config,
    option_name,
    parse_engine_args,
    speculative_tokens,
)


def config_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def error_of(flags: dict[str, object], file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, file)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


def test_defaults_are_those_of_the_command_reference() -> None:
    config = load_config({})
    assert config == WarmConfig()
    assert (config.model, config.tp, config.pp, config.engine, config.device) == ("tiny-gdn", 1, 1, "vllm", "auto")
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 8192)
    assert (config.start_timeout, config.step_timeout, config.gpus_per_rank) == (300.0, 600.0, 1.0)


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    preset = "qwen3-next-80b-a3b"
    assert load_config({"model": preset}).tp == 4
    file = config_file(tmp_path, f"model: {preset}\ntp: 8\nmax_num_seqs: 16\n")
    assert load_config({}, file).tp == 8
    both = load_config({"tp": 2, "pp": None}, file)
    assert (both.model, both.tp, both.pp, both.max_num_seqs) == (preset, 2, 1, 16)


def test_a_model_flag_brings_its_own_preset_defaults_not_the_files(tmp_path: Path) -> None:
    file = config_file(tmp_path, "model: qwen3-next-80b-a3b\n")
    assert load_config({"model": "tiny-gdn"}, file).tp == 1


def test_engine_args_of_flags_and_file_are_merged_by_key(tmp_path: Path) -> None:
    file = config_file(tmp_path, "engine_args:\n  max_model_len: 512\n  enforce_eager: true\n")
    config = load_config({"engine_args": ("max-model-len=1024",)}, file)
    assert config.engine_args == {"max_model_len": 1024, "enforce_eager": True}


def test_an_empty_file_is_no_options(tmp_path: Path) -> None:
    assert load_config({}, config_file(tmp_path, "# nothing yet\n")).model_dump() == WarmConfig().model_dump()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp": 0}, "--tp 0: must be at least 1"),
        ({"pp": -1}, "--pp -1: must be at least 1"),
        ({"tp": True}, "--tp True: must be a whole number"),
        ({"max_num_seqs": 2.5}, "--max-num-seqs 2.5: must be a whole number"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens 0: must be at least 1"),
        ({"num_speculative_tokens": -1}, "--num-speculative-tokens -1: must be at least 0"),
        ({"gpus_per_rank": 0.0}, "--gpus-per-rank 0.0: must be greater than 0"),
        ({"gpus_per_rank": 2.0}, "--gpus-per-rank 2.0: must be at most 1"),
        ({"start_timeout": 0.0}, "--start-timeout 0.0: must be greater than 0"),
        ({"step_timeout": float("inf")}, "--step-timeout inf: must be finite: every wait has a bound"),
        ({"engine": "vlm"}, "--engine vlm: choose one of 'vllm' or 'layout' (did you mean vllm?)"),
        ({"placement": "round"}, "--placement round: choose one of 'pack' or 'spread'"),
        ({"capture_sizes": "1,0"}, "--capture-sizes 0: must be at least 1"),
        ({"capture_sizes": "1,x"}, "--capture-sizes x: must be a whole number"),
        (
            {"capture_sizes": "1,99"},
            "--capture-sizes 1,99: 99 is greater than --max-num-seqs 64; drop it or raise --max-num-seqs",
        ),
    ],
)
def test_a_wrong_flag_is_named_with_its_value_and_the_fix(flags: dict[str, object], message: str) -> None:
    assert error_of(flags) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp: 0", "tp: 0 in {file}: must be at least 1"),
        ("tp: '2'", "tp: '2' in {file}: must be a whole number"),
        ("weights: 1", "weights: 1 in {file}: must be true or false"),
        ("model: 3", "model: 3 in {file}: must be text; quote it in YAML"),
        ("capture_sizes: 3", "capture_sizes: 3 in {file}: must be a list of whole numbers such as 1,2,4"),
        ("engine_args: 3", "engine_args: 3 in {file}: must be a mapping of vLLM engine arguments"),
        ("target: h2000", "target: h2000 in {file}: unknown GPU profile (did you mean h200?)"),
        ("max-num-seqs: 3", "max-num-seqs in {file}: unknown key (did you mean max_num_seqs?)"),
        ("tp: [1\npp: 2", "--config {file}, line 2: not valid YAML"),
        ("- tp", "--config {file}: not a mapping of options"),
        ("3: 4", "--config {file}: not a mapping of options"),
    ],
)
def test_a_wrong_file_is_named_with_key_value_and_the_fix(tmp_path: Path, text: str, message: str) -> None:
    file = config_file(tmp_path, text)
    assert error_of({}, file).startswith(message.format(file=file))


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert error_of({}, missing).startswith(f"--config {missing}: cannot be read (No such file")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert error_of({}, binary).startswith(f"--config {binary}: not UTF-8 text")


def test_an_unknown_preset_lists_the_presets() -> None:
    message = error_of({"model": "tiny-gnd"})
    assert message.startswith("MODEL tiny-gnd: unknown preset (did you mean tiny-gdn?)")
    for name in ("tiny-gdn", "tiny-mamba2", "qwen3-next-80b-a3b"):
        assert name in message


def test_a_message_is_one_line_whatever_the_value_holds() -> None:
    assert error_of({"model": "a\nb"}).startswith("MODEL a b: unknown preset")
    assert str(CannotRun("one\n  two")) == "one two"


def test_values_are_shown_as_the_user_typed_them(tmp_path: Path) -> None:
    file = config_file(tmp_path, "pp: 2\ncapture_sizes: [1, 2]\n")
    config = load_config({"tp": 2}, file)
    assert config.shown("tp") == "--tp 2"
    assert config.shown("pp") == f"pp: 2 in {file}"
    assert config.shown("capture_sizes") == f"capture_sizes: 1,2 in {file}"
    assert option_name("max_num_seqs") == "--max-num-seqs"


def test_a_config_travels_to_another_process_whole(tmp_path: Path) -> None:
    config = load_config({"tp": 2}, config_file(tmp_path, "pp: 2\n"))
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.shown("pp") == config.shown("pp")


def test_default_capture_sizes_are_small_ones_then_steps_of_eight() -> None:
    assert capture_sizes(WarmConfig(max_num_seqs=1)) == (1,)
    assert capture_sizes(WarmConfig(max_num_seqs=7)) == (1, 2, 4)
    assert capture_sizes(WarmConfig(max_num_seqs=20)) == (1, 2, 4, 8, 16)
    assert capture_sizes(WarmConfig())[-2:] == (56, 64)


@given(st.integers(min_value=1, max_value=2000))
def test_default_capture_sizes_are_distinct_ascending_and_fit(max_num_seqs: int) -> None:
    sizes = capture_sizes(WarmConfig(max_num_seqs=max_num_seqs))
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert max_num_seqs - 8 < sizes[-1] <= max_num_seqs


@given(st.lists(st.integers(min_value=1, max_value=64), min_size=1))
def test_given_capture_sizes_are_sorted_and_distinct_in_any_spelling(sizes: list[int]) -> None:
    expected = tuple(sorted(set(sizes)))
    assert capture_sizes(load_config({"capture_sizes": sizes})) == expected
    assert capture_sizes(load_config({"capture_sizes": ",".join(map(str, sizes))})) == expected


def test_speculative_tokens_default_by_engine() -> None:
    assert speculative_tokens(WarmConfig()) == 0
    assert speculative_tokens(WarmConfig(engine="layout")) == 3
    assert speculative_tokens(WarmConfig(engine="layout", num_speculative_tokens=0)) == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(json_values)
def test_an_engine_arg_value_is_read_back_from_json(value: object) -> None:
    assert parse_engine_args([f"key={json.dumps(value)}"]) == {"key": value}


def test_engine_arg_values_may_be_plain_yaml() -> None:
    items = ["mamba-backend=flashinfer", "a=True", "b={x: 1}", "c=2026-01-02", "d=x=y", "e=", "f=1e-3"]
    assert parse_engine_args(items) == {
        "mamba_backend": "flashinfer",
        "a": True,
        "b": {"x": 1},
        "c": "2026-01-02",
        "d": "x=y",
        "e": None,
        "f": 0.001,
    }


@pytest.mark.parametrize("item", ["max_model_len", "=3", "a=[1", "a={"])
def test_an_engine_arg_that_is_no_assignment_is_refused(item: str) -> None:
    assert error_of({"engine_args": (item,)}).startswith(f"--engine-arg {item}:")


def test_importing_the_options_loads_nothing_heavy() -> None:
    script = "import sys, replayssm_orch.configs.schema, replayssm_orch.configs.checks; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "ray", "vllm", "flashinfer", "transformers", "huggingface_hub", "numpy"}
    assert heavy.isdisjoint(re.split(r"\.", name)[0] for name in loaded)
