"""Where a text's match is. Oracle: the longest search by hand, over all earlier places."""

from __future__ import annotations

import random

from edgespec.core.protocol.text_guesses import LONGEST, PromptLookup, pair_of


def _common(text: list[int], position: int) -> int:
    """How many tokens before ``position`` equal the last ones of the text."""
    length = 0
    while length < min(LONGEST, position) and text[position - 1 - length] == text[-1 - length]:
        length += 1
    return length


def test_every_match_is_one() -> None:
    """The tokens before the match are the text's last ones, as many as its length says; there is a
    match whenever the last pair stood in the text before."""
    for seed in range(30):
        dice = random.Random(seed)
        text: list[int] = []
        lookup = PromptLookup()
        for _ in range(120):
            text.append(dice.randrange(3))
            lookup.add(text)
            stood_before = any(_common(text, p) >= 2 for p in range(2, len(text)))
            assert bool(lookup.length) == stood_before
            if lookup.length:
                assert lookup.position < len(text)
                assert 2 <= lookup.length <= _common(text, lookup.position)


def test_loading_a_text_gives_the_index_of_adding_it() -> None:
    dice = random.Random(1)
    text = [dice.randrange(6) for _ in range(300)]
    loaded, added = PromptLookup(), PromptLookup()
    loaded.load(text, 100)
    loaded.load(text, 300)
    for end in range(1, 301):
        added.add(text[:end])
    assert loaded.known == added.known == 300
    assert len(loaded) == len(added)
    pairs = [pair_of(a, b) for a in range(6) for b in range(6)]
    assert [loaded.place(pair) for pair in pairs] == [added.place(pair) for pair in pairs]
    assert loaded.length >= 2


def test_the_index_is_bounded() -> None:
    text = list(range(1000))
    added, loaded = PromptLookup(most_pairs=64), PromptLookup(most_pairs=64)
    for end in range(1, 1001):
        added.add(text[:end])
        assert len(added) <= 64
    for end in (10, 500, 530, 560, 1000):
        loaded.load(text, end)
        assert len(loaded) <= 64
    assert loaded.place(pair_of(997, 998)) == 999
