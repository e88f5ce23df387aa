"""Text of strangers. Oracle: written down by hand, and ``str.isprintable``."""

from __future__ import annotations

import pytest

from edgespec.core.protocol.checks import MAX_MESSAGE_LENGTH, REPLACEMENT, one_line, printable


@pytest.mark.parametrize(
    "evil",
    ["\x1b[2J", "\x9b2J", "\x07", "\r", "\b", "\x7f", "\u202e", "\u2066", "\ufeff", "\ud800"],
)
def test_control_characters_are_replaced(evil: str) -> None:
    assert printable(f"a{evil}b") == f"a{REPLACEMENT}{evil[1:]}b"


def test_a_message_is_one_line_of_bounded_length() -> None:
    assert one_line("a\nb\r\n c") == "a b c"
    assert one_line("x" * 5000) == "x" * MAX_MESSAGE_LENGTH + "…"
