"""What systemd is told. Oracle: a socket bound as systemd binds its own, and what arrives there."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgespec.cli.verifier import ServiceManager
from tests.shell.live_verifier import daemon

WITHIN_S = 60


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        end.settimeout(WITHIN_S)
        yield end


def heard(end: socket.socket) -> dict[str, str]:
    lines = end.recv(4096).decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "path":
        return str(tmp_path / "notify")
    return f"@edgespec-test-{secrets.token_hex(8)}"


async def test_a_watched_service_shows_that_it_lives(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    watched = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())}
    manager = ServiceManager(watched)
    assert manager.watchdog_s == 0.002
    with listening(address) as end:
        beat = asyncio.ensure_future(manager.keep_alive())
        for _ in range(3):
            assert await asyncio.to_thread(heard, end) == {"WATCHDOG": "1"}
        beat.cancel()


def test_a_manager_that_is_gone_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "none")})
    manager.ready("ready")
    manager.stopping("stopping")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path / "none") in caplog.text


def test_the_daemon_says_when_it_serves_reloads_and_ends(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with listening(address) as end:
        with daemon() as (where, process):
            ready = heard(end)
            assert ready["READY"] == "1"
            assert where in ready["STATUS"]
            process.send_signal(signal.SIGHUP)
            assert heard(end)["RELOADING"] == "1"
            assert heard(end) == ready
            process.send_signal(signal.SIGTERM)
            assert heard(end)["STOPPING"] == "1"
            assert process.wait(WITHIN_S) == 0
