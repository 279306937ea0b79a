"""Problem + schedule -> the CUDA C++ of one translation unit.

The Jinja templates in `templates/` state constants and instantiate kernels; the `.cuh` parts beside them hold the
device code. `render` inlines the parts, so that its result includes only CUTLASS, CuTe and CUDA headers. Same
arguments, same bytes.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import kept
from .block_schedule import BlockSchedule, FusedGeometry, FusedTile
from .direct import DirectGeometry
from .planes import PlaneGeometry
from .problem import MAX_ALIGNMENT, Problem, SeparableBlock1dProblem, SeparableConv2dProblem
from .schedule import Geometry, Schedule
from .toolchain import version_of

if TYPE_CHECKING:
    import jinja2

#: Activation name -> struct in templates/activation.cuh, a template on the type of memory's elements.
ACTIVATION_STRUCTS = {
    None: "Identity",
    "relu": "Relu",
    "relu6": "Relu6",
    "silu": "Silu",
    "hardswish": "Hardswish",
    "gelu": "Gelu",
    "gelu_tanh": "GeluTanh",
}
_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


@cache
def templates() -> Path:
    """The templates: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).parent
    folders = package / "_templates", package.parent / "templates"
    for folder in folders:
        if (folder / "problem.cuh").is_file():
            return folder
    raise FileNotFoundError(f"the templates of cutlass_sep are neither in {folders[0]} nor in {folders[1]}")


@cache
def _environment() -> jinja2.Environment:
    import jinja2  # here, because a source that was kept needs none

    loader = jinja2.FileSystemLoader(templates())
    return jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )


@cache
def _part(name: str) -> str:
    """A template part without its include guard, under a line that names it."""
    return f"// ---- {name} ----\n" + (templates() / name).read_text(encoding="utf-8").replace("#pragma once\n", "")


def _inline(text: str) -> str:
    return _INCLUDE.sub(lambda match: _part(match[1]), text)


def _element(dtype: str) -> str:
    from cutlass_library import DataType, DataTypeTag

    named = {"float32": DataType.f32, "float16": DataType.f16, "bfloat16": DataType.bf16}
    return DataTypeTag[named[dtype]]


def mma_atom(problem: SeparableConv2dProblem, schedule: Schedule) -> str:
    """CuTe's name of the instruction that the schedule's MathInstruction describes (A from registers unless `shared_x`,
    K-major B).
    """
    from .schedule import math_instruction

    math = math_instruction(problem, schedule)
    m, n, k = math.instruction_shape
    element = math.element_a.name.upper()
    if schedule.path == "sm90":
        if element == "TF32":
            return f"MMA_{m}x{n}x{k}_F32TF32TF32_RS_TN<>"
        major = "cute::SM90::GMMA::Major::K"
        operands = "SS" if schedule.shared_x else "RS"
        return f"MMA_{m}x{n}x{k}_F32{element}{element}_{operands}<{major}, {major}>"
    return f"SM80_{m}x{n}x{k}_F32{element}{element}F32_TN"


def constants(geometry: Geometry) -> dict[str, Any]:
    """The compile-time constants of struct Config, by their C++ names."""
    problem, schedule = geometry.problem, geometry.schedule
    values: dict[str, Any] = {
        "kChannelsLast": problem.layout == "channels_last",
        "kPixelMajor": geometry.pixel_major,
        "kPhase": geometry.phase,
        "kC": problem.c,
        "kO": problem.o,
        "kKernelH": problem.kernel[0],
        "kKernelW": problem.kernel[1],
        "kStrideH": problem.stride[0],
        "kStrideW": problem.stride[1],
        "kDilationH": problem.dilation[0],
        "kDilationW": problem.dilation[1],
        "kDwBias": problem.dw_bias,
        "kPwBias": problem.pw_bias,
        "kDepthwise": problem.depthwise,
        "kResidual": problem.residual,
        "kSplit": geometry.split,
        "kFp16Range": problem.dtype == "float16",
        "kMmaSteps": geometry.mma_steps,
        "kTileOc": schedule.tile_oc,
        "kSlotChannels": schedule.slot_channels,
        "kBlocks": schedule.blocks,
        "kWarpsQ": schedule.warps_q,
        "kWarpgroups": schedule.warpgroups,
        "kMmaQ": schedule.mma_q,
        "kPacksTaps": schedule.packs_taps,
        "kRunWindow": schedule.run_window,
    }
    if schedule.path == "sm90":
        values |= {
            "kSideBySide": schedule.side_by_side,
            "kSplitChannels": schedule.split_channels,
            "kRowSlots": schedule.row_slots,
            "kWeightSlots": schedule.weight_slots,
            "kStagingGroups": schedule.staging_groups,
        }
    else:
        values |= {
            "kGather": schedule.gather,
            "kDwShared": geometry.dw_shared,
            "kResidentBlocks": geometry.resident_blocks,
            "kVectorAccess": problem.alignment == MAX_ALIGNMENT,
        }
    return values | {"kSharedBytes": geometry.shared_bytes, "kWorkspaceBytes": geometry.workspace_bytes}


def _kernel(name: str, problem: SeparableConv2dProblem, schedule: Schedule) -> dict[str, Any]:
    """What a translation unit states of one kernel of the separable operator."""
    geometry = Geometry(problem, schedule)
    kind = "F32{0}{0}F32_TN".format("F16" if problem.dtype == "float16" else "BF16")
    return {
        "name": name,
        "config": f"{name.capitalize()}Config",
        "shared_x": schedule.shared_x,
        "layout": "PointwiseLayout" if schedule.shared_x else "Sm90Layout",
        "turned": geometry.turned,
        "packed": geometry.packed,
        "packs": geometry.pack_blocks > 0,
        "element": _element(problem.dtype),
        "mma_atom": mma_atom(problem, schedule),
        "depthwise_atom": f"SM80_16x8x16_{kind}",
        "depthwise_tail_atom": f"SM80_16x8x8_{kind}",
        "mid_activation": ACTIVATION_STRUCTS[problem.mid_activation],
        "activation": ACTIVATION_STRUCTS[problem.activation],
        "constants": constants(geometry) | {"kExpandC": 0},
    }


def _depthwise_kernel(problem: SeparableConv2dProblem, schedule: Schedule, of_block: bool) -> dict[str, Any]:
    """What a translation unit states of the depthwise kernel in front of a pointwise one; `of_block`: behind one."""
    stated = _kernel("depthwise", problem, schedule.pointwise)
    names = (
        "kChannelsLast", "kC", "kO", "kKernelH", "kKernelW", "kStrideH", "kStrideW", "kDilationH", "kDilationW",
        "kDwBias", "kPwBias", "kDepthwise", "kResidual", "kFp16Range", "kExpandC",
    )  # fmt: skip
    constants = {name: stated["constants"][name] for name in names}
    constants["kTileOc"] = 8  # output channels of a lane, where a pixel is made anew
    if schedule.plane_rows:
        geometry = PlaneGeometry(problem, schedule)
        constants |= {
            "kPlaneRows": schedule.plane_rows,
            "kPlaneColumns": schedule.plane_columns,
            "kPlaneChannels": geometry.channels,
            "kPlaneSlots": geometry.slots,
            "kPlaneOffset": geometry.plane_offset,
        }
    else:
        geometry = DirectGeometry(problem, schedule)
        constants |= {
            "kThreadRows": schedule.thread_rows,
            "kThreadColumns": schedule.thread_columns,
            "kOfBlock": of_block,
            "kMostLanes": geometry.most_lanes,
            "kThreads": geometry.threads,
        }
    constants |= {"kFlagOffset": geometry.flag_offset, "kSharedBytes": geometry.shared_bytes}
    return stated | {"planes": schedule.plane_rows > 0, "constants": constants}


def _separable(
    name: str, problem: SeparableConv2dProblem, schedule: Schedule, of_block: bool = False
) -> dict[str, Any]:
    """The kernels of a separable convolution: of a depthwise stage of its own, if there is one, and the others."""
    if not schedule.apart:
        return {"depthwise": None, "kernels": [_kernel(name, problem, schedule)]}
    behind = _kernel("pointwise", problem.pointwise, schedule.pointwise)
    return {"depthwise": _depthwise_kernel(problem, schedule, of_block), "kernels": [behind]}


def _block(problem: SeparableBlock1dProblem, schedule: BlockSchedule) -> dict[str, Any]:
    """The same of a block in kernels of the separable operator."""
    expand = _kernel("expand", problem.expand, schedule.expand)
    unit = _separable("project", problem.project, schedule.project, of_block=True)
    if problem.dtype == "float16":
        # A hidden value beyond fp16's range becomes NaN in memory, and the pixels that it reaches start from x again.
        expand["activation"] = "HalfOrNan"
        exact = unit["depthwise"] or unit["kernels"][0]
        exact["constants"] |= {"kExpandC": problem.c, "kExpandBias": problem.expand_bias}
    return unit | {"kernels": [expand, *unit["kernels"]]}


def _fused_unit(problem: SeparableBlock1dProblem, tile: FusedTile) -> dict[str, Any]:
    """What the fused block's translation unit states."""
    geometry = FusedGeometry(problem, tile)
    columns = geometry.math_instruction.instruction_shape[1]
    element = geometry.math_instruction.element_a.name.upper()
    kind, k_major = f"F32{element}{element}", "cute::SM90::GMMA::Major::K"
    mn_major = "cute::SM90::GMMA::Major::MN"
    return {
        "element": _element(problem.dtype),
        "operand": _element(geometry.operand),
        "expand_atom": f"MMA_64x{geometry.positions}x16_{kind}_SS<{k_major}, "
        f"{k_major if geometry.pixel_major else mn_major}>",
        "depthwise_atom": f"SM80_16x8x16_F32{element}{element}F32_TN",
        "mma_atom": f"MMA_64x{columns}x16_{kind}_SS<{mn_major}, {k_major}>",
        "activation": ACTIVATION_STRUCTS[problem.activation],
        "constants": {
            "kChannelsLast": geometry.channels_last,
            "kExpandC": problem.c,
            "kC": problem.e,
            "kO": problem.o,
            "kKernelW": problem.kernel,
            "kDilationW": problem.dilation,
            "kExpandBias": problem.expand_bias,
            "kDwBias": problem.dw_bias,
            "kPwBias": problem.project_bias,
            "kResidual": problem.residual,
            "kFp16Range": problem.dtype == "float16",
            "kScaled": geometry.scaled,
            "kParts": geometry.parts,
            "kPhase": geometry.phase,
            "kPositions": geometry.positions,
            "kTileOc": tile.tile_oc,
            "kLaneOc": geometry.lane_oc,
            "kHiddenSlots": tile.hidden_slots,
            "kProjectSlots": tile.project_slots,
            "kExpandSlots": tile.expand_slots,
            "kSharedBytes": geometry.shared_bytes,
            "kWorkspaceBytes": geometry.workspace_bytes,
            "kPackedExpand": geometry.packed_expand,
            "kPackedProject": geometry.packed_project,
            "kPackedScales": geometry.packed_scales,
        },
    }


def title(
    problem: SeparableConv2dProblem | SeparableBlock1dProblem, schedule: Schedule | BlockSchedule, arch: str
) -> str:
    """First line of the translation unit, for people."""
    if isinstance(problem, SeparableBlock1dProblem):
        what = (
            f"block 1-D ({schedule.form}), {problem.dtype} {problem.layout}, {problem.c} -> {problem.e} -> {problem.o}"
        )
        return f"cutlass_sep: {what} channels, kernel {problem.kernel}, path {schedule.path}, {arch}"
    kernel = "x".join(map(str, problem.kernel))
    return (
        f"cutlass_sep: separable 2-D, {problem.dtype} {problem.layout}, {problem.c} -> {problem.o} channels, "
        f"{kernel} kernel, path {schedule.path}, {arch}"
    )


def render(problem: Problem, schedule: Schedule | BlockSchedule, arch: str) -> str:
    """The whole translation unit, out of the disk cache where it was kept. Only the problem's layer counts: the source
    serves all N, H, W and L.
    """
    problem = problem.layer
    arguments = {
        "op": problem.op,
        "problem": problem.to_json(),
        "schedule": schedule.to_json(),
        "arch": arch,
        "versions": [version_of(name) for name in ("jinja2", "nvidia-cutlass")],
    }
    known = kept.load(".source", problem.op, arguments, kept.PACKAGE, templates())
    if known is not None:
        return known.decode()
    text = render_anew(problem, schedule, arch)
    kept.keep(".source", problem.op, arguments, text.encode(), kept.PACKAGE, templates())
    return text


def render_anew(problem: Problem, schedule: Schedule | BlockSchedule, arch: str) -> str:
    """`render` without the disk cache. Depends on the problem's layer alone: not on N, H, W, L or P, Q."""
    heading = title(problem, schedule, arch)
    if isinstance(schedule, BlockSchedule) and schedule.form == "fused":
        unit = _environment().get_template("block1d_sm90.cu.j2")
        return _inline(unit.render(title=heading, **_fused_unit(problem, schedule.tile)))
    if isinstance(problem, SeparableBlock1dProblem):
        kernels = _block(problem, schedule)
    else:
        kernels = _separable("separable2d", problem, schedule)
    unit = _environment().get_template(f"separable2d_{schedule.path}.cu.j2")
    return _inline(unit.render(title=heading, **kernels))
