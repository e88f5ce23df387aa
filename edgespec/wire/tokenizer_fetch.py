"""Fetching a verifier's tokenizer: the list first, then what is missing, part by part."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from edgespec.core.ports import LinkError
from edgespec.core.protocol.text_files import TextFile, TextFileError, unpacked
from edgespec.wire.tokenizer_codec import decode_list, decode_part, encode_request
from edgespec.wire.wire_limits import ProtocolViolation

Ask = Callable[[bytes], Awaitable[bytes]]
"""One call of ``Tokenizer``; raises ``LinkError``."""

# A line that is full, or a link that is lost for a moment, ends no fetch.
_ATTEMPTS: Final = 8
_AGAIN_S: Final = 0.5


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
