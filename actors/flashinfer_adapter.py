"""FlashInfer's ReplaySSM kernels behind `RecurrentKernels`: the one module that knows FlashInfer's names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from replayssm_orch.actors.layout_layers import (
    GdnInputs,
    LayoutGdnLayer,
    LayoutLayer,
    LayoutMamba2Layer,
    Mamba2Inputs,
)
from replayssm_orch.actors.warmups.capabilities import Materialize, Unavailable

_GDN_DECODE = "flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush"
_GDN_MATERIALIZE = "flashinfer.gdn_kernels.gdn_prefix_materialize"
_MAMBA2_DECODE = "flashinfer.mamba.checkpointing_ssu"
_MAMBA2_MATERIALIZE = "flashinfer.mamba.replayssm_materialize"
_STRIDED_QKV = "SGLANG_GDN_WY_STRIDED_QKV"
_GDN_WIDTHS = (4, 8)


def gdn_materializer() -> Materialize | Unavailable:
    """FlashInfer's `gdn_prefix_materialize`, or why there is none (0.7.2 has none, 0.7.4 has)."""
    module = _import(_GDN_MATERIALIZE)
    if isinstance(module, Unavailable):
        return module
    materialize: Materialize = module.gdn_prefix_materialize
    return materialize


def flashinfer_kernels() -> FlashInferKernels:
    """The kernels that this process can launch on its CUDA device; each one that it cannot says why when asked."""
    device = _device_unavailable()
    if device is not None:
        return FlashInferKernels(device, device, device, device)
    # Paged pools need the static-descriptor mode, which FlashInfer's module reads at import.
    os.environ.setdefault(_STRIDED_QKV, "1")
    decode = _import(_GDN_DECODE)
    if isinstance(decode, ModuleType) and not decode._STRIDED_QKV:
        decode = Unavailable(f"{_GDN_DECODE} was imported without {_STRIDED_QKV}=1, so it refuses paged pools")
    return FlashInferKernels(
        gdn_decode_module=decode,
        gdn_materialize_module=_import(_GDN_MATERIALIZE),
        mamba2_decode_module=_import(_MAMBA2_DECODE),
        mamba2_materialize_module=_import(_MAMBA2_MATERIALIZE),
    )


def _device_unavailable() -> Unavailable | None:
    if not torch.cuda.is_available():
        return Unavailable("FlashInfer's kernels need a CUDA device")
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return Unavailable(f"FlashInfer's ReplaySSM kernels need compute capability 9.0, this GPU has {major}.{minor}")
    return None


def _import(name: str) -> ModuleType | Unavailable:
    # import_module, not an attribute: the package re-exports functions under its modules' names.
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return Unavailable(f"{name} cannot be imported: {error}")


@dataclass(frozen=True)
class FlashInferKernels:
    """`RecurrentKernels` on a CUDA device; a field is the module or why there is none."""

    gdn_decode_module: ModuleType | Unavailable
    gdn_materialize_module: ModuleType | Unavailable
    mamba2_decode_module: ModuleType | Unavailable
    mamba2_materialize_module: ModuleType | Unavailable

    def decode_unavailable(self, layer: type[LayoutLayer], width: int) -> Unavailable | None:
        if not issubclass(layer, LayoutGdnLayer):
            return self.mamba2_decode_module if isinstance(self.mamba2_decode_module, Unavailable) else None
        if isinstance(self.gdn_decode_module, Unavailable):
            return self.gdn_decode_module
        if width not in _GDN_WIDTHS:
            return Unavailable(f"gated_delta_rule_mtp_ucache_flush executes widths {_GDN_WIDTHS}, not {width}")
        return None

    def materializer_unavailable(self, layer: type[LayoutLayer]) -> Unavailable | None:
        gdn = issubclass(layer, LayoutGdnLayer)
        module = self.gdn_materialize_module if gdn else self.mamba2_materialize_module
        return module if isinstance(module, Unavailable) else None

    def gdn_decode(self, layer: LayoutGdnLayer, inputs: GdnInputs, slots: torch.Tensor) -> torch.Tensor:
        """Returns `[B, T, HV, V]` bfloat16; rows of padding slots hold whatever was there."""
        u_ring, k_ring, g_ring = layer.replayssm_rings
        index = slots.long()
        out: torch.Tensor = _entry(self.gdn_decode_module, "gated_delta_rule_mtp_ucache_flush")(
            layer.a_log,
            inputs.a,
            layer.dt_bias,
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            b=inputs.b,
            initial_state_source=layer.kv_cache[1],
            # The kernel leaves at a negative slot; 0 would be a real one to it.
            initial_state_indices=torch.where(slots > 0, slots, -1),
            k_cache=k_ring,
            u_cache=u_ring,
            g_cache=g_ring,
            hist_len=layer.trackers.committed[index],
            cache_base=layer.trackers.ring_start[index],
            # The layers of a group share their cursors: the lifecycle advances them once a step.
            restart_hist_on_flush=False,
        )
        return out

    def gdn_materialize(self, **arguments: torch.Tensor) -> object:
        return _entry(self.gdn_materialize_module, "gdn_prefix_materialize")(**arguments)

    def mamba2_decode(self, layer: LayoutMamba2Layer, inputs: Mamba2Inputs, slots: torch.Tensor) -> torch.Tensor:
        """Returns `[B, T, heads, head_dim]` bfloat16; the argument forms are those of vLLM's `MambaMixer2`."""
        state = layer.kv_cache[1]
        x_ring, dt_ring, b_ring = layer.rings
        batch, width, heads, head_dim = inputs.x.shape
        scratch = _entry(self.mamba2_decode_module, "allocate_checkpointing_ssu_scratch")(
            batch_size=batch,
            num_heads=heads,
            num_predicted_tokens=width,
            max_window=x_ring.shape[2] - width,
            dtype=inputs.x.dtype,
            device=state.device,
        )
        cb_scaled, cum_a_dt, cb_old = scratch
        out: torch.Tensor = _entry(self.mamba2_decode_module, "checkpointing_ssu")(
            state,
            x_ring,
            b_ring,
            dt_ring,
            layer.trackers.ring_start,
            layer.trackers.committed,
            inputs.x,
            inputs.dt[..., None].expand(-1, -1, -1, head_dim),
            layer.a[:, None, None].expand(-1, head_dim, state.shape[3]),
            inputs.b,
            inputs.c,
            torch.empty(inputs.x.shape, dtype=inputs.x.dtype, device=state.device),
            D=layer.d[:, None].expand(-1, head_dim),
            dt_bias=layer.dt_bias[:, None].expand(-1, head_dim),
            dt_softplus=True,
            state_batch_indices=slots,
            pad_slot_id=0,
            cb_scaled=cb_scaled,
            cumAdt_vec=cum_a_dt,
            cb_old=cb_old,
        )
        return out

    def mamba2_materialize(
        self,
        layers: Sequence[LayoutMamba2Layer],
        *,
        src_slots: torch.Tensor,
        dst_slots: torch.Tensor,
        ring_start: torch.Tensor,
        replay_prefix_len: torch.Tensor,
        active_request_indices: torch.Tensor,
        max_window: int,
    ) -> None:
        first = layers[0].kv_cache[1]
        x_ring, _, b_ring = layers[0].rings
        device = first.device

        def pointers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)

        def strides(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.tensor([tensor.stride(0) for tensor in tensors], dtype=torch.int64, device=device)

        states = [layer.kv_cache[1] for layer in layers]
        x_rings, dt_rings, b_rings = zip(*(layer.rings for layer in layers), strict=True)
        no_scale = torch.zeros(len(layers), dtype=torch.int64, device=device)
        _entry(self.mamba2_materialize_module, "replayssm_materialize")(
            pointers(states),
            strides(states),
            pointers(x_rings),
            strides(x_rings),
            pointers(b_rings),
            strides(b_rings),
            pointers(dt_rings),
            strides(dt_rings),
            pointers([layer.a for layer in layers]),
            no_scale,
            no_scale,
            src_slots,
            dst_slots,
            ring_start,
            replay_prefix_len,
            active_request_indices,
            state_dtype=first.dtype,
            input_dtype=x_ring.dtype,
            matrixA_dtype=layers[0].a.dtype,
            dim=first.shape[2],
            dstate=first.shape[3],
            num_heads=first.shape[1],
            heads_per_group=first.shape[1] // b_ring.shape[1],
            max_window=max_window,
            ring_buffer_len=x_ring.shape[2],
            pad_slot_id=0,
        )


def _entry(module: ModuleType | Unavailable, name: str) -> Callable[..., Any]:
    if isinstance(module, Unavailable):
        raise RuntimeError(module.reason)
    entry: Callable[..., Any] = getattr(module, name)
    return entry
