"""The messages of ``Tokenizer``: a list of files, and parts of one."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from edgespec.core.protocol.text_files import PART_BYTES, TEXT_FILES, TextFile, check_entries
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.wire_limits import MAX_UINT64, ProtocolViolation, check_count, check_number

_MAX_REQUEST_BYTES = 1 << 10


def encode_request(file: str, offset: int) -> bytes:
    """Asks for a part of ``file``; for the list where it is empty."""
    return bytes(pb.TokenizerRequest(file=file, offset=offset).SerializeToString())


def decode_request(payload: bytes) -> tuple[str, int]:
    """Name, empty for the list, and offset. Raises ``ProtocolViolation``."""
    check_number("bytes of TokenizerRequest", len(payload), 0, _MAX_REQUEST_BYTES)
    wire = pb.TokenizerRequest()
    _parse(wire, payload)
    if wire.file and wire.file not in TEXT_FILES:
        raise ProtocolViolation(f"TokenizerRequest.file must be one of: {', '.join(TEXT_FILES)}")
    return wire.file, check_number("TokenizerRequest.offset", wire.offset, 0, MAX_UINT64)


def encode_list(entries: Sequence[TextFile]) -> bytes:
    """Tells which files there are."""
    files = [
        pb.TokenizerFile(
            name=entry.name, bytes=entry.size, sha256=entry.sha256, packed_bytes=entry.packed_size
        )
        for entry in entries
    ]
    return bytes(pb.TokenizerReply(files=files).SerializeToString())


def encode_part(data: bytes) -> bytes:
    """Carries one part."""
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
    _parse(wire, payload)
    return wire


def _parse(wire: pb.TokenizerRequest | pb.TokenizerReply, payload: bytes) -> None:
    try:
        wire.ParseFromString(payload)
    except DecodeError as error:
        raise ProtocolViolation(f"{type(wire).__name__} is malformed: {error}") from None
