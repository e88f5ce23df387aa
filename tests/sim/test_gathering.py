"""A device that gathers its drafts, in virtual time beside one that sends every step at once.

Oracle: the second one. The first must not be slower where the verifier starts its passes one after
another, and must send fewer messages; the text is the target's own in any case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from edgespec.core.device.events import DraftEvent, Transmit
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.device.policy import GATHER_SHARE, WindowedPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Draft, Limits, Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.drafts import AlwaysRunAhead
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.sessions import FixedDelay, PassTime, SimulatedDevice, SimulatedVerifier, Stream

PASS_S, STEP_S = 0.025, 0.003


@dataclass(frozen=True, slots=True)
class Outcome:
    tpot_s: float
    passes: int
    drafts: int
    """Messages with drafts."""


def play(policy: WindowedPolicy, rtt_ms: int, tokens: int = 120) -> Outcome:
    queue = EventQueue()
    model = ToyModel(vocabulary_size=64, order=3, seed=1)
    target, drafter = ToyTarget(model), ToyDrafter(model.perturbed(0.15))
    engine = VerifyEngine(
        target.info, Limits(), EngineLimits(), run_ahead=lambda kind: AlwaysRunAhead()
    )
    compute = PassTime(queue, lambda batch: PASS_S)
    verifier = SimulatedVerifier(queue, engine, target, compute)
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens)
    request = Open("gathering", "", "", (1, 2, 3), (), sampling, RunAhead.AUTO)
    session = DraftSession(request, policy, ReconnectPolicy(), 1 << 20)
    handle, drafts = session.handle, 0

    def counted(event: DraftEvent, now: float) -> Any:
        nonlocal drafts
        actions = handle(event, now)
        for action in actions:
            drafts += isinstance(action, Transmit) and isinstance(action.message, Draft)
        return actions

    session.handle = counted  # type: ignore[method-assign]

    def connect() -> tuple[Stream, float]:
        stream = Stream(queue, FixedDelay(queue, rtt_ms / 2e3), FixedDelay(queue, rtt_ms / 2e3))
        verifier.accept(stream)
        return stream, rtt_ms / 1e3

    device = SimulatedDevice(queue, session, drafter, lambda kept, fed: STEP_S, connect)
    device.start()
    queue.run(until_s=3600.0)
    times_s = device.delivery.times_s
    return Outcome((times_s[-1] - times_s[0]) / (len(times_s) - 1), target.passes, drafts)


@pytest.mark.parametrize("rtt_ms", [2, 20, 100])
def test_gathering_costs_no_time_and_saves_messages(rtt_ms: int) -> None:
    at_once = play(WindowedPolicy(2), rtt_ms)
    gathers = play(WindowedPolicy(2, gather=GATHER_SHARE), rtt_ms)
    assert gathers.tpot_s <= at_once.tpot_s
    assert gathers.passes <= at_once.passes
    assert gathers.drafts / gathers.passes < 0.6 * at_once.drafts / at_once.passes
