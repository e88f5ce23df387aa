"""Pools of threads for blocking work.

Oracle: the order in which work begins, and the bounds of the pool. Work waits for events of the
test, so every schedule is the test's own.
"""

from __future__ import annotations

import ast
import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

import pytest

from edgespec.worker_pool import PoolBusyError, PoolLateError, WorkerPool
from tests.kit.live_verifier import wait_until
from tests.sources import ROOT


class Works:
    """Work for a pool: each piece notes that it began, and ends when the test releases it."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool, self.begun = pool, list[str]()
        self.go_on = threading.Semaphore(0)
        self.tasks: dict[str, asyncio.Task[str]] = {}

    def work(self, name: str) -> str:
        self.begun.append(name)
        self.go_on.acquire()
        return name

    async def start(self, *names: str) -> None:
        for name in names:
            run = self.pool.run_for(name[0], self.work, name)
            self.tasks[name] = asyncio.create_task(run)
            await asyncio.sleep(0)


@asynccontextmanager
async def works(
    threads: int = 1, max_waiting: int = 8, timeout_s: float = 600.0
) -> AsyncIterator[Works]:
    pool = WorkerPool("the work", threads=threads, max_waiting=max_waiting, timeout_s=timeout_s)
    found = Works(pool)
    try:
        yield found
    finally:
        pool.close()
        for _ in range(100):
            found.go_on.release()
        for task in found.tasks.values():
            task.cancel()
        await asyncio.gather(*found.tasks.values(), return_exceptions=True)
        await wait_until(lambda: pool.busy == 0)


@pytest.mark.parametrize("package", ["device", "endpoint", "models", "wire"])
def test_no_work_runs_in_the_executor_that_all_of_asyncio_shares(package: str) -> None:
    """Slow work of one kind would delay every other kind in that executor: use a ``WorkerPool``."""
    found = [
        f"{path.name}: {node.attr}"
        for path in sorted((ROOT / "edgespec" / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("to_thread", "run_in_executor")
    ]
    assert found == []


async def test_clients_take_turns() -> None:
    async with works() as found:
        await found.start("a1")
        await wait_until(lambda: found.begun == ["a1"])
        await found.start("a2", "a3", "b1", "b2", "c1")
        for _ in range(6):
            found.go_on.release()
        assert [await task for task in found.tasks.values()] == list(found.tasks)
        assert found.begun == ["a1", "a2", "b1", "c1", "a3", "b2"]


async def test_a_full_queue_and_a_full_share_are_refused() -> None:
    async with works(threads=2, max_waiting=4) as found:
        await found.start("a1", "a2")
        await wait_until(lambda: len(found.begun) == 2)
        await found.start("a3", "a4", "a5", "a6")
        with pytest.raises(PoolBusyError, match=r"3 wait already \(3 of this client's, limit 3\)"):
            await found.tasks["a6"]
        await found.start("b1", "b2")
        with pytest.raises(PoolBusyError, match=r"the work: 4 wait already \(a full queue\)"):
            await found.tasks["b2"]
        assert not found.tasks["b1"].done()


async def test_a_cancelled_work_leaves_the_queue_and_is_never_run() -> None:
    async with works(max_waiting=1) as found:
        await found.start("a1")
        await wait_until(lambda: len(found.begun) == 1)
        await found.start("b1")
        found.tasks["b1"].cancel()
        await asyncio.gather(found.tasks["b1"], return_exceptions=True)
        await found.start("c1")
        for _ in range(2):
            found.go_on.release()
        assert await found.tasks["c1"] == "c1"
        assert found.begun == ["a1", "c1"]


async def test_work_beyond_its_deadline_costs_its_own_pool_a_thread_until_it_ends() -> None:
    async with works(threads=2, timeout_s=0.01) as found, works() as other:
        await found.start("a1")
        with pytest.raises(PoolLateError, match=r"the work took longer than its limit of 0.01 s"):
            await found.tasks["a1"]
        assert found.pool.busy == 1
        assert await found.pool.run(lambda: "the other thread") == "the other thread"
        assert await other.pool.run(lambda: "another pool") == "another pool"
        found.go_on.release()
        await wait_until(lambda: found.pool.busy == 0)


async def test_work_that_ends_as_its_deadline_passes_is_late_all_the_same() -> None:
    """The loop is held up until the work has ended, and finds both the result and the deadline."""
    async with works(timeout_s=0.0) as found:
        ended = threading.Event()

        def hold_up() -> None:
            assert ended.wait(60.0)
            while found.pool.busy:
                os.sched_yield()

        call = asyncio.create_task(found.pool.run(ended.set))
        asyncio.get_running_loop().call_soon(hold_up)
        with pytest.raises(PoolLateError, match=r"longer than its limit of 0 s"):
            await call


async def test_what_work_raises_is_raised_and_a_panic_is_a_failure() -> None:
    class PanicError(BaseException):
        pass

    def fail(error: BaseException) -> None:
        raise error

    async with works() as found:
        for error in (ValueError("why"), TimeoutError("its own")):
            with pytest.raises(type(error), match=str(error)):
                await found.pool.run(fail, error)
        with pytest.raises(RuntimeError, match="the work failed: PanicError"):
            await found.pool.run(fail, PanicError())
        with pytest.raises(RuntimeError, match="the work failed: SystemExit"):
            await found.pool.run(fail, SystemExit())


async def test_work_sees_the_context_of_its_caller_and_a_closed_pool_takes_none() -> None:
    name: ContextVar[str] = ContextVar("name")
    name.set("mine")
    async with works() as found:
        assert await found.pool.run(name.get) == "mine"
        found.pool.close()
        with pytest.raises(PoolBusyError, match="is stopping"):
            await found.pool.run(name.get)
