"""Policies that learn in random worlds, with broken links and a verifier that restarts.

Oracle: ``run_world`` holds each delivered token against the target's own stream.
"""

from __future__ import annotations

import pytest

from edgespec.core.device.policy_names import PolicyName, named_policy
from edgespec.core.device.preference import Prefer
from edgespec.core.protocol.messages import RunAhead
from edgespec_sim.world_options import WorldOptions
from edgespec_sim.worlds import run_world

LEARNING = (PolicyName.GOODPUT, PolicyName.SPECDEC, PolicyName.BANDIT)


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("run_ahead", [RunAhead.AUTO, RunAhead.NEVER])
def test_every_policy_gives_the_target_text(name: PolicyName, run_ahead: RunAhead) -> None:
    policy = named_policy(name)
    options = WorldOptions(policies=(policy,) * 2, run_ahead=run_ahead, cuts=1, restarts=1)
    for seed in range(3):
        result = run_world(options, seed)
        assert all(device.expected for device in result.devices)


def test_one_world_has_them_all() -> None:
    policies = tuple(named_policy(name) for name in PolicyName)
    policies += tuple(named_policy(PolicyName.WINDOWED, prefer=prefer) for prefer in Prefer)
    result = run_world(WorldOptions(policies=policies), 1)
    assert sum(device.counters.accepted for device in result.devices) > 0
