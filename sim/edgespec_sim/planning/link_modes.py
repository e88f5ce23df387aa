"""Which way of decoding suits a link? The modes side by side on texts of one acceptance.

Theory of operation. Every mode plays the same few texts through the product's own sessions in
virtual time (``one_session.py``). Texts come from an acceptance process, in which hits come in
runs; of the first ones it draws, those are taken whose acceptance is nearest to the one asked for.
The first tenth of each text is not counted: it profits from what was drafted while the link was
set up. Beside each result stands the largest lower bound that holds for it (``bounds.py``). Other
seeds have other texts and another link's luck; ``pooled`` makes one plan of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median_low
from typing import Final

from edgespec.bench.arms import Arm, arm_settings
from edgespec.core.device.policy import MAX_GAMMA, DraftPolicy, FixedPolicy, WindowedPolicy
from edgespec.core.protocol.messages import RunAhead
from edgespec.telemetry.match_tape import ranks_along
from edgespec_sim.actors.one_session import Played, play
from edgespec_sim.planning import plan_advice
from edgespec_sim.planning.bounds import RunLengths, lower_bounds, stop_and_wait_s
from edgespec_sim.planning.plan_values import Mode, ModeName, Plan, PlanSettings
from edgespec_sim.planning.replication import Total, speedup
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw
from edgespec_sim.token_sources.process import ProcessSource
from edgespec_sim.token_sources.source import Request

MOST_WIDTH: Final = 3
_PROMPT_LENGTH: Final = 32
_DRAWN_TEXTS: Final = 24
_TEXTS: Final = 2
_WARM_UP: Final = 10
"""One part in so many of each text is not counted."""


def plan_link(settings: PlanSettings, gamma: int | None = None) -> Plan:
    """Play every mode on the texts and the link of one seed. ``gamma``: of stop-and-wait; None: the
    best for these texts."""
    law = AcceptanceLaw.of(settings.acceptance)
    source = ProcessSource(law, settings.seed)
    width = min(MOST_WIDTH, law.width)
    requests, ranks = _typical_texts(source, settings, width)
    first_hits = sum(rank == 0 for text in ranks for rank in text)
    counted = [text[len(text) // _WARM_UP :] for text in ranks]
    runs = [RunLengths.of_ranks(counted, guesses) for guesses in range(1, width + 1)]
    acceptance = first_hits / sum(map(len, ranks))
    bench = _Bench(source, requests, settings, acceptance, runs, gamma)
    modes = bench.modes()
    best = plan_advice.best(modes)
    waiting_s = plan_advice.waiting_pays_below_s(
        settings.costs, plan_advice.endless(runs[0], settings.acceptance)
    )
    drafting_s = plan_advice.drafting_pays_below_s(
        settings.costs, plan_advice.endless(runs[-1], settings.acceptance)
    )
    return Plan(
        settings,
        source.about,
        bench.acceptance,
        modes,
        best,
        plan_advice.reason(settings, bench.acceptance, modes, best, drafting_s),
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
    gamma: int | None
    """Of stop-and-wait; None: the best for these texts."""

    def modes(self) -> tuple[Mode, ...]:
        streaming = self._mode(ModeName.STREAMING, "", Arm.TARGET_ONLY, None, 1.0)
        base_s = streaming.tpot_s
        gamma = self.gamma or self._best_gamma()
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
        costs, runs = (
            self.settings.costs,
            plan_advice.endless(self.runs[0], self.settings.acceptance),
        )
        return min(range(1, MAX_GAMMA + 1), key=lambda gamma: stop_and_wait_s(costs, gamma, runs))


def _per_token_s(played: Played) -> float:
    """Over the tokens that came after the first tenth and after whatever came along with it."""
    times_s = played.times_s
    start_s = times_s[len(times_s) // _WARM_UP]
    later = sum(time_s > start_s for time_s in times_s)
    return (times_s[-1] - start_s) / later if later else 0.0


# --- several seeds --------------------------------------------------------------------------


def pooled(plans: Sequence[Plan]) -> Plan:
    """One plan of several seeds' (equal settings but for the seed, equal ``gamma``): means, and of
    each speed-up the 95 % interval (``replication.py``)."""
    first = plans[0]
    if len(plans) == 1:
        return first
    streaming = [next(m for m in plan.modes if m.name is ModeName.STREAMING) for plan in plans]
    base = [Total(mode.tpot_s, 1) for mode in streaming]
    modes = tuple(
        _pooled_mode(base, [plan.modes[index] for plan in plans])
        for index in range(len(first.modes))
    )
    best = plan_advice.best(modes)
    acceptance = fmean(plan.acceptance for plan in plans)
    drafting_s = _middle([plan.drafting_pays_below_s for plan in plans])
    return replace(
        first,
        acceptance=acceptance,
        modes=modes,
        best=best,
        reason=plan_advice.reason(first.settings, acceptance, modes, best, drafting_s),
        waiting_pays_below_s=_middle([plan.waiting_pays_below_s for plan in plans]),
        drafting_pays_below_s=drafting_s,
        seeds=len(plans),
    )


def _pooled_mode(base: Sequence[Total], same: Sequence[Mode]) -> Mode:
    value, interval = speedup(base, [Total(mode.tpot_s, 1) for mode in same])
    assert value is not None
    compared = same[0].name not in (ModeName.LOCAL, ModeName.STREAMING)
    bounds_s = [mode.bound_s for mode in same if mode.bound_s is not None]
    return Mode(
        same[0].name,
        same[0].detail,
        fmean(mode.tpot_s for mode in same),
        value,
        fmean(mode.passes for mode in same),
        fmean(mode.wasted for mode in same),
        fmean(mode.up_bits_per_s for mode in same),
        fmean(bounds_s) if bounds_s else None,
        (interval.low, interval.high) if compared and interval is not None else None,
    )


def _middle(values: Sequence[float | None]) -> float | None:
    """The median, "at no round trip" being less than any."""
    middle = median_low([-1.0 if value is None else value for value in values])
    return None if middle < 0.0 else middle
