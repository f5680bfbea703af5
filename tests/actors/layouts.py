"""Small layout plans for the tests of this directory."""

from replayssm_orch.actors.cache_geometry import CacheOptions, page_geometry
from replayssm_orch.actors.layout_engine import LayoutEngine
from replayssm_orch.actors.layout_plan import LayoutPlan, stage_layers
from replayssm_orch.actors.reference_kernels import ReferenceKernels
from replayssm_orch.configs.architectures import AttentionGeometry, GdnGeometry, Mamba2Geometry

ATTENTION = AttentionGeometry(heads=8, kv_heads=2, head_dim=64)
TINY_GDN = GdnGeometry(value_heads=16, key_heads=8, head_dim_v=128, head_dim_k=128, conv_kernel=4)
TINY_MAMBA2 = Mamba2Geometry(heads=8, head_dim=64, d_state=128, groups=1, conv_kernel=4)
# Head dimensions that only the references take: the same rules on a hundredth of the memory.
MINI_GDN = GdnGeometry(value_heads=4, key_heads=2, head_dim_v=8, head_dim_k=8, conv_kernel=4)
MINI_MAMBA2 = Mamba2Geometry(heads=4, head_dim=8, d_state=16, groups=2, conv_kernel=4)

GDN_LAYERS = tuple((f"model.layers.{i}", "attention" if i % 4 == 3 else "gdn") for i in range(8))
MAMBA2_LAYERS = tuple((f"model.layers.{i}", "attention" if i % 4 == 3 else "mamba2") for i in (0, 2, 3, 4, 6, 7))


def layout_plan(shape: GdnGeometry | Mamba2Geometry, **fields) -> LayoutPlan:
    """A plan of all eight layers on the CPU with three speculative tokens; `fields` override."""
    layers = GDN_LAYERS if isinstance(shape, GdnGeometry) else MAMBA2_LAYERS
    planned, num_groups = stage_layers(layers, fields.pop("held", None))
    settings = {
        "device": "cpu",
        "num_blocks": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 1 << 20,
        "capture_sizes": (1, 2, 4),
        "num_speculative_tokens": 3,
        "mamba_cache_mode": "none",
    } | fields
    replayssm = settings.pop("replayssm", True)
    tp = settings.pop("tp", 1)
    options = CacheOptions(settings["device"], tp, replayssm, settings["num_speculative_tokens"])
    return LayoutPlan(
        layers=planned,
        num_groups=num_groups,
        page=page_geometry(shape, ATTENTION, options),
        **settings,
    )


def layout_engine(shape: GdnGeometry | Mamba2Geometry = MINI_GDN, **fields) -> LayoutEngine:
    return LayoutEngine(layout_plan(shape, **fields), ReferenceKernels())
