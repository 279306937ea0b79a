"""Which target serves which device."""

from __future__ import annotations

import pytest
import torch
from problems import problem_of
from separable import Case

from cutlass_sep import arch, dispatch
from cutlass_sep.errors import EnvironmentProblem


@pytest.mark.parametrize("order", [1, -1], ids=["as listed", "reversed"])
@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_a_device_gets_the_newest_target_that_it_loads(capability, target, order, monkeypatch):
    monkeypatch.setattr(arch, "ARCHS", dict(list(arch.ARCHS.items())[::order]))
    assert arch.of_capability(capability) == target
    assert arch.runs_on(target, capability)


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (9, 1), (9, 9), (10, 3), (12, 1), (13, 0)])
def test_a_device_without_a_target(capability, monkeypatch):
    with pytest.raises(EnvironmentProblem, match=f"compute capability {capability[0]}.{capability[1]} has no kernels"):
        arch.of_capability(capability)
    assert not any(arch.runs_on(target, capability) for target in arch.ARCHS)
    # A call on it falls back: this is one of the reasons for which it does.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    with pytest.raises(dispatch.UNAVAILABLE, match="targets are sm_80, sm_86"):
        dispatch.choose(problem_of(Case(), "fp16"), torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["sm_90", "", None, 90, ["sm_90a"], {}])
def test_what_is_no_target(name):
    with pytest.raises(ValueError, match=r"arch=.* is not supported; it must be one of sm_80"):
        arch.check(name)


def test_every_target_has_its_shared_memory():
    assert list(arch.SHARED_BYTES) == list(arch.ARCHS)
