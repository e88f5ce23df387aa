"""A device takes no tokenizer file that was not announced as it came, and waits for lost links.

Oracle: the bytes that a verifier packed, and the bounds that the messages name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.core.ports import LinkError
from edgespec.wire.callers import TOKENIZER_LIMITS, Authenticator, CallLine, TokenizerAnswers
from edgespec.wire.tokenizer_lending import (
    MAX_TEXT_BYTES,
    PackedFile,
    TextFile,
    TextFileError,
    TokenizerFetch,
    check_entries,
    decode_list,
    decode_request,
    encode_list,
    encode_part,
    encode_request,
    unpacked,
)


def entry(**changes: object) -> TextFile:
    found = PackedFile.of("tokenizer.json", b"x" * 100).entry
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(name="../../.bashrc")], "none of tokenizer.json"),
        ([entry(), entry()], "must be distinct"),
        ([entry(name="chat_template.jinja")], "tokenizer.json among them"),
        ([entry(sha256=b"short")], "has 5 bytes, but must have 32"),
        ([entry(packed_size=1 << 30)], "1073741824 packed ones"),
        ([entry(packed_size=0)], "0 packed ones"),
        ([entry(size=MAX_TEXT_BYTES + 1)], "at most 67108864 are taken"),
    ],
)
def test_lists_over_a_bound_are_refused(entries: list[TextFile], message: str) -> None:
    with pytest.raises(TextFileError, match=message):
        check_entries(entries)


def test_nothing_is_unpacked_beyond_what_was_announced() -> None:
    bomb = zlib.compress(bytes(1 << 26))
    sha256 = hashlib.sha256(bytes(1000)).digest()
    for packed, message in (
        (bomb, "not the 1000 bytes"),
        (b"no zlib", "cannot be unpacked"),
        (zlib.compress(bytes(999)), "not the 1000 bytes"),
        (zlib.compress(bytes(1000)) + b"more", "not the 1000 bytes"),
        (zlib.compress(b"y" * 1000), "SHA-256"),
    ):
        with pytest.raises(TextFileError, match=message):
            unpacked(TextFile("tokenizer.json", 1000, sha256, len(packed)), packed)


Lie = Callable[[bytes], bytes]


def answering(files: list[PackedFile], lie: Lie = lambda part: part) -> TokenizerFetch:
    """A verifier that sends these files, each part changed by ``lie``."""

    async def ask(request: bytes) -> bytes:
        name, offset = decode_request(request)
        if not name:
            return encode_list([file.entry for file in files])
        (file,) = (file for file in files if file.entry.name == name)
        return encode_part(lie(file.part(offset)))

    return TokenizerFetch(ask, "there")


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda part: b"", "must be in"),
        (lambda part: part + part, "longer than was announced"),
        (lambda part: bytes(len(part)), "cannot be unpacked"),
    ],
)
async def test_parts_that_do_not_fit_are_refused(lie: Lie, message: str) -> None:
    fetch = answering([PackedFile.of("tokenizer.json", b"abc" * 1000)], lie)
    (found,) = await fetch.entries()
    with pytest.raises(LinkError, match=message) as refused:
        await fetch.content(found)
    assert not refused.value.retryable


async def test_a_lost_link_ends_no_fetch_and_a_gone_verifier_does() -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    tries = 0

    async def ask(request: bytes) -> bytes:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise LinkError("away")
        return encode_list([entry()])

    assert await TokenizerFetch(ask, "there", pause).entries() == (entry(),)
    tries = -100
    with pytest.raises(LinkError, match="away"):
        await TokenizerFetch(ask, "there", pause).entries()
    assert len(pauses) == 2 + 7


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
