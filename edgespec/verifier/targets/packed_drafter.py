"""The verifier's own draft model: all sessions that draft share one packed step.

A draft step is a pass that samples, so a draft model is served by the class that serves targets.
What is added here is what the engine does for a target: who holds which blocks of the key-value
cache, and what becomes of a session whose part of a step fails.

Life of a step: cut each sequence to what the core keeps -> use blocks that others have filled ->
reserve blocks, from the sequences that were not used for longest if none is free -> one pass ->
publish the blocks that are full. A cache is only a cache: a sequence that loses its blocks is fed
again, and finds those of them that nobody has needed meanwhile. Its text never waits for that.

The model looks at a *window*: a text that outgrows it goes on as if it began in the middle of the
window, whose second half is fed again, with the noise of its true positions. A window of 256 tokens
is left at token 257 and begins anew with the last 128, so a token costs one more row on average. Of
a prompt that slides by nothing is computed before a guess is wanted.

Invariant. ``prefix`` is a beginning of what is cached, and blocks are published of it alone.
Guesses come and go behind it: it ends at least a block before the last token, unless a long feed (a
part of a prompt) came at once. A sequence that is cut inside of its prefix enters the cache anew.
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
from edgespec.core.verifier.cache_keeper import PrefixSharing
from edgespec.core.verifier.server_model import CHOICES


class DraftModel(TargetModel, Protocol):
    """What a draft model is served by."""

    def shift(self, key: str, first: int) -> None:
        """The sequence, just opened, begins at position ``first`` of its text, for the noise."""

    def guess(self, batch: Sequence[PassRequest], width: int) -> list[tuple[Candidate, ...]]:
        """As ``forward``, of requests without nodes: of each that samples the ``width`` best
        choices, or fewer, the best first."""


@dataclass(slots=True)
class _DraftSequence:
    prompt_length: int
    sampling: SamplingParams
    text: list[int] = field(default_factory=list)
    """All that was fed and not cut."""
    first: int = 0
    """Where in it the window begins: the first row of the cache."""
    end: int = 0
    """Of ``text``, as much is cached, from ``first`` on."""
    prefix: CommittedPrefix = field(default_factory=lambda: CommittedPrefix(()))


class PackedDrafter:
    """``ports.ServerDrafter`` on a ``model`` that has a key-value cache. Guesses are below
    ``vocabulary_size``, the target's, which may be padded less than the draft's, and none of
    ``apart``, whose text is another there.

    ``share_prefixes``: texts that begin alike use the same cached blocks; else only a sequence that
    has lost its own finds them again. ``window``: tokens that the model looks at, at most; None is
    its context. Behind a window that holds none of the prompt a constrained text gets no guess."""

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
        """The one whose last step is longest ago first."""
        self.evictions = 0
        self.shared_tokens = 0
        """Fed tokens whose blocks were there."""

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self.close(key)
        self._sequences[key] = _DraftSequence(prompt_length, sampling)

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        steps = {step.key: step for step in batch if step.key in self._sequences}
        requests: list[PassRequest] = []
        for step in steps.values():
            if not self._cut_and_extend(step):
                self._empty(step.key)
            elif self._slides_by(step):
                continue
            elif (request := self._request(step, steps)) is not None:
                requests.append(request)
            else:
                self._empty(step.key)
        found = {key: self._settle(steps[key], some) for key, some in self._run(requests)}
        return [found.get(step.key, ()) for step in batch]

    def close(self, key: str) -> None:
        if self._sequences.pop(key, None) is not None:
            self._model.close(key)
            self._ledger.release(key)
            self._sharing.forget(key)

    def _cut_and_extend(self, step: DraftStep) -> bool:
        """Make the step's text that of the sequence, with a stand-in for each token that the draft
        does not have; False: it cannot be."""
        sequence, size = self._sequences[step.key], self.info.vocabulary_size
        if step.keep_length > len(sequence.text):
            return False
        self._sequences.move_to_end(step.key)
        stand_in = min(self.info.eos_token_ids, default=0)
        feed = [token if token < size else stand_in for token in step.feed]
        sequence.text[step.keep_length :] = feed
        sequence.end = min(sequence.end, step.keep_length)
        return True

    def _slides_by(self, step: DraftStep) -> bool:
        """Move the window where the text has left it; whether nothing is to be computed now."""
        sequence, length = self._sequences[step.key], len(step.feed) + step.keep_length
        inside = sequence.first <= sequence.end and length - sequence.first <= self._window
        passes = sequence.end == sequence.first > 0 and not step.guess
        if inside and not passes:
            return False
        sequence.first = sequence.end = max(0, length - max(1, self._window // 2))
        return not step.guess

    def _request(self, step: DraftStep, spared: Collection[str]) -> PassRequest | None:
        """The step as a pass of the model, on blocks of its own; None when it cannot take part."""
        key, sequence = step.key, self._sequences[step.key]
        start, stop = sequence.end - sequence.first, len(sequence.text) - sequence.first
        self._ledger.trim(key, start)
        new = start == 0 or start < sequence.prefix.length
        if new or stop - start > self._ledger.block_tokens:
            cached, start = start, self._shared(key, sequence, start, new=new)
            if not 0 < start <= cached and not self._opened(key, sequence, start):
                return None
        if not self._make_room(key, stop, spared):
            return None
        feed, blocks = tuple(sequence.text[sequence.first + start :]), self._ledger.table(key)
        return PassRequest(key, start, feed, sample=step.guess, blocks=blocks)

    def _shared(self, key: str, sequence: _DraftSequence, start: int, *, new: bool) -> int:
        """Take hold of what is cached anywhere of the sequence's window; how many tokens that are,
        at least one less than there are. ``new``: not even ``start`` of them are its own."""
        window = sequence.text[sequence.first :]
        if new:
            sequence.prefix = CommittedPrefix(window)
            found = self._sharing.enter(key, sequence.prefix) or 0
        else:
            sequence.prefix.extend(window[sequence.prefix.length :])
            found = self._sharing.catch_up(key, start)
        self.shared_tokens += max(0, found - start)
        return found

    def _opened(self, key: str, sequence: _DraftSequence, length: int) -> bool:
        """Tell the model of the window, of which ``length`` tokens are cached; False: it is too
        much for the model, by its constraint."""
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
        """One pass, without the sequences that the model cannot go on with."""
        while requests:
            try:
                found = self._model.guess(requests, CHOICES)
                return zip([one.key for one in requests], found, strict=True)
            except ModelOutputError as error:
                self._ledger.withdraw(error.key)
                self._empty(error.key)
                requests = [request for request in requests if request.key != error.key]
            except Exception:  # what is cached now, nobody knows
                for request in requests:
                    self._ledger.withdraw(request.key)
                    self._empty(request.key)
                raise
        return []

    def _settle(self, step: DraftStep, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """The step went well: all of the window is cached."""
        sequence, size = self._sequences[step.key], self._ledger.block_tokens
        text, first, prefix = sequence.text, sequence.first, sequence.prefix
        sequence.end = len(text)
        settled = ((sequence.end - first) // size - 1) * size
        if settled > prefix.length:
            prefix.extend(text[first + prefix.length : first + settled])
        self._sharing.publish(step.key, prefix.length)
        # Neither padding, which the target does not have, nor what means another text there.
        most, apart = self._vocabulary_size, self._apart
        found = tuple([one for one in found if one.token < most and one.token not in apart])
        if step.guess and not found:
            self._empty(step.key)
        return found

    def _empty(self, key: str) -> None:
        """Nothing is cached of the sequence any more."""
        self._model.close(key)
        self._ledger.release(key)
        sequence = self._sequences[key]
        sequence.text.clear()
        sequence.first = sequence.end = 0
