"""Which conversation a stream is opened for, told to whoever dials it.

A client that sees its verifiers chooses among them by the conversation itself. One that sees only a
proxy sends the hash along (``wire/grpc_calls.py``), for the proxy to choose by.
"""

from __future__ import annotations

from contextvars import ContextVar

from edgespec.core.ports import DeviceStream, Transport
from edgespec.core.protocol.messages import VerifierInfo

_dialing_for: ContextVar[str] = ContextVar("edgespec_conversation", default="")


def current_conversation() -> str:
    """What the running task dials for; empty: for no conversation, such as for a question."""
    return _dialing_for.get()


def dial_for(conversation: str) -> None:
    """From here on the running task dials for this one."""
    _dialing_for.set(conversation)


class ConversationTransport:
    """``inner`` for the streams of one conversation; ``connect`` is called in a task of its own."""

    def __init__(self, inner: Transport, conversation: str) -> None:
        self._inner, self._conversation = inner, conversation

    async def connect(self) -> DeviceStream:
        dial_for(self._conversation)
        return await self._inner.connect()

    async def info(self) -> VerifierInfo:
        return await self._inner.info()

    async def close(self) -> None:
        await self._inner.close()
