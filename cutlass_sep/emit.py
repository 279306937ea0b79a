"""Stand-alone projects: an operator as source, cubin, C++ host code and a check.

They need PyTorch and a C++ compiler, and neither this package nor a CUDA toolkit.
"""

from __future__ import annotations

import keyword
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .op import DepthwiseSeparableConv2d

#: File -> its template in templates/standalone/.
_FILES = {
    "{name}.cu": "kernel.cu.j2",
    "{name}.hpp": "launch.hpp.j2",
    "{name}.cpp": "binding.cpp.j2",
    "check.py": "check.py.j2",
}
#: Precision of the arithmetic -> relative errors of a product on the tensor cores and of rounding y, as in check.py.
#: ieee: two operands of 22 bits, and the product of their low parts left out. tf32: two rounded operands. 16 bit: one,
#: the depthwise output.
_ERRORS = {
    "ieee": ("3 * 2.0**-22", "UNIT"),
    "tf32": ("2 * 2.0**-11", "UNIT"),
    "float16": ("2.0**-11", "2.0**-11"),
    "bfloat16": ("2.0**-8", "2.0**-8"),
}


def pytorch(op: DepthwiseSeparableConv2d, name: str, directory: str | os.PathLike[str]) -> None:
    """Write `name`.cu, .cubin, .hpp, .cpp and check.py to `directory`; compiles first if need be.

    The directory is made if it is not there; files of these names are overwritten, nothing else is touched. `python
    check.py` there builds the PyTorch operator torch.ops.`name`.run and compares it with float64. The operator takes x
    of any N, H, W; of an aligned op (16 bytes) only maps whose rows are multiples of 16 bytes.

    Raises ValueError unless `name` is a Python identifier of ASCII characters, Unsupported for an op on path "torch",
    and as `op.compile`.
    """
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
        raise ValueError(f"name={name!r} must be a Python identifier of ASCII characters")
    texts = {file.format(name=name): text for file, text in _render(op, name).items()}
    cubin = op.compile().cubin

    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.cubin").write_bytes(cubin)
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")


def _render(op: DepthwiseSeparableConv2d, name: str) -> dict[str, str]:
    """The text of every file but the cubin."""
    import jinja2

    from . import arch as archs
    from . import kernel, source
    from .problem import MAX_ALIGNMENT

    problem, schedule, geometry = op.problem, op.schedule, op.kernel.geometry
    vectors = schedule.path == "sm90" or problem.alignment == MAX_ALIGNMENT
    product_error, output_error = _ERRORS[problem.fp32_precision or problem.dtype]
    templates = source.templates() / "standalone"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    values = {
        "name": name,
        "title": source.title(problem, schedule, op.arch),
        "notices": (templates / "notices.txt").read_text(encoding="utf-8"),
        "source": op.source,
        "arch": op.arch,
        "capability": archs.ARCHS[op.arch],
        "exact": op.arch.endswith("a"),
        "p": problem,
        "s": schedule,
        "g": geometry,
        "alignment": MAX_ALIGNMENT if vectors else problem.element_size,
        "pack_threads": kernel.PACK_THREADS,
        "product_error": product_error,
        "output_error": output_error,
    }
    return {file: environment.get_template(template).render(values) for file, template in _FILES.items()}
