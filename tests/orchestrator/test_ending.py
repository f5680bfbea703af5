"""However a run ends, what it started is gone; a borrowed cluster is left as it was."""

import os
import signal
import time

import psutil
import pytest
import ray
from conftest import Running, assert_all_gone
from ray.cluster_utils import Cluster

from replayssm_orch.actors.leftovers import mapped_segments

pytestmark = [pytest.mark.vllm, pytest.mark.ray]


def shard_processes(run: Running) -> list[psutil.Process]:
    return [p for p in run.descendants() if p.name().startswith("ray::Shard") or "ray::Shard" in " ".join(p.cmdline())]


@pytest.mark.parametrize("moment", ["placing 2 ranks", "init_device"])
def test_ctrl_c_ends_everything_with_130(tmp_path, moment):
    run = Running(tmp_path, "--tp", "2")
    run.wait_for(moment)
    processes = run.descendants()
    assert any("raylet" in " ".join(p.cmdline()) for p in processes)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    done = run.finish(60)
    assert done.code == 130, done.stderr
    assert done.report["state"] == "interrupted"
    assert_all_gone(processes)


def test_sigterm_while_ray_starts_is_an_interrupt_with_a_report(tmp_path):
    run = Running(tmp_path, "--tp", "1")
    while not any("gcs_server" in p.name() for p in run.descendants()):
        time.sleep(0.05)
    run.process.send_signal(signal.SIGTERM)
    done = run.finish(60)
    assert (done.code, done.report["state"]) == (130, "interrupted")


def test_sigterm_is_an_interrupt_too(tmp_path):
    run = Running(tmp_path, "--tp", "1")
    run.wait_for("placing 1 rank")
    processes = run.descendants()
    run.process.send_signal(signal.SIGTERM)
    done = run.finish(60)
    assert done.code == 130, done.stderr
    assert_all_gone(processes)


def test_a_killed_shard_ends_the_run_with_its_rank_named(tmp_path):
    run = Running(tmp_path, "--tp", "2")
    run.wait_for("init_worker")
    processes = run.descendants()
    victim = next(iter(shard_processes(run)))
    victim.kill()
    killed = time.monotonic()
    done = run.finish(60)
    assert done.code == 1, done.stderr
    failed = [rank for rank in done.report["ranks"] if rank["error"]]
    assert len(failed) == 1
    assert f"rank {failed[0]['rank']} (stage 0) failed in" in done.report["error"]
    assert time.monotonic() - killed < 30
    assert_all_gone(processes)


def test_after_a_good_run_nothing_is_left(tmp_path):
    run = Running(tmp_path, "--tp", "2")
    run.wait_for("load_model")
    processes = run.descendants()
    segments = mapped_segments([process.pid for process in processes])
    assert segments, "vLLM's ranks talk through shared memory"
    done = run.finish()
    assert done.code == 0, done.stderr
    assert_all_gone(processes)
    assert [path for path in segments if os.path.exists(path)] == []


@pytest.fixture
def two_nodes():
    """Starts a cluster of two nodes of so many CPUs, on this machine, that is not the run's own."""
    nodes = Cluster()

    def start(cpus: int) -> Cluster:
        for _ in range(2):
            nodes.add_node(num_cpus=cpus, num_gpus=0)
        return nodes

    yield start
    nodes.shutdown()


def test_a_borrowed_cluster_is_left_as_it_was(tmp_path, two_nodes):
    cluster = two_nodes(2)
    run = Running(tmp_path, "--tp", "2", "--address", cluster.address)
    done = run.finish()
    assert done.code == 0, done.stderr
    assert len(done.report["cluster"]["nodes"]) == 2
    # What the actors ran came with the run: Ray unpacks it under the nodes' session folders.
    assert "runtime_resources" in (done.folder / "logs" / "rank-0.log").read_text()
    ray.init(address=cluster.address, logging_level="ERROR")
    try:
        deadline = time.monotonic() + 20
        while ray.available_resources().get("CPU") != 4.0 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert ray.available_resources()["CPU"] == 4.0
        assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}
    finally:
        ray.shutdown()


@pytest.mark.parametrize(("placement", "nodes_used"), [("spread", 2), ("pack", 1)])
def test_stages_are_packed_or_spread_and_a_tp_group_stays_on_one_node(tmp_path, two_nodes, placement, nodes_used):
    args = ("--engine", "layout", "--device", "cpu", "--tp", "2", "--pp", "2", "--placement", placement)
    done = Running(tmp_path, *args, "--max-num-seqs", "4", "--address", two_nodes(4).address).finish()
    assert done.code == 0, done.stderr
    nodes = [rank["node"] for rank in done.report["ranks"]]
    assert nodes[0] == nodes[1]
    assert nodes[2] == nodes[3]
    assert len(set(nodes)) == nodes_used
    assert set(nodes) <= {node["id"] for node in done.report["cluster"]["nodes"]}


def test_too_small_a_cluster_is_exit_3_in_time_with_both_sides_named(tmp_path, two_nodes):
    cluster = two_nodes(2)
    done = Running(tmp_path, "--tp", "4", "--pp", "2", "--address", cluster.address, "--start-timeout", "15").finish()
    assert done.code == 3, done.stderr
    assert "8 bundles of 1 CPU" in done.report["error"]
    assert "2 nodes: 2 CPU and 0 GPU, 2 CPU and 0 GPU" in done.report["error"]


def test_no_cluster_at_the_address_is_exit_3(tmp_path):
    done = Running(tmp_path, "--address", "127.0.0.1:1", "--start-timeout", "20").finish(90)
    assert done.code == 3, done.stderr
    assert "127.0.0.1:1" in done.stderr


def test_cuda_without_a_gpu_is_exit_3(tmp_path):
    done = Running(tmp_path, "--device", "cuda").finish(60)
    assert done.code == 3
    assert "--device cuda: no GPU on this machine" in done.stderr
