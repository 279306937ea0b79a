"""Tests that run kernels on a GPU: `python -m pytest tests/gpu`.

On a machine without one, `python -m pytest tests/gpu --rehearse` compiles every kernel of the suite into the disk
cache and runs the tests against a stand-in that computes on the CPU, so that a run on a GPU with the same cache builds
nothing (`--expect-no-builds` fails if it does).
"""
