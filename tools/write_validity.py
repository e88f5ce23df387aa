"""Fill the tables of ``docs/validity.md`` from the records of ``benchmarks/validity.py``.

A table of the page stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; the text around it
is written by hand. ``python -m tools.write_validity`` writes the tables and the heat map anew, and
a test compares both with the records.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from tools import draw_policy
from tools.svg import write

_ROOT: Final = Path(__file__).parents[1]
PAGE: Final = _ROOT / "docs" / "validity.md"
PICTURE: Final = _ROOT / "docs" / "pictures" / "policy.svg"
RECORDS: Final = _ROOT / "benchmarks" / "records" / "validity"
_TABLE: Final = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
QUIET_SECTIONS: Final = ("real",)
"""Sections whose figures need a machine that does nothing else. A page may lack their record."""
_NOT_TAKEN: Final = "*Not taken yet: the second command at the top takes it, on a quiet machine.*"
TIME_WITHIN, TOKENS_WITHIN = 0.05, 0.02
"""Largest errors that were asked of the mean over the networks."""
Record = Mapping[str, Any]
Row = Mapping[str, Any]


def read_record(section: str, folder: Path = RECORDS) -> Record:
    """Return the record of a section. Raises ``OSError``, and ``ValueError`` if there is none."""
    path = folder / f"{section}.json"
    if not path.is_file():
        command = f"python benchmarks/validity.py --section {section}"
        raise ValueError(f"{path.name}: no record of this section yet: run {command}")
    found: Record = json.loads(path.read_text(encoding="utf-8"))
    return found


def fill(page: str, folder: Path = RECORDS) -> str:
    """Return the page with the tables that the records in ``folder`` give.

    Raises ``ValueError`` for a table that has no name in ``TABLES``."""

    def table(match: re.Match[str]) -> str:
        head, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"table {name!r} is unknown; there are {', '.join(TABLES)}")
        section, make = TABLES[name]
        if section in QUIET_SECTIONS and not (folder / f"{section}.json").is_file():
            return f"{head}\n{_NOT_TAKEN}\n\n{end}"
        return f"{head}\n{make(read_record(section, folder))}\n\n{end}"

    return _TABLE.sub(table, page)


def make_table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """Return a table in Markdown, whose last ``numbers`` columns are aligned right."""
    rules = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rules, *rows))


# --- published figures ---------------------------------------------------------------------------


def published(system: str) -> Callable[[Record], str]:
    """Return the maker of the table of one system."""

    def make(record: Record) -> str:
        rows = [row for row in record["rows"] if row["system"] == system]
        head = ("what is compared", "published", "ours", "ours over it", "what differs")
        return make_table(head, [_published_row(row) for row in rows])

    return make


def _published_row(row: Row) -> tuple[str, ...]:
    unit, digits = row["unit"], 2 if row["unit"] == "×" else 1
    ours = f"{row['ours']:.{digits}f}{unit}"
    if row["is_range"]:
        ours = f"{row['low']:.{digits}f} to {row['high']:.{digits}f}{unit}"
    elif row["low"] < row["high"]:
        ours += f" ({row['low']:.{digits}f}–{row['high']:.{digits}f})"
    return (
        row["figure"],
        f"{row['published']:.{digits}f}{unit}",
        ours,
        "given" if row["is_given"] else _show_ratio(row),
        row["why"],
    )


def _show_ratio(row: Row) -> str:
    """Return our figure over the published one: a value, or the ends of a range."""
    ends = [row[name] / row["published"] for name in ("low", "high")]
    if row["is_range"] and f"{ends[0]:.2f}" != f"{ends[1]:.2f}":
        return f"{ends[0]:.2f} to {ends[1]:.2f}"
    return f"{row['ours'] / row['published']:.2f}"


def sources(record: Record) -> str:
    """Return where the figures are published."""
    found: dict[str, dict[str, None]] = {}
    for row in record["rows"]:
        found.setdefault(row["system"], {})[row["source"]] = None
    return make_table(
        ("system", "where its figures are published"),
        [(system, "; ".join(places)) for system, places in found.items()],
    )


# --- the default policy --------------------------------------------------------------------------


def policy(record: Record) -> str:
    """Return the worst cell of each pass and round-trip time, and the counts."""
    cells = draw_policy.read_cells(record)
    rtts = sorted({one.rtt_ms for one in cells})
    rows = []
    for both_ends in (False, True):
        for pass_ms in sorted({one.pass_ms for one in cells}):
            shown = ["both ends" if both_ends else "device alone", f"{pass_ms:g}"]
            for rtt_ms in rtts:
                here = [
                    one
                    for one in cells
                    if (one.both_ends, one.pass_ms, one.rtt_ms) == (both_ends, pass_ms, rtt_ms)
                ]
                worst = max(here, key=lambda one: one.ratio)
                shown.append(f"{worst.ratio:.3f} ({worst.low:.3f}–{worst.high:.3f})")
            rows.append(shown)
    head = ("who drafts", "pass ms", *(f"RTT {ms:g}" for ms in rtts))
    limit = draw_policy.LIMIT
    above = [one for one in cells if one.is_above]
    undecided = [one for one in cells if one.is_open]
    mean = math.exp(fmean(math.log(one.ratio) for one in cells))
    text = (
        f"Of {len(cells)} cells {len(above)} are above {limit:g} beyond their interval, and"
        f" {len(undecided)} are undecided, {sum(one.ratio > limit for one in undecided)} of them"
        f" with a value above it. The geometric mean of all is {mean:.3f}."
    )
    worst_rows = [
        (
            "both ends" if one.both_ends else "device alone",
            f"{one.temperature:g}",
            *(f"{value:g}" for value in (one.pass_ms, one.step_ms, one.rtt_ms, one.acceptance)),
            f"{one.ratio:.3f} ({one.low:.3f}–{one.high:.3f})",
            one.rival,
        )
        for one in sorted(cells, key=lambda one: -one.ratio)[:8]
    ]
    columns = ("who drafts", "temperature", "pass ms", "step ms", "RTT ms", "acceptance")
    worst_head = (*columns, "default over the best", "the best")
    return "\n\n".join(
        (
            make_table(head, rows, 1 + len(rtts)),
            text,
            "The eight highest:",
            make_table(worst_head, worst_rows),
        )
    )


# --- the lead formula ----------------------------------------------------------------------------

_SERVERS: Final = {
    "none": "does not draft",
    "same": "drafts with the device's model",
    "other": "drafts with another model",
}


def explained_share(rows: Sequence[Row]) -> float:
    """Return R2 of the formula as it stands: one less the squared errors of the logarithms of
    speeds over their spread. It is negative if the mean speed would be a better answer."""
    played = [math.log(row["played"]) for row in rows]
    expected = [math.log(row["expected"]) for row in rows]
    mean = fmean(played)
    left = sum((a - b) ** 2 for a, b in zip(played, expected, strict=True))
    return 1.0 - left / sum((a - mean) ** 2 for a in played)


def lead(record: Record) -> str:
    """Return how near the formula comes, by what the server drafts."""
    rows = []
    for server, name in _SERVERS.items():
        here = [row for row in record["rows"] if row["server"] == server]
        if not here:
            continue
        errors = [row["expected"] / row["played"] - 1.0 for row in here]
        rows.append(
            (
                name,
                f"{len(here)}",
                f"{explained_share(here):.2f}",
                f"{100 * median(map(abs, errors)):.1f} %",
                f"{100 * min(errors):+.0f} to {100 * max(errors):+.0f} %",
                f"{sum(abs(one) <= 0.05 for one in errors)}",
                f"{sum(_is_outside(row) for row in here)}",
            )
        )
    head = (
        "the server",
        "cells",
        "R²",
        "median error",
        "errors",
        "within 5 %",
        "outside the interval by more than 3 %",
    )
    return make_table(head, rows, len(head) - 1)


def _is_outside(row: Row) -> bool:
    return not row["low"] / 1.03 <= row["expected"] <= row["high"] * 1.03


def lead_failures(record: Record) -> str:
    """Return the cells where the formula is furthest from what was played, by server."""
    rows = []
    for server, name in _SERVERS.items():
        here = [row for row in record["rows"] if row["server"] == server]
        here.sort(key=lambda row: -abs(math.log(row["expected"] / row["played"])))
        for row in here[:5]:
            needed = "never" if row["lead"] is None else f"{row['lead']:.1f}"
            rows.append(
                (
                    name,
                    *(f"{row[key]:g}" for key in ("pass_ms", "step_ms", "rtt_ms", "acceptance")),
                    f"{row['token_ms']:.1f}",
                    needed,
                    f"{row['expected']:.2f}",
                    f"{row['played']:.2f} ({row['low']:.2f}–{row['high']:.2f})",
                    f"{100 * (row['expected'] / row['played'] - 1):+.0f} %",
                )
            )
    columns = ("the server", "pass ms", "step ms", "RTT ms", "acceptance", "T ms", "m")
    return make_table((*columns, "formula", "played", "error"), rows)


# --- real runs -----------------------------------------------------------------------------------


def real(record: Record) -> str:
    """Return every network of the real runs beside virtual time, and the means."""
    rows = list(_real_rows(record["rows"]))
    head = (
        "network",
        "real, ms a token",
        "from the tape",
        "made-up texts",
        "real, tokens a pass",
        "from the tape",
        "made-up texts",
    )
    return make_table(head, rows, len(head) - 1)


def _real_rows(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        yield (
            row["network"],
            f"{row['real_ms']:.1f}",
            _beside(row["tape_ms"], row["real_ms"], 1),
            _beside(row["made_up_ms"], row["real_ms"], 1),
            f"{row['real_tokens']:.2f}",
            _beside(row["tape_tokens"], row["real_tokens"], 2),
            _beside(row["made_up_tokens"], row["real_tokens"], 2),
        )
    means = []
    for kind, limit in (("ms", TIME_WITHIN), ("tokens", TOKENS_WITHIN)):
        means.append("")
        for name in ("tape", "made_up"):
            errors = [row[f"{name}_{kind}"] / row[f"real_{kind}"] - 1.0 for row in rows]
            mean = fmean(errors)
            verdict = "kept" if abs(mean) <= limit else "not kept"
            means.append(f"{100 * mean:+.1f} %; {100 * limit:g} % {verdict}")
    yield ("**mean of all**", *means)


def _beside(value: float, reference: float, digits: int) -> str:
    return f"{value:.{digits}f} ({100 * (value / reference - 1):+.1f} %)"


# --- bundles -------------------------------------------------------------------------------------


def bundles(record: Record) -> str:
    """Return what each interpreter found when it played the bundles again."""
    pythons = list(dict.fromkeys(row["python"] for row in record["rows"]))
    names = list(dict.fromkeys(row["scenario"] for row in record["rows"]))
    found = {(row["scenario"], row["python"]): row for row in record["rows"]}
    rows = []
    for name in names:
        here = [found[name, python] for python in pythons]
        rows.append((name, f"{here[0]['compared']:,}", *(_differing(row) for row in here)))
    total = [f"{sum(found[name, python]['differing'] for name in names):,}" for python in pythons]
    values = sum(found[name, pythons[0]]["compared"] for name in names)
    rows.append(("**all**", f"{values:,}", *total))
    head = ("bundle", "values", *(f"differ under {python}" for python in pythons))
    return make_table(head, rows, len(head) - 1)


def _differing(row: Row) -> str:
    if row["differing"] and row["differing"] == row["rounded"]:
        return f"{row['differing']:,}, by rounding"
    return f"{row['differing']:,}"


def about(record: Record) -> str:
    """Return the command of a record, its date and its versions."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"`{record['command']}`, {record['finished_at'][:10]}; {versions}."


TABLES: Final[Mapping[str, tuple[str, Callable[[Record], str]]]] = {
    "sources": ("published", sources),
    "pearl": ("published", published("PEARL")),
    "picospec": ("published", published("PicoSpec")),
    "specedge": ("published", published("SpecEdge")),
    "dsd": ("published", published("DSD")),
    "dsdsim": ("published", published("dsdSim")),
    "vidur": ("published", published("Vidur")),
    "uara": ("published", published("Koh and Yang")),
    "published-by": ("published", about),
    "policy": ("policy", policy),
    "policy-by": ("policy", about),
    "lead": ("lead", lead),
    "lead-failures": ("lead", lead_failures),
    "lead-by": ("lead", about),
    "real": ("real", real),
    "real-by": ("real", about),
    "bundles": ("bundles", bundles),
    "bundles-by": ("bundles", about),
}
"""Tables by name: the section whose record they show, and their maker."""


def write_page(page: Path = PAGE, folder: Path = RECORDS) -> None:
    """Write the tables of a page anew, and the heat map. Raises ``OSError``, ``ValueError``."""
    page.write_text(fill(page.read_text(encoding="utf-8"), folder), encoding="utf-8")
    write(draw_policy.draw(folder / "policy.json"), PICTURE)


if __name__ == "__main__":
    write_page()
