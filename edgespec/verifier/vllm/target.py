"""The target model on vLLM: ``ports.TargetModel`` for an engine that has texts of its own.

A pass takes as many steps of vLLM as it needs to answer every request, mostly one. A session is
added to vLLM when a pass first asks for it. After a step that failed vLLM is emptied, and every
session begins again with its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgespec.core import ports
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore
from edgespec.verifier.targets.pass_requests import check_batch, check_opening


@dataclass(frozen=True, slots=True)
class Wanted:
    """One session's part of a step."""

    rows: int
    """How many rows of its text it may compute, if it has so many to compute: a wish."""
    drafts: tuple[int, ...] = ()
    """A chain behind the text that vLLM has; looked at once all of the text is computed."""
    logprobs: int = 0
    """As in ``PassRequest``."""


@dataclass(frozen=True, slots=True)
class Stepped:
    computed: int
    """Tokens whose keys and values vLLM holds, of the text as it was before the step."""
    tokens: tuple[int, ...] = ()
    """What the text has grown by: nothing, where it was not computed to its end."""
    targets: tuple[int, ...] = ()
    """Where it has grown: the target's token behind the text, and behind each draft."""
    scores: tuple[TokenScore, ...] = ()
    """Of ``targets``, if they were asked for."""
    failure: str = ""
    """Why the session cannot go on; empty: it can."""
    guesses: tuple[int, ...] = ()
    """What vLLM's own speculator proposes behind the text as it is now."""


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    folder: Path
    """As PEFT writes it: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    fingerprint: str


class StepEngine(Protocol):
    """vLLM, or what stands in for it. Calls come one at a time."""

    def add(
        self,
        key: str,
        text: Sequence[int],
        prompt_length: int,
        sampling: SamplingParams,
        adapter: str = "",
    ) -> None:
        """Begin a text, with ``adapter`` if one is named. Nothing is computed before a step."""

    def step(self, wanted: Mapping[str, Wanted], draft_steps: int = 0) -> Mapping[str, Stepped]:
        """One step of these sessions and no others. A session may be left out of the result, or
        computed in part, for want of room: ask again. A speculator of its own proposes at most
        ``draft_steps`` tokens behind each."""

    def drop(self, key: str) -> None:
        """Forget a text."""

    def reset(self) -> None:
        """Forget all texts and whatever was computed of them, since a step has failed and nobody
        knows how far it came. Raises ``TargetLostError`` where that cannot be done."""


NO_SCORE = TokenScore(0.0, 0.0, ())
"""Of a row that nobody looks at, because its path is not the text."""


def accepted_tokens(targets: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The target's tokens as far as the drafts before them are right. A request without targets
    has failed, and gets a token that nobody will see."""
    if not targets:
        return [0]
    right = 0
    while right < len(drafts) and drafts[right] == targets[right]:
        right += 1
    return list(targets[: right + 1])


class UnknownScoresError(ValueError):
    """Tokens are known without the scores asked for: the text begins anew at the prefix's end."""


class KnownText:
    """What vLLM has said of one session's text, and what that answers of a pass. Pure.

    vLLM's text, ``tokens``, may be longer than the session has committed. So a pass's drafts are
    first compared with the tokens that are known: what agrees is accepted, the first known token
    that no draft names is the correction, and nothing has to be computed. Where the known tokens
    end, what is left of the chain goes into vLLM's next step, and the comparison is made again."""

    def __init__(self, text: Sequence[int]) -> None:
        self.tokens = list(text)
        self.computed = 0
        """Of these, how many are in vLLM's cache. It takes them out when it needs the room."""
        self._given = len(self.tokens)
        self._scores: dict[int, TokenScore] = {}
        """By position, of the tokens that nobody has asked for yet."""
        self._rows_from = 0
        """Where the text ended before the last step that made it grow, and what the target said
        there and behind each draft."""
        self._rows: tuple[int, ...] = ()
        self._guesses: tuple[int, ...] = ()
        """Behind all of ``tokens``."""

    def take(self, stepped: Stepped) -> None:
        self.computed = stepped.computed
        if not stepped.tokens:
            return
        self._rows_from, self._rows = len(self.tokens), stepped.targets
        self._guesses = stepped.guesses
        for offset, score in enumerate(stepped.scores[: len(stepped.tokens)]):
            self._scores[self._rows_from + offset] = score
        self.tokens += stepped.tokens

    def answer(self, request: ports.PassRequest) -> ports.PassResult | Wanted:
        """The result of ``request``, whose nodes are a chain; or the step that is missing for it.

        Raises ``ValueError`` when the request does not fit the text, and ``UnknownScoresError``."""
        end = request.cache_length + len(request.feed)
        self._check(request, end)
        if not request.sample:
            if self.computed >= end or len(self.tokens) > self._given:
                return ports.PassResult(request.key, ())
            return Wanted(len(request.feed))
        chain, accepted, known = request.tokens, 0, self.tokens
        while end + accepted < len(known):
            if accepted == len(chain) or chain[accepted] != known[end + accepted]:
                return self._result(request, end, accepted)
            accepted += 1
        drafts = chain[accepted:]
        return Wanted(max(len(request.feed), 1) + len(drafts), drafts, request.logprobs)

    def _check(self, request: ports.PassRequest, end: int) -> None:
        key = request.key
        if any(parent != node - 1 for node, parent in enumerate(request.parents)):
            raise ValueError(f"{key!r}: parents are {request.parents}, but must be a chain")
        if end > len(self.tokens):
            raise ValueError(f"{key!r}: a prefix of {end} tokens, but {len(self.tokens)} are known")
        if tuple(self.tokens[request.cache_length : end]) != request.feed:
            raise ValueError(f"{key!r}: fed tokens differ from those that vLLM has")
        if request.sample and end < self._given:
            raise ValueError(f"{key!r}: {end} tokens are before the {self._given} of the opening")

    def _result(self, request: ports.PassRequest, end: int, accepted: int) -> ports.PassResult:
        """``accepted`` drafts are right, and the token behind them is known."""
        size = 1 + len(request.tokens)
        targets = self.tokens[end : end + accepted + 1]
        # Behind a wrong draft the rows of the last step tell more; else the guess stands for it.
        for node in range(len(targets), size):
            row = end + node - self._rows_from
            guess = request.tokens[min(node, size - 2)]
            targets.append(self._rows[row] if 0 < row < len(self._rows) else guess)
        self._rows = ()  # the next pass may have another chain
        guesses = self._guesses if end + accepted + 1 == len(self.tokens) else ()
        if not request.logprobs:
            return ports.PassResult(request.key, tuple(targets), guesses=guesses)
        known = [self._scores.get(end + offset) for offset in range(accepted + 1)]
        scores = [score for score in known if score is not None]
        if len(scores) < len(known):
            raise UnknownScoresError(f"{request.key!r}: no scores at position {end}")
        for position in [one for one in self._scores if one < end]:
            del self._scores[position]
        filled = scores + [NO_SCORE] * (size - len(scores))
        return ports.PassResult(request.key, tuple(targets), tuple(filled), guesses)


# vLLM may take a session's cache away for another's sake and compute it again, a step each.
_IDLE_STEPS = 8


@dataclass(slots=True)
class _Sequence:
    """One session: as it was opened, and its text once vLLM has it."""

    prompt_length: int
    sampling: SamplingParams
    text: tuple[int, ...]
    """What is known of it while vLLM does not have it; may be more than is committed."""
    given: int
    """Of ``text``, how many tokens were surely committed."""
    known: KnownText | None = None
    adapter: str = ""
    failure: str = ""


class VllmTarget:
    """``adapters``: the model with each of them, which the engine knows by these names. Of a tree
    vLLM can look at one path only, so a pass holds a chain of ``max_nodes``. ``own_drafts``: how
    many tokens a speculator of the engine's can propose behind a pass."""

    cache: ports.CacheShape | None = None
    """vLLM gives out its blocks by itself, and takes them back when it has to."""

    def __init__(
        self,
        engine: StepEngine,
        info: ports.ModelInfo,
        max_sessions: int,
        *,
        mode: str = "vLLM",
        max_nodes: int = 15,
        max_rows: int = 2048,
        adapters: Sequence[ports.ModelInfo] = (),
        own_drafts: int = 0,
    ) -> None:
        self.mode, self.adapters = mode, tuple(adapters)
        self.pass_shape = ports.PassShape(False, max_nodes, max_rows, own_drafts)
        self.steps = self.proposed = self._draft_steps = 0
        self._engine, self.info, self._max_sessions = engine, info, max_sessions
        self._sequences: dict[str, _Sequence] = {}

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        check_opening(key, prompt_length, self._sequences, self._max_sessions, self.info)
        self._sequences[key] = _Sequence(prompt_length, sampling, tuple(text), len(text))

    def use_adapter(self, key: str, name: str) -> None:
        """Raises ``ValueError`` for one that is not served."""
        if name not in (known := [one.name for one in self.adapters]):
            raise ValueError(f"{key!r}: unknown adapter {name!r}; known: {', '.join(known)}")
        self._sequences[key].adapter = name

    def set_draft_steps(self, count: int) -> None:
        """As in the port; no more than ``pass_shape.own_drafts`` are asked for."""
        self._draft_steps = min(count, self.pass_shape.own_drafts)

    def forward(self, batch: Sequence[ports.PassRequest]) -> list[ports.PassResult]:
        """As in the port. What vLLM has computed before an error is kept and answers the next
        pass, which may begin from the same ``cache_length``."""
        check_batch(batch, self._longest, self.info)
        for request in batch:
            sequence = self._sequences[request.key]
            if sequence.known is None:
                text = sequence.text or request.feed  # a probe brings its text with the pass
                committed = max(sequence.given, request.cache_length + len(request.feed))
                self._add(request.key, sequence, text[:committed])
        results: dict[str, ports.PassResult] = {}
        idle = 0
        while True:
            wanted: dict[str, Wanted] = {}
            for request in batch:
                if request.key not in results:
                    found = self._answer(request)
                    if isinstance(found, Wanted):
                        wanted[request.key] = found
                    else:
                        results[request.key] = found
            if not wanted:
                return [results[request.key] for request in batch]
            before = [self._progress(key) for key in wanted]
            self._step(wanted)
            idle = idle + 1 if before == [self._progress(key) for key in wanted] else 0
            if idle > _IDLE_STEPS + 2 * len(self._sequences):
                raise ports.CapacityError(
                    f"vLLM has no room for {len(wanted)} sessions: nothing came of {idle} steps"
                )

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """Nothing: vLLM keeps what agrees with the text, and the text is its own."""

    def close(self, key: str) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None and sequence.known is not None:
            self._engine.drop(key)

    # --- one pass --------------------------------------------------------------------------

    def _longest(self, request: ports.PassRequest) -> int:
        if (sequence := self._sequences.get(request.key)) is None:
            raise ValueError(f"sequence {request.key!r} is not open")
        return len(sequence.text if sequence.known is None else sequence.known.tokens)

    def _add(self, key: str, sequence: _Sequence, text: Sequence[int]) -> KnownText:
        length, sampling = sequence.prompt_length, sequence.sampling
        self._engine.add(key, text, length, sampling, sequence.adapter)
        sequence.known, sequence.given = KnownText(text), len(text)
        return sequence.known

    def _answer(self, request: ports.PassRequest) -> ports.PassResult | Wanted:
        sequence = self._sequences[request.key]
        assert sequence.known is not None
        if sequence.failure:
            raise ports.ModelOutputError(request.key, sequence.failure)
        try:
            return sequence.known.answer(request)
        except UnknownScoresError:
            end = request.cache_length + len(request.feed)
            sequence.text, sequence.known = tuple(sequence.known.tokens[:end]), None
            self._engine.drop(request.key)
            return self._add(request.key, sequence, sequence.text).answer(request)

    def _step(self, wanted: dict[str, Wanted]) -> None:
        self.steps += 1
        try:
            found = self._engine.step(wanted, self._draft_steps)
        except ports.TargetLostError:
            raise
        except Exception:
            for sequence in self._sequences.values():
                if sequence.known is not None:  # what the engine has said of it was right
                    sequence.text, sequence.known = tuple(sequence.known.tokens), None
            self._engine.reset()
            raise
        for key, stepped in found.items():
            sequence = self._sequences[key]
            assert sequence.known is not None
            if stepped.failure:
                sequence.failure = stepped.failure
            else:
                sequence.known.take(stepped)
                self.proposed += len(stepped.guesses)

    def _progress(self, key: str) -> tuple[int, int]:
        known = self._sequences[key].known
        assert known is not None
        return known.computed, len(known.tokens)
