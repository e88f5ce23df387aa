"""The shared parts of the README's pictures: a panel in the reader's own colours.

A picture fetches nothing, not even a font, and brings its own background, because a page can be
dark where the reader's system is light. Its colours follow ``prefers-color-scheme``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from edgespec.core.protocol.checks import make_printable

SANS: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO: Final = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# Name, in the light, in the dark.
COLORS: Final[tuple[tuple[str, str, str], ...]] = (
    ("paper", "#ffffff", "#14171b"),
    ("panel", "#f5f6f8", "#1d2126"),
    ("ink", "#1b1f24", "#e8eaed"),
    ("soft", "#59636e", "#a3acb7"),
    ("line", "#d4d9df", "#363c44"),
)


def text(value: str) -> str:
    """Escape ``value`` for a place between two tags, without characters that XML or a reader cannot
    take."""
    return escape(make_printable(value))


def picture(
    size: tuple[int, int],
    title: str,
    description: str,
    style: str,
    body: Iterable[str],
    colors: Iterable[tuple[str, str, str]] = (),
) -> str:
    """Return a whole SVG of ``size`` pixels. ``title`` and ``description`` are for readers who
    cannot see it. ``colors`` are added to ``COLORS``; each is a CSS variable of its name."""
    width, height = size
    both = (*COLORS, *colors)
    light = " ".join(f"--{name}: {color};" for name, color, _ in both)
    dark = " ".join(f"--{name}: {color};" for name, _, color in both)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" role="img" aria-labelledby="title about">',
            f'<title id="title">{text(title)}</title>',
            f'<desc id="about">{text(description)}</desc>',
            f"<style>svg {{ {light} }}",
            f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}",
            f"{style.strip()}</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"'
            ' fill="var(--paper)" stroke="var(--line)"/>',
            *body,
            "</svg>\n",
        )
    )


def write(drawn: str, out: Path) -> None:
    """Write a picture to its place, and print its size. Raises ``OSError``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(drawn, encoding="utf-8", newline="\n")
    print(f"{out}: {len(drawn.encode()) / 1e3:.1f} kB")
