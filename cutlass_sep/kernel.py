"""A compiled problem on a device: loads cubins, encodes TMA descriptors and launches on PyTorch's current stream.

Launching allocates one workspace (the packed weights) from PyTorch's allocator and never synchronises.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import OrderedDict

import numpy as np
import torch

from . import arch as archs
from .block_schedule import BlockSchedule, FusedGeometry
from .compiler import Cubin, build, discard
from .errors import EnvironmentProblem
from .planner import Plan, plan
from .problem import Problem, SeparableBlock1dProblem, SeparableConv2dProblem
from .schedule import Geometry, Schedule
from .source import render

#: struct cutlass_sep::Arguments of templates/problem.cuh: ten pointers, eight ints.
_ARGUMENTS = struct.Struct("10Q8i")
#: Positions of four pointers in it.
_X, _PW_WEIGHT, _Y, _EXPAND_WEIGHT = 0, 2, 5, 8
_TENSOR_MAP_BYTES = 128
#: Threads of a block of pack_weights (templates/pack_weights.cuh).
PACK_THREADS = 256
#: Largest grid (x) of a launch.
_MOST_BLOCKS = 2**31 - 1
#: Encoded TMA descriptors kept of each main kernel.
_TENSOR_MAPS_KEPT = 64


class DriverError(RuntimeError):
    """The driver refused a call; the message names it."""


def _checked(result: tuple, what: str):
    """Unpack what a cuda.bindings call returned; DriverError naming `what` if it failed."""
    from cuda.bindings import driver

    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorString(status)
        raise DriverError(f"{what} failed: {name.decode() if name else status} ({status.name})")
    return values[0] if len(values) == 1 else tuple(values)


class _Module:
    """A cubin loaded for one device, with its kernels ready to launch. Loaded for the life of the process."""

    def __init__(self, cubin: Cubin, arch: str, device: int, stages: list[_Stage]):
        from cuda.bindings import driver

        capability = torch.cuda.get_device_capability(device)
        if not archs.runs_on(arch, capability):
            raise RuntimeError(
                f"cuda:{device} ({torch.cuda.get_device_name(device)}, "
                f"compute capability {capability[0]}.{capability[1]}) "
                f"cannot load a cubin for {arch}"
            )
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # makes the device's context current
            self._library = _checked(
                driver.cuLibraryLoadData(cubin.code, [], [], 0, [], [], 0),
                f"loading a cubin for {arch} on cuda:{device}",
            )
            self.pack = self._kernel("pack_weights")
            self.mains = [self._kernel(stage.name) for stage in stages]
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            for main, stage in zip(self.mains, stages, strict=True):
                shared_bytes = stage.geometry.shared_bytes
                _checked(
                    driver.cuKernelSetAttribute(attribute, shared_bytes, main, driver.CUdevice(device)),
                    f"reserving {shared_bytes} bytes of shared memory",
                )

    def _kernel(self, name: str):
        from cuda.bindings import driver

        return _checked(driver.cuLibraryGetKernel(self._library, name.encode()), f"finding kernel {name}")


_modules: dict[tuple[str, int], _Module] = {}
_kernels: dict[tuple, Kernel] = {}
_lock = threading.Lock()
#: PyTorch makes a device's context current when a thread first needs it, which can be after our first driver call.
_thread = threading.local()


def clear_memory() -> None:
    """Forget every kernel held in memory (the disk cache stays)."""
    with _lock:
        _modules.clear()
        _kernels.clear()


class _Stage:
    """One main kernel of a cubin: what it reads and writes by TMA, and how it is launched."""

    def __init__(self, name: str, problem: SeparableConv2dProblem, schedule: Schedule):
        self.name = name
        self.geometry = Geometry(problem, schedule)
        self.encoders = [(_X, self._encode_x), (_Y, self._encode_y)] if schedule.path == "sm90" else []
        self._maps: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    def configuration(self, processors: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(grid x, y, z, block x, y, z, shared bytes) of a launch, and the ints of Arguments."""
        g, p = self.geometry, self.geometry.problem
        steps = g.steps(processors)
        items = g.items(steps)
        persistent = g.schedule.path == "sm90"
        grid = (min(items, processors), 1) if persistent else (min(items, _MOST_BLOCKS), -(-items // _MOST_BLOCKS))
        scalars = (p.n, p.h, p.w, p.p, p.q, p.padding.top, p.padding.left, steps)
        return (*grid, 1, g.threads, 1, 1, g.shared_bytes), scalars

    def tensor_map(self, index: int, address: int) -> bytes:
        """The TMA descriptor number `index` of the kernel's parameters, for the tensor at `address`."""
        key = (index, address)
        encoded = self._maps.get(key)
        if encoded is None:
            encoded = self._maps[key] = self.encoders[index][1](address)
            if len(self._maps) > _TENSOR_MAPS_KEPT:
                self._maps.popitem(last=False)
        return encoded

    def _encode_x(self, address: int) -> bytes:
        p, g = self.geometry.problem, self.geometry
        size = p.element_size
        if g.channels_last:
            extents, strides = (p.c, p.w, p.h, p.n), (p.c * size, p.w * p.c * size, p.h * p.w * p.c * size)
            return _tensor_map(p.dtype, address, extents, strides, (128 // size, g.columns, 1, 1), 128)
        extents, strides = (p.w, p.h, p.c, p.n), (p.w * size, p.h * p.w * size, p.c * p.h * p.w * size)
        return _tensor_map(p.dtype, address, extents, strides, (g.columns, 1, g.schedule.slot_channels, 1), 0)

    def _encode_y(self, address: int) -> bytes:
        p, g = self.geometry.problem, self.geometry
        size = p.element_size
        if not g.channels_last:
            extents, strides = (p.q, p.p, p.o, p.n), (p.q * size, p.p * p.q * size, p.o * p.p * p.q * size)
            return _tensor_map(p.dtype, address, extents, strides, (8 * g.lane_q, 1, g.group_oc, 1), g.store_bytes)
        extents, strides = (p.o, p.q, p.p, p.n), (p.o * size, p.q * p.o * size, p.p * p.q * p.o * size)
        return _tensor_map(p.dtype, address, extents, strides, (g.store_bytes // size, 16, 1, 1), g.store_bytes)


class _FusedStage(_Stage):
    """The main kernel of the block's fused form."""

    def __init__(self, geometry: FusedGeometry):
        self.name = "block1d"
        self.geometry = geometry
        weights = (_EXPAND_WEIGHT, self._encode_expand_weight), (_PW_WEIGHT, self._encode_project_weight)
        self.encoders = [(_X, self._encode_x), *weights]
        self._maps = OrderedDict()

    def configuration(self, processors: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As of any stage; a work item has no steps."""
        g, b = self.geometry, self.geometry.problem
        scalars = (b.n, 1, b.l, 1, b.l, 0, b.pads[0], 0)
        return (min(g.tiles, processors), 1, 1, g.threads, 1, 1, g.shared_bytes), scalars

    def _encode_x(self, address: int) -> bytes:
        b, g = self.geometry.problem, self.geometry
        size = b.element_size
        if g.channels_last:
            extents, strides = (b.c, b.l, b.n), (b.c * size, b.l * b.c * size)
            return _tensor_map(b.dtype, address, extents, strides, (64, g.positions, 1), 128)
        extents, strides = (b.l, b.c, b.n), (b.l * size, b.c * b.l * size)
        return _tensor_map(b.dtype, address, extents, strides, (16, 64, 1), 32)

    def _encode_expand_weight(self, address: int) -> bytes:
        b = self.geometry.problem
        return _tensor_map(b.dtype, address, (b.c, b.e), (b.c * b.element_size,), (64, 64), 128)

    def _encode_project_weight(self, address: int) -> bytes:
        b = self.geometry.problem
        rows = self.geometry.tile.tile_oc // self.geometry.halves
        return _tensor_map(b.dtype, address, (b.e, b.o), (b.e * b.element_size,), (64, rows), 128)


class _Launcher:
    """What a launch of one kernel on one device needs and its tensors do not change."""

    def __init__(self, module: _Module, stages: list[_Stage], device: int):
        from cuda.bindings import driver

        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.run = driver.cuLaunchKernel
        self._device = device
        pack_blocks = sum(stage.geometry.pack_blocks for stage in stages)
        self.pack = (driver.CUfunction(int(module.pack)), pack_blocks, 1, 1, PACK_THREADS, 1, 1, 0)
        configurations = [stage.configuration(processors) for stage in stages]
        self.mains = [
            (driver.CUfunction(int(main)), *launch)
            for main, (launch, _) in zip(module.mains, configurations, strict=True)
        ]
        self.scalars = [scalars for _, scalars in configurations]

    def enter_context(self) -> None:
        """Make the device's primary context, which is PyTorch's, current in the calling thread."""
        from cuda.bindings import driver

        context = _checked(
            driver.cuDevicePrimaryCtxRetain(driver.CUdevice(self._device)), "retaining the device's context"
        )
        _checked(driver.cuCtxSetCurrent(context), "making the device's context current")


class Kernel:
    """One problem under one schedule for one architecture. Builds, loads and encodes on first use."""

    def __init__(self, problem: Problem, schedule: Schedule | BlockSchedule, arch: str):
        self.problem, self.schedule, self.arch = problem, schedule, arch
        self.stages = self._stages()
        self._workspace_bytes = self._hidden_bytes + sum(stage.geometry.workspace_bytes for stage in self.stages)
        self._frames: list[_LaunchFrame] = []
        self._launchers: dict[int, _Launcher] = {}
        self._source: str | None = None
        self._cubin: Cubin | None = None

    @property
    def source(self) -> str:
        """The CUDA C++ of the translation unit."""
        if self._source is None:  # two threads may both render it: same bytes
            self._source = render(self.problem, self.schedule, self.arch)
        return self._source

    @property
    def cubin(self) -> Cubin:
        """The compiled translation unit, from the disk cache if it is there."""
        if self._cubin is None:  # `build` lets one of several threads compile
            self._cubin = build(self.source, self.arch, name=self.name)
        return self._cubin

    @property
    def name(self) -> str:
        """A short readable tag for log lines and cache entries."""
        p = self.problem
        layout = "nhwc" if p.layout == "channels_last" else "nchw"
        return f"dwsep2d-{self.schedule.path}-{p.dtype}-{layout}-c{p.c}-o{p.o}-k{p.kernel[0]}x{p.kernel[1]}"

    #: Bytes of the workspace before the packed weights.
    _hidden_bytes = 0

    def _stages(self) -> list[_Stage]:
        return [_Stage("separable2d", self.problem, self.schedule)]

    def _pointers(self, tensors: tuple, y: int, workspace: int) -> list[tuple[int, ...]]:
        """The ten pointers of Arguments for each stage; `tensors` are addresses in the op's order, 0 for None."""
        return [(*tensors, y, workspace, 0, 0, 0)]

    def load(self, device: int) -> None:
        """Build (or fetch from disk) and load for CUDA device `device`."""
        if device in self._launchers:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"kernel {self.name} is not loaded yet and cannot be built while a CUDA graph is captured; "
                "warm it up first: cutlass_sep.warmup(f, *args)"
            )
        self._launchers[device] = _Launcher(self._module(device), self.stages, device)

    def _module(self, device: int) -> _Module:
        key = (self.cubin.key, device)
        with _lock:
            module = _modules.get(key)
        if module is not None:
            return module
        try:
            module = _Module(self.cubin, self.arch, device, self.stages)
        except DriverError:
            # A damaged entry of the disk cache can pass for a cubin until the driver reads it: build once more.
            discard(self.cubin)
            self._cubin = None
            key = (self.cubin.key, device)
            module = _Module(self.cubin, self.arch, device, self.stages)
        with _lock:
            return _modules.setdefault(key, module)

    def launch(self, *tensors) -> None:
        """Run on torch's current stream of x's device: the op's tensors in its order (None for no bias), then y.

        All tensors are dense, of the problem's shapes, dtype and layout, on one CUDA device.
        """
        x = tensors[0]
        device = x.device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.launch(*tensors)
        launcher = self._launchers.get(device)
        if launcher is None:
            self.load(device)
            launcher = self._launchers[device]
        if not getattr(_thread, "has_context", False):
            launcher.enter_context()
            _thread.has_context = True
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=x.device)
        *inputs, y = [0 if t is None else t.data_ptr() for t in tensors]
        pointers = self._pointers(tuple(inputs), y, workspace.data_ptr())
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _LaunchFrame(self.stages)
        frame.fill(pointers, launcher.scalars)
        stream = torch._C._cuda_getCurrentRawStream(device)  # 1.6 us faster than torch.cuda.current_stream's
        result = launcher.run(*launcher.pack, stream, frame.pack_parameters, 0)
        for main, parameters in zip(launcher.mains, frame.main_parameters, strict=True):
            if not result[0]:
                result = launcher.run(*main, stream, parameters, 0)
        self._frames.append(frame)
        if result[0]:
            _checked(result, f"launching {self.name}")


class BlockKernel(Kernel):
    """The 1-D block: one fused main kernel, or two with the hidden channels in the workspace between them."""

    @property
    def name(self) -> str:
        """A short readable tag for log lines and cache entries."""
        p = self.problem
        layout = "nlc" if p.layout == "channels_last" else "ncl"
        what = f"sepblock1d-{self.schedule.form}-{self.schedule.path}-{p.dtype}-{layout}"
        return f"{what}-c{p.c}-e{p.e}-o{p.o}-k{p.kernel}"

    def _stages(self) -> list[_Stage]:
        if self.schedule.form == "fused":
            return [_FusedStage(FusedGeometry(self.problem, self.schedule.tile))]
        expand = _Stage("expand", self.problem.expand, self.schedule.expand)
        project = _Stage("project", self.problem.project, self.schedule.project)
        return [expand, project]

    @property
    def _hidden_bytes(self) -> int:
        p = self.problem
        return 0 if self.schedule.form == "fused" else -(-p.n * p.e * p.l * p.element_size // 256) * 256

    def _pointers(self, tensors: tuple, y: int, workspace: int) -> list[tuple[int, ...]]:
        x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias = tensors
        project = (dw_weight, project_weight, dw_bias, project_bias, y)
        of_block = (x, expand_weight, expand_bias)
        if self.schedule.form == "fused":
            return [(x, *project, workspace, *of_block)]
        hidden, packed = workspace, workspace + self._hidden_bytes
        packed_project = packed + self.stages[0].geometry.workspace_bytes
        return [
            (x, 0, expand_weight, 0, expand_bias, hidden, packed, 0, 0, 0),
            (hidden, *project, packed_project, *of_block),
        ]


class _LaunchFrame:
    """Host memory of one launch's parameters: for each stage Arguments and tensor maps, 64-byte aligned.

    A frame belongs to one launch at a time; the driver copies it before cuLaunchKernel returns.
    """

    def __init__(self, stages: list[_Stage]):
        self._stages = stages
        slots = sum(1 + len(stage.encoders) for stage in stages)
        self._memory = np.zeros(slots * 128 + 64, dtype=np.uint8)
        start = -self._memory.ctypes.data % 64
        self._view = memoryview(self._memory)[start : start + slots * 128]
        base = self._memory.ctypes.data + start
        self._offsets, self._pointers, offset = [], [], 0
        for stage in stages:
            self._offsets.append(offset)
            count = 1 + len(stage.encoders)
            self._pointers.append(np.array([base + offset + 128 * i for i in range(count)], dtype=np.uint64))
            offset += 128 * count
        self._pointers.append(np.array([base + offset for offset in self._offsets], dtype=np.uint64))
        *self.main_parameters, self.pack_parameters = [array.ctypes.data for array in self._pointers]

    def fill(self, pointers: list[tuple[int, ...]], scalars: list[tuple[int, ...]]) -> None:
        view = self._view
        for stage, offset, addresses, ints in zip(self._stages, self._offsets, pointers, scalars, strict=True):
            _ARGUMENTS.pack_into(view, offset, *addresses, *ints)
            for index, (pointer, _) in enumerate(stage.encoders):
                offset += 128
                view[offset : offset + _TENSOR_MAP_BYTES] = stage.tensor_map(index, addresses[pointer])


def _tensor_map(dtype: str, address: int, extents, strides, box, swizzle_bytes: int) -> bytes:
    """A tiled tensor map: innermost dimension first, `strides` in bytes of all but that; zeros out of bounds."""
    from cuda.bindings import driver as d

    types = d.CUtensorMapDataType
    data_type = {
        "float32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        "float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[dtype]
    swizzles = d.CUtensorMapSwizzle
    swizzle = {
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
    }.get(swizzle_bytes, swizzles.CU_TENSOR_MAP_SWIZZLE_NONE)
    rank = len(extents)
    encoded = _checked(
        d.cuTensorMapEncodeTiled(
            data_type, rank, address, [d.cuuint64_t(v) for v in extents], [d.cuuint64_t(v) for v in strides],
            [d.cuuint32_t(v) for v in box], [d.cuuint32_t(1)] * rank,
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"encoding a TMA descriptor of {extents} elements, strides {strides} bytes, box {box}",
    )  # fmt: skip
    return ctypes.string_at(encoded.getPtr(), _TENSOR_MAP_BYTES)


def make(problem: Problem, schedule: Schedule | BlockSchedule, arch: str) -> Kernel:
    """The kernel of `problem` under `schedule`, not yet built."""
    return (BlockKernel if isinstance(problem, SeparableBlock1dProblem) else Kernel)(problem, schedule, arch)


def kernel_for(problem: Problem, device: int, chosen: Plan | None = None) -> Kernel:
    """The kernel of `problem` on CUDA device `device` (planned if `chosen` is None), from memory if asked for before.

    Raises EnvironmentProblem if the plan is path "torch", which has no kernel.
    """
    arch = archs.of_device(device)
    if chosen is None:
        chosen = plan(problem, arch)
    if chosen.schedule is None:
        raise EnvironmentProblem(f"this problem runs on path torch: {chosen.reason}")
    key = (problem, chosen.schedule, arch)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.setdefault(key, make(problem, chosen.schedule, arch))
    return kernel
