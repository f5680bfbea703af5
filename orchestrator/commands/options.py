"""What the commands share: running with one-line errors and fixed exit codes, `--json`, `--config`."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from replayssm_orch.configs.errors import UserError

json_option = click.option("--json", "as_json", is_flag=True, help="JSON alone on standard output.")
config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML file with defaults for the options (keys as the options, with underscores). Flags win over it.",
)


def user_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a UserError into one line on standard error and its exit code."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)

    return run


def command_line() -> str:
    """The command as it was typed, for the report."""
    return shlex.join(["replayssm-orch", *sys.argv[1:]])
