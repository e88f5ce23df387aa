"""Draw ``docs/session-states.md`` from the tables that the sessions enforce."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgespec.core.device.events import DRAFT_MOVES
from edgespec.core.protocol.checks import State
from edgespec.core.verifier.session_events import VERIFY_MOVES

PAGE = Path(__file__).parents[1] / "docs" / "session-states.md"
HEAD = """# Session states

The states of a session on both ends, and every move between them.
Drawn from the tables in `edgespec/core/device/events.py` and
`edgespec/core/verifier/session_events.py` by `python -m tools.draw_states`; a test fails when this
page and the code differ. A move that is not listed is an assertion failure.
"""


def page() -> str:
    parts = [
        HEAD,
        "## The device: `DraftSession`\n",
        *_section(DRAFT_MOVES),
        "\n## The verifier: `VerifySession`\n",
        "Attachment to a stream is apart from these states: a detached session keeps its state and "
        "runs no pass until its lease ends or the device comes back.\n",
        *_section(VERIFY_MOVES),
    ]
    return "\n".join(parts)


def _section(moves: Mapping[tuple[State, State], str]) -> list[str]:
    diagram: list[str] = [f"    {source.value} --> {target.value}" for source, target in moves]
    rows: list[str] = [
        f"| {source.value} | {target.value} | {why} |" for (source, target), why in moves.items()
    ]
    return [
        "```mermaid",
        "stateDiagram-v2",
        *diagram,
        "```\n",
        "| from | to | on |",
        "| --- | --- | --- |",
        *rows,
        "",
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
