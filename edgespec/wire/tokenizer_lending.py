"""Lending of a model's texts: a verifier sends ZIP archives in parts, and a device fetches them
once.

The first archive is the one that older devices request: ``tokenizer.json`` and a few files beside
it. The second one has everything else that a prompt depends on (special tokens, chat template,
sampling defaults), which is small. A device whose draft has the very same ``tokenizer.json``
fetches only the second. So two devices make the same prompt of one conversation, whatever their
drafts are.

A device that has no lent tokenizer at all requests parts together with the announcement, before it
knows the archives, which saves it a round trip. A verifier that does not support that sends the
announcement alone.

A device trusts nothing: names must be in a fixed list, sizes are bounded before anything is fetched
or unpacked, and the data must have the length and the SHA-256 that were announced.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeVar

from edgespec.core.ports import LinkError
from edgespec.wire.codec import ProtocolViolation, check_number, parse_message
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.worker_pool import PoolBusyError, PoolLateError, WorkerPool

TOKENIZER_JSON: Final = "tokenizer.json"
TEXT_FILES: Final = (
    TOKENIZER_JSON,
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""Files of the first archive. Only the tokenizer must be there."""
FACT_FILES: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""Files of the second archive. All are optional."""
MAX_TEXT_BYTES: Final = 64 << 20
"""Most bytes of all files together. The largest public tokenizers have about 35 MB."""
PART_BYTES: Final = 1 << 17
SHA256_BYTES: Final = 32
_T = TypeVar("_T")
_MAX_REQUEST_BYTES: Final = 1 << 10
_ENTRY_MARK, _MAX_ENTRIES = b"PK\x01\x02", 64
"""First bytes of each entry in an archive's directory. The library reads the whole directory."""
_WORKERS: Final = WorkerPool("unpacking a tokenizer", threads=1, max_waiting=64, timeout_s=60.0)
_PARTS_AT_ONCE: Final = 16
"""Parts that are requested together, of the 64 that a verifier sends without a wait."""
_ATTEMPTS: Final = 8
_RETRY_S: Final = 0.5


class EarlyParts(Enum):
    """Archives whose parts are requested before they are announced."""

    NONE = "none"
    FACTS = "facts"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Announcement:
    """An archive that a device may fetch. Raises ``ProtocolViolation`` for sizes out of bounds."""

    sha256: bytes
    size: int
    """Size of the archive in bytes."""
    tokenizer_sha256: bytes = b""
    """SHA-256 of ``tokenizer.json``. Empty from an older verifier."""
    facts: Announcement | None = None
    """The second archive. None from an older verifier."""

    def __post_init__(self) -> None:
        check_number("bytes of the SHA-256", len(self.sha256), SHA256_BYTES, SHA256_BYTES)
        check_number("bytes of the archive", self.size, 1, MAX_TEXT_BYTES)
        if self.facts is not None:
            check_number(
                *("bytes of tokenizer_sha256", len(self.tokenizer_sha256)),
                *(SHA256_BYTES, SHA256_BYTES),
            )


class PackedTexts:
    """Both archives of a model's files. The same texts give the same bytes."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        first = _pack({name: texts[name] for name in TEXT_FILES if name in texts})
        facts = _pack({name: texts[name] for name in FACT_FILES if name in texts})
        self._archives = {hashlib.sha256(one).digest(): one for one in (first, facts)}
        sizes = [Announcement(sha256, len(one)) for sha256, one in self._archives.items()]
        tokenizer = hashlib.sha256(texts.get(TOKENIZER_JSON, b"")).digest()
        self.announced = replace(sizes[0], tokenizer_sha256=tokenizer, facts=sizes[-1])

    def answer(self, request: bytes) -> bytes:
        """Return the reply to one call of ``Tokenizer``. Raises ``ProtocolViolation``."""
        wire = parse_message(pb.TokenizerRequest, request, _MAX_REQUEST_BYTES)
        announced = self.announced
        reply = pb.TokenizerReply(
            sha256=announced.sha256,
            bytes=announced.size,
            tokenizer_sha256=announced.tokenizer_sha256,
        )
        if announced.facts is not None:
            reply.facts_sha256, reply.facts_bytes = announced.facts.sha256, announced.facts.size
        if wire.sha256:
            if (archive := self._archives.get(wire.sha256)) is None:
                raise ProtocolViolation("TokenizerRequest.sha256 names no archive of this verifier")
            check_number("TokenizerRequest.offset", wire.offset, 0, len(archive) - 1)
            reply.data = archive[wire.offset : wire.offset + PART_BYTES]
        elif wire.part_of:
            name = (
                reply.sha256 if wire.part_of == pb.TOKENIZER_ARCHIVE_TEXTS else reply.facts_sha256
            )
            archive = self._archives.get(name, b"")
            reply.data = archive[wire.offset : wire.offset + PART_BYTES]
        return bytes(reply.SerializeToString())


def _pack(texts: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in texts.items():
            file.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def unpack_texts(archive: bytes, names: Sequence[str] = TEXT_FILES) -> dict[str, bytes]:
    """Return the files of an archive by name. All must be in ``names``.

    Nothing that exceeds a bound is unpacked. Raises ``ProtocolViolation``."""
    check_number("files of the archive", archive.count(_ENTRY_MARK), 0, _MAX_ENTRIES)
    needed = {TOKENIZER_JSON} & {*names}
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            entries = file.infolist()
            file_names = [entry.filename for entry in entries]
            if not set(file_names) <= set(names):
                other = next(name for name in file_names if name not in names)
                raise ProtocolViolation(f"file {other!r} is none of {', '.join(names)}")
            if len(set(file_names)) < len(file_names) or not needed <= set(file_names):
                why = f"the files are {file_names}, but must be distinct"
                raise ProtocolViolation(why + "".join(f", {name} among them" for name in needed))
            check_number("bytes of the files", sum(e.file_size for e in entries), 0, MAX_TEXT_BYTES)
            return {entry.filename: file.read(entry) for entry in entries}
    except ProtocolViolation:
        raise
    except Exception as error:  # A damaged archive makes the library raise errors of many kinds.
        raise ProtocolViolation(f"the archive cannot be unpacked: {error}") from error


async def gather_calls(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """Return the results of all ``calls``, which run at the same time. If one raises an error, the
    others are cancelled, and the error is raised."""
    tasks = [asyncio.ensure_future(one) for one in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TokenizerFetch:
    """Fetches the archives of one verifier.

    ``call`` makes a call of ``Tokenizer`` or raises ``LinkError``. ``verifier`` is its name in
    errors."""

    def __init__(self, call: Callable[[bytes], Awaitable[bytes]], verifier: str) -> None:
        self._call, self._verifier = call, verifier
        self._early_parts: dict[tuple[bytes, int], bytes] = {}
        """Parts that came with the announcement, by their archive's SHA-256 and offset."""

    async def fetch_announcement(self, wanted: EarlyParts = EarlyParts.NONE) -> Announcement:
        """Return the archives that the verifier offers. Parts of the ``wanted`` ones are requested
        at the same time, and kept for ``fetch_texts``.

        Raises ``LinkError``, which is not retryable if the reply is of no use."""
        requests = [pb.TokenizerRequest()]
        if wanted is not EarlyParts.NONE:
            requests = [pb.TokenizerRequest(part_of=pb.TOKENIZER_ARCHIVE_FACTS)]
        if wanted is EarlyParts.ALL:
            requests += [
                pb.TokenizerRequest(part_of=pb.TOKENIZER_ARCHIVE_TEXTS, offset=n * PART_BYTES)
                for n in range(_PARTS_AT_ONCE)
            ]
        with self._checked_reply():
            replies = await gather_calls(self._request(one) for one in requests)
            self._early_parts.clear()
            for request, reply in zip(requests, replies, strict=True):
                is_facts = request.part_of == pb.TOKENIZER_ARCHIVE_FACTS
                name = reply.facts_sha256 if is_facts else reply.sha256
                if len(reply.data) > 0:
                    self._early_parts[name, request.offset] = reply.data
            wire, facts = replies[0], None
            if len(wire.facts_sha256) > 0:
                facts = Announcement(wire.facts_sha256, wire.facts_bytes)
            return Announcement(wire.sha256, wire.bytes, wire.tokenizer_sha256, facts)

    async def fetch_facts(self, announced: Announcement) -> dict[str, bytes]:
        """Fetch the files of the second archive by name. There are none at an older verifier.

        Raises ``LinkError`` in the same way as ``fetch_announcement``."""
        if announced.facts is None:
            return {}
        return await self.fetch_texts(announced.facts, FACT_FILES)

    async def fetch_texts(
        self, announced: Announcement, names: Sequence[str] = TEXT_FILES
    ) -> dict[str, bytes]:
        """Fetch the files of an archive by name. All must be in ``names``.

        Raises ``LinkError`` in the same way as ``fetch_announcement``."""
        archive = bytearray()
        with self._checked_reply():
            while len(archive) < announced.size:
                # Parts travel together, since each by itself would take a round trip.
                starts = range(len(archive), announced.size, PART_BYTES)[:_PARTS_AT_ONCE]
                replies = (self._fetch_part(announced.sha256, start) for start in starts)
                for start, part in zip(starts, await gather_calls(replies), strict=True):
                    check_number("bytes of TokenizerReply.data", len(part), 1, PART_BYTES)
                    if start == len(archive):  # Else the part before was shorter than usual.
                        archive += part
            # Unpacking and hashing take tens of milliseconds for a large vocabulary.
            if (await _WORKERS.run(hashlib.sha256, archive)).digest() != announced.sha256:
                raise ProtocolViolation("the archive does not have the SHA-256 that was announced")
            return await _WORKERS.run(unpack_texts, bytes(archive), names)

    async def _fetch_part(self, sha256: bytes, offset: int) -> bytes:
        """Return a part of an archive: the early one, or one that is requested now."""
        if (early := self._early_parts.pop((sha256, offset), None)) is not None:
            return early
        reply = await self._request(pb.TokenizerRequest(sha256=sha256, offset=offset))
        return bytes(reply.data)

    async def _request(self, wire: pb.TokenizerRequest) -> pb.TokenizerReply:
        request = wire.SerializeToString()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return parse_message(pb.TokenizerReply, await self._call(request), 2 * PART_BYTES)
            except LinkError as error:
                if not error.retryable or attempt == _ATTEMPTS:
                    raise
                await asyncio.sleep(_RETRY_S * attempt)
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _checked_reply(self) -> Iterator[None]:
        """Turn errors in the verifier's data into a ``LinkError``, which is not retryable."""
        try:
            yield
        except ProtocolViolation as error:
            why = f"the tokenizer of the verifier at {self._verifier}: {error}"
            raise LinkError(why, retryable=False) from None
        except (PoolBusyError, PoolLateError) as error:
            raise LinkError(str(error)) from None
