"""The emitted CUDA C++: same arguments, same bytes; for every architecture it compiles to the right instructions."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from block import Block
from problems import KINDS, LAYOUTS, LEAD, LEAD_BLOCK, in_one_kernel, problem_of
from separable import Case

from cutlass_sep import block_schedule, compiler, source
from cutlass_sep.arch import ARCHS
from cutlass_sep.block_schedule import BlockSchedule, FusedGeometry
from cutlass_sep.compiler import Cubin
from cutlass_sep.direct import DirectGeometry
from cutlass_sep.errors import CompileError
from cutlass_sep.planes import PlaneGeometry
from cutlass_sep.planner import candidates
from cutlass_sep.problem import ACTIVATIONS, Problem, SeparableConv2dProblem
from cutlass_sep.schedule import Geometry, Schedule, behind, for_size


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A kernel cache of this file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


# ---- text


def rendered(
    path: str,
    kind: str = "ieee",
    layout: str = "contiguous",
    case: Case | Block = LEAD,
    arch: str = "sm_90a",
    form: str | None = None,
    schedule: Schedule | None = None,
) -> str:
    problem = problem_of(case, kind, layout)
    return source.render(problem, schedule or candidates(problem, arch, path, form)[0], arch)


#: Contiguous rows, turned for tensor cores.
TURN = Schedule("sm90", 128, 64, 2, 4, 2, 10, 1, mma_q=8)


#: The depthwise stage by FMA, and x in shared memory for the pointwise kernel behind it.
DIRECT_3X3 = Schedule(
    "sm90", 128, 64, 1, 4, 2, 4, 1, 2, side_by_side=True, mma_q=16, thread_rows=1, thread_columns=4, shared_x=True
)


#: Arguments of `rendered`: every translation unit that there is.
UNITS = {
    "sm90": ("sm90",),
    "sm90-diagonal": ("sm90", "bf16", "channels_last", replace(LEAD, c=256)),
    "sm90-turned": ("sm90", "bf16", "contiguous", LEAD, "sm_90a", None, TURN),
    "sm90-planes": ("sm90", "fp16", "channels_last", replace(LEAD, kernel=(31, 31), padding=15)),
    "sm90-direct": ("sm90", "fp16", "channels_last", replace(LEAD, c=728, o=728), "sm_90a", None, DIRECT_3X3),
    "portable": ("portable",),
    "fused": ("sm90", "bf16", "contiguous", LEAD_BLOCK, "sm_90a", "fused"),
    "two_kernel-sm90": ("sm90", "ieee", "contiguous", LEAD_BLOCK, "sm_90a", "two_kernel"),
    "two_kernel-portable": ("portable", "ieee", "contiguous", LEAD_BLOCK, "sm_90a", "two_kernel"),
}


def test_same_arguments_same_bytes():
    """Also from another process, whose hashes differ."""
    code = (
        "import json, sys, test_templates as t; json.dump([t.rendered(*unit) for unit in t.UNITS.values()], sys.stdout)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=Path(__file__).parent, capture_output=True, check=True
    )
    for unit, text in zip(UNITS.values(), json.loads(other.stdout), strict=True):
        assert rendered(*unit) == rendered(*unit) == text


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", ["sm90", "portable"])
def test_run_time_numbers_are_not_in_the_source(path: str, layout: str):
    problem = problem_of(LEAD, "bf16", layout)
    schedule = candidates(problem, "sm_90a", path)[0]
    pads = problem.padding._replace(top=3, left=problem.padding.left + 16, right=0)
    other = replace(problem, n=3, h=40, w=64, padding=pads)
    assert source.render_anew(problem, schedule, "sm_90a") == source.render_anew(other, schedule, "sm_90a")
    # Sources are kept by the layer.
    assert source.render(problem, schedule, "sm_90a") == source.render_anew(problem, schedule, "sm_90a")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("path", "form"), [("sm90", "fused"), ("sm90", "two_kernel"), ("portable", "two_kernel")])
def test_run_time_numbers_of_a_block_are_not_in_the_source(path: str, form: str, layout: str):
    problem = problem_of(LEAD_BLOCK, "bf16", layout)
    schedule = candidates(problem, "sm_90a", path, form)[0]
    other = replace(problem, n=3, l=72)
    assert source.render_anew(problem, schedule, "sm_90a") == source.render_anew(other, schedule, "sm_90a")
    # Sources are kept by the layer.
    assert source.render(problem, schedule, "sm_90a") == source.render_anew(problem, schedule, "sm_90a")


def test_the_compile_time_part_is_in_the_source():
    texts = {rendered("portable")}
    for other in (
        {"case": replace(LEAD, c=96)},
        {"case": replace(LEAD, o=96)},
        {"case": replace(LEAD, kernel=(3, 5))},
        {"case": replace(LEAD, stride=(2, 1))},
        {"case": replace(LEAD, dilation=(1, 2))},
        {"case": replace(LEAD, dw_bias=True)},
        {"case": replace(LEAD, pw_bias=True)},
        {"case": replace(LEAD, mid_activation="relu")},
        {"case": replace(LEAD, activation="relu")},
        {"kind": "tf32"},
        {"kind": "fp16"},
        {"kind": "bf16"},
        {"layout": "channels_last"},
        {"arch": "sm_80"},
        {"path": "sm90"},
    ):
        texts.add(rendered(**{"path": "portable"} | other))
    assert len(texts) == 16


@pytest.mark.parametrize("form", ["fused", "two_kernel"])
def test_the_compile_time_part_of_a_block_is_in_the_source(form: str):
    base = {"path": "sm90", "kind": "fp16", "case": LEAD_BLOCK, "form": form}
    texts = {rendered(**base)}
    for other in (
        {"case": replace(LEAD_BLOCK, c=128)},
        {"case": replace(LEAD_BLOCK, e=256)},
        {"case": replace(LEAD_BLOCK, residual=False)},
        {"case": replace(LEAD_BLOCK, residual=False, o=128)},
        {"case": replace(LEAD_BLOCK, kernel=8)},
        {"case": replace(LEAD_BLOCK, dilation=2)},
        {"case": replace(LEAD_BLOCK, expand_bias=False)},
        {"case": replace(LEAD_BLOCK, dw_bias=False)},
        {"case": replace(LEAD_BLOCK, project_bias=False)},
        {"case": replace(LEAD_BLOCK, activation="relu")},
        {"kind": "bf16"},
        {"layout": "channels_last"},
    ):
        texts.add(rendered(**base | other))
    assert len(texts) == 13


def test_parts_are_inlined():
    """Emitted sources need no file but the headers of CUTLASS, CuTe and CUDA; no part is left over."""
    texts = {name: rendered(*unit) for name, unit in UNITS.items()}
    parts = {file.name: file.read_text().replace("#pragma once\n", "") for file in source.templates().glob("*.cuh")}
    left_over = dict(parts)
    for text in texts.values():
        included = re.findall(r"#\s*include\s*(.*)", text)
        assert all(re.fullmatch(r"<(cute|cutlass|cuda)[\w./]*>", name) for name in included), included
        unit = text
        for name, part in parts.items():
            if part in text:
                unit = unit.replace(part, "")
                left_over.pop(name, None)
        assert "{{" not in unit and "{%" not in unit
    assert not left_over, f"in no translation unit: {', '.join(left_over)}"


def test_every_activation_has_its_struct():
    assert set(source.ACTIVATION_STRUCTS) == set(ACTIVATIONS)
    text = (source.templates() / "activation.cuh").read_text()
    for struct in source.ACTIVATION_STRUCTS.values():
        assert re.search(rf"struct {struct}\b", text), struct


@pytest.mark.parametrize("constant", ["kSharedBytes", "kWorkspaceBytes"])
@pytest.mark.parametrize("unit", ["sm90", "sm90-diagonal", "portable", "fused"])
def test_the_unit_asserts_what_schedule_counts(unit: str, constant: str):
    text, count = re.subn(rf"(int {constant} = )(\d+);", r"\g<1>1\g<2>;", rendered(*UNITS[unit]))
    assert count == 1
    with pytest.raises(CompileError, match=r"schedule\.py and the template disagree"):
        compiler.build(text, "sm_90a", name="disagree")


@pytest.mark.parametrize("constant", ["kSharedBytes", "kPlaneOffset", "kPlaneSlots"])
def test_the_unit_asserts_what_planes_counts(constant: str):
    """Its depthwise kernel comes first."""
    text, count = re.subn(rf"(int {constant} = )(\d+);", r"\g<1>1\g<2>;", rendered(*UNITS["sm90-planes"]), count=1)
    assert count == 1
    with pytest.raises(CompileError, match=r"planes\.py and the template disagree"):
        compiler.build(text, "sm_90a", name="disagree")


@pytest.mark.parametrize("constant", ["kSharedBytes", "kThreads"])
def test_the_unit_asserts_what_direct_counts(constant: str):
    text, count = re.subn(rf"(int {constant} = )(\d+);", r"\g<1>1\g<2>;", rendered(*UNITS["sm90-direct"]), count=1)
    assert count == 1
    with pytest.raises(CompileError, match=r"direct\.py and the template disagree"):
        compiler.build(text, "sm_90a", name="disagree")


def test_the_unit_asserts_what_schedule_counts_of_operands_in_shared_memory():
    text = rendered(*UNITS["sm90-direct"])
    last = text.rindex("int kSharedBytes = ")
    text = text[:last] + text[last:].replace("int kSharedBytes = ", "int kSharedBytes = 1", 1)
    with pytest.raises(CompileError, match=r"schedule\.py and the template disagree"):
        compiler.build(text, "sm_90a", name="disagree")


# ---- code


@dataclass(frozen=True)
class Build:
    """A problem and a schedule: the one that is picked for it, or `schedule`."""

    arch: str
    kind: str
    layout: str = "contiguous"
    case: Case | Block = LEAD
    path: str = "portable"
    alignment: int = 16
    form: str | None = None
    schedule: Schedule | BlockSchedule | None = None

    def __str__(self) -> str:
        form = f"-{self.form}" if self.form else "-gather" if self.chosen.gather else ""
        if self.schedule and self.form:
            project = self.chosen.project
            form += f"-{self.chosen.expand.mma_q}-{project.mma_q}-{project.thread_columns or project.plane_columns}"
        elif self.schedule:
            form += f"-{self.chosen.warpgroups}x{self.chosen.blocks}x{self.chosen.mma_q}"
        return f"{self.path}-{self.arch}-{self.kind}-{self.layout}-{self.alignment}-{self.case}{form}"

    @property
    def problem(self) -> Problem:
        return problem_of(self.case, self.kind, self.layout, self.alignment)

    @property
    def chosen(self) -> Schedule | BlockSchedule:
        return self.schedule or candidates(self.problem, self.arch, self.path, self.form)[0]

    @property
    def convolutions(self) -> dict[str, tuple[SeparableConv2dProblem, Schedule]]:
        """The separable convolutions that its kernels make, by the names of their main kernels in one."""
        if self.form == "fused":
            return {}
        if not self.form:
            return {"separable2d": (self.problem, self.chosen)}
        return {part: (getattr(self.problem, part), getattr(self.chosen, part)) for part in ("expand", "project")}

    @property
    def last(self) -> Schedule | None:
        """The schedule of the one with a depthwise stage."""
        return None if self.form == "fused" else list(self.convolutions.values())[-1][1]

    @property
    def apart(self) -> set[str]:
        """Names of the kernels of a depthwise stage that has its own, and of what belongs to it."""
        if self.last is None or not self.last.apart:
            return set()
        mend = {"mend_outputs"} if self.kind == "fp16" else set()
        return {"depthwise"} | ({"pack_planes"} if self.last.plane_rows else set()) | mend

    @property
    def geometries(self) -> dict[str, Geometry]:
        """Those of the main kernels that are of the separable operator, or its pointwise part."""
        return {
            "pointwise" if schedule.apart else name: Geometry(
                problem.pointwise if schedule.apart else problem, schedule.pointwise
            )
            for name, (problem, schedule) in self.convolutions.items()
        }

    @property
    def mains(self) -> set[str]:
        """Names of the main kernels."""
        return {"block1d"} if self.form == "fused" else self.geometries.keys() | self.apart

    def instructions(self, main: str) -> list[str]:
        """The tensor instructions that a main kernel must have, and no others."""
        gemm, depthwise = [MMA[self.path][self.operand]], DEPTHWISE_MMA.get(self.operand, [])
        if main in self.apart:
            if main != "depthwise" or not self.last.plane_rows:
                return []
            problem, schedule = list(self.convolutions.values())[-1]
            return depthwise[: 1 + PlaneGeometry(problem, schedule).matrices % 2]
        if main not in self.depthwise_by_mma:
            return gemm
        return gemm + (depthwise if self.form != "fused" else depthwise[:1])

    @property
    def depthwise_by_mma(self) -> set[str]:
        """Those of the main kernels whose depthwise stage is on tensor cores."""
        if self.form == "fused":
            return self.mains if self.kind != "ieee" else set()
        if self.last.apart:
            return {"depthwise"} if self.last.plane_rows else set()
        return {list(self.geometries)[-1]} if self.last.mma_q else set()

    @property
    def operand(self) -> str:
        """Kind of the MMAs."""
        return "fp16" if self.form == "fused" and self.kind in ("ieee", "tf32") else self.kind

    @property
    def packs(self) -> bool:
        """Whether a kernel in front packs weights, for any of the main ones."""
        return self.form == "fused" or any(geometry.pack_blocks for geometry in self.geometries.values())

    def cubin(self) -> Cubin:
        return compiler.build(source.render(self.problem, self.chosen, self.arch), self.arch, name="template-test")


BLOCK = replace(LEAD, mid_activation="relu6", activation="silu", dw_bias=True, pw_bias=True)
WIDE = Case(n=32, c=512, o=512, h=14, w=14, mid_activation="relu", dw_bias=False)
ODD = Case(c=37, o=21, h=33, w=31, kernel=(2, 4), stride=(2, 1), dilation=(1, 3), mid_activation="hardswish")
STRIDED = Case(n=32, c=96, o=24, h=56, w=56, stride=2, kernel=(5, 5), padding=2, activation="gelu")
LARGE = Case(c=96, o=96, h=56, w=56, kernel=(13, 13), padding=6, activation="gelu_tanh")
LONG = Case(n=8, c=512, o=512, h=1, w=200, kernel=(1, 87), dilation=(1, 2), padding=(0, 86))
FAR = Case(c=64, o=64, h=64, w=64, padding=200, dilation=200)

#: Every architecture in both layouts and all arithmetics, and the forms of the portable kernel on one or two of them.
PORTABLE = [
    *(Build(arch, kind, LAYOUTS[(i + j) % 2]) for i, arch in enumerate(ARCHS) for j, kind in enumerate(KINDS)),
    Build("sm_80", "ieee", "channels_last", BLOCK),
    Build("sm_120a", "bf16", "contiguous", BLOCK),
    Build("sm_86", "ieee", "contiguous", WIDE),
    Build("sm_90a", "fp16", "channels_last", WIDE),
    Build("sm_89", "ieee", "contiguous", ODD, alignment=4),
    Build("sm_100a", "bf16", "channels_last", ODD, alignment=2),
    Build("sm_86", "tf32", "channels_last", STRIDED),
    Build("sm_90a", "ieee", "contiguous", STRIDED),
    Build("sm_86", "ieee", "channels_last", LARGE),
    Build("sm_80", "fp16", "contiguous", LARGE),
    Build("sm_120a", "tf32", "contiguous", LONG, alignment=4),
    Build("sm_89", "bf16", "channels_last", FAR),
    Build("sm_80", "ieee", "contiguous", FAR, alignment=4),
]
SM90 = [
    *(Build("sm_90a", kind, layout, path="sm90") for kind in KINDS for layout in LAYOUTS),
    Build("sm_90a", "ieee", "channels_last", BLOCK, path="sm90"),
    # The best in one kernel.
    *(
        Build("sm_90a", kind, "channels_last", case, path="sm90", schedule=in_one_kernel(found)[0])
        for kind, case in (
            ("bf16", WIDE),
            ("bf16", replace(WIDE, c=728, o=728, h=38, w=38)),
            ("fp16", replace(BLOCK, c=256, o=512, h=28, w=28, stride=2)),
            ("fp16", replace(WIDE, kernel=(7, 7), padding=3)),
            ("bf16", replace(WIDE, c=1152, o=192, h=7, w=7)),
            ("bf16", replace(LONG, w=840, kernel=(1, 25), dilation=1, padding=(0, 12))),
        )
        for found in [for_size(problem_of(case, kind, "channels_last"), "sm_90a", "sm90")]
    ),
]
#: Contiguous rows turned for tensor cores, as picked: marched and not, with as many sums as fit; and one and two blocks
#: of either shape with one, two and three warpgroups.
TURNED = [
    Build("sm_90a", "bf16", "contiguous", LEAD, path="sm90"),
    Build("sm_90a", "fp16", "contiguous", replace(WIDE, h=40, w=40), path="sm90"),
] + [
    Build("sm_90a", kind, "contiguous", case, path="sm90", schedule=replace(TURN, **fields))
    for kind, case, fields in (
        ("bf16", LEAD, {"side_by_side": True, "row_slots": 8, "staging_groups": 2}),
        ("fp16", replace(BLOCK, c=64), {}),
        ("bf16", replace(STRIDED, c=64, h=64, w=64), {"tile_oc": 32, "warpgroups": 1, "blocks": 1}),
        ("fp16", replace(WIDE, c=64, o=64, h=16, w=16), {"tile_oc": 64, "warpgroups": 3, "blocks": 1, "mma_q": 16}),
    )
]
#: Large kernels, whose depthwise stage is a kernel of its own on planes, as picked: of one image side by side, of two
#: and of four; in one row; contiguous.
PLANES = [
    Build("sm_90a", kind, layout, case, path="sm90")
    for kind, layout, case in (
        (
            "bf16",
            "channels_last",
            Case(n=32, c=128, o=128, h=56, w=56, kernel=(31, 31), padding=15, mid_activation="relu"),
        ),
        ("fp16", "channels_last", Case(n=32, c=256, o=256, h=28, w=28, kernel=(29, 29), padding=14)),
        ("bf16", "channels_last", Case(n=32, c=512, o=512, h=14, w=14, kernel=(27, 27), padding=13, dw_bias=True)),
        ("bf16", "channels_last", replace(LONG, n=32, w=840)),
        ("bf16", "contiguous", Case(n=8, c=96, o=96, h=40, w=72, kernel=(5, 51), padding=(2, 25))),
    )
]
#: The depthwise stage as a kernel of its own by FMA: every data type, strides, dilation, long rows and large kernels.
DIRECT = [
    Build("sm_90a", kind, "channels_last", case, path="sm90", schedule=schedule)
    for kind, case, tile in (
        ("bf16", Case(n=32, c=728, o=728, h=38, w=38, mid_activation="relu"), (1, 4)),
        ("bf16", Case(n=32, c=728, o=728, h=38, w=38, mid_activation="relu"), (2, 4)),
        ("bf16", Case(n=32, c=256, o=256, h=836, w=40, stride=2), (2, 2)),
        ("fp16", Case(n=32, c=1152, o=192, h=7, w=7, kernel=(5, 5), padding=2, mid_activation="gelu"), (1, 4)),
        ("fp16", Case(n=2, c=72, o=40, h=33, w=31, kernel=(2, 4), stride=(2, 1), dilation=(1, 3)), (1, 2)),
        ("bf16", Case(n=32, c=512, o=512, h=1, w=420, kernel=(1, 31), padding=(0, 15), mid_activation="gelu"), (1, 8)),
        ("ieee", Case(n=32, c=128, o=128, h=56, w=56, kernel=(31, 31), padding=15), (2, 8)),
        ("ieee", Case(n=32, c=512, o=512, h=1, w=840, kernel=(1, 87), dilation=(1, 2), padding=(0, 86)), (1, 8)),
        ("tf32", Case(n=32, c=256, o=728, h=38, w=38, mid_activation="silu"), (2, 4)),
    )
    for problem in [problem_of(case, kind, "channels_last")]
    for schedule in [replace(behind(problem, "sm_90a")[0], thread_rows=tile[0], thread_columns=tile[1])]
]
#: Windows of 176 positions.
WIDE_BLOCK = Block(n=8, c=64, e=128, o=128, l=512, kernel=16, dilation=3, activation="relu6", residual=False)
SHORT_BLOCK = Block(c=40, e=72, l=96, kernel=4, dilation=3, activation="hardswish", expand_bias=False)
ODD_TAPS = replace(SHORT_BLOCK, kernel=5)
ODD_BLOCK = Block(c=37, e=53, l=101, kernel=6, activation="relu6", project_bias=False)
#: Of either of two kernels.
HALF = Schedule("sm90", 64, 64, 1, 4, 2, row_slots=4, weight_slots=2)
#: The two-kernel form on every architecture, in both layouts and all arithmetics of either path; the fused one.
TWO_KERNEL = [
    *(
        Build(arch, list(KINDS)[i % 4], LAYOUTS[i % 2], (LEAD_BLOCK, SHORT_BLOCK)[i % 2], form="two_kernel")
        for i, arch in enumerate(ARCHS)
    ),
    Build("sm_80", "fp16", "contiguous", ODD_BLOCK, alignment=2, form="two_kernel"),
    *(
        Build("sm_90a", kind, LAYOUTS[i % 2], LEAD_BLOCK, path="sm90", form="two_kernel")
        for i, kind in enumerate(("ieee", "tf32", "bf16", "fp16"))
    ),
    Build("sm_90a", "bf16", "channels_last", replace(LEAD_BLOCK, kernel=31), path="sm90", form="two_kernel"),
    # The depthwise stage is a kernel between them, on planes too.
    *(
        Build(
            "sm_90a",
            kind,
            "channels_last",
            replace(LEAD_BLOCK, kernel=33),
            path="sm90",
            form="two_kernel",
            schedule=BlockSchedule("two_kernel", "sm90", expand, replace(pointwise, **tile)),
        )
        for kind, tile in (
            ("fp16", {"thread_rows": 1, "thread_columns": 8}),
            ("fp16", {"plane_rows": 16, "plane_columns": 64}),
            ("ieee", {"thread_rows": 1, "thread_columns": 8}),
        )
        for problem in [problem_of(LEAD_BLOCK, kind, "channels_last")]
        for expand, pointwise in [(behind(problem.expand, "sm_90a")[0], behind(problem.project, "sm_90a")[0])]
    ),
    # Weights are packed for one of the two.
    *(
        Build("sm_90a", "bf16", "channels_last", ODD_TAPS, path="sm90", form="two_kernel", schedule=schedule)
        for schedule in (
            BlockSchedule("two_kernel", "sm90", replace(HALF, mma_q=16), HALF),
            BlockSchedule("two_kernel", "sm90", HALF, replace(HALF, mma_q=16)),
        )
    ),
]
FUSED = [
    Build("sm_90a", "fp16", "contiguous", LEAD_BLOCK, path="sm90", form="fused"),
    Build("sm_90a", "bf16", "channels_last", LEAD_BLOCK, path="sm90", form="fused"),
    Build("sm_90a", "fp16", "channels_last", SHORT_BLOCK, path="sm90", form="fused"),
    Build("sm_90a", "fp16", "contiguous", SHORT_BLOCK, path="sm90", form="fused"),
    *(
        Build("sm_90a", kind, layout, case, path="sm90", form="fused")
        for kind in ("ieee", "tf32")
        for layout in ("contiguous", "channels_last")
        for case in (LEAD_BLOCK, SHORT_BLOCK)
    ),
    Build("sm_90a", "tf32", "channels_last", WIDE_BLOCK, path="sm90", form="fused"),
    Build("sm_90a", "bf16", "contiguous", replace(LEAD_BLOCK, c=128, e=256, kernel=31), path="sm90", form="fused"),
]
#: Bytes that a thread of the fused form may spill. Two project warpgroups of 160 registers, for 128 sums at the lead
#: shape, leave 104 or 112 to the expand warpgroup, beside 72 sums of its own, and 88 or 80 to the depthwise one. Under
#: NVRTC 13.0 the lead shape in tf32, channels_last: 32 (13.5: 64), where results are stored, once a tile. 128 output
#: channels or fewer have them shared out otherwise, and spill none (13.5: 8 in tf32).
FUSED_SPILLS = 64
#: The same of a kernel whose depthwise stage is on tensor cores: where the sums of 256 output channels leave it no more
#: registers, a number of the item is kept in local memory, outside of the loops.
DIAGONAL_SPILLS = 8
#: The same where rows are turned: the producer's numbers (8 bytes under NVRTC 13.0, 20 under newer ones), and beside
#: the most sums that fit, an activation's constants.
TURNED_SPILLS = 40
#: The instruction of the pointwise GEMM, as nvdisasm writes it.
MMA = {
    "sm90": {
        "ieee": r"HGMMA\.64x\d+x16\.F32 ",
        "tf32": r"HGMMA\.64x\d+x8\.F32\.TF32 ",
        "fp16": r"HGMMA\.64x\d+x16\.F32 ",
        "bf16": r"HGMMA\.64x\d+x16\.F32\.BF16 ",
    },
    "portable": {
        "ieee": r"HMMA\.16816\.F32 ",
        "tf32": r"HMMA\.1688\.F32\.TF32 ",
        "fp16": r"HMMA\.16816\.F32 ",
        "bf16": r"HMMA\.16816\.F32\.BF16 ",
    },
}
#: Those of a depthwise stage on tensor cores: for two taps, and for the odd one.
DEPTHWISE_MMA = {
    "fp16": [r"HMMA\.16816\.F32 ", r"HMMA\.1688\.F32 "],
    "bf16": [r"HMMA\.16816\.F32\.BF16 ", r"HMMA\.1688\.F32\.BF16 "],
}


@cache
def nvdisasm() -> Path:
    """From the package nvidia-cuda-nvdisasm, which lies where CUDA 12 or CUDA 13 packages do."""
    roots = find_spec("nvidia").submodule_search_locations
    found = [file for root in roots for file in sorted(Path(root).glob("*/bin/nvdisasm"))]
    assert found, f"nvdisasm is missing in {list(roots)}; install cutlass_sep[test]"
    return found[0]


def sass(cubin: Cubin, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin.code)
    return subprocess.run([nvdisasm(), "-c", file], capture_output=True, text=True, check=True).stdout


def functions(text: str) -> dict[str, str]:
    """nvdisasm's text by kernel."""
    _, *parts = re.split(r"^\.text\.(\w+):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("build", [*SM90, *TURNED, *PLANES, *DIRECT, *PORTABLE, *TWO_KERNEL, *FUSED], ids=str)
def test_code(build: Build, tmp_path: Path):
    """Tensor instructions of the right kind and no other, no traps, no spilled registers, no serialised wgmma."""
    cubin = build.cubin()
    assert set(cubin.resources) == build.mains | ({"pack_weights"} if build.packs else set())
    text = sass(cubin, tmp_path)
    codes = functions(text)
    assert set(codes) == set(cubin.resources)
    for main in build.mains:
        wanted = build.instructions(main)
        used = [line for line in codes[main].splitlines() if re.search(r"\bHG?MMA\b", line)]
        assert all(any(re.search(instruction, line) for line in used) for instruction in wanted)
        assert not [line for line in used if not any(re.search(instruction, line) for instruction in wanted)]
    assert not re.search(r"\bHG?MMA\b", codes.get("pack_weights", ""))
    # What an atom that the target lacks turns into.
    assert "BPT.TRAP" not in text and "vprintf" not in text
    spills = {name: used.spill_bytes for name, used in cubin.resources.items()}
    assert spills.pop("block1d", 0) <= FUSED_SPILLS
    for main in build.depthwise_by_mma - {"block1d"}:
        turned = main in build.geometries and build.geometries[main].turned
        assert spills.pop(main) <= (TURNED_SPILLS if turned else DIAGONAL_SPILLS)
    assert not any(spills.values()), spills
    # setmaxnreg: the warps of a block ask for as many registers as the schedule says, and the launch gives them.
    sharing = build.geometries.keys() if build.path == "sm90" else set()
    for main in sharing | ({"block1d"} & codes.keys()):
        taken = [int(count, 16) for count in re.findall(r"USETMAXREG\.TRY_ALLOC\.CTAPOOL UP\d+, (0x\w+)", codes[main])]
        kept = [int(count, 16) for count in re.findall(r"USETMAXREG\.DEALLOC\.CTAPOOL (0x\w+)", codes[main])]
        launched = cubin.resources[main].registers
        if main == "block1d":  # two project warpgroups run the same code
            assert len(taken + kept) == 3 and any(sum(taken + kept) + own == 4 * launched for own in taken + kept)
            # To give back down to more than it has crashes a kernel.
            assert all(count > launched for count in taken) and all(count <= launched for count in kept)
            continue
        geometry = build.geometries[main]
        assert (taken, kept) == ([geometry.consumer_registers], [geometry.producer_registers])
        warpgroups = geometry.schedule.warpgroups
        assert kept[0] + warpgroups * taken[0] <= (warpgroups + 1) * launched
    # ptxas says so when it makes the warpgroup's MMAs wait for each other (C7510 and its kin).
    assert not re.search(r"\(C75\d\d\)|Potential Performance Loss", cubin.log), cubin.log
    if build.path == "portable" and build.form is None:
        # cp.async of 16 bytes: the weights always; x, with zeros at its edges, where 16 bytes of channels are aligned.
        vectors = build.layout == "channels_last" and build.problem.alignment == 16 and not build.chosen.gather
        assert re.search(r"\bLDGSTS\.E\.BYPASS\.\S*128 ", text)
        # A predicate at the end says whether to write zeros; compilers before CUDA 13.5 add ".ZFILL".
        assert bool(re.search(r"\bLDGSTS\b[^;]*, !?P\d", text)) == vectors
        # y: 16 bytes of output channels a lane.
        if vectors and build.kind in ("fp16", "bf16") and build.chosen.tile_oc % 32 == 0:
            assert "STG.E.128" in text


def test_forms_of_the_depthwise_kernel_on_planes():
    """The sample above holds those that differ in code."""
    made = [PlaneGeometry(build.problem, build.chosen) for build in PLANES]
    assert all(build.chosen.plane_rows for build in PLANES)
    assert {(g.one_row, g.tile_images > 1, g.channels) for g in made} >= {
        (False, False, 16),
        (False, True, 8),
        (True, False, 16),
    }


def test_forms_of_the_depthwise_kernel_by_fma():
    """The sample above holds those that differ in code."""
    made = [DirectGeometry(build.problem, build.chosen) for build in DIRECT]
    assert {(g.vector, g.row_steps > 1, g.slabs > 1, g.threads) for g in made} >= {
        (8, False, True, 192),
        (8, True, True, 128),
        (4, True, True, 128),
    }
    assert {build.chosen.shared_x for build in DIRECT} == {True, False}


def test_forms_of_the_sm90_kernel():
    """The sample above holds the depthwise stage by FMA and on tensor cores; rows, windows and split channels there."""
    chosen = [(build.problem, build.chosen) for build in SM90]
    forms = {(s.mma_q, s.split_channels, Geometry(p, s).march) for p, s in chosen if s.mma_q and not s.apart}
    assert forms >= {(8, False, True), (8, False, False), (8, True, False), (16, False, False)}
    assert any(not s.mma_q for _, s in chosen)


def test_forms_of_the_portable_kernel():
    """The sample above holds both: with a window in shared memory, and gathering from global memory."""
    forms = {str(build.case): build.chosen.gather for build in PORTABLE}
    assert forms[str(FAR)] and not forms[str(LARGE)] and not forms[str(LONG)]


@pytest.mark.parametrize("kind", ["ieee", "tf32"])
def test_the_packing_launch_of_an_fp32_block_has_the_blocks_that_the_template_counts(kind):
    """What block_schedule.py says of the grid, and no assertion of the translation unit compares, holds there."""
    build = Build("sm_90a", kind, "contiguous", SHORT_BLOCK, path="sm90", form="fused")
    geometry = FusedGeometry(build.problem, build.chosen.tile)
    said = {"kPositions": block_schedule.PACK_POSITIONS, "kWeightBlocks": geometry.weight_blocks}
    asserted = "".join(
        f"static_assert(cutlass_sep::HalfOperands<Config>::{name} == {value});\n" for name, value in said.items()
    )
    text = source.render(build.problem, build.chosen, build.arch) + asserted
    assert compiler.build(text, build.arch, name="packing-test").resources["pack_weights"].registers > 0
    assert geometry.pack_blocks - geometry.weight_blocks == build.problem.n * math.ceil(
        build.problem.l / said["kPositions"]
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_blocks_of_the_packing_launch_fit_a_multiprocessor(layout):
    """At the lead shape, by registers: their loads wait for memory."""
    build = Build("sm_90a", "ieee", layout, LEAD_BLOCK, path="sm90", form="fused")
    assert build.cubin().resources["pack_weights"].registers <= 64
