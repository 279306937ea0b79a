"""Failures that users of such libraries met in public: the rows of the collection that concern this operator, on a GPU.

`HELD` says where a row is tested if not by a test of its own name here. Rows of the compiler and the cache are held by
tests/test_compiler.py and tests/test_cache.py, those of the command line by tests/test_bench.py and tests/test_cli.py.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import cutlass_sep
from cutlass_sep import cache, compiler, dispatch, kernel, op, planner
from cutlass_sep.bench.inputs import options
from cutlass_sep.functional import depthwise_separable_conv2d
from cutlass_sep.problem import SeparableConv2dProblem
from cutlass_sep.schedule import supports

from . import accuracy
from .calls import Tensors, describe, draw, embed, make_op, make_problem

HELD = {
    "F01": "test_borrowed.py::test_functional_gradients_of_any_stride",
    "F09": "test_borrowed.py::test_functional_nan_and_inf_stay_in_their_receptive_field",
    "F10": "test_borrowed.py::test_functional_opcheck",
    "F11": "test_borrowed.py::test_functional_autocast",
    "F15": "test_numerics.py::test_F15_only_the_call_decides_about_tf32",
    "F18": "test_borrowed.py::test_functional_same_puts_the_odd_pixel_right_and_below",
    "F24": "test_borrowed.py::test_functional_gelu_is_erf_and_gelu_tanh_is_tanh",
    "F28": "test_borrowed.py::test_functional_unbatched",
    "F29": "test_borrowed.py::test_functional_exactly_the_gradients_asked_for",
}

pytestmark = pytest.mark.usefixtures("fused")
GIB = 1 << 30


def call(problem: SeparableConv2dProblem, tensors: Tensors) -> Tensor:
    return depthwise_separable_conv2d(*tensors, **options(problem))


def check_gradients(problem: SeparableConv2dProblem, tensors: Tensors, grad: Tensor) -> None:
    """||g - g64|| <= 2 n u ||g64|| for each tensor, n the length of the longest sum and u of the tensors' dtype."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    wanted = [t for t in leaves if t is not None]
    got = torch.autograd.grad(call(problem, leaves), wanted, grad)
    want = torch.autograd.grad(accuracy.exact(problem, doubles), [t for t in doubles if t is not None], grad.double())
    longest = max(problem.n * problem.p * problem.q, problem.o * math.prod(problem.kernel))
    for g, g64 in zip(got, want, strict=True):
        error = (g.double() - g64).norm() / g64.norm()
        assert error <= 2 * longest * accuracy.UNIT["float32"], f"gradient off by {error:.3g}\n{describe(problem)}"


def context_is_alive(device: torch.device) -> None:
    """An illegal access would stay with the process and show in any later call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert torch.ones(1, device=device).item() == 1


@pytest.mark.parametrize("variant", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_F02_any_storage_offset(machine, generator, variant: str, layout: str, offset: int):
    problem = make_problem(variant, layout, c=16, o=32)
    tensors = tuple(embed(t, offset) for t in draw(problem, generator))
    accuracy.judge(problem, tensors, call(problem, tensors), f"offset of {offset} elements")
    # One flat buffer of all parameters, as an optimizer or a sharded model makes it.
    parameters = tensors[1:]
    flat = embed(torch.cat([t.flatten() for t in parameters]), offset)
    views = [v.view(t.shape) for v, t in zip(flat.split([t.numel() for t in parameters]), parameters, strict=True)]
    accuracy.judge(problem, tensors, call(problem, (tensors[0], *views)), "parameters in one buffer")
    if variant == "fp32":
        grad = embed(torch.randn(2, 32, 16, 16, generator=generator, device=machine.device), offset)
        check_gradients(problem, tensors, grad)
    context_is_alive(machine.device)


def test_F04_two_devices(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one CUDA device only")
    problem = make_problem("fp32")
    assert torch.cuda.current_device() == 0
    for index in (1, 0, 1):
        generator = torch.Generator(torch.device("cuda", index)).manual_seed(index)
        tensors = draw(problem, generator)
        y = call(problem, tensors)
        assert y.device.index == index
        assert torch.cuda.current_device() == 0
        accuracy.judge(problem, tensors, y)
        check_gradients(problem, tensors, torch.ones_like(y))
    with pytest.raises(RuntimeError, match="cuda:1.*cuda:0|cuda:0.*cuda:1"):
        call(problem, (tensors[0], *(t.to("cuda:0") for t in tensors[1:])))


def _nhwc_permuted(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nhwc_permuted": (_nhwc_permuted, True),
    "every_second_pixel": (lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, ::2, ::2], False),
    "some_channels": (lambda x: torch.cat([x, x, x], 1)[:, 3 : 3 + x.shape[1]], False),
    "one_image_expanded": (lambda x: x[:1].expand(x.shape), False),
    "transposed": (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), False),
    "flipped_batch_of_nhwc": (lambda x: _nhwc_permuted(torch.cat([x, x]))[::2], False),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("variant", ["fp32", "bf16"])
def test_F05_views(machine, generator, variant: str, view: str):
    make, channels_last = VIEWS[view]
    problem = make_problem(variant, "channels_last" if channels_last else "contiguous")
    tensors = draw(make_problem(variant), generator)
    tensors = (make(tensors[0]), *tensors[1:])
    y = call(problem, tensors)
    accuracy.judge(problem, tensors, y, view)
    assert y.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    if variant == "fp32":
        check_gradients(problem, tensors, torch.randn(y.shape, generator=generator, device=machine.device))


def test_F07_a_cubin_that_does_not_load_is_built_again(gpu, generator, tmp_path, monkeypatch, caplog, may_compile):
    """The entry is whole, so no checksum tells; the driver does."""
    problem = make_problem("fp32")
    tensors = draw(problem, generator)
    before = make_op(problem, kernel.archs.of_device(gpu.index))
    key, tag = before.kernel.cubin.key, f"{before.kernel.name}-{before.arch}"
    meta = cache.store().load(key, tag)[1]
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path))
    cache.store().save(key, tag, b"\x7fELF, but no more", meta)
    with compiler._lock:
        compiler._memory.clear()
    kernel.clear_memory()
    dispatch.clear()
    with caplog.at_level("WARNING", logger="cutlass_sep"):
        accuracy.judge(problem, tensors, call(problem, tensors))
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    assert cache.store().load(key, tag)[0].startswith(b"\x7fELF\x02"), "the entry is a cubin again"
    context_is_alive(gpu)


@pytest.fixture
def may_compile(request: pytest.FixtureRequest) -> Iterator[None]:
    """What this test compiles does not count against --expect-no-builds."""
    from .conftest import _key

    compiled = request.config.stash[_key].compiled
    before = len(compiled)
    yield
    del compiled[before:]


def _variants() -> list[SeparableConv2dProblem]:
    """One shape in every way that must not share a kernel with another."""
    return [
        *(
            make_problem(v, layout)
            for v in ("fp32", "fp16", "bf16", "tf32")
            for layout in ("contiguous", "channels_last")
        ),
        make_problem(dw_bias=False),
        make_problem(pw_bias=False),
        make_problem(dw_bias=False, pw_bias=False),
        make_problem(mid_activation="gelu"),
        make_problem(mid_activation="gelu_tanh"),
        make_problem(activation="gelu"),
        make_problem(stride=2),
        make_problem(dilation=2, padding=2),
        make_problem(padding=0),
        make_problem(w=15),
    ]


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_F12_no_kernel_is_taken_for_another(machine, generator, order: str):
    kernel.clear_memory()
    problems = _variants()
    for problem in problems if order == "forwards" else reversed(problems):
        tensors = draw(problem, generator)
        accuracy.judge(problem, tensors, call(problem, tensors), order)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_F13_an_empty_batch_launches_and_builds_nothing(machine, generator, monkeypatch, layout: str):
    def forbidden(*args, **kwargs):
        raise AssertionError("an empty batch needs no kernel")

    monkeypatch.setattr(kernel.Kernel, "launch", forbidden)
    monkeypatch.setattr(compiler, "build", forbidden)
    problem = make_problem("fp32", layout, c=32, o=8, h=5, w=5, kernel=2)
    x, *parameters = draw(problem, generator)
    leaves = [t.detach().requires_grad_() for t in (x[:0], *parameters)]
    y = call(problem, leaves)
    assert tuple(y.shape) == (0, 8, 6, 6)
    y.sum().backward()
    assert tuple(leaves[0].grad.shape) == (0, 32, 5, 5)
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in leaves[1:])
    with pytest.raises(RuntimeError, match="height"):
        call(problem, (torch.zeros(2, 32, 0, 5, device=machine.device), *parameters))


LARGE = {
    "input and output": make_problem("fp16", n=1, c=2, h=32800, w=32800, o=2),
    "only the output": make_problem("fp16", n=1, c=1, h=32768, w=32768, o=3),
    "channels_last": make_problem("fp16", "channels_last", n=1, c=8, h=16400, w=16400, o=8),
    "batch": make_problem("bf16", n=2100, c=16, h=256, w=256, o=16),
}


@pytest.mark.parametrize("path", ["sm90", "portable"])
@pytest.mark.parametrize("name", LARGE)
def test_F16_more_than_2_31_elements(machine, generator, name: str, path: str):
    p = problem = LARGE[name]
    if not (support := supports(problem, path, machine.arch)):
        pytest.skip(f"path {path}: {support.reason}")
    machine.needs_gpu(problem, path=path)
    memory = torch.cuda.get_device_properties(machine.device).total_memory
    if memory < 40 * GIB:
        pytest.skip(f"needs 40 GiB of GPU memory, this one has {memory / GIB:.0f}")
    assert max(p.n * p.c * p.h * p.w, p.n * p.o * p.p * p.q) > 2**31
    _, *parameters = draw(make_problem("fp16" if p.dtype == "float16" else "bf16", c=p.c, o=p.o), generator)
    form = torch.channels_last if p.layout == "channels_last" else torch.contiguous_format
    dtype = getattr(torch, p.dtype)
    x = torch.empty((p.n, p.c, p.h, p.w), dtype=dtype, device=machine.device, memory_format=form).normal_(
        generator=generator
    )
    out = torch.empty((p.n, p.o, p.p, p.q), dtype=dtype, device=machine.device, memory_format=form).fill_(math.nan)
    operator = op.DepthwiseSeparableConv2d(x, *parameters, **options(p), path=path, arch=machine.arch)
    operator.run(x, *parameters, out=out)
    assert not out.isnan().any(), "some of y was not written"
    # Bands of rows at both ends and around where 31 bits end, each from a copy of the rows of x under it.
    middle = 2**31 // (p.c * p.h * p.w) if p.n > 1 else 0
    pitches = {p.q, p.q * p.c, p.q * p.o}  # elements between rows, on either layout
    rows = [0, p.p - 8, *(limit // pitch % p.p for limit in (2**30, 2**31) for pitch in pitches if p.n == 1)]
    for image in sorted({0, middle, p.n - 1}):
        for first in sorted({max(0, min(r - 4, p.p - 8)) for r in rows}):
            _check_band(p, x, parameters, out, image, first, first + 8)
    del x, out
    torch.cuda.empty_cache()


def _check_band(p: SeparableConv2dProblem, x: Tensor, parameters, y: Tensor, image: int, first: int, last: int) -> None:
    """Rows [first, last) of one image of a 3x3, padding 1 problem."""
    top, bottom = max(first - 1, 0), min(last + 1, p.h)
    band = x[image : image + 1, :, top:bottom].contiguous()
    part = make_problem(
        "fp16" if p.dtype == "float16" else "bf16", n=1, c=p.c, h=bottom - top, w=p.w, o=p.o, padding=1
    )  # fmt: skip
    want, bound = accuracy.exact_and_bound(part, (band, *parameters))
    skip = first - top  # a row of padding above the band that is none in x
    want, bound = (t[:, :, skip : skip + last - first] for t in (want, bound))
    excess = ((y[image : image + 1, :, first:last].double() - want).abs() - bound).max().item()
    assert excess <= 0, f"image {image}, rows {first} to {last} are wrong by {excess:.3g}\n{describe(p)}"


def test_F16_a_small_view_with_huge_strides(gpu, generator):
    problem = make_problem("fp16", n=1, c=4, h=8, w=8, o=8)
    if torch.cuda.get_device_properties(gpu).total_memory < 40 * GIB:
        pytest.skip("needs 40 GiB of GPU memory")
    tensors = draw(problem, generator)
    big = torch.full((4, 30000, 30000), math.nan, dtype=torch.float16, device=gpu)
    x = big[:, ::4000, ::4000][None]
    x.copy_(tensors[0])
    assert x.stride(1) * 3 > 2**31
    accuracy.judge(problem, (x, *tensors[1:]), call(problem, (x, *tensors[1:])))
    del big, x
    torch.cuda.empty_cache()


def test_F17_wrong_calls_harm_nothing(machine, generator, monkeypatch):
    launched = []
    launch = kernel.Kernel.launch
    monkeypatch.setattr(kernel.Kernel, "launch", lambda self, *t: launched.append(self) or launch(self, *t))
    z = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype, device=machine.device)  # noqa: E731
    x, dw_weight, pw_weight = z(1, 4, 8, 8), z(4, 1, 3, 3), z(6, 4, 1, 1)
    for error, match, arguments, keywords in (
        (RuntimeError, "exceeds", (z(1, 4, 3, 3), z(4, 1, 5, 5), pw_weight), {}),
        (RuntimeError, "9 pixels", (x, dw_weight, pw_weight), {"dilation": 4}),
        (RuntimeError, "dw_weight", (z(1, 5, 8, 8), dw_weight, pw_weight), {}),
        (RuntimeError, "x must be", (z(1, 1, 4, 8, 8), dw_weight, pw_weight), {}),
        (RuntimeError, "float16", (x.half(), dw_weight, pw_weight), {}),
        (TypeError, "int32", (x.int(), dw_weight.int(), pw_weight.int()), {}),
        (RuntimeError, "device", (x, dw_weight.to("meta"), pw_weight), {}),
        (RuntimeError, "stride", (x, dw_weight, pw_weight), {"stride": 0}),
    ):
        with pytest.raises(error, match=match):
            depthwise_separable_conv2d(*arguments, **keywords)
    assert launched == []
    for problem in (
        make_problem(n=1, c=4, h=9, w=9, padding=0, dilation=4),
        make_problem(n=1, c=4, h=8, w=8, padding=5),
    ):
        tensors = draw(problem, generator)
        accuracy.judge(problem, tensors, call(problem, tensors))
    assert len(launched) == 2
    context_is_alive(machine.device)


def test_F21_weights_are_read_at_each_call(machine, generator, tf32_flags):
    """No version counter sees `.data`, and none exists under inference mode."""
    torch.backends.cudnn.allow_tf32 = False  # for a module whose children are called the plain way
    problem = make_problem()
    module = cutlass_sep.DepthwiseSeparableConv2d(8, 16, 3, padding=1, bias=True, device=machine.device)
    x = draw(problem, generator)[0]

    def right() -> None:
        conv = module.depthwise, module.pointwise
        tensors = (x, conv[0].weight.detach(), conv[1].weight.detach(), conv[0].bias.detach(), conv[1].bias.detach())
        with torch.no_grad():
            accuracy.judge(problem, tensors, module(x))

    right()
    module.pointwise.weight.data.copy_(torch.randn(16, 8, 1, 1, generator=generator, device=machine.device))
    module.depthwise.bias.data.fill_(3.0)
    right()
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    module(x).square().mean().backward()
    optimizer.step()
    right()
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})
    right()
    with torch.inference_mode():
        weight = torch.randn(16, 8, 1, 1, generator=generator, device=machine.device)
        parameters = (module.depthwise.weight, weight, module.depthwise.bias, module.pointwise.bias)
        for _ in range(2):
            weight.neg_()
            accuracy.judge(problem, (x, *parameters), call(problem, (x, *parameters)))
    handle = module.pointwise.register_forward_hook(lambda child, args, y: 2 * y)
    with torch.no_grad():
        doubled = module(x)
        handle.remove()
        # Both in fp32, of about 80 roundings each, on values below 1000.
        torch.testing.assert_close(doubled, 2 * module(x), rtol=0, atol=160 * 1000 * accuracy.UNIT["float32"])
    module.pointwise = nn.Conv2d(8, 5, 1, bias=False, device=machine.device)
    with torch.no_grad():
        assert module(x).shape[1] == 5


LARGE_KERNELS = [
    *(make_problem(n=1, c=8, h=64, w=64, o=16, kernel=k, padding="same") for k in (13, 15, 21, 31)),
    make_problem(n=1, c=8, h=64, w=64, o=16, kernel=31, dilation=2, padding="same"),
    make_problem("bf16", n=1, c=8, h=64, w=64, o=16, kernel=31, padding="same"),
    make_problem("fp16", "channels_last", n=1, c=8, h=64, w=64, o=16, kernel=21, padding="same"),
    make_problem("bf16", n=1, c=512, h=1, w=840, o=64, kernel=(1, 87), dilation=(1, 2), padding="same"),
    make_problem("bf16", n=1, c=2048, h=8, w=8, o=64, kernel=1, padding=0),
    make_problem(n=1, c=2048, h=8, w=8, o=64, kernel=1, padding=0),
]


@pytest.mark.parametrize("path", ["sm90", "portable"])
@pytest.mark.parametrize(
    "problem", LARGE_KERNELS, ids=lambda p: f"{p.dtype}-{p.layout}-c{p.c}-k{p.kernel[0]}x{p.kernel[1]}-d{p.dilation[1]}"
)
def test_F22_large_kernels_and_many_channels(machine, generator, problem: SeparableConv2dProblem, path: str):
    if not (support := supports(problem, path, machine.arch)):
        pytest.skip(f"path {path}: {support.reason}")
    tensors = draw(problem, generator)
    y = op.DepthwiseSeparableConv2d(*tensors, **options(problem), path=path, arch=machine.arch).run(*tensors)
    accuracy.judge(problem, tensors, y, f"path {path}")
    context_is_alive(machine.device)


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run work(i) in `count` threads that start together; the first error is raised here."""
    barrier, errors = threading.Barrier(count), []

    def run(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_F22_small_and_large_shared_memory_by_turns(machine, generator):
    """Two threads, two kernels of very different size: the attribute of one function must not undo another's."""
    problems = (make_problem(), LARGE_KERNELS[0])
    tensors = [draw(p, generator) for p in problems]
    outputs: list[list[Tensor]] = [[], []]

    def work(index: int) -> None:
        for _ in range(20):
            outputs[index].append(call(problems[index], tensors[index]))

    _in_threads(2, work)
    for problem, arguments, found in zip(problems, tensors, outputs, strict=True):
        for y in found:
            accuracy.judge(problem, arguments, y)


@pytest.mark.parametrize("keys", ["one", "many"])
def test_F27_sixteen_threads_load_what_is_cold(machine, generator, keys: str):
    problems = [make_problem(n=1 + (i if keys == "many" else 0)) for i in range(16)]
    tensors = [draw(p, generator) for p in problems]
    outputs: list[Tensor | None] = [None] * 16
    kernel.clear_memory()
    dispatch.clear()

    def work(index: int) -> None:
        outputs[index] = call(problems[index], tensors[index])

    _in_threads(16, work)
    for problem, arguments, y in zip(problems, tensors, outputs, strict=True):
        accuracy.judge(problem, arguments, y)


@pytest.mark.parametrize(("variant", "layout"), [("fp32", "contiguous"), ("bf16", "channels_last")])
def test_F31_few_builds_for_many_sizes(machine, generator, variant: str, layout: str):
    """Any 500 sizes cost at most 4 builds a layer; values are right for a sample of them."""
    rng = random.Random(31)
    problems = [
        make_problem(variant, layout, n=rng.choice((1, 2, 4)), c=16, o=32, h=rng.randint(7, 224), w=rng.randint(7, 224))
        for _ in range(500)
    ]
    sources = set()
    for problem in problems:
        plan = planner.plan(problem, machine.arch)
        if plan.schedule is not None:
            built = kernel.Kernel(problem, plan.schedule, machine.arch)
            sources.add(built.source)
            if machine.rehearsing:
                machine.builds.submit(built)
    assert len(sources) <= 4
    for problem in problems[:25]:
        tensors = draw(problem, generator)
        accuracy.judge(problem, tensors, call(problem, tensors))


def test_a_device_that_cannot_load_the_cubin_is_named(gpu, generator):
    problem = make_problem()
    tensors = draw(problem, generator)
    other = "sm_80" if kernel.archs.of_device(gpu.index) != "sm_80" else "sm_90a"
    operator = make_op(problem, other)
    with pytest.raises(RuntimeError, match=f"{other}.*cuda:0|cuda:0.*{other}"):
        operator.run(*tensors)
