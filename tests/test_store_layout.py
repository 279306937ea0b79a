"""Contiguous tiles by FMA on path sm90 on their way to y, emulated lane by lane: through staging buffers and TMA boxes.

By hand from Sm90Epilogue of templates/separable2d_sm90.cuh: whoever changes an offset there changes it here.
tests/test_diagonal_layout.py does the same for tiles whose depthwise outputs the tensor cores make.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from problems import problem_of
from separable import Case

from cutlass_sep import compiler, source
from cutlass_sep.kernel import SeparableStage
from cutlass_sep.schedule import Geometry, Schedule, check

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def geometry(kind: str, blocks: int, warps_q: int, tile_oc: int = 32, w: int = 72, **fields) -> Geometry:
    """Of a layer whose tiles are ragged in all dimensions."""
    problem = problem_of(Case(n=1, c=64, o=tile_oc - 8, h=7, w=w), kind, "contiguous")
    schedule = Schedule("sm90", tile_oc, 64, blocks, warps_q, 2, 2 + 4 // warps_q, 1, **fields)
    supported = check(problem, schedule, "sm_90a")
    assert supported, supported.reason
    return Geometry(problem, schedule)


def staged(g: Geometry, o: np.ndarray, p: int, q: np.ndarray) -> np.ndarray:
    """tile_offset: a byte of a group's buffer."""
    size, width = g.problem.element_size, g.store_bytes
    store_q = width // size
    box, byte = p * (g.tile_q // store_q) + q // store_q, q % store_q * size
    unit = byte >> 4 ^ o * width >> 7 & width // 16 - 1
    return box * g.group_oc * width + o * width + unit * 16 + (byte & 15)


def vectors(g: Geometry) -> list[tuple[int, np.ndarray, np.ndarray, int]]:
    """stage_rows: of each of a warp's stores the tile's row, the lanes' output channels and first columns, columns."""
    s, found = g.schedule, []
    for warp, k in product(range(4), range(g.group_oc // 8)):
        p, q = warp // s.warps_q, warp % s.warps_q * g.warp_q
        if g.problem.element_size == 4:
            found += [(p, 8 * k + 2 * T + i, q + g.lane_q * G, g.lane_q) for i in range(2)]
        else:  # transposed 8 x 8 matrices: the pixels of two lanes
            found.append((p, 8 * k + G, q + 2 * g.lane_q * T, 2 * g.lane_q))
    return found


@pytest.mark.parametrize(("kind", "blocks", "warps_q"), [*product(("ieee", "bf16"), (1, 2), (1, 2, 4))])
def test_boxes_bring_every_pixel_to_its_place(kind: str, blocks: int, warps_q: int):
    g = geometry(kind, blocks, warps_q)
    p, s, size = g.problem, g.schedule, g.problem.element_size
    y_map = SeparableStage("separable2d", g).maps[1]
    box_q, box_p, box_oc, _ = y_map.box
    assert (box_q * size, box_p, box_oc) == (g.store_bytes, 1, g.group_oc) and y_map.swizzle_bytes == g.store_bytes
    tile = g.group_oc, g.tile_p, g.tile_q
    group_bytes = np.prod(tile) * size
    assert g.staging_bytes == group_bytes * s.staging_groups * s.warpgroups and group_bytes % 1024 == 0
    y = np.full((p.o, p.p, p.q), -1)
    for first, top, left in product(*(range(0, n, t) for n, t in zip(y.shape, tile, strict=True))):

        def number(o, row, q, first=first, top=top, left=left):
            """Of an element of the padded y."""
            return ((first + o) * 1000 + top + row) * 1000 + left + q

        buffer = np.full(group_bytes // size, -1)
        for row, o, q, columns in vectors(g):
            for column in range(columns):
                at = staged(g, o, row, q) // size + column  # a lane's vector lies within one unit
                assert np.all(buffer[at] == -1)
                buffer[at] = number(o, row, q + column)
        # TMA: 16-byte units swizzled by the address, here within the buffer.
        stores_q = g.tile_q // box_q
        o, q = np.mgrid[:box_oc, :box_q]
        for box in range(g.tile_p * stores_q):
            byte = box * box_oc * g.store_bytes + o * g.store_bytes + q * size
            values = buffer[(byte ^ (byte >> 7 & g.store_bytes // 16 - 1) << 4) // size]
            top_, left_ = top + box // stores_q, left + box % stores_q * box_q
            own = y[first : first + box_oc, top_ : top_ + 1, left_ : left_ + box_q]
            own[:] = values[:, None][: own.shape[0], : own.shape[1], : own.shape[2]]
    o, row, q = np.mgrid[: p.o, : p.p, : p.q]
    np.testing.assert_array_equal(y, (o * 1000 + row) * 1000 + q)


@pytest.mark.parametrize(("blocks", "warps_q"), [(2, 1), (2, 2), (2, 4), (1, 2), (1, 4)])
def test_fp32_vectors_meet_no_bank_conflict(blocks: int, warps_q: int):
    """Lanes that write together, as many as 128 bytes take, write to as many banks."""
    g = geometry("ieee", blocks, warps_q)
    assert g.store_bytes == 128
    for row, o, q, columns in vectors(g):
        banks = staged(g, o, row, q)[:, None] // 4 % 32 + np.arange(columns)
        for together in banks.reshape(-1, 32):
            assert len(set(together)) == 32


def test_the_template_has_the_same_layout(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUTLASS_SEP_CACHE_DIR", str(tmp_path))
    g = geometry("ieee", 2, 4, tile_oc=128, w=128, staging_groups=2)
    layout = "cutlass_sep::Sm90Layout<Separable2dConfig>"
    equal = {
        "kStoreBytes": g.store_bytes, "kGroupOc": g.group_oc, "kStoresQ": 4, "kStoreBoxBytes": 2048,
        "kStagingBytes": g.staging_bytes,
    }  # fmt: skip
    lines = [f'static_assert({layout}::{left} == {right}, "{left}");\n' for left, right in equal.items()]
    text = source.render_anew(g.problem, g.schedule, "sm_90a")
    compiler.build(text + "".join(lines), "sm_90a", name="layout-test")
