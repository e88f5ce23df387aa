"""``edgespec plan link``: which way of decoding suits a link, and why.

Every arm plays a one-device scenario of it, as ``edgespec-sim run`` plays it. The fastest arm is
advised, unless another one takes as long: then the one that sends the fewest nodes in vain. Two
arms take as long when the interval of their ratio, world by world on the same dice, holds 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from edgespec.bench.arms import Arm
from edgespec.cli.running import reported
from edgespec.config import ConfigError
from edgespec.core.device.policy import MAX_GAMMA
from edgespec_sim.bounds import Costs, RunLengths, any_policy_s, stop_and_wait_s
from edgespec_sim.commands.play import (
    Ask,
    Point,
    default_processes,
    play_seeds,
    show,
    summary_of,
)
from edgespec_sim.replication import Total, speedup
from edgespec_sim.run_summary import ArmSummary, RunSummary
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    LinkSection,
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
_COUNT: int | None = None
"""Seeds; None: as many as it takes."""
_SECONDS: Final = 30.0
"""No further seed is played after so long."""
FLAGS: Final = {
    Arm.TARGET_ONLY: "--draft none",
    Arm.VANILLA: "--set policy.name=fixed --set policy.width=1 --set policy.run_ahead=never",
    Arm.PEARL: "--set policy.name=pearl --set policy.width=1 --set policy.run_ahead=never",
    Arm.WINDOWED: "--set policy.name=windowed --set policy.width=1 --set policy.run_ahead=never",
    Arm.EDGESPEC: "",
}
"""Of ``edgespec generate``, ``chat`` and ``serve``, for a device that decodes like that."""


def link_scenario(rtt_ms: float, draft_ms: float, pass_ms: float, acceptance: float) -> Scenario:
    """One device on that link. Raises ``ValueError``."""
    link = LinkSection(rtt_ms=rtt_ms)
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


# --- the command ----------------------------------------------------------------------------


def link(
    rtt_ms: Annotated[float, typer.Option("--rtt-ms", help="Round trip of the link")] = 50.0,
    draft_ms: Annotated[float, typer.Option("--draft-ms", help="One draft step")] = 8.0,
    pass_ms: Annotated[float, typer.Option("--pass-ms", help="One pass of the target")] = 25.0,
    acceptance: Annotated[
        float,
        typer.Option("--acceptance", help="Share of first guesses that are right, 0.01 to 0.99"),
    ] = 0.8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Say which way of decoding suits a link, and why.

    Plays every way in virtual time, as `edgespec-sim run` would: nothing is connected or loaded.
    Seeds are played until every speed is known within 5 %, for half a minute at most. Jitter, loss
    and capacity of a link are keys of a scenario for `edgespec-sim run`.

    [dim]edgespec plan link --rtt-ms 120 --draft-ms 12 --pass-ms 30 --acceptance 0.7[/]
    """
    with reported():
        try:
            scenario = link_scenario(rtt_ms, draft_ms, pass_ms, acceptance)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        ask = Ask(1, _COUNT, seconds=_SECONDS)
        point = Point("link", scenario, Path())
        play_seeds([point], ask, default_processes(), quiet=as_json)
        worlds = {arm: [o for one, o in point.outcomes if one is arm] for arm in scenario.arms}
        totals = {arm: [one.meters.tpot for one in mine] for arm, mine in worlds.items()}
        texts = [ranks for one in worlds[scenario.arms[0]] for ranks in one.meters.ranks]
        costs = Costs(rtt_ms / 1e3, draft_ms / 1e3, pass_ms / 1e3)
        pays_below_s = break_even_s(costs, texts, acceptance)
        summary = summary_of(point, ask)
        found = advise(summary, totals, costs, pays_below_s)
    if as_json:
        typer.echo(json.dumps(_plain(summary, found), indent=2))
    else:
        _show(summary, found)


def _show(summary: RunSummary, found: LinkAdvice) -> None:
    show(summary)
    flags = FLAGS[found.take]
    typer.echo(f"take: {found.take.value}\n{found.reason}")
    typer.echo(f"flags: {flags}" if flags else "flags: none, it is the default")
    for line in _break_even(found):
        typer.echo(line)


def _break_even(found: LinkAdvice) -> list[str]:
    waiting_s, drafting_s = found.waiting_pays_below_s, found.drafting_pays_below_s
    lines = []
    if waiting_s is None:
        lines.append("Stop-and-wait is slower than plain streaming at any round trip.")
    else:
        lines.append(
            "Stop-and-wait is as fast as plain streaming at a round trip of"
            f" {waiting_s * 1e3:.0f} ms."
        )
    if drafting_s is not None and not math.isinf(drafting_s):
        lines.append(f"Beyond {drafting_s * 1e3:.0f} ms no policy can gain 3 % with these drafts.")
    return lines


def _plain(summary: RunSummary, found: LinkAdvice) -> dict[str, Any]:
    """JSON has no infinity: "at any round trip" is null with ``drafting_can_pay`` true."""
    drafting_s = found.drafting_pays_below_s
    return {
        "settings": summary.settings["yaml"],
        "source": summary.tokens_from,
        "seeds": summary.seeds,
        "arms": {
            arm.arm: {
                "tpot_ms": None if arm.all.tpot_s is None else 1e3 * arm.all.tpot_s.mean,
                "speed_up": arm.speedup,
                "speed_up_interval": arm.speedup_interval,
                "tokens_per_pass": arm.all.tokens_per_pass,
                "wasted_per_token": arm.all.wasted_per_token,
                "up_bytes_per_token": arm.all.up_bytes_per_token,
                "bound_ms": 1e3 * max(arm.bounds.values()),
            }
            for arm in summary.arms
        },
        "take": found.take.value,
        "flags": FLAGS[found.take],
        "reason": found.reason,
        "waiting_pays_below_ms": _milliseconds(found.waiting_pays_below_s),
        "drafting_can_pay": drafting_s is not None,
        "drafting_pays_below_ms": _milliseconds(drafting_s),
    }


def _milliseconds(time_s: float | None) -> float | None:
    return None if time_s is None or math.isinf(time_s) else round(time_s * 1e3, 3)
