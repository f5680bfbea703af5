"""`replayssm-orch doctor`: what this machine and cluster can do."""

from __future__ import annotations

import dataclasses
import json

import click

from replayssm_orch.orchestrator.commands.options import json_option, user_errors

EXAMPLE = """\b
Examples:
  replayssm-orch doctor
  replayssm-orch doctor --address 10.0.0.1:6379 --json
"""


@click.command(epilog=EXAMPLE)
@click.option("--address", type=str, help="Ray cluster to look at, host:port (RAY_ADDRESS, else none).")
@json_option
@user_errors
def doctor(address: str | None, as_json: bool) -> None:
    """Say what this machine and cluster can do, what is missing, and how to get it.

    Exits 0 with problems too; 3 when no cluster answers at the address.
    """
    from replayssm_orch.orchestrator.diagnosis_text import render
    from replayssm_orch.orchestrator.doctor import diagnose

    diagnosis = diagnose(address)
    click.echo(json.dumps(dataclasses.asdict(diagnosis), indent=2) if as_json else render(diagnosis))
