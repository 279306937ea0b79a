"""The planner: sane paths, legal schedules best first, few kernels for many sizes, and kernels that do not spill."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from block import Block
from problems import best_first, problem_of
from separable import Case

from cutlass_sep import compiler, planner
from cutlass_sep.bench import inputs
from cutlass_sep.errors import Unsupported
from cutlass_sep.estimate import torch_us
from cutlass_sep.planner import plan
from cutlass_sep.problem import Pads, SeparableConv2dProblem
from cutlass_sep.schedule import PATHS, Geometry, candidates, check, estimate, supports
from cutlass_sep.source import render

ARCH = "sm_90a"
VARIANTS = [
    (dtype, layout, precision)
    for dtype, precision in (("float32", "ieee"), ("float32", "tf32"), ("float16", None), ("bfloat16", None))
    for layout in ("contiguous", "channels_last")
]
LAYERS = {case.id: case for case in inputs.layers(Path(__file__).parents[1] / "benchmarks" / "layers.jsonl")[0]}


def make(
    n=2, c=64, o=128, h=56, w=56, kernel=(3, 3), padding=1, variant=VARIANTS[0], **other
) -> SeparableConv2dProblem:
    """A problem of dense tensors at aligned addresses."""
    dtype, layout, precision = variant
    pads = padding if isinstance(padding, Pads) else Pads(padding, padding, padding, padding)
    fields = {
        "stride": (1, 1),
        "dilation": (1, 1),
        "dw_bias": False,
        "pw_bias": False,
        "mid_activation": None,
        "activation": None,
    } | other
    return SeparableConv2dProblem(
        n=n, c=c, h=h, w=w, o=o, kernel=kernel, padding=pads, dtype=dtype, layout=layout, fp32_precision=precision,
        alignment=1, **fields,
    ).with_alignment()  # fmt: skip


def layer(name: str, variant=VARIANTS[0]) -> SeparableConv2dProblem:
    return inputs.variant(LAYERS[name], *variant).problem


def same(kernel, dilation=(1, 1)) -> Pads:
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return Pads(total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2)


# ---- paths


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_lead_shape_runs_on_sm90(variant):
    problem = inputs.variant(inputs.lead(), *variant).problem
    chosen = plan(problem, ARCH)
    assert chosen.path == "sm90"
    # What was measured to be best: all output channels in a tile, slots for the windows of all warpgroups; two blocks,
    # or the depthwise stage on tensor cores, of contiguous rows with wide stores.
    g = Geometry(problem, chosen.schedule)
    wanted = (1, 2, 0) if problem.element_size == 4 else (1, 1, 8) if problem.layout == "channels_last" else (1, 2, 16)
    assert (g.oc_tiles, chosen.schedule.blocks, chosen.schedule.mma_q) == wanted
    assert chosen.schedule.row_slots >= g.window_rows(g.tiles_down * g.tile_p)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "name", ["mobilenetv1.0.0.ds", "mobilenetv1.1.1.ds", "mobilenetv2.2.1.tail", "xception41.0.conv2"]
)
def test_early_and_slim_layers_run_kernels(name, variant):
    problem = layer(name, variant)
    chosen = plan(problem, ARCH)
    # Rows of 150 pixels are not aligned: portable loads them element by element, at times slower than PyTorch.
    assert chosen.path == "sm90" if problem.alignment == 16 else chosen.path != "sm90"


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("xception41.12.conv3", ("float32", "contiguous", "tf32")),
        ("replknet31b.0.tail", ("float32", "contiguous", "ieee")),
    ],
)
def test_contiguous_layers_that_are_wide_or_large_run_pytorch(name, variant):
    """The depthwise stage by FMA as a kernel of its own is for channels_last."""
    problem = layer(name, variant)
    chosen = plan(problem, ARCH)
    assert (chosen.path, chosen.schedule) == ("torch", None)
    assert chosen.kernel == candidates(problem, ARCH)[0]
    assert f"two convolutions {torch_us(problem):.0f} us" in chosen.reason


@pytest.mark.parametrize(
    "variant", [("bfloat16", "channels_last", None), ("float32", "channels_last", "ieee")], ids=str
)
@pytest.mark.parametrize("name", ["xception41.11.conv2", "xception41.11.conv3", "xception41.12.conv1"])
def test_wide_layers_run_two_kernels(name, variant):
    chosen = plan(layer(name, variant), ARCH)
    assert chosen.path == "sm90" and chosen.schedule.thread_rows > 0
    assert chosen.schedule.shared_x == (variant[0] == "bfloat16")
    assert "path sm90 in two kernels" in chosen.reason


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (7, 7), (10, 16)])
@pytest.mark.parametrize("channels", [(1, 1), (8, 16), (37, 50)])
def test_small_problems_run_kernels(channels, size, variant):
    """PyTorch takes no fewer launches for them."""
    assert plan(make(2, *channels, *size, variant=variant), ARCH).path != "torch"


def test_an_empty_batch_has_a_plan():
    """An op can be emitted for it."""
    assert plan(make(0), ARCH).schedule is not None


def test_without_hopper_portable_runs():
    problem = inputs.lead().problem
    for arch in ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a"):
        chosen = plan(problem, arch)
        assert chosen.path == "portable"
        assert "sm90 cannot run it" in chosen.reason and arch in chosen.reason


def test_a_path_asked_for_runs_or_says_why_not():
    problem = inputs.lead().problem
    assert plan(problem, ARCH, "torch").path == "torch"
    for path in PATHS:
        assert plan(problem, ARCH, path).path == path
    unaligned = replace(problem, alignment=4)
    with pytest.raises(Unsupported, match="path sm90: TMA needs 16-byte aligned"):
        plan(unaligned, ARCH, "sm90")
    assert plan(unaligned, ARCH).path != "sm90"
    with pytest.raises(ValueError, match="path='fast'"):
        plan(problem, ARCH, "fast")


@pytest.mark.parametrize(
    ("case", "kind", "layout", "form", "why"),
    [
        (Case(w=13), "ieee", "contiguous", None, "W = 13, Q = 13 are no multiples of 4; pad them, or take"),
        (Case(w=17, stride=2), "bf16", "contiguous", None, "W = 17, Q = 9 are no multiples of 8; pad them, or take"),
        (Case(w=16, kernel=(3, 2)), "bf16", "contiguous", None, "Q = 17 is no multiple of 8; pad it, or take"),
        (Case(c=9), "fp16", "channels_last", None, "C = 9 is no multiple of 8; pad it, or take path portable"),
        (Case(c=8, o=10), "tf32", "channels_last", None, "O = 10 is no multiple of 4; pad it, or take path portable"),
        (Block(c=8, e=16, l=13), "fp16", "contiguous", "fused", "L = 13 is no multiple of 8; pad it, or take form two"),
        (
            Block(c=9, e=18),
            "fp16",
            "contiguous",
            "fused",
            "C = 9, E = 18 are no multiples of 8; pad them, or take form",
        ),
        (Block(c=8, e=16, o=3, residual=False), "bf16", "channels_last", "fused", "O = 3 is no multiple of 8"),
        (Block(c=8, e=16, l=13), "fp16", "contiguous", "two_kernel", "kernel expand: TMA .*: L = 13 is no multiple of"),
        (Block(c=8, e=10), "fp16", "channels_last", "two_kernel", "kernel expand: TMA .*: E = 10 is no multiple of 8;"),
        (
            Block(c=8, e=16, o=3, residual=False),
            "tf32",
            "channels_last",
            "two_kernel",
            "kernel expand: TMA .*: O = 3 is",
        ),
    ],
    ids=str,
)
def test_tensors_that_tma_cannot_copy_are_named(case, kind, layout, form, why):
    with pytest.raises(Unsupported, match=f"path sm90: .*{why}"):
        plan(problem_of(case, kind, layout), ARCH, "sm90", *(() if form is None else (form,)))


def test_an_address_that_tma_cannot_copy_from_is_named():
    for case, form in ((Case(w=16), None), (Block(c=8, e=16), "fused")):
        problem = problem_of(case, "fp16", alignment=4)
        with pytest.raises(Unsupported, match="the address of x is a multiple of 4 bytes alone; clone x, or take"):
            plan(problem, ARCH, "sm90", *(() if form is None else (form,)))
    both = problem_of(Case(w=12), "fp16", alignment=2)  # 24 bytes a row
    with pytest.raises(Unsupported, match="W = 12, Q = 12 are no multiples of 8, and the address of x is .* 2 bytes"):
        plan(both, ARCH, "sm90")


def test_every_problem_has_a_legal_plan():
    draw = random.Random(0)
    for _ in range(60):
        kernel = draw.choice([(1, 1), (1, 7), (2, 4), (3, 3), (5, 5), (7, 7), (31, 31)])
        dilation = draw.choice([(1, 1), (1, 1), (2, 3), (4, 4)])
        problem = make(
            draw.choice([1, 64]), *(draw.randint(1, 2100) for _ in "co"), *(draw.randint(1, 200) for _ in "hw"),
            kernel, same(kernel, dilation), draw.choice(VARIANTS), dilation=dilation,
            stride=draw.choice([(1, 1), (2, 2), (1, 3)]), mid_activation=draw.choice([None, "relu6", "gelu"]),
        )  # fmt: skip
        arch = draw.choice(["sm_80", "sm_86", ARCH, "sm_120a"])
        chosen = plan(problem, arch)
        if chosen.path == "torch":
            assert torch_us(problem) < estimate(problem, candidates(problem, arch)[0], arch)
        else:
            assert chosen.schedule.path == chosen.path
            assert supports(problem, chosen.path, arch), problem
            assert check(problem, chosen.schedule, arch), (problem, chosen)


def test_a_problem_that_the_stand_in_makes_too_large_has_a_plan():
    """Of one row and a huge stride: the row that stands for all exceeds what kernels count."""
    problem = make(8, 8, 8, 1, 2**28, kernel=(1, 5), padding=Pads(0, 0, 0, 8), stride=(1, 40000))
    for arch in ("sm_80", ARCH):
        assert plan(problem, arch).path in ("torch", "portable")
        for path in PATHS:
            assert bool(planner.supports(problem, path, arch)) == bool(planner.candidates(problem, arch, path))


# ---- schedules


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "name", ["kernelbench.l1.86", "mobilenetv1.3.0.ds", "mobilenetv2.4.1.tail", "xception41.12.conv3"]
)
def test_candidates_are_legal_and_best_first(name, variant):
    problem = layer(name, variant)
    for path in PATHS:
        found = candidates(problem, ARCH, path)
        assert bool(found) == bool(supports(problem, path, ARCH))
        if not found:
            continue
        assert 2 <= len(set(found)) == len(found)
        assert all(s.path == path and check(problem, s, ARCH) for s in found)
        assert best_first(problem, ARCH, path, found)
    both = candidates(problem, ARCH)
    assert plan(problem, ARCH).schedule in (None, both[0])
    assert set(both) == {s for path in PATHS for s in candidates(problem, ARCH, path)}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_estimates_grow_with_the_problem(variant):
    small, large = (make(n, h=h, w=h, variant=variant) for n, h in ((4, 64), (32, 128)))
    one = candidates(small, ARCH)[0]
    assert estimate(small, one, ARCH) < estimate(large, one, ARCH)
    assert torch_us(small) < torch_us(large)


def test_no_schedule_exceeds_a_box_of_tma():
    for variant in VARIANTS:
        for c in (256, 512, 1024):
            problem = make(c=c, o=32, kernel=(1, 1), padding=0, variant=variant)
            for s in candidates(problem, ARCH, "sm90"):
                g = Geometry(problem, s)
                assert g.columns <= 256
                assert g.channels_last or s.slot_channels <= 256


# ---- few kernels for many sizes

SIZES = {
    "lengths": [(4, 1, length) for length in range(1, 501)],
    "maps": [(8, r.randint(7, 224), r.randint(7, 224)) for r in [random.Random(1)] for _ in range(500)],
    "batches": [(n, 28, 28) for n in range(1, 65)],
    "all": [(r.randint(1, 64), r.randint(1, 300), r.randint(1, 300)) for r in [random.Random(2)] for _ in range(500)],
}
SIZE_LAYERS = {
    "slim": {"c": 64, "o": 128},
    "wide": {"c": 512, "o": 512, "mid_activation": "relu6"},
    "odd": {"c": 37, "o": 50, "dw_bias": True},
    "strided": {"c": 96, "o": 24, "stride": (2, 2)},
    "big kernel": {"c": 128, "o": 128, "kernel": (7, 7), "padding": 3},
    "large kernel": {"c": 128, "o": 128, "kernel": (31, 31), "padding": 15},
}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", SIZE_LAYERS)
def test_at_most_four_kernels_a_layer(name, variant):
    """Over all sizes. Addresses that are aligned now and then only cost channels_last layers as many again."""
    sources: tuple[dict, dict] = {}, {}
    for sizes in SIZES.values():
        for i, (n, h, w) in enumerate(sizes):
            problem = make(n, h=h, w=w, variant=variant, **SIZE_LAYERS[name])
            misaligned = i % 5 == 0
            if misaligned:
                problem = problem.with_alignment(4)
            if problem.p < 1 or problem.q < 1:
                continue
            chosen = plan(problem, ARCH).schedule
            if chosen is not None:
                sources[misaligned].setdefault(render(problem, chosen, ARCH), problem)
    for found in sources:
        assert len(found) <= 4, [plan(problem, ARCH) for problem in found.values()]
    # Large kernels in fp32 are PyTorch's at every size where memory is contiguous.
    assert bool(sources[0]) == (name != "large kernel" or variant[:2] != ("float32", "contiguous"))
    assert variant[1] == "channels_last" or len(sources[0] | sources[1]) <= 4


# ---- registers

#: (layer, dtype, layout, precision) with picks of different kinds: few and many output channels, one pass and several.
SPILL_SAMPLE = [
    ("kernelbench.l1.86", "float32", "contiguous", "ieee"),
    ("kernelbench.l1.86", "float32", "channels_last", "tf32"),
    ("kernelbench.l1.86", "bfloat16", "channels_last", None),
    ("mobilenetv1.1.1.ds", "float32", "channels_last", "ieee"),
    ("mobilenetv1.1.1.ds", "float16", "contiguous", None),
    ("mobilenetv1.3.0.ds", "bfloat16", "channels_last", None),
    ("mnasnet100.2.1.tail", "float32", "contiguous", "ieee"),
    ("mnasnet100.3.1.tail", "float16", "channels_last", None),
    ("xception41.1.conv2", "float32", "channels_last", "tf32"),
    ("quartznet.k33.c64_256.s2", "bfloat16", "contiguous", None),
]


@pytest.mark.parametrize(("name", "dtype", "layout", "precision"), SPILL_SAMPLE)
def test_picks_do_not_spill(name, dtype, layout, precision):
    problem = layer(name, (dtype, layout, precision))
    chosen = candidates(problem, ARCH, "sm90")[0]
    cubin = compiler.build(render(problem, chosen, ARCH), ARCH, name="spill-test")
    # Six words may: the producer's warpgroup has 24 to 40 registers a thread, and what it spills is on no chain.
    assert max(used.spill_bytes for used in cubin.resources.values()) <= 24, chosen
