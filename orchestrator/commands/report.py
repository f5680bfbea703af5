"""`replayssm-orch report`: print a finished run."""

from __future__ import annotations

from pathlib import Path

import click

from replayssm_orch.orchestrator.commands.options import json_option, user_errors


@click.command(epilog="Example: replayssm-orch report runs/20261201-101500-a1b2c3")
@click.argument("run", type=click.Path(path_type=Path))
@json_option
@user_errors
def report(run: Path, as_json: bool) -> None:
    """Print the finished run in folder RUN."""
    from replayssm_orch.orchestrator.report import read_report, to_json
    from replayssm_orch.orchestrator.summary import summarize

    found = read_report(run)
    click.echo(to_json(found) if as_json else summarize(found))
