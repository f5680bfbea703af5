"""A model's geometry from its configuration alone: preset, local directory or Hugging Face id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayssm_orch.configs.architectures import (
    AttentionGeometry,
    GdnGeometry,
    LayerKind,
    Mamba2Geometry,
    read_layers,
    text_config,
)
from replayssm_orch.configs.errors import CannotRun, ConfigError
from replayssm_orch.configs.presets import ModelSource, model_source, read_preset


@dataclass(frozen=True)
class ModelSpec:
    """A hybrid model as its configuration describes it, before any parallelism.

    `hf_config` is the config.json of the text model, which `write_model_dir` writes; `layer_kinds` has one entry per
    hidden layer; `gdn` and `mamba2` are None where the model has no such layer; `dtype` is the activations', without
    the `torch.` prefix; `state_dtype` is what the file asks for the recurrent state, None where it leaves that to vLLM;
    `vllm_engine_args` holds engine arguments by device (`cuda`, `cpu`).
    """

    name: str
    source: ModelSource
    hf_config: Mapping[str, Any]
    layer_kinds: tuple[LayerKind, ...]
    gdn: GdnGeometry | None
    mamba2: Mamba2Geometry | None
    attention: AttentionGeometry
    hidden_size: int
    vocab_size: int
    dtype: str
    state_dtype: str | None
    max_position: int
    vllm_engine_args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def load_model_spec(model: str, revision: str | None = None) -> ModelSpec:
    """The spec of MODEL; of a Hugging Face id only `config.json` is fetched, and a local copy is preferred.

    Raises ConfigError for what is no readable hybrid model, CannotRun where the configuration cannot be fetched.
    """
    source = model_source(model)
    if source == "preset":
        preset = read_preset(model)
        return _spec(model, source, preset.hf_config, preset.vllm_engine_args)
    if source == "directory":
        return _spec(model, source, _read_config(model, Path(model).expanduser() / "config.json"))
    return _spec(model, source, _read_config(model, _fetch_config(model, revision)))


def write_model_dir(hf_config: Mapping[str, Any], path: Path) -> Path:
    """Write what vLLM needs to start the model with random weights and no tokenizer: `path/config.json`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(dict(hf_config), indent=2), encoding="utf-8")
    return path


def _spec(
    model: str,
    source: ModelSource,
    config: Mapping[str, Any],
    engine_args: Mapping[str, Mapping[str, Any]] | None = None,
) -> ModelSpec:
    try:
        text = text_config(config)
        layers = read_layers(text)
        if not {"gdn", "mamba2"} & set(layers.kinds):
            raise ConfigError("no recurrent (GDN or Mamba2) layer, so nothing to warm; give a hybrid model")
        if "attention" not in layers.kinds:
            raise ConfigError("no attention layer; give a hybrid model, which has both kinds")
        return ModelSpec(
            name=model,
            source=source,
            hf_config=text,
            layer_kinds=layers.kinds,
            gdn=layers.gdn,
            mamba2=layers.mamba2,
            attention=layers.attention,
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            dtype=str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            state_dtype=layers.state_dtype,
            max_position=int(text["max_position_embeddings"]),
            vllm_engine_args=engine_args or {},
        )
    except ConfigError as error:
        raise ConfigError(f"MODEL {model}: {error}") from None
    except KeyError as error:
        raise ConfigError(f"MODEL {model}: config.json has no {error.args[0]}; add it") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"MODEL {model}: config.json holds an impossible value ({error}); correct it") from None


def _read_config(model: str, path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        held = ", ".join(sorted(entry.name for entry in path.parent.iterdir())[:5]) or "nothing"
        raise ConfigError(
            f"MODEL {model}: no config.json there (it holds {held}); give a directory with a Hugging Face config.json"
        ) from None
    except OSError as error:
        raise ConfigError(f"MODEL {model}: {path} cannot be read ({error.strerror}); make it readable") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"MODEL {model}: {path}, line {error.lineno}: not valid JSON ({error.msg}); correct that line"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"MODEL {model}: {path} is not UTF-8 text; give a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise ConfigError(f"MODEL {model}: {path} holds no JSON object; give a Hugging Face config.json")
    return config


def _fetch_config(model: str, revision: str | None) -> Path:
    """The local path of the model's config.json in the Hugging Face cache, downloaded if it is not there yet."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise CannotRun(
            f"MODEL {model}: huggingface_hub is not installed, so a Hugging Face id cannot be read; "
            "pip install huggingface_hub, or give a directory with its config.json"
        ) from None
    try:
        cached = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        # One request first: hf_hub_download alone retries for half a minute where there is no network.
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(model, "config.json", revision=revision))
        return Path(huggingface_hub.hf_hub_download(model, "config.json", revision=revision))
    except errors.GatedRepoError:
        raise CannotRun(
            f"MODEL {model}: access to it is gated; accept its terms on Hugging Face and set HF_TOKEN, "
            "or give a directory with its config.json"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise ConfigError(
            f"MODEL {model}: no such model or revision on Hugging Face, or it is private; correct the id ORG/NAME, "
            "or set HF_TOKEN"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise _unreachable(model) from None
    except errors.EntryNotFoundError:
        raise ConfigError(f"MODEL {model}: that repository has no config.json; give a model that vLLM serves") from None
    except Exception as error:  # whatever the HTTP client in use raises for a network that is not there
        raise _unreachable(model, type(error).__name__) from None


def _unreachable(model: str, why: str = "no local copy") -> CannotRun:
    return CannotRun(
        f"MODEL {model}: its config.json is not in the Hugging Face cache and cannot be downloaded ({why}); run "
        f"`hf download {model} config.json` on a machine with network and point HF_HOME at that cache, "
        "or give a directory with its config.json"
    )
