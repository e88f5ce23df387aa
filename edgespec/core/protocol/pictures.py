"""Pictures in a prompt: their names on the wire, the bounds on them, and their size by the header.

A picture stands in the prompt as one token, its *placeholder*, which the chat template writes. The
verifier replaces it by the rows of the picture inside its engine only. So a position counts a
picture as one token on both ends, and a device drafts from the text alone. The bytes are sent apart
from the prompt, under their SHA-256.

The number of pixels is read from the header, before anything is decoded: a file of a few kilobytes
can decode to gigabytes. The engine compares what it decodes with the header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from edgespec.core.statically_frozen import statically_frozen

DIGEST_BYTES: Final = 32
MAX_PICTURES: Final = 64
"""Most pictures that the wire carries in one prompt."""
MAX_PICTURE_BYTES: Final = 1 << 26
"""Most bytes of one picture on the wire."""
PART_BYTES: Final = 1 << 16
"""Bytes of a picture in one message. The last part may have fewer."""
FORMATS: Final = "PNG, JPEG, WebP or GIF"


@statically_frozen
class PictureInput:
    """Placeholder of a model that reads pictures, and the bounds that its verifier sets."""

    token: int
    """Id of the placeholder: the token that stands for one picture in a prompt."""
    max_count: int = 8
    """Pictures of one prompt."""
    max_bytes: int = 8 << 20
    """Bytes of one picture as it is sent."""
    max_pixels: int = 1 << 24
    """Width times height of one picture."""


@statically_frozen
class Picture:
    """A picture of a prompt, by its name."""

    sha256: bytes = field(repr=False)
    size_bytes: int
    position: int
    """Index of the placeholder in the prompt."""


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture of a prompt, with its bytes."""

    position: int
    """Index of the placeholder in the prompt."""
    data: bytes = field(repr=False)

    @property
    def name(self) -> Picture:
        """The picture's name, as ``Open`` carries it."""
        return Picture(hashlib.sha256(self.data).digest(), len(self.data), self.position)


@statically_frozen
class ReadPictures:
    """The pictures of one prompt, as a target has read them."""

    extra_tokens: int
    """Rows that they take in the model's context, less their placeholders."""
    content: object = field(default=None, repr=False)
    """Content in the target's own form, which only the target looks at."""


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """The format and the size of a picture, as its header states them."""

    format: str
    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height


def read_header(data: bytes) -> PictureHeader:
    """Return what the header of a picture states. Raises ``ValueError`` for another format than
    ``FORMATS``, and for a damaged header."""
    for format_name, magic, read in _READERS:
        if data.startswith(magic):
            size = read(data)
            if size is None or 0 in size:
                raise ValueError(f"is a {format_name} file with a damaged header")
            return PictureHeader(format_name, *size)
    raise ValueError(f"is no picture in a known format ({FORMATS})")


def check_picture(data: bytes, bounds: PictureInput) -> PictureHeader:
    """Return the header of a picture. Raises ``ValueError`` if the picture is none, or exceeds a
    bound; the text is a predicate, such as "has 9 bytes, but at most 8"."""
    if len(data) > bounds.max_bytes:
        raise ValueError(
            f"has {len(data)} bytes, but a picture may have at most {bounds.max_bytes}"
        )
    header = read_header(data)
    if header.pixels > bounds.max_pixels:
        size = f"{header.width} x {header.height} = {header.pixels} pixels"
        raise ValueError(f"has {size}, but a picture may have at most {bounds.max_pixels}")
    return header


def place_pictures(
    prompt: Sequence[int], pictures: Sequence[bytes], bounds: PictureInput
) -> tuple[PlacedPicture, ...]:
    """Return ``pictures`` at the placeholders of ``prompt``, in order. Raises ``ValueError`` if
    there are more or fewer placeholders than pictures."""
    positions = [at for at, token in enumerate(prompt) if token == bounds.token]
    if len(positions) != len(pictures):
        raise ValueError(
            f"the prompt has {len(positions)} placeholders (token {bounds.token}) for"
            f" {len(pictures)} pictures, but must have one for each: the chat template writes none,"
            " or a text of the messages contains the placeholder"
        )
    return tuple([PlacedPicture(*one) for one in zip(positions, pictures, strict=True)])


# --- sizes by the header: (width, height), or None for a damaged header -------------------------

_Size = tuple[int, int] | None


def _read_png(data: bytes) -> _Size:
    if data[12:16] != b"IHDR" or len(data) < 24:
        return None
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def _read_gif(data: bytes) -> _Size:
    if len(data) < 10:
        return None
    return int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")


def _read_webp(data: bytes) -> _Size:
    """Read the size of a lossy, a lossless or an extended file (RFC 9649)."""
    kind = data[12:16]
    if data[8:12] != b"WEBP" or len(data) < 30:
        return None
    if kind == b"VP8X":
        width, height = data[24:27], data[27:30]
        return 1 + int.from_bytes(width, "little"), 1 + int.from_bytes(height, "little")
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = data[26:28], data[28:30]
        return int.from_bytes(width, "little") & 0x3FFF, int.from_bytes(height, "little") & 0x3FFF
    return None


# Markers without a segment behind them, and markers of a frame, whose segment states the size
# (ITU T.81, table B.1).
_BARE_MARKERS: Final = frozenset((0x01, *range(0xD0, 0xD9)))
_FRAME_MARKERS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN_OR_END: Final = (0xDA, 0xD9)


def _read_jpeg(data: bytes) -> _Size:
    at = 2
    while at + 1 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in _BARE_MARKERS:
            at += 2
        elif marker in _SCAN_OR_END:
            return None
        elif marker in _FRAME_MARKERS:
            if len(data) < at + 9:
                return None
            height, width = data[at + 5 : at + 7], data[at + 7 : at + 9]
            return int.from_bytes(width, "big"), int.from_bytes(height, "big")
        else:
            length = int.from_bytes(data[at + 2 : at + 4], "big")
            if length < 2:
                return None
            at += 2 + length
    return None


_READERS: Final[tuple[tuple[str, bytes | tuple[bytes, ...], Callable[[bytes], _Size]], ...]] = (
    ("PNG", b"\x89PNG\r\n\x1a\n", _read_png),
    ("JPEG", b"\xff\xd8", _read_jpeg),
    ("WebP", b"RIFF", _read_webp),
    ("GIF", (b"GIF87a", b"GIF89a"), _read_gif),
)
