"""Which engines and warmups could run on a machine, and why not. Pure: from what is installed and the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from replayssm_orch.actors.records import Device
from replayssm_orch.actors.vllm_adapter import SUPPORTED_VLLM
from replayssm_orch.orchestrator import installed as has
from replayssm_orch.orchestrator.diagnosis import Engine, Gpu, Warmup
from replayssm_orch.orchestrator.installed import Installed

# FlashInfer's ReplaySSM kernels use Hopper's instructions.
_LEAST_ARCH = 90
_WARMUPS = ("lifecycle", "gdn", "materializer", "mamba2-decode")


def engines(found: Installed, gpus: Sequence[Gpu]) -> tuple[Engine, ...]:
    """Every engine on every device, with its warmups; `gpus` are those that a rank could be given."""
    return (
        _engine(
            "vllm", "cpu", _vllm(found, "cpu"), dict.fromkeys(_WARMUPS, ("no ReplaySSM kernel runs on device cpu",))
        ),
        _engine("vllm", "cuda", (*_vllm(found, "cuda"), *_cuda(found, gpus)), _vllm_cuda_warmups(found, gpus)),
        _engine("layout", "cpu", _torch(found), dict.fromkeys(_WARMUPS, ())),
        _engine("layout", "cuda", _layout_cuda(found, gpus), _layout_cuda_warmups(found, gpus)),
    )


def _engine(
    name: Literal["vllm", "layout"], device: Device, reasons: tuple[str, ...], warmups: dict[str, tuple[str, ...]]
) -> Engine:
    blocked = (f"the engine {name} cannot run on {device}",) if reasons else ()
    return Engine(
        name=name,
        device=device,
        can_run=not reasons,
        reasons=reasons,
        warmups=tuple(Warmup(w, not (blocked or why), blocked or why) for w, why in warmups.items()),
    )


def _vllm(found: Installed, device: Device) -> tuple[str, ...]:
    if found.vllm_build is None:
        return (*_torch(found), "vllm is not installed")
    reasons = [*_torch(found)]
    if found.vllm_build != device:
        reasons.append(f"the installed vllm is a {found.vllm_build} build")
    if found.extension_points:
        reasons.append(f"vllm lacks {', '.join(found.extension_points)}; {SUPPORTED_VLLM} have them")
    if found.misfits:
        reasons.append(f"{', '.join(found.misfits)} cannot be imported beside the CPU torch")
    return tuple(reasons)


def _torch(found: Installed) -> tuple[str, ...]:
    return () if "torch" in found.versions else ("torch is not installed",)


def _cuda(found: Installed, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    reasons = () if gpus else ("no GPU is visible",)
    return (*reasons, "the installed torch is a cpu build") if found.torch_build == "cpu" else reasons


def _layout_cuda(found: Installed, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    flashinfer = () if "flashinfer" in found.versions else ("flashinfer is not installed",)
    return (*_torch(found), *flashinfer, *_cuda(found, gpus), *_old_gpu(gpus))


def _vllm_cuda_warmups(found: Installed, gpus: Sequence[Gpu]) -> dict[str, tuple[str, ...]]:
    old, kernels = _old_gpu(gpus), _layout_cuda_warmups(found, gpus)
    return {
        "lifecycle": (*found.lacks(has.VLLM_LIFECYCLE), *old),
        "gdn": (*found.lacks(has.VLLM_GDN), *kernels["gdn"], *old),
        "materializer": (*found.lacks(has.VLLM_GDN), *kernels["materializer"], *old),
        "mamba2-decode": (*found.lacks(has.VLLM_MAMBA2, has.VLLM_DUMMY_SLOTS), *kernels["mamba2-decode"], *old),
    }


def _layout_cuda_warmups(found: Installed, gpus: Sequence[Gpu]) -> dict[str, tuple[str, ...]]:
    dsl = () if "cutlass_dsl" in found.versions else ("nvidia-cutlass-dsl (CuTe DSL) is not installed",)
    return {
        "lifecycle": (),
        "gdn": (*found.lacks(has.FLASHINFER_GDN), *dsl),
        "materializer": (*found.lacks(has.FLASHINFER_MATERIALIZER), *dsl),
        "mamba2-decode": found.lacks(has.FLASHINFER_MAMBA2),
    }


def _old_gpu(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Every rank may be given any of the GPUs, so the oldest decides."""
    old = sorted({f"{gpu.name} ({gpu.arch})" for gpu in gpus if _arch_number(gpu.arch) < _LEAST_ARCH})
    return (f"FlashInfer's ReplaySSM kernels need sm_{_LEAST_ARCH} or newer, not {', '.join(old)}",) if old else ()


def _arch_number(arch: str) -> int:
    return int(arch.removeprefix("sm_").rstrip("af"))
