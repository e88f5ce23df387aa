"""Answers to ``Tokenizer``: the texts that a device needs which has no tokenizer of its own.

The files are read and packed once, in a thread, when the first device asks; again, if they could
not be read then. A part is a slice of what is held, so that a call costs little; how often one peer
may call is bounded as for ``Info``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from edgespec.core.protocol.text_files import PackedFile, TextFileError
from edgespec.core.verifier.traffic_budget import CallLimits
from edgespec.wire.call_end import abort_call
from edgespec.wire.call_line import CallLine
from edgespec.wire.door import Door, shown_key
from edgespec.wire.tokenizer_codec import decode_request, encode_list, encode_part
from edgespec.wire.wire_limits import ProtocolViolation

_LOG = logging.getLogger(__name__)

_Found = dict[str, PackedFile] | str
"""The files by name, or why there are none."""
LoadTexts = Callable[[], Sequence[PackedFile]]
"""Blocking; raises ``ValueError`` or ``OSError`` saying why there is nothing to send."""

# A tokenizer of 11 MB travels as 3 MB, which is 24 parts. All peers together are sent at most
# 8 MiB a second, one peer 4.
TOKENIZER_LIMITS: Final = CallLimits(
    peer_rate=32.0, peer_burst=64.0, total_rate=64.0, total_burst=128.0, max_wait_s=2.0
)


class TokenizerAnswers:
    """Answers each caller that is let in, in its turn. ``load`` None: there is nothing to send."""

    def __init__(self, load: LoadTexts | None, line: CallLine, door: Door) -> None:
        self._load, self._line, self._door = load, line, door
        self._loading: asyncio.Task[tuple[_Found, bool]] | None = None

    async def answer(self, request: bytes, context: Any) -> bytes:
        """The encoded reply to one call."""
        if (credential := self._door.credential(shown_key(context))) is None:
            await self._door.turn_away(context)
        await self._line.turn(context, credential)
        found = await self._texts()
        if isinstance(found, str):
            await abort_call(context, grpc.StatusCode.FAILED_PRECONDITION, found)
        try:
            name, offset = decode_request(request)
            if not name:
                return encode_list([file.entry for file in found.values()])
            if name not in found:
                raise TextFileError(f"there is no {name} here")
            return encode_part(found[name].part(offset))
        except (ProtocolViolation, TextFileError) as error:
            await abort_call(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def close(self) -> None:
        """Wait for what is being read."""
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)

    async def _texts(self) -> _Found:
        if self._loading is None:
            self._loading = asyncio.create_task(asyncio.to_thread(self._read))
        loading = self._loading
        # A caller that hangs up must not take the others' files away.
        found, lasts = await asyncio.shield(loading)
        if not lasts and self._loading is loading:
            self._loading = None
        return found

    def _read(self) -> tuple[_Found, bool]:
        """What was found, and whether that lasts: too many open files, say, do not."""
        if self._load is None:
            return "this verifier has no tokenizer to send", True
        try:
            return {file.entry.name: file for file in self._load()}, True
        except TextFileError as error:
            _LOG.exception("the tokenizer cannot be sent")
            return f"this verifier has no tokenizer that it could send: {error}", True
        except Exception:
            _LOG.exception("the tokenizer cannot be sent now")
            return "this verifier has no tokenizer that it could send", False
