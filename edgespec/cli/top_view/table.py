"""A reading on a terminal of any width: notes go first, then they go; a number never does."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from edgespec.cli.top_view.reading import Reading

_ROOM_FOR_NOTES = 60


def rendered(reading: Reading, width: int, trouble: str = "") -> RenderableType:
    """``trouble`` is shown in place of the state: the reading is the last that there was."""
    table = Table.grid(padding=(0, 2))
    with_notes = width >= _ROOM_FOR_NOTES
    names = max((len(row.name) for row in reading.rows), default=0)
    table.add_column("", style="dim", overflow="fold", min_width=names if with_notes else None)
    values = max((len(row.value) for row in reading.rows), default=0)
    table.add_column("", justify="right", no_wrap=True, min_width=values)
    if with_notes:
        table.add_column("", style="dim", overflow="fold")
    for row in reading.rows:
        value = Text(row.value, "dim" if trouble else "bold")
        cells = [Text(row.name), value, Text(row.note)]
        table.add_row(*(cells if with_notes else cells[:2]))
    state = Text(trouble or reading.state, "red" if trouble or not reading.well else "green")
    parts: list[RenderableType] = [Text(reading.title, "bold"), Text("")]
    if state.plain:
        parts.insert(1, state)
    return Group(*parts, table)
