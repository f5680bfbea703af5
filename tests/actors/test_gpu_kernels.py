"""FlashInfer's kernels on a GPU against the float32 references, and serving with nothing left to compile.

Run: python -m pytest -m gpu tests/actors/test_gpu_kernels.py (REPLAYSSM_GPU_RESULTS=FILE collects a JSON line a case)

Tolerances. bfloat16 has 8 significant bits, so a unit roundoff of 2^-8. A materialized state is a sum whose every
term has one bfloat16 operand (the weighted correction), rounded once, and the sum is rounded once more where the state
is bfloat16; the reference runs on a float32 pool and rounds nothing. The bound, element by element, is therefore 2^-8
of the sum of the terms' magnitudes plus 2^-8 of the result. A decode output passes through a chain of such products
over many steps (normalised keys, the triangular inverse, corrections, folds), so it is held to a share of the largest
output instead.
"""

from dataclasses import replace

import pytest
import torch
from gpu_results import measured
from layouts import TINY_GDN, TINY_MAMBA2, layout_plan

from replayssm_orch.actors.flashinfer_adapter import FlashInferKernels, flashinfer_kernels
from replayssm_orch.actors.layout_engine import LayoutEngine, layout_capabilities
from replayssm_orch.actors.layout_inputs import gdn_inputs, mamba2_inputs
from replayssm_orch.actors.layout_layers import Trackers
from replayssm_orch.actors.reference_gdn import replay as gdn_replay
from replayssm_orch.actors.reference_kernels import ReferenceKernels
from replayssm_orch.actors.reference_mamba2 import replay as mamba2_replay
from replayssm_orch.actors.serving import serve
from replayssm_orch.actors.trackers import advance
from replayssm_orch.actors.warmups.run import run_warmups
from replayssm_orch.configs.architectures import GdnGeometry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROUNDOFF = 2.0**-8
# Largest share measured on an H200: 0.0046 (GDN outputs), 0.0035 (Mamba2 outputs), 0.0035 (states).
DECODE_TOLERANCE = 0.01
COUNTS = (0, 1, 8, 16)


@pytest.fixture(scope="module")
def kernels() -> FlashInferKernels:
    return flashinfer_kernels()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def engine_on(kernels, shape, **fields) -> LayoutEngine:
    return LayoutEngine(layout_plan(shape, device="cuda", **fields), kernels)


def pool_bytes(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int8, device="cuda").set_(view.untyped_storage())


def gdn_layer(kernels, shape: GdnGeometry, ring: int, paged: bool):
    """A layer with a random checkpoint and a ring of plausible entries in every slot; rings as decode writes them."""
    engine = engine_on(kernels, shape, num_blocks=12, num_speculative_tokens=0 if ring == 16 else 3)
    layer = next(iter(engine.layers.values()))
    u_ring, k_ring, g_ring = layer.replayssm_rings
    layer.kv_cache[1].normal_()
    u_ring.normal_()
    k_ring.copy_(torch.nn.functional.normalize(torch.randn(k_ring.shape, device="cuda"), dim=-1))
    g_ring.copy_(-torch.rand(g_ring.shape, device="cuda").mul(0.2).cumsum(-1))
    if not paged:
        layer = replace(layer, kv_cache=tuple(view.contiguous() for view in layer.kv_cache))
    return layer


def gdn_requests(layer, counts: tuple[int, ...], active: bool = True) -> dict[str, torch.Tensor]:
    u_ring, k_ring, g_ring = layer.replayssm_rings
    number = len(counts)
    listed = range(number) if active else [-1] * number
    return {
        "state": layer.kv_cache[1],
        "src_slots": int32(*range(1, number + 1)),
        "dst_slots": int32(*range(number + 1, 2 * number + 1)),
        "k_cache": k_ring,
        "u_cache": u_ring,
        "g_cache": g_ring,
        "cache_base": int32(*([0] * number)),
        "count": int32(*counts),
        "active_request_indices": int32(*listed),
        "num_active": int32(number if active else 0),
    }


def materialize_and_compare(kernels, layer, arguments: dict[str, torch.Tensor], numbers: dict[str, object]) -> None:
    """Launch kernel and reference on equal pools; every destination within the bound of the module's docstring."""
    state, (u_ring, k_ring, g_ring) = layer.kv_cache[1], layer.replayssm_rings
    # A float32 pool: the reference's results stay unrounded, as the bound assumes.
    expected = ReferenceKernels.gdn_materialize(**arguments | {"state": state.float()})
    src, base, count = (arguments[name].long() for name in ("src_slots", "cache_base", "count"))
    dst = arguments["dst_slots"].long()
    magnitude, _ = gdn_replay(torch.zeros_like(state), (u_ring.abs(), k_ring.abs(), g_ring), src, base, count)
    kernels.gdn_materialize(**arguments)
    wanted = expected[dst].float()
    error = (state[dst].float() - wanted).abs()
    bound = ROUNDOFF * (magnitude + wanted.abs()) + 1e-6
    numbers["max_error"] = float(error.max())
    numbers["max_share_of_bound"] = float((error / bound).max())
    assert (error <= bound).all()


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "dense"])
@pytest.mark.parametrize("ring", [16, 32])
@pytest.mark.parametrize("heads", [(2, 1), (4, 2), (16, 8), (32, 16), (8, 8)], ids=lambda h: f"{h[0]}v{h[1]}k")
def test_gdn_materializer(kernels, heads, ring: int, paged: bool) -> None:
    torch.manual_seed(0)
    layer = gdn_layer(kernels, replace(TINY_GDN, value_heads=heads[0], key_heads=heads[1]), ring, paged)
    state = layer.kv_cache[1]
    with measured("gdn materializer", value_heads=heads[0], key_heads=heads[1], ring=ring, paged=paged) as numbers:
        before = state.clone()
        materialize_and_compare(kernels, layer, gdn_requests(layer, COUNTS), numbers)
        assert torch.equal(state[5].view(torch.int16), before[1].view(torch.int16))
        untouched = [0, 1, 2, 3, 4, 9, 10, 11]
        assert torch.equal(state[untouched], before[untouched])
        assert not torch.equal(state[6], before[6])


@pytest.mark.parametrize("base", [5, 20, 31])
def test_gdn_materializer_reads_a_ring_that_wraps(kernels, base: int) -> None:
    torch.manual_seed(1)
    layer = gdn_layer(kernels, TINY_GDN, 32, paged=True)
    _, _, g_ring = layer.replayssm_rings
    g_ring.copy_(g_ring.roll(base, dims=-1))
    with measured("gdn materializer, wrapped ring", base=base) as numbers:
        arguments = gdn_requests(layer, COUNTS) | {"cache_base": int32(*([base] * len(COUNTS)))}
        materialize_and_compare(kernels, layer, arguments, numbers)


@pytest.mark.parametrize(
    "inactive",
    [
        {"active": False},
        {"src_slots": (-1, -1, -1, -1)},
        {"dst_slots": (-1, -1, -1, -1)},
        {"count": (-1, -1, -1, -1)},
        {"count": (17, 17, 17, 17)},
    ],
    ids=["unlisted", "no source", "no destination", "negative count", "count above 16"],
)
def test_inactive_requests_change_no_byte_of_the_pool(kernels, inactive) -> None:
    torch.manual_seed(2)
    layer = gdn_layer(kernels, TINY_GDN, 32, paged=True)
    with measured("gdn materializer, inactive", case=str(inactive)) as numbers:
        arguments = gdn_requests(layer, COUNTS, active=inactive.get("active", True))
        arguments |= {name: int32(*values) for name, values in inactive.items() if name != "active"}
        pool = pool_bytes(layer.kv_cache[0])
        before = pool.clone()
        kernels.gdn_materialize(**arguments)
        numbers["pool_bytes"] = pool.numel()
        numbers["changed_bytes"] = int((pool != before).sum())
        assert numbers["changed_bytes"] == 0


def twin(layer, ring_start: torch.Tensor, committed: torch.Tensor):
    """A layer with caches of its own, equal to `layer`'s, for the reference to run on."""
    caches = tuple(view.clone() for view in layer.kv_cache)
    return replace(layer, kv_cache=caches, trackers=Trackers(ring_start, committed))


def compare_decode(layer, kernels, decode: str, width: int, numbers: dict[str, object]) -> None:
    """64 steps with random accepted lengths, kernel and reference each on their own caches, outputs compared."""
    reference = twin(layer, layer.trackers.ring_start, layer.trackers.committed)
    make_inputs = gdn_inputs if decode == "gdn_decode" else mamba2_inputs
    slots = int32(3, 1, 0, 6, 2)
    live = [0, 1, 3, 4]
    flushes, worst, largest = 0, 0.0, 0.0
    for _ in range(64):
        inputs = make_inputs(layer, len(slots), width, randomize=True)
        flushes += int(layer.window.flushes(layer.trackers.committed[slots[live].long()]).sum())
        expected = getattr(ReferenceKernels(), decode)(reference, inputs, slots)[live]
        actual = getattr(kernels, decode)(layer, inputs, slots)[live].float()
        assert actual.isfinite().all()
        worst = max(worst, float((actual - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
        accepted = torch.randint(1, width + 1, (len(slots),), dtype=torch.int32, device="cuda")
        advance(layer.trackers.ring_start, layer.trackers.committed, slots, accepted, layer.window)
    state_error = (layer.kv_cache[1].float() - reference.kv_cache[1].float()).abs().max()
    state_size = reference.kv_cache[1].float().abs().max()
    numbers |= {
        "flushes": flushes,
        "max_error": worst,
        "max_output": largest,
        "max_state_error": float(state_error),
        "max_state": float(state_size),
    }
    assert flushes >= 12
    assert worst <= DECODE_TOLERANCE * largest
    assert state_error <= DECODE_TOLERANCE * state_size
    untouched = [0, 4, 5, 7]
    assert torch.equal(layer.kv_cache[1][untouched], reference.kv_cache[1][untouched])


@pytest.mark.parametrize("heads", [(16, 8), (4, 2), (2, 1)], ids=lambda h: f"{h[0]}v{h[1]}k")
@pytest.mark.parametrize("width", [4, 8])
def test_gdn_decode_over_64_steps(kernels, width: int, heads) -> None:
    torch.manual_seed(width)
    shape = replace(TINY_GDN, value_heads=heads[0], key_heads=heads[1])
    engine = engine_on(kernels, shape, num_speculative_tokens=width - 1)
    layer = next(iter(engine.layers.values()))
    # The kernel reads A_log in bfloat16, so the reference must get a value that survives that.
    layer.a_log.copy_(torch.empty_like(layer.a_log).uniform_(-4, -1).bfloat16())
    layer.dt_bias.normal_()
    layer.kv_cache[1].normal_()
    with measured("gdn decode", width=width, value_heads=heads[0], key_heads=heads[1], steps=64) as numbers:
        compare_decode(layer, kernels, "gdn_decode", width, numbers)


@pytest.mark.parametrize("width", [1, 4], ids=["width1", "width4"])
def test_mamba2_decode_over_64_steps(kernels, width: int) -> None:
    torch.manual_seed(width)
    engine = engine_on(kernels, TINY_MAMBA2, num_speculative_tokens=width - 1)
    layer = next(iter(engine.layers.values()))
    layer.a.uniform_(-0.3, -0.02)
    layer.d.normal_()
    layer.dt_bias.normal_()
    layer.kv_cache[1].normal_()
    with measured("mamba2 decode", width=width, steps=64) as numbers:
        compare_decode(layer, kernels, "mamba2_decode", width, numbers)


def test_mamba2_materializer(kernels) -> None:
    torch.manual_seed(0)
    engine = engine_on(kernels, TINY_MAMBA2, num_blocks=12, num_speculative_tokens=0)
    layers = engine.recurrent_groups()[0]
    for layer in layers:
        layer.a.uniform_(-0.3, -0.02)
        layer.kv_cache[1].normal_()
        x_ring, dt_ring, b_ring = layer.rings
        x_ring.normal_()
        dt_ring.uniform_(0, 1)
        b_ring.normal_()
    src, dst, start = int32(1, 2, 3, 4), int32(5, 6, 7, 8), int32(0, 3, 9, 16)
    arguments = {
        "src_slots": src.expand(2, -1).contiguous(),
        "dst_slots": dst.expand(2, -1).contiguous(),
        "ring_start": start,
        "replay_prefix_len": int32(*COUNTS),
        "active_request_indices": int32(2, 0, 3, 1),
        "max_window": 16,
    }
    reference = [twin(layer, layer.trackers.ring_start, layer.trackers.committed) for layer in layers]
    with measured("mamba2 materializer", layers=2) as numbers:
        ReferenceKernels().mamba2_materialize(reference, **arguments)
        sources = [layer.kv_cache[1][1].clone() for layer in layers]
        kernels.mamba2_materialize(layers, **arguments)
        worst, share = 0.0, 0.0
        assert len(layers) == 2
        for layer, expected, source in zip(layers, reference, sources, strict=True):
            actual, wanted = layer.kv_cache[1][5:9], expected.kv_cache[1][5:9]
            x_ring, dt_ring, b_ring = layer.rings
            magnitude = mamba2_replay(
                torch.zeros_like(layer.kv_cache[1]),
                (x_ring.abs(), dt_ring, b_ring.abs()),
                layer.a,
                slot=src.long(),
                start=start.long(),
                count=torch.tensor(COUNTS, device="cuda"),
                window=16,
            )
            error = (actual - wanted).abs()
            bound = ROUNDOFF * (magnitude + wanted.abs()) + 1e-6
            worst, share = max(worst, float(error.max())), max(share, float((error / bound).max()))
            assert torch.equal(actual[0], source)
        numbers |= {"max_error": worst, "max_share_of_bound": share}
        assert share <= 1


class CountingCompile:
    """Stands for `cute.compile`, passes everything on and counts the calls."""

    def __init__(self, original) -> None:
        self.original = original
        self.count = 0

    def __getitem__(self, options):
        configured = self.original[options]
        return lambda *args, **kwargs: self._counted(configured, args, kwargs)

    def __call__(self, *args, **kwargs):
        return self._counted(self.original, args, kwargs)

    def _counted(self, compile_, args, kwargs):
        self.count += 1
        return compile_(*args, **kwargs)


@pytest.fixture
def compile_counter(monkeypatch) -> CountingCompile:
    import cutlass.cute

    counter = CountingCompile(cutlass.cute.compile)
    monkeypatch.setattr(cutlass.cute, "compile", counter)
    return counter


@pytest.mark.parametrize(("spec", "num_blocks"), [(3, 193), (7, 195)])
def test_gdn_serves_100_steps_without_a_compilation(kernels, compile_counter, spec: int, num_blocks: int) -> None:
    # Capacities that no other test uses: their kernels cannot be in FlashInfer's caches yet.
    engine = engine_on(
        kernels,
        TINY_GDN,
        num_speculative_tokens=spec,
        num_blocks=num_blocks,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        capture_sizes=(1, 2, 4, 8, 16, 24, 32),
        mamba_cache_mode="align",
    )
    capabilities = layout_capabilities(engine)
    with measured("gdn serving", speculative_tokens=spec, steps=100) as numbers:
        states = {outcome.name: outcome.state for outcome in run_warmups(engine, capabilities)}
        numbers["compiled_in_warmup"] = compile_counter.count
        assert (states["lifecycle"], states["gdn"], states["materializer"]) == ("done", "done", "done")
        # Seven batch sizes and one materializer: the counter sees what is compiled.
        assert compile_counter.count == 8
        run_warmups(engine, capabilities)
        numbers["compiled_in_second_pass"] = compile_counter.count - 8
        traffic = serve(engine, 100)
        numbers |= {
            "compiled_while_serving": compile_counter.count - 8 - numbers["compiled_in_second_pass"],
            "flushes": traffic.flushes,
            "publications": traffic.publications,
            "moves": traffic.moves,
            "resets": traffic.resets,
        }
        assert compile_counter.count == 8
        assert set(traffic.batch_sizes) == {1, 2, 4, 8, 16, 24, 32}
        assert traffic.flushes > 100
        assert traffic.publications > 0
        assert all(view.isfinite().all() for layer in engine.layers.values() for view in layer.kv_cache)


def test_mamba2_serves_100_steps_without_a_build(kernels) -> None:
    engine = engine_on(
        kernels,
        TINY_MAMBA2,
        num_speculative_tokens=0,
        num_blocks=129,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        capture_sizes=(1, 2, 4, 8, 16, 24, 32),
        mamba_cache_mode="align",
    )
    modules = (kernels.mamba2_decode_module._get_module, kernels.mamba2_materialize_module._module)
    capabilities = layout_capabilities(engine)
    with measured("mamba2 serving", steps=100) as numbers:
        states = {outcome.name: outcome.state for outcome in run_warmups(engine, capabilities)}
        assert (states["lifecycle"], states["mamba2-decode"]) == ("done", "done")
        warm = [module.cache_info().misses for module in modules]
        assert all(warm)
        traffic = serve(engine, 100)
        built = [module.cache_info().misses for module in modules]
        numbers |= {"built_while_serving": sum(built) - sum(warm), "flushes": traffic.flushes}
        assert built == warm
        assert traffic.flushes > 50
        assert all(view.isfinite().all() for layer in engine.layers.values() for view in layer.kv_cache)


def test_width_one_is_skipped(kernels) -> None:
    engine = engine_on(kernels, TINY_GDN, num_speculative_tokens=0)
    outcomes = {outcome.name: outcome for outcome in run_warmups(engine, layout_capabilities(engine))}
    assert outcomes["gdn"].state == "skipped"
    assert "not 1" in outcomes["gdn"].reason
