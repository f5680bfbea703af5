"""CPU tensors that look like CUDA ones, and FlashInfer's compilers replaced by recorders: its wrappers run with no GPU.

The wrappers (argument checks, compile keys, launch arguments) are FlashInfer's own.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from replayssm_orch.actors.flashinfer_adapter import FlashInferKernels

CUDA = torch.device("cuda:0")


class CudaLooking(torch.Tensor):
    """Memory on the CPU; `device` and `is_cuda` say otherwise."""

    @property
    def device(self):
        return CUDA

    @property
    def is_cuda(self):
        return True


class OnCpu(TorchFunctionMode):
    """Makes tensors for a CUDA device on the CPU, and makes every result look like a CUDA tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta" if str(kwargs["device"]) == "meta" else "cpu"
        result = func(*args, **kwargs)
        plain = isinstance(result, torch.Tensor) and type(result) is torch.Tensor and str(result.device) == "cpu"
        return result.as_subclass(CudaLooking) if plain else result


@dataclass
class Compiled:
    """What FlashInfer would have compiled and launched."""

    kernels: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    last_tensors: list[torch.Tensor] = field(default_factory=list)
    mamba2_decodes: list[tuple] = field(default_factory=list)
    mamba2_materializations: list[tuple] = field(default_factory=list)

    def compile(self, kernel, *args):
        name = type(kernel).__name__
        self.kernels.append(name)
        return lambda *launch_args: self._launch(name, launch_args)

    def _launch(self, name: str, args) -> None:
        self.launches.append(name)
        self.last_tensors = [arg.tensor for arg in args if isinstance(arg, _DescribedTensor)]


class _DescribedTensor:
    def __init__(self, tensor, assumed_align=None) -> None:
        assert tensor.data_ptr() % 16 == 0
        self.tensor = tensor

    def mark_compact_shape_dynamic(self, **kwargs):
        return self


@contextmanager
def flashinfer_without_a_gpu():
    """(kernels, what they compiled): FlashInfer's wrappers for an H200-like device."""
    decode = importlib.import_module("flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush")
    materialize = importlib.import_module("flashinfer.gdn_kernels.gdn_prefix_materialize")
    mamba2_decode = importlib.import_module("flashinfer.mamba.checkpointing_ssu")
    mamba2_materialize = importlib.import_module("flashinfer.mamba.replayssm_materialize")
    compiled = Compiled()
    target = SimpleNamespace(num_sms=132, major=9, minor=0, compile_key=(0, "sm_90a"))
    compiler = SimpleNamespace(compile={None: compiled.compile})
    with pytest.MonkeyPatch.context() as patch, OnCpu():
        for module in (decode, materialize):
            patch.setattr(module, "_CACHE", {})
            patch.setattr(module, "cute", compiler)
            patch.setattr(module, "from_dlpack", _DescribedTensor)
            patch.setattr(module, "gdn_device_target", lambda device: target)
            patch.setattr(module, "gdn_compile_options", lambda device: None)
        patch.setattr(decode, "_STRIDED_QKV", True)
        patch.setattr(decode, "GdnDecodeUCacheFlushKernel", type("Decode", (), {"__init__": lambda self, **kw: None}))
        patch.setattr(
            materialize, "GdnPrefixMaterializeKernel", type("Materialize", (), {"__init__": lambda self, **kw: None})
        )
        patch.setattr(
            mamba2_decode, "_checkpointing_ssu", lambda *args, **jit: compiled.mamba2_decodes.append((args, jit))
        )
        patch.setattr(
            mamba2_materialize, "_replayssm_materialize", lambda *args: compiled.mamba2_materializations.append(args)
        )
        patch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
        yield FlashInferKernels(decode, materialize, mamba2_decode, mamba2_materialize), compiled
