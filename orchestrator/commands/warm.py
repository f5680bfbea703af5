"""`replayssm-orch warm`: the main job."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from replayssm_orch.orchestrator.commands.options import command_line, config_option, json_option, user_errors

EXAMPLE = """\b
Examples:
  replayssm-orch warm --tp 2
  replayssm-orch warm qwen3-next-80b-a3b --tp 8 --address 10.0.0.1:6379
  replayssm-orch warm tiny-mamba2 --tp 1 --engine-arg attention_backend=TRITON_ATTN
"""


# Every default is None: a flag that was not given leaves the field to --config, the preset, and the schema.
@click.command(epilog=EXAMPLE)
@click.argument("model", required=False)
@config_option
@click.option("--tp", type=int, help="Tensor-parallel degree (1).")
@click.option("--pp", type=int, help="Pipeline stages (1).")
@click.option("--engine", type=str, help="What a shard runs: vllm (default) or layout.")
@click.option("--device", type=str, help="auto (default: cuda where the cluster has GPUs), cuda or cpu.")
@click.option("--target", type=str, help="GPU profile to build for (the GPUs' own; on the CPU h200).")
@click.option("--runs-dir", type=click.Path(path_type=Path), help="Where run folders go (./runs).")
@click.option("--address", type=str, help="Ray cluster to borrow, host:port (RAY_ADDRESS, else a local Ray).")
@click.option("--gpus-per-rank", type=float, help="GPU share of a rank (1).")
@click.option("--placement", type=str, help="pack (default) or spread.")
@click.option("--max-num-seqs", type=int, help="Requests at once (64).")
@click.option("--max-num-batched-tokens", type=int, help="Tokens in a batch (8192).")
@click.option("--capture-sizes", type=str, help="Batch sizes to capture, in requests: 1,2,4,…")
@click.option("--num-speculative-tokens", type=int, help="Speculative tokens a step (layout 3, vllm 0).")
@click.option("--mamba-cache-mode", type=str, help="none (default), align or all.")
@click.option("--num-blocks", type=int, help="Cache blocks of every rank (vllm: what fits; layout: enough).")
@click.option(
    "--engine-arg", "engine_args", multiple=True, metavar="KEY=VALUE", help="vLLM engine argument; repeatable."
)
@click.option("--weights", is_flag=True, default=None, help="Load the real weights instead of random ones.")
@click.option("--start-timeout", type=float, help="Seconds for resources and start-up (300).")
@click.option("--step-timeout", type=float, help="Seconds for each later step (600).")
@json_option
@user_errors
def warm(config_file: Path | None, as_json: bool, engine_args: tuple[str, ...], **flags: Any) -> None:
    """Start MODEL's shards (tiny-gdn), collect and dedup their cache layouts, warm every rank, verify, report."""
    from replayssm_orch.configs.schema import load_config

    config = load_config({**flags, "engine_args": engine_args or None}, config_file)
    from replayssm_orch.orchestrator.progress import progress
    from replayssm_orch.orchestrator.report import to_json
    from replayssm_orch.orchestrator.run import warm as run_warm
    from replayssm_orch.orchestrator.summary import summarize

    # Ray prints what its servers report: standard output is the report's alone.
    with contextlib.redirect_stdout(sys.stderr), progress() as shown:
        report, code, folder = run_warm(config, command_line(), shown)
    if as_json:
        click.echo(to_json(report))
    else:
        click.echo(summarize(report))
        click.echo(f"  run folder: {folder}")
    if report.error:
        click.echo(f"error: {report.error}", err=True)
    sys.exit(code)
