"""Emit and run, explain, supports, warmup and the planner for the block, as far as no GPU is needed."""

from __future__ import annotations

import copy
import json
import pickle
import re
from dataclasses import replace

import pytest
import torch
from block import Block, assert_output_close, channels_last
from subjects import odd, strided
from torch import Tensor

import cutlass_sep
from cutlass_sep import Unsupported, block_schedule, dispatch, op, planner, reference
from cutlass_sep import kernel as kernels
from cutlass_sep.block_schedule import FORMS, candidates
from cutlass_sep.estimate import torch_us
from cutlass_sep.functional import separable_conv_block1d
from cutlass_sep.op import SeparableConvBlock1d
from cutlass_sep.operators import BLOCK1D
from cutlass_sep.problem import SeparableBlock1dProblem
from cutlass_sep.schedule import PATHS, Support, tile_key

LEAD = Block(n=32, c=256, e=512, l=4096, kernel=9)
SMALL = Block(c=8, e=16)  # every pitch is a multiple of 16 bytes


def make(case: Block = LEAD, device: str = "meta", dtype=torch.float32, layout="contiguous", **options):
    options = {"arch": "sm_90a"} | options
    return SeparableConvBlock1d(*case.tensors(device, dtype, layout), **case.options, **options)


def runs(problem: SeparableBlock1dProblem, form: str) -> list[str]:
    """Paths that have a kernel of this form."""
    return [path for path in PATHS if block_schedule.supports(problem, path, "sm_90a", form)]


def test_emits_from_meta_tensors():
    made = make()
    assert (made.path, made.arch, made.schedule.path) == ("sm90", "sm_90a", "sm90")
    assert made.form == made.schedule.form in FORMS
    assert 'extern "C" __global__' in made.source
    assert made.source == make().source


def test_repr_says_what_runs():
    made = make(dtype=torch.bfloat16)
    text = repr(made)
    assert text.startswith("SeparableConvBlock1d(SeparableBlock1dProblem(n=32, c=256, l=4096, e=512,")
    assert text.endswith("path='sm90', form='fused', arch='sm_90a')")


@pytest.mark.parametrize("path", PATHS)
def test_two_kernels_mark_hidden_values_that_fp16_cannot_hold(path: str):
    source = {t: make(dtype=t, form="two_kernel", path=path).source for t in (torch.float16, torch.bfloat16)}
    assert source[torch.float16].count("cutlass_sep::HalfOrNan<Element>;") == 1
    assert source[torch.float16].count("kExpandC = 256;") == 1  # the project kernel can start from x again
    assert "cutlass_sep::HalfOrNan<Element>;" not in source[torch.bfloat16]
    assert source[torch.bfloat16].count("kExpandC = 0;") == 2
    assert [text.count("exact_block_pixel(Arguments const& args") for text in source.values()] == [2, 1]  # 1: declared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_form_asked_for(dtype: torch.dtype):
    problem = make(dtype=dtype).problem
    supported = {form: runs(problem, form) for form in FORMS}
    assert supported["two_kernel"]
    for form, paths in supported.items():
        if paths:
            made = make(dtype=dtype, form=form)
            assert (made.form, made.path in paths, made.reason) == (form, True, "asked for")
            assert all(s.form == form for s in made._legal())
        for path in PATHS:
            if path in paths:
                made = make(dtype=dtype, form=form, path=path)
                assert (made.form, made.path) == (form, path)
            else:
                with pytest.raises(Unsupported, match=f"path {path}: "):
                    make(dtype=dtype, form=form, path=path)


def test_forms_that_cannot_be():
    with pytest.raises(ValueError, match="form='three_kernel'.*'fused', 'two_kernel'"):
        make(form="three_kernel")
    with pytest.raises(ValueError, match="form='fused' contradicts path='torch'"):
        make(form="fused", path="torch")
    with pytest.raises(TypeError, match="form"):
        cutlass_sep.op.DepthwiseSeparableConv2d(*(torch.zeros(1, 1, 1, 1),) * 3, form="fused")
    with pytest.raises(Unsupported, match="float64"):
        make(dtype=torch.float64, form="two_kernel")
    pair = cutlass_sep.op.DepthwiseSeparableConv2d(*(torch.zeros(1, 1, 1, 1, device="meta"),) * 3, arch="sm_90a")
    assert pair.form is None
    with pytest.raises(ValueError, match="only the 1-D block has forms"):
        planner.plan(pair.problem, "sm_90a", form="fused")
    with pytest.raises(ValueError, match=r"form=\['fused'\] is unknown"):
        make(form=["fused"])


def test_what_kernels_cannot_count_has_none():
    """Schedules are made for a length that stands for all, which has no part in what an extent is too large for."""
    bf16 = {"device": "meta", "dtype": torch.bfloat16}
    one = torch.empty(1, 1, 1, **bf16)
    longest, longer = (torch.empty(1, 1, length, **bf16) for length in (2**28, 2**28 + 8))
    assert SeparableConvBlock1d(longest, one, one, one, arch="sm_90a").schedule is not None
    for options in ({}, {"form": "two_kernel"}, {"path": "portable"}):
        with pytest.raises(Unsupported, match="count in 32 bits"):
            SeparableConvBlock1d(longer, one, one, one, arch="sm_90a", **options)


def test_packed_weights_that_the_fused_form_cannot_count_run_in_two_kernels():
    problem = make(Block(n=1, c=32, e=2**24, l=1024, kernel=3)).problem  # 4 GiB of weights
    answer = cutlass_sep.supports(problem, "sm90", "sm_90a", "fused")
    assert not answer and "less than 2 GiB fit" in answer.reason
    assert planner.plan(problem, "sm_90a").form == "two_kernel"
    fits = replace(problem, e=2**21)
    geometry = block_schedule.FusedGeometry(fits, candidates(fits, "sm_90a", form="fused")[0].tile)
    assert 2**29 < geometry.workspace_bytes < 2**31


def test_supports_agrees_with_candidates_where_the_stand_in_does_not_fit():
    problem = make(Block(c=8, e=8, o=2**20, l=3, kernel=2, residual=False), layout="channels_last").problem
    for path in PATHS:
        for form in (None, *FORMS):
            answer = cutlass_sep.supports(problem, path, "sm_90a", form)
            assert bool(answer) == bool(planner.candidates(problem, "sm_90a", path, form))
            assert answer or answer.reason
    assert (planner.plan(problem, "sm_90a").path, planner.plan(problem, "sm_90a").form) == ("sm90", "two_kernel")


def test_schedule_asked_for():
    made = make()
    other = candidates(made.problem, "sm_90a", "sm90", "two_kernel")[1]
    for schedule in (other, json.loads(json.dumps(other.to_json()))):
        again = make(schedule=schedule)
        assert (again.schedule, again.form, again.reason) == (other, "two_kernel", "the schedule was given")
    with pytest.raises(ValueError, match="path='portable' contradicts the schedule, which is for path 'sm90'"):
        make(schedule=other, path="portable")
    with pytest.raises(ValueError, match="form='fused' contradicts the schedule, which is for form 'two_kernel'"):
        make(schedule=other, form="fused")
    with pytest.raises(Unsupported, match="this schedule cannot run on sm_80"):
        make(schedule=other, arch="sm_80")
    with pytest.raises(ValueError, match="path='sm100'"):
        make(path="sm100")


@pytest.mark.parametrize(
    ("slots", "part"),
    [
        ({"project_slots": 2}, "project_slots=2 must be an integer of at least 3"),
        ({"hidden_slots": 2}, "hidden_slots=2 must be an integer of at least 3"),
        ({"expand_slots": 1}, "expand_slots=1 must be an integer of at least 2"),
        ({"expand_slots": True}, "expand_slots=True must be an integer"),
        ({"tile_oc": 192}, "tile_oc=192 must be an integer of at least 256"),
        ({"tile_oc": "wide"}, "tile_oc='wide' must be an integer"),
        ({"hidden_slots": 40}, "bytes of shared memory"),
    ],
)
def test_rings_that_would_not_turn(slots: dict, part: str):
    made = make(dtype=torch.bfloat16, form="fused")
    with pytest.raises(Unsupported, match=re.escape(part)):
        make(dtype=torch.bfloat16, schedule=made.schedule.to_json() | {"tile": made.schedule.tile.to_json() | slots})


def test_nothing_falls_back():
    with pytest.raises(Unsupported, match="float64"):
        make(dtype=torch.float64)
    made = make(Block(), "cpu", path="torch")
    assert (made.path, made.form, made.schedule, made.tile_descriptions()) == ("torch", None, None, [])
    with pytest.raises(Unsupported, match="path torch"):
        made.compile()


def test_where_pytorch_is_faster_there_is_a_kernel_still(monkeypatch: pytest.MonkeyPatch):
    kernel = candidates(make().problem, "sm_90a")[1]
    monkeypatch.setattr(planner, "plan", lambda *args: planner.Plan("torch", None, "PyTorch is faster", kernel=kernel))
    made = make()
    assert made.schedule == kernel
    assert made.reason == "the best kernel, although path torch was planned: PyTorch is faster"


def test_tile_descriptions_map_back_to_schedules():
    made = make(form="two_kernel", path="sm90")
    tiles = made.tile_descriptions()
    schedules = candidates(made.problem, "sm_90a", "sm90", "two_kernel")
    keys = list(dict.fromkeys(tile_key(s.tile_description(made.problem)) for s in schedules))
    assert [tile_key(t) for t in tiles] == keys
    assert len(keys) > 1
    made._take(tiles[1])
    assert tile_key(made.schedule.tile_description(made.problem)) == keys[1]
    assert (made.form, made.schedule.form) == ("two_kernel", "two_kernel")


def test_copies_and_pickles():
    made = make()
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (copied.schedule, copied.form, copied.source) == (made.schedule, made.form, made.source)


# ---- run ----


class StandIn:
    """Launches of a kernel, through ATen."""

    def __init__(self, problem):
        self.problem, self.launches = problem, 0

    def launch(self, tensors: tuple, y: Tensor, addresses: list[int]) -> None:
        self.launches += 1
        for t in (tensors[0], y):
            assert t.data_ptr() % self.problem.alignment == 0
            assert (t if self.problem.layout == "contiguous" else t.transpose(1, 2)).is_contiguous()
        for t in tensors[1:]:
            assert t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)
        y.copy_(reference.separable_conv_block1d(*tensors, *BLOCK1D.options_of(self.problem)))


@pytest.fixture
def runnable(monkeypatch: pytest.MonkeyPatch):
    """Makes an op with a stand-in for its kernel, which takes CPU tensors."""
    monkeypatch.setattr(SeparableConvBlock1d, "_check_device", lambda self, device: None)

    def make_runnable(case: Block, **options) -> SeparableConvBlock1d:
        made = make(case, "cpu", **options)
        made._kernel = StandIn(made.problem)
        return made

    return make_runnable


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_run(runnable, layout: str):
    made = runnable(SMALL, layout=layout)
    tensors = SMALL.tensors(layout=layout, seed=1)
    y = made.run(*tensors)
    assert_output_close(SMALL, tensors, y)
    assert y.stride() == tensors[0].stride()
    out = torch.full_like(y, torch.nan)
    version = out._version
    assert made.run(*tensors, out=out) is out
    assert torch.equal(out, y)
    assert out._version > version
    leaf = tensors[0].clone(memory_format=torch.preserve_format).requires_grad_()
    assert not made.run(leaf, *tensors[1:]).requires_grad
    assert made.kernel.launches == 3


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_run_copies_what_a_kernel_cannot_read(runnable, layout: str):
    made = runnable(SMALL, layout=layout)
    assert made.problem.alignment == 16
    x, *parameters = SMALL.tensors(layout=layout)
    want = made.run(x, *parameters)
    shifted = torch.cat([x.new_zeros(1), torch.empty_like(x).flatten()])[1:].as_strided(x.shape, x.stride()).copy_(x)
    views = [shifted] if layout == "channels_last" else [shifted, torch.cat([x, x], 1)[:, :8]]
    for view in views:
        assert torch.equal(made.run(view, *parameters), want)
    for views in (odd(parameters), strided(parameters)):
        assert torch.equal(made.run(x, *views), want)
    out = torch.full((want.numel() + 1,), torch.nan)[1:].as_strided(want.shape, want.stride())
    assert made.run(x, *parameters, out=out) is out
    assert torch.equal(out, want)
    negated = [torch._neg_view(-t) for t in (x, *parameters)]
    assert torch.equal(made.run(*negated), want)


def test_run_unbatched_and_empty(runnable):
    x, *parameters = SMALL.tensors()
    made = SeparableConvBlock1d(x[0], *parameters, **SMALL.options, arch="sm_90a")
    made._kernel = StandIn(made.problem)
    y = made.run(x[0], *parameters)
    assert y.shape == (8, 16)
    assert torch.equal(made.run(x[0], *parameters, out=torch.empty_like(y)), y)
    with pytest.raises(ValueError, match="x has shape"):
        made.run(x[:1], *parameters)
    empty = runnable(Block(n=0, c=8, e=16))
    assert empty.run(x[:0], *parameters).shape == (0, 8, 16)
    assert empty.kernel.launches == 0


def test_run_takes_exactly_its_own_tensors(runnable):
    made = runnable(SMALL)
    x, *parameters = tensors = SMALL.tensors()
    y = made.run(*tensors)
    named = dict(zip(BLOCK1D.tensors, tensors, strict=True))
    assert torch.equal(made.run(**named), y)
    wrong = [
        ("x has shape", {"x": x[:1]}),
        ("x has shape", {"x": x[0]}),
        ("expand_weight has shape", {"expand_weight": parameters[0][:4]}),
        ("dw_weight has shape", {"dw_weight": parameters[1][..., :2]}),
        ("project_weight has shape", {"project_weight": parameters[2][:4]}),
        ("expand_bias is missing", {"expand_bias": None}),
        ("dtype torch.float16", {name: t.half() for name, t in named.items()}),
        ("x is channels_last", {"x": channels_last(x)}),
        ("out has shape", {"out": y[:1]}),
        ("out has dtype", {"out": y.double()}),
        ("out must be contiguous", {"out": channels_last(y)}),
        ("out overlaps x", {"out": x}),
    ]
    for match, change in wrong:
        with pytest.raises(ValueError, match=match):
            made.run(**named | change)
    with pytest.raises(TypeError, match="dw_bias must be a dense"):
        made.run(**named | {"dw_bias": "zeros"})
    with pytest.raises(ValueError, match="project_bias was given"):
        runnable(Block(c=8, e=16, project_bias=False)).run(*tensors)
    with pytest.raises(RuntimeError, match="cpu and meta"):
        made.run(**named | {"project_weight": parameters[2].to("meta")})


def test_run_needs_a_device_that_loads_the_cubin():
    made = make(SMALL, "cpu")
    with pytest.raises(RuntimeError, match="sm_90a.*cpu"):
        made.run(*SMALL.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_path_torch_runs_if_asked_for(device: str, dtype: torch.dtype):
    case = Block(kernel=4, dilation=2, residual=False, o=5)
    for layout in ("contiguous", "channels_last"):
        tensors = case.tensors(device, dtype, layout)
        made = SeparableConvBlock1d(*tensors, **case.options, path="torch", arch="sm_90a")
        y = made.run(*tensors)
        assert_output_close(case, tensors, y)
        assert (y if layout == "contiguous" else y.transpose(1, 2)).is_contiguous()
        assert torch.equal(made.run(*tensors, out=torch.empty_like(y)), y)


# ---- explain, supports, warmup, planner ----


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("built or launched")

    monkeypatch.setattr(kernels, "build", forbidden)
    monkeypatch.setenv("CUTLASS_SEP_ARCH", "sm_90a")


def test_explain(no_work):
    module = cutlass_sep.SeparableConvBlock1d(256, 512, 9, device="meta")
    tensors, made = LEAD.tensors("meta"), make()
    for f, args in ((made, ()), (module, tensors[:1]), (separable_conv_block1d, tensors)):
        explanation = cutlass_sep.explain(f, *args)
        assert (explanation.path, explanation.schedule) == (made.path, made.schedule)
        assert explanation.form == made.form is not None
        assert explanation.reason == made.reason
    cpu = cutlass_sep.explain(separable_conv_block1d, *Block().tensors())
    assert (cpu.path, cpu.schedule, cpu.form) == ("torch", None, None)
    assert "cpu" in cpu.reason
    forced = cutlass_sep.explain(make(form="two_kernel"))
    assert (forced.form, forced.reason) == ("two_kernel", "asked for")
    for match, args, kwargs in [
        ("project_weight", tensors[:3], {}),
        ("stride", tensors, {"stride": 2}),
        ("x must be a torch.Tensor, got NoneType", (None, *tensors[1:]), {}),
        ("dw_weight must be a torch.Tensor, got list", (*tensors[:2], [1.0], tensors[3]), {}),
    ]:
        with pytest.raises(TypeError, match=match):
            cutlass_sep.explain(separable_conv_block1d, *args, **kwargs)


def test_explain_reckons_with_autocast(no_work, monkeypatch: pytest.MonkeyPatch):
    """x of another dtype than autocast's is added behind the kernel, which then has no residual."""
    seen = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda problem, device: seen.append(problem) or choose(problem, device))
    x, *parameters = Block().tensors(layout="channels_last")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cutlass_sep.explain(separable_conv_block1d, x, *parameters)
        cutlass_sep.explain(separable_conv_block1d, x[0], *parameters)
        cutlass_sep.explain(separable_conv_block1d, x.bfloat16(), *parameters)
        cutlass_sep.explain(separable_conv_block1d, *(t.double() for t in (x, *parameters)))
        with pytest.raises(RuntimeError, match="project_weight must have 6 rows"):
            cutlass_sep.explain(separable_conv_block1d, *Block(o=5).tensors())
        with pytest.raises(TypeError, match="dw_weight must be a torch.Tensor, got list"):
            cutlass_sep.explain(separable_conv_block1d, x, parameters[0], [1.0], *parameters[2:])
    assert [(p.dtype, p.residual) for p in seen] == [
        ("bfloat16", False), ("bfloat16", False), ("bfloat16", True), ("float64", True),
    ]  # fmt: skip
    assert {p.layout for p in seen[:3]} == {"channels_last"}


def test_supports():
    made = make()
    for subject in (made, made.problem):
        for path in PATHS:
            for form in (None, *FORMS):
                answer = cutlass_sep.supports(subject, path, "sm_90a", form)
                assert isinstance(answer, Support)
                assert bool(answer) == bool(candidates(made.problem, "sm_90a", path, form))
                assert answer or answer.reason
        assert cutlass_sep.supports(subject, "torch", "sm_80")
        assert "forms" in cutlass_sep.supports(subject, "torch", "sm_80", "fused").reason
        assert "sm_80" in cutlass_sep.supports(subject, "sm90", "sm_80").reason
    with pytest.raises(ValueError, match="form='x'"):
        cutlass_sep.supports(made, "sm90", "sm_90a", "x")
    with pytest.raises(ValueError, match="path='sm70'"):
        cutlass_sep.supports(made, "sm70", "sm_90a")


def test_warmup_builds_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    built = []
    monkeypatch.setenv("CUTLASS_SEP_ARCH", "sm_90a")
    monkeypatch.setattr(kernels, "build", lambda source, arch, name: built.append((source, arch)))
    module = cutlass_sep.SeparableConvBlock1d(256, 512, 9, device="meta")
    cutlass_sep.warmup(module, LEAD.tensors("meta")[0])
    cutlass_sep.warmup(separable_conv_block1d, *LEAD.tensors("meta"))
    assert built == [(make().source, "sm_90a")] * 2
    with pytest.warns(RuntimeWarning, match="warmup builds nothing: tensors on cpu"):
        cutlass_sep.warmup(separable_conv_block1d, *Block().tensors())
    cutlass_sep.warmup(separable_conv_block1d, *Block(n=0).tensors("meta"))
    cutlass_sep.warmup(make(path="torch"))
    assert len(built) == 2


def test_the_planner_tells_the_estimate_of_every_path_and_form():
    problem = make(dtype=torch.bfloat16).problem
    plan = planner.plan(problem, "sm_90a")
    best = candidates(problem, "sm_90a")[0]
    assert (plan.schedule, plan.path, plan.form) == (best, best.path, best.form) == (best, "sm90", "fused")
    times = {best: f"path sm90 fused {block_schedule.estimate(problem, best, 'sm_90a'):.0f} us"}
    for path in ("sm90", "portable"):
        schedule = candidates(problem, "sm_90a", path, "two_kernel")[0]
        times[schedule] = f"path {path} two_kernel {block_schedule.estimate(problem, schedule, 'sm_90a'):.0f} us"
    three = torch_us(problem.expand) + torch_us(problem.project)
    assert plan.reason == f"estimates: {', '.join(times.values())}, PyTorch's three convolutions {three:.0f} us"


def test_the_planner_tells_which_form_cannot_run_and_why():
    refused = "path sm90 fused cannot run it (a halo of 30 positions makes windows of 96: at most 80)"
    reason = planner.plan(make(replace(LEAD, kernel=31)).problem, "sm_90a").reason
    assert reason.endswith(f"; {refused}") and "path sm90 two_kernel" in reason
    # Where the path is none, its forms are none: said once. Path portable has but one form.
    reason = planner.plan(make().problem, "sm_80").reason
    assert "fused" not in reason and reason.count("cannot run it") == reason.count("path sm90 cannot run it") == 1


def test_the_planner_takes_pytorch_where_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch):
    problem = make().problem
    monkeypatch.setattr(planner, "torch_us", lambda half: 1.0)
    plan = planner.plan.__wrapped__(problem, "sm_90a")
    assert (plan.path, plan.schedule, plan.form) == ("torch", None, None)
    assert "PyTorch's three convolutions 2 us" in plan.reason


def test_few_kernels_for_many_lengths():
    """L = 1..500 in every layout and alignment is at most 4 sources a layer."""
    for layout in ("contiguous", "channels_last"):
        sources = set()
        for length in range(1, 500, 7):
            made = make(Block(n=4, c=64, e=128, l=length), dtype=torch.bfloat16, layout=layout)
            sources.add(made.source)
        assert len(sources) <= 4


def test_the_op_module_has_both_operators():
    assert op.SeparableConvBlock1d._operator is BLOCK1D
    assert issubclass(op.DepthwiseSeparableConv2d, op.Operation)
