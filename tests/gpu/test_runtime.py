"""How a call behaves on the GPU: streams, CUDA graphs, memory, synchronisation, large grids, compiled graphs."""

from __future__ import annotations

import time

import pytest
import torch

import cutlass_sep
from cutlass_sep import dispatch, kernel, op
from cutlass_sep.bench.inputs import options
from cutlass_sep.functional import depthwise_separable_conv2d
from cutlass_sep.problem import SeparableConv2dProblem
from cutlass_sep.schedule import supports

from . import accuracy
from .calls import Tensors, draw, make_problem

pytestmark = pytest.mark.usefixtures("fused")

PROBLEMS = {
    "sm90-contiguous": make_problem("fp32", c=16, o=32),
    "sm90-channels_last": make_problem("bf16", "channels_last", c=16, o=32),
    "portable": make_problem("fp32", c=7, o=5, h=13, w=15, mid_activation="relu"),
}
#: Cycles of a GPU's clock, about half a second.
LONG = 800_000_000
#: More than a launch takes on any host, less than the GPU is kept busy, in seconds.
AT_ONCE = 0.25


@pytest.fixture(params=PROBLEMS)
def problem(request: pytest.FixtureRequest, machine, fused) -> SeparableConv2dProblem:
    """A problem whose calls run on the path that its id says."""
    path = request.param.split("-")[0]
    if not (support := supports(PROBLEMS[request.param], path, machine.arch)):
        pytest.skip(f"path {path}: {support.reason}")
    fused(path)
    return PROBLEMS[request.param]


def call(problem: SeparableConv2dProblem, tensors: Tensors) -> torch.Tensor:
    return depthwise_separable_conv2d(*tensors, **options(problem))


def test_the_problems_themselves(machine, generator, problem: SeparableConv2dProblem):
    """In a rehearsal this builds the kernels of all tests below."""
    tensors = draw(problem, generator)
    accuracy.judge(problem, tensors, call(problem, tensors))


def test_runs_on_the_current_stream(gpu, generator, problem: SeparableConv2dProblem):
    tensors, fresh = draw(problem, generator), draw(problem, generator)
    call(problem, tensors)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG // 10)
        for old, new in zip(tensors, fresh, strict=True):
            old.copy_(new)
        y = call(problem, tensors)
        assert not stream.query(), "the call waited for the stream"
    stream.synchronize()
    accuracy.judge(problem, fresh, y)


def test_never_waits(gpu, generator, problem: SeparableConv2dProblem):
    tensors = draw(problem, generator)
    call(problem, tensors)
    other = draw(problem, generator)  # a new address: new TMA descriptors
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    begin = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ys = [call(problem, t) for t in (tensors, other)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seconds = time.perf_counter() - begin
    busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert busy, "the call waited for the GPU"
    assert seconds < AT_ONCE
    for t, y in zip((tensors, other), ys, strict=True):
        accuracy.judge(problem, t, y)


def test_allocates_the_output_and_one_workspace(gpu, generator, problem: SeparableConv2dProblem):
    tensors = draw(problem, generator)
    call(problem, tensors)
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_stats(gpu), torch.cuda.mem_get_info(gpu)[0]
    y = call(problem, tensors)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats(gpu)
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] <= 2
    # What stays is y, in the allocator's units of 512 bytes.
    stayed = after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"]
    assert stayed == -(-y.numel() * y.element_size() // 512) * 512
    for _ in range(50):
        call(problem, tensors)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_stats(gpu)["reserved_bytes.all.current"] - before["reserved_bytes.all.current"]
    assert free - torch.cuda.mem_get_info(gpu)[0] <= reserved, "memory was taken beside PyTorch's allocator"


def test_a_graph_replays_with_new_data_and_new_weights(gpu, generator, problem: SeparableConv2dProblem):
    tensors = draw(problem, generator)
    cutlass_sep.warmup(depthwise_separable_conv2d, *tensors, **options(problem))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(problem, tensors)
    for _ in range(3):
        fresh = draw(problem, generator)
        for old, new in zip(tensors, fresh, strict=True):
            old.copy_(new)
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        accuracy.judge(problem, fresh, y)


def test_a_cold_kernel_refuses_to_be_captured(gpu, generator, problem: SeparableConv2dProblem):
    tensors = draw(problem, generator)
    kernel.clear_memory()
    dispatch.clear()
    with pytest.raises(RuntimeError, match=r"cutlass_sep\.warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(problem, tensors)
    torch.cuda.synchronize()
    accuracy.judge(problem, tensors, call(problem, tensors))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(problem, tensors)
    graph.replay()
    torch.cuda.synchronize()
    accuracy.judge(problem, tensors, y)


MANY_IMAGES = {
    "sm90": make_problem("fp16", "channels_last", n=70_000, c=8, h=3, w=3, o=8),
    "portable": make_problem("fp32", n=70_000, c=3, h=3, w=3, o=5),
}


@pytest.mark.parametrize("path", MANY_IMAGES)
def test_more_images_than_a_grid_is_high(machine, generator, path: str):
    problem = MANY_IMAGES[path]
    if not (support := supports(problem, path, machine.arch)):
        pytest.skip(f"path {path}: {support.reason}")
    tensors = draw(problem, generator)
    y = op.DepthwiseSeparableConv2d(*tensors, **options(problem), path=path, arch=machine.arch).run(*tensors)
    accuracy.judge(problem, tensors, y)


def test_compiled_by_inductor_forward_and_backward_with_other_batches(gpu, generator):
    from torch.utils._triton import has_triton

    if not has_triton():
        pytest.skip("inductor needs triton, which is not installed here")
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    module = cutlass_sep.DepthwiseSeparableConv2d(16, 32, 3, padding=1, bias=True, device=gpu)
    compiled = torch.compile(lambda x: module(x).square(), fullgraph=True, backend=count)
    for n in (2, 3, 5, 8):
        x = draw(make_problem("fp32", n=n, c=16, o=32), generator)[0].clone().requires_grad_()
        twin = x.detach().clone().requires_grad_()
        y, want = compiled(x), module(twin).square()
        torch.testing.assert_close(y, want, rtol=4 * accuracy.UNIT["float32"], atol=0)
        y.sum().backward()
        want.sum().backward()
        error = (x.grad - twin.grad).norm() / twin.grad.norm()
        assert error <= 2 * 32 * 9 * accuracy.UNIT["float32"]
    assert count.frame_count <= 2


def test_descriptors_do_not_pile_up(gpu, generator):
    """More addresses than descriptors are kept; each call is right whether its descriptor is new, kept or gone."""
    problem = PROBLEMS["sm90-channels_last"]
    if not (support := supports(problem, "sm90", kernel.archs.of_device(gpu.index))):
        pytest.skip(support.reason)
    sets = [draw(problem, generator) for _ in range(100)]
    operator = op.DepthwiseSeparableConv2d(*sets[0], **options(problem), path="sm90")
    for tensors in (*sets, *sets[:5], *sets[-5:]):
        accuracy.judge(problem, tensors, operator.run(*tensors))
    assert len(operator.kernel._maps) <= kernel._TENSOR_MAPS_KEPT + 2
