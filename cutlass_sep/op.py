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
from .dispatch import addresses_of, as_parameter
from .errors import Unsupported
from .operators import BLOCK1D, SEPARABLE2D, Operator
from .problem import has_layout, is_dense, laid_out, layout_of, strides_of
from .schedule import PATHS, Schedule, tile_key

if TYPE_CHECKING:
    from cutlass_library import TileDescription

    from .block_schedule import BlockSchedule
    from .compiler import Resources
    from .kernel import Kernel
    from .planner import Plan


@dataclass(frozen=True)
class Compiled:
    """cubin: the ELF image. resources: by kernel name. cache_hit: no compiler ran. build_seconds: what it took."""

    cubin: bytes
    resources: dict[str, Resources]
    cache_hit: bool
    build_seconds: float


class Operation:
    """An operator for the shapes, dtype, layout and options of example tensors; its public classes name the arguments.

    Attributes: see `DepthwiseSeparableConv2d` and `SeparableConvBlock1d`.
    """

    _operator: Operator

    def __init__(
        self,
        tensors: tuple[Tensor | None, ...],
        options: tuple,
        path: str | None,
        form: str | None,
        schedule: Any,
        arch: str | None,
    ) -> None:
        self.problem = self._operator.describe(tensors, options)
        if path not in (None, "torch", *PATHS):
            raise ValueError(
                f"path={path!r} is unknown; it must be None, 'torch' or one of {', '.join(map(repr, PATHS))}"
            )
        x = tensors[0]
        self.arch = archs.check(arch) if arch is not None else _default_arch(x.device)
        self._shapes = {
            name: None if tensor is None else tuple(tensor.shape)
            for name, tensor in zip(self._operator.tensors, tensors, strict=True)
        }
        self._dtype = x.dtype
        self._kernel: Kernel | None = None
        self._capable: set[int] = set()
        chosen = self._plan(x.device, path, form, schedule)
        self.path, self.form, self.schedule, self.reason = chosen.path, chosen.form, chosen.schedule, chosen.reason
        self._chosen = chosen

    def _plan(self, device: torch.device, path: str | None, form: str | None, schedule: Any) -> Plan:
        from . import planner, tuned

        problem, arch = self.problem, self.arch
        planner.check_form(problem, form)
        if schedule is not None:
            kind = planner.schedule_type(problem)
            schedule = schedule if isinstance(schedule, kind) else kind.from_json(schedule)
            given = planner.Plan(schedule.path, schedule, "the schedule was given")
            for name, asked in (("path", path), ("form", form)):
                if asked not in (None, own := getattr(given, name)):
                    raise ValueError(f"{name}={asked!r} contradicts the schedule, which is for {name} {own!r}")
            if not (support := planner.rules(problem).check(problem, schedule, arch)):
                raise Unsupported(f"this schedule cannot run on {arch}: {support.reason}")
            return given
        if path is None and form is None and device.type == "cuda" and arch == archs.of_device(device.index):
            found = tuned.pick(problem, device)
            if found is not None and found.schedule is not None:
                return found
        chosen = planner.planned(problem, arch, path, form)
        if chosen.schedule is not None or path == "torch":
            return chosen
        # An op is there to emit a kernel, also where the planner would rather call PyTorch.
        if chosen.kernel is None:
            raise Unsupported(chosen.reason)
        reason = f"the best kernel, although path torch was planned: {chosen.reason}"
        return planner.Plan(chosen.kernel.path, chosen.kernel, reason)

    @property
    def tuned(self) -> bool:
        """Whether the schedule is one that `tune` found."""
        return self._chosen.tuned and self.schedule == self._chosen.schedule

    def _legal(self) -> list:
        """Legal schedules on this op's path and in its form: the one it was made with, then best first."""
        from . import planner

        if self.path == "torch":
            return []
        legal = planner.candidates(self.problem, self.arch, self.path, self.form)
        return list(dict.fromkeys([self._chosen.schedule, *legal]))

    def tile_descriptions(self) -> list[TileDescription]:
        """Legal schedules as CUTLASS describes them, best first; on the path and in the form asked for or planned.

        The one that the op was made with leads, tuned or given ones too. Of schedules that differ only in what CUTLASS
        does not know, the first one stands for all. `planner.candidates` lists them all; an op made with one as its
        `schedule` runs it. With the depthwise stage by FMA and not on the tensor cores, for instance:

            legal = cutlass_sep.planner.candidates(op.problem, op.arch, op.path, op.form)
            schedule = next(schedule for schedule in legal if schedule.mma_q == 0 and not schedule.apart)

        Those that are `apart` have the depthwise stage in a kernel of its own (by FMA, with `plane_rows` on the tensor
        cores), and are described by the pointwise kernel behind it. A schedule's JSON may be changed too: Unsupported
        says what of it cannot run.
        """
        tiles = {}
        for schedule in self._legal():
            tile = schedule.tile_description(self.problem)
            tiles.setdefault(tile_key(tile), tile)
        return list(tiles.values())

    def __repr__(self) -> str:
        form = "" if self.form is None else f", form={self.form!r}"
        return f"{type(self).__name__}({self.problem}, path={self.path!r}{form}, arch={self.arch!r})"

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: what is loaded on a device stays with this op."""
        return self.__dict__ | {"_kernel": None, "_capable": set()}

    @property
    def kernel(self) -> Kernel:
        """The kernel, not necessarily built. Raises Unsupported on path "torch"."""
        if self._kernel is None:
            if self.schedule is None:
                raise Unsupported("path torch has no kernel: nothing is emitted or compiled")
            from .kernel import make

            self._kernel = make(self.problem, self.schedule, self.arch)
        return self._kernel

    @property
    def source(self) -> str:
        """The CUDA C++ emitted for this problem and schedule."""
        return self.kernel.source

    def compile(self, tile_description: TileDescription | None = None) -> Compiled:
        """Build the cubin, or take it from the cache; with a tile description the op changes to that schedule first:
        of several with this tile to the one that it stands for in `tile_descriptions`.

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
        for schedule in self._legal():
            if tile_key(schedule.tile_description(self.problem)) == wanted:
                if schedule != self.schedule:
                    self.schedule, self._kernel = schedule, None
                    self.reason = "the tile description was given"
                return
        raise ValueError(f"tile_description {wanted} is not legal for this problem; see tile_descriptions()")

    def _run(self, tensors: tuple[Tensor | None, ...], out: Tensor | None) -> Tensor:
        """y of these tensors, in `out` if given; on torch's current stream, without a gradient. Builds on first use.

        Raises ValueError for other shapes, dtypes or layouts than the op's, for a bias too many or too few, and for an
        `out` that overlaps an input; TypeError for what is no dense tensor; RuntimeError for tensors on a device that
        the op's architecture does not run on.
        """
        x, batched = tensors[0], self._operator.batched
        for name, tensor in zip(self._operator.tensors, tensors, strict=True):
            self._check(name, tensor, self._shapes[name])
            if tensor is not None and tensor.device != x.device:
                raise RuntimeError(f"x and {name} must be on the same device, got {x.device} and {tensor.device}")
        if (layout := layout_of(x, self.problem.spatial)) != self.problem.layout:
            raise ValueError(f"x is {layout}, the op is made for {self.problem.layout}")
        self._check_device(x.device)
        if out is not None:
            self._check_out(out, tensors)
        with torch.no_grad():
            # A kernel reads memory, where a negated view holds the values before their negation.
            x, *parameters = (t.resolve_neg() if t is not None and t.is_neg() else t for t in tensors)
            x, y = (t if t is None or t.dim() == batched else t.unsqueeze(0) for t in (x, out))
            y = self._compute(x, parameters, y)
            if out is None:
                return y if len(self._shapes["x"]) == batched else y.squeeze(0)
            if not out.is_inference():
                torch.autograd.graph.increment_version(out)
            return out

    def _compute(self, x: Tensor, parameters: list[Tensor | None], out: Tensor | None) -> Tensor:
        p = self.problem
        if self.path == "torch":
            y = self._operator.forward(x, *parameters, *self._operator.options_of(p))
            return laid_out(y, p.layout) if out is None else out.copy_(y)
        y = out
        if y is None or y.data_ptr() % p.alignment or y.is_neg():
            y = torch.empty_strided(p.y_shape, strides_of(p.y_shape, p.layout), dtype=x.dtype, device=x.device)
        if p.n > 0:
            if not is_dense(x, p.spatial):
                x = x.contiguous()
            elif x.data_ptr() % p.alignment:
                x = x.clone()
            tensors = (x, *map(as_parameter, parameters))
            self.kernel.launch(tensors, y, addresses_of(tensors))
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
        p, batched = self.problem, self._operator.batched
        self._check("out", out, p.y_shape if len(self._shapes["x"]) == batched else p.y_shape[1:])
        if out.device != inputs[0].device:
            raise RuntimeError(f"x and out must be on the same device, got {inputs[0].device} and {out.device}")
        if not has_layout(out if out.dim() == batched else out.unsqueeze(0), p.layout):
            raise ValueError(f"out must be {p.layout} as the op's x is, got strides {out.stride()}")
        for name, tensor in zip(self._operator.tensors, inputs, strict=True):
            if tensor is not None and _overlap(out, tensor):
                raise ValueError(f"out overlaps {name} in memory")


class DepthwiseSeparableConv2d(Operation):
    """`functional.depthwise_separable_conv2d` for the shapes, dtype, layout and options of the example tensors.

    Attributes: `problem`, `arch` ("sm_90a"; default: CUTLASS_SEP_ARCH, else the example's GPU, else the current one,
    else sm_90a), `path` ("sm90", "portable" or, only if asked for, "torch"), `schedule` (None for "torch"), `reason`.

    `schedule` is a Schedule or its JSON (a dict). Raises Unsupported with the reason if the path or schedule asked for
    cannot run the problem, or no kernel can; otherwise as `SeparableConv2dProblem.from_tensors`.
    """

    _operator = SEPARABLE2D

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
        options = (stride, padding, dilation, mid_activation, activation, fp32_precision)
        super().__init__((x, dw_weight, pw_weight, dw_bias, pw_bias), options, path, None, schedule, arch)

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
        return self._run((x, dw_weight, pw_weight, dw_bias, pw_bias), out)

    run.__doc__ = Operation._run.__doc__


class SeparableConvBlock1d(Operation):
    """`functional.separable_conv_block1d` for the shapes, dtype, layout and options of the example tensors.

    Attributes as those of `DepthwiseSeparableConv2d`, and `form`: "fused" (one kernel), "two_kernel", or None on path
    "torch". `schedule` is a BlockSchedule or its JSON. Raises as `DepthwiseSeparableConv2d` does, also for a form.
    """

    _operator = BLOCK1D

    def __init__(
        self,
        x: Tensor,
        expand_weight: Tensor,
        dw_weight: Tensor,
        project_weight: Tensor,
        expand_bias: Tensor | None = None,
        dw_bias: Tensor | None = None,
        project_bias: Tensor | None = None,
        *,
        dilation: int = 1,
        activation: str | None = "gelu",
        residual: bool = True,
        fp32_precision: str = "ieee",
        path: str | None = None,
        form: str | None = None,
        schedule: BlockSchedule | dict[str, Any] | None = None,
        arch: str | None = None,
    ) -> None:
        tensors = (x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias)
        super().__init__(tensors, (dilation, activation, residual, fp32_precision), path, form, schedule, arch)

    def run(
        self,
        x: Tensor,
        expand_weight: Tensor,
        dw_weight: Tensor,
        project_weight: Tensor,
        expand_bias: Tensor | None = None,
        dw_bias: Tensor | None = None,
        project_bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._run((x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias), out)

    run.__doc__ = Operation._run.__doc__


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
