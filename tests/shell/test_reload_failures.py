"""Reloads that fail. Oracle: the next one is heard all the same."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.cli.service_manager import ServiceManager
from edgespec.cli.serving import _reload_whenever


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
