"""A device that gathers its drafts, in virtual time beside one that sends every step at once.

Oracle: the second one. The first must not be slower where the verifier starts its passes one after
another, and must send fewer messages; the text is the target's own in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from edgespec.core.device.policy import GATHER_SHARE, WindowedPolicy
from edgespec.core.protocol.messages import Draft, Open, RunAhead, Uplink
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.drafts import AlwaysRunAhead
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.sessions import Stream
from tests.sim.one_session import alone

PASS_S, STEP_S = 0.025, 0.003


@dataclass(frozen=True, slots=True)
class Outcome:
    tpot_s: float
    passes: int
    drafts: int
    """Messages with drafts."""


class Counted(Stream):
    """A stream that counts drafts."""

    drafts = 0

    def send_up(self, message: Uplink) -> None:
        Counted.drafts += isinstance(message, Draft)
        super().send_up(message)


def play(policy: WindowedPolicy, rtt_ms: int) -> Outcome:
    model = ToyModel(vocabulary_size=64, order=3, seed=1)
    target, drafter = ToyTarget(model), ToyDrafter(model.perturbed(0.15))
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=120)
    request = Open("gathering", "", "", (1, 2, 3), (), sampling, RunAhead.AUTO)
    Counted.drafts = 0
    device = alone(
        target,
        drafter,
        request,
        policy,
        rtt_ms / 1e3,
        STEP_S,
        PASS_S,
        stream=Counted,
        run_ahead=lambda kind: AlwaysRunAhead(),
    )
    times_s = device.delivery.times_s
    tpot_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
    return Outcome(tpot_s, target.passes, Counted.drafts)


@pytest.mark.parametrize("rtt_ms", [2, 20, 100])
def test_gathering_costs_no_time_and_saves_messages(rtt_ms: int) -> None:
    at_once = play(WindowedPolicy(2), rtt_ms)
    gathers = play(WindowedPolicy(2, gather=GATHER_SHARE), rtt_ms)
    assert gathers.tpot_s <= at_once.tpot_s
    assert gathers.passes <= at_once.passes
    assert gathers.drafts / gathers.passes < 0.6 * at_once.drafts / at_once.passes
