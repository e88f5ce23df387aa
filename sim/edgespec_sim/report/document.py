"""An HTML page that contains its styles, scripts and data, and loads nothing from a network.

Figures are plain data for plotly.js (``{"data": [...], "layout": {...}}``), which lies beside the
pages, one copy per folder. A page without figures needs no other file. A page whose copy of
plotly.js is missing shows a message in place of each plot. The page follows the reader's light or
dark scheme, and prints in the light one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from edgespec_sim import run_summary as rs

# The style of the pages, and the script that draws their plots. Colours are variables, so that the
# plots can read those of the active scheme.
_STYLE, _SCRIPT = (
    "\n" + Path(__file__).with_name(name).read_text(encoding="utf-8")
    for name in ("page.css", "page.js")
)
LIBRARY: Final = "plotly.min.js"
"""Name of the plotly.js file beside a page."""
_SOURCE: Final = f'<script id="plotly" src="{LIBRARY}"></script>\n'


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with a description for readers who cannot see it."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    caption: str
    """Text below the plot."""
    label: str
    """Text that a screen reader reads in place of the plot."""


class ReportError(ValueError):
    """A report cannot be written. The message says what is missing or in the way."""


class Document:
    """Collects a page from top to bottom; ``html`` returns the whole page."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._body: list[str] = []
        self._figures: list[Figure] = []

    def add(self, html: str) -> None:
        """Add trusted HTML; text from outside must have been escaped."""
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
        """Add long plain text that a click unfolds."""
        shown = f"<summary>{escape(summary)}</summary><pre>{escape(text)}</pre>"
        self.add(f"<details>{shown}</details>")

    @contextmanager
    def fold(self, heading: str) -> Iterator[None]:
        """Put everything that is added inside the block behind a heading that a click unfolds."""
        self.add(f'<details class="part"><summary><h2>{escape(heading)}</h2></summary>')
        yield
        self.add("</details>")

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
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
            f"<h1>{title}</h1>\n" + "\n".join(self._body) + "\n</main>\n"
            f"{self._scripts()}</body>\n</html>\n"
        )

    def _scripts(self) -> str:
        if not self._figures:
            return ""
        plots = [{"data": figure.data, "layout": figure.layout} for figure in self._figures]
        # "<" would let a name end the script; JSON may write any character by its number.
        data = json.dumps(plots, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        return f"{_SOURCE}<script>const FIGURES = {data};\n{_SCRIPT}</script>\n"


def write_page(path: Path, html: str) -> None:
    """Write a page, and beside it the library that its figures need.

    Raises ``OSError``, and ``ReportError`` if there are figures and plotly is not installed."""
    if _SOURCE in html:
        library = _read_library()
        beside = path.parent / LIBRARY
        if not beside.is_file() or beside.read_text(encoding="utf-8") != library:
            beside.write_text(library, encoding="utf-8")
    path.write_text(html, encoding="utf-8")


def _read_library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ReportError("the pages of reports need plotly: pip install 'edgespec[sim]'") from None
    return str(get_plotlyjs())


# --- a run's arms and requests as CSV (RFC 4180), one row each, in base units ------------------
# Columns are named after the fields of ``run_summary.py``. Cells without a measurement are empty.

Cell = str | int | float | bool | None


def arms_csv(run: rs.RunSummary) -> str:
    """Return the arms as CSV, each followed by its groups; ``group`` is empty for the whole arm."""
    rows = []
    for arm in run.arms:
        rows.append({**arm_cells(arm), "group": "", **group_cells(arm.all)})
        for name, group in arm.groups.items():
            rows.append({"arm": arm.arm, "group": name, **group_cells(group)})
    return csv_text(rows)


def requests_csv(run: rs.RunSummary) -> str:
    """Return the requests of all arms that the summary kept, as CSV."""
    rows = [{"arm": arm.arm, **asdict(row)} for arm in run.arms for row in arm.rows]
    return csv_text(rows, ("arm", *(field.name for field in fields(rs.RequestRow))))


def csv_text(rows: Sequence[Mapping[str, Cell]], header: Sequence[str] = ()) -> str:
    """Return CSV with the columns of ``header``, then all other keys in order of appearance."""
    names = list(dict.fromkeys([*header, *(key for row in rows for key in row)]))
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, names, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def arm_cells(arm: rs.ArmSummary) -> dict[str, Cell]:
    busy = [one.utilisation for one in arm.verifiers]
    return {
        "arm": arm.arm,
        "label": arm.label,
        "speedup": arm.speedup,
        "speedup_low": None if arm.speedup_interval is None else arm.speedup_interval[0],
        "speedup_high": None if arm.speedup_interval is None else arm.speedup_interval[1],
        "mean_utilisation": fmean(busy) if busy else None,
    }


def group_cells(group: rs.GroupSummary) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for field in fields(group):
        value = getattr(group, field.name)
        if field.name in ("ttft_s", "tpot_s", "itl_s"):
            cells |= _spread_cells(field.name, value)
        else:
            cells[field.name] = value
    return cells


def _spread_cells(name: str, spread: rs.Spread | None) -> dict[str, Cell]:
    names = [f"{name}_mean", *(f"{name}_p{round(100 * share)}" for share in rs.QUANTILES)]
    if spread is None:
        return dict.fromkeys(names)
    return dict(zip(names, (spread.mean, *spread.quantiles), strict=True))
