"""Launches with a driver that writes down what it is asked for. What a launch consists of is in test_emit.py."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from block import Block
from separable import Case

import cutlass_sep
from cutlass_sep import kernel
from cutlass_sep.block_schedule import BlockSchedule
from cutlass_sep.errors import EnvironmentProblem
from cutlass_sep.schedule import Schedule

CASE = Case(n=2, c=16, o=32, h=8, w=8, pw_bias=False)
#: Takes 16-bit weights as they are.
DIRECT = Schedule("sm90", 32, 64, 1, 2, 2, row_slots=16, mma_q=8)
#: Positions in Arguments.
X, Y, WORKSPACE = 0, 5, 6
#: Handles of kernels.
PACK, MAIN = 1, 2


class Driver:
    """Takes launches of the kernels of an op on CPU tensors; the "device" is the index that those have."""

    def __init__(self, op, patch: pytest.MonkeyPatch):
        self.op, self.kernel, self.stream = op, op.kernel, 0x50
        (self.stage,) = self.kernel.stages
        self.launches: list[tuple[int, int, tuple[int, ...], list[bytes]]] = []
        self.encoded: list[int] = []
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
        patch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: self.stream, raising=False)
        patch.setattr(kernel, "_tensor_map", self.encode)
        patch.setattr(kernel._Launcher, "enter_context", lambda _: None)
        module = SimpleNamespace(pack=PACK if self.stage.packs else None, mains=[MAIN])
        self.launcher = self.kernel._launchers[-1] = kernel._Launcher(module, self.kernel.stages, -1)
        self.launcher.run = self.run

    def encode(self, dtype, address, *_) -> bytes:
        self.encoded.append(address)
        return struct.pack("Q120x", address)

    def tensors(self) -> tuple:
        return CASE.tensors("cpu", getattr(torch, self.op.problem.dtype), self.op.problem.layout)

    def empty(self) -> torch.Tensor:
        return torch.empty(2, 32, 8, 8, dtype=getattr(torch, self.op.problem.dtype))

    def run(self, configuration, function, parameters, _) -> tuple[int]:
        stream = configuration.hStream
        # Only a main kernel that waits by itself may start before one of the same call in front of it is complete.
        overlaps = int(function) == MAIN and self.stage.packs and self.kernel.schedule.path == "sm90"
        assert configuration.numAttrs == len(configuration.attrs) == overlaps
        shape = self.launcher._launches[-1 if int(function) == MAIN else 0][1]
        grid = configuration.gridDimX, configuration.gridDimY, configuration.gridDimZ
        block = configuration.blockDimX, configuration.blockDimY, configuration.blockDimZ
        assert (*grid, *block, configuration.sharedMemBytes) == shape
        maps = len(self.stage.maps) if int(function) == MAIN else 0
        arguments, *maps = struct.unpack(f"{1 + maps}Q", ctypes.string_at(parameters, 8 * (1 + maps)))
        pointers = struct.unpack("10Q", ctypes.string_at(arguments, 80))
        self.launches.append((int(function), int(stream), pointers, [ctypes.string_at(at, 128) for at in maps]))
        return (0,)

    def call(self, tensors: tuple, y: torch.Tensor) -> tuple[int, ...]:
        """The pointers of a call, which are checked."""
        self.launches.clear()
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        self.kernel.launch(tensors, y, addresses)
        *before, (main, stream, pointers, maps) = self.launches
        assert (main, stream) == (MAIN, self.stream)
        assert before == ([(PACK, stream, pointers, [])] if self.stage.packs else [])
        assert pointers[:WORKSPACE] == (*addresses, y.data_ptr())
        assert pointers[WORKSPACE + 1 :] == (0, 0, 0)
        assert maps == [struct.pack("Q120x", pointers[of.pointer]) for of in self.stage.maps]
        return pointers


def make_op(which: str) -> cutlass_sep.op.DepthwiseSeparableConv2d:
    if which == "direct":
        tensors, chosen = CASE.tensors("meta", torch.float16, "channels_last"), {"schedule": DIRECT}
    else:
        tensors, chosen = CASE.tensors("meta"), {"path": which}
    return cutlass_sep.op.DepthwiseSeparableConv2d(*tensors, **CASE.options, **chosen, arch="sm_90a")


@pytest.fixture(params=["sm90", "portable", "direct"])
def driver(request, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(make_op(request.param), monkeypatch)
    assert made.stage.packs == (request.param != "direct")
    return made


@pytest.fixture
def one_workspace(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What every call that asks for a workspace gets."""
    workspace = torch.empty(1 << 16)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, count: workspace[:count])
    return workspace


def test_equal_addresses_share_a_frame(driver: Driver, one_workspace: torch.Tensor):
    given, y = driver.tensors(), driver.empty()
    assert driver.call(given, y)[WORKSPACE] == (one_workspace.data_ptr() if driver.stage.packs else 0)
    (frame,) = driver.launcher.frames.values()
    encoded = list(driver.encoded)
    driver.call(given, y)
    assert list(driver.launcher.frames.values()) == [frame]
    assert driver.encoded == encoded


@pytest.mark.parametrize("index", [0, 1, 2, 3, "y", "stream", "workspace"])
def test_whatever_changes_is_launched(driver: Driver, one_workspace, monkeypatch: pytest.MonkeyPatch, index):
    given, y = list(driver.tensors()), driver.empty()
    driver.call(tuple(given), y)
    if index == "y":
        y = driver.empty()
    elif index == "stream":
        driver.stream += 1
    elif index == "workspace":
        if not driver.stage.packs:  # what an allocator returns is in no frame
            driver.call(tuple(given), y)
            assert len(driver.launcher.frames) == 1
            return
        other = one_workspace.clone()
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, count: other[:count])
        assert driver.call(tuple(given), y)[WORKSPACE] == other.data_ptr()
    else:
        given[index] = given[index].clone()
    driver.call(tuple(given), y)
    assert len(driver.launcher.frames) == 2


def test_frames_and_descriptors_do_not_pile_up(driver: Driver):
    sets = [(driver.tensors(), driver.empty()) for _ in range(kernel._KEPT + 30)]
    for given, y in sets + sets[::-1]:
        driver.call(given, y)
    assert len(driver.launcher.frames) == kernel._KEPT
    assert len(driver.stage._encoded) == (kernel._KEPT if driver.stage.maps else 0)


def test_the_workspace_holds_the_packed_weights_and_there_is_none_without(driver: Driver, monkeypatch):
    counts = []
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, count: counts.append(count) or torch.empty(count))
    driver.call(driver.tensors(), driver.empty())
    assert counts == ([driver.stage.geometry.workspace_bytes // 4] if driver.stage.packs else [])


def test_a_failed_launch_raises_and_the_next_one_runs(driver: Driver, one_workspace: torch.Tensor):
    from cuda.bindings.driver import CUresult

    given, y = driver.tensors(), driver.empty()
    driver.launcher.run = lambda *_: (CUresult.CUDA_ERROR_LAUNCH_FAILED,)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuda.bindings.driver.cuGetErrorString", lambda status: (0, b"a fake error"))
        with pytest.raises(kernel.DriverError, match=r"launching dwsep2d.*a fake error"):
            driver.kernel.launch(given, y, [0 if t is None else t.data_ptr() for t in given])
    driver.launcher.run = driver.run
    driver.call(given, y)


#: What stands for cubins that are built one after the other.
CUBINS = [SimpleNamespace(key=f"key {i}", code=f"cubin {i}".encode()) for i in range(2)]


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver that refuses the first `refusals` cubins it is offered; kernels that are found are their names."""
    from cuda.bindings.driver import CUresult

    seen = SimpleNamespace(refusals=0, offered=[], discarded=[], found=[])
    built = iter(CUBINS)

    def load(code, *_):
        seen.offered.append(code)
        refused = len(seen.offered) <= seen.refusals
        return (CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION if refused else CUresult.CUDA_SUCCESS, "a library")

    def find(library, name):
        seen.found.append(name)
        return (CUresult.CUDA_SUCCESS, name)

    monkeypatch.setattr(kernel, "build", lambda source, arch, name: next(built))
    monkeypatch.setattr(kernel, "discard", seen.discarded.append)
    monkeypatch.setattr(kernel, "_modules", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    for name, answer in (
        ("cuLibraryLoadData", load),
        ("cuLibraryGetKernel", find),
        ("cuKernelSetAttribute", lambda *_: (CUresult.CUDA_SUCCESS, None)),
        ("cuGetErrorString", lambda status: (CUresult.CUDA_SUCCESS, b"the provided PTX is too new")),
    ):
        monkeypatch.setattr(f"cuda.bindings.driver.{name}", answer)
    return seen


@pytest.mark.parametrize("which", ["sm90", "direct"])
def test_the_packing_kernel_is_looked_for_only_where_there_is_one(which: str, loading: SimpleNamespace):
    module = make_op(which).kernel._module(0)
    pack = None if which == "direct" else b"pack_weights"
    assert (module.pack, module.mains) == (pack, [b"separable2d"])
    assert loading.found == [name for name in (pack, b"separable2d") if name]


@pytest.mark.parametrize("refusals", [1, 2])
def test_what_the_driver_refuses_is_built_once_more(refusals: int, loading: SimpleNamespace):
    loading.refusals = refusals
    op = make_op("sm90")
    if refusals == 1:
        module = op.kernel._module(0)
        assert kernel._modules == {("key 1", 0): module}
    else:
        refused = (
            r"the driver refuses kernels that NVRTC \d+\.\d+ compiles \(loading a cubin for sm_90a on cuda:0 failed: "
            r"the provided PTX is too new \(CUDA_ERROR_UNSUPPORTED_PTX_VERSION\)\); update the driver, or install"
        )
        with pytest.raises(EnvironmentProblem, match=refused):
            op.kernel._module(0)
        assert kernel._modules == {}
    assert loading.offered == [cubin.code for cubin in CUBINS] and loading.discarded == CUBINS[:1]


def test_calls_of_several_threads(driver: Driver):
    """Each launches with its own addresses, also while others fill and drop frames."""

    def run(configuration, function, parameters, _) -> tuple[int]:
        (arguments,) = struct.unpack("Q", ctypes.string_at(parameters, 8))
        seen.append(struct.unpack("10Q", ctypes.string_at(arguments, 80)))
        return (0,)

    seen: list[tuple[int, ...]] = []
    driver.launcher.run = run
    sets = [(driver.tensors(), driver.empty()) for _ in range(80)]

    def work(_) -> None:
        for given, y in sets:
            driver.kernel.launch(given, y, [0 if t is None else t.data_ptr() for t in given])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    got = sorted((pointers[X], pointers[Y]) for pointers in seen)
    each = 8 * (1 + driver.stage.packs)
    assert got == sorted((given[0].data_ptr(), y.data_ptr()) for given, y in sets for _ in range(each))


@pytest.mark.parametrize("packs", [(True, True), (True, False), (False, True), (False, False)])
def test_of_two_kernels_those_that_pack_share_a_launch(packs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch):
    """The workspace: hidden channels, then the packed weights of either kernel."""
    case = Block(n=2, c=64, e=128, o=72, l=640, kernel=5, residual=False)
    halves = [Schedule("sm90", 64, 64, 1, 4, 2, 4, 2, mma_q=0 if own else 16) for own in packs]
    given = case.tensors("meta", torch.bfloat16, "channels_last")
    schedule = BlockSchedule("two_kernel", "sm90", *halves)
    of = cutlass_sep.op.SeparableConvBlock1d(*given, **case.options, schedule=schedule, arch="sm_90a").kernel
    launched = []

    def run(configuration, function, parameters, _) -> tuple[int]:
        count = sum(packs) if int(function) == PACK else 1
        arguments = struct.unpack(f"{count}Q", ctypes.string_at(parameters, 8 * count))
        pointers = [struct.unpack("10Q", ctypes.string_at(at, 80)) for at in arguments]
        launched.append((int(function), configuration.gridDimX, configuration.numAttrs, pointers))
        return (0,)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(kernel, "_tensor_map", lambda *_: bytes(128))
    launcher = kernel._Launcher(SimpleNamespace(pack=PACK, mains=[MAIN, MAIN + 1]), of.stages, 0)
    *tensors, y, workspace = range(0x1000, 0xA000, 0x1000)
    frame = launcher.frame((0,), of._pointers(*tensors, y, workspace))
    for arguments in frame.launches:
        run(*arguments)

    x, expand_weight, dw_weight, project_weight, expand_bias, dw_bias, project_bias = tensors
    hidden_bytes = 2 * 128 * 640 * 2
    packed = workspace + hidden_bytes
    assert 2 * of._workspace_elements == hidden_bytes + sum(stage.geometry.workspace_bytes for stage in of.stages)
    behind = packed + of.stages[0].geometry.workspace_bytes
    wanted = [
        (x, 0, expand_weight, 0, expand_bias, workspace, packed if packs[0] else 0, 0, 0, 0),
        (workspace, dw_weight, project_weight, dw_bias, project_bias, y, behind if packs[1] else 0, x,
         expand_weight, expand_bias),
    ]  # fmt: skip
    *before, first, second = launched
    assert (first[0], first[3], second[0], second[3]) == (MAIN, wanted[:1], MAIN + 1, wanted[1:])
    own = [pointers for pointers, packing in zip(wanted, packs, strict=True) if packing]
    blocks = sum(stage.geometry.pack_blocks for stage in of.stages)
    assert before == ([(PACK, blocks, 0, own)] if own else [])
    # Each may start before the one in front of it in this call is complete, but the first one.
    assert [attributes for _, _, attributes, _ in launched] == [0, 1, 1][: len(launched)]


def test_one_box_of_a_window_is_what_its_pieces_are(monkeypatch: pytest.MonkeyPatch):
    """x of the fused block, contiguous: windows inside a sequence come by the second map, others by the first."""
    given = Block(n=3, c=64, e=64, l=264, kernel=9).tensors("meta", torch.bfloat16)
    op = cutlass_sep.op.SeparableConvBlock1d(*given, path="sm90", form="fused", arch="sm_90a")
    pieces, whole, *_ = described_maps(op, monkeypatch)
    assert pieces[5] == whole[5] == 32
    (span, channels, blocks, sequences), piece = whole[4], pieces[4]
    assert piece == (span, channels, sequences) == (16, 64, 1)
    assert span * blocks == op.kernel.stages[0].geometry.positions == 144
    for window in (0, 8, 264 - 144):
        for block in range(blocks):
            for l, c, n in ((0, 0, 0), (15, 63, 2), (7, 20, 1)):  # noqa: E741
                assert address(whole, window + l, c, block, n) == address(pieces, window + 16 * block + l, c, n)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize(("kernel_size", "dilation"), [(1, 1), (2, 1), (4, 1), (4, 2), (5, 1), (9, 1), (16, 1), (4, 5)])
def test_x_of_a_scaled_block_comes_alike_in_both_layouts(kernel_size, dilation, precision, monkeypatch):
    """Packing turns contiguous x, so that its windows are as narrow, and L has only to suit x and y themselves."""
    case = Block(n=3, c=72, e=40, l=100, kernel=kernel_size, dilation=dilation)
    described, geometries = [], []
    for layout in ("contiguous", "channels_last"):
        given = case.tensors("meta", torch.float32, layout)
        options = {"dilation": dilation, "fp32_precision": precision, "path": "sm90", "form": "fused", "arch": "sm_90a"}
        op = cutlass_sep.op.SeparableConvBlock1d(*given, **options)
        geometries.append(op.kernel.stages[0].geometry)
        described.append(described_maps(op, monkeypatch)[:3])  # x, its windows, the expand weights
    contiguous, channels_last = geometries
    for name in ("phase", "positions", "shared_bytes", "x_bytes", "pack_blocks"):
        assert getattr(contiguous, name) == getattr(channels_last, name), name
    assert described[0] == described[1]
    x = described[0][0]
    parts, last = contiguous.parts, (contiguous.parts * 72 - 1, 99, 2)
    assert x[2] == (parts * 72, 100, 3) and x[4] == (64, contiguous.positions, 1)
    assert address(x, *last) - (1 << 20) == 3 * 100 * parts * 72 * 2 - 2  # dense


@pytest.mark.parametrize(("o", "side_by_side"), [(256, 8), (96, 8), (48, 4), (40, 2)])
def test_columns_of_a_lane_are_output_channels_side_by_side(o: int, side_by_side: int, monkeypatch: pytest.MonkeyPatch):
    """Project weights of the fused block, channels_last: wgmma gives lane t columns 2t and 2t + 1 of each 8."""
    given = Block(n=3, c=64, e=72, o=o, residual=False).tensors("meta", torch.float16)
    given = (given[0].transpose(1, 2).contiguous().transpose(1, 2), *given[1:])
    op = cutlass_sep.op.SeparableConvBlock1d(*given, residual=False, path="sm90", form="fused", arch="sm_90a")
    geometry = op.kernel.stages[0].geometry
    assert geometry.lane_oc == side_by_side
    *_, weights = described_maps(op, monkeypatch)
    _, start, extents, _, box, swizzle = weights
    assert (box[0], swizzle) == (64, 128)
    instruction = geometry.tile.tile_oc // geometry.halves
    # Rows of the box in the order in which they come to lie in shared memory.
    rows = [row[::-1] for row in itertools.product(*map(range, box[:0:-1]))]
    assert len(rows) == instruction
    for half in range(geometry.halves):
        lanes = [[] for _ in range(4)]
        for column, row in enumerate(rows):
            position = (*row[:-1], row[-1] + half * box[-1])
            if position[-1] < extents[-1]:  # else zeros
                channel, rest = divmod(address(weights, 0, *position) - start, 2 * op.problem.e)
                assert rest == 0
                lanes[column // 2 % 4].append(channel - half * instruction)
        groups = range(min(o - half * instruction, instruction) // (4 * side_by_side))
        for t, channels in enumerate(lanes):
            assert channels == [(4 * g + t) * side_by_side + i for g in groups for i in range(side_by_side)]


def test_weights_that_are_not_packed_are_described_as_they_lie(monkeypatch: pytest.MonkeyPatch):
    """[O,C], of which a box is 64 channels of a tile's output channels: rows of 128 bytes, swizzled for wgmma."""
    op = make_op("direct")
    *_, weights = described_maps(op, monkeypatch)
    _, start, extents, strides, box, swizzle = weights
    assert extents == (op.problem.c, op.problem.o) != extents[::-1]
    assert (strides, box, swizzle) == ((2 * op.problem.c,), (64, DIRECT.tile_oc), 128)
    assert op.kernel.stages[0].maps[-1].pointer == kernel._PW_WEIGHT
    assert address(weights, 3, 5) - start == 2 * (5 * op.problem.c + 3)


def described_maps(op, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What the TMA descriptors of the first kernel are encoded from."""
    monkeypatch.setattr(kernel, "_tensor_map", lambda *described: described)
    return [of.encode(op.problem, 1 << 20) for of in op.kernel.stages[0].maps]


def address(of: tuple, *position: int) -> int:
    """Where the element at `position` of a described map lies."""
    _, start, extents, strides, box, _ = of
    assert len(extents) == len(box) == len(strides) + 1
    assert all(0 <= at < extent for at, extent in zip(position, extents, strict=True))
    return start + sum(at * stride for at, stride in zip(position, (2, *strides), strict=True))
