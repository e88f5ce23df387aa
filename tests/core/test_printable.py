"""Text of strangers. Oracle: written down by hand, and ``str.isprintable``."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocol.checks import MAX_MESSAGE_LENGTH, REPLACEMENT, one_line, printable


@pytest.mark.parametrize(
    "text", ["", "plain", "naïve 漢字 👩‍🚀", "two\nlines\tand a tab", "a\u200cb"]
)
def test_harmless_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    "evil",
    ["\x1b[2J", "\x9b2J", "\x07", "\r", "\b", "\x7f", "\u202e", "\u2066", "\ufeff", "\ud800"],
)
def test_control_characters_are_replaced(evil: str) -> None:
    assert printable(f"a{evil}b") == f"a{REPLACEMENT}{evil[1:]}b"


@given(st.text())
def test_nothing_that_controls_a_terminal_is_left(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert {c for c in shown if unicodedata.category(c) == "Cc"} <= {"\n", "\t"}
    assert one_line(text).isprintable() or {"\u200c", "\u200d"} & set(text)


def test_a_message_is_one_line_of_bounded_length() -> None:
    assert one_line("a\nb\r\n c") == "a b c"
    assert one_line("x" * 5000) == "x" * MAX_MESSAGE_LENGTH + "…"
