"""A target model of known distributions, for tests, the simulator and demonstrations.

It samples with the scalar specification (``core/sampling.choose``) from ``core/toy_model``, and it
keeps the tokens it has cached, so that a wrong ``cache_length``, a forgotten ``keep`` or a changed
committed prefix is an error here before it is a wrong text elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.core.sampling import SamplingParams, choose
from edgespec.core.toy_model import ToyModel
from edgespec.ports import CapacityError, ModelInfo, PassRequest, PassResult


@dataclass(slots=True)
class _Sequence:
    prompt_length: int
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    """Committed tokens in the cache."""
    nodes: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Tree of the last pass, until it is kept or dropped."""


class ToyTarget:
    """``ports.TargetModel`` over a ``ToyModel``, standard library only.

    Raises ``CapacityError`` at ``max_sessions`` sequences or ``max_cached_tokens`` cached tokens,
    ``ValueError`` when a request does not fit what is cached.
    """

    def __init__(
        self,
        model: ToyModel | None = None,
        *,
        name: str = "toy",
        vocabulary: str = "toy",
        context_length: int = 4096,
        max_sessions: int = 1024,
        max_cached_tokens: int = 1 << 20,
    ) -> None:
        self.model = model or ToyModel()
        self.passes = 0
        """Passes so far, and the rows they had."""
        self.rows = 0
        eos = () if self.model.eos_token is None else (self.model.eos_token,)
        self._info = ModelInfo(name, vocabulary, self.model.vocabulary_size, context_length, eos)
        self._max_sessions = max_sessions
        self._max_cached_tokens = max_cached_tokens
        self._sequences: dict[str, _Sequence] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    def open(self, key: str, prompt_length: int, sampling: SamplingParams) -> None:
        if key in self._sequences:
            raise ValueError(f"sequence {key!r} is already open")
        if len(self._sequences) >= self._max_sessions:
            raise CapacityError(f"{len(self._sequences)} sessions open, limit {self._max_sessions}")
        if not 0 < prompt_length <= self._info.context_length:
            raise CapacityError(
                f"prompt of {prompt_length} tokens, limit 1 to {self._info.context_length}"
            )
        self._sequences[key] = _Sequence(prompt_length, sampling)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self._check(batch)
        self.passes += 1
        self.rows += sum(request.row_count for request in batch)
        return [self._run(request) for request in batch]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        sequence = self._sequence(key)
        parent = -1
        for node in nodes:
            if not 0 <= node < len(sequence.nodes) or sequence.parents[node] != parent:
                raise ValueError(f"nodes {list(nodes)} of {key!r} are not a path from the root")
            sequence.tokens.append(sequence.nodes[node])
            parent = node
        sequence.nodes = sequence.parents = ()

    def close(self, key: str) -> None:
        self._sequences.pop(key, None)

    def cached(self, key: str) -> tuple[int, ...]:
        """The committed tokens in the cache of ``key``, for tests. Raises ``ValueError``."""
        return tuple(self._sequence(key).tokens)

    def _sequence(self, key: str) -> _Sequence:
        if key not in self._sequences:
            raise ValueError(f"sequence {key!r} is not open")
        return self._sequences[key]

    def _check(self, batch: Sequence[PassRequest]) -> None:
        if len({request.key for request in batch}) != len(batch):
            raise ValueError("two requests of one pass have the same key")
        for request in batch:
            self._check_request(request)
        touched = {request.key: request.cache_length + request.row_count for request in batch}
        total = sum(
            touched.get(key, len(sequence.tokens)) for key, sequence in self._sequences.items()
        )
        if total > self._max_cached_tokens:
            raise CapacityError(f"{total} cached tokens wanted, limit {self._max_cached_tokens}")

    def _check_request(self, request: PassRequest) -> None:
        sequence = self._sequence(request.key)
        cached = sequence.tokens
        if not 0 <= request.cache_length <= len(cached):
            raise ValueError(
                f"{request.key!r}: cache_length is {request.cache_length}, "
                f"but {len(cached)} tokens are cached"
            )
        again = cached[request.cache_length :][: len(request.feed)]
        if tuple(again) != request.feed[: len(again)]:
            raise ValueError(f"{request.key!r}: fed tokens differ from the committed ones cached")
        if not request.feed:
            raise ValueError(f"{request.key!r}: feed is empty, but must hold at least one token")
        if len(request.tokens) != len(request.parents) or (request.tokens and not request.sample):
            raise ValueError(f"{request.key!r}: nodes need parents, and sample=True")
        if any(not -1 <= parent < i for i, parent in enumerate(request.parents)):
            raise ValueError(f"{request.key!r}: parents {request.parents} must come before nodes")
        size = self._info.vocabulary_size
        if any(not 0 <= token < size for token in request.feed + request.tokens):
            raise ValueError(f"{request.key!r}: a token id is outside 0 to {size - 1}")
        last = request.cache_length + len(request.feed) + max(_depths(request.parents), default=0)
        if last > self._info.context_length:
            raise CapacityError(
                f"{request.key!r}: {last} tokens, limit context_length {self._info.context_length}"
            )

    def _run(self, request: PassRequest) -> PassResult:
        sequence = self._sequences[request.key]
        del sequence.tokens[request.cache_length :]
        sequence.tokens.extend(request.feed)
        sequence.nodes, sequence.parents = request.tokens, request.parents
        if not request.sample:
            return PassResult(request.key, ())
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(request.tokens, request.parents, strict=True):
            paths.append((*paths[parent], token) if parent >= 0 else (token,))
        return PassResult(request.key, tuple(self._sample(sequence, p) for p in ((), *paths)))

    def _sample(self, sequence: _Sequence, path: tuple[int, ...]) -> int:
        # Only the tail and, when penalised, the whole text are looked at: no copy of a long text.
        tail = [*sequence.tokens[-self.model.order :], *path] if self.model.order else []
        length = len(sequence.tokens) + len(path)
        prompt: Sequence[int] = ()
        output: Sequence[int] = ()
        if sequence.sampling.penalised:
            prompt = sequence.tokens[: sequence.prompt_length]
            output = [*sequence.tokens[sequence.prompt_length :], *path]
        return choose(self.model.logits(tail), sequence.sampling, length, prompt, output)


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths
