"""What the drafter is fed. Oracle: a cache that really holds tokens, truncated and appended to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device.cache import DraftCache
from edgespec.core.protocol.tree import CommittedPrefix

_short = st.lists(st.integers(0, 1), max_size=4)


@given(st.lists(st.tuples(_short, _short), max_size=20))
def test_it_holds_prefix_and_path_and_feeds_the_least(
    steps: list[tuple[list[int], list[int]]],
) -> None:
    prefix, cache = CommittedPrefix((9,)), DraftCache()
    held: list[int] = []
    for committed, path in steps:
        prefix.extend(committed)
        text = prefix.tokens + path
        keep, feed = cache.feed(prefix, path)
        shared = next(
            (i for i, (a, b) in enumerate(zip(held, text, strict=False)) if a != b),
            min(len(held), len(text)),
        )
        assert keep == min(shared, len(text) - 1)
        held[keep:] = feed
        assert held == text
        assert cache.length == len(held)


def test_the_prompt_is_fed_once() -> None:
    prefix, cache = CommittedPrefix(range(5)), DraftCache()
    assert cache.feed(prefix, []) == (0, (0, 1, 2, 3, 4))
    assert cache.feed(prefix, [8]) == (5, (8,))
    assert cache.feed(prefix, [8, 9]) == (6, (9,))
    prefix.extend((8, 7))
    assert cache.feed(prefix, []) == (6, (7,))


def test_the_last_token_is_fed_again_for_its_row() -> None:
    prefix, cache = CommittedPrefix(range(3)), DraftCache()
    cache.feed(prefix, [5])
    assert cache.feed(prefix, []) == (2, (2,))
