"""The pictures of recent prompts, so that a device sends each one once in a conversation.

Theory of operation. A prompt names its pictures by SHA-256 (``protocol/pictures.py``). A device
that resends a conversation names the same ones again, and the store has their bytes as long as
there is room. It is only a cache: a picture that is not here costs the device a round trip, in
which it sends the bytes.

A picture is found only under the credential and the key of names (``Open.prefix_key``) that it was
sent with. Each device draws its key at random. So no device learns from the answer what another one
has sent, and none can use a picture of which it knows the hash alone.

Bounds. All pictures together take at most ``most_bytes``. If there are more, the credential with
the most bytes loses the pictures that were used longest ago. *Arriving* pictures, of prompts whose
pictures are not complete or not read yet, have a bound of the same size, and one peer at most half
of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from edgespec.core.protocol.messages import PicturePart
from edgespec.core.protocol.pictures import PART_BYTES, Picture

_OVERHEAD_BYTES: Final = 256
"""Bytes that a picture takes beside its own: its name, the entry in the table, Python's objects."""
_PEER_SHARE: Final = 2
"""A peer may have this fraction (one half, one third, ...) of the arriving bytes."""


class PictureStore:
    """Pictures by credential, key and name, in at most ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._tables: dict[str, OrderedDict[tuple[bytes, bytes], bytes]] = {}
        """Pictures of each credential by key and name. The picture that was used longest ago is in
        front."""
        self._bytes_of: Counter[str] = Counter()
        """Bytes of each credential, with the overhead."""
        self._arriving: dict[int, tuple[str, int]] = {}
        """Peer and bytes of the prompts whose pictures are arriving, by stream."""
        self.found = self.missed = 0
        """Named pictures that were here, and ones that were not."""
        self.received_bytes = 0
        """Bytes of the pictures that devices had to send."""
        self.evicted = 0
        """Pictures that made room for others."""

    @property
    def most_bytes_of_prompt(self) -> int:
        """Most bytes of the pictures of one prompt."""
        return self.most_bytes // _PEER_SHARE

    @property
    def held_bytes(self) -> int:
        """Estimated memory of the stored pictures."""
        return self._bytes_of.total()

    @property
    def arriving_bytes(self) -> int:
        """Bytes of the pictures of prompts that wait for them."""
        return sum([size for _, size in self._arriving.values()])

    def find(self, owner: str, key: bytes, sha256: bytes) -> bytes | None:
        """Return a picture that ``owner`` has sent under ``key``, or None if it is not here."""
        table = self._tables.get(owner)
        data = None if table is None else table.get((key, sha256))
        if table is None or data is None:
            self.missed += 1
            return None
        table.move_to_end((key, sha256))
        self.found += 1
        return data

    def keep(self, owner: str, key: bytes, sha256: bytes, data: bytes) -> None:
        """Store a picture of ``owner`` that has arrived, and drop others if there is no room.

        A picture that is larger than the store is not kept."""
        self.received_bytes += len(data)
        size = _OVERHEAD_BYTES + len(data)
        if size > self.most_bytes:
            return
        table = self._tables.setdefault(owner, OrderedDict())
        if (key, sha256) not in table:
            table[key, sha256] = data
            self._bytes_of[owner] += size
        table.move_to_end((key, sha256))
        self._drop_surplus()

    def forget(self, owner: str) -> None:
        """Drop everything of a credential, because it was revoked."""
        self._tables.pop(owner, None)
        self._bytes_of.pop(owner, None)

    def admit(self, stream: int, peer: str, size: int) -> str | None:
        """Count ``size`` bytes of a prompt's pictures as arriving on ``stream``; ``release`` ends
        that. Returns why there is no room for them now, or None if they were admitted."""
        of_peer = sum([one for owner, one in self._arriving.values() if owner == peer])
        for held, most, whose in (
            (self.arriving_bytes, self.most_bytes, "all devices"),
            (of_peer, self.most_bytes_of_prompt, peer or "this device"),
        ):
            if held + size > most:
                return (
                    f"the prompt has pictures of {size} bytes, but of {whose} {held} bytes are"
                    f" arriving, and the limit is {most} (limits.picture_mib)"
                )
        self._arriving[stream] = peer, size
        return None

    def release(self, stream: int) -> None:
        """Record that the pictures of a stream are not arriving any more."""
        self._arriving.pop(stream, None)

    def _drop_surplus(self) -> None:
        while self.held_bytes > self.most_bytes:
            owner, _ = max(self._bytes_of.items(), key=lambda one: one[1])
            _, data = self._tables[owner].popitem(last=False)
            self._bytes_of[owner] -= _OVERHEAD_BYTES + len(data)
            self.evicted += 1
            if not self._tables[owner]:
                self.forget(owner)


class ArrivingPictures:
    """The pictures of one prompt, some of which are still on their way.

    ``pictures`` are the names that the prompt has for them. ``known`` has the bytes of each picture
    that the verifier holds already, and None for each other one. The device sends the missing
    pictures in their order, each in parts of ``PART_BYTES``."""

    def __init__(self, pictures: Sequence[Picture], known: Sequence[bytes | None]) -> None:
        self._pictures, self._known = pictures, list(known)
        self._received = bytearray()
        """The first bytes of the first missing picture."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the pictures that are not complete."""
        return tuple([number for number, data in enumerate(self._known) if data is None])

    @property
    def data(self) -> tuple[bytes, ...]:
        """The bytes of all pictures, once none is missing."""
        return tuple([data for data in self._known if data is not None])

    def add(self, part: PicturePart) -> bytes | None:
        """Add a part. Return the bytes of its picture if it is the last part, else None.

        Raises ``ValueError`` for a part that does not continue the first missing picture, and for
        bytes whose SHA-256 is not the picture's name.
        """
        number = self.missing[0]
        picture = self._pictures[number]
        start = len(self._received)
        if (part.number, part.offset) != (number, start):
            raise ValueError(
                f"byte {part.offset} of picture {part.number} was sent, but byte {start} of picture"
                f" {number} comes next"
            )
        end, size = start + len(part.data), picture.size_bytes
        if end > size or (end < size and len(part.data) < PART_BYTES):
            raise ValueError(
                f"a part of {len(part.data)} bytes from byte {start} of picture {number} was sent,"
                f" but the picture has {size} bytes, in parts of {PART_BYTES}"
            )
        self._received += part.data
        if end < size:
            return None
        data, self._received = bytes(self._received), bytearray()
        if sha256(data).digest() != picture.sha256:
            raise ValueError(f"the bytes of picture {number} do not have the SHA-256 of its name")
        # The same picture may stand in the prompt several times.
        for other, one in enumerate(self._pictures):
            if one.sha256 == picture.sha256 and one.size_bytes == size:
                self._known[other] = data
        return data
