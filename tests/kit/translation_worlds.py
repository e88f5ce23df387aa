"""Random texts and cuts for translated drafts, and a draft that knows how the text goes on.

Oracle: the bytes of the text. A draft that always names the next word of its own spelling must find
a context that spells the text so far, and its words must become ids of the target that spell the
rest of it.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from edgespec.core import ports
from edgespec.core.device.token_cache import TokenCache
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.translating_drafter import TranslatingDrafter
from edgespec.models.byte_vocabulary import ByteVocabulary, unfinished_length
from edgespec.models.translated_text import TranslatedText
from edgespec.models.translation import Translation

_ATOMS: Final = (
    *("the", " quick", "brown ", "understanding", " unbelievable", "Zq", "a", " I", "don't"),
    *("  ", "\n", "\n\n", "\t", "\r\n", "    ", "\u00a0", "\u3000", "\u200b", "\x00", "\x1b[0m"),
    *("é", "Ünï", "e\u0301", "中文字", "日本語。", "한국어", "ру́сский", "हिन्दी", "עברית", "ไทย"),  # noqa: RUF001
    *("🙂", "👩‍👩‍👧", "🇩🇪", "\U000f4567", "12", "4567890", "1,000.5", "0"),
    *("{}", "();", '"q"', "=>", "!=", "...", "—", "def f(x):\n    return x", "a_b", "CamelCase"),
    *("<|im_end|>", "<eos>", "</s>", "[x]", "http://x.y/z?q=1", "/* c */", "\\n", ".\n", " ,"),
)
"""Parts of random texts, names of special tokens as plain letters among them."""


def random_text(dice: random.Random) -> str:
    """Return a text of mixed scripts, code, emoji and control characters, in the form NFC."""
    parts = []
    for _ in range(dice.randint(1, 24)):
        parts.append(dice.choice(_ATOMS))
        if dice.random() < 0.4:
            parts.append(" ")
    return unicodedata.normalize("NFC", "".join(parts))


def random_ids(vocabulary: ByteVocabulary, text: str, dice: random.Random) -> tuple[int, ...]:
    """Return ids that spell ``text``: in one of three cases the tokenizer's own, else cut at random
    bytes, as a model may sample them."""
    data = text.encode()
    if dice.random() < 1 / 3:
        return vocabulary.encode(data)
    cuts = sorted(dice.randrange(len(data) + 1) for _ in range(dice.randint(0, 4)))
    edges = [0, *cuts, len(data)]
    parts = [data[a:b] for a, b in pairwise(edges)]
    return tuple(token for part in parts for token in vocabulary.encode(part))


class KnowingDrafter:
    """A draft that names the next word of a text that it knows, by its own tokenizer.

    It fails if its context does not spell the beginning of that text."""

    inner: ports.Drafter | None = None

    def __init__(self, vocabulary: ByteVocabulary, text: bytes) -> None:
        self.info = ports.ModelInfo("knowing", "knowing", vocabulary.size, 1 << 16)
        self._cache = TokenCache(self.info)
        self._vocabulary, self._text = vocabulary, text
        self.steps = 0

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._cache.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[ports.Candidate, ...]:
        self.steps += 1
        self._cache.advance(keep_length, feed)
        told = self._vocabulary.text_bytes(self._cache.tokens)
        if not self._text.startswith(told):
            raise AssertionError(f"the context is {told!r}, but the text {self._text!r}")
        rest = self._vocabulary.encode(self._text[len(told) :])
        return tuple([ports.Candidate(one, -0.5) for one in rest[:1]])

    def close(self) -> None:
        """Do nothing."""


def check_cuts(pair: Translation, dice: random.Random) -> int:
    """Cut a random text at random tokens, and compare what comes of it with the text's bytes.
    Return the number of cuts. Raises ``AssertionError``."""
    text = random_text(dice)
    target, draft = pair.target, pair.draft
    ids = random_ids(target, text, dice)
    if not ids:
        return 0
    spelled = target.text_bytes(ids)
    assert spelled == text.encode(), (target.name, text)
    grown, cuts = TranslatedText(pair, 1), 0
    for _ in range(dice.randint(2, 6)):
        grown.truncate(dice.randint(0, len(grown.tokens)))
        length = dice.randint(len(grown.tokens), len(ids))
        if length == len(grown.tokens) == 0:
            continue
        grown.append(ids[len(grown.tokens) : length])
        data = target.text_bytes(ids[:length])
        finished = data[: len(data) - grown.unfinished]
        found = grown.draft_ids()[len(draft.prefix_ids) :]
        spells = draft.text_bytes(found)
        assert _without_first_space(spells, draft) == _without_first_space(finished, target), (
            f"{target.name} to {draft.name}: {found} spells {spells!r}, not {finished!r}"
        )
        more = spelled[length and len(data) :][: dice.randint(1, 12)]
        for reading in grown.readings(more) if more else ():
            assert tuple(grown.tokens) == tuple(ids[:length])
            continued = target.text_bytes((*ids[:length], *reading))
            assert continued == data + more, (
                f"{target.name}: {data!r} and {more!r} became {continued!r}"
            )
        cuts += 1
    return cuts


def _finished(data: bytes) -> bytes:
    """Return ``data`` without a character that is not finished."""
    return data[: len(data) - unfinished_length(data)]


def _without_first_space(data: bytes, vocabulary: ByteVocabulary) -> bytes:
    """Return ``data`` without the space that the vocabulary puts before a text."""
    return data.removeprefix(b" ") if vocabulary.spaces_first_word else data


def play_text(pair: Translation, dice: random.Random, lookahead_words: int) -> tuple[int, int]:
    """Let a draft that knows a random text write it from a random place on, with candidates of the
    target's ids only. Return the number of tokens that were proposed, and the steps of the draft.
    Raises ``AssertionError`` if a byte is lost or a committed id changes."""
    text = random_text(dice).strip() or "x"
    ids = pair.target.tokenizer.encode(text) if dice.random() < 0.5 else None
    if ids is None or any(one in pair.target.special_ids for one in ids[1:]):
        ids = list(random_ids(pair.target, text, dice))
        if pair.target.spaces_first_word:
            ids = [*pair.target.encode(b" "), *ids]
    whole = pair.target.text_bytes(ids)
    plain = _without_first_space(whole, pair.target)
    own = b" " + plain if pair.draft.spaces_first_word else plain
    inner = KnowingDrafter(pair.draft, own)
    info = ports.ModelInfo("t", "t", pair.target.size, 1 << 16)
    drafter = TranslatingDrafter(inner, pair, info, lookahead_words=lookahead_words)
    first = dice.randint(1, len(ids))
    while first < len(ids) and not _without_first_space(
        _finished(pair.target.text_bytes(ids[:first])), pair.target
    ):
        first += 1
    tokens = list(ids[:first])
    drafter.begin(first, SamplingParams())
    keep, proposed, returns = 0, 0, 4
    while (held := pair.target.text_bytes(tokens)) != whole:
        found = drafter.step(keep, tokens[keep:], 2)
        assert found, f"{pair.target.name} from {pair.draft.name}: nothing behind {held!r}"
        keep = len(tokens)
        if returns and dice.random() < 0.2 and keep > first:  # back to an earlier place
            returns -= 1
            keep = dice.randint(first, keep - 1)
            tokens = tokens[:keep] + tokens[keep : keep + 1]
        else:
            tokens.append(found[0].token)
            proposed += 1
            assert pair.target.text_bytes(tokens[-1:]), f"{found[0]} is no word"
        held = pair.target.text_bytes(tokens)
        assert whole.startswith(held), (
            f"{pair.target.name} from {pair.draft.name}: {held!r} is not the text {whole!r}"
        )
    return proposed, inner.steps
