"""The backlog of a stream. Oracle: a queue with an end, message by message."""

from __future__ import annotations

import asyncio

from edgespec.core.protocol.messages import Commit
from edgespec.verifier.daemon import Backlog


def _commit(number: int) -> Commit:
    return Commit(number, (1,))


async def test_messages_come_in_order_and_then_the_end() -> None:
    backlog = Backlog(3)
    reading = asyncio.ensure_future(backlog.get())
    await asyncio.sleep(0)
    assert not reading.done()
    assert backlog.put(_commit(1))
    assert backlog.put(_commit(2))
    backlog.end()
    assert await reading == _commit(1)
    assert [await backlog.get(), await backlog.get(), await backlog.get()] == [
        _commit(2),
        None,
        None,
    ]


async def test_it_takes_no_more_than_its_limit_and_nothing_after_its_end() -> None:
    backlog = Backlog(2)
    assert [backlog.put(_commit(number)) for number in range(3)] == [True, True, False]
    assert await backlog.get() == _commit(0)
    assert backlog.put(_commit(3))
    backlog.end()
    assert not backlog.put(_commit(4))
    assert [await backlog.get() for _ in range(3)] == [_commit(1), _commit(3), None]


async def test_a_cancelled_reader_loses_nothing() -> None:
    backlog = Backlog(2)
    reading = asyncio.ensure_future(backlog.get())
    await asyncio.sleep(0)
    backlog.put(_commit(1))
    reading.cancel()
    await asyncio.wait((reading,))
    assert reading.cancelled()
    assert await backlog.get() == _commit(1)
