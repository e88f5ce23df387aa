"""``edgespec plan link``: the way of decoding that suits a link, the reason, and its certainty.

Every arm plays the bundled scenario ``single-device`` with the link's settings, exactly as
``edgespec-sim run`` plays it; the equivalent call is printed. The fastest arm is advised. If other
arms are equally fast, the one that uses the least GPU time is advised, and among equals in that the
one that sends the fewest rejected nodes. Two arms are equally fast if the interval of their ratio
contains 1; the ratio is taken world by world on the same dice. An arm with a device must gain
something over the fastest arm without one; otherwise the latter is advised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from edgespec.bench.arms import Arm
from edgespec.cli.options import option
from edgespec.cli.running import reporting_errors
from edgespec.core.device.lead import DraftingCase, describe_lead, find_lead
from edgespec_sim import playing
from edgespec_sim.commands import play
from edgespec_sim.replication import TpotTotal, measure_speedup
from edgespec_sim.run_summary import ArmSummary, RunSummary
from edgespec_sim.scenario.sections import load_scenario, scenario_path
from edgespec_sim.world.run import find_fastest_without_device

SCENARIO: Final = "single-device"
MIN_GAIN: Final = 1.03
"""Least ratio of speeds at which drafting on a device is worth its effort."""
_EQUAL_RATIO: Final = 1.02
"""Ratio of speeds up to which two arms count as equally fast on one seed, whose spread is
unknown."""
_SECONDS: Final = 30.0
"""Time after which no further seed is started, unless the user sets another limit."""
_OPTIONS: Final = {
    "links.internet.rtt_ms": "--rtt-ms",
    "devices.laptop.draft.ms": "--draft-ms",
    "verifiers.server.pass_time.ms": "--pass-ms",
    "tokens.acceptance": "--acceptance",
    "verifiers.server.server_draft.ms": "--server-draft-ms",
}
"""Options by the keys of ``SCENARIO`` that they set."""
FLAGS: Final = {
    Arm.TARGET_ONLY: "--draft none",
    Arm.VANILLA: "--set policy.name=fixed --set policy.width=1 --set policy.run_ahead=never",
    Arm.PEARL: "--set policy.name=pearl --set policy.width=1 --set policy.run_ahead=never",
    Arm.WINDOWED: "--set policy.name=windowed --set policy.width=1 --set policy.run_ahead=never",
    Arm.EDGESPEC: "",
    Arm.SERVER_DRAFT: "--draft none",
    Arm.BOTH: "",
}
"""Options of ``edgespec generate``, ``chat`` and ``serve`` that make a device decode like the
arm."""


def link_settings(
    rtt_ms: float, draft_ms: float, pass_ms: float, acceptance: float, server_draft_ms: float = 0.0
) -> dict[str, float | bool]:
    """Return the keys of ``SCENARIO`` that describe one device on such a link. The server does not
    draft if ``server_draft_ms`` is 0. The device is connected from the start, since an agent keeps
    its connection."""
    settings: dict[str, float | bool] = {
        "links.internet.rtt_ms": rtt_ms,
        "devices.laptop.draft.ms": draft_ms,
        "verifiers.server.pass_time.ms": pass_ms,
        "tokens.acceptance": acceptance,
        "duration_s": 30.0,
        "connected": True,
    }
    if server_draft_ms:
        settings["verifiers.server.server_draft.ms"] = server_draft_ms
    return settings


@dataclass(frozen=True, slots=True)
class LinkAdvice:
    """The advised arm, the reason, and how certain the advice is."""

    arm: Arm
    reason: str
    baseline: Arm
    """The fastest arm that needs no device."""
    gain: float
    """Time per token of ``baseline`` divided by that of ``arm``. If ``baseline`` itself is advised,
    the divisor is the fastest arm with a device."""
    gain_interval: tuple[float, float] | None
    """The 95 % interval of ``gain``. None with one seed."""
    is_sure: bool | None
    """Whether the interval decides between a device and none. None with one seed, which cannot
    decide."""

    @property
    def certainty(self) -> str:
        """``is_sure`` in words, printed after the arm."""
        if self.is_sure is None:
            return "one seed only, so the certainty is unknown: use --seeds or --max-seconds"
        return "sure" if self.is_sure else "not sure: the interval below includes the opposite"


def advise(
    summary: RunSummary, totals: Mapping[Arm, Sequence[TpotTotal]], draft_ms: float, pass_ms: float
) -> LinkAdvice:
    """Choose an arm. ``totals`` holds the times per token of each arm, one entry per world.

    Raises ``ValueError`` if no request ended without a device because the worlds were too short."""
    arms = {Arm(arm.arm): arm for arm in summary.arms if arm.speedup is not None}
    baseline = find_fastest_without_device({arm: totals[arm] for arm in arms})
    if baseline is None:
        raise ValueError(
            f"no request ended within {summary.duration_s:g} virtual s: the round trip is too long"
            " for this duration; play longer worlds with edgespec-sim run and --set duration_s=..."
        )
    fastest = max(arms, key=lambda arm: arms[arm].speedup or 0.0)
    equal = [arm for arm in arms if _is_equally_fast(totals[fastest], totals[arm])]
    most_ms = MIN_GAIN * min(gpu_ms_per_token(arms[arm]) for arm in equal)
    cheap = [arm for arm in equal if gpu_ms_per_token(arms[arm]) <= most_ms]
    take = min(cheap, key=lambda arm: (arms[arm].all.wasted_per_token, arm is not fastest))
    # A device that is hardly faster than the server alone may still take work off the GPU.
    saves_gpu = MIN_GAIN * gpu_ms_per_token(arms[take]) <= gpu_ms_per_token(arms[baseline])
    if not take.drafts or (_measure_gain(totals, baseline, take)[0] < MIN_GAIN and not saves_gpu):
        others = [arm for arm in arms if arm.drafts]
        rival = max(others, key=lambda arm: arms[arm].speedup or 0.0, default=baseline)
        gain, ends = _measure_gain(totals, baseline, rival)
        sure = None if ends is None else ends[1] < MIN_GAIN
        reason = _explain_no_device(arms, baseline, rival, (gain, ends), draft_ms, pass_ms)
        return LinkAdvice(baseline, reason, baseline, gain, ends, sure)
    gain, ends = _measure_gain(totals, baseline, take)
    sure = None if ends is None else ends[0] > 1.0
    return LinkAdvice(
        take,
        _explain_device(arms, take, fastest, baseline, (gain, ends)),
        baseline,
        gain,
        ends,
        sure,
    )


_Gain = tuple[float, tuple[float, float] | None]


def _measure_gain(totals: Mapping[Arm, Sequence[TpotTotal]], baseline: Arm, arm: Arm) -> _Gain:
    """Return how many times as fast ``arm`` is as ``baseline``, and the 95 % interval."""
    value, interval = measure_speedup(totals[baseline], totals[arm])
    assert value is not None, "both have a time per token"
    return value, None if interval is None else (interval.low, interval.high)


def _format_gain(gain: _Gain) -> str:
    value, ends = gain
    interval = "" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})"
    return f"{value:.2f} times{interval}"


def gpu_ms_per_token(arm: ArmSummary) -> float:
    """Return the milliseconds of the verifier's GPU per token, in passes and draft steps."""
    return arm.target_ms_per_token + arm.draft_ms_per_token


def _is_equally_fast(fastest: Sequence[TpotTotal], arm: Sequence[TpotTotal]) -> bool:
    value, interval = measure_speedup(fastest, arm)
    if interval is not None and interval.low < interval.high:
        return interval.high >= 1.0
    return value is not None and value * _EQUAL_RATIO >= 1.0


def _baseline_name(baseline: Arm) -> str:
    if baseline is Arm.TARGET_ONLY:
        return "plain streaming"
    return f"{baseline.value}, the fastest way that needs no device"


def _explain_device(
    arms: Mapping[Arm, ArmSummary], take: Arm, fastest: Arm, baseline: Arm, gain: _Gain
) -> str:
    advised = arms[take]
    text = f"{take.value} is {_format_gain(gain)} as fast as {_baseline_name(baseline)}."
    if baseline is not Arm.TARGET_ONLY:
        text += f" It is {advised.speedup:.2f} times as fast as plain streaming."
    if take is fastest:
        return text
    other = arms[fastest]
    if gpu_ms_per_token(other) > MIN_GAIN * gpu_ms_per_token(advised):
        return (
            f"{text} {fastest.value} ({other.speedup:.2f}) is not faster by more than chance, and"
            f" takes {gpu_ms_per_token(other):.1f} ms of the GPU per token instead of"
            f" {gpu_ms_per_token(advised):.1f}."
        )
    more, fewer = (one.all.wasted_per_token for one in (other, advised))
    return (
        f"{text} {fastest.value} ({other.speedup:.2f}) is not faster by more than chance, and sends"
        f" {more:.2f} rejected nodes per token instead of {fewer:.2f}."
    )


def _explain_no_device(
    arms: Mapping[Arm, ArmSummary],
    baseline: Arm,
    rival: Arm,
    gain: _Gain,
    draft_ms: float,
    pass_ms: float,
) -> str:
    if baseline is Arm.TARGET_ONLY:
        why = f"the fastest arm, {rival.value}, is only {_format_gain(gain)} as fast"
        if draft_ms >= pass_ms:
            why = f"a draft step ({draft_ms:g} ms) takes no less than a pass ({pass_ms:g} ms)"
        return f"Drafting does not pay here, because {why}."
    text = f"{baseline.value} is {arms[baseline].speedup:.2f} times as fast as plain streaming,"
    text += " and a device"
    text += " adds little" if gain[0] < MIN_GAIN else " adds nothing beyond chance"
    return f"{text}: the best arm with one, {rival.value}, is {_format_gain(gain)} as fast as that."


# --- the command ----------------------------------------------------------------------------

_ACCEPTANCE = option("Share of the draft's first candidates that the target accepts, 0.01 to 0.99")
_SERVER_DRAFT = option(
    "Milliseconds per step of the same draft on the server; 0: the server does not draft"
)


def link(
    rtt_ms: Annotated[float, option("Round-trip time of the link in milliseconds")] = 50.0,
    draft_ms: Annotated[float, option("Milliseconds per draft step on the device")] = 8.0,
    pass_ms: Annotated[float, option("Milliseconds per pass of the target")] = 25.0,
    acceptance: Annotated[float, _ACCEPTANCE] = 0.8,
    server_draft_ms: Annotated[float, _SERVER_DRAFT] = 2.5,
    seeds: play.SeedsOption = None,
    max_seconds: play.TimeOption = _SECONDS,
    as_json: Annotated[bool, option("One JSON object on stdout", "--json")] = False,
) -> None:
    """Compute where drafting pays on a link: on the device, the server, both or neither, and why.

    Every way is played in virtual time, as by `edgespec-sim run`: nothing is connected or loaded.
    Seeds are played until every speed is known within 5 %, for half a minute at most. The answer
    comes with its certainty. Jitter, loss and capacity of a link are keys of a scenario for
    `edgespec-sim run`.

    [dim]edgespec plan link --rtt-ms 120 --draft-ms 12 --pass-ms 30 --acceptance 0.7[/]"""
    with reporting_errors():
        settings = link_settings(rtt_ms, draft_ms, pass_ms, acceptance, server_draft_ms)
        with play.named_as_typed(_OPTIONS):
            scenario = load_scenario(SCENARIO, settings)
        seed_plan = playing.SeedPlan(1, seeds, seconds=max_seconds)
        point = playing.ScenarioPoint("link", scenario, scenario_path(SCENARIO).parent)
        with play.shown_workers(quiet=as_json) as workers:
            playing.play_seeds([point], seed_plan, workers)
        worlds = {arm: [o for one, o in point.outcomes if one is arm] for arm in scenario.arms}
        totals = {arm: [one.meters.tpot for one in advised] for arm, advised in worlds.items()}
        summary = playing.summary_of(point, seed_plan)
        advice = advise(summary, totals, draft_ms, pass_ms)
    case = DraftingCase(
        token_s=find_token_s(totals[advice.baseline]),
        step_s=draft_ms / 1e3,
        rtt_s=rtt_ms / 1e3,
        acceptance=acceptance,
        pass_s=pass_ms / 1e3,
    )
    sets = " ".join(f"--set {key}={_yaml_value(value)}" for key, value in settings.items())
    command = f"edgespec-sim run {SCENARIO} {sets}"
    if as_json:
        typer.echo(json.dumps(_advice_as_json(summary, advice, case, command), indent=2))
    else:
        _show(summary, advice)
        typer.echo(f"will a draft model on the device help? {describe_lead(case)}")
        typer.echo(f"the same world: {command}")


def _yaml_value(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.12g}"


def _show(summary: RunSummary, advice: LinkAdvice) -> None:
    play.show(summary)
    flags = FLAGS[advice.arm]
    typer.echo(f"take: {advice.arm.value} ({advice.certainty})\n{advice.reason}")
    typer.echo(f"flags: {flags}" if flags else "flags: none, it is the default")
    if advice.arm.on_server:
        typer.echo("on the server: edgespec verifier --draft DRAFT")
    shown = [f"{arm.arm} {gpu_ms_per_token(arm):.1f}" for arm in summary.arms]
    typer.echo(f"GPU, ms a token: {', '.join(shown)}")


def find_token_s(alone: Sequence[TpotTotal]) -> float:
    """Return the seconds per token of an arm, from its totals in each world."""
    return math.fsum(one.seconds for one in alone) / sum(one.requests for one in alone)


def _advice_as_json(
    summary: RunSummary, advice: LinkAdvice, case: DraftingCase, command: str
) -> dict[str, Any]:
    lead = find_lead(case)
    return {
        "run": command,
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
                "gpu_ms_per_token": gpu_ms_per_token(arm),
            }
            for arm in summary.arms
        },
        "take": advice.arm.value,
        "sure": advice.is_sure,
        "over": advice.baseline.value,
        "gain": advice.gain,
        "gain_interval": advice.gain_interval,
        "flags": FLAGS[advice.arm],
        "reason": advice.reason,
        "lead": {
            "server_token_ms": 1e3 * case.token_s,
            "tokens": None if math.isinf(lead.tokens) else lead.tokens,
            "chance": lead.chance,
            "speed_up": lead.speedup,
            "says": describe_lead(case),
        },
    }
