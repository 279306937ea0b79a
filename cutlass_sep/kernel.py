"""A compiled problem on a device: loads cubins, encodes TMA descriptors and launches on PyTorch's current stream.

Launching allocates one workspace (the packed weights) from PyTorch's allocator and never synchronises.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import OrderedDict
from functools import cached_property

import numpy as np
import torch

from . import arch as archs
from .compiler import Cubin, build, discard
from .errors import EnvironmentProblem
from .planner import Plan, plan
from .problem import SeparableConv2dProblem
from .schedule import Geometry, Schedule
from .source import render

#: struct cutlass_sep::Arguments of templates/problem.cuh: seven pointers, eight ints.
_ARGUMENTS = struct.Struct("7Q8i")
_TENSOR_MAP_BYTES = 128
#: Threads of a block of pack_weights (templates/pack_weights.cuh).
PACK_THREADS = 256
#: Largest grid (x) of a launch.
_MOST_BLOCKS = 2**31 - 1
#: Encoded TMA descriptors kept per kernel.
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
    """A cubin loaded for one device, with its two kernels ready to launch. Loaded for the life of the process."""

    def __init__(self, cubin: Cubin, arch: str, device: int, shared_bytes: int):
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
            library = _checked(
                driver.cuLibraryLoadData(cubin.code, [], [], 0, [], [], 0),
                f"loading a cubin for {arch} on cuda:{device}",
            )
            self.pack = _checked(driver.cuLibraryGetKernel(library, b"pack_weights"), "finding kernel pack_weights")
            self.main = _checked(driver.cuLibraryGetKernel(library, b"separable2d"), "finding kernel separable2d")
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(
                driver.cuKernelSetAttribute(attribute, shared_bytes, self.main, driver.CUdevice(device)),
                f"reserving {shared_bytes} bytes of shared memory",
            )


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


class _Launcher:
    """What a launch of one kernel on one device needs and its tensors do not change."""

    def __init__(self, module: _Module, geometry: Geometry, device: int):
        from cuda.bindings import driver

        problem, schedule = geometry.problem, geometry.schedule
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.run = driver.cuLaunchKernel
        self._device = device
        self.pack = (driver.CUfunction(int(module.pack)), geometry.pack_blocks, 1, 1, PACK_THREADS, 1, 1, 0)
        steps = geometry.steps(processors)
        items = geometry.items(steps)
        persistent = schedule.path == "sm90"
        blocks = (min(items, processors), 1) if persistent else (min(items, _MOST_BLOCKS), -(-items // _MOST_BLOCKS))
        self.main = (driver.CUfunction(int(module.main)), *blocks, 1, geometry.threads, 1, 1, geometry.shared_bytes)
        pads = problem.padding
        self.scalars = (problem.n, problem.h, problem.w, problem.p, problem.q, pads.top, pads.left, steps)

    def enter_context(self) -> None:
        """Make the device's primary context, which is PyTorch's, current in the calling thread."""
        from cuda.bindings import driver

        context = _checked(
            driver.cuDevicePrimaryCtxRetain(driver.CUdevice(self._device)), "retaining the device's context"
        )
        _checked(driver.cuCtxSetCurrent(context), "making the device's context current")


class Kernel:
    """One problem under one schedule for one architecture. Builds, loads and encodes on first use."""

    def __init__(self, problem: SeparableConv2dProblem, schedule: Schedule, arch: str):
        self.problem, self.schedule, self.arch = problem, schedule, arch
        self.geometry = Geometry(problem, schedule)
        self._workspace_bytes = self.geometry.workspace_bytes
        self._maps: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._buffers: list[_LaunchBuffer] = []
        self._launchers: dict[int, _Launcher] = {}

    @cached_property
    def source(self) -> str:
        """The CUDA C++ of the translation unit."""
        return render(self.problem, self.schedule, self.arch)

    @cached_property
    def cubin(self) -> Cubin:
        """The compiled translation unit, from the disk cache if it is there."""
        return build(self.source, self.arch, name=self.name)

    @property
    def name(self) -> str:
        """A short readable tag for log lines and cache entries."""
        p = self.problem
        layout = "nhwc" if p.layout == "channels_last" else "nchw"
        return f"dwsep2d-{self.schedule.path}-{p.dtype}-{layout}-c{p.c}-o{p.o}-k{p.kernel[0]}x{p.kernel[1]}"

    def loaded(self, device: int) -> bool:
        """Whether a launch on this device needs no build and no load."""
        return device in self._launchers

    def load(self, device: int) -> None:
        """Build (or fetch from disk) and load for CUDA device `device`."""
        if device in self._launchers:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"kernel {self.name} is not loaded yet and cannot be built while a CUDA graph is captured; "
                "warm it up first: cutlass_sep.warmup(f, *args)"
            )
        self._launchers[device] = _Launcher(self._module(device), self.geometry, device)

    def _module(self, device: int) -> _Module:
        key = (self.cubin.key, device)
        with _lock:
            module = _modules.get(key)
        if module is not None:
            return module
        try:
            module = _Module(self.cubin, self.arch, device, self.geometry.shared_bytes)
        except DriverError:
            # A damaged entry of the disk cache can pass for a cubin until the driver reads it: build once more.
            discard(self.cubin)
            del self.cubin
            key = (self.cubin.key, device)
            module = _Module(self.cubin, self.arch, device, self.geometry.shared_bytes)
        with _lock:
            return _modules.setdefault(key, module)

    def launch(self, x, dw_weight, pw_weight, dw_bias, pw_bias, y) -> None:
        """Run on torch's current stream of x's device.

        All tensors are dense, of the problem's shapes, dtype and layout, on one CUDA device.
        """
        device = x.device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.launch(x, dw_weight, pw_weight, dw_bias, pw_bias, y)
        launcher = self._launchers.get(device)
        if launcher is None:
            self.load(device)
            launcher = self._launchers[device]
        if not getattr(_thread, "has_context", False):
            launcher.enter_context()
            _thread.has_context = True
        problem = self.problem
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=x.device)
        x_address, y_address = x.data_ptr(), y.data_ptr()
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = _LaunchBuffer()
        buffer.fill(
            x_address, dw_weight.data_ptr(), pw_weight.data_ptr(), dw_bias.data_ptr() if problem.dw_bias else 0,
            pw_bias.data_ptr() if problem.pw_bias else 0, y_address, workspace.data_ptr(), *launcher.scalars,
        )  # fmt: skip
        if self.schedule.path == "sm90":
            buffer.set_map(0, self._map("x", x_address))
            buffer.set_map(1, self._map("y", y_address))
        stream = torch._C._cuda_getCurrentRawStream(device)  # 1.6 us faster than torch.cuda.current_stream's
        result = launcher.run(*launcher.pack, stream, buffer.parameters, 0)
        if not result[0]:
            result = launcher.run(*launcher.main, stream, buffer.parameters, 0)
        self._buffers.append(buffer)
        if result[0]:
            _checked(result, f"launching {self.name}")

    def _map(self, which: str, address: int) -> bytes:
        key = (which, address)
        encoded = self._maps.get(key)
        if encoded is None:
            encoded = self._maps[key] = self._encode_x(address) if which == "x" else self._encode_y(address)
            if len(self._maps) > _TENSOR_MAPS_KEPT:
                self._maps.popitem(last=False)
        return encoded

    def _encode_x(self, address: int) -> bytes:
        p, g = self.problem, self.geometry
        size = p.element_size
        if g.channels_last:
            extents, strides = (p.c, p.w, p.h, p.n), (p.c * size, p.w * p.c * size, p.h * p.w * p.c * size)
            return _tensor_map(p.dtype, address, extents, strides, (128 // size, g.columns, 1, 1), 128)
        extents, strides = (p.w, p.h, p.c, p.n), (p.w * size, p.h * p.w * size, p.c * p.h * p.w * size)
        return _tensor_map(p.dtype, address, extents, strides, (g.columns, 1, self.schedule.slot_channels, 1), 0)

    def _encode_y(self, address: int) -> bytes:
        p, g = self.problem, self.geometry
        size = p.element_size
        if not g.channels_last:
            extents, strides = (p.q, p.p, p.o, p.n), (p.q * size, p.p * p.q * size, p.o * p.p * p.q * size)
            return _tensor_map(p.dtype, address, extents, strides, (8 * g.lane_q, 1, g.group_oc, 1), g.store_bytes)
        extents, strides = (p.o, p.q, p.p, p.n), (p.o * size, p.q * p.o * size, p.p * p.q * p.o * size)
        return _tensor_map(p.dtype, address, extents, strides, (g.store_bytes // size, 16, 1, 1), g.store_bytes)


class _LaunchBuffer:
    """Host memory of one launch's parameters: Arguments and two tensor maps, 64-byte aligned, and the pointers to them.

    A buffer belongs to one launch at a time; the driver copies it before cuLaunchKernel returns.
    """

    def __init__(self):
        self._memory = np.zeros(3 * 128 + 64, dtype=np.uint8)
        offset = -self._memory.ctypes.data % 64
        self._view = memoryview(self._memory)[offset : offset + 3 * 128]
        base = self._memory.ctypes.data + offset
        self._pointers = np.array([base, base + 128, base + 256], dtype=np.uint64)
        self.parameters = self._pointers.ctypes.data

    def fill(self, *arguments: int) -> None:
        _ARGUMENTS.pack_into(self._view, 0, *arguments)

    def set_map(self, index: int, encoded: bytes) -> None:
        self._view[128 * (index + 1) : 128 * (index + 1) + len(encoded)] = encoded


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


def kernel_for(problem: SeparableConv2dProblem, device: int, chosen: Plan | None = None) -> Kernel:
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
            kernel = _kernels.setdefault(key, Kernel(problem, chosen.schedule, arch))
    return kernel
