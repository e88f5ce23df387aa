"""The metrics stay within reach, whatever callers do. Oracle: another caller gets its answer."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from edgespec.core.protocol.messages import Limits
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.telemetry import metrics_server
from edgespec.telemetry.metrics_server import MetricsServer
from edgespec.telemetry.verifier_counts import Watch
from tests.core.fixed_text import MODEL

WITHIN_S = 60.0


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    engine = VerifyEngine(MODEL, Limits(), EngineLimits())
    found = MetricsServer("127.0.0.1", 0)
    found.start(Watch(), engine, "m", "1")
    yield found
    found.close()


def answers(port: int) -> bool:
    """Whether the process says that it is there."""
    caller = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
    try:
        caller.request("GET", "/healthz")
        return caller.getresponse().read() == b"ok\n"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        caller.close()


def until_it_answers(port: int) -> None:
    end = time.monotonic() + WITHIN_S
    while not answers(port):
        assert time.monotonic() < end


def test_callers_for_whom_there_is_no_thread_take_no_place(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2 * metrics_server._MAX_CALLERS):
            assert not answers(server.port)
    until_it_answers(server.port)


def test_callers_that_ask_a_byte_at_a_time_are_hung_up_on(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "_DONE_WITHIN_S", 0.5)
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        places = range(metrics_server._MAX_CALLERS)
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in places
        ]

        def drip() -> None:
            while not over.wait(0.02):
                for one in slow:
                    with contextlib.suppress(OSError):
                        one.send(b"G")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            until_it_answers(server.port)
        finally:
            over.set()
            dripping.join()
