"""The toy model and its text: one letter a token, so that a toy's output can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from edgespec.core.ports import ModelInfo
from edgespec.core.toy_model import ToyModel
from edgespec.models.tokenizer import ChatTemplate

TOY = "toy"
TOY_CONTEXT_LENGTH = 4096
TOY_EOS = 0
# One letter an id; id 0 ends the text. 64 ids in all, as in ``TOY_MODEL``.
TOY_ALPHABET = "\0abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "
TOY_MODEL = ToyModel(len(TOY_ALPHABET), order=3, sharpness=3.0, eos_token=TOY_EOS)
TOY_PICTURE = TOY_ALPHABET.index("9")
"""The placeholder of pictures in prompts of the toy."""
_SPACE = TOY_ALPHABET.index(" ")


def toy_info() -> ModelInfo:
    """Return the toy's vocabulary and context."""
    size = len(TOY_ALPHABET)
    return ModelInfo("toy", f"toy-{size}", size, TOY_CONTEXT_LENGTH, (TOY_EOS,))


_TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else '9' }}{% endfor %}"
    "{% endif %} {% endfor %}"
)


class ToyTokenizer:
    """A tokenizer with the methods of ``TextTokenizer`` that agents and the command line use. A
    character outside the alphabet becomes a space. It is its own ``TextStream``: a token is a whole
    letter, so nothing is held back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = {letter: number for number, letter in enumerate(TOY_ALPHABET)}
        return [ids.get(letter, _SPACE) for letter in text if letter != "\0"]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(TOY_ALPHABET[token] for token in tokens if token != TOY_EOS)

    def stream(self, prompt: Sequence[int] = ()) -> ToyTokenizer:
        return self

    def push(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens)

    def flush(self) -> str:
        return ""

    def find_new(self, text: str) -> list[str]:
        return [text]

    def chat_template(self, *, tools: bool = False) -> ChatTemplate | None:
        """Return the toy's template: the contents, with a space behind each, and a 9 for each
        picture."""
        return ChatTemplate(_TEMPLATE)

    added: Mapping[str, int] = MappingProxyType({})
    id_count = len(TOY_ALPHABET)

    def special_id(self, text: str) -> int | None:
        return None

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode() if 0 <= token < self.id_count else b""
