"""Draw a bench as SVG: ``python -m tools.draw_bench RESULT.json --out FILE.svg``.

The picture shows time per token over the link's round-trip time, one curve per arm. Every number of
the picture and its caption comes from the file that ``edgespec bench --json RESULT.json`` or
``python benchmarks/real_pair.py speed --record RESULT.json`` wrote.
``--keep FILE`` writes the part of it that is committed beside the picture: one row per arm and
round-trip time.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec.bench.report import write_count
from tools.svg import SANS, picture, text, write

_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 62, 640, 74, 414
# The place of 0 ms of round-trip time: right of the numbers, so that labels have room.
_ORIGIN: Final = _LEFT + 20
_CAPTION_COLUMNS, _CAPTION_ROW = 132, 17
_LABEL_ROW, _LABEL_APART, _MARK = 24, 44, 6
_TICKS_MAX, _TICK_APART = 7, 26
# Name for a reader, shape of its points, and its colours in the light and in the dark (Okabe and
# Ito 2008, made lighter or darker until they can be read on the panel).
_ARMS: Final[Mapping[Arm, tuple[str, str, str, str]]] = {
    Arm.TARGET_ONLY: ("target-only streaming", "square", "#6b737d", "#a3acb7"),
    Arm.VANILLA: ("stop-and-wait", "diamond", "#0072b2", "#62b0e8"),
    Arm.PEARL: ("PEARL, adaptive γ", "up", "#00805d", "#3fcf9f"),
    Arm.WINDOWED: ("windowed chain", "down", "#b0508c", "#e6a0c8"),
    Arm.EDGESPEC: ("edgespec, device alone", "bar", "#8a6a00", "#dfb84a"),
    Arm.SERVER_DRAFT: ("the server alone", "plus", "#1b1f24", "#e8eaed"),
    Arm.BOTH: ("edgespec, both", "circle", "#c24e00", "#ff9d5c"),
}
_OURS_LAST: Final = sorted(Arm, key=lambda arm: arm.is_ours)
# Columns of a row that the picture shows, besides its interval.
_KEPT: Final = ("arm", "rtt_ms", "mismatches", "tpot_ms_mean", "speedup")
# Other columns that a page shows, in tables.
_LEFT_OUT: Final = ("beside", "server_drafts")
_SETTINGS: Final = frozenset(
    "repeats prompt_names max_tokens vanilla_gamma target_name model draft_name draft temperature"
    " timing".split()
)
_OURS: Final = ' class="ours"'
_SHAPES: Final[Mapping[str, str]] = {
    "square": "m-4 -4h8v8h-8z",
    "diamond": "m0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
    "up": "m0 -5.5l5 9.5h-10z",
    "down": "m0 5.5l5 -9.5h-10z",
    "plus": "m-2 -6h4v4h4v4h-4v4h-4v-4h-4v-4h4z",
    "bar": "m-6 -2.5h12v5h-12z",
    "circle": "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
}
_STYLE: Final = f"""
text {{ font: 13px {SANS}; fill: var(--ink); }}
.title {{ font-size: 17px; font-weight: 600; }} .soft {{ fill: var(--soft); }}
.small {{ font-size: 12px; }} .ours {{ font-weight: 600; }}
.speed {{ font-weight: 600; paint-order: stroke; stroke: var(--paper); stroke-width: 4px; }}
"""


@dataclass(frozen=True, slots=True)
class Point:
    """One arm at one round-trip time: the mean over the texts, and its interval."""

    rtt_ms: float
    token_ms: float
    low_ms: float
    high_ms: float
    speedup: float | None
    """Speed-up over target-only at the same round-trip time, or None without it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One arm, by rising round-trip time."""

    arm: Arm
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    """A scale from milliseconds to pixels; both axes begin at 0."""

    rtt_ms: float
    token_ms: float

    def x(self, rtt_ms: float) -> float:
        return _ORIGIN + (_RIGHT - _ORIGIN) * rtt_ms / self.rtt_ms

    def y(self, token_ms: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * token_ms / self.token_ms


def draw(path: Path) -> str:
    """Return the picture of the result at ``path``."""
    content = json.loads(path.read_text(encoding="utf-8"))
    caption = [row for line in _caption(content) for row in textwrap.wrap(line, _CAPTION_COLUMNS)]
    return _picture(_curves(content["summary"]), caption)


def _curves(summary: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Return the curves in the order of the file, without arms that have no measured time."""
    points: dict[Arm, list[Point]] = {}
    for row in summary:
        if row["tpot_ms_mean"] is None:
            continue
        low_ms, high_ms = row["interval"]["tpot_ms_mean"]
        point = Point(row["rtt_ms"], row["tpot_ms_mean"], low_ms, high_ms, row["speedup"])
        points.setdefault(Arm(row["arm"]), []).append(point)
    return [
        Curve(arm, tuple(sorted(some, key=lambda point: point.rtt_ms)))
        for arm, some in points.items()
    ]


def kept(content: Mapping[str, Any]) -> str:
    """Return the shown part of a bench's result as JSON, one row per line."""
    settings = {key: value for key, value in content["settings"].items() if key in _SETTINGS}
    tokens = sum(int(row["tokens"]) for row in content["results"])
    summary = [
        {key: _rounded(row[key]) for key in _KEPT}
        | {"interval": {"tpot_ms_mean": _rounded(row["interval"]["tpot_ms_mean"])}}
        for row in content["summary"]
    ]
    # The machine's path of the result is left out.
    command = re.sub(r" --json \S+", "", content["command"])
    rest = {"command": command, "settings": settings, "results": [{"tokens": tokens}]}
    parts = [
        f"{json.dumps(name)}: {_compact(value)}"
        for name, value in {**content, **rest}.items()
        if name not in ("summary", *_LEFT_OUT)
    ]
    lines = ",\n ".join(_compact(row) for row in summary)
    return "{" + ",\n".join([*parts, f'"summary": [\n {lines}\n]']) + "}\n"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def _caption(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the caption: what is drawn, the models, the place and date, and the
    command."""
    settings = content["settings"]
    repeats, prompts = int(settings["repeats"]), len(settings["prompt_names"])
    gammas = ", ".join(f"{g} at {rtt} ms" for rtt, g in settings["vanilla_gamma"].items())
    yield (
        f"Mean time per token after the first, over {write_count(prompts, 'prompt')} of"
        f" {settings['max_tokens']} tokens and {write_count(repeats, 'repeat')}; bands: 95 %"
        " intervals over the texts; ×: speed-up over target-only streaming at the same round-trip"
        " time." + (f" Draft length of stop-and-wait: {gammas}." if gammas else "")
    )
    tokens = sum(int(row["tokens"]) for row in content["results"])
    differ = sum(int(row["mismatches"]) for row in content["summary"])
    yield (
        f"Target {settings['target_name'] or settings['model']}, draft"
        f" {settings['draft_name'] or settings['draft']}, temperature"
        f" {settings['temperature']:g}; {settings['timing']}. Tokens that differ from the target's"
        f" own: {differ:,} of {tokens:,}."
    )
    # A record of virtual time has no machine, since no figure depends on it.
    where = ""
    if "machine" in content:
        machine = content["machine"]
        load = f"load {machine['load_average']:.1f}"
        where = f"{machine['processor']}, {machine['cpu_count']} CPUs, {load}; "
    yield (
        f"{where}edgespec {content['versions']['edgespec']}; {content['finished_at'][:10]};"
        f" {content['command']}"
    )
    if content.get("interrupted"):
        yield "The bench was interrupted: only what all arms had finished is drawn."
    if "failure" in content:
        yield f"The bench ended in an error: {content['failure']}"


def _picture(curves: Sequence[Curve], caption: Sequence[str]) -> str:
    every = [point for curve in curves for point in curve.points]
    step_ms = _step(max(point.high_ms for point in every))
    top_ms = step_ms * math.ceil(max(point.high_ms for point in every) * 1.02 / step_ms)
    rtts_ms = sorted({point.rtt_ms for point in every})
    scale = _Scale(max(rtts_ms[-1], 1.0), max(top_ms, step_ms))
    title = "Time per token by the link's round-trip time"
    body = [f'<text class="title" x="24" y="34">{title}</text>']
    body += _axes(scale, step_ms, rtts_ms)
    ours_last = sorted(curves, key=lambda curve: _OURS_LAST.index(curve.arm))
    for curve in ours_last:
        body += _band(curve, scale)
    for curve in ours_last:
        body += _curve(curve, scale)
    if ours_last[-1].arm.is_ours:
        body += _speedups(ours_last[-1], curves, scale)
    body += _legend(curves, scale)
    below = _BOTTOM + 74
    for number, line in enumerate(caption):
        y = below + _CAPTION_ROW * number
        body.append(f'<text class="soft small" x="24" y="{y}">{text(line)}</text>')
    size = (_WIDTH, below + _CAPTION_ROW * len(caption) + 4)
    said = "; ".join(
        f"{_ARMS[curve.arm][0]}: "
        + ", ".join(f"{point.token_ms:.1f} at {point.rtt_ms:g}" for point in curve.points)
        for curve in curves
    )
    about = f"Milliseconds a token at a round-trip time in milliseconds. {said}."
    colors = [(curve.arm.value, *_ARMS[curve.arm][2:]) for curve in curves]
    return picture(size, title, about, _STYLE, body, colors)


def _axes(scale: _Scale, step_ms: float, rtts_ms: Sequence[float]) -> Iterator[str]:
    for number in range(round(scale.token_ms / step_ms) + 1):
        y = scale.y(number * step_ms)
        yield f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="var(--line)"/>'
        yield (
            f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{number * step_ms:g}</text>"
        )
    last_x = -math.inf
    for rtt_ms in rtts_ms:
        x = scale.x(rtt_ms)
        yield f'<path d="M{x:.1f} {_BOTTOM}v5" stroke="var(--soft)"/>'
        if x - last_x >= _TICK_APART:
            yield (
                f'<text class="soft" x="{x:.1f}" y="{_BOTTOM + 20}" text-anchor="middle">'
                f"{rtt_ms:g}</text>"
            )
            last_x = x
    yield f'<text class="soft" x="24" y="{_TOP - 16}">ms a token</text>'
    yield (
        f'<text class="soft" x="{(_LEFT + _RIGHT) / 2:g}" y="{_BOTTOM + 42}"'
        ' text-anchor="middle">round-trip time, ms</text>'
    )


def _band(curve: Curve, scale: _Scale) -> Iterator[str]:
    """Yield the intervals: an area, and a bar at each point."""
    high = [f"{scale.x(p.rtt_ms):.1f} {scale.y(p.high_ms):.1f}" for p in curve.points]
    low = [f"{scale.x(p.rtt_ms):.1f} {scale.y(p.low_ms):.1f}" for p in reversed(curve.points)]
    color = f"var(--{curve.arm.value})"
    yield f'<path d="M{"L".join(high + low)}z" fill="{color}" fill-opacity="0.16"/>'
    bars = "".join(
        f"M{scale.x(p.rtt_ms):.1f} {scale.y(p.low_ms):.1f}V{scale.y(p.high_ms):.1f}"
        for p in curve.points
    )
    yield f'<path d="{bars}" stroke="{color}" stroke-width="1.5"/>'


def _curve(curve: Curve, scale: _Scale) -> Iterator[str]:
    places = [(scale.x(p.rtt_ms), scale.y(p.token_ms)) for p in curve.points]
    ours = curve.arm.is_ours
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield (
        f'<path d="M{line}" fill="none" stroke="var(--{curve.arm.value})"'
        f' stroke-width="{3 if ours else 1.8}"/>'
    )
    yield _marks(curve.arm, places)


def _speedups(ours: Curve, curves: Sequence[Curve], scale: _Scale) -> Iterator[str]:
    """Yield the speed-ups: below our points, and below other arms' points right under ours; above a
    point beside a neighbour."""
    last_x = -math.inf
    for point in ours.points:
        if point.speedup is None:
            continue
        x, y = scale.x(point.rtt_ms), scale.y(point.token_ms)
        below = x - last_x >= _LABEL_APART
        label_y = y + _LABEL_ROW if below else y - _LABEL_ROW / 2
        if below:
            beside = (p for curve in curves for p in curve.points if p.rtt_ms == point.rtt_ms)
            for other_y in sorted(scale.y(other.token_ms) for other in beside):
                if y < other_y < label_y + _MARK:
                    label_y = other_y + _LABEL_ROW
        yield (
            f'<text class="speed" x="{x:.1f}" y="{label_y:.1f}" text-anchor="middle">'
            f"{point.speedup:.2f}×</text>"
        )
        last_x = x if below else -math.inf


def _legend(curves: Sequence[Curve], scale: _Scale) -> Iterator[str]:
    """Yield the names beside the ends of the curves, from top to bottom in the order of the
    ends."""
    ends = sorted((scale.y(curve.points[-1].token_ms), curve.arm.value) for curve in curves)
    tops: list[float] = []
    for y, _ in ends:
        tops.append(max(y, tops[-1] + _LABEL_ROW) if tops else y)
    over = max(0.0, tops[-1] - _BOTTOM)
    for (_, name), y in zip(ends, tops, strict=True):
        arm = Arm(name)
        yield _marks(arm, [(_RIGHT + 32, y - over)])
        yield (
            f'<text{_OURS if arm.is_ours else ""} x="{_RIGHT + 44}"'
            f' y="{y - over + 4.5:.1f}">{text(_ARMS[arm][0])}</text>'
        )


def _marks(arm: Arm, places: Iterable[tuple[float, float]]) -> str:
    shape = _SHAPES[_ARMS[arm][1]]
    path = "".join(f"M{x:.1f} {y:.1f}{shape}" for x, y in places)
    return f'<path d="{path}" fill="var(--{arm.value})" stroke="var(--paper)"/>'


def _step(highest: float) -> float:
    """Return the distance between the lines of the grid: 1, 2 or 5 times a power of ten."""
    if highest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest / _TICKS_MAX))
    return next(
        factor * power for factor in (1, 2, 5, 10) if highest <= _TICKS_MAX * factor * power
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw time per token over round-trip time as SVG.")
    parser.add_argument("record", type=Path, help="what `edgespec bench --json RECORD` wrote")
    parser.add_argument("--out", type=Path, help="default: beside the record, with .svg")
    parser.add_argument("--keep", type=Path, help="write what is to be committed of it")
    arguments = parser.parse_args()
    path: Path = arguments.record
    out = arguments.out or path.with_suffix(".svg")
    if arguments.keep:  # fewer digits, and the picture is compared with the committed one
        write(kept(json.loads(path.read_text(encoding="utf-8"))), arguments.keep)
        path = arguments.keep
    write(draw(path), out)


if __name__ == "__main__":
    main()
