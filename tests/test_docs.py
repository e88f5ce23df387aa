"""Pages that are drawn from the code still say what the code says."""

from __future__ import annotations

from tools.draw_states import PAGE, page


def test_session_states_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.draw_states"
