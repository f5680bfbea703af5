"""Cache shapes, pages and groups without vLLM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import ATTENTION, GDN_LAYERS, MAMBA2_LAYERS, MINI_GDN, TINY_GDN, TINY_MAMBA2, layout_engine

from replayssm_orch.actors.cache_geometry import CacheOptions, kv_cache_groups, page_geometry


def shapes(page) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {tensor.name: (tensor.dtype, tensor.shape) for tensor in page.tensors}


def test_mamba2_page_on_cuda_is_that_of_vllm_with_flashinfer_replayssm() -> None:
    page = page_geometry(TINY_MAMBA2, ATTENTION, CacheOptions("cuda", tp=1, replayssm=True))
    assert shapes(page) == {
        "convolution": ("bfloat16", (3, 768)),
        "state": ("float32", (8, 64, 128)),
        "x_ring": ("bfloat16", (8, 17, 64)),
        "dt_ring": ("float32", (8, 17)),
        "b_ring": ("bfloat16", (1, 17, 128)),
    }
    assert page.page_bytes == page.block_size * 2 * 2 * 64 * 2
    assert page.block_size % 16 == 0
    assert page.page_bytes - sum(tensor.num_bytes for tensor in page.tensors) < 16 * 512


def test_gdn_page_on_cuda_has_the_rings_of_the_executed_width() -> None:
    for spec, ring in ((0, 16), (1, 32), (3, 32), (7, 32)):
        page = page_geometry(TINY_GDN, ATTENTION, CacheOptions("cuda", 2, True, num_speculative_tokens=spec))
        assert shapes(page) == {
            "convolution": ("bfloat16", (3 + spec, 2048)),
            "state": ("bfloat16", (8, 128, 128)),
            "u_ring": ("bfloat16", (8, ring, 128)),
            "k_ring": ("bfloat16", (4, ring, 128)),
            "g_ring": ("float32", (8, ring)),
        }


def test_mamba2_groups_are_replicated_until_every_rank_has_one() -> None:
    page = page_geometry(TINY_MAMBA2, ATTENTION, CacheOptions("cuda", tp=4, replayssm=True))
    assert shapes(page)["convolution"][1] == (3, 2 * 64 + 2 * 128)
    assert shapes(page)["b_ring"][1] == (1, 17, 128)


def test_indivisible_heads_are_named() -> None:
    with pytest.raises(ValueError, match="8 key heads are not divisible by tensor parallel size 16"):
        page_geometry(TINY_GDN, ATTENTION, CacheOptions("cuda", tp=16, replayssm=True))


def test_groups_take_every_nth_layer_so_that_stages_share_them() -> None:
    assert kv_cache_groups(GDN_LAYERS) == tuple((f"model.layers.{i}", f"model.layers.{i + 4}") for i in (0, 1, 2, 3))
    assert kv_cache_groups(MAMBA2_LAYERS) == tuple((f"model.layers.{i}", f"model.layers.{i + 4}") for i in (0, 2, 3))


@given(st.lists(st.sampled_from(["gdn", "attention"]), min_size=2, max_size=30))
def test_groups_hold_every_layer_once_and_one_family_each(families) -> None:
    layers = [(f"layer.{i}", family) for i, family in enumerate(families)]
    groups = kv_cache_groups(layers)
    family_of = dict(layers)
    assert sorted(name for group in groups for name in group) == sorted(family_of)
    assert all(len({family_of[name] for name in group}) == 1 for group in groups)


def test_changed_capacity_changes_the_layouts_and_a_second_engine_has_the_same() -> None:
    layouts = layout_engine(MINI_GDN, num_blocks=8).layouts()
    assert layouts == layout_engine(MINI_GDN, num_blocks=8).layouts()
    assert layouts != layout_engine(MINI_GDN, num_blocks=9).layouts()


def test_all_views_of_a_page_share_its_slot_stride_and_stay_inside_it() -> None:
    engine = layout_engine(MINI_GDN)
    page = engine.plan.page
    for layer in engine.layers.values():
        for view in layer.kv_cache:
            assert view.stride(0) * view.element_size() == page.page_bytes
            assert view[0].is_contiguous()
        for value, view in enumerate(layer.kv_cache):
            view.fill_(value)
        assert [view.unique().tolist() for view in layer.kv_cache] == [[0], [1], [2], [3], [4]]


def test_state_dtype_follows_the_model() -> None:
    options = CacheOptions("cuda", 1, False, state_dtype="bfloat16")
    assert shapes(page_geometry(TINY_MAMBA2, ATTENTION, options))["state"][0] == "bfloat16"


def test_a_stage_keeps_the_groups_of_the_whole_model() -> None:
    """Two stages of four layers: one layer of every group each, so half the memory and equal layouts."""
    whole = layout_engine(MINI_GDN)
    stages = [layout_engine(MINI_GDN, held={f"model.layers.{i}" for i in held}) for held in (range(4), range(4, 8))]
    assert [layout for stage in stages for layout in stage.layouts()] == list(whole.layouts())
    for stage in stages:
        assert [len(group.layer_names) for group in stage.kv_cache_config.kv_cache_groups] == [1, 1, 1, 1]
        assert len({layer.kv_cache[0].data_ptr() for layer in stage.layers.values()}) == 1
