"""The typed options of `warm`, from flags, a YAML file and a preset's defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails

from replayssm_orch.configs.engine_args import check_engine_args
from replayssm_orch.configs.errors import ConfigError
from replayssm_orch.configs.presets import did_you_mean, model_source, read_preset
from replayssm_orch.configs.targets import load_target

# What is valid, by pydantic's error type; the braces are that type's context.
_FIXES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "choose one of {expected}",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be finite: every wait has a bound",
    "bool_type": "must be true or false",
    "string_type": "must be text; quote it in YAML",
    "path_type": "must be text; quote it in YAML",
    "tuple_type": "must be a list of whole numbers such as 1,2,4",
    "dict_type": "must be a mapping of vLLM engine arguments",
}

Count = Annotated[int, Field(strict=True, ge=1)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


def _split_sizes(value: object) -> object:
    """`"1,2,4"` as a list; anything that is no list of whole numbers is left for the field's own check."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        return [int(part) if part.isdecimal() else part for part in parts]
    return value


class WarmConfig(BaseModel):
    """Every option of `warm`. Sizes are counts of requests, tokens or ranks as their names say; timeouts are seconds.

    `num_speculative_tokens` None means the engine's default (see `speculative_tokens`); `capture_sizes` empty means the
    default list (see `capture_sizes`); `target` None means the GPUs' own profile.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "tiny-gdn"
    tp: Count = 1
    pp: Count = 1
    engine: Literal["vllm", "layout"] = "vllm"
    device: Literal["auto", "cuda", "cpu"] = "auto"
    target: str | None = None
    runs_dir: Path = Path("runs")
    address: str | None = None
    gpus_per_rank: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    placement: Literal["pack", "spread"] = "pack"
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 8192
    capture_sizes: Annotated[tuple[Count, ...], BeforeValidator(_split_sizes)] = ()
    num_speculative_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    mamba_cache_mode: Literal["none", "align", "all"] = "none"
    num_blocks: Count | None = None
    engine_args: dict[str, Any] = Field(default_factory=dict)
    weights: Annotated[bool, Field(strict=True)] = False
    start_timeout: Seconds = 300.0
    step_timeout: Seconds = 600.0

    _file: Path | None = PrivateAttr(default=None)
    _file_fields: frozenset[str] = PrivateAttr(default=frozenset())

    def shown(self, field: str) -> str:
        """The field and its value as the user typed them: `--tp 3`, or `tp: 3 in run.yaml` when it came from a file."""
        value = getattr(self, field)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if field in self._file_fields and self._file is not None:
            return f"{field}: {text} in {self._file}"
        return f"{option_name(field)} {text}"


def option_name(field: str) -> str:
    """The command-line spelling of a `WarmConfig` field."""
    special = {"model": "MODEL", "engine_args": "--engine-arg"}
    return special.get(field, "--" + field.replace("_", "-"))


def load_config(flags: Mapping[str, object], file: Path | None = None) -> WarmConfig:
    """The configuration: `flags` win over the YAML `file`, the file over the preset's `defaults`.

    A flag that is None was not given. `flags["engine_args"]` may be the raw `KEY=VALUE` strings; engine arguments are
    merged key by key. Raises ConfigError with one line that names field, value and fix.
    """
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    if isinstance(given.get("engine_args"), (list, tuple)):
        given["engine_args"] = parse_engine_args(given["engine_args"])
    from_file = _read_file(file) if file is not None else {}
    model = given.get("model", from_file.get("model", WarmConfig.model_fields["model"].default))
    defaults = read_preset(model).defaults if isinstance(model, str) and model_source(model) == "preset" else {}
    merged = _merge(defaults, from_file, given)
    file_fields = frozenset(from_file) - frozenset(given)
    try:
        config = WarmConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_first_line(error.errors(include_url=False)[0], file, file_fields)) from None
    config._file = file
    config._file_fields = file_fields
    if config.target is not None:
        load_target(config.target, config.shown("target"))
    capture_sizes(config)
    flag_args = given.get("engine_args", {})
    check_engine_args(flag_args)
    check_engine_args([key for key in config.engine_args if key not in flag_args], file)
    return config


def capture_sizes(config: WarmConfig) -> tuple[int, ...]:
    """Batch sizes to capture, in requests, ascending: as given, else 1, 2, 4 and multiples of 8 to max_num_seqs.

    Raises ConfigError for a given size above max_num_seqs.
    """
    if config.capture_sizes:
        if (largest := max(config.capture_sizes)) > config.max_num_seqs:
            raise ConfigError(
                f"{config.shown('capture_sizes')}: {largest} is greater than {config.shown('max_num_seqs')}; "
                f"drop it or raise {option_name('max_num_seqs')}"
            )
        return tuple(sorted(set(config.capture_sizes)))
    sizes = (1, 2, 4, *range(8, config.max_num_seqs + 1, 8))
    return tuple(size for size in sizes if size <= config.max_num_seqs)


def speculative_tokens(config: WarmConfig) -> int:
    """Speculative tokens a step: as given, else 3 for the layout engine and 0 for vLLM."""
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    return 3 if config.engine == "layout" else 0


def parse_engine_args(items: Iterable[str]) -> dict[str, Any]:
    """`KEY=VALUE` strings as a dictionary; dashes in KEY become underscores, VALUE is JSON, else a YAML value.

    Raises ConfigError for an item without `=` or key, and for a VALUE that is neither.
    """
    parsed: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key:
            raise ConfigError(f"--engine-arg {item}: not KEY=VALUE; write it like --engine-arg max_model_len=4096")
        parsed[key] = _parse_value(item, text)
    return parsed


def _merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """The layers as one, later ones first; engine arguments are merged key by key where they are mappings."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    engine_args = [layer["engine_args"] for layer in layers if "engine_args" in layer]
    if engine_args and all(isinstance(args, dict) for args in engine_args):
        merged["engine_args"] = {key: value for args in engine_args for key, value in args.items()}
    return merged


def _parse_value(item: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--engine-arg {item}: VALUE is neither JSON nor YAML; quote it as JSON") from None
    # YAML also reads dates; vLLM has no use for them, the text is what was meant.
    return value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else text


def _read_file(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: cannot be read ({error.strerror}); give a readable YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {file}: not UTF-8 text; give a YAML file") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(
            f"--config {file}, line {line}: not valid YAML ({error.problem}); correct that line"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file}: not valid YAML ({error})") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {file}: not a mapping of options; write lines like `tp: 2`")
    return content


def _first_line(error: ErrorDetails, file: Path | None, file_fields: frozenset[str]) -> str:
    """One pydantic error as one line: the option as the user typed it, its value, and what would be valid."""
    field = str(error["loc"][0])
    in_file = field in file_fields
    if error["type"] == "extra_forbidden":
        closest = did_you_mean(field, WarmConfig.model_fields)
        if in_file:
            return f"{field} in {file}: unknown key{closest}; valid keys are {', '.join(WarmConfig.model_fields)}"
        return f"{option_name(field)}: unknown option{closest}"
    value = error["input"]
    # A quoted number in a YAML file is text: only its quotes tell.
    text = repr(value) if in_file and isinstance(value, str) else str(value)
    name = f"{field}: {text} in {file}" if in_file else f"{option_name(field)} {text}"
    fix = _FIXES.get(error["type"], error["msg"]).format(**error.get("ctx", {}))
    if error["type"] == "literal_error":
        fix += did_you_mean(str(value), re.findall(r"'(\w+)'", error["ctx"]["expected"]))
    return f"{name}: {fix}"
