"""`replayssm-orch` and `python -m replayssm_orch.orchestrator`."""

from __future__ import annotations

import importlib
import sys
from typing import Any, NoReturn

import click

# Command -> module under `commands`; a command's module is imported only when it is the one that runs.
_COMMANDS = {
    "doctor": "What this machine and cluster can do, what is missing, how to get it.",
    "report": "Print a finished run.",
    "warm": "Start the shards, dedup their layouts, warm every rank, verify, report.",
}


class LazyCommands(click.Group):
    """A group that imports a command's module on its first use, and tells a usage error in one line."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(error.exit_code)
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context else ""
            click.echo(f"error: {error.format_message()}{hint}", err=True)
            sys.exit(error.exit_code)
        except click.exceptions.Abort:
            sys.exit(130)
        sys.exit(0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"replayssm_orch.orchestrator.commands.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="replayssm-orch")
def main() -> None:
    """Warm the ReplaySSM kernels of a vLLM hybrid model on every rank of a Ray cluster, and prove it."""


if __name__ == "__main__":
    main(prog_name="replayssm-orch")
