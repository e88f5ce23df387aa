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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from edgespec.bench.arms import Arm
from edgespec.cli.options import option
from edgespec.cli.running import reported
from edgespec_sim.commands import play
from edgespec_sim.replication import Total, speedup
from edgespec_sim.run_summary import ArmSummary, RunSummary
from edgespec_sim.scenario.sections import load_scenario, scenario_path
from edgespec_sim.world.run import fastest_alone

SCENARIO: Final = "single-device"
LEAST_GAIN: Final = 1.03
"""Least ratio of speeds at which drafting on a device is worth its effort."""
_AS_GOOD: Final = 1.02
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

    take: Arm
    reason: str
    alone: Arm
    """The fastest arm that needs no device."""
    gain: float
    """Time per token of ``alone`` divided by that of ``take``. If ``alone`` itself is advised, the
    divisor is the fastest arm with a device."""
    gain_interval: tuple[float, float] | None
    """The 95 % interval of ``gain``. None with one seed."""
    sure: bool | None
    """Whether the interval decides between a device and none. None with one seed, which cannot
    decide."""

    @property
    def how_sure(self) -> str:
        """``sure`` in words, printed after the arm."""
        if self.sure is None:
            return "one seed only, so the certainty is unknown: use --seeds or --max-seconds"
            return "sure" if self.sure else "not sure: the interval below includes the opposite"


def advise(
    summary: RunSummary, totals: Mapping[Arm, Sequence[Total]], draft_ms: float, pass_ms: float
) -> LinkAdvice:
    """Choose an arm. ``totals`` holds the times per token of each arm, one entry per world.

    Raises ``ValueError`` if no request ended without a device because the worlds were too short."""
    arms = {Arm(arm.arm): arm for arm in summary.arms if arm.speedup is not None}
    alone = fastest_alone({arm: totals[arm] for arm in arms})
    if alone is None:
        raise ValueError(
            f"no request ended within {summary.duration_s:g} virtual s: the round trip is too long"
            " for this duration; play longer worlds with edgespec-sim run and --set duration_s=..."
        )
    fastest = max(arms, key=lambda arm: arms[arm].speedup or 0.0)
    equal = [arm for arm in arms if _takes_as_long(totals[fastest], totals[arm])]
    most_ms = LEAST_GAIN * min(gpu_ms(arms[arm]) for arm in equal)
    cheap = [arm for arm in equal if gpu_ms(arms[arm]) <= most_ms]
    take = min(cheap, key=lambda arm: (arms[arm].all.wasted_per_token, arm is not fastest))
    # A device that is hardly faster than the server alone may still take work off the GPU.
    saves_gpu = LEAST_GAIN * gpu_ms(arms[take]) <= gpu_ms(arms[alone])
    if not take.drafts or (_gain(totals, alone, take)[0] < LEAST_GAIN and not saves_gpu):
        others = [arm for arm in arms if arm.drafts]
        rival = max(others, key=lambda arm: arms[arm].speedup or 0.0, default=alone)
        gain, ends = _gain(totals, alone, rival)
        sure = None if ends is None else ends[1] < LEAST_GAIN
        reason = _why_not(arms, alone, rival, (gain, ends), draft_ms, pass_ms)
        return LinkAdvice(alone, reason, alone, gain, ends, sure)
    gain, ends = _gain(totals, alone, take)
    sure = None if ends is None else ends[0] > 1.0
    return LinkAdvice(take, _why(arms, take, fastest, alone, (gain, ends)), alone, gain, ends, sure)


_Gain = tuple[float, tuple[float, float] | None]


def _gain(totals: Mapping[Arm, Sequence[Total]], alone: Arm, arm: Arm) -> _Gain:
    """Return how many times as fast ``arm`` is as ``alone``, and the 95 % interval."""
    value, interval = speedup(totals[alone], totals[arm])
    assert value is not None, "both have a time per token"
    return value, None if interval is None else (interval.low, interval.high)


def _times(gain: _Gain) -> str:
    value, ends = gain
    interval = "" if ends is None else f" ({ends[0]:.2f} to {ends[1]:.2f})"
    return f"{value:.2f} times{interval}"


def gpu_ms(arm: ArmSummary) -> float:
    """Milliseconds of the verifier's GPU per token, in passes and draft steps."""
    return arm.target_ms_per_token + arm.draft_ms_per_token


def _takes_as_long(fastest: Sequence[Total], arm: Sequence[Total]) -> bool:
    value, interval = speedup(fastest, arm)
    if interval is not None and interval.low < interval.high:
        return interval.high >= 1.0
    return value is not None and value * _AS_GOOD >= 1.0


def _named(alone: Arm) -> str:
    if alone is Arm.TARGET_ONLY:
        return "plain streaming"
    return f"{alone.value}, the fastest way that needs no device"


def _why(arms: Mapping[Arm, ArmSummary], take: Arm, fastest: Arm, alone: Arm, gain: _Gain) -> str:
    mine = arms[take]
    said = f"{take.value} is {_times(gain)} as fast as {_named(alone)}."
    if alone is not Arm.TARGET_ONLY:
        said += f" It is {mine.speedup:.2f} times as fast as plain streaming."
    if take is fastest:
        return said
    other = arms[fastest]
    if gpu_ms(other) > LEAST_GAIN * gpu_ms(mine):
        return (
            f"{said} {fastest.value} ({other.speedup:.2f}) is not faster by more than chance, and"
            f" takes {gpu_ms(other):.1f} ms of the GPU a token, not {gpu_ms(mine):.1f}."
        )
    more, fewer = (one.all.wasted_per_token for one in (other, mine))
    return (
        f"{said} {fastest.value} ({other.speedup:.2f}) is not faster by more than chance, and sends"
        f" {more:.2f} nodes a token in vain, not {fewer:.2f}."
    )


def _why_not(
    arms: Mapping[Arm, ArmSummary],
    alone: Arm,
    rival: Arm,
    gain: _Gain,
    draft_ms: float,
    pass_ms: float,
) -> str:
    if alone is Arm.TARGET_ONLY:
        why = f"the fastest arm, {rival.value}, is only {_times(gain)} as fast"
        if draft_ms >= pass_ms:
            why = f"a draft step ({draft_ms:g} ms) takes no less than a pass ({pass_ms:g} ms)"
        return f"Drafting does not pay here, because {why}."
    said = (
        f"{alone.value} is {arms[alone].speedup:.2f} times as fast as plain streaming, and a device"
    )
    said += " adds little" if gain[0] < LEAST_GAIN else " device adds nothing beyond chance"
    return f"{said}: the best arm with one, {rival.value}, is {_times(gain)} as fast as that."


# --- the command ----------------------------------------------------------------------------

_ACCEPTANCE = option("Share of first guesses that are right, 0.01 to 0.99")
_SERVER_DRAFT = option("One step of the same draft on the server; 0: it does not draft")


def link(
    rtt_ms: Annotated[float, option("Round trip of the link")] = 50.0,
    draft_ms: Annotated[float, option("One draft step")] = 8.0,
    pass_ms: Annotated[float, option("One pass of the target")] = 25.0,
    acceptance: Annotated[float, _ACCEPTANCE] = 0.8,
    server_draft_ms: Annotated[float, _SERVER_DRAFT] = 2.5,
    seeds: play.SeedsOption = None,
    max_seconds: play.TimeOption = _SECONDS,
    as_json: Annotated[bool, option("One JSON object on stdout", "--json")] = False,
) -> None:
    """Say where drafting pays on a link, on the device, the server, both or neither, and why.

    Plays every way in virtual time, as `edgespec-sim run` would: nothing is connected or loaded.
    Seeds are played until every speed is known within 5 %, for half a minute at most, and the
    answer says how sure it is. Jitter, loss and capacity of a link are keys of a scenario for
    `edgespec-sim run`.

    [dim]edgespec plan link --rtt-ms 120 --draft-ms 12 --pass-ms 30 --acceptance 0.7[/]"""
    with reported():
        settings = link_settings(rtt_ms, draft_ms, pass_ms, acceptance, server_draft_ms)
        with play.named_as_typed(_OPTIONS):
            scenario = load_scenario(SCENARIO, settings)
        ask = play.Ask(1, seeds, seconds=max_seconds)
        point = play.Point("link", scenario, scenario_path(SCENARIO).parent)
        play.play_seeds([point], ask, play.default_processes(), quiet=as_json)
        worlds = {arm: [o for one, o in point.outcomes if one is arm] for arm in scenario.arms}
        totals = {arm: [one.meters.tpot for one in mine] for arm, mine in worlds.items()}
        summary = play.summary_of(point, ask)
        found = advise(summary, totals, draft_ms, pass_ms)
    sets = " ".join(f"--set {key}={_plain_value(value)}" for key, value in settings.items())
    same = f"edgespec-sim run {SCENARIO} {sets}"
    if as_json:
        typer.echo(json.dumps(_plain(summary, found, same), indent=2))
    else:
        _show(summary, found)
        typer.echo(f"the same world: {same}")


def _plain_value(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.12g}"


def _show(summary: RunSummary, found: LinkAdvice) -> None:
    play.show(summary)
    flags = FLAGS[found.take]
    typer.echo(f"take: {found.take.value} ({found.how_sure})\n{found.reason}")
    typer.echo(f"flags: {flags}" if flags else "flags: none, it is the default")
    if found.take.on_server:
        typer.echo("on the server: edgespec verifier --draft DRAFT")
    shown = [f"{arm.arm} {gpu_ms(arm):.1f}" for arm in summary.arms]
    typer.echo(f"GPU, ms a token: {', '.join(shown)}")


def _plain(summary: RunSummary, found: LinkAdvice, same: str) -> dict[str, Any]:
    return {
        "run": same,
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
                "gpu_ms_per_token": gpu_ms(arm),
            }
            for arm in summary.arms
        },
        "take": found.take.value,
        "sure": found.sure,
        "over": found.alone.value,
        "gain": found.gain,
        "gain_interval": found.gain_interval,
        "flags": FLAGS[found.take],
        "reason": found.reason,
    }
