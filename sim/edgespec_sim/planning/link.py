"""Which way of decoding suits a link? Every arm plays a one-device scenario of it.

The scenario is an ordinary one, played as ``edgespec-sim run`` plays it. The fastest arm is
advised, unless another one takes as long: then the one that sends the fewest nodes in vain. Two
arms take as long when the interval of their ratio, world by world on the same dice, holds 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgespec.bench.arms import Arm
from edgespec.core.device.policy import MAX_GAMMA
from edgespec_sim.planning.bounds import Costs, RunLengths, any_policy_s, stop_and_wait_s
from edgespec_sim.planning.replication import Total, speedup
from edgespec_sim.run_summary import ArmSummary, RunSummary
from edgespec_sim.scenario.network import LinkSection
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)

LEAST_GAIN: Final = 1.03
"""An arm this much faster than plain streaming is worth the effort of drafting."""
_AS_GOOD: Final = 1.02
"""Of one seed nobody knows the spread: so near counts as equal."""
_LONGEST_RTT_S: Final = 10.0
FLAGS: Final = {
    Arm.TARGET_ONLY: "--draft none",
    Arm.VANILLA: "--set policy.name=fixed --set policy.run_ahead=never",
    Arm.PEARL: "--set policy.name=pearl --set policy.run_ahead=never",
    Arm.WINDOWED: "--set policy.name=windowed --set policy.width=1 --set policy.run_ahead=never",
    Arm.EDGESPEC: "",
}
"""Of ``edgespec generate``, ``chat`` and ``serve``, for a device that decodes like that."""


def link_scenario(
    *,
    rtt_ms: float,
    draft_ms: float,
    pass_ms: float,
    acceptance: float,
    jitter_ms: float = 0.0,
    loss: float = 0.0,
    up_mbps: float = 0.0,
) -> Scenario:
    """One device on that link; ``up_mbps`` 0 is without limit. Raises ``ValueError``."""
    link = LinkSection(rtt_ms=rtt_ms, jitter_ms=jitter_ms, loss=loss, up_mbps=up_mbps or math.inf)
    workload = WorkloadSection(prompt_tokens=32, output_tokens=128, think_s=0.5, start_within_s=0.0)
    return Scenario(
        name="link",
        about="One device on one link.",
        duration_s=30.0,
        tokens=TokensSection(acceptance=acceptance),
        links={"link": link},
        devices={
            "device": DeviceSection(
                path=("link",), draft=CostSection(ms=draft_ms), workload=workload
            )
        },
        verifiers={"verifier": VerifierSection(pass_time=CostSection(ms=pass_ms))},
        message_ms=0.0,
    )


@dataclass(frozen=True, slots=True)
class LinkAdvice:
    """What to take, and beyond which round trip nothing would help."""

    take: Arm
    reason: str
    waiting_pays_below_s: float | None
    """The round trip at which stop-and-wait is as fast as plain streaming; None: at none."""
    drafting_pays_below_s: float | None
    """Beyond this round trip no policy can be ``LEAST_GAIN`` faster than plain streaming with these
    drafts; None: at no round trip, infinite: at any."""


def break_even_s(
    costs: Costs, texts: Sequence[Sequence[int]], acceptance: float
) -> tuple[float | None, float | None]:
    """``waiting_pays_below_s`` and ``drafting_pays_below_s`` of texts with these ranks."""
    chain, tree = (_endless(RunLengths.of_ranks(texts, width), acceptance) for width in (1, 3))
    return _waiting_pays_below_s(costs, chain), _drafting_pays_below_s(costs, tree)


def _endless(runs: RunLengths, acceptance: float) -> RunLengths:
    """Of a long text; a coin's runs when these texts had too few misses."""
    return runs.endless if runs.shares else RunLengths.coin(acceptance)


def _waiting_pays_below_s(costs: Costs, runs: RunLengths) -> float | None:
    """Stop-and-wait takes q (gamma S + R + P) a token, with q its passes a token: equal to P at
    R = P / q - gamma S - P. The largest of these over gamma."""
    at_once = Costs(0.0, 0.0, 1.0)  # so that the time is the number of passes
    most_s = max(
        costs.pass_s / stop_and_wait_s(at_once, gamma, runs) - gamma * costs.step_s - costs.pass_s
        for gamma in range(1, MAX_GAMMA + 1)
    )
    return most_s if most_s > 0.0 else None


def _drafting_pays_below_s(costs: Costs, runs: RunLengths) -> float | None:
    def pays(rtt_s: float) -> bool:
        bound_s = any_policy_s(Costs(rtt_s, costs.step_s, costs.pass_s), 0.0, runs)
        return bound_s * LEAST_GAIN <= costs.pass_s

    low, high = 0.0, _LONGEST_RTT_S
    if not pays(low):
        return None
    if pays(high):
        return math.inf
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def advise(
    summary: RunSummary,
    totals: Mapping[Arm, Sequence[Total]],
    costs: Costs,
    pays_below_s: tuple[float | None, float | None],
) -> LinkAdvice:
    """``totals``: of each arm, world by world. ``pays_below_s`` is ``break_even_s``."""
    arms = {Arm(arm.arm): arm for arm in summary.arms if arm.speedup is not None}
    fastest = max(arms, key=lambda arm: arms[arm].speedup or 0.0)
    equal = [arm for arm in arms if _takes_as_long(totals[fastest], totals[arm])]
    take = min(equal, key=lambda arm: (arms[arm].all.wasted_per_token, arm is not fastest))
    if (arms[fastest].speedup or 0.0) < LEAST_GAIN:
        take = Arm.TARGET_ONLY
    waiting_s, drafting_s = pays_below_s
    if take is Arm.TARGET_ONLY:
        reason = _why_not(arms, fastest, costs, drafting_s)
    else:
        reason = _why(arms, take, fastest)
    return LinkAdvice(take, reason, waiting_s, drafting_s)


def _takes_as_long(fastest: Sequence[Total], arm: Sequence[Total]) -> bool:
    value, interval = speedup(fastest, arm)
    if interval is not None and interval.low < interval.high:
        return interval.high >= 1.0
    return value is not None and value * _AS_GOOD >= 1.0


def _why(arms: Mapping[Arm, ArmSummary], take: Arm, fastest: Arm) -> str:
    mine = arms[take]
    said = f"{take.value} is {mine.speedup:.2f} times as fast as plain streaming."
    if take is fastest:
        return said
    other = arms[fastest]
    more, fewer = (one.all.wasted_per_token for one in (other, mine))
    return (
        f"{said} {fastest.value} ({other.speedup:.2f}) is not faster by more than chance, and sends"
        f" {more:.2f} nodes a token in vain, not {fewer:.2f}."
    )


def _why_not(
    arms: Mapping[Arm, ArmSummary], fastest: Arm, costs: Costs, drafting_s: float | None
) -> str:
    if costs.step_s >= costs.pass_s:
        why = (
            f"a draft step ({1e3 * costs.step_s:g} ms) takes no less than a pass"
            f" ({1e3 * costs.pass_s:g} ms)"
        )
    elif drafting_s is None:
        why = "with such drafts it would not even without a round trip"
    elif costs.rtt_s > drafting_s:
        why = (
            f"the round trip of {1e3 * costs.rtt_s:g} ms is beyond the {1e3 * drafting_s:.0f} ms up"
            f" to which drafts like these could save {LEAST_GAIN - 1:.0%}"
        )
    else:
        why = f"the fastest arm, {fastest.value}, is only {arms[fastest].speedup:.2f} times as fast"
    return f"Drafting does not pay here, because {why}."
