"""Who is let in: the key that a call shows, looked at before anything of it is read.

A call shows its key as ``authorization: Bearer KEY`` in its metadata. One without the right key
hears UNAUTHENTICATED after a while, the later the more of them its peer makes (``refusals.py``).
They count for nothing else: who guesses keys takes no place, and no turn in a line, of those who
have one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NoReturn

import grpc

from edgespec.core.ports import Authenticate
from edgespec.core.protocol.messages import Fault, FaultCode
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.wire.call_end import GONE, abort_call
from edgespec.wire.peer_address import peer_address
from edgespec.wire.refusals import Refusals

HEADER: Final = "authorization"
SCHEME: Final = "Bearer"
_LAST_WORDS_S: Final = 0.5
_HINT: Final = "EDGESPEC_API_KEY or --api-key-file holds it on the device"
NO_KEY = Fault(FaultCode.UNAUTHENTICATED, f"this verifier asks for a key; {_HINT}")
WRONG_KEY = Fault(
    FaultCode.UNAUTHENTICATED, f"this verifier does not know the key, or not any more; {_HINT}"
)


class Door:
    """``authenticate`` None lets everybody in."""

    def __init__(self, authenticate: Authenticate | None) -> None:
        self._authenticate = authenticate
        self._refusals = Refusals()

    @property
    def asks_for_keys(self) -> bool:
        """Whether who calls has to show one."""
        return self._authenticate is not None

    def credential(self, key: str) -> Credential | None:
        """Whose call it is that shows this key; None: it is not let in."""
        return ANYBODY if self._authenticate is None else self._authenticate(key)

    async def turn_away(
        self, context: Any, encode: Callable[[Fault], bytes] | None = None
    ) -> NoReturn:
        """End a call that is not let in. On a stream ``encode`` makes the message for the device,
        which goes before the status."""
        # Asked while the call is there for certain (``grpc_server.py``).
        peer, fault = peer_address(str(context.peer())), WRONG_KEY if shown_key(context) else NO_KEY
        await self._refusals.hold(peer)
        if encode is not None:
            with suppress(TimeoutError, *GONE):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await context.write(encode(fault))
        await abort_call(context, grpc.StatusCode.UNAUTHENTICATED, fault.message)


def shown_key(context: Any) -> str:
    """The key in a call's metadata; empty when there is none, or more than one."""
    values = [value for key, value in context.invocation_metadata() or () if key == HEADER]
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    scheme, _, key = values[0].partition(" ")
    return key.strip() if scheme.lower() == SCHEME.lower() else ""
