"""The committed prefix. Oracle: plain lists; hashes agree exactly when the tokens do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocol.tree import CommittedPrefix

_tokens = st.lists(st.integers(0, 1 << 20), max_size=12)


@given(_tokens, _tokens, _tokens)
def test_however_it_grew_it_is_the_same(prompt: list[int], one: list[int], two: list[int]) -> None:
    grown = CommittedPrefix(prompt, one)
    grown.extend(two)
    whole = CommittedPrefix(prompt, one + two)
    assert grown.tokens == whole.tokens == prompt + one + two
    assert grown.output == one + two
    assert grown.length == len(grown.tokens)
    hashes = [grown.hash_at(length) for length in range(grown.length + 1)]
    assert hashes == [whole.hash_at(length) for length in range(whole.length + 1)]
    assert all(0 <= value < 1 << 32 for value in hashes)


@given(_tokens, st.data())
def test_another_token_is_another_hash_from_there(tokens: list[int], data: st.DataObject) -> None:
    if not tokens:
        return
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    one, other = CommittedPrefix(tokens), CommittedPrefix(changed)
    for length in range(len(tokens) + 1):
        assert (one.hash_at(length) == other.hash_at(length)) is (length <= at)


def test_order_and_length_count() -> None:
    texts = [(), (0,), (0, 0), (1,), (1, 2), (2, 1), (1, 2, 0)]
    hashes = {CommittedPrefix(text).hash_at(len(text)) for text in texts}
    assert len(hashes) == len(texts)


def test_starts_with() -> None:
    prefix = CommittedPrefix((1, 2), (3,))
    assert prefix.starts_with(())
    assert prefix.starts_with((1, 2, 3))
    assert not prefix.starts_with((1, 2, 3, 4))
    assert not prefix.starts_with((2,))
