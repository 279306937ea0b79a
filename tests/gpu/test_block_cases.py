"""Failures that users of such libraries met in public: the rows of the collection that concern the block, on a GPU.

F15 and F24 are in test_block_numerics.py, F09 in test_block_special_values.py; F10, F11, F28 and F29 are borrowed.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cutlass_sep
from cutlass_sep import compiler, dispatch, kernel, op, planner
from cutlass_sep.bench import inputs
from cutlass_sep.bench.inputs import options
from cutlass_sep.block_schedule import FORMS
from cutlass_sep.functional import separable_conv_block1d
from cutlass_sep.problem import SeparableBlock1dProblem

from . import accuracy
from .calls import Tensors, describe, draw, embed, make_block
from .test_block_numerics import LAYOUTS, every_kernel, laid_out
from .test_cases import GIB, context_is_alive

pytestmark = pytest.mark.usefixtures("fused")

every_form = pytest.mark.parametrize("form", FORMS)


def call(problem: SeparableBlock1dProblem, tensors: Tensors) -> Tensor:
    return separable_conv_block1d(*tensors, **options(problem))


def check_gradients(problem: SeparableBlock1dProblem, tensors: Tensors, grad: Tensor) -> None:
    """||g - g64|| <= 2 n u ||g64|| for each tensor, n the terms of the sums on its way and u of fp32."""
    p = problem
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    wanted = [t for t in leaves if t is not None]
    got = torch.autograd.grad(call(p, leaves), wanted, grad)
    want = torch.autograd.grad(accuracy.exact(p, doubles), [t for t in doubles if t is not None], grad.double())
    terms = p.n * p.l + p.c + p.e + p.o + p.kernel
    for tensor, g, g64 in zip(wanted, got, want, strict=True):
        assert g.shape == tensor.shape
        error = (g.double() - g64).norm() / g64.norm()
        assert error <= 2 * terms * accuracy.UNIT["float32"], f"gradient off by {error:.3g}\n{describe(p)}"


def random_like(y: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(y.shape, generator=generator, device=y.device, dtype=y.dtype)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean], ids=["sum", "mean"])
@laid_out
def test_F01_a_gradient_without_strides(machine, generator, layout: str, reduce: Callable):
    problem = make_block("fp32", layout)
    tensors = draw(problem, generator)
    leaves = [t.detach().requires_grad_() for t in tensors]
    reduce(call(problem, leaves)).backward()
    doubles = [t.double().requires_grad_() for t in tensors]
    reduce(accuracy.exact(problem, doubles)).backward()
    terms = problem.n * problem.l + problem.c + problem.e + problem.o
    for got, want in zip(leaves, doubles, strict=True):
        error = (got.grad.double() - want.grad).norm() / want.grad.norm()
        assert error <= 2 * terms * accuracy.UNIT["float32"]


@every_form
@laid_out
@pytest.mark.parametrize("variant", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_F02_any_storage_offset(machine, generator, fused, variant: str, layout: str, form: str, offset: int):
    problem = make_block(variant, layout)
    tensors = tuple(embed(t, offset) for t in draw(problem, generator))
    machine.require(problem.with_alignment(offset * problem.element_size), form=form)
    fused(None, form)
    accuracy.judge(problem, tensors, call(problem, tensors), f"offset of {offset} elements")
    # One flat buffer of all parameters, as an optimizer or a sharded model makes it.
    parameters = tensors[1:]
    flat = embed(torch.cat([t.flatten() for t in parameters]), offset)
    views = [v.view(t.shape) for v, t in zip(flat.split([t.numel() for t in parameters]), parameters, strict=True)]
    accuracy.judge(problem, tensors, call(problem, (tensors[0], *views)), "parameters in one buffer")
    context_is_alive(machine.device)


@every_kernel
@laid_out
@pytest.mark.parametrize("variant", ["fp32", "fp16"])
@pytest.mark.parametrize("l", [1, 2, 3, 8, 64, 200])
def test_F03_the_padding_is_of_the_expanded_channels(machine, variant: str, layout: str, path: str, form: str, l: int):  # noqa: E741
    """x = 0 and an expand bias of 1: at the ends a tap of the depthwise finds nothing, not the bias."""
    problem = make_block(variant, layout, n=1, c=8, l=l, e=16, kernel=3, activation=None)
    if l == 1:
        problem = make_block(variant, n=1, c=8, l=l, e=16, kernel=3, activation=None)  # [N,C,1] is contiguous
    machine.require(problem, path, form)
    x, expand, taps, project, expand_bias, taps_bias, project_bias = (
        torch.zeros_like(t) for t in inputs.tensors(problem, machine.device)
    )
    taps.fill_(1), expand_bias.fill_(1), project[3].fill_(1)
    arguments = (x, expand, taps, project, expand_bias, taps_bias, project_bias)
    y = op.SeparableConvBlock1d(*arguments, **options(problem), path=path, form=form, arch=machine.arch).run(*arguments)
    taps_inside = torch.nn.functional.conv1d(torch.ones(1, 1, l), torch.ones(1, 1, 3), padding=1)[0, 0]
    want = torch.zeros(problem.y_shape)
    want[0, 3] = 16 * taps_inside
    assert torch.equal(y.cpu().float(), want)


def test_F04_two_devices(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one CUDA device only")
    problem = make_block("fp32")
    for index in (1, 0, 1):
        generator = torch.Generator(torch.device("cuda", index)).manual_seed(index)
        tensors = draw(problem, generator)
        y = call(problem, tensors)
        assert y.device.index == index and torch.cuda.current_device() == 0
        accuracy.judge(problem, tensors, y)
        check_gradients(problem, tensors, torch.ones_like(y))


def _blc(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "blc_transposed": (_blc, True),
    "every_second_position": (lambda x: x.repeat_interleave(2, 2)[:, :, ::2], False),
    "some_channels": (lambda x: torch.cat([x, x, x], 1)[:, 3 : 3 + x.shape[1]], False),
    "some_channels_of_blc": (lambda x: _blc(torch.cat([x, x, x], 1))[:, 3 : 3 + x.shape[1]], False),
    "one_sequence_expanded": (lambda x: x[:1].expand(x.shape), False),
    "batch_and_channels_exchanged": (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), False),
    "every_second_sequence_of_blc": (lambda x: _blc(torch.cat([x, x]))[::2], False),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("variant", ["fp32", "bf16"])
def test_F05_views(machine, generator, variant: str, view: str):
    make, channels_last = VIEWS[view]
    problem = make_block(variant, "channels_last" if channels_last else "contiguous")
    tensors = draw(make_block(variant), generator)
    tensors = (make(tensors[0]), *tensors[1:])
    y = call(problem, tensors)
    accuracy.judge(problem, tensors, y, view)
    assert (y.transpose(1, 2) if channels_last else y).is_contiguous()
    if variant == "fp32":
        check_gradients(problem, tensors, random_like(y, generator))


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_F12_no_kernel_is_taken_for_another(machine, generator, order: str):
    kernel.clear_memory()
    problems = [
        *(make_block(variant, layout) for variant in ("fp32", "tf32", "bf16") for layout in LAYOUTS),
        make_block(expand_bias=False),
        make_block(dw_bias=False),
        make_block(project_bias=False),
        make_block(activation="gelu_tanh"),
        make_block(activation=None),
        make_block(residual=False),
        make_block(dilation=2),
        make_block(kernel=4),
        make_block(l=63),
    ]  # fmt: skip
    for problem in problems if order == "forwards" else reversed(problems):
        tensors = draw(problem, generator)
        accuracy.judge(problem, tensors, call(problem, tensors), order)


@laid_out
def test_F13_an_empty_batch_launches_and_builds_nothing(machine, generator, monkeypatch, layout: str):
    def forbidden(*args, **kwargs):
        raise AssertionError("an empty batch needs no kernel")

    monkeypatch.setattr(kernel.Kernel, "launch", forbidden)
    monkeypatch.setattr(compiler, "build", forbidden)
    problem = make_block("fp32", layout, c=4, l=8, e=8)
    x, *parameters = draw(problem, generator)
    leaves = [t.detach().requires_grad_() for t in (x[:0], *parameters)]
    y = call(problem, leaves)
    assert tuple(y.shape) == (0, 4, 8)
    y.sum().backward()
    assert tuple(leaves[0].grad.shape) == (0, 4, 8)
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in leaves[1:])
    with pytest.raises(RuntimeError, match="empty"):
        call(problem, (torch.zeros(2, 4, 0, device=machine.device), *parameters))


LARGE = {
    "x and y": make_block("bf16", n=33, c=64, l=1 << 20, e=8, kernel=9),
    "only the expanded channels": make_block("fp16", n=3, c=8, l=1 << 21, e=384, kernel=9),
    "channels_last": make_block("bf16", "channels_last", n=33, c=64, l=1 << 20, e=8, kernel=9),
    "one sequence": make_block("bf16", n=1, c=16, l=(1 << 27) + 8, e=16, kernel=9),
}


@every_kernel
@pytest.mark.parametrize("name", LARGE)
def test_F16_more_than_2_31_elements(machine, name: str, path: str, form: str):
    p = problem = LARGE[name]
    machine.require(problem, path, form)
    machine.needs_gpu(problem, path=path, form=form)
    memory = torch.cuda.get_device_properties(machine.device).total_memory
    if memory < 40 * GIB:
        pytest.skip(f"needs 40 GiB of GPU memory, this one has {memory / GIB:.0f}")
    assert p.n * p.l * max(p.c, p.e) > 2**31
    tensors = tuple(inputs.tensors(p, machine.device))
    x, *parameters = tensors
    out = inputs.empty(p.y_shape, p.layout, x.dtype, machine.device).fill_(math.nan)
    op.SeparableConvBlock1d(*tensors, **options(p), path=path, form=form, arch=machine.arch).run(*tensors, out=out)
    assert not any(part.isnan().any() for part in out.unbind(0)), "some of y was not written"
    # Windows at both ends and around where 31 bits end, in x, y and the expanded channels; each from a copy of x there.
    sequences = sorted({0, p.n - 1, *(2**31 // (channels * p.l) % p.n for channels in (p.c, p.e))})
    around = {0, p.l, *(limit // channels % p.l for limit in (2**30, 2**31) for channels in (p.c, p.e, 1))}
    halo, width = p.dilation * (p.kernel - 1), 256
    for sequence in sequences:
        for middle in sorted(around):
            first = min(max(0, middle - width // 2), p.l - width)
            low, high = max(0, first - halo), min(p.l, first + width + halo)
            part = make_block("bf16", n=1, c=p.c, l=high - low, e=p.e, kernel=p.kernel)
            part = inputs.variant(inputs.Case("", part), p.dtype, "contiguous", None).problem
            window = x[sequence : sequence + 1, :, low:high].contiguous()
            want, bound = (
                t[..., first - low : first - low + width] for t in accuracy.exact_and_bound(part, (window, *parameters))
            )
            excess = (
                ((out[sequence : sequence + 1, :, first : first + width].double() - want).abs() - bound).max().item()
            )
            assert excess <= 0, f"sequence {sequence}, from {first}: wrong by {excess:.3g}\n{describe(p)}"
    del x, out, tensors
    torch.cuda.empty_cache()


def test_F17_wrong_calls_harm_nothing(machine, generator, monkeypatch):
    launched = []
    launch = kernel.Kernel.launch
    monkeypatch.setattr(kernel.Kernel, "launch", lambda self, *t: launched.append(self) or launch(self, *t))
    problem = make_block(c=4, l=8, e=8)
    x, expand, taps, project, *biases = draw(problem, generator)
    for error, match, arguments, keywords in (
        (RuntimeError, "expand_weight", (x[:, :3], expand, taps, project), {}),
        (RuntimeError, "dw_weight", (x, expand, taps[:5], project), {}),
        (RuntimeError, "project_weight", (x, expand, taps, project[:, :5]), {}),
        (RuntimeError, "x must be", (x[None], expand, taps, project), {}),
        (RuntimeError, "float16", (x.half(), expand, taps, project), {}),
        (TypeError, "int32", (x.int(), expand.int(), taps.int(), project.int()), {}),
        (RuntimeError, "device", (x, expand.to("meta"), taps, project), {}),
        (RuntimeError, "dilation", (x, expand, taps, project), {"dilation": 0}),
        (RuntimeError, "expand_bias", (x, expand, taps, project, biases[2]), {}),
    ):
        with pytest.raises(error, match=match):
            separable_conv_block1d(*arguments, **keywords)
    assert launched == []
    tensors = (x, expand, taps, project, *biases)
    accuracy.judge(problem, tensors, call(problem, tensors))
    context_is_alive(machine.device)


@every_form
@laid_out
@pytest.mark.parametrize("kernel_size", [1, 2, 4, 10])
def test_F19_even_kernels_keep_the_length(machine, generator, fused, kernel_size: int, layout: str, form: str):
    """The odd position of padding is on the right; the residual is never longer or shorter than the branch."""
    for length in (10, 2) if layout == "channels_last" else (10, 1):
        problem = make_block("fp32", layout, c=8, l=length, e=16, kernel=kernel_size)
        machine.require(problem, form=form)
        fused(None, form)
        tensors = draw(problem, generator)
        y = call(problem, tensors)
        assert y.shape == tensors[0].shape
        accuracy.judge(problem, tensors, y)


@every_form
@pytest.mark.parametrize("c", [1, 3, 7, 66])
def test_F20_any_channels_and_lengths_also_transposed(machine, generator, fused, c: int, form: str):
    fused(None, form)
    for variant in ("fp16", "fp32"):
        for length in (1, 5, 13, 257):
            for layout in ("contiguous", "channels_last"):
                if layout == "channels_last" and 1 in (c, length):
                    continue  # the same memory
                problem = make_block(variant, layout, c=c, l=length, e=10, kernel=3)
                machine.require(problem, form=form)
                tensors = draw(problem, generator)
                y = call(problem, tensors)
                accuracy.judge(problem, tensors, y)
                if variant == "fp32":
                    check_gradients(problem, tensors, random_like(y, generator))


def test_F21_weights_are_read_at_each_call(machine, generator):
    """No version counter sees `.data`, and none exists under inference mode."""
    problem = make_block(c=16, e=32, kernel=5)
    module = cutlass_sep.SeparableConvBlock1d(16, 32, 5, device=machine.device)
    x = draw(problem, generator)[0]

    def right() -> None:
        convs = module.pointwise, module.depthwise, module.project_back
        tensors = (x, *(c.weight.detach() for c in convs), *(c.bias.detach() for c in convs))
        with torch.no_grad():
            accuracy.judge(problem, tensors, module(x))

    right()
    module.pointwise.weight.data.copy_(torch.randn(32, 16, 1, generator=generator, device=machine.device))
    module.depthwise.bias.data.fill_(3.0)
    right()
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    module(x).square().mean().backward()
    optimizer.step()
    right()
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})
    right()
    with torch.inference_mode():
        _, *parameters = draw(problem, generator)
        for _ in range(2):
            parameters[2].neg_()
            accuracy.judge(problem, (x, *parameters), call(problem, (x, *parameters)))


LARGE_KERNELS = [
    make_block("bf16", n=2, c=64, l=840, e=128, kernel=65),
    make_block("bf16", n=2, c=64, l=840, e=128, kernel=87, dilation=2),
    make_block("fp32", n=1, c=32, l=512, e=64, kernel=65),
    make_block("fp16", "channels_last", n=2, c=32, l=300, e=64, kernel=33, dilation=128),
    make_block("bf16", n=1, c=1024, l=64, e=2048, kernel=9),
    make_block("fp32", n=1, c=1024, l=64, e=2048, kernel=3),
]


@every_kernel
@pytest.mark.parametrize(
    "problem", LARGE_KERNELS, ids=lambda p: f"{p.dtype}-{p.layout}-c{p.c}-e{p.e}-k{p.kernel}-d{p.dilation}"
)
def test_F22_large_kernels_and_many_channels(
    machine, generator, problem: SeparableBlock1dProblem, path: str, form: str
):
    machine.require(problem, path, form)
    tensors = draw(problem, generator)
    operator = op.SeparableConvBlock1d(*tensors, **options(problem), path=path, form=form, arch=machine.arch)
    accuracy.judge(problem, tensors, operator.run(*tensors), f"path {path}, form {form}")
    context_is_alive(machine.device)


def test_F27_sixteen_threads_load_what_is_cold(machine, generator):
    problems = [make_block(n=1 + i % 4) for i in range(16)]
    tensors = [draw(p, generator) for p in problems]
    outputs: list[Tensor | None] = [None] * 16
    errors: list[BaseException] = []
    barrier = threading.Barrier(16)
    kernel.clear_memory()
    dispatch.clear()

    def work(index: int) -> None:
        try:
            barrier.wait()
            outputs[index] = call(problems[index], tensors[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for problem, arguments, y in zip(problems, tensors, outputs, strict=True):
        accuracy.judge(problem, arguments, y)


@laid_out
@pytest.mark.parametrize("variant", ["fp32", "bf16"])
def test_F31_few_builds_for_many_lengths(machine, generator, variant: str, layout: str):
    """L from 1 to 500 costs at most 4 builds a layer; values are right for a sample of them."""
    lengths = list(range(1 if layout == "contiguous" else 2, 501))
    random.Random(31).shuffle(lengths)
    problems = [make_block(variant, layout, n=1 + i % 3, c=16, l=l, e=32) for i, l in enumerate(lengths)]  # noqa: E741
    sources = set()
    for problem in problems:
        plan = planner.plan(problem, machine.arch)
        if plan.schedule is not None:
            built = kernel.make(problem, plan.schedule, machine.arch)
            sources.add(built.source)
            if machine.rehearsing:
                machine.builds.submit(built)
    assert len(sources) <= 4
    for problem in problems[:25]:
        tensors = draw(problem, generator)
        accuracy.judge(problem, tensors, call(problem, tensors))
