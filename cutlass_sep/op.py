"""Emit and run: an operator for exactly one problem, whose source, cubin and schedule can be looked at and replaced.

Nothing here falls back: what cannot be emitted, compiled or launched raises. Example tensors may be meta or CPU
tensors, so no GPU is needed to emit or compile.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import arch as archs
from . import reference
from .dispatch import MEMORY_FORMATS, as_parameter
from .errors import Unsupported
from .problem import SeparableConv2dProblem, is_dense, layout_of
from .schedule import PATHS, Schedule, candidates, check, tile_key

if TYPE_CHECKING:
    from cutlass_library import TileDescription

    from .compiler import Resources
    from .kernel import Kernel

_NAMES = ("x", "dw_weight", "pw_weight", "dw_bias", "pw_bias")


@dataclass(frozen=True)
class Compiled:
    """cubin: the ELF image. resources: by kernel name. cache_hit: no compiler ran. build_seconds: what it took."""

    cubin: bytes
    resources: dict[str, Resources]
    cache_hit: bool
    build_seconds: float


class DepthwiseSeparableConv2d:
    """The operator for the shapes, dtype, layout and options of the example tensors.

    Attributes: `problem`, `arch` ("sm_90a"; default: CUTLASS_SEP_ARCH, else the example's GPU, else the current one,
    else sm_90a), `path` ("sm90", "portable" or, only if asked for, "torch"), `schedule` (None for "torch"), `reason`.

    `schedule` is a Schedule or its JSON (a dict). Raises Unsupported with the reason if the path or schedule asked for
    cannot run the problem, or no kernel can; otherwise as `SeparableConv2dProblem.from_tensors`.
    """

    def __init__(
        self,
        x: Tensor,
        dw_weight: Tensor,
        pw_weight: Tensor,
        dw_bias: Tensor | None = None,
        pw_bias: Tensor | None = None,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        mid_activation: str | None = None,
        activation: str | None = None,
        fp32_precision: str = "ieee",
        path: str | None = None,
        schedule: Schedule | dict[str, Any] | None = None,
        arch: str | None = None,
    ) -> None:
        self.problem = SeparableConv2dProblem.from_tensors(
            x, dw_weight, pw_weight, dw_bias, pw_bias, stride=stride, padding=padding, dilation=dilation,
            mid_activation=mid_activation, activation=activation, fp32_precision=fp32_precision,
        )  # fmt: skip
        if path not in (None, "torch", *PATHS):
            raise ValueError(
                f"path={path!r} is unknown; it must be None, 'torch' or one of {', '.join(map(repr, PATHS))}"
            )
        self.arch = archs.check(arch) if arch is not None else _default_arch(x.device)
        self._shapes = {
            name: None if tensor is None else tuple(tensor.shape)
            for name, tensor in zip(_NAMES, (x, dw_weight, pw_weight, dw_bias, pw_bias), strict=True)
        }
        self._dtype = x.dtype
        self._kernel: Kernel | None = None
        self._capable: set[int] = set()
        self.path, self.schedule, self.reason = self._plan(path, schedule)

    def _plan(self, path: str | None, schedule: Schedule | dict | None) -> tuple[str, Schedule | None, str]:
        from .planner import plan

        if schedule is not None:
            schedule = schedule if isinstance(schedule, Schedule) else Schedule.from_json(schedule)
            if path not in (None, schedule.path):
                raise ValueError(f"path={path!r} contradicts the schedule, which is for path {schedule.path!r}")
            if not (support := check(self.problem, schedule, self.arch)):
                raise Unsupported(f"this schedule cannot run on {self.arch}: {support.reason}")
            return schedule.path, schedule, "the schedule was given"
        chosen = plan(self.problem, self.arch, path)
        if chosen.schedule is not None or path == "torch":
            return chosen.path, chosen.schedule, chosen.reason
        # An op is there to emit a kernel, also where the planner would rather call PyTorch.
        legal = candidates(self.problem, self.arch)
        if not legal:
            raise Unsupported(chosen.reason)
        return legal[0].path, legal[0], f"the best kernel, although path torch was planned: {chosen.reason}"

    def tile_descriptions(self) -> list[TileDescription]:
        """Legal schedules as CUTLASS describes them, best first; on the path asked for or planned.

        Of schedules that differ only in what CUTLASS does not know, the best one stands for all.
        """
        if self.path == "torch":
            return []
        tiles = {}
        for schedule in candidates(self.problem, self.arch, self.path):
            tile = schedule.tile_description(self.problem)
            tiles.setdefault(tile_key(tile), tile)
        return list(tiles.values())

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: what is loaded on a device stays with this op."""
        return self.__dict__ | {"_kernel": None, "_capable": set()}

    @property
    def kernel(self) -> Kernel:
        """The kernel, not necessarily built. Raises Unsupported on path "torch"."""
        if self._kernel is None:
            if self.schedule is None:
                raise Unsupported("path torch has no kernel: nothing is emitted or compiled")
            from .kernel import Kernel

            self._kernel = Kernel(self.problem, self.schedule, self.arch)
        return self._kernel

    @property
    def source(self) -> str:
        """The CUDA C++ emitted for this problem and schedule."""
        return self.kernel.source

    def compile(self, tile_description: TileDescription | None = None) -> Compiled:
        """Build the cubin, or take it from the cache; with a tile description the op changes to that schedule first.

        Raises ValueError for one that is not among `tile_descriptions()`, TypeError for what is none; CompileError,
        EnvironmentProblem.
        """
        if tile_description is not None:
            self._take(tile_description)
        cubin = self.kernel.cubin
        return Compiled(cubin.code, cubin.resources, cubin.cache_hit, cubin.build_seconds)

    def _take(self, tile_description: TileDescription) -> None:
        from cutlass_library import MathInstruction, TileDescription

        math = getattr(tile_description, "math_instruction", None)
        if not isinstance(tile_description, TileDescription) or not isinstance(math, MathInstruction):
            raise TypeError(
                "tile_description must be a cutlass_library.TileDescription with a MathInstruction, "
                f"got {tile_description!r}"
            )
        wanted = tile_key(tile_description)
        legal = [] if self.path == "torch" else candidates(self.problem, self.arch, self.path)
        for schedule in legal:
            if tile_key(schedule.tile_description(self.problem)) == wanted:
                if schedule != self.schedule:
                    self.schedule, self._kernel = schedule, None
                return
        raise ValueError(f"tile_description {wanted} is not legal for this problem; see tile_descriptions()")

    def run(
        self,
        x: Tensor,
        dw_weight: Tensor,
        pw_weight: Tensor,
        dw_bias: Tensor | None = None,
        pw_bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """y of these tensors, in `out` if given; on torch's current stream, without a gradient. Builds on first use.

        Raises ValueError for other shapes, dtypes or layouts than the op's, for a bias too many or too few, and for an
        `out` that overlaps an input; TypeError for what is no dense tensor; RuntimeError for tensors on a device that
        the op's architecture does not run on.
        """
        tensors = (x, dw_weight, pw_weight, dw_bias, pw_bias)
        for name, tensor in zip(_NAMES, tensors, strict=True):
            self._check(name, tensor, self._shapes[name])
            if tensor is not None and tensor.device != x.device:
                raise RuntimeError(f"x and {name} must be on the same device, got {x.device} and {tensor.device}")
        if layout_of(x) != self.problem.layout:
            raise ValueError(f"x is {layout_of(x)}, the op is made for {self.problem.layout}")
        self._check_device(x.device)
        if out is not None:
            self._check_out(out, tensors)
        with torch.no_grad():
            # A kernel reads memory, where a negated view holds the values before their negation.
            x, *parameters = (t.resolve_neg() if t is not None and t.is_neg() else t for t in tensors)
            x, y = (t if t is None or t.dim() == 4 else t.unsqueeze(0) for t in (x, out))
            y = self._run(x, *parameters, y)
            if out is None:
                return y if len(self._shapes["x"]) == 4 else y.squeeze(0)
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)
            return out

    def _run(self, x, dw_weight, pw_weight, dw_bias, pw_bias, out: Tensor | None) -> Tensor:
        p = self.problem
        memory_format = MEMORY_FORMATS[p.layout]
        if self.path == "torch":
            y = reference.depthwise_separable_conv2d(
                x, dw_weight, pw_weight, dw_bias, pw_bias, p.stride, p.padding, p.dilation,
                p.mid_activation, p.activation, p.fp32_precision or "ieee",
            )  # fmt: skip
            return y.contiguous(memory_format=memory_format) if out is None else out.copy_(y)
        y = out
        if y is None or y.data_ptr() % p.alignment or y.is_neg():
            y = torch.empty((p.n, p.o, p.p, p.q), dtype=x.dtype, device=x.device, memory_format=memory_format)
        if p.n > 0:
            if not is_dense(x) or x.data_ptr() % p.alignment:
                x = x.clone(memory_format=memory_format)
            parameters = map(as_parameter, (dw_weight, pw_weight, dw_bias, pw_bias))
            self.kernel.launch(x, *parameters, y)
        return y if out is None or y is out else out.copy_(y)

    def _check(self, name: str, tensor: Tensor | None, shape: tuple[int, ...] | None) -> None:
        if tensor is None or shape is None:
            if tensor is not None:
                raise ValueError(f"{name} was given, the op is made without it")
            if shape is not None:
                raise ValueError(f"{name} is missing, the op is made for one of shape {list(shape)}")
            return
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            got = f"layout {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a dense strided torch.Tensor, got {got}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, the op is made for {list(shape)}")
        if tensor.dtype != self._dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, the op is made for {self._dtype}")

    def _check_device(self, device: torch.device) -> None:
        if self.path == "torch" or (device.type == "cuda" and device.index in self._capable):
            return
        if device.type != "cuda":
            raise RuntimeError(f"the op is made for {self.arch} and cannot run on tensors on {device}")
        major, minor = torch.cuda.get_device_capability(device)
        if not archs.runs_on(self.arch, (major, minor)):
            raise RuntimeError(
                f"the op is made for {self.arch}, which {device} (compute capability {major}.{minor}) cannot load"
            )
        self._capable.add(device.index)

    def _check_out(self, out: Tensor, inputs: tuple[Tensor | None, ...]) -> None:
        p = self.problem
        shape = (p.n, p.o, p.p, p.q)
        self._check("out", out, shape if len(self._shapes["x"]) == 4 else shape[1:])
        if out.device != inputs[0].device:
            raise RuntimeError(f"x and out must be on the same device, got {inputs[0].device} and {out.device}")
        batched = out if out.dim() == 4 else out.unsqueeze(0)
        if not batched.is_contiguous(memory_format=MEMORY_FORMATS[p.layout]):
            raise ValueError(f"out must be {p.layout} as the op's x is, got strides {out.stride()}")
        for name, tensor in zip(_NAMES, inputs, strict=True):
            if tensor is not None and _overlap(out, tensor):
                raise ValueError(f"out overlaps {name} in memory")


def _default_arch(device: torch.device) -> str:
    if device.type == "cuda" and not os.environ.get("CUTLASS_SEP_ARCH"):
        return archs.of_device(device.index)
    return archs.default()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors on one device meet."""
    (a_start, a_end), (b_start, b_end) = _range(a), _range(b)
    return a_start < b_end and b_start < a_end


def _range(t: Tensor) -> tuple[int, int]:
    start = t.data_ptr()
    if t.numel() == 0:
        return start, start
    last = sum((extent - 1) * stride for extent, stride in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()
