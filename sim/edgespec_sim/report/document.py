"""An HTML page with its styles, scripts and data inside; it asks nothing of any network.

Figures are plain data for plotly.js (``{"data": [...], "layout": {...}}``), which lies beside the
pages, once a folder. A page without figures needs no file but itself, and one that has lost its
neighbour says so in place of each plot. The page follows the reader's light or dark scheme, and
prints in the light one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from edgespec_sim.report.style import SCRIPT, STYLE

LIBRARY: Final = "plotly.min.js"
"""The file beside a page."""
_SOURCE: Final = f'<script id="plotly" src="{LIBRARY}"></script>\n'


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot and what it says, for those who do not see it."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    caption: str
    """Below the plot."""
    label: str
    """What is plotted, read out in place of the plot."""


class ReportError(ValueError):
    """A page cannot be drawn; the message says what to install."""


class Document:
    """Collects the page from top to bottom; ``html`` gives it whole."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._body: list[str] = []
        self._figures: list[Figure] = []

    def add(self, html: str) -> None:
        """Trusted HTML: what comes from outside must have been escaped."""
        self._body.append(html)

    def heading(self, text: str, level: int = 2) -> None:
        self.add(f"<h{level}>{escape(text)}</h{level}>")

    def paragraph(self, text: str, kind: str = "") -> None:
        attribute = f' class="{kind}"' if kind else ""
        self.add(f"<p{attribute}>{escape(text)}</p>")

    def items(self, texts: Sequence[str]) -> None:
        if texts:
            self.add("<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>")

    def folded(self, summary: str, text: str) -> None:
        """Long plain text behind a line to click."""
        shown = f"<summary>{escape(summary)}</summary><pre>{escape(text)}</pre>"
        self.add(f"<details>{shown}</details>")

    def figure(self, figure: Figure) -> None:
        number = len(self._figures)
        self._figures.append(figure)
        height = figure.layout.get("height", 360)
        self.add(
            f'<figure><div class="plot" id="plot-{number}" role="img" '
            f'aria-label="{escape(figure.label, quote=True)}" style="min-height:{height}px">'
            "<noscript>This plot needs JavaScript; the tables hold its numbers.</noscript></div>"
            f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
        )

    def html(self) -> str:
        title = escape(self.title)
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            '<link rel="icon" href="data:,">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"<h1>{title}</h1>\n" + "\n".join(self._body) + "\n</main>\n"
            f"{self._scripts()}</body>\n</html>\n"
        )

    def _scripts(self) -> str:
        if not self._figures:
            return ""
        plots = [{"data": figure.data, "layout": figure.layout} for figure in self._figures]
        # "<" would let a name end the script; JSON may spell any character by its number.
        data = json.dumps(plots, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        return f"{_SOURCE}<script>const FIGURES = {data};\n{SCRIPT}</script>\n"


def write_page(path: Path, html: str) -> None:
    """Write a page, and the library that its figures need beside it.

    Raises ``OSError``, and ``ReportError`` if there are figures and plotly is missing.
    """
    if _SOURCE in html:
        library = _library()
        beside = path.parent / LIBRARY
        if not beside.is_file() or beside.read_text(encoding="utf-8") != library:
            beside.write_text(library, encoding="utf-8")
    path.write_text(html, encoding="utf-8")


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        why = "the pages of reports need plotly: pip install 'edgespec[sim]'"
        raise ReportError(why) from None
    return str(get_plotlyjs())
