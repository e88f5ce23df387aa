"""A verifier lends its tokenizer, also where its files could not be read once. Oracle: they are."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.wire.callers import TOKENIZER_LIMITS, Authenticator, CallLine, TokenizerAnswers
from edgespec.wire.tokenizer_lending import PackedFile, TextFileError, decode_list, encode_request

FILE = PackedFile.of("tokenizer.json", b"{}")
LIST = encode_request("", 0)


class Refused(Exception):
    """The call was ended with this text."""


async def _abort(code: object, details: str, metadata: object = ()) -> None:
    raise Refused(details)


CONTEXT: Any = SimpleNamespace(
    peer=lambda: "ipv4:10.0.0.1:5", invocation_metadata=lambda: (), abort=_abort
)


def _answers(*attempts: Exception | Sequence[PackedFile]) -> TokenizerAnswers:
    """Of files that are read as told, one attempt after the other."""
    left = list(attempts)

    def load() -> Sequence[PackedFile]:
        now = left.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    return TokenizerAnswers(load, CallLine(TOKENIZER_LIMITS, lambda: 0.0), Authenticator(None))


async def test_files_that_could_not_be_read_once_are_read_again() -> None:
    answers = _answers(OSError("too many open files"), [FILE])
    with pytest.raises(Refused, match=r"no tokenizer that it could send$"):
        await answers.answer(LIST, CONTEXT)
    for _ in range(2):
        assert decode_list(await answers.answer(LIST, CONTEXT)) == (FILE.entry,)
    await answers.close()


async def test_files_that_nobody_could_send_are_not_looked_at_again() -> None:
    answers = _answers(TextFileError("it has 99 bytes too many"))
    for _ in range(2):
        with pytest.raises(Refused, match="that it could send: it has 99 bytes too many"):
            await answers.answer(LIST, CONTEXT)
    await answers.close()
