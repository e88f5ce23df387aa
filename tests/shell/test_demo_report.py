"""What the demo says at its end. Oracle: numbers worked out by hand, whole at every usual width."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from edgespec.cli.demo import Arm, report
from edgespec.config.common import SetupError

PLAIN = Arm("target only", [(1, 2)], [0.0750], tokens=192, passes=192)
DRAFTED = Arm("with drafts", [(1, 2)], [0.0300], tokens=192, passes=80, tried=600, hits=420)


def shown(width: int, plain: Arm = PLAIN, drafted: Arm = DRAFTED) -> list[str]:
    output = io.StringIO()
    report(Console(file=output, width=width), plain, drafted)
    return [re.sub(" +", " ", line).strip() for line in output.getvalue().splitlines()]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_table_keeps_its_words_and_numbers(width: int) -> None:
    lines = shown(width)
    for line in (
        "target only with drafts",
        "tokens 192 192",
        "ms/token 75.0 30.0",
        "speed-up 1.00 x 2.50 x",
        "passes/token 1.00 0.42",
        "acceptance - 70%",
        "token for token the same: yes (2 tokens)",
    ):
        assert line in lines


def test_another_text_is_an_error() -> None:
    with pytest.raises(SetupError, match="drafts changed the text"):
        shown(80, drafted=Arm("with drafts", [(1, 3)]))
