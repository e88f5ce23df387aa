"""The published schemes and ours against each other in virtual time.

Emulated pass 25 ms, draft step 8 ms, a draft that is right about eight times of ten. Virtual time
makes these exact: what is asserted here is a property of the protocol and its policies, not of a
machine.
"""

from __future__ import annotations

from functools import cache

import pytest

from edgespec.core.device.policy import DraftPolicy, FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.protocol.messages import Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from tests.sim.one_session import alone

PASS_S, STEP_S, TOKENS = 0.025, 0.008, 200
RTTS_MS = (2, 20, 50, 100, 200)
ARMS: dict[str, tuple[DraftPolicy, RunAhead]] = {
    "vanilla": (FixedPolicy(), RunAhead.NEVER),
    "pearl": (PearlPolicy(), RunAhead.NEVER),
    "windowed": (WindowedPolicy(), RunAhead.NEVER),
    "edgespec": (WindowedPolicy(width=2), RunAhead.AUTO),
}


@cache
def tpot_of(arm: str, rtt_ms: int, seed: int) -> float:
    """In milliseconds."""
    policy, run_ahead = ARMS[arm]
    model = ToyModel(vocabulary_size=64, order=3, seed=seed)
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=TOKENS)
    prompt = tuple(i % 64 for i in range(500))
    request = Open("arm", "", "", prompt, sampling=sampling, run_ahead=run_ahead)
    target, drafter = ToyTarget(model), ToyDrafter(model.perturbed(0.27))
    device = alone(target, drafter, request, policy, rtt_ms / 1e3, STEP_S, PASS_S)
    times_s = device.delivery.times_s
    assert len(times_s) == TOKENS
    return (times_s[-1] - times_s[0]) / (TOKENS - 1) * 1e3


def tpot_ms(arm: str, rtt_ms: int) -> float:
    return sum(tpot_of(arm, rtt_ms, seed) for seed in range(4)) / 4


@pytest.mark.parametrize("rtt_ms", RTTS_MS)
def test_never_slower_than_plain_streaming_nor_than_any_other_arm(rtt_ms: int) -> None:
    ours = tpot_ms("edgespec", rtt_ms)
    assert ours <= PASS_S * 1e3 * 1.01
    for arm in ("vanilla", "pearl", "windowed"):
        assert ours <= tpot_ms(arm, rtt_ms) * 1.03, arm


@pytest.mark.parametrize(("rtt_ms", "speed_up"), [(2, 1.7), (20, 1.5), (50, 1.3)])
def test_drafts_pay_at_usual_round_trips(rtt_ms: int, speed_up: float) -> None:
    assert PASS_S * 1e3 / tpot_ms("edgespec", rtt_ms) >= speed_up
