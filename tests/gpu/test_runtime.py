"""How a call behaves on the GPU: streams, CUDA graphs, memory, synchronisation, large grids, compiled graphs."""

from __future__ import annotations

import os
import time

import pytest
import torch

import cutlass_sep
from cutlass_sep import dispatch, kernel, planner
from cutlass_sep.bench import inputs
from cutlass_sep.bench.inputs import options
from cutlass_sep.block_schedule import FORMS
from cutlass_sep.problem import Problem
from cutlass_sep.schedule import PATHS

from . import accuracy
from .calls import Tensors, draw, make_block, make_problem

pytestmark = pytest.mark.usefixtures("fused")

#: What runs in this path and form.
PROBLEMS = {
    "sm90-contiguous": (make_problem("fp32", c=16, o=32), "sm90", None),
    "sm90-channels_last": (make_problem("bf16", "channels_last", c=16, o=32), "sm90", None),
    "portable": (make_problem("fp32", c=7, o=5, h=13, w=15, mid_activation="relu"), "portable", None),
    # Weights are not packed: one launch, or two of a block.
    "sm90-as-they-are": (make_problem("bf16", "channels_last", c=136, o=72), "sm90", None),
    "sm90-as-they-are-turned": (make_problem("bf16", c=64, o=128, w=256), "sm90", None),
    "block-as-they-are": (make_block("bf16", "channels_last", c=64, l=264, e=128, kernel=9), "sm90", "two_kernel"),
    **{
        f"block-{form}-{path}": (make_block("bf16", c=64, l=264, e=128, kernel=9), path, form)
        for form in FORMS
        for path in PATHS
    },
}
#: Cycles of a GPU's clock, about half a second.
LONG = 800_000_000
#: More than a launch takes on any host, less than the GPU is kept busy, in seconds.
AT_ONCE = 0.25


@pytest.fixture(params=PROBLEMS)
def problem(request: pytest.FixtureRequest, machine, fused) -> Problem:
    """A problem whose calls run on the path and in the form that its id says."""
    problem, path, form = PROBLEMS[request.param]
    machine.require(problem, path, form)
    fused(path, form)
    return problem


def call(problem: Problem, tensors: Tensors) -> torch.Tensor:
    return inputs.function(problem)(*tensors, **options(problem))


def test_the_problems_themselves(machine, generator, problem: Problem):
    """In a rehearsal this builds the kernels of all tests below."""
    tensors = draw(problem, generator)
    accuracy.judge(problem, tensors, call(problem, tensors))


def test_the_problems_whose_weights_are_not_packed():
    for which, (problem, path, form) in PROBLEMS.items():
        if "as-they-are" in which:
            stages = kernel.make(problem, planner.candidates(problem, "sm_90a", path, form)[0], "sm_90a").stages
            assert not any(stage.packs for stage in stages), which


def test_runs_on_the_current_stream(gpu, generator, problem: Problem):
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


def test_never_waits(gpu, generator, problem: Problem):
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


def test_allocates_the_output_and_at_most_one_workspace(gpu, generator, problem: Problem):
    tensors = draw(problem, generator)
    dispatch.clear()
    call(problem, tensors)
    (launcher,) = dispatch._launchers.values()
    most = 1 + (launcher.kernel._workspace_elements > 0)
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_stats(gpu), torch.cuda.mem_get_info(gpu)[0]
    y = call(problem, tensors)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats(gpu)
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] <= most
    # What stays is y, in the allocator's units of 512 bytes.
    stayed = after["allocated_bytes.all.current"] - before["allocated_bytes.all.current"]
    assert stayed == -(-y.numel() * y.element_size() // 512) * 512
    for _ in range(50):
        call(problem, tensors)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_stats(gpu)["reserved_bytes.all.current"] - before["reserved_bytes.all.current"]
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else other processes take memory of this GPU too
        assert free - torch.cuda.mem_get_info(gpu)[0] <= reserved, "memory was taken beside PyTorch's allocator"


def test_a_graph_replays_with_new_data_and_new_weights(gpu, generator, problem: Problem):
    tensors = draw(problem, generator)
    cutlass_sep.warmup(inputs.function(problem), *tensors, **options(problem))
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


def test_a_cold_kernel_refuses_to_be_captured(gpu, generator, problem: Problem):
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
    "sm90": (make_problem("fp16", "channels_last", n=70_000, c=8, h=3, w=3, o=8), "sm90", None),
    "portable": (make_problem("fp32", n=70_000, c=3, h=3, w=3, o=5), "portable", None),
    **{
        f"block-{form}-{path}": (make_block("bf16", n=70_000, c=16, l=8, e=16), path, form)
        for form in FORMS
        for path in PATHS
    },
}


@pytest.mark.parametrize("which", MANY_IMAGES)
def test_more_images_than_a_grid_is_high(machine, generator, which: str):
    problem, path, form = MANY_IMAGES[which]
    machine.require(problem, path, form)
    tensors = draw(problem, generator)
    asked = {"path": path, "arch": machine.arch} | ({} if form is None else {"form": form})
    y = inputs.operation(problem)(*tensors, **options(problem), **asked).run(*tensors)
    accuracy.judge(problem, tensors, y)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("which", PROBLEMS)
def test_tensors_written_right_before_a_call(gpu, machine, generator, which: str, captured: bool):
    """Nothing of an earlier call is left, in no cache either, where kernels of a call start before others end."""
    problem, path, form = PROBLEMS[which]
    machine.require(problem, path, form)
    sets = [draw(problem, generator) for _ in range(12)]
    tensors = [None if t is None else t.clone() for t in sets[0]]
    asked = {"path": path} | ({} if form is None else {"form": form})
    operator = inputs.operation(problem)(*tensors, **options(problem), **asked)

    def step(fresh) -> torch.Tensor:
        for own, new in zip(tensors, fresh, strict=True):
            if own is not None:
                own.copy_(new)
        return operator.run(*tensors)

    if captured:
        fresh = [None if t is None else t.clone() for t in sets[0]]
        step(fresh)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step(fresh)

        def replay(new) -> torch.Tensor:
            for own, value in zip(fresh, new, strict=True):
                if own is not None:
                    own.copy_(value)
            graph.replay()
            return y.clone()

        found = [replay(new) for new in sets]
    else:
        found = [step(new) for new in sets]
    for new, y in zip(sets, found, strict=True):
        accuracy.judge(problem, new, y)


@pytest.mark.parametrize("which", ["2-D", "block"])
def test_compiled_by_inductor_forward_and_backward_with_other_batches(gpu, generator, which: str):
    from torch.utils._triton import has_triton

    if not has_triton():
        pytest.skip("inductor needs triton, which is not installed here")
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    if which == "2-D":
        module = cutlass_sep.DepthwiseSeparableConv2d(16, 32, 3, padding=1, bias=True, device=gpu)
        make, terms = (lambda n: make_problem("fp32", n=n, c=16, o=32)), 32 * 9
    else:
        module = cutlass_sep.SeparableConvBlock1d(16, 32, 5, device=gpu)
        make, terms = (lambda n: make_block("fp32", n=n)), 16 + 5 + 32
    compiled = torch.compile(lambda x: module(x).square(), fullgraph=True, backend=count)
    for n in (2, 3, 5, 8):
        x = draw(make(n), generator)[0].clone().requires_grad_()
        twin = x.detach().clone().requires_grad_()
        y, want = compiled(x), module(twin).square()
        torch.testing.assert_close(y, want, rtol=4 * accuracy.UNIT["float32"], atol=0)
        y.sum().backward()
        want.sum().backward()
        error = (x.grad - twin.grad).norm() / twin.grad.norm()
        assert error <= 2 * terms * accuracy.UNIT["float32"]
    assert count.frame_count <= 2


@pytest.mark.parametrize("which", [name for name, (_, path, _) in PROBLEMS.items() if path == "sm90"])
def test_descriptors_do_not_pile_up(gpu, machine, generator, monkeypatch, which: str):
    """More addresses than descriptors and frames are kept; each call is right whether its own are new, kept or gone."""
    problem, path, form = PROBLEMS[which]
    machine.require(problem, path, form)
    monkeypatch.setattr(kernel, "_KEPT", 64)
    sets = [draw(problem, generator) for _ in range(100)]
    asked = {"path": path} | ({} if form is None else {"form": form})
    operator = inputs.operation(problem)(*sets[0], **options(problem), **asked)
    for tensors in (*sets, *sets[:5], *sets[-5:]):
        accuracy.judge(problem, tensors, operator.run(*tensors))
    assert all(len(stage._encoded) <= kernel._KEPT for stage in operator.kernel.stages)
    assert all(len(launcher.frames) == kernel._KEPT for launcher in operator.kernel._launchers.values())
