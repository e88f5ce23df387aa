"""The tables of a page, and numbers as a reader wants them: few digits, a dash for what was not
measured. Every cell is escaped here; a row of ours is marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from edgespec.bench.arms import Arm
from edgespec_sim.run_summary import (
    QUANTILES,
    ArmSummary,
    GroupSummary,
    RequestRow,
    RunSummary,
    Spread,
    VerifierSummary,
)

MISSING: Final = "–"
_NAME_MAX: Final = 28


def number(value: float | None) -> str:
    """Three significant digits, thousands apart."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(decimals, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and abs(value) < 1 else text


def milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds)


def percent(share: float | None) -> str:
    """A share as percent, the unit included."""
    if share is None or not math.isfinite(share):
        return MISSING
    shown = 100 * share
    return f"{shown:.1f} %" if abs(shown) < 10 and shown else f"{shown:.0f} %"


def times(factor: float | None) -> str:
    """A speed-up: 2.31×."""
    if factor is None or not math.isfinite(factor):
        return MISSING
    return f"{factor:.2f}×" if factor < 100 else f"{factor:,.0f}×"


def speedup(arm: ArmSummary) -> str:
    """With its interval, if that is known: 1.45× (1.38–1.53)."""
    if arm.speedup_interval is None:
        return times(arm.speedup)
    low, high = arm.speedup_interval
    return f"{times(arm.speedup)} ({low:.2f}–{high:.2f})"


def seeds_played(run: RunSummary) -> str:
    """Which were played: "seed 3", "seeds 1 to 24"; empty where there is none."""
    if run.seed is None:
        return ""
    return (
        f"seed {run.seed}" if run.seeds == 1 else f"seeds {run.seed} to {run.seed + run.seeds - 1}"
    )


def count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def duration(seconds: float) -> str:
    """For prose: ms below a second, s below two minutes, else minutes or hours."""
    if seconds < 1:
        return f"{milliseconds(seconds)} ms"
    if seconds < 120:
        return f"{number(seconds)} s"
    return f"{number(seconds / 60)} min" if seconds < 7200 else f"{number(seconds / 3600)} h"


def shortened(name: str, limit: int = _NAME_MAX) -> str:
    """For axes and legends, which cannot break a line; tables hold the whole name."""
    return name if len(name) <= limit else name[: limit - 1] + "…"


ROWS_SHOWN = 50
Borne = dict[str, Callable[[GroupSummary | RequestRow], float | None]]
_NOT_FAILED = "no"
_BORNE = (
    "GPU: of each pass by the rows in it; idle: of what its verifiers drew between passes, by what "
    "their passes took for it."
)
_MEDIAN, _P95, _P99 = (QUANTILES.index(share) for share in (0.5, 0.95, 0.99))


def is_ours(arm: str) -> bool:
    """The arm the product runs by default, and its variants (``edgespec, width 3``)."""
    return arm.startswith(Arm.EDGESPEC.value)


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    ours: Sequence[bool] = (),
    texts: Sequence[int] = (),
) -> str:
    """``rows`` start with their name; ``texts`` are further columns of words."""
    kinds = [' class="text"' if column in texts else "" for column in range(len(header))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(text)}</th>'
        for text, kind in zip(header, kinds, strict=True)
    )
    lines = []
    for index, row in enumerate(rows):
        mark = ' class="ours"' if index < len(ours) and ours[index] else ""
        name, _, small = row[0].partition("\n")
        below = f"<small>{escape(small)}</small>" if small else ""
        cells = "".join(
            f"<td{kind}>{escape(text)}</td>" for text, kind in zip(row[1:], kinds[1:], strict=True)
        )
        lines.append(f'<tr{mark}><th scope="row">{escape(name)}{below}</th>{cells}</tr>')
    name = escape(caption, quote=True)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{name}">'
        f"<table><caption><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


_TIMES = ("TTFT p50 ms", "TPOT mean ms", "p50 ms", "p95 ms", "p99 ms")
_WORK = ("tokens / pass", "acceptance", "wasted / token", "bytes up", "bytes down")


def arms_table(run: RunSummary) -> str:
    energy = _energy(run)
    header = ("arm", *_TIMES, "speed-up", *_WORK, *energy, "GPU busy", "tokens/s", "differ")
    rows = [
        (
            _named(arm),
            *_times(arm.all),
            speedup(arm),
            *_work(arm.all),
            *(number(of(arm)) for of in energy.values()),
            percent(_mean_utilisation(arm)),
            number(arm.all.tokens_per_second),
            count(arm.all.mismatches),
        )
        for arm in run.arms
    ]
    caption = (
        "Arms side by side, ours marked. Speed-up: mean TPOT of target-only over the arm's, in "
        "brackets its 95 % interval. Bytes and energy are per token; differ: tokens that are not "
        "the target's own."
    )
    return table(caption, header, rows, [is_ours(arm.arm) for arm in run.arms])


def _energy(run: RunSummary) -> dict[str, Callable[[ArmSummary], float | None]]:
    """The columns of energy of which anything is known."""
    columns = {
        "device J": device_j,
        "radiated mJ": _radiated_mj,
        "GPU J, at most": verifiers_j,
        "GPU idle J": verifiers_idle_j,
    }
    return {
        name: of for name, of in columns.items() if any(of(arm) is not None for arm in run.arms)
    }


def device_j(arm: ArmSummary) -> float | None:
    """A token; None where a part is not known."""
    return arm.all.energy_j_per_token


def _radiated_mj(arm: ArmSummary) -> float | None:
    joules = arm.all.radiated_j_per_token
    return None if joules is None else 1e3 * joules


def verifiers_j(arm: ArmSummary) -> float | None:
    """A token, while passes ran."""
    return _a_token(arm, [one.energy_j for one in arm.verifiers])


def verifiers_idle_j(arm: ArmSummary) -> float | None:
    """A token, while verifiers were powered and no pass ran: those that served nobody, too."""
    return _a_token(arm, [one.idle_j for one in arm.verifiers])


def _a_token(arm: ArmSummary, known: Sequence[float | None]) -> float | None:
    if not arm.all.tokens or not known or None in known:
        return None
    return sum(energy_j or 0.0 for energy_j in known) / arm.all.tokens


def _borne(runs: Sequence[GroupSummary | RequestRow]) -> Borne:
    """The columns of what requests bear of their verifiers, where that is known of any."""
    columns: Borne = {}
    if any(_verifier_j(one) is not None for one in runs):
        columns["GPU J, at most"] = _verifier_j
    if any(_verifier_idle_j(one) is not None for one in runs):
        columns["GPU idle J"] = _verifier_idle_j
    return columns


def _verifier_j(one: GroupSummary | RequestRow) -> float | None:
    """Of a request, or of a token of a group's."""
    return one.verifier_j if isinstance(one, RequestRow) else one.verifier_j_per_token


def _verifier_idle_j(one: GroupSummary | RequestRow) -> float | None:
    return one.verifier_idle_j if isinstance(one, RequestRow) else one.verifier_idle_j_per_token


def _named(arm: ArmSummary) -> str:
    ours = " (ours)" if is_ours(arm.arm) else ""
    return f"{arm.arm}{ours}\n{arm.label}"


def _times(group: GroupSummary) -> tuple[str, ...]:
    ttft, tpot = group.ttft_s, group.tpot_s
    return (
        _ms(ttft, _MEDIAN),
        milliseconds(None if tpot is None else tpot.mean),
        _ms(tpot, _MEDIAN),
        _ms(tpot, _P95),
        _ms(tpot, _P99),
    )


def _ms(spread: Spread | None, quantile: int) -> str:
    return milliseconds(None if spread is None else spread.quantiles[quantile])


def _work(group: GroupSummary) -> tuple[str, ...]:
    return (
        number(group.tokens_per_pass),
        percent(group.acceptance),
        number(group.wasted_per_token),
        number(group.up_bytes_per_token),
        number(group.down_bytes_per_token),
    )


def _mean_utilisation(arm: ArmSummary) -> float | None:
    if not arm.verifiers:
        return None
    return sum(one.utilisation for one in arm.verifiers) / len(arm.verifiers)


def requests_ended_table(run: RunSummary) -> str:
    ended = ("arm", "completed", "failed", "reconnects", "tokens", "ITL p50 ms", "ITL p99 ms")
    header: tuple[str, ...] = ended
    handed = any(arm.all.handovers for arm in run.arms)
    walked = any(any(_changes(arm.all)) for arm in run.arms)
    rows = [
        (
            arm.arm,
            count(arm.all.requests),
            count(arm.all.failed),
            count(arm.all.reconnects),
            count(arm.all.tokens),
            _ms(arm.all.itl_s, _MEDIAN),
            _ms(arm.all.itl_s, _P99),
            *(_handed(arm.all) if handed else ()),
            *(_walked(arm.all) if walked else ()),
        )
        for arm in run.arms
    ]
    caption = (
        "How the requests ended, and the gaps between deliveries (ITL): tokens that come together "
        "are one delivery, without gaps within it."
    )
    if handed:
        header = (*header, "handovers", "moved, recomputed", "moved with KV")
        caption += " Handovers are those of running requests; moved: to another verifier."
    if walked:
        header = (*header, "memory less / more")
        caption += " Memory: what the draft may hold, by its budget."
    return table(caption, header, rows, [is_ours(arm.arm) for arm in run.arms])


def _handed(group: GroupSummary) -> tuple[str, ...]:
    return (
        count(group.handovers),
        count(group.moves_recomputed),
        count(group.moves_with_kv),
    )


def _changes(group: GroupSummary) -> tuple[int, int]:
    return group.memory_tightened, group.memory_loosened


def _walked(group: GroupSummary) -> tuple[str, ...]:
    less, more = map(count, _changes(group))
    return (f"{less} / {more}",)


def bounds_table(run: RunSummary) -> str:
    """Empty when no arm has a bound."""
    header = ("arm", "lower bound", "bound ms / token", "result ms / token", "result / bound")
    rows, ours = [], []
    for arm in run.arms:
        mean_s = None if arm.all.tpot_s is None else arm.all.tpot_s.mean
        for name, bound_s in arm.bounds.items():
            over = mean_s / bound_s if mean_s is not None and bound_s > 0 else None
            values = (milliseconds(bound_s), milliseconds(mean_s))
            rows.append((arm.arm, name, *values, times(over)))
            ours.append(is_ours(arm.arm))
    caption = "How far from the limit: mean time per token against analytic lower bounds."
    return table(caption, header, rows, ours, texts=(1,)) if rows else ""


def groups_table(run: RunSummary) -> str:
    """Empty when no arm has groups."""
    borne = _borne([group for arm in run.arms for group in arm.groups.values()])
    header = ("group", "arm", "completed", "failed", *_TIMES, *_WORK, *borne)
    names = list(dict.fromkeys(name for arm in run.arms for name in arm.groups))
    rows, ours = [], []
    for name in names:
        for arm in run.arms:
            group = arm.groups.get(name)
            if group is None:
                continue
            ended = (count(group.requests), count(group.failed))
            joules = (number(of(group)) for of in borne.values())
            rows.append((name, arm.arm, *ended, *_times(group), *_work(group), *joules))
            ours.append(is_ours(arm.arm))
    caption = "Groups of devices."
    if borne:
        caption += f" {_BORNE} Per token."
    return table(caption, header, rows, ours, texts=(1,)) if rows else ""


def verifiers_table(run: RunSummary) -> str:
    """Empty when no verifier was seen. The busiest of each arm come first."""
    header = ("verifier", "arm", "busy", "passes", "rows / pass", "sessions / pass")
    powered = any(one.idle_j is not None for arm in run.arms for one in arm.verifiers)
    rows, ours, left = [], [], 0
    for arm in run.arms:
        busiest = sorted(arm.verifiers, key=lambda one: -one.utilisation)
        left += max(0, len(busiest) - ROWS_SHOWN)
        for one in busiest[:ROWS_SHOWN]:
            load = (percent(one.utilisation), count(one.passes))
            sizes = (number(one.rows_per_pass), number(one.sessions_per_pass))
            waits = _queue(None if arm.all.acceptance is None else one.queue_s)
            idle = _idle(one) if powered else ()
            rows.append((one.name, arm.arm, *load, *sizes, *waits, *idle))
            ours.append(is_ours(arm.arm))
    more = f" {left:,} less busy ones are left out." if left else ""
    caption = (
        "Verifiers; the queue is from a draft's arrival to its pass, so there is none without "
        f"drafts.{more}"
    )
    queue: tuple[str, ...] = ("queue p50 ms", "queue p95 ms")
    if powered:
        queue = (*queue, "idle, powered s", "idle J", "passes J, at most")
        caption += (
            " Idle, powered: no pass runs and the machine is on, with sessions or without;"
            " one that served nobody draws its idle power all the same."
        )
    return table(caption, (*header, *queue), rows, ours, texts=(1,)) if rows else ""


def _idle(one: VerifierSummary) -> tuple[str, ...]:
    return tuple(number(value) for value in (one.idle_s, one.idle_j, one.energy_j))


def _queue(spread: Spread | None) -> tuple[str, str]:
    return (
        _ms(spread, _MEDIAN),
        _ms(spread, _P95),
    )


def requests_table(arm: ArmSummary) -> str:
    """The first requests of an arm; empty without any."""
    header = ("device", "verifier", "start s", "TTFT ms", "TPOT ms", "tokens", "tokens / pass")
    borne = _borne(arm.rows[:ROWS_SHOWN])
    rows = [
        (
            *_request(row),
            *(number(of(row)) for of in borne.values()),
            row.failed or _NOT_FAILED,
        )
        for row in arm.rows[:ROWS_SHOWN]
    ]
    if not rows:
        return ""
    caption = f"The first {len(rows)} requests of {arm.arm}; all that were kept are in the CSV."
    if borne:
        caption += f" {_BORNE}"
    titles = (*header, "acceptance", *borne, "failed")
    return table(caption, titles, rows, texts=(1, len(titles) - 1))


def _request(row: RequestRow) -> tuple[str, ...]:
    return (
        row.device,
        row.verifier or MISSING,
        number(row.started_s),
        milliseconds(row.ttft_s),
        milliseconds(row.tpot_s),
        count(row.tokens),
        number(row.tokens_per_pass),
        percent(row.acceptance),
    )
