"""What the device can do at most, measured: copy bandwidth and matrix-product rates; and the floor that follows."""

from __future__ import annotations

import torch

from ..problem import Problem
from .peers import Unfair, flags
from .timing import Candidate, interleaved

_COPY_BYTES = 4 << 30
_MATMUL = 8192
_SAMPLES = 15
#: A time below this share of the floor says that the work was not done, or that the caches held the data.
_IMPOSSIBLE = 0.97


def measure(device: torch.device) -> dict[str, float]:
    """{"copy_TBps" (bytes read + written), "bf16_TFLOPS", "fp16_TFLOPS", "tf32_TFLOPS", "fp32_TFLOPS"}."""
    size = min(_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = Candidate(lambda i, source=source, target=target: target.copy_(source))
    times = interleaved({"copy": copy}, sets=2, samples=_SAMPLES, device=device)["copy"]
    ceilings = {"copy_TBps": 2 * size / times.median_ms / 1e9}
    del source, target, copy
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, None),
        ("fp16", torch.float16, None),
        ("tf32", torch.float32, "tf32"),
        ("fp32", torch.float32, "ieee"),
    ):
        a, b = (torch.randn(_MATMUL, _MATMUL, dtype=dtype, device=device) for _ in range(2))
        with flags(precision):
            product = Candidate(lambda i, a=a, b=b: a @ b)
            times = interleaved({name: product}, sets=2, samples=_SAMPLES, device=device)[name]
        ceilings[f"{name}_TFLOPS"] = 2 * _MATMUL**3 / times.median_ms / 1e9
    return ceilings


def floor(problem: Problem, ceilings: dict[str, float]) -> tuple[float, str]:
    """(milliseconds, "bytes" | "tensor"): the least time at the copy and matrix-product rates measured."""
    bytes_ms = problem.bytes / ceilings["copy_TBps"] / 1e9
    unit, passes = tensor_rate(problem)
    tensor_ms = passes * matrix_flops(problem) / ceilings[f"{unit}_TFLOPS"] / 1e9
    return (bytes_ms, "bytes") if bytes_ms >= tensor_ms else (tensor_ms, "tensor")


def tensor_rate(problem: Problem) -> tuple[str, int]:
    """(name of the rate in the ceilings, passes) of the floor's matrix products.

    One pass; for "ieee" three passes, of TF32 halves, in the block of fp16 halves.
    """
    if problem.fp32_precision == "ieee":
        return "fp16" if problem.op == "sepblock1d" else "tf32", 3
    return {"float16": "fp16", "bfloat16": "bf16"}.get(problem.dtype, "tf32"), 1


def matrix_flops(problem: Problem) -> int:
    """Multiplies and adds of the matrix products, one pass of them; the depthwise convolution is not among them."""
    p = problem
    return 2 * p.n * p.l * p.e * (p.c + p.o) if p.op == "sepblock1d" else 2 * p.n * p.p * p.q * p.c * p.o


def check_possible(what: str, problem: Problem, median_ms: float, ceilings: dict[str, float]) -> None:
    """Raise Unfair for a time in which the bytes of the problem cannot have moved."""
    bytes_ms = problem.bytes / ceilings["copy_TBps"] / 1e9
    if median_ms < _IMPOSSIBLE * bytes_ms:
        raise Unfair(
            f"{what}: {median_ms:.4g} ms would be {problem.bytes / median_ms / 1e9:.3g} TB/s, above the "
            f"{ceilings['copy_TBps']:.3g} TB/s that a copy reaches here; the work was not done or its data was cached"
        )
