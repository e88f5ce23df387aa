"""The tables of a page, and the format of numbers: few digits, and a dash for a missing
measurement. Every cell is escaped here, and rows of edgespec's own arms are marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean
from typing import Final

from edgespec.bench.arms import Arm
from edgespec_sim.run_summary import (
    QUANTILES,
    ArmSummary,
    GroupSummary,
    RunSummary,
    Spread,
    VerifierSummary,
)

MISSING: Final = "–"
_DAY_S: Final = 86_400.0


def number(value: float | None) -> str:
    """Format a number with three significant digits and separators between thousands."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(decimals, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and abs(value) < 1 else text


def milliseconds(seconds: float | None) -> str:
    return number(None if seconds is None else 1e3 * seconds)


def mean_ms(spread: Spread | None) -> str:
    return milliseconds(None if spread is None else spread.mean)


def quantile_ms(spread: Spread | None, share: float) -> str:
    """Format a quantile in milliseconds; ``share`` is one of ``QUANTILES``."""
    return milliseconds(None if spread is None else spread.quantiles[QUANTILES.index(share)])


def percent(share: float | None) -> str:
    """Format a share as percent, with the unit."""
    if share is None or not math.isfinite(share):
        return MISSING
    shown = 100 * share
    return f"{shown:.1f} %" if abs(shown) < 10 and shown else f"{shown:.0f} %"


def times(factor: float | None) -> str:
    """Format a speed-up: 2.31×."""
    if factor is None or not math.isfinite(factor):
        return MISSING
    return f"{factor:.2f}×" if factor < 100 else f"{factor:,.0f}×"


def speedup(arm: ArmSummary) -> str:
    """Format a speed-up with its interval, if there is one: 1.45× (1.38–1.53)."""
    if arm.speedup_interval is None:
        return times(arm.speedup)
    low, high = arm.speedup_interval
    return f"{times(arm.speedup)} ({low:.2f}–{high:.2f})"


def seeds_played(run: RunSummary) -> str:
    """Describe the seeds: "seed 3", "seeds 1 to 24"; empty if there are none."""
    if run.seed is None:
        return ""
    return (
        f"seed {run.seed}" if run.seeds == 1 else f"seeds {run.seed} to {run.seed + run.seeds - 1}"
    )


def count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def duration(seconds: float) -> str:
    """Format a duration for prose: ms below a second, s below two minutes, else minutes or
    hours."""
    if seconds < 1:
        return f"{milliseconds(seconds)} ms"
    if seconds < 120:
        return f"{number(seconds)} s"
    return f"{number(seconds / 60)} min" if seconds < 7200 else f"{number(seconds / 3600)} h"


ROWS_SHOWN = 50


def is_ours(arm: str) -> bool:
    """Whether the arm is the product's default or one of its variants (``edgespec, width 3``)."""
    return arm.startswith((Arm.EDGESPEC.value, Arm.BOTH.value))


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    arm: int = 0,
    texts: Sequence[int] = (),
) -> str:
    """Return a table as HTML, or an empty string without rows. Each row begins with its name.
    ``texts`` are further columns of words, and ``arm`` is the column of arms, which marks our
    rows."""
    if not rows:
        return ""
    words = {*texts, arm} - {0}
    kinds = [' class="text"' if column in words else "" for column in range(len(header))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(text)}</th>'
        for text, kind in zip(header, kinds, strict=True)
    )
    lines = []
    for row in rows:
        mark = ' class="ours"' if is_ours(row[arm]) else ""
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


_Columns = dict[str, Callable[[GroupSummary], str]]
_TIMES: Final[_Columns] = {
    "TTFT p50 ms": lambda group: quantile_ms(group.ttft_s, 0.5),
    "TPOT mean ms": lambda group: mean_ms(group.tpot_s),
    "p50 ms": lambda group: quantile_ms(group.tpot_s, 0.5),
    "p95 ms": lambda group: quantile_ms(group.tpot_s, 0.95),
    "p99 ms": lambda group: quantile_ms(group.tpot_s, 0.99),
}
_WORK: Final[_Columns] = {
    "tokens / pass": lambda group: number(group.tokens_per_pass),
    "acceptance": lambda group: percent(group.acceptance),
    "wasted / token": lambda group: number(group.wasted_per_token),
    "bytes up": lambda group: number(group.up_bytes_per_token),
    "bytes down": lambda group: number(group.down_bytes_per_token),
    "request bytes": lambda group: number(group.request_bytes),
}
_ENERGIES: Final[dict[str, Callable[[ArmSummary], float | None]]] = {
    "device J": lambda arm: arm.all.energy_j_per_token,
    # Energy while passes ran; then while verifiers were on and idle, with or without sessions.
    "GPU J, at most": lambda arm: _per_token(arm, [one.energy_j for one in arm.verifiers]),
    "GPU idle J": lambda arm: _per_token(arm, [one.idle_j for one in arm.verifiers]),
}


def arm_columns(run: RunSummary) -> dict[str, Callable[[ArmSummary], str]]:
    """Return the possible columns of a table of arms. Columns of energy without any value are left
    out."""

    def whole(of: Callable[[GroupSummary], str]) -> Callable[[ArmSummary], str]:
        return lambda arm: of(arm.all)

    def joules(of: Callable[[ArmSummary], float | None]) -> Callable[[ArmSummary], str]:
        return lambda arm: number(of(arm))

    columns = {name: whole(of) for name, of in _TIMES.items()} | {"speed-up": speedup}
    columns |= {name: whole(of) for name, of in _WORK.items()}
    for name, of in _ENERGIES.items():
        if any(of(arm) is not None for arm in run.arms):
            columns[name] = joules(of)
    columns["GPU busy"] = lambda arm: percent(
        fmean(one.utilisation for one in arm.verifiers) if arm.verifiers else None
    )
    columns["tokens/s"] = lambda arm: number(arm.all.tokens_per_second)
    columns["differ"] = lambda arm: count(arm.all.mismatches)
    return columns


def arms_table(run: RunSummary) -> str:
    columns = arm_columns(run)
    rows = [(_labelled_name(arm), *(of(arm) for of in columns.values())) for arm in run.arms]
    caption = (
        "Arms side by side, ours marked. Speed-up: mean TPOT of target-only divided by the arm's,"
        " with its 95 % interval in brackets. Bytes and energy are per token; differ: tokens that"
        " are not the target's own."
    )
    return table(caption, ("arm", *columns), rows)


def _per_token(arm: ArmSummary, known: Sequence[float | None]) -> float | None:
    if not arm.all.tokens or not known or None in known:
        return None
    return math.fsum(energy_j or 0.0 for energy_j in known) / arm.all.tokens


def _labelled_name(arm: ArmSummary) -> str:
    ours = " (ours)" if is_ours(arm.arm) else ""
    return f"{arm.name}{ours}\n{arm.label}"


def requests_ended_table(run: RunSummary) -> str:
    columns: _Columns = {
        "completed": lambda group: count(group.requests),
        "failed": lambda group: count(group.failed),
        "reconnects": lambda group: count(group.reconnects),
        "tokens": lambda group: count(group.tokens),
        "ITL p50 ms": lambda group: quantile_ms(group.itl_s, 0.5),
        "ITL p99 ms": lambda group: quantile_ms(group.itl_s, 0.99),
    }
    caption = (
        "How the requests ended, and the gaps between deliveries (ITL): tokens that arrive"
        " together are one delivery, without gaps between them."
    )
    if any(arm.all.handovers for arm in run.arms):
        columns["handovers"] = lambda group: count(group.handovers)
        caption += " Handovers are those of running requests."
    if any(arm.all.memory_tightened or arm.all.memory_loosened for arm in run.arms):
        columns["memory less"] = lambda group: count(group.memory_tightened)
        columns["memory more"] = lambda group: count(group.memory_loosened)
        caption += (
            " Memory: how often the memory budget reduced the draft's cache, and restored it."
        )
    rows = [(arm.name, *(of(arm.all) for of in columns.values())) for arm in run.arms]
    return table(caption, ("arm", *columns), rows)


def groups_table(run: RunSummary) -> str:
    """Return a table of the groups of devices. Empty if no arm has groups."""
    header = ("group", "arm", "completed", "failed", *_TIMES, *_WORK)
    names = list(dict.fromkeys(name for arm in run.arms for name in arm.groups))
    rows = []
    for name in names:
        for arm in run.arms:
            if (group := arm.groups.get(name)) is not None:
                ended = (count(group.requests), count(group.failed))
                cells = [of(group) for of in (_TIMES | _WORK).values()]
                rows.append((name, arm.name, *ended, *cells))
    return table("Groups of devices.", header, rows, arm=1)


def verifiers_table(run: RunSummary) -> str:
    """Return a table of the verifiers, the busiest of each arm first. Empty if there are none."""
    header: tuple[str, ...] = (
        *("verifier", "arm", "busy", "passes", "rows / pass", "sessions / pass"),
        *("queue p50 ms", "queue p95 ms"),
    )
    shares_gpu = any(one.ran_s is not None for arm in run.arms for one in arm.verifiers)
    if shares_gpu:
        header = (*header, "RAN, of busy")
    rows: list[tuple[str, ...]] = []
    left = 0
    for arm in run.arms:
        busiest = sorted(arm.verifiers, key=lambda one: -one.utilisation)
        left += max(0, len(busiest) - ROWS_SHOWN)
        for one in busiest[:ROWS_SHOWN]:
            load = (percent(one.utilisation), count(one.passes))
            sizes = (number(one.rows_per_pass), number(one.sessions_per_pass))
            queue_s = None if arm.all.acceptance is None else one.queue_s
            queue = quantile_ms(queue_s, 0.5), quantile_ms(queue_s, 0.95)
            row = (one.name, arm.name, *load, *sizes, *queue)
            rows.append((*row, _ran_share(one)) if shares_gpu else row)
    more = f" {left:,} less busy verifiers are left out." if left else ""
    caption = (
        "Verifiers; the queue is the time from a draft's arrival to its pass, so it is empty"
        f" without drafts.{more}"
    )
    if shares_gpu:
        caption += " RAN: the part of the busy time that the radio access network took."
    return table(caption, header, rows, arm=1)


RAN_HEADER: Final = ("arm", "GPU busy", "of it radio network", "ms / token without it", "with it")


def ran_rows(run: RunSummary) -> list[tuple[str, ...]]:
    """Return what radio access networks on the verifiers' GPUs took, arm by arm. Empty if no
    verifier shares its GPU."""
    rows: list[tuple[str, ...]] = []
    for arm in run.arms:
        shared = [one for one in arm.verifiers if one.ran_s is not None]
        busy_s = math.fsum(one.busy_s for one in shared)
        if not busy_s or not arm.all.tokens:
            continue
        ran_s = math.fsum(one.ran_s or 0.0 for one in shared)
        rows.append(
            (
                arm.name,
                percent(fmean(one.utilisation for one in shared)),
                percent(ran_s / busy_s),
                number(1e3 * (busy_s - ran_s) / arm.all.tokens),
                number(1e3 * busy_s / arm.all.tokens),
            )
        )
    return rows


def _ran_share(one: VerifierSummary) -> str:
    """Return the share of a verifier's busy time that its radio access network took."""
    known = one.ran_s is not None and one.busy_s > 0.0
    return percent((one.ran_s or 0.0) / one.busy_s if known else None)


DRAFTS_HEADER: Final = (
    "arm",
    "device: nodes / token",
    "accepted",
    "server: nodes / token",
    "accepted",
    "draft ms / token",
    "target ms / token",
)


def drafts_rows(run: RunSummary) -> list[tuple[str, ...]]:
    """Return each arm's nodes on devices and servers, and the verifiers' time per token. Empty if
    no verifier drafted."""
    if not any(arm.draft_ms_per_token for arm in run.arms):
        return []
    rows = []
    for arm in run.arms:
        tokens = max(1, arm.all.tokens)
        server = [sum(getattr(v, name) for v in arm.verifiers) for name in ("guessed", "accepted")]
        cells = []
        for guessed, accepted in ((arm.all.guessed, arm.all.accepted), server):
            share = accepted / guessed if guessed else None
            cells += [number(guessed / tokens), percent(share)]
        times = number(arm.draft_ms_per_token), number(arm.target_ms_per_token)
        rows.append((arm.name, *cells, *times))
    return rows


def drafts_table(run: RunSummary) -> str:
    """Return ``drafts_rows`` as a table. Empty if no verifier drafted."""
    caption = (
        "Nodes drafted by devices and by servers, and their accepted share; milliseconds of the "
        "verifiers' machines in draft steps and in passes."
    )
    return table(caption, DRAFTS_HEADER, drafts_rows(run))


POWER_HEADER: Final = (
    "arm",
    "battery at first",
    "at the end",
    "a day would take",
    "hottest °C",
    "time throttled",
    "drafting throttled",
)


def power_rows(run: RunSummary) -> list[tuple[str, ...]]:
    """Return each arm's batteries and temperatures, as means over the devices. Empty if no device
    has one."""
    rows: list[tuple[str, ...]] = []
    for arm in run.arms:
        if (power := arm.power) is None:
            continue
        charges = [one for one in power.battery if one is not None]
        heats = [one for one in power.temperature_c if one is not None]
        throttled = [one for one in power.throttled if one is not None]
        first, last = (charges[0], charges[-1]) if charges else (None, None)
        a_day = None
        if first is not None and last is not None:
            a_day = (first - last) * _DAY_S / ((len(charges) - 1) * power.step_s)
        rows.append(
            (
                arm.name,
                percent(first),
                percent(last),
                percent(a_day),
                number(max(heats, default=None)),
                percent(fmean(throttled) if throttled else None),
                percent(arm.all.throttled_share),
            )
        )
    return rows


def power_table(run: RunSummary) -> str:
    """Return ``power_rows`` as a table. Empty if no device has a battery or a temperature."""
    caption = (
        "Batteries and temperatures, as means over the devices: the charge at the begin and near"
        " the end of the run, what a day of it would take, and how much of the time and of the"
        " drafting was throttled."
    )
    return table(caption, POWER_HEADER, power_rows(run))


def links_table(run: RunSummary) -> str:
    """Return a table of the links. Empty if no link has a known capacity."""
    rows = [
        (one.name, arm.name, percent(one.up), percent(one.down))
        for arm in run.arms
        for one in sorted(arm.links, key=lambda one: -max(one.up, one.down))[:ROWS_SHOWN]
    ]
    caption = (
        "Share of the run in which each link was busy (its airtime, with radio), other traffic"
        " included; the busiest first, links without a limit left out."
    )
    return table(caption, ("link", "arm", "busy up", "busy down"), rows, arm=1)
