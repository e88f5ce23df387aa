"""The driver of a watched connection, where its calls raise errors that are no ``LinkError``.

Oracle: what the state machine does when a probe or a new connection fails.
"""

from __future__ import annotations

import asyncio

import pytest

from edgespec.core.device.connection_watch import WatchPolicy
from edgespec.core.ports import LinkError
from edgespec.wire.watched_connection import WatchedConnection

PATIENCE_S = 30.0


async def test_calls_that_fail_in_an_unknown_way_are_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A probe that fails lets a new connection be made, and one that fails too is made again."""
    attempts, is_tried_again = 0, asyncio.Event()

    async def probe() -> None:
        raise RuntimeError("the library broke")

    async def connect() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise RuntimeError("the library broke again")
        is_tried_again.set()
        raise LinkError("no network")

    policy = WatchPolicy(idle_s=0.0, quiet_s=0.001, longest_quiet_s=0.001, attempt_s=0.001)
    watched = WatchedConnection(probe, connect, lambda _: None, policy)
    watched.begin_use()
    watched.note_message()
    await asyncio.wait_for(is_tried_again.wait(), PATIENCE_S)
    watched.end_use()
    await watched.close()
    assert "the probe of a connection failed: RuntimeError" in caplog.text
    assert "a new connection beside a suspect one failed: RuntimeError" in caplog.text
