"""Draw the policy grid as a heat map: ``python -m tools.draw_policy RECORD.json --out FILE.svg``.

The record is that of ``benchmarks/validity.py``. Each cell is one world: the default policy's time
per token over that of its best fixed rival. Panels show who drafts and the temperature. Inside
a panel columns are round-trip times with acceptance rates in them, and rows are pass times with the
device's step times in them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.svg import SANS, picture, text, write

LIMIT: Final = 1.03
"""Ratio that is allowed."""
_CELL_WIDTH, _CELL_HEIGHT, _GAP = 24, 15, 4
_LEFT, _TOP, _APART_X, _APART_Y = 104, 118, 40, 84
_COLUMNS = 2
_BEST, _WORST = 0.7, 1.06
"""Ratios from which on a colour is as strong as it gets."""
_COLORS: Final = (
    ("faster", "#00805d", "#3fcf9f"),
    ("slower", "#c24e00", "#ff9d5c"),
)
_STYLE: Final = f"""
text {{ font: 12px {SANS}; fill: var(--ink); }}
.title {{ font-size: 17px; font-weight: 600; }} .soft {{ fill: var(--soft); }}
.small {{ font-size: 11px; }} .panel {{ font-weight: 600; }}
"""


@dataclass(frozen=True, slots=True)
class GridCell:
    """One cell of the grid."""

    temperature: float
    both_ends: bool
    rtt_ms: float
    step_ms: float
    pass_ms: float
    acceptance: float
    ratio: float
    """The default's time per token over that of the best rival, with its interval."""
    low: float
    high: float
    rival: str
    seeds: int

    @property
    def is_above(self) -> bool:
        """Whether the ratio is above the limit beyond its interval."""
        return self.low > LIMIT

    @property
    def is_open(self) -> bool:
        """Whether the interval includes the limit."""
        return self.low <= LIMIT < self.high


def read_cells(record: Mapping[str, Any]) -> list[GridCell]:
    """Return the cells of a record."""
    return [GridCell(*row) for row in record["rows"]]


def draw(path: Path) -> str:
    """Return the picture of the record at ``path``."""
    record = json.loads(path.read_text(encoding="utf-8"))
    cells = read_cells(record)
    temperatures = sorted({one.temperature for one in cells})
    ends = sorted({one.both_ends for one in cells})
    rtts = sorted({one.rtt_ms for one in cells})
    passes = sorted({one.pass_ms for one in cells})
    rates = sorted({one.acceptance for one in cells})
    steps = sorted({one.step_ms for one in cells})
    panel_width = len(rtts) * (len(rates) * _CELL_WIDTH + _GAP)
    panel_height = len(passes) * (len(steps) * _CELL_HEIGHT + _GAP)
    panels = [(both_ends, temperature) for temperature in temperatures for both_ends in ends]
    columns = min(_COLUMNS, len(panels))
    width = _LEFT + columns * (panel_width + _APART_X) + 8
    height = _TOP + math.ceil(len(panels) / columns) * (panel_height + _APART_Y) - 40
    title = "The default policy's time per token over that of the best fixed one"
    body = [f'<text class="title" x="24" y="34">{title}</text>']
    body += _legend()
    for index, (both_ends, temperature) in enumerate(panels):
        row, column = divmod(index, columns)
        x = _LEFT + column * (panel_width + _APART_X)
        y = _TOP + row * (panel_height + _APART_Y)
        here = [
            one for one in cells if (one.both_ends, one.temperature) == (both_ends, temperature)
        ]
        who = "both ends draft" if both_ends else "the device alone drafts"
        law = f"temperature {temperature:g}" if temperature else "greedy"
        body.append(f'<text class="panel" x="{x}" y="{y - 10}">{who}, {law}</text>')
        body += _panel(here, (x, y), (rtts, rates, passes, steps), labels=column == 0)
        body += _below((x, y + panel_height), rtts, rates)
    worst = max(cells, key=lambda one: one.ratio)
    about = (
        f"{len(cells)} cells; {sum(one.is_above for one in cells)} above {LIMIT:g} beyond their"
        f" interval, {sum(one.is_open for one in cells)} undecided; the highest is"
        f" {worst.ratio:.3f} at a pass of {worst.pass_ms:g} ms, a step of {worst.step_ms:g} ms, a"
        f" round trip of {worst.rtt_ms:g} ms and an acceptance of {worst.acceptance:g}."
    )
    return picture((width, height), title, about, _STYLE, body, _COLORS)


_Axes = tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]


def _panel(
    cells: Sequence[GridCell], place: tuple[int, int], axes: _Axes, *, labels: bool
) -> Iterator[str]:
    rtts, rates, passes, steps = axes
    for one in cells:
        x = place[0] + rtts.index(one.rtt_ms) * (len(rates) * _CELL_WIDTH + _GAP)
        x += rates.index(one.acceptance) * _CELL_WIDTH
        y = place[1] + passes.index(one.pass_ms) * (len(steps) * _CELL_HEIGHT + _GAP)
        y += steps.index(one.step_ms) * _CELL_HEIGHT
        yield from _cell(one, x, y)
    if not labels:
        return
    for index, pass_ms in enumerate(passes):
        y = place[1] + index * (len(steps) * _CELL_HEIGHT + _GAP)
        middle = y + len(steps) * _CELL_HEIGHT / 2 + 4
        yield f'<text class="soft" x="24" y="{middle:g}">pass {pass_ms:g}</text>'
        for inner, step_ms in enumerate(steps):
            yield (
                f'<text class="soft small" x="{place[0] - 8}"'
                f' y="{y + inner * _CELL_HEIGHT + 11}" text-anchor="end">{step_ms:g}</text>'
            )


def _below(place: tuple[int, int], rtts: Sequence[float], rates: Sequence[float]) -> Iterator[str]:
    """Yield the names of the columns."""
    for index, rtt_ms in enumerate(rtts):
        x = place[0] + index * (len(rates) * _CELL_WIDTH + _GAP)
        for inner, rate in enumerate(rates):
            yield (
                f'<text class="soft small" x="{x + (inner + 0.5) * _CELL_WIDTH:g}"'
                f' y="{place[1] + 11}" text-anchor="middle">{f"{rate:g}".lstrip("0")}</text>'
            )
        yield (
            f'<text class="soft" x="{x + len(rates) * _CELL_WIDTH / 2:g}" y="{place[1] + 28}"'
            f' text-anchor="middle">RTT {rtt_ms:g}</text>'
        )


def _cell(one: GridCell, x: float, y: float) -> Iterator[str]:
    about = (
        f"RTT {one.rtt_ms:g}, pass {one.pass_ms:g}, step {one.step_ms:g}, acceptance"
        f" {one.acceptance:g}: {one.ratio:.3f} ({one.low:.3f} to {one.high:.3f}) of {one.rival}"
    )
    width, height = _CELL_WIDTH - 1, _CELL_HEIGHT - 1
    name, strength = shade(one.ratio)
    edge = ' stroke="var(--ink)" stroke-width="1.5"' if one.is_above else ""
    yield (
        f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{height}" fill="var(--panel)"/>'
        f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{height}" fill="var(--{name})"'
        f' fill-opacity="{strength:.2f}"{edge}><title>{text(about)}</title></rect>'
    )
    if one.is_open:
        yield (
            f'<path d="M{x + width / 2 - 2:g} {y + height / 2:g}h4" stroke="var(--ink)"'
            ' stroke-width="2"/>'
        )


def shade(ratio: float) -> tuple[str, float]:
    """Return the colour of a ratio and its strength from 0 to 1. A ratio of 1 has none."""
    if ratio <= 1.0:
        return "faster", min(1.0, (1.0 - ratio) / (1.0 - _BEST))
    return "slower", min(1.0, (ratio - 1.0) / (_WORST - 1.0))


def _legend() -> Iterator[str]:
    x = 24.0
    for ratio in (0.7, 0.8, 0.9, 1.0, 1.01, 1.03, 1.06):
        name, strength = shade(ratio)
        yield (
            f'<rect x="{x:g}" y="50" width="34" height="16" fill="var(--panel)"/>'
            f'<rect x="{x:g}" y="50" width="34" height="16" fill="var(--{name})"'
            f' fill-opacity="{strength:.2f}"/>'
            f'<text class="soft small" x="{x + 17:g}" y="80" text-anchor="middle">{ratio:g}</text>'
        )
        x += 36.0
    yield (
        f'<text class="soft small" x="{x + 10:g}" y="62">dash: the interval includes {LIMIT:g};'
        " frame: above it beyond the interval</text>"
        f'<text class="soft small" x="{x + 10:g}" y="78">rows: pass and device step in ms; columns:'
        " round trip in ms and acceptance</text>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write(draw(options.record), options.out)


if __name__ == "__main__":
    main()
