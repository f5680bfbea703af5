from hypothesis import given
from hypothesis import strategies as st

from replayssm_orch.actors.records import LayerLayout, RankLayouts, TensorLayout
from replayssm_orch.orchestrator.dedup import deduplicate


def layer(name: str, heads: int, family: str = "gdn") -> LayerLayout:
    return LayerLayout(name, 0, family, (TensorLayout("state", "float32", (9, heads, 4, 4), (heads * 16, 16, 4, 1)),))


heads_by_layer = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 3), min_size=1)
ranks = st.lists(heads_by_layer, min_size=1, max_size=6).map(
    lambda per_rank: [
        RankLayouts(rank, tuple(layer(name, heads) for name, heads in layers.items()), num_blocks=9)
        for rank, layers in enumerate(per_rank)
    ]
)


@given(ranks, st.randoms(use_true_random=False))
def test_dedup_does_not_depend_on_the_order_of_ranks_or_layers(layouts, random):
    arch = {layouts_of_rank.rank: "sm_90a" for layouts_of_rank in layouts}
    shuffled = [
        RankLayouts(r.rank, tuple(random.sample(r.layers, len(r.layers))), r.num_blocks)
        for r in random.sample(layouts, len(layouts))
    ]
    assert deduplicate(shuffled, arch) == deduplicate(layouts, arch)


@given(ranks)
def test_every_layer_of_every_rank_is_in_exactly_one_signature(layouts):
    dedup = deduplicate(layouts, dict.fromkeys(range(len(layouts)), "sm_90a"))
    assert dedup.seen == sum(len(r.layers) for r in layouts)
    for r in layouts:
        mine = [s for s in dedup.unique if r.rank in s.ranks]
        assert tuple(s.id for s in mine) == dedup.by_rank[r.rank]
        assert {layer.layer for layer in r.layers} <= {name for s in mine for name in s.layers}


def test_equal_layouts_on_two_stages_are_one_signature_with_both_ranks():
    layouts = [RankLayouts(0, (layer("layers.0", 8),), 9), RankLayouts(1, (layer("layers.4", 8),), 9)]
    (only,) = deduplicate(layouts, {0: "sm_90a", 1: "sm_90a"}).unique
    assert (only.layers, only.ranks) == (("layers.0", "layers.4"), (0, 1))


def test_another_architecture_is_another_signature():
    layouts = [RankLayouts(rank, (layer("layers.0", 8),), 9) for rank in (0, 1)]
    assert len(deduplicate(layouts, {0: "sm_90a", 1: "sm_100a"}).unique) == 2


def test_another_capacity_is_another_signature():
    small = LayerLayout("layers.0", 0, "gdn", (TensorLayout("state", "float32", (9, 8), (8, 1)),))
    large = LayerLayout("layers.0", 0, "gdn", (TensorLayout("state", "float32", (10, 8), (8, 1)),))
    layouts = [RankLayouts(0, (small,), 9), RankLayouts(1, (large,), 10)]
    assert len(deduplicate(layouts, {0: "sm_90a", 1: "sm_90a"}).unique) == 2
