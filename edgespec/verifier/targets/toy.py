"""A target model of known distributions, and a draft model beside it, for tests, the simulator and
demonstrations.

It samples with the scalar specification from ``core/toy_model`` and keeps the tokens it has cached,
so that a wrong ``cache_length``, a forgotten ``keep`` or a changed committed prefix is an error
here before it is a wrong text elsewhere.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

from edgespec.core.ports import (
    CapacityError,
    ModelInfo,
    ModelOutputError,
    PassRequest,
    PassResult,
    SimpleTarget,
)
from edgespec.core.protocol import sampling as laws
from edgespec.core.protocol import work
from edgespec.core.protocol.pictures import PictureInput, ReadPictures, read_header
from edgespec.core.toy_model import ToyModel
from edgespec.verifier.targets.pass_requests import (
    ConstrainedRows,
    SequenceText,
    check_batch,
    check_opening,
    check_table,
)

_EMPTY = -1
_BEGINNING = 0
"""The mark before the first token of a prompt without pictures."""
_PATCH_PIXELS = 32
"""Width and height of the square of a picture that is one row."""
_PICTURE_STRENGTH = 0.5
"""How much the pictures of a prompt change the law: the likeliest token stays in 63 % of the
contexts, so a draft without the pictures is often right."""


class ToyMemory:
    """A key-value cache in blocks that holds marks: a *mark* is a hash of a token and of all before
    it, as a model's keys depend on them all. Whatever a sequence has cached is looked up in its own
    slots at every pass, so a block that was given away too early shows as a mark that is not there.
    """

    def __init__(self, cache: work.CacheShape) -> None:
        self._block_count, self._block_tokens = cache.block_count, cache.block_tokens
        self._slots = array("q", [_EMPTY]) * ((cache.block_count + 1) * cache.block_tokens)
        self._tables: dict[str, tuple[int, ...]] = {}
        """The block table of each sequence in its last pass."""
        self._marks: dict[str, array[int]] = {}
        """The marks of each sequence's committed tokens so far."""
        self._beginnings: dict[str, int] = {}
        """The mark before the first token, of sequences with pictures."""

    def begin_with(self, key: str, mark: int) -> None:
        """Set the mark before the first token of a sequence."""
        self._beginnings[key] = mark

    def write(self, batch: Sequence[PassRequest], cached: Sequence[Sequence[int]]) -> None:
        """Store the rows of a pass; ``cached[i]`` are the tokens that request i finds cached.
        Raises ``ValueError`` for a table that is too short or wrong, for a written block that is
        another's too, and for a cached token that is not in its slot."""
        for request in batch:
            check_table(request, self._block_count, self._block_tokens)
        blocks = [block for request in batch for block in request.blocks]
        if len(set(blocks)) != len(blocks):
            self._check_writes(batch)
        for request, tokens in zip(batch, cached, strict=True):
            marks = self._marks.setdefault(request.key, array("q"))
            marks.extend(self._make_marks(request.key, marks, tokens[len(marks) :]))
            self._check(request, marks)
        for request in batch:
            self._tables[request.key] = request.blocks
            for row, mark in enumerate(self._row_marks(request), request.cache_length):
                self._slots[self._slot(request.key, row)] = mark

    def keep(self, key: str, length: int, nodes: Sequence[int]) -> None:
        """Move the kept nodes of the last pass, which lie behind ``length`` tokens, together."""
        for place, node in enumerate(nodes):
            kept = self._slots[self._slot(key, length + node)]
            self._slots[self._slot(key, length + place)] = kept

    def forget(self, key: str) -> None:
        """Forget a closed sequence. Its slots keep their marks."""
        self._tables.pop(key, None)
        self._marks.pop(key, None)
        self._beginnings.pop(key, None)

    def _make_marks(self, key: str, known: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the marks of ``tokens`` behind a text with these marks; the same in every
        process."""
        mark = known[-1] if known else self._beginnings.get(key, _BEGINNING)
        marks: list[int] = []
        for token in tokens:
            mark = hash((mark, token))
            marks.append(mark)
        return marks

    def _check_writes(self, batch: Sequence[PassRequest]) -> None:
        held = Counter(block for request in batch for block in request.blocks)
        for request in batch:
            if len(set(request.blocks)) != len(request.blocks):
                raise ValueError(f"{request.key!r}: a block stands in its table twice")
            writes = request.blocks[request.cache_length // self._block_tokens :]
            if any(held[block] > 1 for block in writes):
                raise ValueError(f"{request.key!r}: a block that is written is another's too")

    def _check(self, request: PassRequest, marks: array[int]) -> None:
        size, length = self._block_tokens, request.cache_length
        # Whole blocks at once: a long text is looked at in every pass.
        for block, first in zip(request.blocks, range(0, length, size), strict=False):
            part = marks[first : min(first + size, length)]
            found = self._slots[block * size : block * size + len(part)]
            if found != part:
                place = next(i for i, mark in enumerate(part) if found[i] != mark)
                raise ValueError(
                    f"{request.key!r}: position {first + place} holds another token than the one"
                    " that was cached, or the same one behind another text"
                )

    def _row_marks(self, request: PassRequest) -> list[int]:
        known = self._marks[request.key]
        del known[request.cache_length :]
        fed = self._make_marks(request.key, known, request.feed)
        known.extend(fed)
        nodes: list[int] = []
        for token, parent in zip(request.tokens, request.parents, strict=True):
            nodes.append(hash((nodes[parent] if parent >= 0 else known[-1], token)))
        return fed + nodes

    def _slot(self, key: str, position: int) -> int:
        block, offset = divmod(position, self._block_tokens)
        return self._tables[key][block] * self._block_tokens + offset


class ToyTarget(SimpleTarget):
    """``ports.TargetModel`` over a ``ToyModel``, standard library only. With ``cache`` its cache is
    a real one, whose tables come with the requests; else ``max_cached_tokens`` bounds it.

    With ``pictures`` it takes pictures, which it does not decode: the bytes of a prompt's pictures
    perturb the law of its output, and each square of 32 x 32 pixels counts as a row."""

    def __init__(
        self,
        model: ToyModel | None = None,
        *,
        name: str = "toy",
        vocabulary: str = "toy",
        fingerprint: str = "",
        context_length: int = 4096,
        max_sessions: int = 1024,
        max_cached_tokens: int = 1 << 20,
        cache: work.CacheShape | None = None,
        pictures: PictureInput | None = None,
    ) -> None:
        self.mode = "toy"
        self.model = model or ToyModel()
        self.passes = 0
        self.rows = 0
        eos = () if self.model.eos_token is None else (self.model.eos_token,)
        size = self.model.vocabulary_size
        self.info = ModelInfo(
            name, vocabulary, size, context_length, eos, fingerprint, pictures=pictures
        )
        self._seeing: dict[str, ToyModel] = {}
        """The laws of sequences with pictures."""
        self._max_sessions = max_sessions
        self._max_cached_tokens = max_cached_tokens
        self.cache = cache
        self._memory = None if cache is None else ToyMemory(cache)
        self._sequences: dict[str, SequenceText] = {}
        self._constrained = ConstrainedRows(self.info)

    def open(
        self, key: str, prompt_length: int, sampling: laws.SamplingParams, text: Sequence[int] = ()
    ) -> None:
        check_opening(key, prompt_length, self._sequences, self._max_sessions, self.info)
        self._constrained.open(key, sampling)
        self._sequences[key] = SequenceText(prompt_length, sampling, text)

    def read_pictures(
        self, prompt: Sequence[int], pictures: Sequence[bytes], positions: Sequence[int]
    ) -> ReadPictures:
        if self.info.pictures is None:
            return super().read_pictures(prompt, pictures, positions)
        rows = 0
        for data in pictures:
            header = read_header(data)
            rows += -(-header.width // _PATCH_PIXELS) * -(-header.height // _PATCH_PIXELS)
        names = b"".join(sha256(data).digest() for data in pictures)
        seed = int.from_bytes(sha256(names).digest()[:4], "big")
        return ReadPictures(extra_tokens=rows - len(pictures), content=seed)

    def use_pictures(self, key: str, pictures: ReadPictures) -> None:
        seed = pictures.content
        if not isinstance(seed, int):
            raise ValueError(f"{key!r}: these pictures were not read by a toy")
        self._seeing[key] = self.model.perturbed(_PICTURE_STRENGTH, seed)
        if self._memory is not None:
            self._memory.begin_with(key, hash((_BEGINNING, seed)))

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self._check(batch)
        if self._memory is not None:
            self._memory.write(batch, [self._cached(request) for request in batch])
        self.passes += 1
        self.rows += sum(request.row_count for request in batch)
        return [self._run(request) for request in batch]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        sequence = self._sequence(key)
        length = len(sequence.tokens)
        sequence.keep(key, nodes)
        if self._memory is not None:
            self._memory.keep(key, length, nodes)

    def close(self, key: str) -> None:
        self._sequences.pop(key, None)
        self._seeing.pop(key, None)
        self._constrained.close(key)
        if self._memory is not None:
            self._memory.forget(key)

    def shift(self, key: str, first: int) -> None:
        """Move the window of a sequence, as ``packed_drafter.DraftModel.shift``."""
        self._sequence(key).first = first

    def _sequence(self, key: str) -> SequenceText:
        if key not in self._sequences:
            raise ValueError(f"sequence {key!r} is not open")
        return self._sequences[key]

    def _check(self, batch: Sequence[PassRequest]) -> None:
        check_batch(batch, self._cached_length, self.info)
        for request in batch:
            sequence, first = self._sequence(request.key), request.cache_length
            for known in (sequence.tokens, sequence.text):
                again = known[first : first + len(request.feed)]
                if tuple(again) != request.feed[: len(again)]:
                    raise ValueError(
                        f"{request.key!r}: fed tokens differ from the committed ones cached"
                    )
        touched = {request.key: request.cache_length + request.row_count for request in batch}
        total = sum(
            touched.get(key, len(sequence.tokens)) for key, sequence in self._sequences.items()
        )
        if total > self._max_cached_tokens:
            raise CapacityError(f"{total} cached tokens wanted, limit {self._max_cached_tokens}")

    def _cached_length(self, request: PassRequest) -> int:
        return self._sequence(request.key).reach(request)

    def _cached(self, request: PassRequest) -> Sequence[int]:
        sequence, length = self._sequences[request.key], request.cache_length
        return (sequence.tokens if length <= len(sequence.tokens) else sequence.text)[:length]

    def _run(self, request: PassRequest) -> PassResult:
        sequence = self._sequences[request.key]
        sequence.cut(request.cache_length)
        sequence.tokens.extend(request.feed)
        sequence.nodes, sequence.parents = request.tokens, request.parents
        if not request.sample:
            return PassResult(request.key, ())
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(request.tokens, request.parents, strict=True):
            paths.append((*paths[1 + parent], token))
        params, length = sequence.sampling, sequence.first + len(sequence.tokens)
        masks = self._constrained.masks(request.key, sequence, request.tokens, request.parents)
        # Only the tail and, when penalised, the whole text are looked at.
        model = self._seeing.get(request.key, self.model)
        rows = [model.logits(self._tail(sequence, path)) for path in paths]
        said = [self._said(sequence, path) for path in paths]
        targets = tuple(
            [
                laws.choose(row, params, length + len(path), *texts, mask)
                for path, row, texts, mask in zip(paths, rows, said, masks, strict=True)
            ]
        )
        scores: list[work.TokenScore] = []
        if count := request.logprobs:
            pairs = zip(rows, targets, strict=True)
            scores = [work.score_token(row, token, count) for row, token in pairs]
        nodes_scored: list[work.NodeScore] = []
        if request.node_scores:
            for token, parent in zip(request.tokens, request.parents, strict=True):
                row, mask = rows[1 + parent], masks[1 + parent]
                law = laws.warp(laws.mask_logits(row, mask), params, *said[1 + parent])
                nodes_scored.append(work.score_node(law, row, token))
        return PassResult(request.key, targets, tuple(scores), node_scores=tuple(nodes_scored))

    def _tail(self, sequence: SequenceText, path: tuple[int, ...]) -> list[int]:
        """Return the tokens that the model's logits depend on, without a copy of a long text."""
        return [*sequence.tokens[-self.model.order :], *path] if self.model.order else []

    def _said(
        self, sequence: SequenceText, path: tuple[int, ...]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the prompt and the output up to the end of ``path`` if penalties need them, else
        nothing."""
        if not sequence.sampling.is_penalised:
            return (), ()
        length = sequence.prompt_length
        return sequence.tokens[:length], [*sequence.tokens[length:], *path]


class ToyServerDrafter:
    """A ``ports.ServerDrafter`` over a ``ToyModel``, with the standard library only.

    ``max_cached_tokens`` bounds its cache: a sequence that finds no room gets no guess, and the
    other sequences keep their tokens. ``info`` gives context and end tokens."""

    def __init__(
        self, model: ToyModel, info: ModelInfo, *, max_cached_tokens: int = 1 << 20
    ) -> None:
        self._model, self.info = model, info
        self._max_cached_tokens = max_cached_tokens
        self._sequences: dict[str, SequenceText] = {}
        self._constrained = ConstrainedRows(info)

    def open(
        self, key: str, prompt_length: int, sampling: laws.SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._constrained.open(key, sampling)
        self._sequences[key] = SequenceText(prompt_length, sampling)

    def step(self, batch: Sequence[work.DraftStep]) -> list[tuple[work.Candidate, ...]]:
        return [self._step(step) for step in batch]

    def close(self, key: str) -> None:
        self._sequences.pop(key, None)
        self._constrained.close(key)

    def _step(self, step: work.DraftStep) -> tuple[work.Candidate, ...]:
        sequence, length = self._sequences.get(step.key), step.keep_length + len(step.feed)
        if sequence is None:
            return ()
        tokens = sequence.tokens
        others = sum(len(one.tokens) for one in self._sequences.values()) - len(tokens)
        fits = length <= min(self.info.context_length, self._max_cached_tokens - others)
        if step.keep_length > len(tokens) or not fits:
            tokens.clear()
            return ()
        tokens[step.keep_length :] = step.feed
        if not step.guess:
            return ()
        try:
            (mask,) = self._constrained.masks(step.key, sequence, (), ())
        except ModelOutputError:
            tokens.clear()
            return ()
        logits = self._model.logits(tokens)
        prompt, output = tokens[: sequence.prompt_length], tokens[sequence.prompt_length :]
        token = laws.choose(logits, sequence.sampling, length, prompt, output, mask)
        return (work.Candidate(token, work.score_token(logits, token, 1).logprob),)
