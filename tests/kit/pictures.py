"""Files that begin like pictures. They have a header and filler, and no decoder would accept them;
``solid_png`` makes real ones."""

from __future__ import annotations

import struct
import zlib


def png(width: int = 64, height: int = 64, *, size: int = 200, seed: int = 0) -> bytes:
    """Return ``size`` bytes that begin as a PNG file of that width and height."""
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    filler = seed.to_bytes(4, "big") * (size // 4 + 1)
    return (head + filler)[:size]


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(20)


def jpeg(width: int, height: int, *, before: bytes = b"", marker: int = 0xC0) -> bytes:
    """Return the beginning of a JPEG file, with the segments ``before`` in front of its frame."""
    frame = struct.pack(">BBHBHHB", 0xFF, marker, 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + before + frame


def segment(marker: int, payload: bytes = b"") -> bytes:
    """Return a segment of a JPEG file."""
    return struct.pack(">BBH", 0xFF, marker, 2 + len(payload)) + payload


def webp(width: int, height: int, kind: bytes = b"VP8X") -> bytes:
    """Return the beginning of an extended, a lossless or a lossy WebP file."""
    body = {
        b"VP8X": bytes(4) + _uint24(width - 1) + _uint24(height - 1),
        b"VP8L": b"\x2f" + struct.pack("<I", width - 1 | (height - 1) << 14) + bytes(8),
        b"VP8 ": bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height),
    }[kind]
    return b"RIFF" + bytes(4) + b"WEBP" + kind + bytes(4) + body


def solid_png(width: int, height: int, color: tuple[int, int, int] = (200, 30, 60)) -> bytes:
    """Return a real PNG file of one colour."""
    row = b"\0" + bytes(color) * width
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(row * height)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _uint24(number: int) -> bytes:
    return number.to_bytes(3, "little")
