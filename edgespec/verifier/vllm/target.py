"""The target model on vLLM: ``ports.TargetModel`` for an engine that keeps the texts itself.

A pass takes as many steps of vLLM as it needs to answer every request, mostly one. A session is
added to vLLM in its first pass. After a failed step vLLM is emptied, and every session is added
again with its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from edgespec.core import ports
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore
from edgespec.verifier.targets.pass_requests import check_batch, check_opening


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One session's part of a step."""

    rows: int
    """Most rows of the text to compute in the step; vLLM may compute fewer."""
    drafts: tuple[int, ...] = ()
    """Chain behind vLLM's text; it is verified once all of the text is computed."""
    logprobs: int = 0
    """Number of log probabilities, as in ``PassRequest``."""


@dataclass(frozen=True, slots=True)
class StepResult:
    computed: int
    """Tokens with cached keys and values, counted in the text as it was before the step."""
    tokens: tuple[int, ...] = ()
    """Tokens appended to the text; empty if it was not computed to its end."""
    targets: tuple[int, ...] = ()
    """The target's tokens behind the old text and behind each draft, if the text has grown."""
    scores: tuple[TokenScore, ...] = ()
    """Scores of ``targets``, if they were requested."""
    failure: str = ""
    """Reason why the session cannot go on; empty if it can."""
    guesses: tuple[int, ...] = ()
    """Proposals of vLLM's own speculator behind the new text."""


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """A prompt with pictures as vLLM has it: each placeholder replaced by the picture's rows."""

    tokens: tuple[int, ...]
    features: tuple[Any, ...]
    """vLLM's inputs of the pictures."""
    positions: tuple[int, ...]
    """Indices of the placeholders in the prompt as it was sent."""
    ends: tuple[int, ...]
    """For each picture, the index in ``tokens`` behind its rows."""
    length: int
    """Length of the prompt as it was sent."""

    @property
    def extra_rows(self) -> int:
        """Rows more than tokens of the prompt."""
        return len(self.tokens) - self.length

    def count_rows(self, length: int) -> int:
        """Return the rows of the first ``length`` tokens of the text."""
        if length >= self.length:
            return length + self.extra_rows
        before = [
            end - at - 1 for at, end in zip(self.positions, self.ends, strict=True) if at < length
        ]
        return length + (before[-1] if before else 0)


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    folder: Path
    """Folder as PEFT writes it, with ``adapter_config.json`` and ``adapter_model.safetensors``."""
    fingerprint: str


class StepEngine(Protocol):
    """The calls that ``VllmTarget`` makes of vLLM, or of a fake in tests; one call at a time."""

    @property
    def cache_share(self) -> float:
        """Share of the KV blocks that texts hold, 0 to 1. It may be read in another thread."""

    def add(
        self,
        key: str,
        text: Sequence[int],
        prompt_length: int,
        sampling: SamplingParams,
        adapter: str = "",
        pictures: ExpandedPrompt | None = None,
    ) -> None:
        """Add a text, with ``adapter`` if one is named, and with ``pictures`` in its prompt.
        Nothing is computed before a step."""

    def step(
        self, wanted: Mapping[str, StepRequest], draft_steps: int = 0
    ) -> Mapping[str, StepResult]:
        """Run one step of these sessions and no others.

        For lack of room a session may be missing in the result, or computed in part; then call
        again. A speculator of the engine's own proposes at most ``draft_steps`` tokens behind each
        session.
        """

    def drop(self, key: str) -> None:
        """Remove a text."""

    def reset(self) -> None:
        """Remove all texts and everything computed for them, after a step that failed at an unknown
        point.

        Raises ``TargetLostError`` if that cannot be done.
        """


ReadPictureData = Callable[[Sequence[int], Sequence[bytes], Sequence[int]], ports.ReadPictures]
"""Reads the pictures of a prompt, as ``TargetModel.read_pictures``."""
NO_SCORE = TokenScore(0.0, 0.0, ())
"""Score of a row that is never read, because its path is not the text."""


def accepted_tokens(targets: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return the target's tokens up to and including the first that no draft names.

    A request without targets has failed, and gets a token that is never read.
    """
    if not targets:
        return [0]
    right = 0
    while right < len(drafts) and drafts[right] == targets[right]:
        right += 1
    return list(targets[: right + 1])


class UnknownScoresError(ValueError):
    """Tokens are known without the requested scores; the text must be added again from the prefix's
    end."""


class KnownText:
    """One session's text as far as vLLM has generated it, and the answers to passes that follow
    from it.

    This class is pure. vLLM's text, ``tokens``, may be longer than the session has committed. So
    the drafts of a pass are first compared with the known tokens: drafts that agree are accepted,
    the first known token that differs is the correction, and nothing has to be computed. If the
    chain goes on beyond the known tokens, the rest of it goes into vLLM's next step, and the
    comparison is repeated.
    """

    def __init__(self, text: Sequence[int], pictures: ExpandedPrompt | None = None) -> None:
        self.tokens = list(text)
        self._pictures = pictures
        self.computed = 0
        """Leading rows in vLLM's cache; a picture has several. vLLM drops them when it needs the
        room."""
        self._given = len(self.tokens)
        self._scores: dict[int, TokenScore] = {}
        """Scores by position, of tokens that no pass has requested yet."""
        self._rows_from = 0
        """Length of the text before the last step that made it grow; ``_rows`` holds the target's
        tokens there and behind each draft of that step."""
        self._rows: tuple[int, ...] = ()
        self._guesses: tuple[int, ...] = ()
        """Proposals behind the last of ``tokens``."""

    def record_step(self, step: StepResult) -> None:
        self.computed = step.computed
        if not step.tokens:
            return
        self._rows_from, self._rows = len(self.tokens), step.targets
        self._guesses = step.guesses
        for offset, score in enumerate(step.scores[: len(step.tokens)]):
            self._scores[self._rows_from + offset] = score
        self.tokens += step.tokens

    def answer(self, request: ports.PassRequest) -> ports.PassResult | StepRequest:
        """Return the result of ``request``, whose nodes are a chain, or the step that it still
        needs.

        Raises ``ValueError`` if the request does not fit the text, and ``UnknownScoresError``.
        """
        end = request.cache_length + len(request.feed)
        self._check(request, end)
        rows = self._count_rows(end) - self._count_rows(request.cache_length)
        if not request.sample:
            if self.computed >= self._count_rows(end) or len(self.tokens) > self._given:
                return ports.PassResult(request.key, ())
            return StepRequest(rows)
        chain, accepted, known = request.tokens, 0, self.tokens
        while end + accepted < len(known):
            if accepted == len(chain) or chain[accepted] != known[end + accepted]:
                return self._result(request, end, accepted)
            accepted += 1
        drafts = chain[accepted:]
        return StepRequest(max(rows, 1) + len(drafts), drafts, request.logprobs)

    def _count_rows(self, length: int) -> int:
        return length if self._pictures is None else self._pictures.count_rows(length)

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
        """Return a result with ``accepted`` accepted drafts; the token behind them is known."""
        size = 1 + len(request.tokens)
        targets = self.tokens[end : end + accepted + 1]
        # The rows of the last step have the target's tokens behind a rejected draft; beyond those
        # rows the drafts themselves are filled in.
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


# Steps without progress that are normal: vLLM may take a session's cache for another session and
# compute it again, a step each.
_IDLE_STEPS = 8


@dataclass(slots=True)
class _Sequence:
    """One session: how it was opened, and its text in vLLM."""

    prompt_length: int
    sampling: SamplingParams
    text: tuple[int, ...]
    """The known text while vLLM does not have it; it may be longer than what is committed."""
    given: int
    """Leading tokens of ``text`` that were certainly committed."""
    known: KnownText | None = None
    adapter: str = ""
    pictures: ExpandedPrompt | None = None
    failure: str = ""


class VllmTarget:
    """A target model that runs on vLLM.

    vLLM verifies only one path of a tree, so a pass of a session holds a chain of at most
    ``max_nodes`` nodes. ``adapters`` are the model with each of its adapters, by the names that the
    engine uses. ``speculator_tokens`` is how many tokens a speculator of the engine's own can
    propose behind a pass; with ``speculator_blocks`` it proposes all or none.
    """

    cache: ports.CacheShape | None = None
    """None, since vLLM allots its blocks itself, and evicts by itself."""

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
        speculator_tokens: int = 0,
        speculator_blocks: bool = False,
        read_pictures: ReadPictureData | None = None,
    ) -> None:
        self.mode, self.adapters = mode, tuple(adapters)
        self._read_pictures = read_pictures
        self.pass_shape = ports.PassShape(
            trees=False,
            max_nodes=max_nodes,
            max_rows=max_rows,
            speculator_tokens=speculator_tokens,
            speculator_blocks=speculator_blocks,
        )
        self.steps = self.proposed = self._draft_steps = 0
        self._engine, self.info, self._max_sessions = engine, info, max_sessions
        self._sequences: dict[str, _Sequence] = {}

    @property
    def cache_share(self) -> float:
        return self._engine.cache_share

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        check_opening(key, prompt_length, self._sequences, self._max_sessions, self.info)
        self._sequences[key] = _Sequence(prompt_length, sampling, tuple(text), len(text))

    def use_adapter(self, key: str, name: str) -> None:
        """Use the adapter ``name`` for a sequence. Raises ``ValueError`` if it is not served."""
        if name not in (known := [one.name for one in self.adapters]):
            raise ValueError(f"{key!r}: unknown adapter {name!r}; known: {', '.join(known)}")
        self._sequences[key].adapter = name

    def read_pictures(
        self, prompt: Sequence[int], pictures: Sequence[bytes], positions: Sequence[int]
    ) -> ports.ReadPictures:
        if self._read_pictures is None:
            raise ValueError("the model reads text only")
        return self._read_pictures(prompt, pictures, positions)

    def use_pictures(self, key: str, pictures: ports.ReadPictures) -> None:
        if not isinstance(pictures.content, ExpandedPrompt):
            raise ValueError(f"{key!r}: these pictures were not read by this engine")
        self._sequences[key].pictures = pictures.content

    def set_draft_steps(self, count: int) -> None:
        """Set the number of tokens to propose, as in the port; ``pass_shape.speculator_tokens`` at
        most, and all if they are a block."""
        shape = self.pass_shape
        whole = count > 0 and shape.speculator_blocks
        self._draft_steps = (
            shape.speculator_tokens if whole else min(count, shape.speculator_tokens)
        )

    def forward(self, batch: Sequence[ports.PassRequest]) -> list[ports.PassResult]:
        """Run a pass, as in the port. Tokens that vLLM computed before an error are kept and answer
        the next pass, which may begin from the same ``cache_length``."""
        check_batch(batch, self._known_length, self.info)
        for request in batch:
            sequence = self._sequences[request.key]
            if sequence.known is None:
                text = sequence.text or request.feed  # a probe brings its text with the pass
                committed = max(sequence.given, request.cache_length + len(request.feed))
                self._add(request.key, sequence, text[:committed])
        results: dict[str, ports.PassResult] = {}
        idle = 0
        while True:
            wanted: dict[str, StepRequest] = {}
            for request in batch:
                if request.key not in results:
                    found = self._answer(request)
                    if isinstance(found, StepRequest):
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
                    f"vLLM has no room for {len(wanted)} sessions: {idle} steps made no progress"
                )

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """Do nothing: vLLM already keeps the rows that agree with its text."""

    def close(self, key: str) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None and sequence.known is not None:
            self._engine.drop(key)

    # --- one pass --------------------------------------------------------------------------

    def _known_length(self, request: ports.PassRequest) -> int:
        if (sequence := self._sequences.get(request.key)) is None:
            raise ValueError(f"sequence {request.key!r} is not open")
        return len(sequence.text if sequence.known is None else sequence.known.tokens)

    def _add(self, key: str, sequence: _Sequence, text: Sequence[int]) -> KnownText:
        length, sampling, pictures = sequence.prompt_length, sequence.sampling, sequence.pictures
        self._engine.add(key, text, length, sampling, sequence.adapter, pictures)
        sequence.known, sequence.given = KnownText(text, pictures), len(text)
        return sequence.known

    def _answer(self, request: ports.PassRequest) -> ports.PassResult | StepRequest:
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

    def _step(self, wanted: dict[str, StepRequest]) -> None:
        self.steps += 1
        try:
            found = self._engine.step(wanted, self._draft_steps)
        except ports.TargetLostError:
            raise
        except Exception:
            for sequence in self._sequences.values():
                if sequence.known is not None:  # the text until then was right
                    sequence.text, sequence.known = tuple(sequence.known.tokens), None
            self._engine.reset()
            raise
        for key, step_result in found.items():
            sequence = self._sequences[key]
            assert sequence.known is not None
            if step_result.failure:
                sequence.failure = step_result.failure
            else:
                sequence.known.record_step(step_result)
                self.proposed += len(step_result.guesses)

    def _progress(self, key: str) -> tuple[int, int]:
        known = self._sequences[key].known
        assert known is not None
        return known.computed, len(known.tokens)
