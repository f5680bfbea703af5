"""Layers and decode inputs of a layout engine, in the memory layout in which a model hands them to the kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from replayssm_orch.actors.cache_geometry import PageGeometry
from replayssm_orch.actors.layout_layers import (
    GdnInputs,
    LayoutGdnLayer,
    LayoutLayer,
    LayoutMamba2Layer,
    Mamba2Inputs,
    Trackers,
)
from replayssm_orch.actors.layout_plan import LayerPlan


def recurrent_layer(
    plan: LayerPlan, page: PageGeometry, views: tuple[torch.Tensor, ...], trackers: Trackers
) -> LayoutLayer:
    """A layer with the neutral weights that vLLM's layers start with: decay 1, bias 1, skip 1."""
    heads, device = views[1].shape[1], views[1].device
    ones = torch.ones(heads, dtype=torch.bfloat16, device=device)
    if plan.family == "gdn":
        a_log = torch.zeros(heads, dtype=torch.float32, device=device)
        return LayoutGdnLayer(plan.name, views, trackers, page.window, a_log=a_log, dt_bias=ones)
    return LayoutMamba2Layer(
        plan.name, views, trackers, page.window, a=-torch.ones(heads, device=device), d=ones, dt_bias=ones.clone()
    )


def gdn_inputs(layer: LayoutGdnLayer, batch: int, width: int, randomize: bool) -> GdnInputs:
    """bfloat16 inputs of one step; q, k and v are column slices of one tensor, as the convolution leaves them."""
    _, value_heads, value_dim, key_dim = layer.kv_cache[1].shape
    key_heads = layer.replayssm_rings[1].shape[1]
    fill = _fill(randomize)
    device = layer.kv_cache[1].device
    fused = fill((batch, width, 2 * key_heads * key_dim + value_heads * value_dim), device)
    q, k, v = torch.split(fused, [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], dim=-1)
    return GdnInputs(
        q=q.view(batch, width, key_heads, key_dim),
        k=k.view(batch, width, key_heads, key_dim),
        v=v.view(batch, width, value_heads, value_dim),
        a=fill((batch, width, value_heads), device),
        b=fill((batch, width, value_heads), device),
    )


def mamba2_inputs(layer: LayoutMamba2Layer, batch: int, width: int, randomize: bool) -> Mamba2Inputs:
    """bfloat16 inputs of one step; x, B and C are column slices of one tensor, as the convolution leaves them."""
    _, heads, head_dim, d_state = layer.kv_cache[1].shape
    groups = layer.rings[2].shape[1]
    fill = _fill(randomize)
    device = layer.kv_cache[1].device
    fused = fill((batch, width, heads * head_dim + 2 * groups * d_state), device)
    x, b, c = torch.split(fused, [heads * head_dim, groups * d_state, groups * d_state], dim=-1)
    return Mamba2Inputs(
        x=x.view(batch, width, heads, head_dim),
        dt=fill((batch, width, heads), device),
        b=b.view(batch, width, groups, d_state),
        c=c.view(batch, width, groups, d_state),
    )


def _fill(randomize: bool) -> Callable[[tuple[int, ...], torch.device], torch.Tensor]:
    make = torch.randn if randomize else torch.zeros

    def fill(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        return make(shape, dtype=torch.bfloat16, device=device)

    return fill
