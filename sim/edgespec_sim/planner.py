"""Which way of decoding suits a link? The modes side by side on texts of one acceptance.

Theory of operation. Every mode plays the same few texts through the product's own sessions in
virtual time (``one_session.py``). Texts come from an acceptance process, in which hits come in
runs; of the first ones it draws, those are taken whose acceptance is nearest to the one asked for.
The first tenth of each text is not counted: it profits from what was drafted while the link was
set up. Beside each result stands the largest lower bound that holds for it (``bounds.py``).

A mode is recommended when it is the fastest, or as good as that and cheaper: fewer passes a token.
Cloud streaming is recommended unless a mode is faster by more than ``LEAST_GAIN``; the draft alone
never is, as its text is not the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Final

from edgespec.benchmark.arms import Arm, arm_settings
from edgespec.core.device.policy import MAX_GAMMA, DraftPolicy, FixedPolicy, WindowedPolicy
from edgespec.core.network.link_model import LinkSettings
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.ranges import bounded
from edgespec.telemetry.match_tape import ranks_along
from edgespec_sim.acceptance_process import AcceptanceLaw
from edgespec_sim.bounds import Costs, RunLengths, any_policy_s, lower_bounds, stop_and_wait_s
from edgespec_sim.one_session import Played, Setting, play
from edgespec_sim.process_source import ProcessSource
from edgespec_sim.scenario.network_sections import FRAMING_BYTES
from edgespec_sim.tokens import Request

LEAST_GAIN: Final = 1.03
"""A mode this much faster than cloud streaming is worth the effort of drafting."""
AS_GOOD: Final = 1.02
"""Modes this near to the fastest count as equal."""
MOST_WIDTH: Final = 3
# More than one commit can hold (65), or there would be no time between the first and the last.
MIN_TOKENS: Final = 100
MAX_TOKENS: Final = 10_000
_PROMPT_LENGTH: Final = 32
_DRAWN_TEXTS: Final = 24
_TEXTS: Final = 2
_WARM_UP: Final = 10
"""One part in so many of each text is not counted."""
_LONGEST_RTT_S: Final = 10.0


class ModeName(Enum):
    LOCAL = "draft model alone"
    STREAMING = "cloud streaming"
    STOP_AND_WAIT = "split, stop-and-wait"
    PEARL = "split, PEARL"
    WINDOWED = "split, windowed"
    RUN_AHEAD = "split + run-ahead"


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """A device, a verifier and the link between them. Raises ``ValueError`` naming the field, the
    value and the range."""

    rtt_ms: float = 50.0
    draft_ms: float = 8.0
    """One draft step."""
    pass_ms: float = 25.0
    """One pass of the target."""
    acceptance: float = 0.8
    """Share of positions at which the draft's first guess is the target's token."""
    jitter_ms: float = 0.0
    """Mean extra delay of each direction."""
    loss: float = 0.0
    up_mbps: float = 0.0
    """Uplink; 0 is without limit."""
    tokens: int = 400
    """Length of each text."""
    local_tpot_ms: float | None = None
    """Time a token of the draft model alone; None: ``draft_ms``."""
    seed: int = 0

    def __post_init__(self) -> None:
        bounded("rtt_ms", self.rtt_ms, 0.0, 10_000.0)
        bounded("draft_ms", self.draft_ms, 0.1, 10_000.0)
        bounded("pass_ms", self.pass_ms, 0.1, 10_000.0)
        bounded("acceptance", self.acceptance, 0.01, 0.99)
        bounded("jitter_ms", self.jitter_ms, 0.0, 10_000.0)
        bounded("loss", self.loss, 0.0, 0.5)
        if self.up_mbps != 0.0:
            bounded("up_mbps", self.up_mbps, 0.01, 1e6)
        bounded("tokens", self.tokens, MIN_TOKENS, MAX_TOKENS)
        if self.local_tpot_ms is not None:
            bounded("local_tpot_ms", self.local_tpot_ms, 0.1, 10_000.0)

    @property
    def costs(self) -> Costs:
        return Costs(self.rtt_ms / 1e3, self.draft_ms / 1e3, self.pass_ms / 1e3)

    def setting(self) -> Setting:
        def way(seed: int) -> LinkSettings:
            return LinkSettings(
                one_way_s=self.rtt_ms / 2e3,
                jitter_s=self.jitter_ms / 1e3,
                loss=self.loss,
                overhead_bytes=FRAMING_BYTES,
                seed=seed,
            )

        bits_per_s = self.up_mbps * 1e6 if self.up_mbps else math.inf
        costs = self.costs
        return Setting(
            way(2 * self.seed), way(2 * self.seed + 1), bits_per_s, costs.step_s, costs.pass_s
        )


@dataclass(frozen=True, slots=True)
class Mode:
    """How one way of decoding does, as means over all texts."""

    name: ModeName
    detail: str
    """What sets it apart from others of its name."""
    tpot_s: float
    speed_up: float
    """Over cloud streaming."""
    passes: float
    """A token."""
    wasted: float
    """Nodes sent in vain, a token."""
    up_bits_per_s: float
    """On the link, framing included."""
    bound_s: float | None
    """The largest lower bound on ``tpot_s``."""

    @property
    def title(self) -> str:
        return f"{self.name.value}{', ' + self.detail if self.detail else ''}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The modes in a fixed order, and which of them to take."""

    settings: PlanSettings
    source: str
    acceptance: float
    """Of the texts played."""
    modes: tuple[Mode, ...]
    best: Mode
    reason: str
    """One sentence."""
    waiting_pays_below_s: float | None
    """The round trip at which stop-and-wait is as fast as cloud streaming; None: at none."""
    drafting_pays_below_s: float | None
    """Beyond this round trip no policy can be ``LEAST_GAIN`` faster than cloud streaming with these
    drafts; None: at no round trip, infinite: at any."""


def plan_link(settings: PlanSettings) -> Plan:
    """Play every mode."""
    law = AcceptanceLaw.of(settings.acceptance)
    source = ProcessSource(law, settings.seed)
    width = min(MOST_WIDTH, law.width)
    requests, ranks = _typical_texts(source, settings, width)
    first_hits = sum(rank == 0 for text in ranks for rank in text)
    counted = [text[len(text) // _WARM_UP :] for text in ranks]
    runs = [RunLengths.of_ranks(counted, guesses) for guesses in range(1, width + 1)]
    bench = _Bench(source, requests, settings, first_hits / sum(map(len, ranks)), runs)
    modes = bench.modes()
    best = _best(modes)
    waiting_s = _waiting_pays_below_s(settings.costs, _endless(runs[0], settings.acceptance))
    drafting_s = _drafting_pays_below_s(settings.costs, _endless(runs[-1], settings.acceptance))
    return Plan(
        settings,
        source.about,
        bench.acceptance,
        modes,
        best,
        _reason(settings, bench.acceptance, modes, best, drafting_s),
        waiting_s,
        drafting_s,
    )


def _typical_texts(
    source: ProcessSource, settings: PlanSettings, width: int
) -> tuple[list[Request], list[tuple[int, ...]]]:
    """The requests whose acceptance is nearest to that asked for, with their ranks."""
    found = []
    for number in range(_DRAWN_TEXTS):
        request = source.request(number, _PROMPT_LENGTH, settings.tokens)
        drafter = source.drafter()
        drafter.begin(len(request.prompt), request.sampling)
        text = source.expected(request, settings.tokens)
        ranks = ranks_along(drafter.step, request.prompt, text, width)
        share = sum(rank == 0 for rank in ranks) / len(ranks)
        found.append((abs(share - settings.acceptance), number, request, ranks))
    found.sort(key=lambda one: one[:2])
    return [one[2] for one in found[:_TEXTS]], [one[3] for one in found[:_TEXTS]]


@dataclass(frozen=True, slots=True)
class _Bench:
    """The texts and the link on which all modes are played."""

    source: ProcessSource
    requests: Sequence[Request]
    settings: PlanSettings
    acceptance: float
    runs: Sequence[RunLengths]
    """With 1 guess, 2 guesses, ..."""

    def modes(self) -> tuple[Mode, ...]:
        streaming = self._mode(ModeName.STREAMING, "", Arm.TARGET_ONLY, None, 1.0)
        base_s = streaming.tpot_s
        gamma = self._best_gamma()
        found = [
            self._mode(
                ModeName.STOP_AND_WAIT, f"{gamma} drafts", Arm.VANILLA, FixedPolicy(gamma), base_s
            )
        ]
        for name, arm in ((ModeName.PEARL, Arm.PEARL), (ModeName.WINDOWED, Arm.WINDOWED)):
            found.append(self._mode(name, "", arm, arm_settings(arm).policy, base_s))
        for width in range(1, len(self.runs) + 1):
            policy = WindowedPolicy(width=width)
            found.append(
                self._mode(ModeName.RUN_AHEAD, f"width {width}", Arm.EDGESPEC, policy, base_s)
            )
        local_s = (self.settings.local_tpot_ms or self.settings.draft_ms) / 1e3
        local = Mode(ModeName.LOCAL, "", local_s, base_s / local_s, 0.0, 0.0, 0.0, None)
        return (local, streaming, *found)

    def _mode(
        self, name: ModeName, detail: str, arm: Arm, policy: DraftPolicy | None, base_s: float
    ) -> Mode:
        run_ahead = arm_settings(arm).run_ahead
        setting = self.settings.setting()
        played = [play(self.source, r, policy, run_ahead, setting) for r in self.requests]
        count = sum(len(one.times_s) for one in played)
        spans_s = sum(one.times_s[-1] - one.times_s[0] for one in played)
        # A link that stalls may release all the rest of a text at once.
        tpot_s = max(fmean(map(_per_token_s, played)), self.settings.costs.pass_s / count)
        gamma = policy.gamma if isinstance(policy, FixedPolicy) else None
        return Mode(
            name,
            detail,
            tpot_s,
            1.0 if run_ahead is RunAhead.ALWAYS else base_s / tpot_s,
            sum(one.passes for one in played) / count,
            sum(one.wasted for one in played) / count,
            sum(one.up_bytes for one in played) * 8 / spans_s,
            self._bound_s(arm, 1 if policy is None else policy.width, gamma),
        )

    def _bound_s(self, arm: Arm, width: int, gamma: int | None) -> float:
        costs = self.settings.costs
        bounds = lower_bounds(
            arm.value,
            rtt_s=costs.rtt_s,
            step_s=costs.step_s,
            pass_s=costs.pass_s,
            acceptance=self.acceptance,
            runs=self.runs[width - 1],
            gamma=gamma,
        )
        return max(bounds.values())

    def _best_gamma(self) -> int:
        costs, runs = self.settings.costs, _endless(self.runs[0], self.settings.acceptance)
        return min(range(1, MAX_GAMMA + 1), key=lambda gamma: stop_and_wait_s(costs, gamma, runs))


def _per_token_s(played: Played) -> float:
    """Over the tokens that came after the first tenth and after whatever came along with it."""
    times_s = played.times_s
    start_s = times_s[len(times_s) // _WARM_UP]
    later = sum(time_s > start_s for time_s in times_s)
    return (times_s[-1] - start_s) / later if later else 0.0


# --- what to make of it ---------------------------------------------------------------------


def _best(modes: Sequence[Mode]) -> Mode:
    streaming = next(mode for mode in modes if mode.name is ModeName.STREAMING)
    exact = [mode for mode in modes if mode.name is not ModeName.LOCAL]
    least_s = min(mode.tpot_s for mode in exact)
    if streaming.tpot_s < LEAST_GAIN * least_s:
        return streaming
    near = [mode for mode in exact if mode.tpot_s <= AS_GOOD * least_s]
    return min(near, key=lambda mode: (round(mode.passes, 2), mode.wasted))


def _endless(runs: RunLengths, acceptance: float) -> RunLengths:
    """What is to be expected of a long text; a coin's runs when these texts had too few misses."""
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


def _reason(
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
        )
    if best.name is not ModeName.STREAMING:
        return (
            f"{best.title} is {fast}: the {rtt} is short, so waiting for guesses costs little and"
            f" saves passes ({best.passes:.2f} a token)."
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
