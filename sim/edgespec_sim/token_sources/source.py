"""The sources of a simulated world's tokens: one interface with three implementations.

Theory of operation. A world needs a target, a drafter for each device, and the users' requests. A
``TokenSource`` makes all three, so that they fit together, and describes itself. Every report names
the source, because an acceptance rate is only as good as its source.

    toy model     laws of a few lines: every rule of sampling holds, and trees really branch
    match tape    recorded agreement of a real pair of models on real text
    process       artificial agreement with the statistics of a tape
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from edgespec.core.ports import (
    CacheShape,
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    PassRequest,
    PassResult,
    SimpleTarget,
    TargetModel,
    never_cancelled,
)
from edgespec.core.protocol.messages import EXACT_RULE, FinishReason
from edgespec.core.protocol.sampling import (
    GOLDEN,
    MASK_32,
    MinTokensMask,
    SamplingParams,
    choose,
    mix_bits,
)
from edgespec.core.protocol.tree import EndCondition
from edgespec.core.toy_model import ToyModel
from edgespec.device.drafters.toy import DEFAULT_CONTEXT_LENGTH, ToyDrafter, toy_info
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.links.network_trace import find_file
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw
from edgespec_sim.token_sources.match_tape import MatchTape, TapeError, read_tape, walk_along


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A user's request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    """Sampling. The output ends at ``max_tokens`` or at an end token of the target, whichever is
    first."""


class TokenSource(Protocol):
    rule: str
    """Name of the acceptance rule that sessions request: the exact rule, or a relaxed one
    (LOSSY)."""

    @property
    def about(self) -> str:
        """One line for reports: the source, its origin and its acceptance rate."""

    def target(self) -> TargetModel:
        """Return a new target. Each verifier has its own, and all of them continue a request
        alike."""

    def drafter(self, further: Sequence[float] = ()) -> Drafter:
        """Return a new drafter. Each device has its own. ``further`` are the accuracies of the
        further places of a parallel draft, as in ``ScriptedDrafter``."""

    def request(
        self, number: int, prompt_length: int, max_tokens: int, turn: int = 0
    ) -> TokenRequest:
        """Return the world's request of that number (0, 1, ...), the same for the same number,
        turn and lengths. The prompt of a later ``turn`` begins with the earlier prompts, but for
        their last token. A tape has one turn only, and outputs of its own lengths, which may be cut
        but not lengthened."""

    def expected(self, request: TokenRequest, count: int) -> Sequence[int]:
        """Return the first ``count`` tokens of the target's output, computed without any session.
        Delivered tokens are compared with them."""


# --- scripts: outputs known beforehand, and two models that reproduce them ---------------------
# A *script* is the target's output after a prompt, with the rank of each token among the draft's
# candidates. The prompt contains the script's number, so any target and any drafter can find it.
# The target produces the script's token wherever the tokens before it are the script's. The drafter
# proposes that token at its rank, and wrong tokens at all other ranks. Off the script, the tokens
# of both are arbitrary, because nothing is ever committed after a wrong draft node.
#     code       a prompt that encodes a number: its digits, then one filler token to the end; on
#                a later turn of a conversation its last token is the turn's number
#     on script  every token so far is the script's; an index of the output, -1 before it
# The work of a step or pass is proportional to the tokens fed, whatever the length of the output.
# Both models check the cache contract of ``ports``, and raise ``ScriptError`` if it is broken.

CONTEXT_LENGTH: Final = 1 << 24
"""A script needs no memory for its context, so the verifier's limits apply."""
CODE_LENGTH: Final = 3
"""Tokens of a prompt that encode its number."""
_NEVER: Final = 1 << 62


class ScriptError(ValueError):
    """A scripted model was used in a way that violates the contract of real models."""


@dataclass(frozen=True, slots=True)
class Script:
    """The target's output. ``ranks[i]`` is the rank of ``tokens[i]``; negative if it is no
    candidate."""

    tokens: Sequence[int]
    ranks: Sequence[int]
    logprobs: Sequence[float] = ()
    """Log-probabilities of the draft's first candidate before each token. Empty: 0, which is
    certainty."""
    second_logprobs: Sequence[float] = ()
    """Log-probabilities of its second candidate, which also stand for all further ones."""


FindScript = Callable[[tuple[int, ...], int], Script]
"""Finds the script of a prompt, at least as long as max_tokens (the second argument) or up to its
end."""


def encode_number(number: int, length: int, base: int, turn: int = 0) -> tuple[int, ...]:
    """Return a prompt of ``length`` tokens below ``base`` that encodes ``number`` and ``turn``.
    Raises ``ScriptError`` if they do not fit."""
    digits = min(length, CODE_LENGTH)
    if not 0 <= number < (base - 1) ** digits:
        limit = (base - 1) ** digits
        raise ScriptError(f"request number is {number}, but {digits} tokens hold 0 to {limit - 1}")
    code = [number // (base - 1) ** place % (base - 1) for place in range(digits)]
    if not turn:
        return (*code, *(base - 1,) * (length - digits))
    if length <= CODE_LENGTH or not 0 <= turn < base:
        raise ScriptError(f"turn {turn} does not fit a prompt of {length} tokens below {base}")
    return (*code, *(base - 1,) * (length - digits - 1), turn - 1)


def decode_number(prompt: Sequence[int], base: int) -> int:
    """Return the number that ``encode_number`` encoded, or another one for each later turn of it.
    Raises ``ScriptError`` for any other prompt."""
    code, filler, turn = prompt[:CODE_LENGTH], base - 1, 0
    rest = prompt[CODE_LENGTH:]
    if rest and rest[-1] < filler:
        turn, rest = rest[-1] + 1, rest[:-1]
    if not code or max(code) >= filler or rest.count(filler) != len(rest):
        raise ScriptError(f"a prompt that begins with {tuple(code)} names no script")
    number: int = sum(digit * filler**place for place, digit in enumerate((*code, turn)))
    return number


class _ScriptReader:
    """One sequence's position in its script: the length of its cache, and whether it is on
    script."""

    __slots__ = (
        *("_find", "_max_tokens", "length", "nodes", "off_at", "parents", "prompt"),
        *("prompt_length", "script"),
    )

    def __init__(self, prompt_length: int, max_tokens: int, find: FindScript) -> None:
        self.prompt_length, self._max_tokens, self._find = prompt_length, max_tokens, find
        self.prompt: list[int] = []
        self.script: Script | None = None
        self.length = 0
        self.off_at = _NEVER
        """The first cached position that differs from the script."""
        self.nodes: tuple[int, ...] = ()
        self.parents: tuple[int, ...] = ()
        """In a target: the tree of its last pass, until it is kept or dropped."""

    def advance(self, keep_length: int, feed: Sequence[int]) -> int:
        """Truncate and append. Returns the index of the next output token, or -1 within the
        prompt."""
        if not 0 <= keep_length <= self.length:
            raise ScriptError(f"{keep_length} tokens kept, but {self.length} are cached")
        if not feed:
            raise ScriptError("feed is empty, but must hold at least one token")
        if keep_length <= self.off_at:
            self.off_at = _NEVER
        script = self.script
        if script is None:
            return self._read_prompt(keep_length, feed)
        index = keep_length - self.prompt_length
        self.length = keep_length + len(feed)
        if self.off_at == _NEVER:
            tokens = script.tokens
            for token in feed:
                # The last tokens of the prompt may be fed again; the script does not contain them.
                if index >= 0 and (index >= len(tokens) or tokens[index] != token):
                    self.off_at = self.prompt_length + index
                    break
                index += 1
        return self.length - self.prompt_length

    def _read_prompt(self, keep_length: int, feed: Sequence[int]) -> int:
        missing = self.prompt_length - keep_length
        self.prompt[keep_length:] = feed[:missing]
        self.length = len(self.prompt)
        if self.length < self.prompt_length:
            return -1
        self.script = self._find(tuple(self.prompt), self._max_tokens)
        self.prompt.clear()
        return self.advance(self.length, feed[missing:]) if len(feed) > missing else 0


class ScriptedTarget(SimpleTarget):
    """A ``ports.TargetModel`` that reproduces scripts. Raises ``ScriptError``."""

    def __init__(self, info: ModelInfo, find: FindScript) -> None:
        self.passes = 0
        """Number of passes so far. ``rows`` counts their rows."""
        self.rows = 0
        self.info, self.mode, self._find = info, "scripted", find
        self.cache: CacheShape | None = None
        self._sequences: dict[str, _ScriptReader] = {}
        self._texts: dict[str, Sequence[int]] = {}
        """Texts of the sequences, which may begin behind cached tokens."""

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        if key in self._sequences:
            raise ScriptError(f"sequence {key!r} is already open")
        self._sequences[key] = _ScriptReader(prompt_length, sampling.max_tokens, self._find)
        self._texts[key] = text

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self.passes += 1
        self.rows += sum([len(request.feed) + len(request.tokens) for request in batch])
        return [self._run(request) for request in batch]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        played = self._sequences[key]
        if nodes:
            parent = -1
            for node in nodes:
                if not 0 <= node < len(played.nodes) or played.parents[node] != parent:
                    raise ScriptError(f"nodes {list(nodes)} of {key!r} are no path from the root")
                parent = node
            played.advance(played.length, [played.nodes[node] for node in nodes])
        played.nodes = played.parents = ()

    def close(self, key: str) -> None:
        self._sequences.pop(key, None)
        self._texts.pop(key, None)

    def _run(self, request: PassRequest) -> PassResult:
        key, nodes = request.key, request.tokens
        if key not in self._sequences:
            raise ScriptError(f"sequence {key!r} is not open")
        played = self._sequences[key]
        text = self._texts[key]
        if played.length < request.cache_length <= len(text):
            # These rows were computed by another sequence.
            played.advance(played.length, text[played.length : request.cache_length])
        index = played.advance(request.cache_length, request.feed)
        if played.off_at != _NEVER:
            raise ScriptError(f"{key!r}: committed tokens are not the target's own")
        played.nodes, played.parents = nodes, request.parents
        if not request.sample:
            return PassResult(key, ())
        if played.script is None:
            raise ScriptError(f"{key!r}: a token is requested before the prompt is complete")
        tokens = played.script.tokens
        end = len(tokens)
        targets = [tokens[index] if index < end else 0]
        # The depth of each node that is on script, and -1 for the others.
        depths: list[int] = []
        for token, parent in zip(nodes, request.parents, strict=True):
            depth = depths[parent] if parent >= 0 else 0
            at = index + depth
            if depth >= 0 and at < end and tokens[at] == token:
                depths.append(depth + 1)
                targets.append(tokens[at + 1] if at + 1 < end else 0)
            else:
                depths.append(-1)
                targets.append(0)
        return PassResult(key, tuple(targets))


class ScriptedDrafter:
    """A ``ports.Drafter`` that proposes scripts at their ranks, which are known below
    ``max_width``.

    ``further`` makes it a parallel draft: the chance of each further place that a first candidate
    which one step for that position alone would get right is right there too. Raises
    ``ScriptError``."""

    inner: Drafter | None = None

    def __init__(
        self, info: ModelInfo, find: FindScript, max_width: int, further: Sequence[float] = ()
    ) -> None:
        self.info, self._find, self._max_width = info, find, max_width
        self.max_places, self._further = 1 + len(further), further
        self._size = info.vocabulary_size
        self._reading = _ScriptReader(1, 1, find)

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._reading = _ScriptReader(prompt_length, sampling.max_tokens, self._find)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        return self._candidates(self._read(keep_length, feed, width), feed[-1], width, 0)

    def step_places(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        places: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[tuple[Candidate, ...], ...]:
        index = self._read(keep_length, feed, width)
        last = min(places, self.max_places)
        return tuple(self._candidates(index, feed[-1], width, place) for place in range(last))

    def _read(self, keep_length: int, feed: Sequence[int], width: int) -> int:
        """Feed tokens and return the index of the next output token."""
        if not 1 <= width <= self._max_width:
            raise ScriptError(f"width is {width}, but the ranks known are below {self._max_width}")
        return self._reading.advance(keep_length, feed)

    def _candidates(self, index: int, token: int, width: int, place: int) -> tuple[Candidate, ...]:
        """Return the candidates ``place`` positions behind output index ``index``, which is behind
        ``token``."""
        reading = self._reading
        script = reading.script
        if script is None:
            raise ScriptError("a candidate is requested before the prompt is complete")
        rank, index = -1, index + place
        if reading.off_at == _NEVER and index < len(script.tokens):
            rank, token = script.ranks[index], script.tokens[index]
            if place:
                rank = _worsened(rank, token, index, place, self._further[place - 1])
        # Off script no log-probabilities are known: those of another place of the script are used.
        at_index = index if reading.off_at == _NEVER else index * 31 + token
        first, further = (
            _logprob_at(script.logprobs, at_index),
            _logprob_at(script.second_logprobs, at_index),
        )
        # The tokens next to the right one are wrong and distinct, and have varints of the same
        # length.
        size = self._size
        return tuple(
            [
                Candidate(
                    token if at == rank else (token + 1 + at) % size, further if at else first
                )
                for at in range(width)
            ]
        )

    def close(self) -> None:
        self._reading = _ScriptReader(1, 1, self._find)


_SECOND_SHARE: Final = 0.3
"""Share of the tokens that a further place no longer has first, but second: as measured with a
trained draft (docs/measurements/drafts.md)."""


def _worsened(rank: int, token: int, index: int, place: int, kept: float) -> int:
    """Return the rank of the script's token in a further place, which keeps a first candidate with
    the chance ``kept``. It is the same in every run that drafts for this index at this place."""
    if rank < 0:
        return rank
    drawn = mix_bits(mix_bits(token * GOLDEN + index) + place) / (MASK_32 + 1)
    if drawn < kept:
        return rank
    return 1 if rank == 0 and drawn < kept + _SECOND_SHARE * (1.0 - kept) else -1


def _logprob_at(logprobs: Sequence[float], place: int) -> float:
    return logprobs[place % len(logprobs)] if logprobs else 0.0


# --- tokens from a match tape ------------------------------------------------------------------
# Request number n plays generation n of the tape, in an order that ``seed`` shuffles and that
# repeats after the last generation. With a prompt length of 0 the request has the recorded prompt.
# With any other length it has a prompt of that length which encodes the generation, for worlds that
# set the length of prompts. The output and its ranks are the recorded ones either way.

LEAST_VOCABULARY = 32_000
_FOLDER = "data/tapes"


def load_tape(name: str, folder: Path = Path()) -> MatchTape:
    """Return the tape in a file, looked for in ``folder``, or a bundled tape. Raises
    ``TapeError``."""
    path = find_file(name, folder)
    if path.is_file():
        return read_tape(path)
    tapes = resources.files("edgespec_sim").joinpath(_FOLDER)
    bundled = sorted(
        one.name.removesuffix(".jsonl") for one in tapes.iterdir() if one.name.endswith(".jsonl")
    )
    if name not in bundled:
        raise TapeError(f"{name}: no such file in {folder}; bundled tapes are {', '.join(bundled)}")
    with resources.as_file(tapes.joinpath(f"{name}.jsonl")) as file:
        return read_tape(file)


class _ScriptedSource(ABC):
    """The common part of sources of scripts. Subclasses define ``_find``; the draft knows ``width``
    ranks."""

    rule = EXACT_RULE

    def __init__(self, info: ModelInfo, width: int) -> None:
        self._info, self._width = info, width

    def target(self) -> ScriptedTarget:
        return ScriptedTarget(self._info, self._find)

    def drafter(self, further: Sequence[float] = ()) -> ScriptedDrafter:
        return ScriptedDrafter(self._info, self._find, self._width, further)

    def expected(self, request: TokenRequest, count: int) -> Sequence[int]:
        max_tokens = request.sampling.max_tokens
        return self._find(request.prompt, max_tokens).tokens[: min(count, max_tokens)]

    @abstractmethod
    def _find(self, prompt: tuple[int, ...], max_tokens: int) -> Script:
        """Return the script that the prompt encodes."""


class TapeSource(_ScriptedSource):
    """A ``TokenSource`` that replays a tape."""

    def __init__(self, tape: MatchTape, seed: int = 0) -> None:
        self.tape = tape
        ends = frozenset(tape.eos_token_ids)
        self._scripts = [
            Script(_cut_at_end(ends, g.tokens), g.ranks, g.logprobs, g.second_logprobs)
            for g in tape.generations
        ]
        self._order = list(range(len(tape.generations)))
        random.Random(seed).shuffle(self._order)
        self._index = {g.prompt: i for i, g in enumerate(tape.generations)}
        largest = max(max(*g.prompt, *g.tokens) for g in tape.generations)
        size = max(LEAST_VOCABULARY, largest + 2)
        info = ModelInfo("tape", f"tape-{tape.target}", size, CONTEXT_LENGTH, tape.eos_token_ids)
        super().__init__(info, tape.width)

    @property
    def about(self) -> str:
        tape = self.tape
        positions = sum(len(g.tokens) for g in tape.generations)
        return (
            f"match tape of {tape.draft} drafting for {tape.target}: {len(tape.generations)} texts,"
            f" {positions} tokens, {tape.acceptance():.1%} accepted"
        )

    def request(
        self, number: int, prompt_length: int, max_tokens: int, turn: int = 0
    ) -> TokenRequest:
        """Return a request. A ``prompt_length`` of 0 means the recorded prompt."""
        assert not turn, "as a scenario checks"
        index = self._order[number % len(self._order)]
        size = self._info.vocabulary_size
        # A prompt with two generations (under different seeds) identifies only one of them.
        own = self.tape.generations[index].prompt
        if prompt_length == 0 and self._index[own] == index:
            prompt = own
        else:
            prompt = encode_number(index, prompt_length or len(own), size)
        tokens = self._scripts[index].tokens
        # An end token is not known beforehand, but a request must stop where the recording stopped.
        ends = tokens[-1] in self.tape.eos_token_ids
        length = max_tokens if ends else min(max_tokens, len(tokens))
        return TokenRequest(prompt, SamplingParams(max_tokens=length))

    def _find(self, prompt: tuple[int, ...], max_tokens: int) -> Script:
        index = self._index.get(prompt)
        if index is None:
            index = decode_number(prompt, self._info.vocabulary_size)
        if index >= len(self._scripts):
            count = len(self._scripts)
            raise ScriptError(f"a prompt encodes output {index}, but there are {count}")
        return self._scripts[index]


def _cut_at_end(ends: frozenset[int], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens up to and including the first end token."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: at + 1]


# --- tokens from an acceptance process ---------------------------------------------------------
# The output and the ranks of request n are drawn from generators seeded by (seed, n). They are
# separate, so that equal seeds give equal outputs under any law. Both are drawn when the prompt is
# read, for all of ``max_tokens``, and kept for the other side of the same request.

VOCABULARY_SIZE = 32_000

# A request's drafter and target read its prompt within a round trip; a later reader draws it again.
_KEPT_SCRIPTS = 1024


class ProcessSource(_ScriptedSource):
    """A ``TokenSource`` over an ``AcceptanceLaw``, whose outputs never end before ``max_tokens``.
    ``errors`` numbers the random stream of the draft's ranks."""

    def __init__(self, law: AcceptanceLaw, seed: int = 0, errors: int = 1) -> None:
        self.law = law
        self._seed, self._errors = seed, errors
        super().__init__(
            ModelInfo("process", "process", VOCABULARY_SIZE, CONTEXT_LENGTH), law.width
        )
        self._kept: OrderedDict[tuple[int, int], Script] = OrderedDict()

    @property
    def about(self) -> str:
        return f"acceptance process {self.law.origin}: {self.law.acceptance():.1%} accepted"

    def with_draft_acceptance(self, acceptance: float) -> ProcessSource:
        """Return a source of the same outputs whose draft has this acceptance and independent
        errors."""
        return ProcessSource(self.law.at(acceptance), self._seed, self._errors + 1)

    def request(
        self, number: int, prompt_length: int, max_tokens: int, turn: int = 0
    ) -> TokenRequest:
        prompt = encode_number(number, prompt_length, VOCABULARY_SIZE, turn)
        return TokenRequest(prompt, SamplingParams(max_tokens=max_tokens))

    def _find(self, prompt: tuple[int, ...], max_tokens: int) -> Script:
        number = decode_number(prompt, VOCABULARY_SIZE)
        key = number, max_tokens
        script = self._kept.get(key)
        if script is None:
            script = self._kept[key] = self._draw(number, max_tokens)
            if len(self._kept) > _KEPT_SCRIPTS:
                self._kept.popitem(last=False)
        return script

    def _draw(self, number: int, length: int) -> Script:
        text, agreement, thinking = (
            np.random.default_rng([self._seed, number, *stream])
            for stream in ((0,), (self._errors,), (self._errors, 1))
        )
        tokens = (text.random(length) * VOCABULARY_SIZE).astype(int).tolist()
        return Script(tokens, *self.law.text(length, agreement, thinking))


# --- tokens from the toy model -----------------------------------------------------------------
# Prompts are drawn from (seed of the sampling, number). The sampling of each request has its own
# seed, so that requests have different noise. This source is slower than a tape or a process, and
# the only one in which wrong candidates have probabilities of their own.


# Enough tokens to measure the acceptance rate to a few per cent, in a fraction of a second.
_TRIAL_TOKENS = 256


class ToySource:
    """A ``TokenSource`` over a toy model and its perturbed draft.

    With ``lossy_threshold`` in [0, 1] it is LOSSY: its sessions request the product's own ``dsd``
    rule with that threshold, its engines offer no other rule, and the exact output, which
    ``expected`` returns, may differ from theirs."""

    def __init__(
        self,
        model: ToyModel,
        noise: float,
        sampling: SamplingParams,
        lossy_threshold: float | None = None,
    ) -> None:
        self._model, self._noise, self._sampling = model, noise, sampling
        self._lossy_threshold = lossy_threshold
        self.rule = EXACT_RULE if lossy_threshold is None else f"dsd:{lossy_threshold}"

    @cached_property
    def about(self) -> str:
        request = self.request(0, 3, _TRIAL_TOKENS)
        tokens = self.expected(request, _TRIAL_TOKENS)
        drafter = self.drafter()
        drafter.begin(len(request.prompt), request.sampling)
        ranks = walk_along(drafter.step, request.prompt, tokens, 1).ranks
        about = (
            f"toy model of {self._model.vocabulary_size} tokens, draft noise {self._noise:g},"
            f" temperature {self._sampling.temperature:g}:"
            f" {ranks.count(0) / len(ranks):.0%} accepted"
        )
        share = self._lossy_threshold
        return about if share is None else f"{about}; LOSSY from {share} of the best token on"

    def target(self) -> ToyTarget:
        return ToyTarget(
            self._model,
            vocabulary=toy_info(self._model).vocabulary,
            context_length=DEFAULT_CONTEXT_LENGTH,
            max_sessions=1 << 20,
            max_cached_tokens=1 << 30,
        )

    def drafter(self, further: Sequence[float] = ()) -> ToyDrafter:
        return ToyDrafter(self._model.perturbed(self._noise))

    def request(
        self, number: int, prompt_length: int, max_tokens: int, turn: int = 0
    ) -> TokenRequest:
        seed = self._sampling.seed
        dice = random.Random(f"{seed}/{number}")
        size = self._model.vocabulary_size
        prompt = tuple(dice.randrange(size) for _ in range(prompt_length))
        return TokenRequest(
            prompt, replace(self._sampling, seed=seed + number, max_tokens=max_tokens)
        )

    def expected(self, request: TokenRequest, count: int) -> Sequence[int]:
        most = min(count, request.sampling.max_tokens)
        least = min(most, request.sampling.min_tokens)
        mine = replace(request.sampling, max_tokens=most, min_tokens=least)
        return target_tokens(self._model, request.prompt, mine, DEFAULT_CONTEXT_LENGTH)[0]


def target_tokens(
    model: ToyModel, prompt: Sequence[int], sampling: SamplingParams, context_length: int
) -> tuple[tuple[int, ...], FinishReason]:
    """Return the target's own output, token by token from the law itself, and its finish reason."""
    eos = () if model.eos_token is None else (model.eos_token,)
    ending = EndCondition.of(sampling, len(prompt), context_length, eos)
    held = MinTokensMask(sampling, model.vocabulary_size, eos)
    tokens: list[int] = []
    while True:
        text, mask = (*prompt, *tokens), held.mask(None, len(tokens))
        token = choose(model.logits(text), sampling, len(text), prompt, tokens, mask)
        tokens.append(token)
        if token in ending.stop_ids:
            return tuple(tokens), FinishReason.STOP
        if len(text) + 1 >= ending.end:
            full = len(tokens) >= sampling.max_tokens
            return tuple(tokens), FinishReason.LENGTH if full else FinishReason.CONTEXT
