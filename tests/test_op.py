"""Emit and run, explain, supports and warmup, as far as no GPU is needed; launches are in tests/gpu."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from separable import Case, assert_output_close
from subjects import odd, strided
from torch import Tensor

import cutlass_sep
from cutlass_sep import Unsupported, arch, dispatch, explain, planner, reference
from cutlass_sep import kernel as kernels
from cutlass_sep.functional import depthwise_separable_conv2d
from cutlass_sep.op import DepthwiseSeparableConv2d, _overlap
from cutlass_sep.operators import SEPARABLE2D
from cutlass_sep.schedule import PATHS, Support, candidates, tile_key

LEAD = Case(n=16, c=64, o=128, h=512, w=512, dw_bias=False, pw_bias=False)


def make(case: Case = LEAD, device: str = "meta", dtype=torch.float32, layout="contiguous", **options):
    options = {"arch": "sm_90a"} | options
    return DepthwiseSeparableConv2d(*case.tensors(device, dtype, layout), **case.options, **options)


def test_emits_from_meta_tensors():
    op = make()
    assert (op.path, op.arch, op.schedule.path) == ("sm90", "sm_90a", "sm90")
    assert 'extern "C" __global__' in op.source
    assert op.source == make().source


def test_source_does_not_depend_on_batch_and_extent():
    other = Case(n=3, c=64, o=128, h=64, w=128, dw_bias=False, pw_bias=False)
    op = make()
    assert make(other, schedule=op.schedule).source == op.source
    assert make(other, dtype=torch.float16, path="sm90").source != op.source


def test_arch_of_emit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUTLASS_SEP_ARCH", "sm_80")
    assert DepthwiseSeparableConv2d(*LEAD.tensors("meta"), padding=1, path="torch").arch == "sm_80"
    assert make().arch == "sm_90a"
    with pytest.raises(ValueError, match="arch='sm_70'.*sm_80"):
        make(arch="sm_70")
    monkeypatch.delenv("CUTLASS_SEP_ARCH")
    assert arch.default() in arch.ARCHS


def test_path_and_schedule_asked_for():
    op = make()
    assert make(path="sm90").path == "sm90"
    other = candidates(op.problem, "sm_90a", "sm90")[1]
    for schedule in (other, other.to_json()):
        assert make(schedule=schedule).schedule == other
    with pytest.raises(ValueError, match="contradicts"):
        make(schedule=other, path="portable")
    with pytest.raises(ValueError, match="path='sm100'"):
        make(path="sm100")
    illegal = other.to_json() | {"row_slots": 1}
    with pytest.raises(Unsupported, match="row"):
        make(schedule=illegal)
    with pytest.raises(Unsupported, match="sm_90a"):
        make(path="sm90", arch="sm_80")
    with pytest.raises(Unsupported, match="16-byte"):
        make(Case(w=13), path="sm90")


def test_nothing_falls_back():
    with pytest.raises(Unsupported, match="float64"):
        make(dtype=torch.float64)
    op = make(Case(), "cpu", path="torch")
    assert (op.path, op.schedule, op.tile_descriptions()) == ("torch", None, [])
    for attribute in ("source", "kernel"):
        with pytest.raises(Unsupported, match="path torch"):
            getattr(op, attribute)
    with pytest.raises(Unsupported, match="path torch"):
        op.compile()


def test_errors_of_a_call_are_those_of_the_function():
    x, dw_weight, pw_weight, *_ = Case().tensors("meta")
    with pytest.raises(RuntimeError, match="pw_weight"):
        DepthwiseSeparableConv2d(x, dw_weight, pw_weight[:, :4])
    with pytest.raises(TypeError, match="int32"):
        DepthwiseSeparableConv2d(x.int(), dw_weight.int(), pw_weight.int())


def test_tile_descriptions_map_back_to_schedules():
    op = make()
    tiles = op.tile_descriptions()
    schedules = candidates(op.problem, "sm_90a", "sm90")
    assert tile_key(tiles[0]) == tile_key(schedules[0].tile_description(op.problem))
    assert len(tiles) == len(schedules) > 1
    shapes = {tuple(t.threadblock_shape) for t in tiles}
    other = next(t for t in tiles if tuple(t.threadblock_shape) != tuple(tiles[0].threadblock_shape))
    op._take(other)
    assert tile_key(op.schedule.tile_description(op.problem)) == tile_key(other)
    assert op.source != make().source
    other.stages = 1000
    with pytest.raises(ValueError, match="tile_description.*1000"):
        op.compile(other)
    assert len(shapes) > 1
    other.math_instruction = None
    for nothing in (other, op.schedule, 0, "first"):
        with pytest.raises(TypeError, match="tile_description must be"):
            op.compile(nothing)


def test_each_tile_description_is_there_once():
    """Else compile() could not know which of two schedules is meant."""
    op = make(Case(n=2, c=64, o=128, h=32, w=32), path="portable")
    schedules = candidates(op.problem, op.arch, "portable")
    keys = [tile_key(s.tile_description(op.problem)) for s in schedules]
    assert len(set(keys)) < len(keys)
    assert [tile_key(t) for t in op.tile_descriptions()] == list(dict.fromkeys(keys))
    for tile in op.tile_descriptions():
        op._take(tile)
        assert op.schedule == schedules[keys.index(tile_key(tile))]


def test_the_schedule_an_op_was_made_with_stands_for_its_tile():
    """Else compile() of an op's own tile would change the schedule that was given or tuned."""
    problem = make(path="sm90").problem
    schedules = candidates(problem, "sm_90a", "sm90")
    own = replace(schedules[1], row_slots=schedules[1].row_slots - 1)
    assert own not in schedules
    op = make(schedule=own)
    tiles = [tile_key(t) for t in op.tile_descriptions()]
    assert tiles[0] == tile_key(own.tile_description(problem)) and len(tiles) == len(set(tiles)) > 1
    for tile, taken in ((schedules[0], schedules[0]), (own, own)):
        op._take(tile.tile_description(problem))
        assert (op.schedule, op.reason) == (taken, "the tile description was given")


def test_what_a_tile_description_does_not_hold_is_chosen_by_the_schedule():
    make_it = functools.partial(make, dtype=torch.bfloat16, layout="channels_last")
    op = make_it(path="sm90")
    legal = planner.candidates(op.problem, op.arch, op.path, op.form)
    keys = [tile_key(s.tile_description(op.problem)) for s in legal]
    better, other = next(
        (a, b) for a, b in itertools.combinations(range(len(legal)), 2)
        if keys[a] == keys[b] and legal[a].mma_q != legal[b].mma_q
    )  # fmt: skip
    op._take(legal[other].tile_description(op.problem))
    assert op.schedule == legal[better]
    for schedule in (legal[other], legal[other].to_json()):
        made = make_it(schedule=schedule)
        assert made.schedule == legal[other] and tile_key(made.tile_descriptions()[0]) == keys[better]
        assert made.source != op.source
    with pytest.raises(Unsupported, match="this schedule cannot run on sm_90a: .* bytes of shared memory"):
        make_it(schedule=legal[other].to_json() | {"row_slots": 99})


def test_another_tile_is_not_tuned(monkeypatch):
    op = make()
    monkeypatch.setattr(op, "_chosen", replace(op._chosen, tuned=True))
    assert op.tuned and explain(op).tuned
    other = next(t for t in op.tile_descriptions() if tile_key(t) != tile_key(op.tile_descriptions()[0]))
    op._take(other)
    assert not op.tuned and not explain(op).tuned


def test_copies_and_pickles_leave_the_loaded_kernel_behind():
    op = make()
    op.kernel._launchers[0] = open  # as the driver's handles, it belongs to this process
    for copied in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert (copied.schedule, copied.source) == (op.schedule, op.source)
        assert not copied.kernel._launchers
    assert op.kernel._launchers


def test_compile_and_its_cache(tmp_path, monkeypatch: pytest.MonkeyPatch):
    from cutlass_sep import cache, compiler

    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path))
    compiler._memory.clear()
    cache._store.cache_clear()
    case = Case(c=64, o=64, w=32)
    first = make(case).compile()
    assert first.cubin[:4] == b"\x7fELF"
    assert not first.cache_hit
    assert first.build_seconds > 0
    assert first.resources
    for used in first.resources.values():
        assert used.registers > 0
        assert used.spill_bytes == 0
    again = make(case).compile()
    assert again.cache_hit
    assert again.cubin == first.cubin
    cache._store.cache_clear()


# ---- run ----


class StandIn:
    """Launches of a kernel, through ATen."""

    def __init__(self, problem):
        self.problem, self.launches = problem, 0

    def launch(self, tensors: tuple, y: Tensor, addresses: list[int]) -> None:
        p = self.problem
        self.launches += 1
        for t in (tensors[0], y):
            assert t.data_ptr() % p.alignment == 0
        for t in tensors[1:]:
            assert t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)
        assert not any(t is not None and t.is_neg() for t in (*tensors, y))
        assert addresses == [0 if t is None else t.data_ptr() for t in tensors]
        y.copy_(
            cutlass_sep.reference.depthwise_separable_conv2d(
                *tensors, p.stride, p.padding, p.dilation, p.mid_activation, p.activation, "ieee"
            )
        )


@pytest.fixture
def runnable(monkeypatch: pytest.MonkeyPatch):
    """Makes an op with a stand-in for its kernel, which takes CPU tensors."""
    monkeypatch.setattr(DepthwiseSeparableConv2d, "_check_device", lambda self, device: None)

    def make_runnable(case: Case, **options) -> DepthwiseSeparableConv2d:
        op = make(case, "cpu", **options)
        op._kernel = StandIn(op.problem)
        return op

    return make_runnable


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_run(runnable, layout: str):
    case = Case(mid_activation="relu6", activation="silu", w=32)
    op = runnable(case, layout=layout)
    tensors = case.tensors(layout=layout, seed=1)
    y = op.run(*tensors)
    assert_output_close(case, tensors, y)
    out = torch.full_like(y, torch.nan)
    version = out._version
    assert op.run(*tensors, out=out) is out
    assert torch.equal(out, y)
    assert out._version > version
    leaf = tensors[0].clone(memory_format=torch.preserve_format).requires_grad_()
    assert not op.run(leaf, *tensors[1:]).requires_grad
    assert op.kernel.launches == 3


def test_run_copies_what_a_kernel_cannot_read(runnable):
    case = Case(w=32)
    op = runnable(case)
    assert op.problem.alignment == 16
    x, *parameters = case.tensors()
    want = op.run(x, *parameters)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    sliced = torch.cat([x, x], 1)[:, :8]
    for view in (shifted, sliced):
        assert torch.equal(op.run(view, *parameters), want)
    for views in (odd(parameters), strided(parameters)):
        assert torch.equal(op.run(x, *views), want)
    out = torch.full((want.numel() + 1,), torch.nan)[1:].view(want.shape)
    assert op.run(x, *parameters, out=out) is out
    assert torch.equal(out, want)


def test_run_resolves_negated_views(runnable):
    case = Case(w=32)
    op = runnable(case)
    tensors = case.tensors()
    want = op.run(*tensors)
    negated = [torch._neg_view(-t) for t in tensors]
    assert all(t.is_neg() for t in negated)
    assert torch.equal(op.run(*negated), want)
    out = torch._neg_view(torch.empty_like(want))
    assert op.run(*tensors, out=out) is out
    assert torch.equal(out, want)


def test_run_unbatched_and_empty(runnable):
    case = Case(w=32)
    x, *parameters = case.tensors()
    op = DepthwiseSeparableConv2d(x[0], *parameters, **case.options, arch="sm_90a")
    op._kernel = StandIn(op.problem)
    y = op.run(x[0], *parameters)
    assert y.shape == (16, 10, 32)
    assert torch.equal(op.run(x[0], *parameters, out=torch.empty_like(y)), y)
    with pytest.raises(ValueError, match="x has shape"):
        op.run(x[:1], *parameters)
    empty = runnable(Case(n=0, w=32))
    assert empty.run(x[:0], *parameters).shape == (0, 16, 10, 32)
    assert empty.kernel.launches == 0


def test_run_takes_exactly_its_own_tensors(runnable):
    case = Case(w=32)
    op = runnable(case)
    x, dw_weight, pw_weight, dw_bias, pw_bias = tensors = case.tensors()
    y = op.run(*tensors)
    wrong = [
        ("x has shape", (x[:1], *tensors[1:]), {}),
        ("dw_weight has shape", (x, dw_weight[..., :2], pw_weight, dw_bias, pw_bias), {}),
        ("dw_bias is missing", (x, dw_weight, pw_weight, None, pw_bias), {}),
        ("dtype torch.float16", tuple(t.half() for t in tensors), {}),
        ("x is channels_last", (x.contiguous(memory_format=torch.channels_last), *tensors[1:]), {}),
        ("out has shape", tensors, {"out": y[:1]}),
        ("out has dtype", tensors, {"out": y.double()}),
        ("out must be contiguous", tensors, {"out": y.contiguous(memory_format=torch.channels_last)}),
    ]
    for match, call, options in wrong:
        with pytest.raises(ValueError, match=match):
            op.run(*call, **options)
    for name, value in (("x", x.to_sparse()), ("x", x.tolist()), ("pw_bias", "zeros")):
        call = [value if n == name else t for n, t in zip(SEPARABLE2D.tensors, tensors, strict=True)]
        with pytest.raises(TypeError, match=f"{name} must be a dense"):
            op.run(*call)
    with pytest.raises(TypeError, match="out must be a dense"):
        op.run(*tensors, out=[y])
    with pytest.raises(ValueError, match="dw_bias was given"):
        runnable(Case(w=32, dw_bias=False)).run(*tensors)
    with pytest.raises(RuntimeError, match="cpu and meta"):
        op.run(x, dw_weight.to("meta"), *tensors[2:])
    with pytest.raises(RuntimeError, match="cpu and meta"):
        op.run(*tensors, out=y.to("meta"))
    storage = torch.empty(x.numel() + y.numel())
    inside, out = storage[: x.numel()].view(x.shape).copy_(x), storage[-y.numel() :].view(y.shape)
    assert torch.equal(op.run(inside, *tensors[1:], out=out), y)
    with pytest.raises(ValueError, match="out overlaps x"):
        op.run(inside, *tensors[1:], out=storage[x.numel() - 8 :][: y.numel()].view(y.shape))


def test_overlap():
    t = torch.zeros(100)
    assert _overlap(t[:10], t[9:20])
    assert not _overlap(t[:10], t[10:20])
    assert _overlap(t[:50:7], t[49:])
    assert not _overlap(t[:50:7], t[50:])
    assert not _overlap(t[5:5], t)


def test_run_needs_a_device_that_loads_the_cubin():
    op = make(Case(w=32), "cpu")
    with pytest.raises(RuntimeError, match="sm_90a.*cpu"):
        op.run(*Case(w=32).tensors())
    assert op._kernel is None  # nothing was built for it


def test_run_names_gpu_and_architecture(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    op = make(Case(w=32), "cpu")
    with pytest.raises(RuntimeError, match="sm_90a.*cuda:0.*8.6"):
        op._check_device(torch.device("cuda:0"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_path_torch_runs_if_asked_for(device: str, dtype: torch.dtype):
    case = Case(kernel=(2, 3), padding="same", mid_activation="gelu")
    tensors = case.tensors(device, dtype)
    op = DepthwiseSeparableConv2d(*tensors, **case.options, path="torch", arch="sm_90a")
    y = op.run(*tensors)
    assert_output_close(case, tensors, y)
    out = torch.empty_like(y)
    assert torch.equal(op.run(*tensors, out=out), y)


# ---- explain, supports, warmup ----


def test_supports():
    op = make()
    for subject in (op, op.problem):
        assert cutlass_sep.supports(subject, "sm90", "sm_90a")
        refused = cutlass_sep.supports(subject, "sm90", "sm_80")
        assert not refused
        assert "sm_80" in refused.reason
        assert cutlass_sep.supports(subject, "torch", "sm_80")
        for path in PATHS:
            assert isinstance(cutlass_sep.supports(subject, path, "sm_90a"), Support)
    with pytest.raises(ValueError, match="path='sm70'"):
        cutlass_sep.supports(op, "sm70", "sm_90a")
    for path in ("torch", *PATHS):
        with pytest.raises(ValueError, match="arch='sm_1'"):
            cutlass_sep.supports(op, path, "sm_1")
        with pytest.raises(TypeError, match="op_or_problem must be"):
            cutlass_sep.supports(torch.zeros(1), path, "sm_90a")


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("built or launched")

    monkeypatch.setattr(kernels, "build", forbidden)
    monkeypatch.setattr(kernels.Kernel, "launch", forbidden)
    monkeypatch.setenv("CUTLASS_SEP_ARCH", "sm_90a")


def test_explain(no_work):
    module = cutlass_sep.DepthwiseSeparableConv2d(64, 128, 3, padding=1, device="meta")
    x = LEAD.tensors("meta")[0]
    op = make()
    calls = [
        (op,),
        (module, x),
        (depthwise_separable_conv2d, *LEAD.tensors("meta")),
    ]
    kwargs = [{}, {}, {"padding": 1}]
    for call, options in zip(calls, kwargs, strict=True):
        explanation = cutlass_sep.explain(*call, **options)
        assert (explanation.path, explanation.schedule, explanation.form) == ("sm90", op.schedule, None)
        assert explanation.reason
    named = dict(zip(("x", "dw_weight", "pw_weight"), LEAD.tensors("meta"), strict=False))
    assert cutlass_sep.explain(depthwise_separable_conv2d, **named, padding=1).schedule == op.schedule
    cpu = cutlass_sep.explain(depthwise_separable_conv2d, *Case().tensors())
    assert (cpu.path, cpu.schedule) == ("torch", None)
    assert "cpu" in cpu.reason
    assert "float64" in cutlass_sep.explain(depthwise_separable_conv2d, *Case().tensors("meta", torch.float64)).reason
    assert "empty" in cutlass_sep.explain(depthwise_separable_conv2d, *Case(n=0).tensors("meta")).reason
    with pytest.raises(TypeError, match="f must be"):
        cutlass_sep.explain(torch.relu, x)
    with pytest.raises(RuntimeError, match="pw_weight"):
        cutlass_sep.explain(depthwise_separable_conv2d, *LEAD.tensors("meta")[:2], torch.zeros(1, device="meta"))


@pytest.mark.parametrize("f", [cutlass_sep.explain, cutlass_sep.warmup])
def test_explain_and_warmup_take_the_arguments_of_the_call(f, no_work):
    tensors = LEAD.tensors("meta")
    module = cutlass_sep.DepthwiseSeparableConv2d(64, 128, 3, device="meta")
    calls = [
        ("x", (), {}),
        ("pw_weight", tensors[:2], {}),
        ("too many", (*tensors, 1), {}),
        ("'x'", tensors, {"x": tensors[0]}),
        ("groups", tensors, {"groups": 64}),
        ("x must be a torch.Tensor, got NoneType", (None, *tensors[1:]), {}),
        ("pw_weight must be a torch.Tensor, got list", (*tensors[:2], [1.0]), {}),
    ]
    for match, args, kwargs in calls:
        with pytest.raises(TypeError, match=match):
            f(depthwise_separable_conv2d, *args, **kwargs)
    with pytest.raises(TypeError, match="x must be a torch.Tensor, got NoneType"):
        f(module, None)


def test_explain_reckons_with_autocast(no_work, monkeypatch: pytest.MonkeyPatch):
    seen = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda problem, device: seen.append(problem) or choose(problem, device))
    x, *parameters = Case().tensors(layout="channels_last")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cutlass_sep.explain(depthwise_separable_conv2d, x, *parameters, padding=1)
        cutlass_sep.explain(depthwise_separable_conv2d, x.half(), *parameters, padding=1)
        cutlass_sep.explain(depthwise_separable_conv2d, *(t.double() for t in (x, *parameters)), padding=1)
    assert [p.dtype for p in seen] == ["bfloat16", "bfloat16", "float64"]
    assert {p.layout for p in seen[:2]} == {"channels_last"}


def test_warmup_builds_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    built = []
    monkeypatch.setenv("CUTLASS_SEP_ARCH", "sm_90a")
    monkeypatch.setattr(kernels, "build", lambda source, arch, name: built.append((source, arch)))
    module = cutlass_sep.DepthwiseSeparableConv2d(64, 128, 3, padding=1, device="meta")
    cutlass_sep.warmup(module, LEAD.tensors("meta")[0])
    cutlass_sep.warmup(depthwise_separable_conv2d, *LEAD.tensors("meta"), padding=1)
    assert built == [(make().source, "sm_90a")] * 2
    with pytest.raises(TypeError, match="f must be"):
        cutlass_sep.warmup(len, [])


def test_warmup_says_when_there_is_nothing_to_build(no_work, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "cutlass_sep")
    hooked = cutlass_sep.DepthwiseSeparableConv2d(8, 8, 3)
    hooked.depthwise.register_forward_hook(lambda *_: None)
    for f, args, reason in (
        (depthwise_separable_conv2d, Case(n=0).tensors("meta"), "the batch is empty: nothing is launched"),
        (depthwise_separable_conv2d, Case().tensors("meta", torch.float64), "float64 runs through ATen"),
        (hooked, (torch.zeros(1, 8, 9, 9),), hooked.plain_reason()),
        (make(path="torch"), (), "asked for"),
    ):
        caplog.clear()
        cutlass_sep.warmup(f, *args)
        assert caplog.messages == [f"warmup builds nothing: {reason}"]
    caplog.clear()
    with pytest.warns(RuntimeWarning) as caught:  # by default seen, unlike what is logged
        cutlass_sep.warmup(depthwise_separable_conv2d, *Case().tensors())
    assert [(str(w.message), w.filename) for w in caught] == [
        (
            "warmup builds nothing: tensors on cpu run through ATen; "
            "x must be on a CUDA device, or on 'meta' to build ahead of it",
            __file__,
        )
    ]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("kernel", "dilation", "element_size", "contiguous"),
    [
        ((3, 3), (1, 1), 2, False), ((3, 3), (1, 2), 2, True), ((3, 3), (2, 1), 4, True), ((1, 64), (1, 1), 4, False),
        ((1, 75), (1, 1), 4, True), ((1, 75), (1, 1), 2, False), ((31, 31), (1, 1), 2, True),
    ],
)  # fmt: skip
def test_path_torch_knows_which_depthwise_convolutions_are_slow_in_channels_last(
    kernel, dilation, element_size, contiguous
):
    assert reference.depthwise_contiguous(kernel, dilation, element_size) is contiguous
