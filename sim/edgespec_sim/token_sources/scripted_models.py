"""Texts known beforehand, and the two models that act them out: no logits, no time.

Theory of operation. A *script* is the target's text behind a prompt, with the rank each token has
among the draft's guesses. Which script it is stands in the prompt, so any target and any drafter
find it by themselves. The target says the script's token wherever the tokens before it are the
script's; the drafter guesses it at its rank and is wrong at all others. Off script, both say
something that cannot matter: behind a wrong guess nothing is ever committed.

    code      a prompt that names a number: its digits, then one filler token to the end
    on script every token so far is the script's; an index of the output, -1 before it

Work a step or pass is proportional to what is fed, whatever the length of the text. Both check the
cache contract of ``ports`` as they go and raise ``ScriptError`` when it is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from edgespec.core.ports import (
    CacheShape,
    Cancelled,
    Candidate,
    ModelInfo,
    PassRequest,
    PassResult,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams

CONTEXT_LENGTH: Final = 1 << 24
"""A script needs no memory of its context; bounds are the verifier's."""
CODE_LENGTH: Final = 3
"""Tokens of a prompt that name its number."""
_NEVER: Final = 1 << 62


class ScriptError(ValueError):
    """A scripted model was used in a way that no real one could be."""


@dataclass(frozen=True, slots=True)
class Script:
    """``ranks[i]`` is that of ``tokens[i]``; negative: none of the guesses."""

    tokens: Sequence[int]
    ranks: Sequence[int]
    logprobs: Sequence[float] = ()
    """Of the draft's first choice before each token; none: it is taken to be sure."""
    second_logprobs: Sequence[float] = ()
    """Of its second choice; further ones are held for as likely as that."""


FindScript = Callable[[tuple[int, ...], int], Script]
"""The script behind a prompt, at least as long as the (second) max_tokens or to its own end."""


def coded_prompt(number: int, length: int, base: int) -> tuple[int, ...]:
    """A prompt of ``length`` tokens that names ``number``; tokens are below ``base``. Raises
    ``ScriptError`` when the number does not fit."""
    digits = min(length, CODE_LENGTH)
    if not 0 <= number < (base - 1) ** digits:
        limit = (base - 1) ** digits
        raise ScriptError(f"request number is {number}, but {digits} tokens hold 0 to {limit - 1}")
    code = [number // (base - 1) ** place % (base - 1) for place in range(digits)]
    return (*code, *(base - 1,) * (length - digits))


def number_of(prompt: Sequence[int], base: int) -> int:
    """The number that ``coded_prompt`` put in. Raises ``ScriptError`` for any other prompt."""
    code, filler = prompt[:CODE_LENGTH], base - 1
    rest = prompt[CODE_LENGTH:]
    if not code or max(code) >= filler or rest.count(filler) != len(rest):
        raise ScriptError(f"a prompt that begins with {tuple(code)} names no script")
    return sum(digit * filler**place for place, digit in enumerate(code))


class _Reading:
    """One sequence's way along its script: how far the cache reaches, and how far on script."""

    __slots__ = ("_find", "_max_tokens", "length", "off_at", "prompt", "prompt_length", "script")

    def __init__(self, prompt_length: int, max_tokens: int, find: FindScript) -> None:
        self.prompt_length, self._max_tokens, self._find = prompt_length, max_tokens, find
        self.prompt: list[int] = []
        self.script: Script | None = None
        self.length = 0
        self.off_at = _NEVER
        """The first cached position that is not the script's."""

    def advance(self, keep_length: int, feed: Sequence[int]) -> int:
        """Truncate, append; the index of the output's token that comes next, -1 within the
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
                # The last tokens of the prompt may be fed again: nothing to compare them with.
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
        if len(feed) > missing:
            return self.advance(self.length, feed[missing:])
        return 0

    @property
    def on_script(self) -> bool:
        return self.off_at == _NEVER


class _Played(_Reading):
    """A sequence of a target, with the tree of its last pass until that is kept or dropped."""

    __slots__ = ("nodes", "parents")

    def __init__(self, prompt_length: int, max_tokens: int, find: FindScript) -> None:
        super().__init__(prompt_length, max_tokens, find)
        self.nodes: tuple[int, ...] = ()
        self.parents: tuple[int, ...] = ()


class ScriptedTarget:
    """``ports.TargetModel`` that acts scripts out. Raises ``ScriptError``."""

    def __init__(self, info: ModelInfo, find: FindScript) -> None:
        self.passes = 0
        """Passes so far, and the rows they had."""
        self.rows = 0
        self._info, self._find = info, find
        self._sequences: dict[str, _Played] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def cache(self) -> CacheShape | None:
        return None

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        if key in self._sequences:
            raise ScriptError(f"sequence {key!r} is already open")
        self._sequences[key] = _Played(prompt_length, sampling.max_tokens, self._find)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self.passes += 1
        self.rows += sum(request.row_count for request in batch)
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

    def _run(self, request: PassRequest) -> PassResult:
        key, nodes = request.key, request.tokens
        if key not in self._sequences:
            raise ScriptError(f"sequence {key!r} is not open")
        played = self._sequences[key]
        index = played.advance(request.cache_length, request.feed)
        if not played.on_script:
            raise ScriptError(f"{key!r}: committed tokens are not the target's own")
        played.nodes, played.parents = nodes, request.parents
        if not request.sample:
            return PassResult(key, ())
        if played.script is None:
            raise ScriptError(f"{key!r}: a token is wanted before the prompt is complete")
        tokens = played.script.tokens
        end = len(tokens)
        targets = [tokens[index] if index < end else 0]
        # Depth of each node that is on script, -1 for those that are not.
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
    """``ports.Drafter`` that guesses scripts at their ranks; it knows ranks below ``max_width``.

    Raises ``ScriptError``.
    """

    def __init__(self, info: ModelInfo, find: FindScript, max_width: int) -> None:
        self._info, self._find, self._max_width = info, find, max_width
        self._size = info.vocabulary_size
        self._reading = _Reading(1, 1, find)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._reading = _Reading(prompt_length, sampling.max_tokens, self._find)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        if not 1 <= width <= self._max_width:
            raise ScriptError(f"width is {width}, but the ranks known are below {self._max_width}")
        reading = self._reading
        index = reading.advance(keep_length, feed)
        script = reading.script
        if script is None:
            raise ScriptError("a guess is wanted before the prompt is complete")
        rank, token = -1, feed[-1]
        if reading.off_at == _NEVER and index < len(script.tokens):
            rank, token = script.ranks[index], script.tokens[index]
        # Off script nobody knows: as it was somewhere else in the text.
        place = index if reading.off_at == _NEVER else index * 31 + token
        first, further = _at(script.logprobs, place), _at(script.second_logprobs, place)
        # Neighbours of the right token are wrong and different, and have varints of its length.
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
        self._reading = _Reading(1, 1, self._find)


def _at(logprobs: Sequence[float], place: int) -> float:
    return logprobs[place % len(logprobs)] if logprobs else 0.0
