"""Named presets: one YAML file a model under `configs/models/`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from replayssm_orch.configs.errors import ConfigError

ModelSource = Literal["preset", "directory", "hub"]

_PRESETS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Preset:
    """One preset file.

    `hf_config` is a whole Hugging Face config.json; `defaults` are values of `WarmConfig` fields that the configuration
    file and flags may override; `vllm_engine_args` holds vLLM engine arguments by device (`cuda`, `cpu`).
    """

    name: str
    hf_config: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    vllm_engine_args: dict[str, dict[str, Any]] = field(default_factory=dict)


def preset_names() -> tuple[str, ...]:
    """The names that MODEL may be, sorted."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


@cache
def read_preset(name: str) -> Preset:
    """The preset called `name`, which must be one of `preset_names()`."""
    return Preset(name=name, **yaml.safe_load((_PRESETS / f"{name}.yaml").read_text(encoding="utf-8")))


def model_source(model: str) -> ModelSource:
    """Where MODEL comes from: a preset of that name, else a local directory, else a Hugging Face id.

    Raises ConfigError for a path that is no directory and for a name that is none of the three.
    """
    if model in preset_names():
        return "preset"
    path = Path(model).expanduser()
    if path.is_dir():
        return "directory"
    if path.exists():
        raise ConfigError(f"MODEL {model}: not a directory; give the directory that holds its config.json")
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"MODEL {model}: no such directory; give one that holds a config.json")
    if model.count("/") == 1 and all(model.split("/")):
        return "hub"
    raise ConfigError(
        f"MODEL {model}: unknown preset{did_you_mean(model, preset_names())}; presets are {', '.join(preset_names())} "
        "(or give a directory with a config.json, or a Hugging Face id ORG/NAME)"
    )


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """`, did you mean X?`-like text for the closest of `valid`, or nothing where none is close."""
    close = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
