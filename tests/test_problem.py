"""Problems: what a call is described as, and how that description travels."""

from __future__ import annotations

import json
from dataclasses import replace

import gpu.accuracy
import numpy as np
import pytest
import separable
import torch
from block import Block, channels_last
from separable import Case

from cutlass_sep import estimate, reference, source
from cutlass_sep.problem import (
    ACTIVATIONS,
    Pads,
    SeparableBlock1dProblem,
    SeparableConv2dProblem,
    has_layout,
    is_dense,
    laid_out,
    layout_of,
    output_extent,
    pair,
    resolve_padding,
    same_pads,
    single,
    strides_of,
)


def problem_of(case: Case, layout: str = "contiguous", dtype: torch.dtype = torch.float32, **options):
    return SeparableConv2dProblem.from_tensors(
        *case.tensors(dtype=dtype, layout=layout), **case.options | options
    )  # fmt: skip


def test_fields():
    case = Case(kernel=(5, 2), stride=(2, 1), padding=(3, 1), dilation=(1, 2), dw_bias=False, activation="silu")
    assert problem_of(case, "channels_last") == SeparableConv2dProblem(
        n=2, c=8, h=10, w=12, o=16, kernel=(5, 2), stride=(2, 1), padding=Pads(3, 3, 1, 1), dilation=(1, 2),
        dtype="float32", layout="channels_last", dw_bias=False, pw_bias=True, mid_activation=None, activation="silu",
        fp32_precision="ieee", alignment=16,
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 5, 8, 17])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2}, {"padding": 2, "dilation": 2}, {"padding": (0, 3), "stride": 3}]
)
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 4), (1, 7)])
def test_extent_of_y_is_that_of_conv2d(size: int, options: dict, kernel: tuple[int, int]):
    case = Case(h=size + 12, w=size + 13, kernel=kernel, padding=0)
    tensors = case.tensors("meta")
    options = {"stride": 1, "padding": 0, "dilation": 1} | options
    problem = SeparableConv2dProblem.from_tensors(*tensors, **options)
    want = torch.nn.functional.conv2d(tensors[0], tensors[1], groups=8, **options).shape[2:]
    assert (problem.p, problem.q) == tuple(want)
    assert problem.q == output_extent(problem.w, problem.padding[2:], kernel[1], problem.stride[1], problem.dilation[1])


def test_padding_words():
    assert resolve_padding("same", (2, 4), (1, 1), (1, 1)) == (0, 1, 1, 2)
    assert resolve_padding("same", (3, 4), (1, 1), (2, 3)) == (2, 2, 4, 5)
    assert resolve_padding("valid", (3, 3), (2, 2), (1, 1)) == (0, 0, 0, 0)
    assert resolve_padding((1, 2), (3, 3), (1, 1), (1, 1)) == (1, 1, 2, 2)
    pads = Pads(1, 2, 3, 4)
    assert resolve_padding(pads, (3, 3), (2, 2), (1, 1)) is pads


def test_pair():
    assert (
        pair("stride", 2, minimum=1) == pair("stride", [2, 2], minimum=1) == pair("stride", (2,), minimum=1) == (2, 2)
    )
    of_numpy = pair("stride", (np.int64(2), np.uint8(3)), minimum=1)
    assert of_numpy == (2, 3) and all(type(value) is int for value in of_numpy)
    for value in (1.0, True, "1", (1, 2, 3), (1, None), (), np.float32(1), np.True_):
        with pytest.raises(ValueError, match="stride"):
            pair("stride", value, minimum=1)
    with pytest.raises(RuntimeError, match="stride"):
        pair("stride", (1, 0), minimum=1)


def test_single():
    assert single("dilation", 2, minimum=1) == single("dilation", [2], minimum=1) == single("dilation", (2,), minimum=1)
    assert type(single("dilation", np.int64(3), minimum=1)) is int
    for value in (1.0, True, "1", (1, 2), (None,), (), np.float32(1), None):
        with pytest.raises(ValueError, match="dilation must be an int"):
            single("dilation", value, minimum=1)
    with pytest.raises(RuntimeError, match="dilation must be at least 1"):
        single("dilation", 0, minimum=1)


def test_json_round_trip():
    for case in (Case(), Case(kernel=(2, 3), padding="same", mid_activation="gelu", pw_bias=False)):
        problem = problem_of(case, dtype=torch.bfloat16)
        back = SeparableConv2dProblem.from_json(json.loads(json.dumps(problem.to_json())))
        assert back == problem
        assert hash(back) == hash(problem)
        assert isinstance(back.padding, Pads)


def test_precision_is_a_matter_of_fp32_alone():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert problem_of(Case(), dtype=dtype, fp32_precision="tf32").fp32_precision is None
    assert problem_of(Case(), fp32_precision="tf32").fp32_precision == "tf32"


def test_layout_rule():
    x = torch.zeros(2, 3, 4, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    layouts = {
        "contiguous": [x, x[:, :, ::2], x.transpose(2, 3), x[:1].expand(2, -1, -1, -1), last[:, 1:], x[0], x[:, :1]],
        "channels_last": [last, x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), last[0], last[:1]],
    }
    for layout, tensors in layouts.items():
        for tensor in tensors:
            assert layout_of(tensor) == layout
            assert not (layout == "channels_last" and not is_dense(tensor))
    # Both at once: contiguous wins, as one channel or one pixel has no order.
    assert layout_of(last[:, :, :1, :1].clone(memory_format=torch.channels_last)) == "contiguous"
    assert [is_dense(t) for t in (x, last, x[0], last[0], x[:, :, ::2])] == [True, True, True, True, False]


def test_alignment_is_that_of_addresses_and_pitches():
    assert problem_of(Case(w=12)).alignment == 16
    assert problem_of(Case(w=13)).alignment == 4
    assert problem_of(Case(w=14)).alignment == 8
    assert problem_of(Case(w=13), "channels_last").alignment == 16
    assert problem_of(Case(w=12), dtype=torch.float16).alignment == 8
    assert problem_of(Case(c=6, w=12), "channels_last", torch.float16).alignment == 4
    assert problem_of(Case(w=16, stride=2, padding=0)).alignment == 4  # y has 7 columns
    x, *parameters = Case().tensors()
    shifted = torch.cat([x.new_zeros(2), x.flatten()])[2:].view(x.shape)
    problem = SeparableConv2dProblem.from_tensors(shifted, *parameters, padding=1)
    assert problem.alignment == 8
    # A view that must be copied lands at an aligned address.
    assert SeparableConv2dProblem.from_tensors(shifted.expand(2, -1, -1, -1)[:, :, ::2], *parameters).alignment == 8
    assert problem_of(Case()).with_alignment(32, 4).alignment == 4


def test_bytes_and_flops_of_the_lead_shape():
    tensors = Case(n=16, c=64, o=128, h=512, w=512, dw_bias=False, pw_bias=False).tensors("meta")
    problem = SeparableConv2dProblem.from_tensors(*tensors, padding=1)
    assert problem.bytes == pytest.approx(3.22e9, rel=1e-3)
    assert problem.flops == pytest.approx(73.5e9, rel=1e-3)


# ---- the block


def block_of(case: Block, layout: str = "contiguous", dtype: torch.dtype = torch.float32, **options):
    return SeparableBlock1dProblem.from_tensors(*case.tensors("meta", dtype, layout), **case.options | options)


def test_fields_of_a_block():
    case = Block(kernel=4, dilation=3, dw_bias=False, activation="silu", residual=False, o=5)
    problem = SeparableBlock1dProblem.from_tensors(*case.tensors(layout="channels_last"), **case.options)
    assert problem == SeparableBlock1dProblem(
        n=2, c=6, l=16, e=10, o=5, kernel=4, dilation=3, dtype="float32", layout="channels_last", expand_bias=True,
        dw_bias=False, project_bias=True, activation="silu", residual=False, fp32_precision="ieee", alignment=4,
    )  # fmt: skip
    assert (problem.y_shape, problem.pads) == ((2, 5, 16), (4, 5))
    back = SeparableBlock1dProblem.from_json(json.loads(json.dumps(problem.to_json())))
    assert (back, hash(back)) == (problem, hash(problem))
    assert block_of(case, dtype=torch.bfloat16, fp32_precision="tf32").fp32_precision is None


@pytest.mark.parametrize("dilation", [1, 2, 5])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 9])
def test_pads_of_a_block_are_those_of_same(kernel: int, dilation: int):
    problem = block_of(Block(kernel=kernel, dilation=dilation))
    assert (0, 0, *problem.pads) == resolve_padding("same", (1, kernel), (1, 1), (1, dilation))
    assert problem.pads == same_pads(kernel, dilation)
    assert problem.project.q == problem.expand.q == problem.l


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_halves_of_a_block(layout: str):
    case = Block(c=64, e=128, o=32, l=24, kernel=4, dilation=3, expand_bias=False, residual=False)
    problem = block_of(case, layout)
    common = {"n": 2, "h": 1, "w": 24, "dtype": "float32", "layout": layout, "fp32_precision": "ieee", "alignment": 16}
    for half, own in (
        (problem.expand, {"c": 64, "o": 128, "kernel": (1, 1), "pw_bias": False, "depthwise": False}),
        (
            problem.project,
            {"c": 128, "o": 32, "kernel": (1, 4), "dilation": (1, 3), "padding": Pads(0, 0, 4, 5), "dw_bias": True,
             "pw_bias": True, "mid_activation": "gelu", "activation": None, "residual": False},
        ),
    ):  # fmt: skip
        assert {name: getattr(half, name) for name in common | own} == common | own
        assert half.y_shape == (2, half.o, 1, 24)
        assert SeparableConv2dProblem.from_json(json.loads(json.dumps(half.to_json()))) == half
    assert problem.expand.flops + problem.project.flops == problem.flops
    assert block_of(Block()).project.residual
    # The hidden channels are read and written between the two.
    hidden = 4 * 2 * 128 * 24
    assert problem.expand.bytes + problem.project.bytes == problem.bytes + 2 * hidden
    with_residual = block_of(Block())
    x = 4 * 2 * 6 * 16
    assert with_residual.expand.bytes + with_residual.project.bytes == with_residual.bytes + 2 * 4 * 2 * 10 * 16 + x


def test_halves_are_made_once_and_are_no_part_of_a_block():
    """The planner asks for them a thousand times."""
    problem, other = block_of(Block()), block_of(Block())
    assert problem.expand is problem.expand and problem.project is problem.project
    assert (problem, hash(problem), problem.to_json()) == (other, hash(other), other.to_json())
    assert replace(problem, n=7).expand.n == replace(problem, n=7).project.n == 7


def test_alignment_of_a_block():
    def of(layout="contiguous", dtype=torch.float32, **sizes):
        problem = block_of(Block(**sizes), layout, dtype)
        return problem.alignment, problem.expand.alignment, problem.project.alignment

    assert of(l=16) == (16, 16, 16)
    assert of(l=17) == (4, 4, 4)
    assert of(l=17, dtype=torch.float16) == (2, 2, 2)
    assert of("channels_last", c=8, l=17, e=10) == (16, 8, 8)
    assert of("channels_last", c=6, l=16, e=16) == (8, 8, 8)
    assert of("channels_last", c=8, o=5, residual=False) == (4, 4, 4)
    x, *parameters = Block().tensors()
    shifted = torch.cat([x.new_zeros(2), x.flatten()])[2:].view(x.shape)
    assert SeparableBlock1dProblem.from_tensors(shifted, *parameters).alignment == 8
    # A view that must be copied lands at an aligned address.
    assert SeparableBlock1dProblem.from_tensors(shifted.expand(2, -1, -1)[:, :, ::2], *parameters).alignment == 16


def test_layout_rule_of_sequences():
    x = torch.zeros(2, 3, 5)
    last = channels_last(x)
    for tensor in (x, x[:, :, ::2], last[:, 1:], last[:, :, ::2], x[0], x.transpose(0, 1), x[:1].expand(2, -1, -1)):
        assert layout_of(tensor, 1) == "contiguous"
    for tensor in (last, last[0], last[:1], last[:, :, 1:][:1], torch.zeros(2, 5, 3).transpose(1, 2)):
        assert layout_of(tensor, 1) == "channels_last"
    assert [is_dense(t, 1) for t in (x, last, x[0], last[0], x[:, :, ::2])] == [True, True, True, True, False]
    # Both at once: contiguous wins, as one channel or one position has no order.
    assert layout_of(channels_last(torch.zeros(2, 3, 1)), 1) == layout_of(channels_last(torch.zeros(2, 1, 5)), 1)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 1), (0, 3, 4, 5), (2, 3, 5), (1, 1, 5), (0, 3, 5)], ids=str)
def test_laying_out(shape: tuple[int, ...]):
    x = torch.arange(float(np.prod(shape))).view(shape)
    n, c, *extents = shape
    last = torch.empty(n, *extents, c).movedim(-1, 1).copy_(x)
    for layout, want in (("contiguous", x), ("channels_last", last)):
        assert strides_of(shape, layout) == want.stride()
        for given in (x, last, torch.stack([x, x], -1)[..., 0]):
            made = laid_out(given, layout)
            assert torch.equal(made, x)
            assert has_layout(made, layout)
            assert (made is given) == has_layout(given, layout)


def test_bytes_and_flops_of_the_lead_block():
    lead = Block(n=32, c=256, e=512, l=4096, kernel=9)
    assert block_of(lead).bytes == pytest.approx(0.27e9, rel=1e-2)
    assert block_of(lead).flops == pytest.approx(68.7e9 + 2 * 32 * 4096 * 512 * 9, rel=1e-3)
    assert block_of(lead, dtype=torch.float16).bytes == pytest.approx(0.13e9, rel=4e-2)


def test_every_table_has_every_activation():
    names = set(ACTIVATIONS)
    assert set(reference.ACTIVATIONS) == names - {None}
    for table in (estimate._ACTIVATION, separable.ACTIVATIONS, gpu.accuracy.SLOPES):
        assert set(table) == names
    check = (source.templates() / "standalone" / "check.py.j2").read_text()
    assert [name for name in names - {None} if f'    "{name}": ' not in check] == []


def test_options_are_names():
    tensors = Block().tensors()
    for value in (3, False, ["gelu"], np.array(["gelu", "relu"]), torch.nn.GELU(), torch.zeros(2)):
        with pytest.raises(ValueError, match="activation=.* is not supported"):
            SeparableBlock1dProblem.from_tensors(*tensors, activation=value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused():
    x, *parameters = Block().tensors()
    nested = torch.nested.nested_tensor([x[0], x[1, :, :9]])
    with pytest.raises(TypeError, match="x must be a dense strided tensor, got .* nested"):
        SeparableBlock1dProblem.from_tensors(nested, *parameters)
