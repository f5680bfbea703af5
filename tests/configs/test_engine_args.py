"""`--engine-arg` keys against the installed vLLM."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayssm_orch.configs.engine_args import check_engine_args, engine_arg_names
from replayssm_orch.configs.errors import ConfigError


@pytest.fixture
def fresh_names() -> Iterator[None]:
    engine_arg_names.cache_clear()
    yield
    engine_arg_names.cache_clear()


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@needs_vllm
def test_names_are_the_fields_of_the_real_engine_args() -> None:
    from vllm.engine.arg_utils import EngineArgs

    assert engine_arg_names() == {field.name for field in dataclasses.fields(EngineArgs)}


@needs_vllm
def test_an_unknown_key_names_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"--engine-arg max_model_length: .*did you mean max_model_len\?"):
        check_engine_args(["max_model_length"])
    with pytest.raises(ConfigError, match=r"engine_args: nonsense in run\.yaml: not an engine argument"):
        check_engine_args(["nonsense"], Path("run.yaml"))
    check_engine_args(["max_model_len", "use_replayssm", "mamba_backend"])


@pytest.mark.parametrize(
    ("key", "instead"),
    [("tensor_parallel_size", "--tp"), ("load_format", "--weights"), ("max_num_seqs", "--max-num-seqs")],
)
def test_what_the_orchestrator_sets_is_refused_with_the_option_to_use(key: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"--engine-arg {key}: set by the orchestrator; use {instead}"):
        check_engine_args([key])


@pytest.mark.parametrize("source", [None, "class Other: ...\n", "class EngineArgs:\n"])
@pytest.mark.usefixtures("fresh_names")
def test_a_vllm_without_a_readable_engine_args_is_left_to_the_engine(
    source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").touch()
    if source is not None:
        (package / "engine" / "arg_utils.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert engine_arg_names() is None
    check_engine_args(["anything"])
    with pytest.raises(ConfigError, match="use --tp"):
        check_engine_args(["tensor_parallel_size"])
