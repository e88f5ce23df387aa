"""The drafter's thread: what is submitted runs in order, and a step that hangs holds up nobody's
end. Oracles: the order of calls, and processes that end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from edgespec.device.draft_thread import DraftThread
from tests.shell.live_verifier import environment
from tests.sources import ROOT

WITHIN_S = 60.0
HANGING = """
import asyncio, threading
from edgespec.device import agent, shared_drafter
from edgespec.device.agent import Agent
from edgespec.models.toy import TOY_MODEL, toy_info
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.models.toy import ToyTokenizer

agent._CLOSING_S = shared_drafter._CLOSING_S = 0.05
began = threading.Event()

class Stuck(ToyDrafter):
    def step(self, *_):
        began.set()
        threading.Event().wait()

class Silent:
    async def connect(self):
        await asyncio.Event().wait()

    async def close(self):
        pass

async def main():
    text = ToyTokenizer()
    one = Agent(Silent(), Stuck(TOY_MODEL, toy_info()), text.encode, text.stream)
    reading = asyncio.create_task(anext(one.generate("once")))
    await asyncio.to_thread(began.wait)
    reading.cancel()  # as a Ctrl-C does
    await asyncio.wait([reading])
    await one.close()

asyncio.run(main())
print("over")
"""


def test_a_step_that_never_comes_back_keeps_no_process_from_ending() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    assert "a draft step still runs" in done.stderr


def test_work_is_done_in_order_and_errors_are_heard() -> None:
    thread, did = DraftThread("test"), list[int]()

    def failing() -> None:
        raise ValueError("no")

    futures = [thread.submit(did.append, number) for number in range(5)]
    failed = thread.submit(failing)
    assert [future.result(WITHIN_S) for future in futures] == [None] * 5
    assert isinstance(failed.exception(WITHIN_S), ValueError)
    assert thread.close(lambda: did.append(99), WITHIN_S)
    assert did == [*range(5), 99]
    assert thread.close(lambda: did.append(100), WITHIN_S)
    assert did[-1] == 99
    with pytest.raises(RuntimeError, match="the drafter is closed"):
        thread.submit(did.append, 1)


def test_what_was_held_up_is_let_go_when_the_step_comes_back() -> None:
    thread, hanging, back = DraftThread("test"), threading.Event(), threading.Event()
    freed = threading.Event()

    def hang() -> None:
        hanging.set()
        back.wait(WITHIN_S)

    step = thread.submit(hang)
    assert hanging.wait(WITHIN_S)
    behind = thread.submit(freed.set)
    assert not thread.close(freed.set, 0.0)
    assert behind.cancelled()
    assert not freed.is_set()
    back.set()
    assert freed.wait(WITHIN_S)
    assert step.result(WITHIN_S) is None


def test_a_thread_that_never_began_frees_all_the_same() -> None:
    freed = list[int]()
    assert DraftThread("test").close(lambda: freed.append(1), 0.0)
    assert freed == [1]
