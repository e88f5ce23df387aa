"""Reloads and drains that go wrong. Oracle: the next reload is heard, the drain goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.cli.verifier import ServiceManager, _drain, _reload_whenever
from edgespec.config import ConfigError
from edgespec.core.verifier.credential import Credential
from edgespec.wire.access import ServerAccess
from tests.shell.guarded import keys_in, verifier_config


@pytest.mark.parametrize("broken", ["files", "streams"])
async def test_a_reload_that_raises_is_not_the_last(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked, done = asyncio.Event(), asyncio.Queue[str]()

    def reload() -> Any:
        if broken == "files":
            raise RuntimeError("a bug")
        return SimpleNamespace(keys=SimpleNamespace(revoked=("one",)), warnings=())

    def revoke(names: object) -> int:
        raise RuntimeError("a bug")

    class Manager(ServiceManager):
        def ready(self, status: str) -> None:
            done.put_nowait(status)

    access: Any = SimpleNamespace(reload=reload)
    serving: Any = SimpleNamespace(revoke=revoke)
    task = asyncio.create_task(_reload_whenever(asked, access, serving, Manager(), "up"))
    for _ in range(2):
        asked.set()
        assert await asyncio.wait_for(done.get(), 30.0) == "up"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert caplog.text.count("RuntimeError: a bug") == 2


def test_a_file_of_keys_that_was_cut_off_revokes_nobody(tmp_path: Path) -> None:
    """As an editor leaves it for a moment, or a full disk for good."""
    path = tmp_path / "keys.yaml"
    key = keys_in(path, "one")["one"]
    access, whole = ServerAccess(verifier_config(keys=path)), path.read_text()
    for cut in (0, whole.index("keys:"), whole.index("one:")):
        path.write_text(whole[:cut])
        with pytest.raises(ConfigError, match="keys"):
            access.reload()
        assert access.authenticate(key) == Credential("one")
    path.write_text("keys: {}")
    assert access.reload().keys.revoked == ("one",)
    assert access.authenticate(key) is None


class FullDisk(io.StringIO):
    """A log on a disk that takes no more."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("drain_s", [0.0, 30.0])
async def test_a_drain_goes_on_where_nobody_can_be_told(
    drain_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def drain() -> None:
        done.append("drain")

    async def drained() -> None:
        done.append("drained")

    server: Any = SimpleNamespace(stream_count=1, drain=drain, drained=drained)
    serving: Any = SimpleNamespace(broken=asyncio.Event())
    monkeypatch.setattr(sys, "stderr", FullDisk())
    await _drain(serving, server, drain_s)
    assert done == (["drain", "drained"] if drain_s else ["drain"])
