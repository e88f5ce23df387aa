"""The texts of a tokenizer as a verifier lends them: which files, how large, packed and unpacked,
and how a device fetches them: the list first, then what is missing, part by part.

A device takes nothing on trust: names are those of a fixed list, sizes are bounded before anything
is fetched or unpacked, and what comes has to have the length and the SHA-256 that were announced.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from edgespec.core.ports import LinkError
from edgespec.wire.codec import MAX_UINT64, ProtocolViolation, check_count, check_number, parse
from edgespec.wire.pb import speculation_pb2 as pb

TOKENIZER_JSON: Final = "tokenizer.json"
TEXT_FILES: Final = (
    TOKENIZER_JSON,
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""What prompts, texts and chats need of a model's folder; only the first has to be there."""
MAX_TEXT_BYTES: Final = 64 << 20
"""Of all files together; the largest public tokenizers have about 35 MB."""
PART_BYTES: Final = 1 << 17
SHA256_BYTES: Final = 32
# What zlib may add to a text that it cannot make smaller.
_PACKING_BYTES: Final = 1 << 16
_LEVEL: Final = 6
_MAX_REQUEST_BYTES: Final = 1 << 10
# A line that is full, or a link that is lost for a moment, ends no fetch.
_ATTEMPTS: Final = 8
_AGAIN_S: Final = 0.5


class TextFileError(ValueError):
    """A tokenizer's text is not what was announced, or over a bound; the message says which."""


@dataclass(frozen=True, slots=True)
class TextFile:
    name: str
    size: int
    """In bytes."""
    sha256: bytes
    packed_size: int
    """In bytes, as it travels."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    entry: TextFile
    packed: bytes

    @classmethod
    def of(cls, name: str, content: bytes) -> Self:
        packed = zlib.compress(content, _LEVEL)
        digest = hashlib.sha256(content).digest()
        return cls(TextFile(name, len(content), digest, len(packed)), packed)

    def part(self, offset: int) -> bytes:
        """At most ``PART_BYTES`` from ``offset`` on. Raises ``TextFileError`` beyond the end."""
        if not 0 <= offset < len(self.packed):
            raise TextFileError(
                f"offset is {offset}, but {self.entry.name} has {len(self.packed)} packed bytes"
            )
        return self.packed[offset : offset + PART_BYTES]


def check_entries(entries: Sequence[TextFile]) -> None:
    """Raises ``TextFileError`` for a list that no device should fetch."""
    names = [entry.name for entry in entries]
    for name in names:
        if name not in TEXT_FILES:
            raise TextFileError(f"file {name!r} is none of {', '.join(TEXT_FILES)}")
    if len(set(names)) < len(names) or TOKENIZER_JSON not in names:
        wrong = f"the files are {names}, but must be distinct, {TOKENIZER_JSON} among them"
        raise TextFileError(wrong)
    for entry in entries:
        if len(entry.sha256) != SHA256_BYTES:
            raise TextFileError(
                f"the SHA-256 of {entry.name} has {len(entry.sha256)} bytes, but must have"
                f" {SHA256_BYTES}"
            )
        if not 1 <= entry.packed_size <= entry.size + _PACKING_BYTES:
            raise TextFileError(
                f"{entry.name} of {entry.size} bytes has {entry.packed_size} packed ones, but must"
                f" have 1 to {entry.size + _PACKING_BYTES}"
            )
    if (total := sum(entry.size for entry in entries)) > MAX_TEXT_BYTES:
        raise TextFileError(f"the files have {total} bytes, but at most {MAX_TEXT_BYTES} are taken")


def unpacked(entry: TextFile, packed: bytes) -> bytes:
    """The file itself; no more than was announced is ever unpacked. Raises ``TextFileError``."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(packed, max(1, entry.size))
    except zlib.error as error:
        raise TextFileError(f"{entry.name}: cannot be unpacked: {error}") from error
    if len(content) != entry.size or not unpacker.eof or unpacker.unused_data:
        raise TextFileError(f"{entry.name} is not the {entry.size} bytes that were announced")
    if hashlib.sha256(content).digest() != entry.sha256:
        raise TextFileError(f"{entry.name} does not have the SHA-256 that was announced")
    return content


def cache_key(entries: Sequence[TextFile]) -> str:
    """32 hex digits (128 bits of SHA-256), equal for two lists exactly when all files are equal."""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.name):
        digest.update(f"{entry.name} {entry.size} {entry.sha256.hex()}\n".encode())
    return digest.hexdigest()[:32]


def are_as_announced(entries: Sequence[TextFile], contents: Mapping[str, bytes]) -> bool:
    return all(
        entry.name in contents and hashlib.sha256(contents[entry.name]).digest() == entry.sha256
        for entry in entries
    )


def encode_request(file: str, offset: int) -> bytes:
    return bytes(pb.TokenizerRequest(file=file, offset=offset).SerializeToString())


def decode_request(payload: bytes) -> tuple[str, int]:
    """Name, empty for the list, and offset. Raises ``ProtocolViolation``."""
    check_number("bytes of TokenizerRequest", len(payload), 0, _MAX_REQUEST_BYTES)
    wire = pb.TokenizerRequest()
    parse(wire, payload)
    if wire.file and wire.file not in TEXT_FILES:
        raise ProtocolViolation(f"TokenizerRequest.file must be one of: {', '.join(TEXT_FILES)}")
    return wire.file, check_number("TokenizerRequest.offset", wire.offset, 0, MAX_UINT64)


def encode_list(entries: Sequence[TextFile]) -> bytes:
    files = [
        pb.TokenizerFile(
            name=entry.name, bytes=entry.size, sha256=entry.sha256, packed_bytes=entry.packed_size
        )
        for entry in entries
    ]
    return bytes(pb.TokenizerReply(files=files).SerializeToString())


def encode_part(data: bytes) -> bytes:
    return bytes(pb.TokenizerReply(data=data).SerializeToString())


def decode_list(payload: bytes) -> tuple[TextFile, ...]:
    """Raises ``ProtocolViolation``, or ``TextFileError`` for files that no device should fetch."""
    wire = _reply(payload)
    check_count("TokenizerReply.files", len(wire.files), len(TEXT_FILES), low=1)
    entries = tuple(
        TextFile(file.name, file.bytes, file.sha256, file.packed_bytes) for file in wire.files
    )
    check_entries(entries)
    return entries


def decode_part(payload: bytes) -> bytes:
    """Raises ``ProtocolViolation`` for an empty part, or one over the bound."""
    data = _reply(payload).data
    check_number("bytes of TokenizerReply.data", len(data), 1, PART_BYTES)
    return bytes(data)


def _reply(payload: bytes) -> pb.TokenizerReply:
    check_number("bytes of TokenizerReply", len(payload), 0, 2 * PART_BYTES)
    wire = pb.TokenizerReply()
    parse(wire, payload)
    return wire


Ask = Callable[[bytes], Awaitable[bytes]]
"""One call of ``Tokenizer``; raises ``LinkError``."""


class TokenizerFetch:
    """``ask`` makes the calls, ``who`` names the verifier in errors."""

    def __init__(
        self,
        ask: Ask,
        who: str,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._ask_once, self._who, self._pause = ask, who, pause

    async def entries(self) -> tuple[TextFile, ...]:
        """What there is to fetch. Raises ``LinkError``, not retryable where what came is of no
        use."""
        payload = await self._ask(encode_request("", 0))
        try:
            return decode_list(payload)
        except (ProtocolViolation, TextFileError) as error:
            raise self._useless(error) from None

    async def content(self, entry: TextFile) -> bytes:
        """The file that was announced, whole and checked. Raises ``LinkError``, as ``entries``."""
        packed = bytearray()
        try:
            while len(packed) < entry.packed_size:
                packed += decode_part(await self._ask(encode_request(entry.name, len(packed))))
            if len(packed) > entry.packed_size:
                raise TextFileError(f"{entry.name} is longer than was announced")
            # Unpacking and hashing take tens of milliseconds for a large vocabulary.
            return await asyncio.to_thread(unpacked, entry, bytes(packed))
        except (ProtocolViolation, TextFileError) as error:
            raise self._useless(error) from None

    async def _ask(self, payload: bytes) -> bytes:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._ask_once(payload)
            except LinkError as error:
                if not error.retryable or attempt == _ATTEMPTS:
                    raise
                await self._pause(_AGAIN_S * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _useless(self, error: Exception) -> LinkError:
        return LinkError(f"the tokenizer of the verifier at {self._who}: {error}", retryable=False)
