"""The typed options of `warm`, from flags, a YAML file and a preset's defaults."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from replayssm_orch.configs.errors import ConfigError
from replayssm_orch.configs.presets import did_you_mean, model_source, read_preset

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
    bundle: str = "~/.cache/replayssm-orch/bundle"
    runs_dir: Path = Path("runs")
    address: str | None = None
    gpus_per_rank: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    placement: Literal["pack", "spread"] = "pack"
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count = 8192
    capture_sizes: Annotated[tuple[Count, ...], BeforeValidator(_split_sizes)] = ()
    num_speculative_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    mamba_cache_mode: Literal["none", "align", "all"] = "none"
    engine_args: dict[str, Any] = Field(default_factory=dict)
    weights: Annotated[bool, Field(strict=True)] = False
    start_timeout: Seconds = 300.0
    step_timeout: Seconds = 600.0

    _file: Path | None = PrivateAttr(default=None)
    _file_fields: frozenset[str] = PrivateAttr(default=frozenset())

    @model_validator(mode="after")
    def _capture_sizes_fit(self) -> WarmConfig:
        if self.capture_sizes and max(self.capture_sizes) > self.max_num_seqs:
            raise ValueError(
                f"{option_name('capture_sizes')} {max(self.capture_sizes)}: greater than "
                f"{option_name('max_num_seqs')} {self.max_num_seqs}; drop it or raise {option_name('max_num_seqs')}"
            )
        return self

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
    given = {name: value for name, value in flags.items() if value is not None}
    engine_args = given.get("engine_args")
    if isinstance(engine_args, (list, tuple)):
        given["engine_args"] = parse_engine_args(engine_args)
    from_file = _read_file(file) if file is not None else {}
    model = given.get("model", from_file.get("model", WarmConfig.model_fields["model"].default))
    defaults = read_preset(model).defaults if isinstance(model, str) and model_source(model) == "preset" else {}
    merged: dict[str, object] = {**defaults, **from_file, **given}
    layers = [layer.get("engine_args") for layer in (defaults, from_file, given)]
    if all(isinstance(layer, (dict, type(None))) for layer in layers):
        merged["engine_args"] = {key: value for layer in layers if isinstance(layer, dict) for key, value in layer.items()}
    file_fields = frozenset(from_file) - frozenset(given)
    try:
        config = WarmConfig.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_first_line(error.errors(include_url=False)[0], file, file_fields)) from None
    config._file = file
    config._file_fields = file_fields
    return config


def capture_sizes(config: WarmConfig) -> tuple[int, ...]:
    """Batch sizes to capture, in requests, ascending: the given ones, else 1, 2, 4 and multiples of 8 to max_num_seqs."""
    if config.capture_sizes:
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
        raise ConfigError(f"--config {file}, line {line}: not valid YAML ({error.problem}); correct that line") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file}: not valid YAML ({' '.join(str(error).split())})") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"--config {file}: not a mapping of options; write lines like `tp: 2`")
    return content


def _first_line(error: ErrorDetails, file: Path | None, file_fields: frozenset[str]) -> str:
    """One pydantic error as one line: the option as the user typed it, its value, and what would be valid."""
    if not error["loc"]:
        return str(error["ctx"]["error"])
    field = str(error["loc"][0])
    in_file = field in file_fields
    if error["type"] == "extra_forbidden":
        closest = did_you_mean(field, WarmConfig.model_fields)
        if in_file:
            return f"{field} in {file}: unknown key{closest}; valid keys are {', '.join(WarmConfig.model_fields)}"
        return f"{option_name(field)}: unknown option{closest}"
    value = error["input"]
    name = f"{field}: {value} in {file}" if in_file else f"{option_name(field)} {value}"
    return f"{name}: {_fix(error)}"


def _fix(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            return f"must be at least {context['ge']}"
        case "greater_than":
            return f"must be greater than {context['gt']:g}"
        case "less_than_equal":
            return f"must be at most {context['le']:g}"
        case "literal_error":
            return f"choose one of {context['expected']}{_closest_literal(error)}"
        case "int_type" | "int_parsing" | "int_from_float":
            return "must be a whole number"
        case "float_type" | "float_parsing":
            return "must be a number"
        case "finite_number":
            return "must be a finite number: every wait has a bound"
        case "bool_type" | "bool_parsing":
            return "must be true or false"
        case "string_type" | "path_type":
            return "must be text; quote it in YAML"
        case "tuple_type":
            return "must be a list of whole numbers such as 1,2,4"
        case "dict_type":
            return "must be a mapping of vLLM engine arguments"
        case _:
            return error["msg"]


def _closest_literal(error: ErrorDetails) -> str:
    words = error["ctx"]["expected"].replace(" or ", ", ").split(", ")
    return did_you_mean(str(error["input"]), [word.strip("'") for word in words])
