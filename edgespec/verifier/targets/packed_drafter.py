"""The verifier's own draft model: all sessions that draft share one packed step.

A draft step is a pass that samples, so a draft model is served by the class that serves targets.
This file adds what the engine does for a target: it decides which sequence holds which blocks of
the key-value cache, and it handles the failure of one session within a step.

Life of a step: cut each sequence to what the core keeps -> use blocks that others have filled ->
reserve blocks, taking them from the least recently used sequences if none is free -> one pass ->
publish the blocks that are full. A sequence that loses its blocks is fed again, and finds the
blocks that no other sequence has needed meanwhile. The target's generation never waits for that.

The model sees a *window* of the text. A text that outgrows the window is continued as if it began
in the middle of the window: the second half is fed again, with the noise of its true positions. A
window of 256 tokens is left at token 257 and begins anew with the last 128, so a token costs one
more row on average. A prompt that is longer than the window is not computed before the first guess
is requested.

Invariant. ``prefix`` is a prefix of what is cached, and only its blocks are published. Guesses are
added and dropped behind it. It ends at least a block before the last token, unless a long feed (a
part of a prompt) came at once. A sequence that is cut inside its prefix enters the cache anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgespec.core.ports import CapacityError, ModelOutputError, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import Candidate, DraftStep, PassRequest
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.cache_scheduler import PrefixSharing
from edgespec.core.verifier.draft_round import CHOICES


class DraftModel(TargetModel, Protocol):
    """A target model with the two operations that a draft model needs."""

    def shift(self, key: str, first: int) -> None:
        """Set the position of the first token of a sequence that was just opened. The sampling
        noise depends on it."""

    def guess(self, batch: Sequence[PassRequest], width: int) -> list[tuple[Candidate, ...]]:
        """Compute a pass like ``forward``, of requests without nodes.

        Returns for each request that samples up to ``width`` candidates, the best first, and
        nothing for the others."""


@dataclass(slots=True)
class _DraftSequence:
    prompt_length: int
    sampling: SamplingParams
    text: list[int] = field(default_factory=list)
    """Tokens that were fed and not cut."""
    first: int = 0
    """The index in ``text`` of the window's first token, which is the first row of the cache."""
    end: int = 0
    """The index in ``text`` behind the last cached token; the tokens from ``first`` on are
    cached."""
    prefix: CommittedPrefix = field(default_factory=lambda: CommittedPrefix(()))


class PackedDrafter:
    """A ``ports.ServerDrafter`` on a ``model`` that has a key-value cache.

    Guesses are below ``vocabulary_size``, the target's, because the draft's vocabulary may be
    padded further. They are none of ``apart``, the token ids whose text differs between the two.
    With ``share_prefixes`` texts that begin alike use the same cached blocks; otherwise only a
    sequence that has lost its own blocks finds them again. ``window`` is the most tokens that the
    model sees; None is its context. A constrained text whose window holds none of the prompt gets
    no guess."""

    def __init__(
        self,
        model: DraftModel,
        *,
        vocabulary_size: int = 1 << 24,
        apart: Collection[int] = (),
        share_prefixes: bool = True,
        window: int | None = None,
    ) -> None:
        assert model.cache is not None, "the draft model has no cache to give out"
        self._model, self.info = model, model.info
        self._vocabulary_size, self._apart = vocabulary_size, frozenset(apart)
        self._window = min(window or model.info.context_length, model.info.context_length)
        self._ledger = BlockLedger(model.cache)
        owner_of = (lambda key: "") if share_prefixes else (lambda key: key)
        self._sharing = PrefixSharing(self._ledger, owner_of)
        self._sequences: OrderedDict[str, _DraftSequence] = OrderedDict()
        """Sequences by key, the least recently used first."""
        self.evictions = 0
        self.shared_tokens = 0
        """The number of fed tokens that were found in cached blocks."""

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self.close(key)
        self._sequences[key] = _DraftSequence(prompt_length, sampling)

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        """Run a step, as ``ports.ServerDrafter``. Sequences that cannot take part get no candidate
        and are emptied, so that their text is fed anew."""
        steps = {step.key: step for step in batch if step.key in self._sequences}
        requests: list[PassRequest] = []
        for step in steps.values():
            if not self._cut_and_extend(step):
                self._empty(step.key)
                continue
            if self._move_window(step):
                continue
            request = self._make_request(step, spared=steps)
            if request is None:
                self._empty(step.key)
            else:
                requests.append(request)
        found = {
            key: self._settle(steps[key], candidates) for key, candidates in self._run(requests)
        }
        return [found.get(step.key, ()) for step in batch]

    def close(self, key: str) -> None:
        if self._sequences.pop(key, None) is not None:
            self._model.close(key)
            self._ledger.release(key)
            self._sharing.forget(key)

    def _cut_and_extend(self, step: DraftStep) -> bool:
        """Make the step's text that of the sequence, with a stand-in for each token that the draft
        does not have. Return False if the sequence is shorter than what the step keeps."""
        sequence, size = self._sequences[step.key], self.info.vocabulary_size
        if step.keep_length > len(sequence.text):
            return False
        self._sequences.move_to_end(step.key)
        stand_in = min(self.info.eos_token_ids, default=0)
        feed = [token if token < size else stand_in for token in step.feed]
        sequence.text[step.keep_length :] = feed
        sequence.end = min(sequence.end, step.keep_length)
        return True

    def _move_window(self, step: DraftStep) -> bool:
        """Move the window if the text has left it. Return True if the step computes nothing,
        because what it feeds is only read once a guess is requested."""
        sequence, length = self._sequences[step.key], len(step.feed) + step.keep_length
        is_inside = sequence.first <= sequence.end and length - sequence.first <= self._window
        # The window was moved over a long prompt, and a further part of the prompt comes.
        is_reading_on = sequence.end == sequence.first > 0 and not step.guess
        if is_inside and not is_reading_on:
            return False
        sequence.first = sequence.end = max(0, length - max(1, self._window // 2))
        return not step.guess

    def _make_request(self, step: DraftStep, spared: Collection[str]) -> PassRequest | None:
        """Return the step as a request of a pass, with its blocks reserved; None if it cannot take
        part. The sequences ``spared`` keep their blocks."""
        key, sequence = step.key, self._sequences[step.key]
        # Both count from the window's first token, as the rows of the cache do.
        start, stop = sequence.end - sequence.first, len(sequence.text) - sequence.first
        self._ledger.trim(key, start)
        enters = start == 0 or start < sequence.prefix.length
        if enters or stop - start > self._ledger.block_tokens:
            cached, start = start, self._adopt_blocks(key, sequence, start, enters=enters)
            # The model has the sequence open with ``cached`` tokens. Where others had cached more,
            # or nothing stayed, it is opened anew.
            has_open = 0 < start <= cached
            if not has_open and not self._open_window(key, sequence, start):
                return None
        if not self._make_room(key, stop, spared):
            return None
        feed, blocks = tuple(sequence.text[sequence.first + start :]), self._ledger.table(key)
        return PassRequest(key, start, feed, sample=step.guess, blocks=blocks)

    def _adopt_blocks(self, key: str, sequence: _DraftSequence, start: int, *, enters: bool) -> int:
        """Acquire the cached blocks that hold the beginning of the sequence's window.

        Returns how many tokens they hold, at most one less than the window has. ``enters`` means
        that the sequence enters the cache anew; otherwise ``start`` tokens are cached."""
        window = sequence.text[sequence.first :]
        if enters:
            sequence.prefix = CommittedPrefix(window)
            found = self._sharing.enter(key, sequence.prefix) or 0
        else:
            sequence.prefix.extend(window[sequence.prefix.length :])
            found = self._sharing.catch_up(key, start)
        self.shared_tokens += max(0, found - start)
        return found

    def _open_window(self, key: str, sequence: _DraftSequence, length: int) -> bool:
        """Open the window in the model, with ``length`` tokens cached. Return False where the model
        refuses it, or where a constraint's prompt lies before the window."""
        first, sampling = sequence.first, sequence.sampling
        prompt_length = sequence.prompt_length - first
        if sampling.constraint is not None and prompt_length < 1:
            return False
        self._model.close(key)
        cached = tuple(sequence.text[first : first + length])
        try:
            self._model.open(key, min(max(1, prompt_length), self._window), sampling, cached)
        except (CapacityError, ValueError):
            return False
        self._model.shift(key, first)
        return True

    def _make_room(self, key: str, length: int, spared: Collection[str]) -> bool:
        """Reserve ``length`` rows for the sequence, taking blocks from the least recently used
        sequences. Return False if that is not enough."""
        while not self._ledger.reserve(key, length):
            held = (
                one for one in self._sequences if one not in spared and self._ledger.held_count(one)
            )
            victim = next(held, None)
            if victim is None:
                return False
            self._empty(victim)
            self.evictions += 1
        return True

    def _run(self, requests: list[PassRequest]) -> Iterable[tuple[str, tuple[Candidate, ...]]]:
        """Compute one pass. Sequences for which the model raises are emptied, and the pass is
        repeated without them."""
        while requests:
            try:
                found = self._model.guess(requests, CHOICES)
                return zip([one.key for one in requests], found, strict=True)
            except ModelOutputError as error:
                self._ledger.withdraw(error.key)
                self._empty(error.key)
                requests = [request for request in requests if request.key != error.key]
            except Exception:  # it is not known what is cached now
                for request in requests:
                    self._ledger.withdraw(request.key)
                    self._empty(request.key)
                raise
        return []

    def _settle(self, step: DraftStep, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Record that the whole window is cached, and publish the blocks that will not change.
        Return the candidates ``found`` that the target can use."""
        sequence, size = self._sequences[step.key], self._ledger.block_tokens
        text, first, prefix = sequence.text, sequence.first, sequence.prefix
        sequence.end = len(text)
        settled = ((sequence.end - first) // size - 1) * size
        if settled > prefix.length:
            prefix.extend(text[first + prefix.length : first + settled])
        self._sharing.publish(step.key, prefix.length)
        # Padding ids and ids with another text are no tokens of the target.
        most, apart = self._vocabulary_size, self._apart
        found = tuple([one for one in found if one.token < most and one.token not in apart])
        if step.guess and not found:
            self._empty(step.key)
        return found

    def _empty(self, key: str) -> None:
        """Release all that is cached of the sequence."""
        self._model.close(key)
        self._ledger.release(key)
        sequence = self._sequences[key]
        sequence.text.clear()
        sequence.first = sequence.end = 0
