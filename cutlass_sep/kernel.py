"""A compiled problem on a device: loads cubins, encodes TMA descriptors and launches on PyTorch's current stream.

Launching allocates at most one workspace from PyTorch's allocator, for packed weights and what the kernels of a call
leave for each other, and never synchronises.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from . import arch as archs
from . import toolchain
from .block_schedule import FUSED_CHUNK, BlockSchedule, FusedGeometry
from .compiler import Cubin, build, discard
from .direct import DirectGeometry
from .errors import EnvironmentProblem
from .planes import PlaneGeometry
from .planner import Plan, plan
from .problem import DTYPES, Problem, SeparableBlock1dProblem, SeparableConv2dProblem
from .schedule import Geometry, Schedule
from .source import render

#: struct cutlass_sep::Arguments of templates/problem.cuh: ten pointers, eight ints.
_ARGUMENTS = struct.Struct("10Q8i")
#: Positions of pointers in it.
_X, _PW_WEIGHT, _Y, _WORKSPACE, _EXPAND_WEIGHT = 0, 2, 5, 6, 8
#: Bytes of a tensor map, and of a frame for each parameter of a kernel.
_PARAMETER_BYTES = 128
#: Threads of a block of pack_weights (templates/pack_weights.cuh).
PACK_THREADS = 256
#: Largest grid (x) of a launch.
_MOST_BLOCKS = 2**31 - 1
#: Encoded TMA descriptors kept of each main kernel, and frames of each kernel and device.
_KEPT = 512


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

    def __init__(self, cubin: Cubin, arch: str, device: int, stages: list[Stage]):
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
            #: None where no stage packs.
            self.pack = self._kernel("pack_weights") if any(stage.packs for stage in stages) else None
            self.mains = [self._kernel(stage.name) for stage in stages]
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            for main, stage in zip(self.mains, stages, strict=True):
                shared_bytes = stage.shared_bytes
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


class _Thread(threading.local):
    #: PyTorch makes a device's context current when a thread first needs it, which can be after our first driver call.
    has_context = False


_thread = _Thread()


def clear_memory() -> None:
    """Forget every kernel held in memory (the disk cache stays)."""
    with _lock:
        _modules.clear()
        _kernels.clear()


@dataclass(frozen=True)
class TensorMap:
    """What a TMA descriptor says of a tensor but for its address; innermost dimension first.

    Extents, and the factors that a stride is the product of, are numbers or names of the problem's attributes. `box` is
    what one copy moves. All count elements.
    """

    pointer: int  # position of the tensor in Arguments
    extents: tuple[int | str, ...]
    box: tuple[int, ...]
    swizzle_bytes: int
    strides: tuple[tuple[int | str, ...], ...] = ()  # of all dimensions but the innermost; without, they are dense
    offset: int = 0  # bytes from the pointer to the tensor
    dtype: str | None = None  # if not the problem's

    def factors(self) -> list[tuple[int | str, ...]]:
        """`strides`, for dense dimensions too."""
        return list(self.strides) or [self.extents[:i] for i in range(1, len(self.extents))]

    def encode(self, problem: Problem, address: int) -> bytes:
        """The descriptor of the tensor at `address`. Raises DriverError."""

        def value(of: int | str) -> int:
            return of if isinstance(of, int) else getattr(problem, of)

        dtype = self.dtype or problem.dtype
        extents = tuple(map(value, self.extents))
        strides = tuple(DTYPES[dtype] * prod(map(value, own)) for own in self.factors())
        return _tensor_map(dtype, address + self.offset, extents, strides, self.box, self.swizzle_bytes)


class Stage(ABC):
    """One main kernel of a cubin: what it reads and writes by TMA, and how it is launched."""

    def __init__(self, name: str, geometry: Geometry | FusedGeometry):
        self.name, self.geometry = name, geometry
        self.maps = self._tensor_maps()
        self._encoded: OrderedDict[tuple[int, int], bytes] = OrderedDict()

    #: Whether the kernel waits by itself for the one before it on the stream.
    overlaps = True

    @property
    def packs(self) -> bool:
        """Whether pack_weights packs weights for this kernel, at the workspace of its Arguments, which else is null."""
        return self.geometry.pack_blocks > 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.geometry.shared_bytes

    @abstractmethod
    def configuration(self, processors: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(grid x, y, z, block x, y, z, shared bytes) of a launch, and the ints of Arguments."""

    @abstractmethod
    def _tensor_maps(self) -> list[TensorMap]:
        """Those of the kernel's parameters, in their order behind Arguments."""

    def encoded(self, index: int, address: int) -> bytes:
        """The TMA descriptor that `maps[index]` describes, for the tensor at `address`."""
        key = (index, address)
        encoded = self._encoded.get(key)
        if encoded is None:
            encoded = self._encoded[key] = self.maps[index].encode(self.geometry.problem, address)
            if len(self._encoded) > _KEPT:
                self._encoded.popitem(last=False)
        return encoded


class PointwiseStage(Stage):
    """A pointwise convolution whose operands are both in shared memory: to it all images are one row of pixels."""

    def configuration(self, processors: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        g = self.geometry
        pairs = min(g.items(1), processors) // 2  # of blocks
        return (2 * max(pairs, 1), 1, 1, g.threads, 1, 1, g.shared_bytes), (1, 1, g.map_q, 1, g.map_q, 0, 0, 1)

    def _tensor_maps(self) -> list[TensorMap]:
        g, size = self.geometry, self.geometry.problem.element_size
        y = TensorMap(_Y, ("o", "pixels", 1, 1), (g.store_bytes // size, 16, 1, 1), g.store_bytes)
        weight = TensorMap(_PW_WEIGHT, ("c", "o"), (64, g.schedule.tile_oc // 2), 128)
        return [TensorMap(_X, ("c", "pixels"), (64, g.item_q), 128), y, weight]


class SeparableStage(Stage):
    """A kernel of the separable operator: the 2-D operator's only one, or one of the block's two-kernel form."""

    @property
    def overlaps(self) -> bool:
        return self.geometry.schedule.path == "sm90"

    def configuration(self, processors: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        g, p = self.geometry, self.geometry.problem
        steps = g.steps(processors)
        items = g.items(steps)
        persistent = g.schedule.path == "sm90"
        grid = (min(items, processors), 1) if persistent else (min(items, _MOST_BLOCKS), -(-items // _MOST_BLOCKS))
        scalars = (p.n, p.h, p.w, p.p, p.q, p.padding.top, p.padding.left, steps)
        return (*grid, 1, g.threads, 1, 1, g.shared_bytes), scalars

    def _tensor_maps(self) -> list[TensorMap]:
        g, size = self.geometry, self.geometry.problem.element_size
        if g.schedule.path != "sm90":
            return []
        maps = self._activations(g, size)
        if not g.packed:
            maps.append(TensorMap(_PW_WEIGHT, ("c", "o"), (128 // size, g.schedule.tile_oc), 128))
        return maps

    @staticmethod
    def _activations(g: Geometry, size: int) -> list[TensorMap]:
        """x and y."""
        if g.channels_last:
            columns = g.schedule.mma_q or 16  # of a block of 16 pixels
            y = ("o", "map_pixels", 1, "n") if g.runs else ("o", "q", "p", "n")
            return [
                TensorMap(_X, ("c", "w", "h", "n"), (128 // size, g.columns, g.slot_rows, 1), 128),
                TensorMap(_Y, y, (g.store_bytes // size, columns, 16 // columns, 1), g.store_bytes),
            ]
        x = ("w", "h", "c", "n")
        y = TensorMap(_Y, ("q", "p", "o", "n"), (g.store_bytes // size, 1, g.group_oc, 1), g.store_bytes)
        if g.turned:
            return [TensorMap(_X, x, (64, 1, 64, 1), 128), y, TensorMap(_X, x, (8, 1, 64, 1), 0)]
        return [TensorMap(_X, x, (g.columns, 1, g.schedule.slot_channels, 1), 0), y]


class DepthwiseStage(Stage):
    """A depthwise kernel in front of a pointwise one, or one that belongs to it."""

    #: What it needs of the workspace is no packed weights.
    packs = False

    def configuration(self, processors: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        p = self.geometry.problem
        scalars = (p.n, p.h, p.w, p.p, p.q, p.padding.top, p.padding.left, self._flags(processors))
        return (self._blocks(processors), 1, 1, self.threads, 1, 1, self.shared_bytes), scalars

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.geometry.threads

    @abstractmethod
    def _blocks(self, processors: int) -> int:
        """Of a launch."""

    def _flags(self, processors: int) -> int:
        """In the workspace, that say whether there is something to mend; only the mending kernel counts them."""
        return 0

    def _tensor_maps(self) -> list[TensorMap]:
        return []


class DirectStage(DepthwiseStage):
    """The depthwise kernel that reads x from global memory."""

    def _blocks(self, processors: int) -> int:
        return self.geometry.blocks(processors)


class PackPlanesStage(DepthwiseStage):
    """The kernel that leaves planes of x, and tables of taps, in the workspace for PlaneStage."""

    shared_bytes = 0
    threads = PACK_THREADS

    def _blocks(self, processors: int) -> int:
        return self.geometry.pack_blocks


class PlaneStage(DepthwiseStage):
    """The depthwise kernel of large kernels, on planes of x in the workspace."""

    def _blocks(self, processors: int) -> int:
        return min(self.geometry.groups * self.geometry.tiles, processors)

    def _tensor_maps(self) -> list[TensorMap]:
        g, p = self.geometry, self.geometry.problem
        images, rows = (1, p.n * p.h) if g.one_row else (p.n, p.h)
        # Column, image, row, channel: as a window lies in shared memory.
        extents, strides = (p.w + g.shift, images, rows, p.c), ((p.h, g.pitch), (g.pitch,), (p.n, p.h, g.pitch))
        box = (g.window_columns, g.tile_images, g.schedule.plane_rows, g.channels)
        return [TensorMap(_WORKSPACE, extents, box, 0, strides, offset=g.plane_offset)]


class MendStage(DepthwiseStage):
    """The kernel that makes pixels anew whose depthwise outputs fp16 does not hold; most often it finds none."""

    shared_bytes = 0
    threads = PACK_THREADS

    def _blocks(self, processors: int) -> int:
        p = self.geometry.problem
        return min(p.n * p.p * p.q, processors)

    def _flags(self, processors: int) -> int:
        return self.geometry.flags(processors)


class FusedStage(Stage):
    """The kernel of the block's fused form."""

    def configuration(self, processors: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        g, b = self.geometry, self.geometry.problem
        scalars = (b.n, 1, b.l, 1, b.l, 0, b.pads[0], 0)  # a work item has no steps
        return (min(g.tiles, processors), 1, 1, g.threads, 1, 1, g.shared_bytes), scalars

    def _tensor_maps(self) -> list[TensorMap]:
        g = self.geometry
        # The low parts of operands are further channels of x, and further rows of weights.
        channels = g.parts * g.problem.c
        if g.pixel_major:
            x = window = TensorMap(_X, (channels, "l", "n"), (64, g.positions, 1), 128)
        else:
            blocks = g.positions // 16
            x = TensorMap(_X, ("l", channels, "n"), (16, 64, 1), 32)
            # Blocks of 16 positions, 16 apart: all of a window, as long as it lies inside the sequence.
            strides = (("l",), (16,), ("l", channels))
            window = TensorMap(_X, ("l", channels, blocks, "n"), (16, 64, blocks, 1), 32, strides)
        expand = TensorMap(_EXPAND_WEIGHT, ("c", g.parts * g.problem.e), (64, 16), 128)  # a warp's 16 rows
        rows = g.half_oc
        if g.lane_oc == 2:
            project = TensorMap(_PW_WEIGHT, ("e", g.parts * g.problem.o), (FUSED_CHUNK, rows), 128)
        else:
            # Lane t has columns 2t and 2t + 1 of each 8: these get lane_oc output channels that lie side by side.
            pairs, group = g.lane_oc // 2, 4 * g.lane_oc
            extents = ("e", 2, 4, pairs, g.parts * g.problem.o // group)
            strides = (("e",), (g.lane_oc, "e"), (2, "e"), (group, "e"))
            project = TensorMap(_PW_WEIGHT, extents, (FUSED_CHUNK, 2, 4, pairs, rows // group), 128, strides)
        if not g.scaled:
            return [x, window, expand, project]
        weights = (replace(expand, offset=g.packed_expand), replace(project, offset=g.packed_project))
        return [replace(m, dtype=g.operand) for m in (x, window, *(replace(w, pointer=_WORKSPACE) for w in weights))]


class _Frame(NamedTuple):
    """Host memory of the parameters of one call, and what cuLaunchKernelEx takes for each of its launches.

    Nothing changes it, and the driver copies the parameters before cuLaunchKernelEx returns, so that calls share it.
    """

    launches: list[tuple]
    memory: ctypes.Array


class _Launcher:
    """What a launch of one kernel on one device needs and its tensors do not change."""

    def __init__(self, module: _Module, stages: list[Stage], device: int):
        from cuda.bindings import driver

        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.run = driver.cuLaunchKernelEx
        self._device, self._stages = device, stages
        configurations = [stage.configuration(processors) for stage in stages]
        self._scalars = [scalars for _, scalars in configurations]
        #: Stream and addresses of the op's tensors, of y and of the workspace -> the frame of a call with them.
        self.frames: OrderedDict[tuple[int, ...], _Frame] = OrderedDict()

        # A frame holds the parameters of each stage, 128 bytes each: Arguments, then the tensor maps.
        formats, stage_parameters = [], []
        for stage in stages:
            own = [_ARGUMENTS.format + "16x", *["128s"] * len(stage.maps)]
            stage_parameters.append([_PARAMETER_BYTES * (len(formats) + i) for i in range(len(own))])
            formats += own
        shapes = [shape for shape, _ in configurations]
        launches = list(zip(module.mains, shapes, stage_parameters, strict=True))
        # pack_weights comes first and takes the Arguments of all stages for which it packs.
        if packed := [own[0] for own, stage in zip(stage_parameters, stages, strict=True) if stage.packs]:
            blocks = sum(stage.geometry.pack_blocks for stage in stages if stage.packs)
            launches.insert(0, (module.pack, (blocks, 1, 1, PACK_THREADS, 1, 1, 0), packed))
        # Behind them a frame lists the addresses of those of each launch.
        self._parameters = [parameter for *_, own in launches for parameter in own]
        self._layout = struct.Struct("".join(formats) + f"{len(self._parameters)}Q")
        self._memory = ctypes.c_char * (self._layout.size + 64)

        #: Each launch's kernel and shape, and where in a frame its parameters are listed.
        self._launches, offset = [], _PARAMETER_BYTES * len(formats)
        for kernel, shape, own in launches:
            self._launches.append((driver.CUfunction(int(kernel)), shape, offset))
            offset += 8 * len(own)
        # Path sm90: a main kernel starts while the one before it in the call still runs, and waits for it
        # (templates/pipeline_sm90.cuh). The first kernel of a call starts when all before the call is complete.
        self._attributes = []
        if all(stage.overlaps for stage in stages):
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            self._attributes.append(overlap)

    def enter_context(self) -> None:
        """Make the device's primary context, which is PyTorch's, current in the calling thread."""
        from cuda.bindings import driver

        context = _checked(
            driver.cuDevicePrimaryCtxRetain(driver.CUdevice(self._device)), "retaining the device's context"
        )
        _checked(driver.cuCtxSetCurrent(context), "making the device's context current")

    def _configuration(self, shape: tuple[int, ...], stream, attributes: list):
        """What cuLaunchKernelEx takes of a launch beside its kernel and parameters."""
        from cuda.bindings import driver

        configuration = driver.CUlaunchConfig()
        names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")
        for name, value in zip(names, shape, strict=True):
            setattr(configuration, name, value)
        configuration.hStream = stream
        configuration.attrs, configuration.numAttrs = attributes, len(attributes)
        return configuration

    def frame(self, key: tuple[int, ...], pointers: list[tuple[int, ...]]) -> _Frame:
        """The frame of a call, kept under `key`; `pointers` are those of Arguments for each stage."""
        from cuda.bindings import driver

        stream = driver.CUstream(key[0])
        memory = self._memory()
        start = -ctypes.addressof(memory) % 64
        base = ctypes.addressof(memory) + start
        values = []
        for stage, own, scalars in zip(self._stages, pointers, self._scalars, strict=True):
            values += own + scalars
            values += [stage.encoded(index, own[tensor_map.pointer]) for index, tensor_map in enumerate(stage.maps)]
        values += [base + parameter for parameter in self._parameters]
        self._layout.pack_into(memory, start, *values)
        launches = []
        for kernel, shape, offset in self._launches:
            attributes = self._attributes if launches else []
            launches.append((self._configuration(shape, stream, attributes), kernel, base + offset, 0))
        frame = _Frame(launches, memory)
        self.frames[key] = frame
        if len(self.frames) > _KEPT:
            self.frames.popitem(last=False)
        return frame


class Kernel:
    """One problem under one schedule for one architecture. Builds, loads and encodes on first use."""

    def __init__(self, problem: Problem, schedule: Schedule | BlockSchedule, arch: str):
        self.problem, self.schedule, self.arch = problem, schedule, arch
        self.stages = self._stages()
        packed = sum(stage.geometry.workspace_bytes for stage in self.stages if stage.packs)
        workspace_bytes = self._unpacked_bytes + packed
        self._workspace_elements = -(-workspace_bytes // problem.element_size)
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
        cubin = self._cubin  # read once: `_module` may drop it in another thread
        if cubin is None:  # `build` lets one of several threads compile
            cubin = self._cubin = build(self.source, self.arch, name=self.name)
        return cubin

    @property
    def name(self) -> str:
        """A short readable tag for log lines and cache entries."""
        p = self.problem
        layout = "nhwc" if p.layout == "channels_last" else "nchw"
        return f"dwsep2d-{self.schedule.path}-{p.dtype}-{layout}-c{p.c}-o{p.o}-k{p.kernel[0]}x{p.kernel[1]}"

    @property
    def _unpacked_bytes(self) -> int:
        """Bytes of the workspace before the packed weights: what the kernels of a call leave for each other."""
        return self._apart_bytes

    @property
    def _apart_bytes(self) -> int:
        """Of a depthwise kernel of its own: its outputs, and what else it needs there."""
        g = next((stage.geometry for stage in self.stages if isinstance(stage, DepthwiseStage)), None)
        return 0 if g is None else g.outputs_bytes + g.workspace_bytes

    def _stages(self) -> list[Stage]:
        return _separable_stages("separable2d", self.problem, self.schedule)

    def _pointers(self, *addresses: int) -> list[tuple[int, ...]]:
        """The ten pointers of Arguments for each stage, of the op's tensors in its order, y, workspace (0 for None)."""
        *tensors, y, workspace = addresses
        if not self.schedule.apart:
            return [(*addresses, 0, 0, 0)]
        packed = workspace + self._unpacked_bytes
        return _apart_pointers(self.stages, *tensors, y, workspace, packed)

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
        cubin = self.cubin
        with _lock:
            module = _modules.get((cubin.key, device))
        if module is not None:
            return module
        try:
            module = _Module(cubin, self.arch, device, self.stages)
        except DriverError:
            # A damaged entry of the disk cache can pass for a cubin until the driver reads it: build once more.
            discard(cubin)
            self._cubin = None
            cubin = self.cubin
            try:
                module = _Module(cubin, self.arch, device, self.stages)
            except DriverError as error:
                raise EnvironmentProblem(
                    f"the driver refuses kernels that NVRTC {toolchain.nvrtc()} compiles ({error}); "
                    "update the driver, or install an nvidia-cuda-nvrtc no newer than the driver's CUDA"
                ) from error
        with _lock:
            return _modules.setdefault((cubin.key, device), module)

    def launch(self, tensors: tuple, y: torch.Tensor, addresses: list[int]) -> None:
        """Run on torch's current stream of x's device: the op's tensors in its order, None for no bias.

        All tensors are dense, of the problem's shapes, dtype and layout, on one CUDA device. `addresses` are those of
        `tensors`, 0 for None: the caller has looked at them already, and each look costs 0.1 us.
        """
        x = tensors[0]
        device = x.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.launch(tensors, y, addresses)
        launcher = self._launchers.get(device)
        if launcher is None:
            self.load(device)
            launcher = self._launchers[device]
        if not _thread.has_context:
            launcher.enter_context()
            _thread.has_context = True
        # 0.2 us faster than torch.empty of bytes.
        workspace = x.new_empty(self._workspace_elements) if self._workspace_elements else None
        stream = torch._C._cuda_getCurrentRawStream(device)  # 1.6 us faster than torch.cuda.current_stream's
        key = (stream, *addresses, y.data_ptr(), 0 if workspace is None else workspace.data_ptr())
        frame = launcher.frames.get(key)
        if frame is None:
            frame = launcher.frame(key, self._pointers(*key[1:]))
        run = launcher.run
        for arguments in frame.launches:
            result = run(*arguments)
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

    def _stages(self) -> list[Stage]:
        p, s = self.problem, self.schedule
        if s.form == "fused":
            return [FusedStage("block1d", FusedGeometry(p, s.tile))]
        return _separable_stages("expand", p.expand, s.expand) + _separable_stages("project", p.project, s.project)

    @property
    def _hidden_bytes(self) -> int:
        p = self.problem
        return -(-p.n * p.e * p.l * p.element_size // 256) * 256

    @property
    def _unpacked_bytes(self) -> int:
        if self.schedule.form == "fused":
            return self.stages[0].geometry.x_bytes
        return self._hidden_bytes + self._apart_bytes

    def _pointers(self, *addresses: int) -> list[tuple[int, ...]]:
        x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias, y, workspace = addresses
        project = (dw_weight, project_weight, dw_bias, project_bias, y)
        of_block = (x, expand_weight, expand_bias)
        packed = workspace + self._unpacked_bytes
        if self.schedule.form == "fused":
            return [(workspace if self._unpacked_bytes else x, *project, packed, *of_block)]
        expand_stage, *stages = self.stages
        hidden, packed_expand = workspace, packed if expand_stage.packs else 0
        packed += expand_stage.geometry.workspace_bytes
        expand = (x, 0, expand_weight, 0, expand_bias, hidden, packed_expand, 0, 0, 0)
        if self.schedule.project.apart:
            outputs = workspace + self._hidden_bytes
            return [expand, *_apart_pointers(stages, hidden, *project, outputs, packed, of_block)]
        return [expand, (hidden, *project, packed if stages[0].packs else 0, *of_block)]


def _separable_stages(name: str, problem: SeparableConv2dProblem, schedule: Schedule) -> list[Stage]:
    """The main kernels of a separable convolution; `name` is that of its only one."""
    if not schedule.apart:
        stage = PointwiseStage if schedule.shared_x else SeparableStage
        return [stage(name, Geometry(problem, schedule))]
    behind = _separable_stages("pointwise", problem.pointwise, schedule.pointwise)
    if schedule.plane_rows:
        geometry = PlaneGeometry(problem, schedule)
        front = [PackPlanesStage("pack_planes", geometry), PlaneStage("depthwise", geometry)]
    else:
        geometry = DirectGeometry(problem, schedule)
        front = [DirectStage("depthwise", geometry)]
    return front + behind + ([MendStage("mend_outputs", geometry)] if problem.dtype == "float16" else [])


def _apart_pointers(
    stages: list[Stage], x: int, dw_weight: int, pw_weight: int, dw_bias: int, pw_bias: int, y: int, outputs: int,
    packed: int, of_block: tuple[int, int, int] = (0, 0, 0),
) -> list[tuple[int, ...]]:  # fmt: skip
    """Those of Arguments for the kernels of a convolution whose depthwise outputs go through the workspace."""
    weights, found = (dw_weight, pw_weight, dw_bias, pw_bias), []
    scratch = outputs + stages[0].geometry.outputs_bytes
    for stage in stages:
        if isinstance(stage, MendStage):  # a block's needs no x; else outputs have its place
            in_block = any(of_block)
            rest = of_block if in_block else (outputs, 0, 0)
            found.append((outputs if in_block else x, *weights, y, scratch, *rest))
        elif isinstance(stage, DepthwiseStage):
            found.append((x, *weights, outputs, scratch, 0, 0, 0))
        else:
            found.append((outputs, 0, pw_weight, 0, pw_bias, y, packed if stage.packs else 0, of_block[0], 0, 0))
    return found


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
    return ctypes.string_at(encoded.getPtr(), _PARAMETER_BYTES)


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
