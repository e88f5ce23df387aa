"""A toy model that can write JSON because each letter is a token, with an agent and a verifier that
constrain its generations by grammars."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from edgespec.core.protocol.messages import Limits
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import Agent
from edgespec.device.drafters.toy import ToyDrafter, toy_info
from edgespec.models.grammar import GrammarReader, make_letters_tokenizer
from edgespec.models.grammar_trial import GrammarTrials
from edgespec.models.tokenizer import ChatTemplate
from edgespec.testing import LoopbackTransport
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from tests.core.test_constraints import EOS

LETTERS = "\0\n" + "".join(map(chr, range(32, 127)))
MODEL = ToyModel(len(LETTERS), order=2, seed=3, sharpness=1.0, eos_token=EOS, eos_probability=0.05)


class Untried(GrammarTrials):
    """Grammar trials that assume that every grammar needs little time."""

    def find_fault(self, request: Mapping[str, Any], within_s: float) -> str:
        return ""


READER = GrammarReader(lambda: make_letters_tokenizer(LETTERS, EOS))
READER.trials = Untried()


def text_of(tokens: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in tokens if token != EOS)


class LettersStream:
    def push(self, tokens: Sequence[int]) -> str:
        return text_of(tokens)

    def flush(self) -> str:
        return ""


class LettersTokenizer:
    """A ``ChatTokenizer`` whose chat template is ``template``."""

    def __init__(self, template: str = "") -> None:
        self._template = ChatTemplate(template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return text_of(tokens)

    def stream(self, prompt: Sequence[int] = ()) -> LettersStream:
        return LettersStream()

    def find_new(self, text: str) -> list[str]:
        return [text]

    def chat_template(self, *, tools: bool = False) -> ChatTemplate | None:
        return self._template

    added: Mapping[str, int] = MappingProxyType({})

    def special_id(self, text: str) -> int | None:
        return None

    def token_bytes(self, token: int) -> bytes:
        return text_of([token]).encode()


@asynccontextmanager
async def connect_pair(
    reads: GrammarReader | None, drafts: GrammarReader | None
) -> AsyncIterator[Agent]:
    """Connect an agent and a verifier of letters, each with a grammar library or without."""
    target = ToyTarget(MODEL, vocabulary=toy_info(MODEL).vocabulary)
    verifier = Verifier(target, Limits(), read_constraint=reads)
    transport = LoopbackTransport(verifier.serve, lambda: verifier.info)
    one = Agent(
        transport,
        ToyDrafter(MODEL.perturbed(0.2)),
        LettersTokenizer().encode,
        LettersTokenizer().stream,
        read_constraint=drafts,
    )
    try:
        yield one
    finally:
        await one.close()
        await verifier.stop()
