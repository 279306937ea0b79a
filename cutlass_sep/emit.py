"""Stand-alone projects: an operator as source, cubin, C++ host code and a check.

They need PyTorch and a C++ compiler, and neither this package nor a CUDA toolkit.
"""

from __future__ import annotations

import contextlib
import keyword
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .problem import DTYPES
from .schedule import LONG_ITEM, LONG_ITEM_PERCENT, MAX_EXTENT

if TYPE_CHECKING:
    from .direct import DirectGeometry
    from .kernel import Stage, TensorMap
    from .op import Operation
    from .planes import PlaneGeometry
    from .problem import SeparableBlock1dProblem, SeparableConv2dProblem
    from .schedule import Schedule

#: The file by whose first line, which names the operator, a folder is known as an earlier emission.
_CHECK = "check.py"
#: File -> its template in templates/standalone/, in the order of writing: what is interrupted can be emitted again.
_FILES = {
    _CHECK: "check.py.j2",
    "{name}.cu": "kernel.cu.j2",
    "{name}.hpp": "launch.hpp.j2",
    "{name}.cpp": "binding.cpp.j2",
}
#: CUtensorMapDataType.
_DATA_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
#: Precision of the arithmetic -> relative errors of a product on the tensor cores and of rounding y, as in check.py.
#: ieee: two operands of 22 bits, and the product of their low parts left out. tf32: two rounded operands. 16 bit: one,
#: the depthwise output.
_ERRORS = {
    "ieee": ("3 * 2.0**-22", "UNIT"),
    "tf32": ("2 * 2.0**-11", "UNIT"),
    "float16": ("2.0**-11", "2.0**-11"),
    "bfloat16": ("2.0**-8", "2.0**-8"),
}


def pytorch(op: Operation, name: str, directory: str | os.PathLike[str]) -> None:
    """Write `name`.cu, .cubin, .hpp, .cpp and check.py to `directory`; compiles first if need be.

    The directory is made if it is not there. In one that holds an earlier emission of this name its files are
    overwritten, and nothing else is touched; any other has to be empty. `python check.py` there builds the PyTorch
    operator torch.ops.`name`.run and compares it with float64. The operator takes x of any N, H, W (N, L); of an
    aligned op (16 bytes) only maps whose rows are multiples of 16 bytes.

    Raises TypeError for anything but an op, ValueError unless `name` is a Python identifier of ASCII characters,
    Unsupported for an op on path "torch", FileExistsError for a directory with other files, all before anything is
    compiled or written; and as `op.compile`.
    """
    from .op import Operation

    if not isinstance(op, Operation):
        raise TypeError(f"op must be an op of cutlass_sep, got a {type(op).__name__}")
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        raise ValueError(f"name={name!r} must be a Python identifier of ASCII characters")
    texts = {file.format(name=name): text for file, text in _render(op, name).items()}
    folder = Path(directory)
    _check_folder(folder, name, texts[_CHECK])
    cubin = op.compile().cubin

    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")
    (folder / f"{name}.cubin").write_bytes(cubin)


def _check_folder(folder: Path, name: str, check: str) -> None:
    """Raise FileExistsError for a folder with files that are not of an earlier emission, whose check began alike, and
    for what is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is no folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        if (folder / _CHECK).read_bytes().splitlines()[:1] == check.encode().splitlines()[:1]:
            return
    raise FileExistsError(
        f"{folder} has files that are not an earlier project {name}; give a new or an empty folder, or remove them"
    )


def _render(op: Operation, name: str) -> dict[str, str]:
    """The text of every file but the cubin."""
    import jinja2

    from . import arch as archs
    from . import kernel, operators, source
    from .problem import MAX_ALIGNMENT

    problem, path = op.problem, op.path
    stages, unpacked = _stages(op), _unpacked(op)
    packing = [index for index, stage in enumerate(stages) if stage["packs"]]
    vectors = path == "sm90" or problem.alignment == MAX_ALIGNMENT
    product_error, output_error = _ERRORS[problem.fp32_precision or problem.dtype]
    alignment = MAX_ALIGNMENT if vectors else problem.element_size
    scaled = op.form == "fused" and stages[0]["scaled"]
    tensors = operators.of(problem).tensors
    channels_last = problem.layout == "channels_last"
    if problem.spatial == 2:
        runs = path == "sm90" and op.schedule.run_window > 0
        # The window of runs must fit into its slot, as that of a map of fewer rows does.
        step = 1 if not runs else -1 if problem.p > 1 else 0
        axes, extents, other_extents = "HW", (problem.h, problem.w), (problem.h + step, problem.w)
    else:
        step = 1 if channels_last else alignment // problem.element_size
        axes, extents, other_extents = "L", (problem.l,), (problem.l + step,)
    templates = source.templates() / "standalone"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    values = {
        "name": name,
        "title": source.title(problem, op.schedule, op.arch),
        "notices": (templates / "notices.txt").read_text(encoding="utf-8"),
        "source": op.source,
        "arch": op.arch,
        "capability": archs.ARCHS[op.arch],
        "exact": op.arch.endswith("a"),
        "problem": problem,
        "spatial": problem.spatial,
        "channels_last": channels_last,
        "axes": list(axes),
        "extents": extents,
        "other_extents": other_extents,
        # A sequence is a map with H = 1, and the block's height, width and padding those of its depthwise stage.
        "p": problem if problem.spatial == 2 else problem.project,
        "tensors": tensors,
        "inputs": [name for name in tensors if "bias" not in name],
        "biases": [name for name in tensors if "bias" in name],
        "parameters": dict(zip(tensors[1:], _shapes(problem), strict=True)),
        "stages": stages,
        "packing": packing,
        "unpacked": unpacked,
        "workspace": bool(packing or unpacked),
        "tma": path == "sm90",
        "alignment": alignment,
        "pack_threads": kernel.PACK_THREADS,
        "flat": any(stage["name"] == "pointwise" or stage.get("pairs") for stage in stages),
        "most_pixels": MAX_EXTENT,
        "long_item": LONG_ITEM,
        "long_item_percent": LONG_ITEM_PERCENT,
        "product_error": product_error,
        "output_error": output_error,
        "products": 3 if problem.fp32_precision == "ieee" else 1,
        "tap_errors": _tap_errors(op),
        "operand_error": "2.0**-11" if scaled and problem.fp32_precision == "tf32" else None,
    }
    return {file: environment.get_template(template).render(values) for file, template in _FILES.items()}


def _shapes(p: SeparableConv2dProblem | SeparableBlock1dProblem) -> list[tuple[int, ...] | None]:
    """Of the weights and biases in the operator's order; None for no bias."""
    if p.spatial == 2:
        weights = [(p.c, 1, *p.kernel), (p.o, p.c, 1, 1)]
        biases = [(p.c, p.dw_bias), (p.o, p.pw_bias)]
    else:
        weights = [(p.e, p.c, 1), (p.e, 1, p.kernel), (p.o, p.e, 1)]
        biases = [(p.e, p.expand_bias), (p.e, p.dw_bias), (p.o, p.project_bias)]
    return weights + [(extent,) if there else None for extent, there in biases]


def _stages(op: Operation) -> list[dict[str, Any]]:
    """For each main kernel what the host code states of it. Expressions are those of `launch` in launch.hpp.j2."""
    stages = op.kernel.stages
    if op.form is None:
        weights = [f"tensors.{name}" for name in ("dw_weight", "pw_weight", "dw_bias", "pw_bias")]
        if op.schedule.apart:
            return _apart_stages(stages, "tensors.x", weights, "unpacked", op.problem)
        pointers = ["tensors.x", *weights, "tensors.y", _packed(stages[0]), *["nullptr"] * 3]
        return [_separable_stage(stages[0], pointers)]
    weights = [f"tensors.{name}" for name in ("dw_weight", "project_weight", "dw_bias", "project_bias")]
    of_block = ["tensors.x", "tensors.expand_weight", "tensors.expand_bias"]
    if op.form == "fused":
        x = "unpacked" if stages[0].geometry.scaled else "tensors.x"
        return [_fused_stage(stages[0], [x, *weights, "tensors.y", _packed(stages[0]), *of_block])]
    expand, *rest = stages
    expand_weights = ["nullptr", "tensors.expand_weight", "nullptr", "tensors.expand_bias"]
    first = _separable_stage(expand, ["tensors.x", *expand_weights, "unpacked", _packed(expand), *["nullptr"] * 3])
    behind = expand.geometry.workspace_bytes
    if op.schedule.project.apart:
        outputs = f"unpacked + {_hidden(op.problem)}"
        return [first, *_apart_stages(rest, "unpacked", weights, outputs, op.problem.project, behind, of_block)]
    project = rest[0]
    pointers = ["unpacked", *weights, "tensors.y", _packed(project, behind), *of_block]
    return [first, _separable_stage(project, pointers)]


#: N, H, W, P, Q of a main kernel, expressions; of one that sees all images as one row of pixels.
_SIZES = ("n", "h", "w", "p", "q")
_FLAT = ("1", "1", "n * p * q", "1", "n * p * q")


def _apart_stages(
    stages: list[Stage], x: str, weights: list[str], outputs: str, p: SeparableConv2dProblem, behind: int = 0,
    of_block: list[str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Those of a depthwise kernel of its own, and of what belongs to it.

    outputs: where in the workspace it leaves its outputs; what else it needs there is behind them.
    behind: bytes of packed weights of kernels before.
    """
    from .kernel import DepthwiseStage, DirectStage, MendStage, PackPlanesStage

    g, (_, pw_weight, _, pw_bias) = stages[0].geometry, weights
    scratch, found, index = f"{outputs} + {_depthwise_outputs(p)}", [], 1 if of_block else 0
    for stage in stages:
        if not isinstance(stage, DepthwiseStage):
            block_x = of_block[0] if of_block else "nullptr"
            pointers = [outputs, "nullptr", pw_weight, "nullptr", pw_bias, "tensors.y", _packed(stage, behind), block_x]
            sizes = _FLAT if p.layout == "channels_last" else ("n", "1", "p * q", "1", "p * q")
            found.append(_separable_stage(stage, [*pointers, "nullptr", "nullptr"], sizes))
            continue
        own = {
            "name": stage.name, "pads": (p.padding.top, p.padding.left), "sizes": _SIZES, "workspace_bytes": 0,
            "threads": stage.threads, "shared_bytes": stage.shared_bytes, "packs": False, "runs": False, "maps": [],
            "pointers": [x, *weights, outputs, scratch, *["nullptr"] * 3], "steps": "0",
        }  # fmt: skip
        if isinstance(stage, DirectStage):
            own["blocks"] = _direct_blocks(g)
        elif isinstance(stage, PackPlanesStage):
            own["blocks"] = _pack_planes_blocks(g)
        elif isinstance(stage, MendStage):
            own["blocks"] = "std::min<int64_t>(int64_t(n) * p * q, kernels.processors)"
            own["steps"] = f"int(blocks[{index}])" if g.schedule.thread_rows else "1"
            rest = of_block or [outputs, "nullptr", "nullptr"]
            own["pointers"] = [outputs if of_block else x, *weights, "tensors.y", scratch, *rest]
        else:
            own["blocks"] = _plane_blocks(g)
            own["maps"] = [_plane_map(stage, scratch)]
        found.append(own)
    return found


def _direct_blocks(g: DirectGeometry) -> str:
    from . import direct

    s = g.schedule
    tiles = f"int64_t(n) * ceil_div(p, {s.thread_rows}) * ceil_div(q, {s.thread_columns})"
    most = f"std::min({direct.BLOCKS} * kernels.processors, {direct.MOST_BLOCKS}) / {g.slabs}"
    return f"{g.slabs} * std::min<int64_t>(({tiles} + {g.units - 1}) / {g.units}, std::max(1, {most}))"


def _pack_planes_blocks(g: PlaneGeometry) -> str:
    units, tables, c = f"ceil_div(w + {g.shift}, 8)", g.groups * g.channels, g.problem.c
    if g.problem.layout == "channels_last":
        return f"{tables} + int64_t(n) * h * ceil_div({units}, 8) * {-(-c // 64)}"
    return f"{tables} + (int64_t({c}) * n * h * {units} + 255) / 256"


def _plane_blocks(g: PlaneGeometry) -> str:
    s = g.schedule
    images, rows = ("1", "n * p") if g.one_row else ("n", "p")
    tiles = f"ceil_div({images}, {g.tile_images}) * ceil_div({rows}, {s.plane_rows}) * ceil_div(q, {s.plane_columns})"
    return f"std::min<int64_t>(int64_t({g.groups}) * {tiles}, kernels.processors)"


def _plane_map(stage: Stage, scratch: str) -> dict[str, Any]:
    g, p = stage.geometry, stage.geometry.problem
    images, rows = ("1", "n * h") if g.one_row else ("n", "h")
    pitch = f"int64_t(round_up(w + {g.shift}, 8))"
    return {
        "address": f"{scratch} + {g.plane_offset}", "type": _DATA_TYPES[p.dtype], "size": p.element_size, "swizzle": 0,
        "extents": (f"w + {g.shift}", images, rows, p.c), "box": stage.maps[0].box,
        "strides": (("h", pitch), (pitch,), ("n", "h", pitch)),
    }  # fmt: skip


def _depthwise_outputs(p: SeparableConv2dProblem) -> str:
    """Bytes of the depthwise outputs, an expression of n, h, w."""
    return f"round_up(size_t(n) * {p.c} * output_height(h) * output_width(w) * kElementBytes, 256)"


def _hidden(p: SeparableBlock1dProblem) -> str:
    """Bytes of the hidden channels, an expression of n, h, w."""
    return f"round_up(size_t(n) * {p.e} * h * w * kElementBytes, 256)"


def _packed(stage: Stage, behind: int = 0) -> str:
    """Where a stage's packed weights are, `behind` so many bytes of the stages before it."""
    if not stage.packs:
        return "nullptr"
    return f"packed + {behind}" if behind else "packed"


def _stage(stage: Stage, pointers: list[str], sizes: tuple[str, ...] = _SIZES) -> dict[str, Any]:
    names = ("threads", "shared_bytes", "workspace_bytes")
    maps = [
        _map(tensor_map, pointers, stage.geometry.problem, dict(zip(_SIZES, sizes, strict=True)))
        for tensor_map in stage.maps
    ]
    own = {name: getattr(stage.geometry, name) for name in names}
    return {
        "name": stage.name,
        "pointers": pointers,
        "maps": maps,
        "packs": stage.packs,
        "pack_blocks": str(stage.geometry.pack_blocks),
        "sizes": sizes,
        "steps": None,  # and of the grid: launch.hpp.j2 knows them by the work items
        "blocks": None,
    } | own


def _separable_stage(stage: Stage, pointers: list[str], sizes: tuple[str, ...] = ()) -> dict[str, Any]:
    g, p = stage.geometry, stage.geometry.problem
    values = _stage(stage, pointers, sizes or (_FLAT if g.schedule.shared_x else _SIZES))
    if g.runs:  # the window depends on the map
        channels, *_, images = values["maps"][0]["box"]
        values["maps"][0]["box"] = (channels, "run_columns(q)", "run_rows(steps[0])", images)
    return values | {
        "item_q": g.item_q, "tile_p": g.tile_p, "oc_tiles": g.oc_tiles, "pairs": g.schedule.shared_x,
        "march": g.schedule.path == "sm90" and not g.schedule.shared_x and g.march, "tiles_down": g.tiles_down,
        "stride_h": p.stride[0], "kernel_rows": g.window_rows(1), "turned": g.turned, "runs": g.runs,
        "run_window": g.schedule.run_window, "pads": (p.padding.top, p.padding.left),
    }  # fmt: skip


def _fused_stage(stage: Stage, pointers: list[str]) -> dict[str, Any]:
    from .block_schedule import PACK_POSITIONS

    g = stage.geometry
    x_blocks = f" + n * ceil_div(w, {PACK_POSITIONS})" if g.scaled else ""
    return _stage(stage, pointers) | {
        "item_q": g.tile_positions, "tile_p": 1, "oc_tiles": 1, "pairs": False, "march": False, "tiles_down": 0,
        "stride_h": 1, "kernel_rows": 1, "turned": False, "runs": False, "pads": (0, g.problem.pads[0]),
        "scaled": g.scaled, "pack_blocks": f"{g.weight_blocks}{x_blocks}",
    }  # fmt: skip


def _map(
    of: TensorMap,
    pointers: list[str],
    problem: SeparableConv2dProblem | SeparableBlock1dProblem,
    sizes: dict[str, str],
) -> dict:
    """A TMA descriptor as `launch` encodes it, which knows the channels alone and calls a length w."""

    def known(factors: tuple[int | str, ...]) -> list[int | str]:
        names = sizes | {"l": "w", "map_pixels": "p * q", "pixels": sizes["q"]}
        return [getattr(problem, f) if f in ("c", "o", "e") else names.get(f, f) for f in factors]

    strides = [known(own) for own in of.factors()]
    dtype = of.dtype or problem.dtype
    own = {"extents": known(of.extents), "strides": strides, "box": of.box, "swizzle": of.swizzle_bytes}
    address = pointers[of.pointer] + (f" + {of.offset}" if of.offset else "")
    return {"address": address, "type": _DATA_TYPES[dtype], "size": DTYPES[dtype]} | own


def _unpacked(op: Operation) -> str | None:
    """Bytes of the workspace before the packed weights, an expression of n, h, w."""
    p = op.problem
    if op.form is None:
        return _apart_bytes(p, op.schedule, op.kernel.stages) if op.schedule.apart else None
    if op.form == "two_kernel":
        apart = _apart_bytes(p.project, op.schedule.project, op.kernel.stages[1:]) if op.schedule.project.apart else "0"
        return f"{_hidden(p)} + {apart}"
    if (g := op.kernel.stages[0].geometry).scaled:  # x in fp16; a scale of each 8 positions
        return f"round_up(size_t(n) * {g.parts * p.c} * w * 2, 256) + round_up(size_t(n) * ceil_div(w, 8) * 4, 256)"
    return None


def _apart_bytes(p: SeparableConv2dProblem, schedule: Schedule, stages: list[Stage]) -> str:
    """Bytes of depthwise outputs in the workspace, and of what their kernel needs behind them."""
    g = stages[0].geometry
    if not schedule.plane_rows:
        return f"{_depthwise_outputs(p)} + {g.workspace_bytes}"
    planes = f"size_t({p.c}) * n * h * round_up(w + {g.shift}, 8) * kElementBytes"
    return f"{_depthwise_outputs(p)} + round_up({g.plane_offset} + {planes}, 256)"


def _tap_errors(op: Operation) -> int:
    """Half units in the last place of the largest value that the depthwise sum may lose, at most."""
    taps = op.problem.taps if op.form is None else op.problem.kernel
    if op.form != "fused":
        return taps + 1
    if op.kernel.stages[0].geometry.parts == 2:
        return taps + 2
    # On the tensor cores, which cut off two for each product, and for the sum so far in each instruction.
    return 2 * (taps + op.kernel.stages[0].geometry.depthwise_mmas)
