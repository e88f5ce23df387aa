"""Which mode of a plan to take, and why; beyond which round trip none is worth it.

A mode is recommended when it is the fastest, or as good as that and cheaper: fewer passes a token.
Cloud streaming is recommended unless a mode is faster by more than ``LEAST_GAIN``; the draft alone
never is, as its text is not the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from edgespec.core.device.policy import MAX_GAMMA
from edgespec_sim.planning.bounds import Costs, RunLengths, any_policy_s, stop_and_wait_s
from edgespec_sim.planning.plan_values import AS_GOOD, LEAST_GAIN, Mode, ModeName, PlanSettings

_LONGEST_RTT_S: Final = 10.0


def best(modes: Sequence[Mode]) -> Mode:
    streaming = next(mode for mode in modes if mode.name is ModeName.STREAMING)
    exact = [mode for mode in modes if mode.name is not ModeName.LOCAL]
    least_s = min(mode.tpot_s for mode in exact)
    if streaming.tpot_s < LEAST_GAIN * least_s:
        return streaming
    near = [mode for mode in exact if mode.tpot_s <= AS_GOOD * least_s]
    return min(near, key=lambda mode: (round(mode.passes, 2), mode.wasted))


def endless(runs: RunLengths, acceptance: float) -> RunLengths:
    """What is to be expected of a long text; a coin's runs when these texts had too few misses."""
    return runs.endless if runs.shares else RunLengths.coin(acceptance)


def waiting_pays_below_s(costs: Costs, runs: RunLengths) -> float | None:
    """Stop-and-wait takes q (gamma S + R + P) a token, with q its passes a token: equal to P at
    R = P / q - gamma S - P. The largest of these over gamma."""
    at_once = Costs(0.0, 0.0, 1.0)  # so that the time is the number of passes
    most_s = max(
        costs.pass_s / stop_and_wait_s(at_once, gamma, runs) - gamma * costs.step_s - costs.pass_s
        for gamma in range(1, MAX_GAMMA + 1)
    )
    return most_s if most_s > 0.0 else None


def drafting_pays_below_s(costs: Costs, runs: RunLengths) -> float | None:
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


def reason(
    settings: PlanSettings,
    acceptance: float,
    modes: Sequence[Mode],
    best: Mode,
    drafting_s: float | None,
) -> str:
    fast = f"{best.speed_up:.2f} times as fast as cloud streaming"
    rtt = f"round trip of {settings.rtt_ms:g} ms"
    if best.name is ModeName.RUN_AHEAD:
        return (
            f"{best.title} is {fast}: {acceptance:.0%} of the guesses are right, and the verifier"
            f" decodes on while corrections and new guesses make their {rtt}."
            f"{_beside_the_fastest(modes, best)}"
        )
    if best.name is not ModeName.STREAMING:
        return (
            f"{best.title} is {fast}: the {rtt} is short, so waiting for guesses costs little and"
            f" saves passes ({best.passes:.2f} a token).{_beside_the_fastest(modes, best)}"
        )
    if settings.draft_ms >= settings.pass_ms:
        why = f"a draft step ({settings.draft_ms:g} ms) takes no less than a pass"
        return f"Drafting does not pay here: use cloud streaming, because {why}."
    if drafting_s is None:
        why = f"with {acceptance:.0%} of the guesses right it would not even without a round trip"
    elif settings.rtt_ms / 1e3 > drafting_s:
        why = (
            f"the {rtt} is beyond the {drafting_s * 1e3:.0f} ms up to which drafts like these could"
            f" save {LEAST_GAIN - 1:.0%}"
        )
    else:
        others = (mode for mode in modes if mode.name not in (ModeName.LOCAL, best.name))
        nearest = min(others, key=lambda mode: mode.tpot_s)
        why = (
            f"at a {rtt} the fastest way of drafting, {nearest.title}, is only"
            f" {nearest.speed_up:.2f} times as fast"
        )
    return f"Drafting does not pay here: use cloud streaming, because {why}."


def _beside_the_fastest(modes: Sequence[Mode], best: Mode) -> str:
    """Why another mode is quicker in the table; empty where none is."""
    exact = (mode for mode in modes if mode.name is not ModeName.LOCAL)
    fastest = min(exact, key=lambda mode: mode.tpot_s)
    if fastest.tpot_s >= best.tpot_s:
        return ""
    return f" {fastest.title} is at most {AS_GOOD - 1:.0%} faster and takes no fewer passes."
