"""What the drafter is fed. Oracle: a cache that really holds tokens, truncated and appended to."""

from __future__ import annotations

import random

import pytest
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


@pytest.mark.parametrize("seed", range(30))
def test_a_feed_that_was_taken_back_never_happened(seed: int) -> None:
    """Oracle: a drafter that truncates and appends only what reaches it holds, after each feed that
    does reach it, the prefix and the path."""
    dice = random.Random(seed)
    prefix = CommittedPrefix([dice.randrange(3) for _ in range(4)])
    cache, held = DraftCache(), list[int]()
    path: list[int] = []
    for _ in range(200):
        match dice.randrange(4):
            case 0:
                prefix.extend([dice.randrange(3) for _ in range(dice.randrange(1, 4))])
                path = []
            case 1:
                path = path[: dice.randrange(len(path) + 1)]
            case _:
                path = [*path, dice.randrange(3)]
        keep, feed = cache.feed(prefix, path)
        assert keep <= len(held)
        assert feed
        match dice.randrange(4):
            case 0:
                cache.take_back()
            case 1:
                cache.take_back(forgotten=True)
                held = []
            case _:
                held = [*held[:keep], *feed]
                assert held == [*prefix.tokens, *path]
                assert cache.length == len(held)
