"""A problem: everything about one call that decides which kernel runs it, as plain frozen data.

This is the first step of problem -> schedule -> source -> cubin -> kernel -> op -> module and knows none of the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import torch

#: dtype name -> bytes per element, for the dtypes that kernels exist for.
KERNEL_DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
#: float64 is legal too and runs on path "torch".
DTYPES = {**KERNEL_DTYPES, "float64": 8}
LAYOUTS = ("contiguous", "channels_last")
PRECISIONS = ("ieee", "tf32")
#: Names accepted for `mid_activation` and `activation`; the device code of each is in templates/activation.cuh.
ACTIVATIONS = (None, "relu", "relu6", "silu", "hardswish", "gelu", "gelu_tanh")
#: Bytes of the widest access a kernel makes; a problem's `alignment` never exceeds it.
MAX_ALIGNMENT = 16
#: Extents of a problem's `layer`: larger than windows, and aligned.
_ANY_SIZE = 1 << 20


class once:
    """A property that is computed once, as `cached_property` is, but without a lock, which takes longer than most.

    Of what is asked for while schedules are ranked, thousands at a time.
    """

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class Pads(NamedTuple):
    """Padding in pixels, resolved: `resolve_padding` makes it of the int, pair, 'same' or 'valid' that callers give."""

    top: int
    bottom: int
    left: int
    right: int


class Problem(ABC):
    """What the problems of all operators have in common; each is a frozen dataclass of its own."""

    #: Short name of the operator, as in results and on the command line.
    op: ClassVar[str]
    #: Number of spatial axes of x and y, behind the batch and the channels.
    spatial: ClassVar[int]
    #: Names of the fields that a kernel takes at run time: the batch and the spatial extents.
    sizes: ClassVar[tuple[str, ...]]

    n: int
    dtype: str
    layout: str
    alignment: int

    @property
    def element_size(self) -> int:
        """Bytes per element of x and y."""
        return DTYPES[self.dtype]

    @property
    @abstractmethod
    def y_shape(self) -> tuple[int, ...]:
        """Shape of y, batched."""

    @property
    @abstractmethod
    def pitches(self) -> tuple[int, ...]:
        """Elements from one run of memory of x and of y to the next: the extents of their innermost dimension."""

    @once
    def layer(self):
        """This problem at one size that stands for all of them, as aligned as it is itself."""
        return replace(self.with_alignment(self.alignment), **dict.fromkeys(self.sizes, _ANY_SIZE))

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]):
        """The problem that `to_json` wrote."""
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})

    def with_alignment(self, *addresses: int):
        """This problem with the alignment that tensors at these addresses (bytes) and its own pitches allow."""
        pitches = (extent * self.element_size for extent in self.pitches)
        return replace(self, alignment=math.gcd(MAX_ALIGNMENT, *addresses, *pitches))

    def _aligned_as(self, x: torch.Tensor):
        """with_alignment of x where kernels read it; what they cannot read is copied to an aligned address."""
        readable = is_dense(x, self.spatial) and x.device.type != "meta"
        return self.with_alignment(x.data_ptr() if readable else 0)


@dataclass(frozen=True)
class SeparableConv2dProblem(Problem):
    """Depthwise [C,1,kh,kw] then pointwise [O,C,1,1] on x [N,C,H,W], giving y [N,O,P,Q].

    `padding` is (top, bottom, left, right) in pixels; `layout` is the memory format of x and of y; `alignment` is the
    number of bytes (a power of two, at most 16) that divides the address of x and of y and the pitch of their innermost
    dimension.
    `fp32_precision` is None unless `dtype` is "float32".

    Two fields serve the block's two-kernel form alone: without `depthwise` there is no depthwise convolution (and
    `kernel` is (1, 1)), with `residual` a tensor of y's shape and layout is added to y.
    """

    op = "dwsep2d"
    spatial = 2
    sizes = ("n", "h", "w")

    n: int
    c: int
    h: int
    w: int
    o: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: Pads
    dilation: tuple[int, int]
    dtype: str
    layout: str
    dw_bias: bool
    pw_bias: bool
    mid_activation: str | None
    activation: str | None
    fp32_precision: str | None
    alignment: int
    depthwise: bool = True
    residual: bool = False

    @once
    def p(self) -> int:
        """Output height."""
        return output_extent(self.h, self.padding[:2], self.kernel[0], self.stride[0], self.dilation[0])

    @once
    def q(self) -> int:
        """Output width."""
        return output_extent(self.w, self.padding[2:], self.kernel[1], self.stride[1], self.dilation[1])

    @once
    def map_pixels(self) -> int:
        """Pixels of an image of the output."""
        return self.p * self.q

    @property
    def pixels(self) -> int:
        """Pixels of all images of the output."""
        return self.n * self.map_pixels

    @property
    def taps(self) -> int:
        """Depthwise weights of a channel; 0 without a depthwise convolution."""
        return math.prod(self.kernel) if self.depthwise else 0

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        return self.n, self.o, self.p, self.q

    @once
    def pointwise(self) -> SeparableConv2dProblem:
        """The pointwise convolution alone, on the depthwise outputs: maps of one row of all pixels, of all images where
        those lie side by side.
        """
        n, w = (1, self.n * self.map_pixels) if self.layout == "channels_last" else (self.n, self.map_pixels)
        alone = replace(
            self, n=n, h=1, w=w, kernel=(1, 1), stride=(1, 1), padding=Pads(0, 0, 0, 0), dilation=(1, 1), dw_bias=False,
            mid_activation=None, depthwise=False,
        )  # fmt: skip
        return alone.with_alignment(self.alignment)

    @property
    def pitches(self) -> tuple[int, int]:
        return (self.c, self.o) if self.layout == "channels_last" else (self.w, self.q)

    @property
    def bytes(self) -> int:
        """Least bytes moved through device memory: x, the residual and every weight read once, y written once."""
        weights = self.c * self.taps + self.o * self.c + self.c * self.dw_bias + self.o * self.pw_bias
        x, y = self.n * self.c * self.h * self.w, math.prod(self.y_shape)
        return self.element_size * (x + (1 + self.residual) * y + weights)

    @property
    def flops(self) -> int:
        """Multiplies and adds of both convolutions (taps on padding counted, as is usual)."""
        return 2 * self.n * self.p * self.q * self.c * (self.taps + self.o)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SeparableConv2dProblem:
        return super().from_json({**data, "padding": Pads(*data["padding"])})

    @classmethod
    def from_tensors(
        cls,
        x: torch.Tensor,
        dw_weight: torch.Tensor,
        pw_weight: torch.Tensor,
        dw_bias: torch.Tensor | None = None,
        pw_bias: torch.Tensor | None = None,
        *,
        stride=1,
        padding=0,
        dilation=1,
        mid_activation: str | None = None,
        activation: str | None = None,
        fp32_precision: str = "ieee",
    ) -> SeparableConv2dProblem:
        """Check a call and describe it. x is [N,C,H,W] or [C,H,W] (then N = 1).

        Raises what torch's own conv2d raises: RuntimeError for shapes, mixed dtypes or devices; TypeError for dtypes
        and layouts that no path takes; ValueError for option values.
        """
        check_tensors(x, dw_weight, pw_weight, dw_bias, pw_bias)
        check_option("mid_activation", mid_activation, ACTIVATIONS)
        check_option("activation", activation, ACTIVATIONS)
        check_option("fp32_precision", fp32_precision, PRECISIONS)
        kernel = (dw_weight.shape[2], dw_weight.shape[3])
        stride = pair("stride", stride, minimum=1)
        dilation = pair("dilation", dilation, minimum=1)
        pads = resolve_padding(padding, kernel, stride, dilation)
        n, c, h, w = x.shape if x.dim() == 4 else (1, *x.shape)
        check_extent(h, w, kernel, dilation, pads)
        dtype = str(x.dtype).removeprefix("torch.")
        layout = layout_of(x)
        problem = cls(
            n=n, c=c, h=h, w=w, o=pw_weight.shape[0], kernel=kernel, stride=stride, padding=pads, dilation=dilation,
            dtype=dtype, layout=layout, dw_bias=dw_bias is not None, pw_bias=pw_bias is not None,
            mid_activation=mid_activation, activation=activation,
            fp32_precision=fp32_precision if dtype == "float32" else None, alignment=1,
        )  # fmt: skip
        return problem._aligned_as(x)


@dataclass(frozen=True)
class SeparableBlock1dProblem(Problem):
    """Expand [E,C,1], depthwise [E,1,k] with an activation behind it, project [O,E,1] and x added, on x [N,C,L].

    y is [N,O,L]. The depthwise convolution pads the expanded channels, not x, with zeros: see `pads`. `layout`
    "channels_last" is [N,L,C] memory of x and y. `alignment` and `fp32_precision` are as in the 2-D problem.
    """

    op = "sepblock1d"
    spatial = 1
    sizes = ("n", "l")

    n: int
    c: int
    l: int  # noqa: E741
    e: int
    o: int
    kernel: int
    dilation: int
    dtype: str
    layout: str
    expand_bias: bool
    dw_bias: bool
    project_bias: bool
    activation: str | None
    residual: bool
    fp32_precision: str | None
    alignment: int

    @property
    def pads(self) -> tuple[int, int]:
        """Padding (left, right) that keeps L: d*(k-1) positions in all, the odd one on the right."""
        return same_pads(self.kernel, self.dilation)

    @property
    def y_shape(self) -> tuple[int, int, int]:
        return self.n, self.o, self.l

    @property
    def pitches(self) -> tuple[int, int]:
        return (self.c, self.o) if self.layout == "channels_last" else (self.l, self.l)

    @property
    def bytes(self) -> int:
        """Least bytes moved through device memory: x and every weight read once, y written once."""
        weights = self.e * (self.c + self.kernel + self.o)
        biases = self.e * (self.expand_bias + self.dw_bias) + self.o * self.project_bias
        return self.element_size * (self.n * self.l * (self.c + self.o) + weights + biases)

    @property
    def flops(self) -> int:
        """Multiplies and adds of the three convolutions (taps on padding counted, as is usual)."""
        return 2 * self.n * self.l * self.e * (self.c + self.kernel + self.o)

    @once
    def expand(self) -> SeparableConv2dProblem:
        """The first kernel of the two-kernel form: the expanded channels [N,E,1,L] of x [N,C,1,L]."""
        return self._half(c=self.c, o=self.e, pw_bias=self.expand_bias, depthwise=False)

    @once
    def project(self) -> SeparableConv2dProblem:
        """The second kernel of the two-kernel form: y [N,O,1,L] of the expanded channels [N,E,1,L]."""
        return self._half(
            c=self.e, o=self.o, kernel=(1, self.kernel), padding=Pads(0, 0, *self.pads), dilation=(1, self.dilation),
            dw_bias=self.dw_bias, pw_bias=self.project_bias, mid_activation=self.activation, residual=self.residual,
        )  # fmt: skip

    def _half(self, **own) -> SeparableConv2dProblem:
        common = {
            "n": self.n, "h": 1, "w": self.l, "kernel": (1, 1), "stride": (1, 1), "padding": Pads(0, 0, 0, 0),
            "dilation": (1, 1), "dtype": self.dtype, "layout": self.layout, "dw_bias": False, "mid_activation": None,
            "activation": None, "fp32_precision": self.fp32_precision, "alignment": 1,
        }  # fmt: skip
        return SeparableConv2dProblem(**common | own).with_alignment(self.alignment)

    @classmethod
    def from_tensors(
        cls,
        x: torch.Tensor,
        expand_weight: torch.Tensor,
        dw_weight: torch.Tensor,
        project_weight: torch.Tensor,
        expand_bias: torch.Tensor | None = None,
        dw_bias: torch.Tensor | None = None,
        project_bias: torch.Tensor | None = None,
        *,
        dilation=1,
        activation: str | None = "gelu",
        residual: bool = True,
        fp32_precision: str = "ieee",
    ) -> SeparableBlock1dProblem:
        """Check a call and describe it. x is [N,C,L] or [C,L] (then N = 1).

        Raises what torch's own conv1d raises: RuntimeError for shapes, mixed dtypes or devices; TypeError for dtypes
        and layouts that no path takes; ValueError for option values.
        """
        tensors = (x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias)
        check_option("activation", activation, ACTIVATIONS)
        check_option("fp32_precision", fp32_precision, PRECISIONS)
        dilation = single("dilation", dilation, minimum=1)
        check_block_tensors(*tensors, residual=residual)
        n, c, length = x.shape if x.dim() == 3 else (1, *x.shape)
        dtype = str(x.dtype).removeprefix("torch.")
        problem = cls(
            n=n, c=c, l=length, e=expand_weight.shape[0], o=project_weight.shape[0], kernel=dw_weight.shape[2],
            dilation=dilation, dtype=dtype, layout=layout_of(x, cls.spatial), expand_bias=expand_bias is not None,
            dw_bias=dw_bias is not None, project_bias=project_bias is not None, activation=activation,
            residual=residual, fp32_precision=fp32_precision if dtype == "float32" else None, alignment=1,
        )  # fmt: skip
        return problem._aligned_as(x)


def check_option(name: str, value: Any, allowed: tuple[str | None, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if not (value is None or isinstance(value, str)) or value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported; it must be one of {', '.join(map(repr, allowed))}")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not supported; it must be True or False")


def pair(name: str, value: Any, *, minimum: int) -> tuple[int, int]:
    """`value` (an int or a pair h, w) as a pair of ints of at least `minimum`; ValueError for what is no integer.

    NumPy's integers count as nn.Conv2d takes them; RuntimeError for values below `minimum`.
    """
    values = _integers(value)
    if len(values) == 1:
        values *= 2
    if len(values) != 2:
        raise ValueError(f"{name} must be an int or a pair of ints (h, w), got {value!r}")
    if min(values) < minimum:
        raise RuntimeError(f"{name} must be at least {minimum} on both axes, got {value!r}")
    return values


def single(name: str, value: Any, *, minimum: int) -> int:
    """`value` (an int, or a tuple of one as nn.Conv1d keeps it) as an int; errors as those of `pair`."""
    values = _integers(value)
    if len(values) != 1:
        raise ValueError(f"{name} must be an int, got {value!r}")
    if values[0] < minimum:
        raise RuntimeError(f"{name} must be at least {minimum}, got {value!r}")
    return values[0]


def _integers(value: Any) -> tuple[int, ...]:
    """The integers in `value` (one, or a tuple or list of them) as ints; none at all if there is anything else."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(is_integer(v) for v in values):
        return ()
    return tuple(v if isinstance(v, int) else int(v) for v in values)


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer, of NumPy too, and no bool."""
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def resolve_padding(padding: Any, kernel, stride, dilation) -> Pads:
    """The pixels that an int, a pair (h, w), 'same' or 'valid' stands for in torch.nn.Conv2d; Pads stay as they are.

    'same' pads d*(k-1) in all, the odd pixel on the bottom and right.
    """
    if isinstance(padding, Pads):
        return padding
    if isinstance(padding, str):
        if padding == "valid":
            return Pads(0, 0, 0, 0)
        if padding != "same":
            raise ValueError(f"padding={padding!r} is not supported; a string must be 'same' or 'valid'")
        if stride != (1, 1):
            raise RuntimeError(f"padding='same' is not supported for strided convolutions, got stride={stride}")
        return Pads(*same_pads(kernel[0], dilation[0]), *same_pads(kernel[1], dilation[1]))
    ph, pw = pair("padding", padding, minimum=0)
    return Pads(ph, ph, pw, pw)


def same_pads(taps: int, dilation: int) -> tuple[int, int]:
    """Padding before and behind that keeps an extent: d*(k-1) in all, the odd one behind."""
    total = dilation * (taps - 1)
    return total // 2, total - total // 2


def output_extent(size: int, pads: tuple[int, int], taps: int, stride: int, dilation: int) -> int:
    """Extent of y on one axis."""
    return (size + pads[0] + pads[1] - dilation * (taps - 1) - 1) // stride + 1


def round_up(value: int, unit: int) -> int:
    """The least multiple of `unit` that is no less than `value`."""
    return -(-value // unit) * unit


def is_dense(x: torch.Tensor, spatial: int = 2) -> bool:
    """Whether kernels can read x where it lies: contiguous or channels_last-contiguous, batched or not."""
    return x.is_contiguous() or x.movedim(-spatial - 1, -1).is_contiguous()


def layout_of(x: torch.Tensor, spatial: int = 2) -> str:
    """The memory format of x and of the y made from it: channels_last if x is that and not contiguous."""
    return "channels_last" if is_dense(x, spatial) and not x.is_contiguous() else "contiguous"


def has_layout(x: torch.Tensor, layout: str) -> bool:
    """Whether batched x is dense in `layout`; with one channel, or one pixel, it is so in both."""
    if layout == "contiguous":
        return x.is_contiguous()
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.transpose(1, 2).is_contiguous()


def strides_of(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Strides of a dense tensor of this shape, batched, in `layout`."""
    axes = range(len(shape))
    strides, step = [0] * len(shape), 1
    for axis in reversed((*axes[:1], *axes[2:], 1) if layout == "channels_last" else axes):
        strides[axis] = step
        step = step * shape[axis]
    return tuple(strides)


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Batched x in `layout`, copied only if it is not so already."""
    if has_layout(x, layout):
        return x
    return x.new_empty_strided(x.shape, strides_of(x.shape, layout)).copy_(x)


def check_tensors(x, dw_weight, pw_weight, dw_bias, pw_bias) -> None:
    """Types, dtypes, devices and shapes of a 2-D call; the exceptions are those of `from_tensors`."""
    _check_kinds(x=x, dw_weight=dw_weight, pw_weight=pw_weight, dw_bias=dw_bias, pw_bias=pw_bias)
    if x.dim() not in (3, 4):
        raise RuntimeError(f"x must be [N,C,H,W] or [C,H,W], got shape {list(x.shape)}")
    c = x.shape[-3]
    if dw_weight.dim() != 4:
        raise RuntimeError(f"dw_weight must be [C,1,kh,kw], got shape {list(dw_weight.shape)}")
    if dw_weight.shape[1] == 1 and c and dw_weight.shape[0] != c and dw_weight.shape[0] % c == 0:
        raise ValueError(
            f"dw_weight has {dw_weight.shape[0]} filters for {c} channels of x; only depth multiplier 1 is supported"
        )
    if dw_weight.shape[:2] != (c, 1):
        raise RuntimeError(
            f"dw_weight must be [{c},1,kh,kw] for x of shape {list(x.shape)}, got {list(dw_weight.shape)}"
        )
    if min(dw_weight.shape[2:]) < 1:
        raise RuntimeError(f"dw_weight has an empty kernel: shape {list(dw_weight.shape)}")
    if pw_weight.dim() != 4 or pw_weight.shape[1:] != (c, 1, 1):
        raise RuntimeError(f"pw_weight must be [O,{c},1,1] for x of shape {list(x.shape)}, got {list(pw_weight.shape)}")
    if c == 0 or pw_weight.shape[0] == 0:
        raise RuntimeError(f"x and pw_weight must have at least one channel, got {c} and {pw_weight.shape[0]}")
    _check_biases(dw_bias=(dw_bias, c), pw_bias=(pw_bias, pw_weight.shape[0]))


def check_block_tensors(
    x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias, *, residual: bool
) -> None:
    """Types, dtypes, devices and shapes of a call of the block; the exceptions are those of `from_tensors`."""
    check_flag("residual", residual)
    _check_kinds(
        x=x, expand_weight=expand_weight, dw_weight=dw_weight, project_weight=project_weight,
        expand_bias=expand_bias, dw_bias=dw_bias, project_bias=project_bias,
    )  # fmt: skip
    if x.dim() not in (2, 3):
        raise RuntimeError(f"x must be [N,C,L] or [C,L], got shape {list(x.shape)}")
    c, length = x.shape[-2:]
    if expand_weight.dim() != 3 or expand_weight.shape[1:] != (c, 1):
        raise RuntimeError(
            f"expand_weight must be [E,{c},1] for x of shape {list(x.shape)}, got {list(expand_weight.shape)}"
        )
    e = expand_weight.shape[0]
    if dw_weight.dim() != 3:
        raise RuntimeError(f"dw_weight must be [E,1,k], got shape {list(dw_weight.shape)}")
    if dw_weight.shape[1] == 1 and e and dw_weight.shape[0] != e and dw_weight.shape[0] % e == 0:
        raise ValueError(
            f"dw_weight has {dw_weight.shape[0]} filters for {e} expanded channels; only depth multiplier 1 is "
            "supported"
        )
    if dw_weight.shape[:2] != (e, 1):
        raise RuntimeError(f"dw_weight must be [{e},1,k] for {e} expanded channels, got {list(dw_weight.shape)}")
    if dw_weight.shape[2] < 1:
        raise RuntimeError(f"dw_weight has an empty kernel: shape {list(dw_weight.shape)}")
    if project_weight.dim() != 3 or project_weight.shape[1:] != (e, 1):
        raise RuntimeError(
            f"project_weight must be [O,{e},1] for {e} expanded channels, got {list(project_weight.shape)}"
        )
    o = project_weight.shape[0]
    if min(c, e, o) == 0:
        raise RuntimeError(f"x, expand_weight and project_weight must have at least one channel, got {c}, {e} and {o}")
    if residual and o != c:
        raise RuntimeError(
            f"project_weight must have {c} rows, one for each channel of x that is added (residual=True), got {o}"
        )
    _check_biases(expand_bias=(expand_bias, e), dw_bias=(dw_bias, e), project_bias=(project_bias, o))
    if length == 0:
        raise RuntimeError("x has an empty length; only the batch may be empty")


def _check_kinds(**named) -> None:
    """Types, dtypes and devices of a call's tensors; biases may be None."""
    x = named["x"]
    for name, tensor in named.items():
        if tensor is None and name.endswith("bias"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            nested = ", nested" if tensor.is_nested else ""
            raise TypeError(
                f"{name} must be a dense strided tensor, got layout {tensor.layout}, dtype {tensor.dtype}{nested}"
            )
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}; supported are {', '.join(f'torch.{d}' for d in DTYPES)}")
        # Autocast casts what is on its device alone: there another dtype follows from another device.
        if tensor.device != x.device:
            raise RuntimeError(f"x and {name} must be on the same device, got {x.device} and {tensor.device}")
        if tensor.dtype != x.dtype:
            raise RuntimeError(f"x and {name} must have the same dtype, got {x.dtype} and {tensor.dtype}")


def _check_biases(**named) -> None:
    """`named`: the bias, or None, and the number of channels that it is for."""
    for name, (bias, extent) in named.items():
        if bias is not None and bias.shape != (extent,):
            raise RuntimeError(f"{name} must have shape [{extent}], got {list(bias.shape)}")


def check_extent(h: int, w: int, kernel, dilation, pads) -> None:
    """RuntimeError unless the map is not empty and the padded map holds the dilated kernel."""
    top, bottom, left, right = pads
    for axis, size, pad, taps, step in (
        ("height", h, top + bottom, kernel[0], dilation[0]),
        ("width", w, left + right, kernel[1], dilation[1]),
    ):
        if size == 0:
            raise RuntimeError(f"x has an empty {axis}; only the batch may be empty")
        extent = step * (taps - 1) + 1
        if size + pad < extent:
            raise RuntimeError(
                f"the kernel's {axis} ({extent} pixels: {taps} taps, dilation {step}) exceeds the padded {axis} of x "
                f"({size} + {pad})"
            )
