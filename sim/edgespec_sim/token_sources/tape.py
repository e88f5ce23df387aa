"""Tokens from a match tape: real texts, and how well a real draft did on them.

Theory of operation. Request number n plays generation n of the tape, in an order that ``seed``
shuffles and that begins anew when the tape is through. With a prompt length of 0 the request has
the recorded prompt; with any other, a prompt of that length which names the generation, for worlds
that say how long prompts are. The text and its ranks are the recorded ones either way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.telemetry.match_tape import MatchTape, TapeError, read_tape
from edgespec_sim.token_sources.scripted_models import (
    CONTEXT_LENGTH,
    Script,
    ScriptedDrafter,
    ScriptedTarget,
    ScriptError,
    coded_prompt,
    number_of,
)
from edgespec_sim.token_sources.source import Request

LEAST_VOCABULARY = 32_000
_FOLDER = "data/tapes"


def tape_named(name: str, folder: Path = Path()) -> MatchTape:
    """The tape in a file, looked for in ``folder``, or a bundled one. Raises ``TapeError``."""
    path = folder / name
    if path.is_file():
        return read_tape(path)
    tapes = resources.files("edgespec_sim").joinpath(_FOLDER)
    bundled = sorted(
        one.name.removesuffix(".jsonl") for one in tapes.iterdir() if one.name.endswith(".jsonl")
    )
    if name not in bundled:
        raise TapeError(f"{name}: no such file in {folder}, and bundled are {', '.join(bundled)}")
    with resources.as_file(tapes.joinpath(f"{name}.jsonl")) as file:
        return read_tape(file)


class TapeSource:
    """``tokens.TokenSource`` over a tape."""

    def __init__(self, tape: MatchTape, seed: int = 0) -> None:
        self.tape = tape
        ends = frozenset(tape.eos_token_ids)
        self._scripts = [
            Script(_until(ends, g.tokens), g.ranks, g.logprobs, g.second_logprobs)
            for g in tape.generations
        ]
        self._order = list(range(len(tape.generations)))
        random.Random(seed).shuffle(self._order)
        self._index = {g.prompt: i for i, g in enumerate(tape.generations)}
        largest = max(max(*g.prompt, *g.tokens) for g in tape.generations)
        size = max(LEAST_VOCABULARY, largest + 2)
        self._info = ModelInfo(
            "tape", f"tape-{tape.target}", size, CONTEXT_LENGTH, tape.eos_token_ids
        )

    @property
    def about(self) -> str:
        tape = self.tape
        positions = sum(len(g.tokens) for g in tape.generations)
        return (
            f"match tape of {tape.draft} drafting for {tape.target}: {len(tape.generations)} texts,"
            f" {positions} tokens, {tape.acceptance():.1%} accepted"
        )

    def target(self) -> ScriptedTarget:
        return ScriptedTarget(self._info, self._find)

    def drafter(self) -> ScriptedDrafter:
        return ScriptedDrafter(self._info, self._find, self.tape.width)

    def request(self, number: int, prompt_length: int, max_tokens: int) -> Request:
        """``prompt_length`` 0: the recorded prompt."""
        index = self._order[number % len(self._order)]
        size = self._info.vocabulary_size
        # Two generations of one prompt (under different seeds) cannot be told apart by it.
        own = self.tape.generations[index].prompt
        if prompt_length == 0 and self._index[own] == index:
            prompt = own
        else:
            prompt = coded_prompt(index, prompt_length or len(own), size)
        tokens = self._scripts[index].tokens
        # Nobody knows of an end token beforehand; where the recording stopped, a request must.
        ends = tokens[-1] in self.tape.eos_token_ids
        length = max_tokens if ends else min(max_tokens, len(tokens))
        return Request(prompt, SamplingParams(max_tokens=length))

    def expected(self, request: Request, count: int) -> Sequence[int]:
        length = min(count, request.sampling.max_tokens)
        return self._find(request.prompt, length).tokens[:length]

    def ranks(self, request: Request, count: int) -> Sequence[int]:
        return self._find(request.prompt, request.sampling.max_tokens).ranks[:count]

    def _find(self, prompt: tuple[int, ...], max_tokens: int) -> Script:
        index = self._index.get(prompt)
        if index is None:
            index = number_of(prompt, self._info.vocabulary_size)
        if index >= len(self._scripts):
            raise ScriptError(f"a prompt names text {index}, but there are {len(self._scripts)}")
        return self._scripts[index]


def _until(ends: frozenset[int], tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Up to the first end token, itself included."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: at + 1]
