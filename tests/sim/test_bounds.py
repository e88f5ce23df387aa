"""Lower bounds: never beaten in the simulator, reached somewhere, and right by hand on small cases.

The texts are scripts with ranks of the test's own, so that perfect drafts, coins and long runs can
all be had, and every run is known.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache

import pytest

from edgespec.bench.arms import Arm
from edgespec.core.device.policy import DraftPolicy, FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.messages import Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec_sim import bounds as bd
from edgespec_sim.token_sources.source import Script, ScriptedDrafter, ScriptedTarget, coded_prompt
from tests.sim.one_session import alone

INFO = ModelInfo("script", "script", 1000, 1 << 20)
TOKENS, PASS_S = 240, 0.025
MISS = -1


def ranks_of(kind: str) -> list[int]:
    """One text: a coin's hits, long and short runs, a second guess that is often right, or all."""
    dice = random.Random(kind)
    match kind.split():
        case ["coin", share]:
            return [0 if dice.random() < float(share) else MISS for _ in range(TOKENS)]
        case ["second", share]:
            rate = float(share)
            return [0 if dice.random() < rate else dice.choice((1, MISS)) for _ in range(TOKENS)]
        case ["runs"]:
            text: list[int] = []
            while len(text) < TOKENS:
                text += [0] * dice.choice((0, 0, 0, 1, 30)) + [MISS]
            return text[:TOKENS]
        case _:
            return [0] * TOKENS


@dataclass(frozen=True, slots=True)
class Way:
    arm: Arm
    policy: DraftPolicy | None
    run_ahead: RunAhead
    gamma: int | None = None


WAYS = {
    "target-only": Way(Arm.TARGET_ONLY, None, RunAhead.ALWAYS),
    "vanilla 1": Way(Arm.VANILLA, FixedPolicy(1), RunAhead.NEVER, 1),
    "vanilla 5": Way(Arm.VANILLA, FixedPolicy(5), RunAhead.NEVER, 5),
    "vanilla": Way(Arm.VANILLA, FixedPolicy(), RunAhead.NEVER),
    "pearl": Way(Arm.PEARL, PearlPolicy(), RunAhead.NEVER),
    "windowed": Way(Arm.WINDOWED, WindowedPolicy(width=1), RunAhead.NEVER),
    "chain": Way(Arm.EDGESPEC, WindowedPolicy(width=1), RunAhead.AUTO),
    "tree": Way(Arm.EDGESPEC, WindowedPolicy(width=2), RunAhead.AUTO),
    "always": Way(Arm.EDGESPEC, WindowedPolicy(width=2), RunAhead.ALWAYS),
}
TEXTS = ("coin 0.5", "coin 0.9", "second 0.7", "runs", "perfect")
RTTS_S, STEPS_S = (0.0, 0.030, 0.200), (0.004, 0.040)


@cache
def played(way: str, text: str, rtt_s: float, step_s: float) -> tuple[float, ...]:
    """When each token is delivered, from the start on."""
    setup, dice = WAYS[way], random.Random(text)
    script = Script([dice.randrange(900) for _ in range(TOKENS)], ranks_of(text))
    target = ScriptedTarget(INFO, lambda prompt, count: script)
    drafter = ScriptedDrafter(INFO, lambda prompt, count: script, 2)
    prompt, sampling = coded_prompt(0, 16, INFO.vocabulary_size), SamplingParams(max_tokens=TOKENS)
    drafting, policy = setup.policy is not None, setup.policy or FixedPolicy()
    opened = Open("one", "", "", prompt, (), sampling, setup.run_ahead, drafting=drafting)
    device = alone(target, drafter, opened, policy, rtt_s, step_s, PASS_S)
    return tuple(device.delivery.times_s)


def ratios(
    way: str, text: str, rtt_s: float, step_s: float, *, ends: bool = False
) -> dict[str, float]:
    """Measured time a token over each bound; ``ends`` counts as measured what the ends of a text
    may have saved."""
    setup = WAYS[way]
    ranks = ranks_of(text)
    times_s = played(way, text, rtt_s, step_s)
    tpot_s = (times_s[-1] - times_s[0]) / (TOKENS - 1)
    bounds = bd.lower_bounds(
        setup.arm.value,
        rtt_s=rtt_s,
        step_s=step_s,
        pass_s=PASS_S,
        acceptance=ranks.count(0) / TOKENS,
        runs=bd.RunLengths.of_ranks([ranks], 1 if setup.policy is None else setup.policy.width),
        gamma=setup.gamma,
    )
    assert bounds
    saved_s = dict.fromkeys(bounds, 0.0)
    # The drafts made before the first token, and those not made near the last one.
    early = math.ceil((1.5 * rtt_s + PASS_S) / step_s)
    saved_s[bd.PERFECT_DRAFTS] = early * bounds.get(bd.PERFECT_DRAFTS, 0.0)
    saved_s[bd.STOP_AND_WAIT] = (setup.gamma or 0) * step_s
    return {
        name: (tpot_s + ends * saved_s[name] / (TOKENS - 1)) / bound_s
        for name, bound_s in bounds.items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_no_bound_is_ever_beaten(way: str) -> None:
    for text in TEXTS:
        for rtt_s in RTTS_S:
            for step_s in STEPS_S:
                for name, ratio in ratios(way, text, rtt_s, step_s, ends=True).items():
                    assert ratio >= 0.995, (name, text, rtt_s, step_s)


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        (bd.ONE_PASS_A_TOKEN, ["target-only"]),
        (bd.ROUND_TRIP_PER_MISS, ["windowed"]),
        (bd.STOP_AND_WAIT, ["vanilla 1", "vanilla 5"]),
        (bd.THESE_DRAFTS, ["chain", "tree", "always"]),
        (bd.PERFECT_DRAFTS, ["pearl", "windowed", "chain"]),
    ],
)
def test_every_bound_is_reached_somewhere(name: str, ways: list[str]) -> None:
    for way in ways:
        least = min(
            ratios(way, text, rtt_s, step_s).get(name, math.inf)
            for text in TEXTS
            for rtt_s in RTTS_S
            for step_s in STEPS_S
        )
        assert least <= 1.05, way


@pytest.mark.parametrize("way", ["target-only", "windowed", "tree"])
def test_the_first_token_comes_no_sooner_than_its_bound(way: str) -> None:
    for rtt_s in RTTS_S:
        first_s = played(way, "coin 0.9", rtt_s, 0.004)[0]
        assert first_s == pytest.approx(2.0 * rtt_s + PASS_S)


# --- by hand --------------------------------------------------------------------------------


def test_runs_are_counted_between_misses() -> None:
    runs = bd.RunLengths.of_ranks([[0, MISS, 0, 0, MISS, MISS, 0], [0, 0, 1, MISS]], 1)
    assert dict(runs.shares) == {2: 1 / 3, 0: 2 / 3}
    assert runs.tokens_per_run == 9 / 3
    assert runs.endless.tokens_per_run == pytest.approx(5 / 3)
    wider = bd.RunLengths.of_ranks([[0, MISS, 0, 0, MISS, MISS, 0], [0, 0, 1, MISS]], 2)
    assert dict(wider.shares) == {2: 1 / 2, 0: 1 / 2}
    assert bd.RunLengths.of_ranks([[0, 0, 0]], 1).shares == ()


def test_formulas_by_hand() -> None:
    costs = bd.Costs(rtt_s=0.100, step_s=0.010, pass_s=0.020)
    three = bd.RunLengths(((3, 1.0),), 4.0)
    assert bd.round_trip_per_miss_s(costs, 0.75, three) == pytest.approx(
        (0.100 + 0.030 + 0.020) / 4
    )
    assert bd.stop_and_wait_s(costs, 3, three) == pytest.approx((0.100 + 0.030 + 0.020) / 4)
    assert bd.stop_and_wait_s(costs, 1, three) == pytest.approx(2 * (0.100 + 0.010 + 0.020) / 4)
    assert bd.any_policy_s(costs, 0.75, three) == pytest.approx((0.020 + 0.060) / 4)
    many = bd.RunLengths(((30, 1.0),), 31.0)
    assert bd.any_policy_s(costs, 0.9, many) == pytest.approx((0.020 + 0.100 + 0.300) / 31)
    assert bd.perfect_drafts_s(costs, run_ahead=True) == 0.010
    assert bd.perfect_drafts_s(bd.Costs(0.0, 1e-6, 0.0195), run_ahead=True) == pytest.approx(0.0003)
    # A slow draft: the target's own token behind each accepted one saves every second step.
    slow = bd.Costs(rtt_s=0.002, step_s=0.060, pass_s=0.020)
    assert bd.perfect_drafts_s(slow) == pytest.approx((0.060 + 0.022) / 2)
    assert bd.round_trip_per_miss_s(slow, 0.75, three) == pytest.approx(
        (0.002 + 0.060 + 0.020 + 0.022 + 0.060) / 4
    )


def test_mistakes_name_the_value() -> None:
    with pytest.raises(ValueError, match=r"acceptance is 1.5, but must be in"):
        bd.lower_bounds("pearl", rtt_s=0.0, step_s=0.0, pass_s=1.0, acceptance=1.5)
    with pytest.raises(ValueError, match="rtt_s is -1"):
        bd.Costs(-1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="'eagle' is not a valid Arm"):
        bd.lower_bounds("eagle", rtt_s=0.0, step_s=0.0, pass_s=1.0, acceptance=0.5)
