"""The block's module as a drop-in for three nn.Conv1d."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from block import Block, assert_output_close, channels_last, is_channels_last
from separable import ACTIVATIONS
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as legacy_weight_norm

import cutlass_sep
from cutlass_sep import SeparableConvBlock1d, functional


class Plain(nn.Module):
    """What SeparableConvBlock1d replaces."""

    def __init__(self, channels: int, expanded_channels: int, kernel_size: int, dilation: int = 1) -> None:
        super().__init__()
        self.pointwise = nn.Conv1d(channels, expanded_channels, 1)
        self.depthwise = nn.Conv1d(
            expanded_channels, expanded_channels, kernel_size, padding="same", dilation=dilation,
            groups=expanded_channels,
        )  # fmt: skip
        self.project_back = nn.Conv1d(expanded_channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project_back(nn.functional.gelu(self.depthwise(self.pointwise(x))))


def make(device: str = "cpu", kernel_size: int = 3, **options) -> SeparableConvBlock1d:
    torch.manual_seed(0)
    return SeparableConvBlock1d(6, 10, kernel_size, **{"device": device} | options)


def by_children(module: SeparableConvBlock1d, x: Tensor) -> Tensor:
    z = ACTIVATIONS[module.activation](module.depthwise(module.pointwise(x)))
    return x + module.project_back(z) if module.residual else module.project_back(z)


def tensors_of(module: SeparableConvBlock1d, x: Tensor) -> tuple[Tensor | None, ...]:
    children = (module.pointwise, module.depthwise, module.project_back)
    return (x, *(c.weight for c in children), *(c.bias for c in children))


def close(got: Tensor, want: Tensor) -> None:
    """Both fp32, sums of at most 22 terms of size 1: two results of at most 3e-6 error each."""
    torch.testing.assert_close(got, want, rtol=0, atol=6e-6)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """Arguments of the fused calls made."""
    made = []
    call = functional.call

    def record(*args):
        made.append(args)
        return call(*args)

    monkeypatch.setattr(functional, "call", record)
    return made


@pytest.mark.parametrize("activation, residual", [("gelu", True), (None, False), ("silu", True), ("gelu_tanh", False)])
@pytest.mark.parametrize("kernel_size, dilation", [(1, 1), (3, 1), (4, 3), (9, 2)])
def test_equals_the_children(
    device: str, kernel_size: int, dilation: int, activation: str | None, residual: bool, calls: list
):
    module = make(device, kernel_size, dilation=dilation, activation=activation, residual=residual)
    case = Block(kernel=kernel_size, dilation=dilation, activation=activation, residual=residual)
    x = torch.randn(2, 6, 11, device=device)
    for given in (x, channels_last(x)):
        y = module(given)
        close(y, by_children(module, x))
        assert_output_close(case, tensors_of(module, x), y)
        assert is_channels_last(y) == is_channels_last(given)
    close(module(x[0]), by_children(module, x[0]))
    assert len(calls) == 3


def test_expand_bias_of_one_and_x_of_zero(device: str):
    """Where padding x instead of the expanded channels goes wrong: at both ends."""
    module = SeparableConvBlock1d(4, 8, 3, device=device)
    with torch.no_grad():
        module.pointwise.bias.fill_(1)
    x = torch.zeros(1, 4, 8, device=device)
    close(module(x), x + module.project_back(torch.nn.functional.gelu(module.depthwise(module.pointwise(x)))))


def test_default_of_the_activation_is_erf_gelu(device: str):
    module, plain = make(device), Plain(6, 10, 3).to(device)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 6, 40, device=device)
    close(module(x), plain(x))
    assert (module.activation, module.residual, module.fp32_precision) == ("gelu", True, "ieee")


def test_state_dict_keys_and_round_trip():
    module = make(kernel_size=4, dilation=2)
    shapes = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    assert shapes == {
        "pointwise.weight": (10, 6, 1), "pointwise.bias": (10,),
        "depthwise.weight": (10, 1, 4), "depthwise.bias": (10,),
        "project_back.weight": (6, 10, 1), "project_back.bias": (6,),
    }  # fmt: skip
    assert not list(module.buffers())
    plain = Plain(6, 10, 4, dilation=2)
    x = torch.randn(1, 6, 9)
    assert module.load_state_dict(plain.state_dict()).missing_keys == []
    close(module(x), plain(x))
    plain.load_state_dict(make(kernel_size=4, dilation=2).state_dict(), strict=True)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    fresh = make(kernel_size=4, dilation=2)
    fresh.load_state_dict(torch.load(buffer))
    assert torch.equal(fresh(x), module(x))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))


def test_children_are_made_as_the_plain_ones_are():
    module, plain = make(), Plain(6, 10, 3)
    for name, child in plain.named_children():
        assert repr(getattr(module, name)) == repr(child)
        assert type(getattr(module, name)) is nn.Conv1d
    torch.manual_seed(0)
    drawn = Plain(6, 10, 3).state_dict()
    assert all(torch.equal(value, drawn[name]) for name, value in module.state_dict().items())
    meta = make("meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.float16)}


CHANGES = {
    "optimizer_step": lambda m: torch.optim.SGD(m.parameters(), 0.5).step(),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "data_copy": lambda m: m.pointwise.weight.data.copy_(torch.ones_like(m.pointwise.weight)),
    "data_replaced": lambda m: setattr(m.project_back.weight, "data", torch.ones_like(m.project_back.weight)),
    "new_parameter": lambda m: setattr(m.depthwise, "bias", nn.Parameter(torch.ones_like(m.depthwise.bias))),
    "bias_removed": lambda m: setattr(m.pointwise, "bias", None),
    "dilation_set": lambda m: setattr(m, "depthwise", nn.Conv1d(10, 10, 3, padding="same", dilation=2, groups=10)),
    "padding_of_ints": lambda m: setattr(m, "depthwise", nn.Conv1d(10, 10, 5, padding=4, dilation=2, groups=10)),
    "no_padding_for_one_tap": lambda m: setattr(m, "depthwise", nn.Conv1d(10, 10, 1, padding="valid", groups=10)),
    "other_width": lambda m: (
        setattr(m, "pointwise", nn.Conv1d(6, 4, 1)),
        setattr(m, "depthwise", nn.Conv1d(4, 4, 3, padding="same", groups=4)),
        setattr(m, "project_back", nn.Conv1d(4, 6, 1, bias=False)),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameters_are_read_at_each_call(change: str, calls: list):
    module = make()
    x = torch.randn(2, 6, 9)
    before = module(x)
    before.sum().backward()
    CHANGES[change](module)
    after = module(x)
    close(after, by_children(module, x))
    assert not torch.equal(after, before)
    assert len(calls) == 2


def double_output(module, args, output):
    return 2 * output


def with_depthwise(*args, **kwargs):
    return lambda m: setattr(m, "depthwise", nn.Conv1d(10, 10, *args, **{"groups": 10} | kwargs))


PLAIN_WAYS = {
    "legacy_weight_norm": lambda m: legacy_weight_norm(m.depthwise),
    "weight_norm": lambda m: parametrizations.weight_norm(m.project_back),
    "forward_hook": lambda m: m.project_back.register_forward_hook(double_output),
    "forward_pre_hook": lambda m: m.pointwise.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "full_backward_hook": lambda m: m.depthwise.register_full_backward_hook(lambda module, gi, go: None),
    "forward_replaced": lambda m: setattr(m.depthwise, "forward", lambda x: x),
    "another_class": lambda m: setattr(m, "pointwise", nn.Sequential(nn.Conv1d(6, 10, 1), nn.ReLU())),
    "wide_pointwise": lambda m: setattr(m, "pointwise", nn.Conv1d(6, 10, 3, padding=1)),
    "padded_pointwise": lambda m: (
        setattr(m, "pointwise", nn.Conv1d(6, 10, 1, padding=1)),
        with_depthwise(3, padding=0)(m),
    ),
    "grouped_project": lambda m: setattr(m, "project_back", nn.Conv1d(10, 6, 1, groups=2)),
    "full_depthwise": with_depthwise(3, padding=1, groups=1),
    "reflecting_depthwise": with_depthwise(3, padding=1, padding_mode="reflect"),
    "one_tap_more_on_the_left": lambda m: setattr(m, "depthwise", Shifted(10, 10, 2, padding=1, groups=10)),
}


class Shifted(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., :-1]


@pytest.mark.parametrize("change", PLAIN_WAYS)
def test_changed_children_are_called_the_plain_way(change: str, calls: list):
    module = make(activation="silu")
    x = torch.randn(2, 6, 9, requires_grad=True)
    module(x)
    PLAIN_WAYS[change](module)
    explanation = cutlass_sep.explain(module, x)
    y = module(x)
    assert len(calls) == 1
    close(y, by_children(module, x))
    y.sum().backward()
    assert (explanation.path, explanation.schedule, explanation.form) == ("torch", None, None)
    assert "child" in explanation.reason
    cutlass_sep.warmup(module, x)


@pytest.mark.parametrize(
    "change, lengths",
    [(with_depthwise(4, padding=2), ("10", "11")), (with_depthwise(3, padding=1, stride=2), ("10", "5"))],
    ids=["one_longer", "strided"],
)
def test_a_branch_of_another_length_is_refused(change, lengths: tuple[str, str]):
    module = make()
    change(module)
    x = torch.randn(1, 6, 10)
    with pytest.raises(RuntimeError, match=f"{lengths[0]}.*{lengths[1]}"):
        module(x)


@pytest.mark.parametrize("kernel_size, padding, length", [(10, 0, 10), (2, 1, 1)])
def test_a_branch_or_x_of_length_1_broadcasts_as_in_torch(kernel_size: int, padding: int, length: int):
    module = make()
    with_depthwise(kernel_size, padding=padding)(module)
    x = torch.randn(1, 6, length)
    y = module(x)
    assert y.shape == (1, 6, max(length, 2))
    assert torch.equal(y, by_children(module, x))


def test_weight_norm_is_applied_after_a_step():
    module = make()
    legacy_weight_norm(module.depthwise)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x = torch.randn(2, 6, 9)
    module(x).square().mean().backward()
    optimizer.step()
    close(module(x), by_children(module, x))


def test_a_removed_hook_restores_the_fused_call(calls: list):
    module = make(residual=False)
    x = torch.randn(1, 6, 9)
    handle = module.project_back.register_forward_hook(double_output)
    doubled = module(x)
    handle.remove()
    close(2 * module(x), doubled)
    assert len(calls) == 1


def test_global_hooks_see_the_children(calls: list):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    try:
        make()(torch.randn(1, 6, 9))
    finally:
        handle.remove()
    assert seen == [nn.Conv1d, nn.Conv1d, nn.Conv1d, SeparableConvBlock1d]
    assert calls == []


def test_functional_call_and_training(device: str):
    module = make(device)
    x = torch.randn(2, 6, 9, device=device)
    others = {name: torch.randn_like(p) for name, p in module.named_parameters()}
    y = torch.func.functional_call(module, others, (x,))
    twin = make(device)
    twin.load_state_dict(others)
    assert torch.equal(y, twin(x))
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.05), []
    target = torch.randn(2, 6, 9, device=device)
    for _ in range(5):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"channels": 0}, "channels"),
        ({"channels": None}, "channels"),
        ({"channels": True}, "channels"),
        ({"expanded_channels": -2}, "expanded_channels"),
        ({"expanded_channels": 4.0}, "expanded_channels"),
        ({"kernel_size": 0}, "kernel_size"),
        ({"kernel_size": (3, 3)}, "kernel_size"),
        ({"kernel_size": "3"}, "kernel_size"),
        ({"dilation": 0}, "dilation"),
        ({"dilation": 1.5}, "dilation"),
        ({"dilation": (1, 2)}, "dilation"),
        ({"activation": "GELU"}, "activation"),
        ({"residual": 1}, "residual"),
        ({"residual": None}, "residual"),
        ({"fp32_precision": "high"}, "fp32_precision"),
    ],
    ids=str,
)
def test_constructor_refuses(options: dict, match: str):
    with pytest.raises(ValueError, match=match):
        SeparableConvBlock1d(**{"channels": 8, "expanded_channels": 16, "kernel_size": 3} | options)


def test_arguments_that_nn_conv1d_takes():
    module = SeparableConvBlock1d(np.int64(6), 10, (3,), dilation=[np.int64(2)])
    assert repr(module) == repr(SeparableConvBlock1d(6, 10, 3, dilation=2))
    for argument in ("padding_mode", "bias", "stride"):
        with pytest.raises(TypeError, match=argument):
            SeparableConvBlock1d(6, 10, 3, **{argument: 1})
    with pytest.raises(TypeError, match="positional"):
        SeparableConvBlock1d(6, 10, 3, 1)


def test_repr_tells_the_options():
    text = repr(make(activation="silu", residual=False, fp32_precision="tf32"))
    for part in ("activation='silu'", "residual=False", "fp32_precision='tf32'", "groups=10", "padding=same"):
        assert part in text


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_compile_fullgraph(device: str, layout: str):
    module = make(device, kernel_size=4)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for n in (2, 3):
        x = torch.randn(n, 6, 9, device=device)
        x = channels_last(x) if layout == "channels_last" else x
        y, want = compiled(x), module(x)
        assert torch.equal(y, want)
        assert y.stride() == want.stride()
    y.sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    want.sum().backward()
    for got, p in zip(gradients, module.parameters(), strict=True):
        assert torch.equal(got, p.grad)


def test_export(device: str):
    module = make(device)
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=4096)
    x = torch.randn(2, 6, 9, device=device)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: batch, 2: length},))
    other = torch.randn(5, 6, 100, device=device)
    assert torch.equal(program.module()(other), module(other))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device: str, low: torch.dtype):
    module = make(device)
    x = torch.randn(2, 6, 9, device=device)
    with torch.autocast(device, dtype=low):
        y = module(x)
        want = by_children(module, x)
    assert y.dtype == want.dtype == torch.float32
    # Each of both rounds four times, on values of at most 4 here.
    torch.testing.assert_close(y, want, rtol=0, atol=8 * 4 * torch.finfo(low).eps / 2)
    y.sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
