"""What a verifier's event loop spends, in CPU time of its thread, on whom and on what.

``install`` makes the loop of this process measure each callback; who it was for travels in the
context that gRPC's calls and all their tasks run in. It costs some 2 us a callback.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextvars import ContextVar
from typing import Any

from load_processes import FLOODER

from edgespec.transport.door import shown_key
from edgespec.transport.grpc_server import GrpcServer
from edgespec.transport.info_answers import InfoAnswers

NOBODY = "all"
"""Passes, timers, and what else runs for no call in particular."""
WHOSE: ContextVar[str] = ContextVar("WHOSE", default=NOBODY)
# What is read, and what is written; the rest of a stream's tasks opens, refuses and ends calls.
WORK = {
    "GrpcVerifierStream._read_on": "reading",
    "Verifier._read": "reading",
    "GrpcServer._run": "writing",
    "_ServicerContext.write": "writing",
    "ShieldedCall.begin.<locals>.forget": "writing",
}
cpu_s: Counter[str] = Counter()
"""By whom and what, as "flood reading"; "flood", "honest" or "all"."""


def install() -> None:
    """Call it before the event loop is made."""
    run = asyncio.events.Handle._run

    def measured(handle: Any) -> None:
        started_s = time.thread_time()
        whose, what = handle._context.get(WHOSE, NOBODY), WORK.get(_name(handle), "calls")
        run(handle)
        cpu_s[whose if whose == NOBODY else f"{whose} {what}"] += time.thread_time() - started_s

    asyncio.events.Handle._run = measured  # type: ignore[assignment]
    asyncio.events.TimerHandle._run = measured  # type: ignore[assignment]
    _mark(GrpcServer, "_speculate")
    _mark(InfoAnswers, "answer")


def _mark(kind: Any, name: str) -> None:
    """Note whose call it is before the method runs, for it and for all tasks that it makes."""
    method = getattr(kind, name)

    async def marked(self: Any, request: Any, context: Any) -> Any:
        credential = self._door.credential(shown_key(context))
        flood = credential is None or credential.name == FLOODER
        WHOSE.set("flood" if flood else "honest")
        return await method(self, request, context)

    setattr(kind, name, marked)


def _name(handle: Any) -> str:
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    named = task.get_coro() if isinstance(task, asyncio.Task) else callback
    return getattr(named, "__qualname__", "")
