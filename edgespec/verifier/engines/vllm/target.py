"""The target model on vLLM: ``ports.TargetModel`` for an engine that has texts of its own.

A pass takes as many steps of vLLM as it needs to answer every request, mostly one. A session that
begins is added to vLLM when a pass first asks for it; one that is not in a pass stands still. After
a step that failed vLLM is emptied, and every session begins again with its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.core.ports import (
    CacheShape,
    CapacityError,
    ModelInfo,
    ModelOutputError,
    PassRequest,
    PassResult,
    PassShape,
    TargetLostError,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.engines.vllm.known_text import KnownText, UnknownScoresError
from edgespec.verifier.engines.vllm.step import StepEngine, Wanted
from edgespec.verifier.targets.request_checks import check_batch

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
    """Why it cannot go on; empty: it can."""


class VllmTarget:
    """``mode`` says in words how the target computes. ``adapters``: the model with each of them,
    which the engine knows by these names. ``pass_shape``: of a tree vLLM can look at
    one path only, so a pass holds a chain of ``max_nodes``, and at most ``max_rows`` rows."""

    exact = False

    def __init__(
        self,
        engine: StepEngine,
        info: ModelInfo,
        max_sessions: int,
        *,
        mode: str = "vLLM",
        max_nodes: int = 15,
        max_rows: int = 2048,
        adapters: Sequence[ModelInfo] = (),
    ) -> None:
        self.mode, self.adapters = mode, tuple(adapters)
        self.pass_shape = PassShape(trees=False, max_nodes=max_nodes, max_rows=max_rows)
        self.steps = 0
        """Steps of vLLM so far."""
        self._engine, self._info, self._max_sessions = engine, info, max_sessions
        self._sequences: dict[str, _Sequence] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def cache(self) -> CacheShape | None:
        """None: vLLM gives out its blocks by itself, and takes them back when it has to."""
        return None

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        if key in self._sequences:
            raise ValueError(f"sequence {key!r} is already open")
        count, limit = len(self._sequences), self._info.context_length
        # One more than are served: the probe that finds out whether the engine still works.
        if count > self._max_sessions:
            raise CapacityError(
                f"{count} sessions are open, limit max_sessions {self._max_sessions}"
            )
        if not 0 < prompt_length <= limit:
            raise CapacityError(f"prompt of {prompt_length} tokens, limit 1 to {limit} (context)")
        self._sequences[key] = _Sequence(prompt_length, sampling, tuple(text), len(text))

    def use_adapter(self, key: str, name: str) -> None:
        """Raises ``ValueError`` for one that is not served."""
        if name not in (known := [one.name for one in self.adapters]):
            raise ValueError(f"{key!r}: unknown adapter {name!r}; known: {', '.join(known)}")
        self._sequences[key].adapter = name

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        """As in the port. What vLLM has computed before an error is kept and answers the next
        pass, which may begin from the same ``cache_length``."""
        check_batch(batch, self._longest, self._info)
        for request in batch:
            self._begin(request)
        results: dict[str, PassResult] = {}
        idle = 0
        while True:
            wanted = self._wanted(batch, results)
            if not wanted:
                return [results[request.key] for request in batch]
            before = [self._progress(key) for key in wanted]
            self._step(wanted)
            idle = idle + 1 if before == [self._progress(key) for key in wanted] else 0
            if idle > _IDLE_STEPS + 2 * len(self._sequences):
                raise CapacityError(
                    f"vLLM has no room for {len(wanted)} sessions: nothing came of {idle} steps"
                )

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """Nothing: vLLM keeps what agrees with the text, and the text is its own."""

    def close(self, key: str) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None and sequence.known is not None:
            self._engine.drop(key)

    # --- one pass --------------------------------------------------------------------------

    def _longest(self, request: PassRequest) -> int:
        """The longest prefix that a request may take for cached."""
        if (sequence := self._sequences.get(request.key)) is None:
            raise ValueError(f"sequence {request.key!r} is not open")
        return len(sequence.text if sequence.known is None else sequence.known.tokens)

    def _begin(self, request: PassRequest) -> None:
        sequence = self._sequences[request.key]
        if sequence.known is None:
            text = sequence.text or request.feed  # a probe brings its text with the pass
            committed = max(sequence.given, request.cache_length + len(request.feed))
            self._add(request.key, sequence, text[:committed])

    def _add(self, key: str, sequence: _Sequence, text: Sequence[int]) -> KnownText:
        length, sampling = sequence.prompt_length, sequence.sampling
        self._engine.add(key, text, length, sampling, sequence.adapter)
        sequence.known, sequence.given = KnownText(text), len(text)
        return sequence.known

    def _wanted(
        self, batch: Sequence[PassRequest], results: dict[str, PassResult]
    ) -> dict[str, Wanted]:
        """What is still missing; what is known goes into ``results``."""
        wanted: dict[str, Wanted] = {}
        for request in batch:
            if request.key in results:
                continue
            found = self._answer(request)
            if isinstance(found, PassResult):
                results[request.key] = found
            else:
                wanted[request.key] = found
        return wanted

    def _answer(self, request: PassRequest) -> PassResult | Wanted:
        sequence = self._sequences[request.key]
        assert sequence.known is not None
        if sequence.failure:
            raise ModelOutputError(request.key, sequence.failure)
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
            found = self._engine.step(wanted)
        except TargetLostError:
            raise
        except Exception:
            self._begin_anew()
            raise
        for key, stepped in found.items():
            sequence = self._sequences[key]
            assert sequence.known is not None
            if stepped.failure:
                sequence.failure = stepped.failure
            else:
                sequence.known.take(stepped)

    def _begin_anew(self) -> None:
        """The engine has no text any more. What it has said of each was right."""
        for sequence in self._sequences.values():
            if sequence.known is not None:
                sequence.text, sequence.known = tuple(sequence.known.tokens), None
        self._engine.reset()

    def _progress(self, key: str) -> tuple[int, int]:
        known = self._sequences[key].known
        assert known is not None
        return known.computed, len(known.tokens)
