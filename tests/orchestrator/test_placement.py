from hypothesis import given
from hypothesis import strategies as st

from replayssm_orch.orchestrator.placement import NodeCapacity, place, rank_resources, shortage

degrees = st.sampled_from([1, 2, 4, 8])
nodes = st.lists(st.builds(NodeCapacity, cpus=st.integers(1, 64), gpus=st.integers(0, 8)), min_size=1, max_size=5)


@given(degrees, degrees, nodes, st.booleans(), st.sampled_from([1.0, 0.5, 0.125]))
def test_bundles_hold_exactly_the_ranks(tp, pp, cluster, spread, share):
    placement = place(tp, pp, rank_resources("cuda", share), cluster, spread)
    assert len(placement.bundle_of_rank) == tp * pp
    for index, bundle in enumerate(placement.bundles):
        held = placement.bundle_of_rank.count(index)
        assert bundle == {"CPU": held * 1.0, "GPU": held * share}


@given(degrees, degrees, nodes, st.booleans())
def test_a_tp_group_is_one_bundle_whenever_a_node_can_hold_it(tp, pp, cluster, spread):
    placement = place(tp, pp, rank_resources("cuda", 1.0), cluster, spread)
    with_gpu = [node for node in cluster if node.gpus]
    fits = not with_gpu or any(node.gpus >= tp and node.cpus >= tp for node in with_gpu)
    stages = [set(placement.bundle_of_rank[stage * tp : (stage + 1) * tp]) for stage in range(pp)]
    assert all(len(bundles) == (1 if fits else tp) for bundles in stages)


def test_two_stages_spread_over_nodes_but_a_stage_stays_whole():
    placement = place(2, 2, rank_resources("cuda", 1.0), [NodeCapacity(8, 4)] * 2, spread=True)
    assert (placement.strategy, placement.bundles) == ("SPREAD", ({"CPU": 2.0, "GPU": 2.0},) * 2)
    assert placement.bundle_of_rank == (0, 0, 1, 1)


def test_what_does_not_fit_says_what_was_asked_for_and_what_there_is():
    placement = place(4, 1, rank_resources("cuda", 1.0), [NodeCapacity(16, 2)], spread=False)
    assert shortage(placement, [NodeCapacity(16, 2)]) == (
        "asked for 4 bundles of 1 CPU and 1 GPU; the cluster has 1 node: 16 CPU and 2 GPU"
    )


def test_eight_shares_of_one_gpu_fit():
    placement = place(8, 1, rank_resources("cuda", 0.125), [NodeCapacity(16, 1)], spread=False)
    assert shortage(placement, [NodeCapacity(16, 1)]) is None
