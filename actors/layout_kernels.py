"""Which kernels a layout engine launches on which device."""

from __future__ import annotations

from replayssm_orch.actors.cache_geometry import Device
from replayssm_orch.actors.flashinfer_adapter import flashinfer_kernels
from replayssm_orch.actors.layout_layers import RecurrentKernels
from replayssm_orch.actors.reference_kernels import ReferenceKernels


def kernels_for(device: Device) -> RecurrentKernels:
    """FlashInfer's on CUDA (each missing one is skipped by its reason), the float32 references on the CPU."""
    return flashinfer_kernels() if device == "cuda" else ReferenceKernels()
