"""Pages that are drawn from the code still say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from tools.draw_states import PAGE, page

ROOT = Path(__file__).parents[1]


def test_session_states_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.draw_states"


def test_the_life_of_a_token_names_what_there_is() -> None:
    """Classes, and methods behind a dot."""
    text = (ROOT / "docs/life-of-a-token.md").read_text(encoding="utf-8")
    code = [*ROOT.glob("edgespec/**/*.py"), *ROOT.glob("protos/*.proto")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in code)
    named = set(re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", text))
    words = {word for pair in named for word in pair if word}
    assert len(words) > 10
    unknown = {word for word in words if not re.search(rf"(class|def|message) {word}\b", source)}
    assert not unknown
    files = re.findall(r"`(edgespec/[\w/]+\.py)`", text)
    assert len(files) > 10
    assert not [name for name in files if not (ROOT / name).is_file()]
