import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from replayssm_orch.actors.records import LayerLayout, TensorLayout
from replayssm_orch.actors.signatures import canonical_json, signature_of

sizes = st.lists(st.integers(0, 4096), min_size=1, max_size=4).map(tuple)
tensors = st.builds(
    TensorLayout,
    name=st.sampled_from(["state", "convolution", "u_ring"]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    shape=sizes,
    stride=sizes,
)
layouts = st.builds(
    LayerLayout,
    layer=st.text(max_size=8),
    group=st.integers(0, 9),
    family=st.sampled_from(["gdn", "mamba2", "attention"]),
    tensors=st.lists(tensors, max_size=5).map(tuple),
)
arches = st.sampled_from(["sm_90a", "sm_100a", "cpu-x86_64"])


@given(layouts, arches, layouts, arches)
def test_ids_are_equal_exactly_when_canonical_layouts_are(one, arch_one, other, arch_other):
    same_layout = (one.family, one.tensors, arch_one) == (other.family, other.tensors, arch_other)
    assert (signature_of(one, arch_one).id == signature_of(other, arch_other).id) == same_layout


@given(layouts, arches, st.text(max_size=8), st.integers(0, 9))
def test_layer_name_and_group_do_not_enter(layout, arch, name, group):
    moved = dataclasses.replace(layout, layer=name, group=group)
    assert signature_of(moved, arch).id == signature_of(layout, arch).id


def test_the_canonical_form_is_fixed():
    # A changed form would orphan every id that reports and bundles hold.
    layout = LayerLayout("model.layers.0", 0, "gdn", (TensorLayout("state", "bfloat16", (4, 8), (8, 1)),))
    signature = signature_of(layout, "sm_90a")
    assert canonical_json(signature) == (
        '{"arch":"sm_90a","family":"gdn","tensors":[{"dtype":"bfloat16","name":"state","shape":[4,8],"stride":[8,1]}]}'
    )
    assert signature.id == "076d01cff1561afccec55c0043f40fcab9aff2465687464ab5f8a5b38787493c"
