"""The operators as functions: what holds for both of them, then what the 2-D one alone has.

Values, layouts, strides, gradients, errors, autocast, torch.compile, transforms. subjects.py says what they differ in.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from block import Block
from problems import problem_of
from separable import UNIT_ROUNDOFF, Case, double
from subjects import BLOCK, ERRORS, SEPARABLE, SUBJECTS, VIEWS, Subject, leaves, name_of, odd, of, strided, views
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cutlass_sep import Unsupported, dispatch, torch_ops
from cutlass_sep.functional import depthwise_separable_conv2d as separable
from cutlass_sep.reference import _cudnn_precision

LAYOUTS = ("contiguous", "channels_last")
both = pytest.mark.parametrize("subject", SUBJECTS, ids=str)


def calls(*cases: Case | Block):
    """Parametrizes a test over calls, of both operators unless given."""
    return pytest.mark.parametrize("case", cases or SEPARABLE.cases + BLOCK.cases, ids=name_of)


@pytest.fixture(autouse=True)
def _fresh_dispatch():
    dispatch.clear()
    yield
    dispatch.clear()


# ---- values and layouts ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@calls()
def test_values_and_layout(device: str, case: Case | Block, layout: str, dtype: torch.dtype):
    subject = of(case)
    tensors = case.tensors(device, dtype, layout)
    y = subject.run(*tensors, **case.options)
    assert (y.dtype, y.device) == (dtype, tensors[0].device)
    subject.calls.assert_output_close(case, tensors, y)
    last = subject.is_channels_last(tensors[0])
    assert (y.movedim(1, -1) if last else y).is_contiguous()


@pytest.mark.parametrize("weights", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@both
def test_layout_of_y_follows_x_and_not_the_weights(device: str, subject: Subject, layout: str, weights: str):
    case = subject.case()
    x, *parameters = case.tensors(device, layout=layout)
    if weights == "channels_last":
        parameters[: subject.weights] = map(subject.channels_last, parameters[: subject.weights])
    y = subject.run(x, *parameters, **case.options)
    assert subject.is_channels_last(y) == (layout == "channels_last")
    subject.calls.assert_output_close(case, (x, *parameters), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("subject", "view"), views(), ids=str)
def test_views_of_x_give_what_their_copies_give(device: str, subject: Subject, view: str, dtype: torch.dtype):
    make, layout = VIEWS[view]
    case = dataclasses.replace(subject.case(), **{"mid_activation": "silu"} if subject is SEPARABLE else {})
    x, *parameters = case.tensors(device, dtype)
    seen = make(subject, x)
    copy = seen.clone(memory_format=torch.preserve_format if layout == "channels_last" else torch.contiguous_format)
    y = subject.run(seen, *parameters, **case.options)
    assert torch.equal(y, subject.run(copy, *parameters, **case.options))
    assert subject.is_channels_last(y) == (layout == "channels_last")

    leaf, other, grad = seen.detach().requires_grad_(), copy.detach().requires_grad_(), torch.randn_like(y)
    subject.run(leaf, *parameters, **case.options).backward(grad)
    subject.run(other, *parameters, **case.options).backward(grad)
    if view != "some_channels_last":  # ATen computes that gradient in the view's own order of channels
        torch.testing.assert_close(leaf.grad, other.grad, rtol=0, atol=0)
    if dtype == torch.float32:
        none = (None for _ in parameters)
        subject.calls.assert_gradients_close(case, (seen, *parameters), grad, (leaf.grad, *none))


@both
def test_parameters_from_one_odd_buffer(device: str, subject: Subject):
    case = subject.case()
    x, *parameters = tensors = case.tensors(device)
    for views_of in (odd(parameters), strided(parameters)):
        subject.calls.assert_output_close(case, tensors, subject.run(x, *views_of, **case.options))


@calls(Case(c=4, o=6, h=6, w=6), Block(c=4, l=9), Block(c=4, l=9, residual=False))
def test_unbatched(device: str, case: Case | Block):
    subject = of(case)
    x, *parameters = case.tensors(device)
    x = x[0]
    y = subject.run(x, *parameters, **case.options)
    assert y.shape == ((6, 6, 6) if subject is SEPARABLE else (4, 9))
    assert torch.equal(y, subject.run(x[None], *parameters, **case.options)[0])
    assert subject.is_channels_last(subject.run(subject.channels_last(x), *parameters, **case.options))
    leaf = x.clone().requires_grad_()
    subject.run(leaf, *parameters, **case.options).backward(torch.ones_like(y))
    none = (None for _ in parameters)
    subject.calls.assert_gradients_close(case, (x, *parameters), torch.ones_like(y), (leaf.grad, *none))


@pytest.mark.parametrize("layout", LAYOUTS)
@calls(Case(n=0, c=32, o=8, h=5, w=5, kernel=(2, 2)), Block(n=0), Block(n=0, o=4, residual=False))
def test_empty_batch(device: str, case: Case | Block, layout: str):
    tensors = leaves(case.tensors(device, layout=layout))
    y = of(case).run(*tensors, **case.options)
    assert y.shape == ((0, 8, 6, 6) if of(case) is SEPARABLE else (0, case.rows, 16))
    y.sum().backward()
    for t in tensors:
        assert torch.equal(t.grad, torch.zeros_like(t))


@calls(Case(n=1, c=1, o=1, h=1, w=1), Case(), Block(n=1, c=1, e=1, l=1), Block())
def test_negated_views_are_resolved(case: Case | Block):
    x, *parameters = case.tensors(dtype=torch.float64)
    imaginary = torch.complex(x, x).conj().imag
    assert imaginary.is_neg()
    assert imaginary.is_contiguous() == (x.numel() == 1)
    run = of(case).run
    assert torch.equal(run(imaginary, *parameters, **case.options), run(-x, *parameters, **case.options))


@calls(Case(), Block(), Block(residual=False))
def test_y_is_memory_of_its_own(device: str, case: Case | Block):
    """Neither a view, which autograd would refuse to edit in place, nor x."""
    for grad in (False, True):
        tensors = case.tensors(device)
        before = tensors[0].clone()
        y = of(case).run(*leaves(tensors) if grad else tensors, **case.options)
        assert not y._is_view()
        y.mul_(2)
        assert torch.equal(tensors[0], before)
        of(case).calls.assert_output_close(case, tensors, y / 2)


# ---- exact values ----


@pytest.fixture
def tf32_flags():
    """Puts torch's TF32 flags back."""
    cudnn, matmul = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = cudnn, matmul


@pytest.mark.parametrize("flag", [False, True])
@both
def test_fp32_keeps_twelve_bits_whatever_torch_says(device: str, subject: Subject, flag: bool, tf32_flags):
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = flag
    x = torch.full((1, 1, *(4,) * subject.spatial), 2077.0, device=device, requires_grad=True)
    weights, options = subject.identity(device)
    y = subject.run(x, *weights, **options)
    assert torch.equal(y, torch.full_like(x, 2077.0))
    y.backward(torch.full_like(y, 2077.0))
    assert torch.equal(x.grad, torch.full_like(x, 2077.0))


def test_backward_states_its_precision_and_puts_the_flags_back():
    def now() -> str:
        if hasattr(torch.backends.cudnn, "conv"):
            return torch.backends.cudnn.conv.fp32_precision
        return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"

    before = now()
    for tf32 in (True, False):
        with _cudnn_precision(tf32):
            assert now() == ("tf32" if tf32 else "ieee")
        assert now() == before


@pytest.mark.parametrize(
    ("subject", "where"), [(SEPARABLE, "mid_activation"), (SEPARABLE, "activation"), (BLOCK, "activation")], ids=str
)
def test_gelu_is_erf_and_gelu_tanh_is_tanh(device: str, subject: Subject, where: str):
    z = torch.cat([torch.linspace(-6, 6, 2001), torch.tensor([1e4, -1e4, -0.0, math.nan])]).to(device)
    z = z.view(*(1,) * (subject.spatial + 1), -1)
    weights, options = subject.identity(device)
    for name, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        want = F.gelu(z.double(), approximate=approximate)
        error = (subject.run(z, *weights, **options | {where: name}).double() - want).abs()
        assert error.isnan().sum() == 1  # where z is NaN
        assert error.nan_to_num().max().item() < 2e-6


# ---- gradients ----


@pytest.mark.parametrize("layout", LAYOUTS)
@calls()
def test_gradients(device: str, case: Case | Block, layout: str):
    subject = of(case)
    tensors = leaves(case.tensors(device, layout=layout))
    y = subject.run(*tensors, **case.options)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device)
    y.backward(grad)
    subject.calls.assert_gradients_close(case, tensors, grad, tuple(t if t is None else t.grad for t in tensors))
    assert tensors[0].grad.stride() == tensors[0].stride()


@pytest.mark.parametrize("how", ["sum", "mean", "transposed", "expanded"])
@calls(Case(h=16, w=16), Block(c=16, l=16))
def test_gradients_of_any_stride(device: str, case: Case | Block, how: str):
    subject = of(case)
    tensors = leaves(case.tensors(device))
    y = subject.run(*tensors, **case.options)
    grad = {
        "sum": torch.ones(()).expand(y.shape),
        "mean": torch.full((), 1 / y.numel()).expand(y.shape),
        "transposed": torch.randn(y.shape).transpose(-2, -1),
        "expanded": torch.randn(1, *y.shape[1:-2], 1, y.shape[-1]).expand(y.shape),
    }[how].to(device)
    if how in ("sum", "mean"):
        getattr(y, how)().backward()
    else:
        y.backward(grad)
    subject.calls.assert_gradients_close(case, tensors, grad, tuple(t.grad for t in tensors))


@calls(
    Case(h=6, w=6),
    Case(h=6, w=6, mid_activation="gelu"),
    Case(h=6, w=6, activation="silu"),
    Block(l=6, kernel=2, activation=None, residual=False),
    Block(l=6, kernel=2),
)
def test_exactly_the_gradients_asked_for(device: str, case: Case | Block):
    subject = of(case)
    tensors = case.tensors(device)
    shape = subject.run(*tensors, **case.options).shape
    expected = subject.calls.expected_gradients(case, tensors, torch.ones(shape))
    for wanted in itertools.product((False, True), repeat=subject.count):
        tensors = leaves(case.tensors(device), wanted)
        y = subject.run(*tensors, **case.options)
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.sum().backward()
            assert tuple(t.grad is not None for t in tensors) == wanted
            for t, (want, bound) in zip(tensors, expected, strict=True):
                assert t.grad is None or ((t.grad.cpu() - want).abs() <= 2.0**-24 * bound).all()


@both
def test_gradients_take_the_strides_of_their_tensors(device: str, subject: Subject):
    case = subject.case()
    x, *parameters = case.tensors(device)
    parameters[: subject.weights] = subject.restride(parameters[: subject.weights])
    tensors = leaves((subject.channels_last(x), *parameters))
    y = subject.run(*tensors, **case.options)
    gradients = torch.autograd.grad(y, tensors, torch.ones_like(y))
    assert [g.stride() for g in gradients] == [t.stride() for t in tensors]
    wide = torch.cat([x, x], 1)[:, : x.shape[1]].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(subject.run(wide, *tensors[1:], **case.options).sum(), wide)
    assert gradient.is_contiguous()


@both
def test_no_grad_inference_mode_and_checkpoint(device: str, subject: Subject):
    case = subject.case()
    tensors = leaves(case.tensors(device))
    with torch.no_grad():
        assert not subject.run(*tensors, **case.options).requires_grad
    with torch.inference_mode():
        y = subject.run(*tensors, **case.options)
        assert y.is_inference()
        subject.calls.assert_output_close(case, tensors, y)
    y = checkpoint(lambda *t: subject.run(*t, **case.options), *tensors, use_reentrant=False)
    y.sum().backward()
    subject.calls.assert_gradients_close(case, tensors, torch.ones_like(y), tuple(t.grad for t in tensors))


@calls(Case(mid_activation="relu"), Block())
def test_in_place_edit_after_forward_raises(device: str, case: Case | Block):
    for index in range(1 + of(case).weights):
        tensors = leaves(case.tensors(device))
        y = of(case).run(*tensors, **case.options)
        with torch.no_grad():
            tensors[index].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@both
def test_second_derivative_raises(device: str, subject: Subject):
    case = subject.case()
    tensors = leaves(case.tensors(device))
    for loss in (lambda y: y.square().sum(), torch.sum):
        y = subject.run(*tensors, **case.options)
        (gradient,) = torch.autograd.grad(loss(y), tensors[0], create_graph=True)
        with pytest.raises(NotImplementedError, match=f"{subject.operator.name} has no second derivative"):
            gradient.sum().backward()


@pytest.mark.parametrize("kind", ["hvp", "jvp", "gradient_penalty"])
@both
def test_second_derivative_is_not_taken_for_zero(device: str, subject: Subject, kind: str):
    """The incoming gradient is a constant here: only the saved tensors carry the dependence."""
    case = subject.case(activation="silu")
    x, *parameters = leaves(case.tensors(device))

    def f(x: Tensor) -> Tensor:
        return subject.run(x, *parameters, **case.options)

    with pytest.raises(NotImplementedError, match="no second derivative"):
        if kind == "hvp":
            torch.autograd.functional.hvp(lambda x: f(x).sum(), x.detach(), x.detach())
        elif kind == "jvp":
            torch.autograd.functional.jvp(f, x.detach(), x.detach())
        else:
            (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
            gradient.square().sum().backward()


@both
def test_create_graph_gives_the_same_gradients(device: str, subject: Subject):
    case = subject.case()
    tensors = leaves(case.tensors(device))
    y = subject.run(*tensors, **case.options).sum()
    plain = torch.autograd.grad(y, tensors, retain_graph=True)
    recorded = torch.autograd.grad(y, tensors, create_graph=True)
    assert all(g.requires_grad for g in recorded) and not any(g.requires_grad for g in plain)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


# ---- errors ----


@pytest.mark.parametrize("how", ["direct", "autograd", "autocast", "compiled"])
@pytest.mark.parametrize(("subject", "name"), [(s, name) for s, named in ERRORS.items() for name in named], ids=str)
def test_errors_name_the_argument(subject: Subject, name: str, how: str):
    error, match, tensors, options = ERRORS[subject][name]
    if how == "autograd":  # any tensor that can, so that the call goes through autograd
        tensors = tuple(
            t.clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() and not t.is_quantized else t
            for t in tensors
        )
    if how == "autocast" and name == "mixed_dtypes":
        pytest.skip("autocast casts to one dtype")
    if how == "compiled" and name in ("sparse", "sparse_weight", "quantised"):
        pytest.skip("torch.compile refuses it first")
    run = subject.run
    if how == "compiled":
        torch._dynamo.reset()
        error, match = Exception, match.split(".*")[0]
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(error, match=match):
            run(*tensors, **options)
    assert not dispatch._launchers


@both
def test_mixed_dtypes_raise_without_autocast(device: str, subject: Subject):
    x, *parameters = subject.case().tensors(device)
    with pytest.raises(RuntimeError, match="float16.*float32"):
        subject.run(x.half(), *parameters, **subject.case().options)


@both
def test_the_operator_takes_batches_alone(subject: Subject):
    x, *parameters = subject.case().tensors()
    options = subject.operator.options_of(problem_of(subject.case()))
    with pytest.raises(RuntimeError, match=f"x must be batched: {subject.operator.batched}-D"):
        subject.op.forward(x[0], *parameters, *options)


@both
def test_names_are_those_of_the_problem_and_of_the_operator(subject: Subject):
    assert subject.operator.tensors == subject.calls.NAMES
    assert set(subject.operator.options) == {"fp32_precision", *subject.case().options}


def test_roundoff_table_is_right():
    for dtype, unit in UNIT_ROUNDOFF.items():
        assert torch.finfo(dtype).eps == 2 * unit


# ---- autocast ----


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@calls(Case(mid_activation="relu"), Block(), Block(residual=False))
def test_autocast(device: str, case: Case | Block, given: torch.dtype, low: torch.dtype):
    """The convolutions in the low precision; x is added in its own."""
    subject, added = of(case), getattr(case, "residual", False)
    x, *parameters = leaves(case.tensors(device))
    x = x.detach().to(given).requires_grad_()
    with torch.autocast(device, dtype=low):
        y = subject.run(x, *parameters, **case.options)
        last = subject.run(subject.channels_last(x), *parameters, **case.options)
        exchanged = subject.run(VIEWS["batch_inside"][0](subject, x.detach()), *parameters, **case.options)
    assert y.dtype == (given if added else low)
    assert y.is_contiguous() and subject.is_channels_last(last) and exchanged.is_contiguous()
    y.float().sum().backward()
    assert [t.grad.dtype for t in (x, *parameters)] == [given] + [torch.float32] * (subject.count - 1)
    cast = [t.detach().to(low) for t in (x, *parameters)]
    if added and given != low:
        want = subject.run(*cast, **case.options | {"residual": False})
        want = (want + x.detach()).to(given)
    else:
        want = subject.run(*cast, **case.options)
    for got in (y, last, exchanged):
        torch.testing.assert_close(got, want, rtol=0, atol=0 if got is y else 0.1)


@both
def test_autocast_leaves_float64_and_backward_keeps_the_forward_dtype(device: str, subject: Subject):
    case = subject.case()
    tensors = leaves(case.tensors(device, torch.float64))
    with torch.autocast(device, dtype=torch.bfloat16):
        y = subject.run(*tensors, **case.options)
    assert y.dtype == torch.float64
    subject.calls.assert_output_close(case, tensors, y)
    tensors = leaves(case.tensors(device))
    y = subject.run(*tensors, **case.options)
    with torch.autocast(device, dtype=torch.bfloat16):  # not where a backward pass belongs, but common
        y.backward(torch.ones_like(y))
    subject.calls.assert_gradients_close(case, tensors, torch.ones_like(y), tuple(t.grad for t in tensors))


@calls(Case(), Block(residual=False))
def test_autocast_casts_no_type_that_no_convolution_takes(case: Case | Block):
    tensors, run = case.tensors(), of(case).run
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match="x has dtype torch.float8_e4m3fn"):
            run(*(t.to(torch.float8_e4m3fn) for t in tensors), **case.options)
        with pytest.raises(TypeError, match="x must be a dense strided tensor, got layout torch._mkldnn"):
            run(tensors[0].to_mkldnn(), *tensors[1:], **case.options)


# ---- torch.library, torch.compile, transforms ----

OP_VIEWS = ("contiguous", "channels_last", "batch_inside", "some_channels", "width_before_height")
OP_CASES = (
    Case(kernel=(3, 2), padding="same", mid_activation="relu6", activation="silu"),
    Block(kernel=4, dilation=3, activation="silu"),
    Block(kernel=4, dilation=3, activation="silu", residual=False),
)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(
    ("case", "view"), [(c, view) for c in OP_CASES for s, view in views(*OP_VIEWS) if s is of(c)], ids=name_of
)
def test_opcheck(device: str, case: Case | Block, view: str, grad: bool):
    subject, op = of(case), of(case).op
    x, *parameters = case.tensors(device)
    tensors = [t.detach().requires_grad_(grad) for t in (VIEWS[view][0](subject, x), *parameters)]
    options = subject.operator.resolve(tensors, (*case.options.values(), "ieee"))
    torch.library.opcheck(op.forward, (*tensors, *options))
    y = op.forward(*tensors, *options).detach()
    rest = range(1, subject.count)
    odd_ones, even_ones = ((False, *(index % 2 == parity for index in rest)) for parity in (1, 0))
    for needed in ((True,) * subject.count, (True, *(False for _ in rest)), odd_ones, even_ones):
        plain_tensors = [t.detach() for t in tensors]
        torch.library.opcheck(op.backward, (torch.randn_like(y), *plain_tensors, *options, needed))


@calls(
    Case(kernel=(3, 4), padding="same", mid_activation="gelu", activation="hardswish"),
    Block(kernel=4, dilation=2, activation="hardswish"),
)
def test_compile_fullgraph(device: str, case: Case | Block):
    run, options = of(case).run, case.options
    for layout in LAYOUTS:
        tensors = leaves(case.tensors(device, layout=layout))
        others = leaves(tensors)
        compiled = torch.compile(lambda *t: run(*t, **options) * 2, fullgraph=True, backend="aot_eager")
        y, want = compiled(*tensors), run(*others, **options) * 2
        torch.testing.assert_close(y, want, rtol=0, atol=0)
        assert y.stride() == want.stride()
        for loss in (y, want):
            loss.square().sum().backward()
        for got, expected in zip(tensors, others, strict=True):
            # A GPU may add up the gradient of a bias in another order: as many roundings as it has terms, at most.
            terms = 0 if device == "cpu" else y.numel() // y.shape[1]
            bound = terms * torch.finfo(torch.float32).eps / 2 * expected.grad.abs().max().item()
            torch.testing.assert_close(got.grad, expected.grad, rtol=0, atol=bound)


@pytest.mark.parametrize("layout", LAYOUTS)
@both
def test_compile_takes_other_sizes_without_recompiling(device: str, subject: Subject, layout: str):
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run, options = subject.run, subject.case().options
    compiled = torch.compile(lambda *t: run(*t, **options), fullgraph=True, backend=count)
    for n, length in ((2, 16), (3, 20), (5, 33), (8, 300)):
        case = subject.case(n=n) if subject is SEPARABLE else subject.case(n=n, l=length)
        tensors = case.tensors(device, layout=layout)
        assert torch.equal(compiled(*tensors), run(*tensors, **options))
    assert count.frame_count <= 2


@calls(Case(), Block(), Block(residual=False))
def test_compile_under_autocast(device: str, case: Case | Block):
    tensors, run, options = leaves(case.tensors(device)), of(case).run, case.options

    def under_autocast(*t):
        with torch.autocast(device, dtype=torch.bfloat16):
            return run(*t, **options)

    y = torch.compile(under_autocast, fullgraph=True, backend="aot_eager")(*tensors)
    assert y.dtype == (torch.float32 if getattr(case, "residual", False) else torch.bfloat16)
    assert torch.equal(y, under_autocast(*tensors))


@calls(Case(kernel=(4, 3), stride=(1, 2)), Block(kernel=4), Block(kernel=4, residual=False, o=5))
def test_fake_and_meta_tensors_agree_with_the_real_call(device: str, case: Case | Block):
    from torch._subclasses.fake_tensor import FakeTensorMode

    subject = of(case)
    own = [view for s, view in views(*OP_VIEWS) if s is subject]
    for view, dtype in itertools.product(own, (torch.float32, torch.float16)):
        x, *parameters = case.tensors(device, dtype)
        tensors = (VIEWS[view][0](subject, x), *parameters)
        y = subject.run(*tensors, **case.options)
        meta = subject.run(*(t.to("meta") for t in tensors), **case.options)
        assert meta.is_meta
        assert (meta.shape, meta.dtype) == (y.shape, y.dtype)
        with FakeTensorMode() as mode:
            fake = subject.run(*(mode.from_tensor(t) for t in tensors), **case.options)
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (y.shape, y.stride(), y.dtype, y.device)


@both
def test_transforms_and_subclasses_see_the_call(device: str, subject: Subject):
    case = subject.case()
    x, *parameters = tensors = case.tensors(device)
    want = subject.calls.plain(case, double(tensors))

    def run(x: Tensor) -> Tensor:
        return subject.run(x, *parameters, **case.options)

    grad = torch.func.grad(lambda x: run(x).sum())(x)
    leaf = x.clone().requires_grad_()
    run(leaf).sum().backward()
    torch.testing.assert_close(grad, leaf.grad, rtol=0, atol=0)

    def gradient_sum(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: run(x).square().sum())(x).sum()

    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(gradient_sum)(x)

    stacked = torch.stack([x, 2 * x])
    per_item = torch.vmap(torch.func.grad(lambda x: run(x).sum()))(stacked)
    torch.testing.assert_close(per_item[0], grad, rtol=0, atol=0)
    assert torch.equal(torch.vmap(run)(stacked)[0], run(x))

    class Logged(Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls += func is subject.run
            return super().__torch_function__(func, types, args, kwargs or {})

    y = run(x.as_subclass(Logged))
    assert Logged.calls == 1
    assert isinstance(y, Logged)

    with torch.device(device):  # a function mode
        y = run(x)
    assert (y.double().cpu() - want).abs().max() < 1e-4
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
            run(dual)


@calls(Case(stride=2), Block())
def test_vmap_over_a_dimension_of_size_0(device: str, case: Case | Block):
    x, weight, *rest = case.tensors(device)
    y = of(case).run(x, weight, *rest, **case.options)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return of(case).run(x, weight, *rest, **case.options)

    none_at_1 = x.new_empty((x.shape[0], 0, *x.shape[1:]))
    none = torch.vmap(forward, (1, None))(none_at_1, weight)
    assert (none.shape, none.dtype, none.device) == ((0, *y.shape), y.dtype, y.device)
    gradients = torch.func.grad(lambda x, weight: forward(x, weight).sum(), (0, 1))
    none_x, none_weight = torch.vmap(gradients, (1, None))(none_at_1, weight)
    assert none_x.shape == (0, *x.shape) and none_weight.shape == (0, *weight.shape)
    # What no element of a mapped dimension could be is refused as for one element.
    with pytest.raises(RuntimeError, match="dw_weight"):
        torch.vmap(forward, (1, None))(none_at_1, weight[1:])


def some(tensors: tuple) -> list[Tensor]:
    return [t for t in tensors if t is not None]


@pytest.mark.parametrize("layout", LAYOUTS)
@calls()
def test_a_batch_of_gradients(device: str, case: Case | Block, layout: str):
    """torch.autograd.grad(is_grads_batched=True), whose tensors are of a dispatch key of their own."""
    tensors = leaves(case.tensors(device, torch.float64, layout))
    y = of(case).run(*tensors, **case.options)
    grads = torch.randn((3, *y.shape), generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    found = torch.autograd.grad(y, some(tensors), grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, some(tensors), grad, retain_graph=True) for grad in grads]
    for batch, *parts in zip(found, *each, strict=True):
        torch.testing.assert_close(batch, torch.stack(parts), rtol=1e-12, atol=1e-12)


@both
def test_a_batch_of_gradients_of_some_tensors(device: str, subject: Subject):
    tensors = list(subject.case().tensors(device, torch.float64))
    weights = slice(1, 1 + subject.weights)
    tensors[weights] = subject.restride(tensors[weights])
    x, weight, *rest = leaves(tensors)
    y = subject.run(x, weight, *(t if t is None else t.detach() for t in rest), **subject.case().options)
    grads = torch.ones((), dtype=y.dtype, device=device).expand(2, *y.shape)
    (found,) = torch.autograd.grad(y, weight, grads, is_grads_batched=True, retain_graph=True)
    (want,) = torch.autograd.grad(y, weight, grads[0])
    torch.testing.assert_close(found, torch.stack([want, want]), rtol=1e-12, atol=1e-12)


@both
def test_a_vectorized_jacobian(device: str, subject: Subject):
    x, *parameters = subject.case().tensors(device, torch.float64)

    def f(x: Tensor) -> Tensor:
        return subject.run(x, *parameters, **subject.case().options).flatten(1).sum(1)

    slow = torch.autograd.functional.jacobian(f, x)
    assert slow.count_nonzero() > 0
    for fast in (torch.autograd.functional.jacobian(f, x, vectorize=True), torch.func.jacrev(f)(x)):
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


@both
def test_a_batch_of_gradients_has_no_derivative(device: str, subject: Subject):
    """Its graph would be lost with the batch, so that the second derivative were taken for zero."""
    x, *parameters = leaves(subject.case().tensors(device))
    y = subject.run(x, *parameters, **subject.case().options)
    grads = torch.ones((2, *y.shape), device=device)
    with pytest.raises(NotImplementedError, match="no second derivative: is_grads_batched without create_graph"):
        torch.autograd.grad(y, x, grads, is_grads_batched=True, create_graph=True)


@pytest.mark.parametrize("mapped", ["all", "x", "weights"])
@calls(Case(kernel=(2, 4), padding="same", mid_activation="silu"), Block(kernel=4), Block(residual=False, o=3))
def test_vmap_of_gradients(device: str, case: Case | Block, mapped: str):
    tensors = case.tensors(device, torch.float64)
    dims = tuple(0 if mapped == "all" or (mapped == "x") == (i == 0) else None for i in range(len(tensors)))
    stacked = tuple(t if d is None else torch.stack([t, -2 * t, t / 3]) for t, d in zip(tensors, dims, strict=True))

    def loss(*tensors: Tensor) -> Tensor:
        return of(case).run(*tensors, **case.options).square().sum()

    gradients = torch.func.grad(loss, tuple(range(len(tensors))))
    each = [gradients(*(t if d is None else t[i] for t, d in zip(stacked, dims, strict=True))) for i in range(3)]
    for chunk_size in (None, 2):
        found = torch.vmap(gradients, dims, chunk_size=chunk_size)(*stacked)
        for batch, *parts in zip(found, *each, strict=True):
            torch.testing.assert_close(batch, torch.stack(parts), rtol=1e-12, atol=1e-12)


@both
def test_batches_of_gradients_of_meta_tensors(subject: Subject):
    tensors = leaves(subject.case().tensors("meta"))
    y = subject.run(*tensors, **subject.case().options)
    found = torch.autograd.grad(y, tensors, y.new_empty((3, *y.shape)), is_grads_batched=True)
    assert [(g.shape, g.dtype, g.is_meta) for g in found] == [((3, *t.shape), t.dtype, True) for t in tensors]


# ---- the way to a kernel, with one that stands in for it ----


class StandIn:
    """Kernel that checks the contract of Kernel.launch and computes through ATen."""

    def __init__(self, subject: Subject, problem):
        self.subject, self.problem, self.launches = subject, problem, 0

    def launch(self, tensors: tuple, y: Tensor, addresses: list[int]) -> None:
        x, *parameters = tensors
        operator, p = self.subject.operator, self.problem
        self.launches += 1
        assert x.shape == ((p.n, p.c, p.h, p.w) if self.subject is SEPARABLE else (p.n, p.c, p.l))
        assert y.shape == ((p.n, p.o, p.p, p.q) if self.subject is SEPARABLE else (p.n, p.o, p.l))
        for t in (x, y):
            assert (t if p.layout == "contiguous" else t.movedim(1, -1)).is_contiguous()
            assert t.data_ptr() % p.alignment == 0
        for name, t in zip(operator.tensors[1:], parameters, strict=True):
            assert (t is not None) == (getattr(p, name) if name.endswith("bias") else True)
            assert t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)
        assert addresses == [0 if t is None else t.data_ptr() for t in tensors]
        y.copy_(operator.forward(x, *parameters, *operator.options_of(p)))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, subject: Subject) -> list[StandIn]:
    """Plans every problem on path sm90 and hands out stand-ins, also for CPU tensors; yields those made so far."""
    from cutlass_sep import kernel, planner

    made: list[StandIn] = []

    def kernel_for(problem, device, plan):
        made.append(StandIn(subject, problem))
        return made[-1]

    monkeypatch.setattr(dispatch, "choose", lambda problem, device: planner.Plan("sm90", None, "stand-in"))
    monkeypatch.setattr(kernel, "kernel_for", kernel_for)
    return made


@both
def test_equal_calls_share_one_kernel_and_different_ones_do_not(subject: Subject, stand_ins: list[StandIn]):
    case = subject.case()
    for seed in range(3):
        tensors = case.tensors(seed=seed)
        subject.calls.assert_output_close(case, tensors, subject.run(*tensors, **case.options))
    assert [k.launches for k in stand_ins] == [3]
    others = {
        SEPARABLE: [Case(stride=2), Case(dw_bias=False), Case(n=3)],
        BLOCK: [
            Block(dilation=2), Block(activation="gelu_tanh"), Block(residual=False), Block(expand_bias=False),
            Block(dw_bias=False), Block(l=17),
        ],
    }[subject]  # fmt: skip
    for other in others:
        subject.run(*other.tensors(), **other.options)
    subject.run(*case.tensors(), **case.options, fp32_precision="tf32")
    subject.run(*case.tensors(layout="channels_last"), **case.options)
    assert [k.launches for k in stand_ins] == [3] + [1] * (len(others) + 2)
    *made, tf32, last = [k.problem for k in stand_ins]
    assert len({*made, tf32, last}) == len(stand_ins)
    assert (tf32.fp32_precision, last.layout) == ("tf32", "channels_last")
    for other, problem in zip((case, *others), made, strict=True):
        assert problem == problem_of(other)


@both
def test_kernels_get_dense_aligned_tensors(subject: Subject, stand_ins: list[StandIn]):
    case = subject.case()
    x, *parameters = tensors = case.tensors()
    for viewed, view in views():
        if viewed is subject:
            changed = (VIEWS[view][0](subject, x), *parameters)
            subject.calls.assert_output_close(case, changed, subject.run(*changed, **case.options))
    assert {k.problem.alignment for k in stand_ins} == ({4, 16} if subject is SEPARABLE else {4, 8, 16})
    subject.calls.assert_output_close(case, tensors, subject.run(x, *odd(parameters), **case.options))
    first = subject.operator.tensors[1 + subject.weights]
    bare = subject.case(**{first: False})
    stepped = strided(bare.tensors())
    subject.calls.assert_output_close(bare, stepped, subject.run(*stepped, **bare.options))


@both
def test_training_and_autocast_use_the_kernel_too(subject: Subject, stand_ins: list[StandIn]):
    case = subject.case()
    tensors = leaves(case.tensors())
    y = subject.run(*tensors, **case.options)
    y.backward(torch.ones_like(y))
    assert [k.launches for k in stand_ins] == [1]
    subject.calls.assert_gradients_close(case, tensors, torch.ones_like(y), tuple(t.grad for t in tensors))
    with torch.autocast("cpu", torch.bfloat16):
        subject.run(*tensors, **case.options)
        subject.run(tensors[0].bfloat16(), *tensors[1:], **case.options)
    ran = [("float32", True), ("bfloat16", False), ("bfloat16", True)]
    if subject is SEPARABLE:
        ran = [("float32", False), ("bfloat16", False)]
    assert [(k.problem.dtype, k.problem.residual) for k in stand_ins] == ran


@both
def test_an_empty_batch_needs_no_kernel(subject: Subject, stand_ins: list[StandIn]):
    case = subject.case(n=0)
    y = subject.run(*case.tensors(), **case.options)
    assert y.shape == ((0, 16, 10, 12) if subject is SEPARABLE else (0, 6, 16))
    assert stand_ins == []


@pytest.fixture
def unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem, device):
        raise Unsupported(f"no kernel for {problem.c} channels")

    monkeypatch.setattr(dispatch, "choose", refuse)


@both
def test_fallback_warns_once_a_reason(subject: Subject, unsupported: None):
    case, other = subject.case(), subject.case(c=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            y = subject.run(*case.tensors(), **case.options)
            subject.calls.assert_output_close(case, case.tensors(), y)
        subject.run(*subject.case(n=3).tensors(), **case.options)
        subject.run(*other.tensors(), **other.options)
    reasons = [str(w.message).split(": ")[1] for w in caught]
    assert reasons == [f"no kernel for {case.c} channels", "no kernel for 4 channels"]
    assert {w.filename for w in caught} == {__file__}


@both
def test_no_fallback_where_it_is_forbidden(subject: Subject, unsupported: None, monkeypatch: pytest.MonkeyPatch):
    case = subject.case()
    with pytest.warns(RuntimeWarning):
        subject.run(*case.tensors(), **case.options)
    monkeypatch.setenv("CUTLASS_SEP_FALLBACK", "0")
    for case in (subject.case(), subject.case(n=5)):  # known and new
        with pytest.raises(Unsupported, match=f"no kernel for {case.c} channels"):
            subject.run(*case.tensors(), **case.options)


@both
def test_errors_of_a_launch_are_not_hidden(subject: Subject, stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch):
    def cold(self, *tensors):
        raise RuntimeError("cannot be built while a CUDA graph is captured")

    monkeypatch.setattr(StandIn, "launch", cold)
    with pytest.raises(RuntimeError, match="graph"):
        subject.run(*subject.case().tensors(), **subject.case().options)
    assert not dispatch._launchers


@both
def test_the_table_is_bounded(subject: Subject, stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "_MAX_LAUNCHERS", 4)
    for n in range(1, 12):
        case = subject.case(n=n)
        subject.run(*case.tensors(), **case.options)
        assert len(dispatch._launchers) <= 4
    assert len(stand_ins) == 11


# ---- the 2-D operator alone ----


@pytest.mark.parametrize("kernel", [(2, 2), (4, 4), (1, 4), (2, 3)])
def test_same_puts_the_odd_pixel_right_and_below(device: str, kernel: tuple[int, int]):
    x = torch.zeros(1, 1, 5, 5, device=device)
    x[0, 0, 2, 2] = 1
    weight = torch.arange(1.0, 1 + math.prod(kernel), device=device).view(1, 1, *kernel)
    y = separable(x, weight, torch.ones(1, 1, 1, 1, device=device), padding="same")
    total = [k - 1 for k in kernel]
    pads = (total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2)
    assert torch.equal(y, F.conv2d(F.pad(x, pads), weight))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_and_inf_stay_in_their_receptive_field(device: str, layout: str):
    def call(value: float, weight: Tensor) -> Tensor:
        x = torch.ones(1, 1, 8, 8, device=device)
        x[0, 0, 3, 3] = value
        x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
        return separable(x, weight, torch.ones(5, 1, 1, 1, device=device), padding=1)

    weight = torch.ones(1, 1, 3, 3, device=device)
    y = call(math.nan, weight)
    assert int(y.isnan().sum()) == 45
    assert y[:, :, 2:5, 2:5].isnan().all()
    weight[0, 0, 1, 1] = 0
    y = call(math.inf, weight)
    assert int(y.isnan().sum()) == 5
    assert int(y.isinf().sum()) == 40
    assert y[:, :, 3, 3].isnan().all()


def test_x_inside_nan_is_not_poisoned(device: str):
    buffer = torch.full((2, 5, 11, 11), math.nan, device=device)
    x = buffer[:, 1:4, 2:9, 2:9]
    x.copy_(torch.randn(x.shape))
    case = Case(c=3, o=5, h=7, w=7)
    tensors = (x, *case.tensors(device)[1:])
    SEPARABLE.calls.assert_output_close(case, tensors, separable(*tensors, **case.options))


def test_what_only_looks_wrong_works(device: str):
    x, dw_weight, pw_weight = (torch.ones(1, 1, k, k, device=device) for k in (9, 3, 1))
    assert separable(x, dw_weight, pw_weight, dilation=4).shape == (1, 1, 1, 1)
    assert separable(x[:, :, :3, :3], dw_weight, pw_weight, padding=5).shape == (1, 1, 11, 11)
    assert separable(x, dw_weight, pw_weight, stride=[2, 1], padding=[1, 0]).shape == (1, 1, 5, 7)


def test_errors_do_not_depend_on_earlier_calls():
    """1 equals True and 1.0, also as a key of a table and in a pair."""
    tensors = Case().tensors()
    right = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    want = separable(*tensors, **right)
    for name in right:
        for wrong in ((1.0, 1.0), (1, 1.0), (True, True), 1.0, True):
            refused = rf"{name} must be an int or a pair of ints .* got {re.escape(str(wrong))}"
            with pytest.raises(ValueError, match=refused):
                separable(*tensors, **right | {name: wrong})
    known = len(dispatch._launchers)
    for same in ([1, 1], (np.int64(1), np.int64(1))):
        for _ in range(2):
            assert torch.equal(separable(*tensors, **dict.fromkeys(right, same)), want)
    assert len(dispatch._launchers) == known + 2, "one for a list, one for the ints that NumPy's stand for"


def test_gradients_are_seen_without_pytorchs_own_look():
    """torch_ops._any_requires_grad stands in for a function that early versions of PyTorch lack."""
    leaf, plain = torch.zeros(1, requires_grad=True), torch.zeros(1)
    for values in ((plain, None, 1, leaf), (plain, None, "relu"), (), (leaf,)):
        assert torch_ops._any_requires_grad(*values) == any(value is leaf for value in values)
