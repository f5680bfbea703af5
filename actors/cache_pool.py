"""The paged cache pool of one shard, laid out as vLLM lays it out."""

from __future__ import annotations

import torch

from replayssm_orch.actors.cache_geometry import PageGeometry
from replayssm_orch.actors.layout_plan import LayoutPlan
from replayssm_orch.actors.records import LayerLayout, TensorLayout


def allocate_pool(plan: LayoutPlan) -> dict[str, tuple[torch.Tensor, ...]]:
    """Zeroed cache views of every layer, `[num_blocks, ...]` each with the page as slot stride.

    All groups alias one backing allocation from byte 0; within a group, layer l owns a region of `num_blocks` pages
    (layer-outermost layouts in vllm.v1.core.kv_cache_planning.get_kv_cache_config_from_groups).
    """
    place_in_group: dict[str, int] = {}
    group_sizes = [0] * plan.num_groups
    for layer in plan.layers:
        place_in_group[layer.name] = group_sizes[layer.group]
        group_sizes[layer.group] += 1
    region = plan.num_blocks * plan.page.page_bytes
    backing = torch.zeros(max(group_sizes) * region, dtype=torch.int8, device=plan.device)
    views: dict[str, tuple[torch.Tensor, ...]] = {}
    for layer in plan.layers:
        offset = place_in_group[layer.name] * region
        pages = backing[offset : offset + region].view(plan.num_blocks, plan.page.page_bytes)
        if layer.family == "attention":
            views[layer.name] = (_attention_view(pages, plan),)
        else:
            views[layer.name] = _recurrent_views(pages, plan.page)
    return views


def layer_layouts(plan: LayoutPlan, views: dict[str, tuple[torch.Tensor, ...]]) -> tuple[LayerLayout, ...]:
    """The layouts of the allocated views, in model order."""
    recurrent_names = tuple(tensor.name for tensor in plan.page.tensors)
    layouts = []
    for layer in plan.layers:
        names = (plan.page.kv.name,) if layer.family == "attention" else recurrent_names
        tensors = tuple(
            TensorLayout(name, str(view.dtype).removeprefix("torch."), tuple(view.shape), tuple(view.stride()))
            for name, view in zip(names, views[layer.name], strict=True)
        )
        layouts.append(LayerLayout(layer.name, layer.group, layer.family, tensors))
    return tuple(layouts)


def _recurrent_views(pages: torch.Tensor, page: PageGeometry) -> tuple[torch.Tensor, ...]:
    views = []
    offset = 0
    for tensor in page.tensors:
        content = pages[:, offset : offset + tensor.num_bytes].view(getattr(torch, tensor.dtype))
        views.append(content.view(-1, *tensor.shape))
        offset += tensor.num_bytes
    return tuple(views)


def _attention_view(pages: torch.Tensor, plan: LayoutPlan) -> torch.Tensor:
    heads, tokens, content = plan.page.kv.shape
    elements = pages.view(getattr(torch, plan.page.kv.dtype))
    if plan.device == "cpu":
        return elements.view(-1, heads, tokens, content)
    # Logical [B, H, N, C] over token-major pages: LBNHC, vLLM's default where no attention backend asks for another.
    return elements.view(-1, tokens, heads, content).transpose(1, 2)
