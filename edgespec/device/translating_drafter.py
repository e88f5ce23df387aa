"""A drafter whose model has another tokenizer than the target.

Theory of operation. The committed ids of the target become the draft's ids through their bytes
(``models/translated_text.py``), and the words that the draft proposes become ids of the target that
continue the committed ones as they are. A guess is then an id like any other, which the verifier
judges by equality, so the output is exact whatever happens here.

One word of the draft may be several ids of the target, and several words may be one id. So the
drafted words are kept as bytes ahead of the text. A step runs the model until the first id behind
the text is settled: the next id of the target could still grow while no word ends behind it. It
runs no model at all while drafted bytes are left over. What was drafted stays valid for as long as
the text that is fed agrees with it.

The draft adds the target's noise, by the target's ids and positions, if its model can
(``set_noise``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, runtime_checkable

from edgespec.core import ports
from edgespec.core.device.token_cache import TokenCache, common_prefix_length
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.byte_vocabulary import find_last_word_end, unfinished_length
from edgespec.models.translated_text import TranslatedText
from edgespec.models.translation import Translation
from edgespec.sampling.arrays import MAX_WIDTH, NoiseIds

LOOKAHEAD_WORDS: Final = 0
"""Words of the draft that are drafted behind an id that could still grow
(docs/measurements/drafts.md)."""
_SETTLING_IDS: Final = 2
"""Ids of the target behind the first one that settle it although no word has ended."""
_UNFINISHED_RUNS: Final = 3
"""Further words for a character that is not finished, one for each of its bytes."""
_MIN_FITTING_WIDTH: Final = 16
"""Candidates among which a word is searched that continues an unfinished character, or that a
constraint allows."""
_MAX_AGREED_WORDS: Final = 64


@runtime_checkable
class SetsNoise(Protocol):
    """A drafter that can add the noise of another vocabulary's ids."""

    def set_noise(self, ids: NoiseIds, position: int) -> None:
        """Let the next step add the noise that ``ids`` have at ``position``, until ``begin``."""


@dataclass(frozen=True, slots=True)
class _Word:
    """A word that the draft proposed ahead of the text."""

    token: int
    """Id of the draft."""
    data: bytes
    logprob: float
    start: int
    """Place of its first byte in the text."""
    siblings: tuple[ports.Candidate, ...] = ()
    """Other candidates for the same place."""


class TranslatingDrafter:
    """The drafter ``inner``, which has another vocabulary, as a drafter of ``target``.

    Args:
        inner: The drafter in the draft's own ids. It is closed with this one.
        pair: The two vocabularies.
        target: The model whose ids are fed and proposed.
        shares_noise: Whether the draft adds the target's noise where its model can.
        lookahead_words: Most words that are drafted behind an id that could still grow.
    """

    def __init__(
        self,
        inner: ports.Drafter,
        pair: Translation,
        target: ports.ModelInfo,
        *,
        shares_noise: bool = True,
        lookahead_words: int = LOOKAHEAD_WORDS,
    ) -> None:
        self.inner, self.pair, self._target = inner, pair, target
        self.info = replace(
            inner.info,
            vocabulary=target.vocabulary,
            vocabulary_size=max(target.vocabulary_size, pair.target.size),
            eos_token_ids=target.eos_token_ids,
        )
        self._lookahead_words, self._shares_noise = lookahead_words, shares_noise
        self._noise = NoiseIds.of(pair.noise_ids(inner.info.vocabulary_size))
        self._noise_source = _find_noise_source(inner) if shares_noise else None
        self._cache = TokenCache(self.info)
        self._text = TranslatedText(pair, 1)
        self._prompt_length, self._sampling = 1, SamplingParams()
        self._has_begun = False
        """Whether the sequence has begun in ``inner``."""
        self._cached: list[int] = []
        """The draft's ids in the cache of ``inner``."""
        self._words: list[_Word] = []
        """Words that were drafted from ``_anchor`` on. The text may have reached some."""
        self._anchor = self._anchor_tokens = 0
        """Place in the text at which the first word begins, in bytes and in the target's ids."""
        self._context: list[int] = []
        """The draft's ids: the text's up to the anchor, then the words'."""

    @property
    def untranslated(self) -> ports.Drafter:
        """The drafter in the draft's own ids, for a text that the draft writes by itself."""
        return self.inner

    @property
    def resumes_feeds(self) -> bool:
        return isinstance(self.inner, ports.Resuming) and self.inner.resumes_feeds

    def twin(self) -> TranslatingDrafter:
        """Return a twin of ``inner`` with the same vocabularies. Raises ``TypeError`` if it has
        none."""
        return TranslatingDrafter(
            ports.make_twin(self.inner),
            self.pair,
            self._target,
            shares_noise=self._shares_noise,
            lookahead_words=self._lookahead_words,
        )

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._cache.begin(prompt_length, sampling)
        self._text = TranslatedText(self.pair, prompt_length)
        self._prompt_length = prompt_length
        self._sampling = self._translate_sampling(sampling)
        self._has_begun = False
        self._cached.clear()
        self._words.clear()

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[ports.Candidate, ...]:
        position = self._cache.advance(keep_length, feed)
        try:
            self._text.truncate(keep_length)
            self._text.append(feed)
            self._drop_contradicted_words()
            return self._draft(position, width, cancelled)
        except Exception:
            self._cache.truncate(keep_length)
            self._text.truncate(keep_length)
            self._words.clear()
            raise

    def close(self) -> None:
        self._cache.truncate(0)
        self.inner.close()

    # --- from drafted words to ids of the target ----------------------------------------------

    def _draft(
        self, position: int, width: int, cancelled: ports.Cancelled
    ) -> tuple[ports.Candidate, ...]:
        """Return candidates for ``position``, the place behind the text."""
        if self._text.ends_untranslated:
            return ()
        mask = self._cache.allowed_mask()
        inner_width = min(MAX_WIDTH, width if mask is None else max(width, _MIN_FITTING_WIDTH))
        drafted, readings = self._read_ahead()
        runs = 0
        while not self._is_settled(drafted, readings, runs):
            later = len(readings[0]) if readings else 0
            if not self._run_model(position + later, inner_width, cancelled):
                break
            runs += 1
            drafted, readings = self._read_ahead()
        found = dict[int, float]()
        for token, logprob in (*self._first_ids(readings), *self._sibling_ids()):
            if token not in found and (mask is None or mask[token >> 3] >> (token & 7) & 1):
                found[token] = logprob
        return tuple([ports.Candidate(*one) for one in found.items()][:width])

    def _read_ahead(self) -> tuple[bytes, list[tuple[int, ...]]]:
        """Return the bytes that are drafted behind the text, and their readings as ids of the
        target."""
        if not self._words:
            return b"", []
        drafted = b"".join([word.data for word in self._words])[self._text.end - self._anchor :]
        if not drafted:
            return b"", []
        whole = drafted[: len(drafted) - unfinished_length(drafted)]
        return drafted, [one for one in self._text.readings(whole or drafted) if one]

    def _is_settled(self, drafted: bytes, readings: list[tuple[int, ...]], runs: int) -> bool:
        """Return whether no further word has to be drafted to know the next id, after ``runs`` runs
        of the model in this step."""
        if self._words and not self._words[-1].data:
            return True  # an end, or a word that the target lacks
        if not drafted:
            return runs > _UNFINISHED_RUNS
        if unfinished_length(drafted) == len(drafted):
            return runs > _UNFINISHED_RUNS
        if not readings:
            return True
        ahead = sum(word.start > self._text.end for word in self._words)
        if ahead >= self._lookahead_words or len(readings[0]) > _SETTLING_IDS:
            return True
        first = self.pair.target.token_bytes(readings[0][0])
        return find_last_word_end(drafted, punctuation=True) >= len(first)

    def _first_ids(self, readings: list[tuple[int, ...]]) -> list[tuple[int, float]]:
        """Return the next id by each reading of the drafted words, with its log-probability."""
        text, vocabulary = self._text, self.pair.target
        if not readings:
            last = self._words[-1] if self._words else None
            if last is None or last.data or last.start != text.end:
                return []
            twin = self.pair.special_to_target.get(last.token)
            return [] if twin is None else [(twin, last.logprob)]
        found = []
        for reading in readings:
            if reading[0] in vocabulary.special_ids:
                continue  # an unknown character
            end = text.end + len(vocabulary.token_bytes(reading[0]))
            parts = [word.logprob for word in self._words if text.end <= word.start < end]
            found.append((reading[0], sum(parts)))
        return found

    def _sibling_ids(self) -> list[tuple[int, float]]:
        """Return the next id by each other word that the draft named for the place behind the
        text."""
        text, found = self._text, list[tuple[int, float]]()
        for word in self._words:
            if word.start != text.end:
                continue
            for token, logprob in ((one.token, one.logprob) for one in word.siblings):
                twin = self.pair.special_to_target.get(token)
                data = text.fit_first_space(self.pair.draft.token_bytes(token))
                if twin is None and data and not unfinished_length(data):
                    twin = next((one[0] for one in text.readings(data) if one), None)
                    twin = None if twin in self.pair.target.special_ids else twin
                if twin is not None:
                    found.append((twin, logprob))
        return found

    def _drop_contradicted_words(self) -> None:
        """Forget the drafted words if the text is not what they were drafted behind, or says
        something else."""
        if not self._words:
            return
        text, special = self._text, self.pair.target.special_ids
        drafted = b"".join([word.data for word in self._words])
        later = text.tokens[self._anchor_tokens :]
        agrees = (
            len(text.tokens) >= self._anchor_tokens
            and drafted.startswith(bytes(text.data[self._anchor :]))
            and not any(token in special for token in later)
        )
        is_used_up = len(self._words) > _MAX_AGREED_WORDS and text.end >= self._anchor + len(
            drafted
        )
        if not agrees or is_used_up:
            self._words.clear()

    # --- the model -----------------------------------------------------------------------------

    def _run_model(self, position: int, width: int, cancelled: ports.Cancelled) -> bool:
        """Draft one more word, whose first byte is at the target's ``position``. Return whether the
        model proposed one."""
        text = self._text
        if not self._words:
            self._anchor, self._anchor_tokens = text.end - text.unfinished, len(text.tokens)
            self._context = list(text.draft_ids())
        context, limit = self._context, self.inner.info.context_length
        if not 0 < len(context) <= limit:
            return False
        if not self._has_begun:
            prompt = text.count_draft_ids(self._prompt_length)
            self.inner.begin(min(max(1, prompt), limit), self._sampling)
            self._has_begun = True
        keep = min(common_prefix_length(self._cached, context), len(context) - 1)
        if self._noise_source is not None:
            self._noise_source.set_noise(self._noise, position)
        required = bytes(text.data[self._anchor :])[sum(len(one.data) for one in self._words) :]
        if required:
            width = max(width, _MIN_FITTING_WIDTH)
        del self._cached[keep:]  # A step that fails loses the rows behind them.
        candidates = self.inner.step(keep, context[keep:], width, cancelled)
        self._cached += context[keep:]
        start = self._anchor + sum(len(one.data) for one in self._words)
        for rank, one in enumerate(candidates):
            data = self.pair.draft.token_bytes(one.token)
            if not self._words:
                data = text.fit_first_space(data)
            if not required or data.startswith(required) or (data and required.startswith(data)):
                siblings = () if required else candidates[rank + 1 :]
                self._words.append(_Word(one.token, data, one.logprob, start, siblings))
                self._context.append(one.token)
                return True
        return False

    def _translate_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return ``sampling`` for the model: what names ids of the target is applied to candidates
        here, or translated where one word is the same."""
        bias = {
            twin: amount
            for token, amount in sampling.logit_bias.items()
            for twin in self.pair.draft.encode(self.pair.target.token_bytes(token))[:2]
            if self.pair.draft.token_bytes(twin) == self.pair.target.token_bytes(token)
        }
        return replace(sampling, logit_bias=bias, constraint=None, min_tokens=0, stop_token_ids=())


def _find_noise_source(drafter: ports.Drafter | None) -> SetsNoise | None:
    """Return the drafter at any depth that adds noise for another vocabulary; None if none can."""
    while drafter is not None and not isinstance(drafter, SetsNoise):
        drafter = drafter.inner
    return drafter
