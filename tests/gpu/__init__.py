"""Tests that run kernels on a GPU: `python -m pytest tests/gpu`.

On a machine without one, `--rehearse` compiles every kernel of the suite into the disk cache and runs the tests against
a stand-in that computes on the CPU; a run on a GPU with that cache then builds nothing (`--expect-no-builds` fails if
it does). Where a GPU's machine has more cores, let it compile instead:

    python -m pytest tests/gpu --rehearse --kernel-list kernels.json      # a minute or two; compiles nothing
    python -m pytest tests/gpu --build-ahead --kernel-list kernels.json   # on the GPU; every core compiles

With pytest-xdist, several processes share the GPU, which takes a fifth of the time, once the kernels are there:

    python -m tests.gpu.builds kernels.json
    python -m pytest tests/gpu -n 10

`-p tests.gpu_results --gpu-results tests/gpu/results.json` writes what ran and how it came out.
"""
