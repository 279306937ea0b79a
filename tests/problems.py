"""Problems of the 2-D operator for tests that need no tensors."""

from __future__ import annotations

import torch
from separable import Case

from cutlass_sep.problem import SeparableConv2dProblem

#: The four arithmetics of the kernels, by short names, and the element type of each.
KINDS = {"ieee": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("contiguous", "channels_last")
LEAD = Case(n=16, c=64, o=128, h=512, w=512, dw_bias=False, pw_bias=False)


def problem_of(
    case: Case = LEAD, kind: str = "ieee", layout: str = "contiguous", alignment: int = 16
) -> SeparableConv2dProblem:
    """`kind`: a key of KINDS. `alignment`: of the tensors' addresses, bytes; the problem's may be less."""
    precision = {"fp32_precision": kind} if kind in ("ieee", "tf32") else {}
    tensors = case.tensors("meta", KINDS[kind], layout)
    return SeparableConv2dProblem.from_tensors(*tensors, **case.options, **precision).with_alignment(alignment)
