"""Draw one text with and without drafts as a moving SVG: ``python -m tools.draw_race RECORD``.

``python benchmarks/real_pair.py race`` writes the record: one text under several ways of decoding,
and the instant at which each token arrived. Nothing else goes into the picture. The first and the
last arm are shown with their text, those between by their progress. If nothing moves (a printer, a
reader who prefers less motion), the picture shows the end of the race.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from tools.svg import MONO, SANS, picture, text, write

COLUMNS, PAUSE_S = 57, 3.0
_CELL, _ROW, _MARGIN, _PANE, _TOP, _STRIP = 6.65, 18, 16, 412, 96, 26
_WIDE: Final = 3 * _MARGIN + 2 * _PANE
# The origin of a token, and the class of its letters.
_KINDS: Final = {"accepted": "a", "corrected": "c", "decoded": "", "prompt": "p"}
_BAR_STEPS: Final = 12
_COLORS: Final = (
    ("accepted", "#1a7f37", "#57c76a"),
    ("corrected", "#cf222e", "#ff7b72"),
    ("bar", "#c24e00", "#ff9d5c"),
)
_STYLE: Final = f"""
text {{ font: 13px {SANS}; fill: var(--ink); white-space: pre; }}
.t {{ font: 11px {MONO}; }} .h {{ font-size: 15px; font-weight: 600; }}
.a {{ fill: var(--accepted); }} .c {{ fill: var(--corrected); }}
.p, .soft {{ fill: var(--soft); }} .big {{ font-size: 15px; font-weight: 600; }}
@media (prefers-reduced-motion: reduce) {{ .t {{ clip-path: none !important; }}
.big {{ visibility: visible !important; }} }}
"""


@dataclass(frozen=True, slots=True)
class Token:
    """One token; ``at_s`` counts from the first token of its text."""

    at_s: float
    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent characters of one row that arrived together."""

    row: int
    column: int
    characters: str
    kind: str
    at_s: float


def draw(path: Path) -> str:
    """Return the picture of the record at ``path``."""
    content = json.loads(path.read_text(encoding="utf-8"))
    kinds = {kind[0]: kind for kind in _KINDS}
    arms = {
        name: [
            Token(at_ms / 1e3, written, kinds[kind])
            for at_ms, written, kind in zip(
                arm["at_ms"], content["tokens"], arm["kinds"], strict=True
            )
        ]
        for name, arm in content["arms"].items()
    }
    slow, *_, fast = arms.values()
    caption = list(_caption(content, len(fast), [_each_ms(slow), _each_ms(fast)]))
    return _picture(content["prompt"], arms, caption)


def _each_ms(tokens: Sequence[Token]) -> float:
    return tokens[-1].at_s / (len(tokens) - 1) * 1e3


def _caption(content: Mapping[str, Any], tokens: int, each_ms: Sequence[float]) -> Iterator[str]:
    settings = content["settings"]
    yield (
        "green: guessed by the device, and right · red: its guess was wrong, this is the target's"
        " token · plain: the server"
    )
    yield (
        f"One text of {tokens} tokens ({settings['prompt_name']} of edgespec bench), in real time"
        f" from its first token; round trip {settings['rtt_ms']:g} ms."
        f" {each_ms[0] / each_ms[1]:.2f} times as fast."
    )
    yield (
        f"{settings['pair']}: a pass takes {settings['pass_ms']:g} ms, a draft step"
        f" {settings['draft_ms']:g} ms, and on the server {settings['server_draft_ms']:g} ms;"
        f" {content['finished_at'][:10]}"
    )


def _picture(prompt: str, arms: Mapping[str, Sequence[Token]], caption: Sequence[str]) -> str:
    length_s = max(tokens[-1].at_s for tokens in arms.values()) + PAUSE_S
    first, *between, last = arms
    panes = {name: list(_pieces(prompt, arms[name])) for name in (first, last)}
    rows = 1 + max(piece.row for pieces in panes.values() for piece in pieces)
    bottom = _TOP + _ROW * rows + 8
    slow_ms, fast_ms = _each_ms(arms[first]), _each_ms(arms[last])
    body: list[str] = []
    for number, (name, pieces) in enumerate(panes.items()):
        left = _MARGIN + number * (_PANE + _MARGIN)
        body += _pane(left, bottom, name, arms[name], length_s)
        body += _rows(pieces, left, length_s)
    for name in between:
        bottom += _STRIP
        body += _strip(bottom, name, arms[name], length_s)
    y = bottom + 30
    for line in caption:
        body.append(f'<text class="soft" x="{_MARGIN}" y="{y}">{text(line)}</text>')
        y += _ROW
    others = "".join(f", {name} {_each_ms(arms[name]):.1f}" for name in between)
    about = f"The same text: {first} takes {slow_ms:.1f} ms a token{others}, {last} {fast_ms:.1f}."
    size = (_WIDE, y)
    return picture(size, "One text, with and without drafts", about, _STYLE, body, _COLORS)


def _strip(y: float, name: str, tokens: Sequence[Token], length_s: float) -> Iterator[str]:
    """Yield one line: a name, a bar that grows with the text, and the duration."""
    left, wide = _MARGIN + 210, _WIDE - 2 * _MARGIN - 420
    yield f'<text x="{_MARGIN}" y="{y}">{text(name)}</text>'
    yield f'<rect x="{left}" y="{y - 8}" width="{wide}" height="6" rx="3" fill="var(--line)"/>'
    yield _bar(left, y - 8, wide, tokens, length_s)
    yield _draw_duration(_WIDE - _MARGIN, y, tokens, length_s)


def _bar(x: float, y: float, wide: float, tokens: Sequence[Token], length_s: float) -> str:
    every = {token.at_s: (index + 1) / len(tokens) for index, token in enumerate(tokens)}
    shown = 0.0
    widths: dict[float, float] = {}
    for at_s, share in every.items():
        if not widths or share >= min(1.0, shown + 1 / _BAR_STEPS):
            shown, widths[at_s] = share, share * wide
    return (
        f'<rect x="{x}" y="{y}" width="{wide}" height="6" rx="3" fill="var(--bar)">'
        f"{_animate_width(widths, length_s)}</rect>"
    )


def _draw_duration(x: float, y: float, tokens: Sequence[Token], length_s: float) -> str:
    """Return the duration, shown once it is known."""
    last = tokens[-1]
    done = f"{_each_ms(tokens):.1f} ms a token, {last.at_s:.1f} s"
    return (
        f'<text class="big" x="{x}" y="{y}" text-anchor="end">{done}'
        f'<animate attributeName="visibility" values="hidden;visible"'
        f' keyTimes="0;{last.at_s / length_s:.3f}" calcMode="discrete" dur="{length_s:.2f}s"'
        ' repeatCount="indefinite"/></text>'
    )


def _pane(
    left: float, bottom: float, name: str, tokens: Sequence[Token], length_s: float
) -> Iterator[str]:
    """Yield the name, a bar that grows with the text, and the duration once it is known."""
    wide = _PANE - 2 * _MARGIN
    yield (
        f'<rect x="{left}" y="16" width="{_PANE}" height="{bottom - 16}" rx="6"'
        ' fill="var(--panel)" stroke="var(--line)"/>'
    )
    x = left + _MARGIN
    yield f'<text class="h" x="{x}" y="42">{text(name)}</text>'
    yield _draw_duration(left + _PANE - _MARGIN, 42, tokens, length_s)
    yield f'<rect x="{x}" y="54" width="{wide}" height="6" rx="3" fill="var(--line)"/>'
    yield _bar(x, 54, wide, tokens, length_s)


def _pieces(prompt: str, tokens: Sequence[Token]) -> Iterator[Piece]:
    """Yield the prompt's last lines and the text, wrapped at ``COLUMNS``; characters that arrived
    together and look alike stay together."""
    row = column = 0
    held: list[str] = []
    for token in (Token(0.0, prompt, "prompt"), *tokens):
        start = column
        for character in token.text:
            if character == "\n" or column == COLUMNS:
                if held:
                    yield Piece(row, start, "".join(held), token.kind, token.at_s)
                row, column, start, held = row + 1, 0, 0, []
            if character != "\n":
                held.append(character)
                column += 1
        if held:
            yield Piece(row, start, "".join(held), token.kind, token.at_s)
        held = []


def _rows(pieces: Sequence[Piece], left: float, length_s: float) -> Iterator[str]:
    """Yield rows, each one text that is stretched to its place and uncovered as its characters
    arrive."""
    for row, some in groupby(pieces, key=lambda piece: piece.row):
        line = list(some)
        x, y, shown = left + _MARGIN, _TOP + _ROW * row, 0.0
        widths: dict[float, float] = {0.0: 0.0}
        for piece in line:
            shown += len(piece.characters) * _CELL
            widths[piece.at_s] = shown
        parts = []
        for kind, alike in groupby(line, key=lambda piece: piece.kind):
            named = f' class="{_KINDS[kind]}"' if _KINDS[kind] else ""
            characters = "".join(piece.characters for piece in alike)
            parts.append(f"<tspan{named}>{text(characters)}</tspan>")
        covered = ""
        if grows := _animate_width(widths, length_s):
            name = f"r{left:.0f}-{row}"
            covered = f' clip-path="url(#{name})"'
            yield (
                f'<clipPath id="{name}"><rect x="{x}" y="{y - _ROW + 4}" width="{shown:.1f}"'
                f' height="{_ROW}">{grows}</rect></clipPath>'
            )
        yield (
            f'<text class="t" x="{x}" y="{y}" textLength="{shown:.1f}"{covered}>'
            f"{''.join(parts)}</text>"
        )


def _animate_width(widths: Mapping[float, float], length_s: float) -> str:
    """Return the animation of a rectangle that has ``widths[at_s]`` from ``at_s`` on, in each
    round."""
    if len(widths) < 2:
        return ""
    values = ";".join(f"{width:.0f}" for width in widths.values())
    shares = (f"{at_s / length_s:.3f}" for at_s in widths)
    times = ";".join(share.rstrip("0").rstrip(".").removeprefix("0") or "0" for share in shares)
    return (
        f'<animate attributeName="width" values="{values}" keyTimes="{times}"'
        f' calcMode="discrete" dur="{length_s:.2f}s" repeatCount="indefinite"/>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a race of two devices as a moving SVG.")
    parser.add_argument("record", type=Path, help="what `real_pair.py race` wrote")
    parser.add_argument("--out", type=Path, help="default: beside the record, with .svg")
    arguments = parser.parse_args()
    path: Path = arguments.record
    write(draw(path), arguments.out or path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
