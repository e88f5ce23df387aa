"""What a service manager hears of a daemon: ready, reloading, stopping, alive.

The protocol is systemd's ``sd_notify``: datagrams of ``NAME=value`` lines to the socket that
``$NOTIFY_SOCKET`` names, a path or, behind an ``@``, an abstract name. Without the variable every
call does nothing. A manager that cannot be told is no reason to end: the error is logged once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping

_LOG = logging.getLogger(__name__)


class ServiceManager:
    """The manager that started this process, if the ``environment`` names one."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._socket = environment.get("NOTIFY_SOCKET", "")
        self._failed = self._stops = False
        self.watchdog_s = _watchdog_s(environment)
        """Longest time between two signs of life that the manager accepts; 0: it asks for none."""

    def ready(self, status: str) -> None:
        """The process serves from now on, or serves again after ``reloading``; not after
        ``stopping``: files are read anew during a drain, too."""
        if not self._stops:
            self._send("READY=1", f"STATUS={_one_line(status)}")

    def reloading(self) -> None:
        """The process reads its configuration anew; ``ready`` follows."""
        if not self._stops:
            self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """The process has begun to end."""
        self._stops = True
        self._send("STOPPING=1", f"STATUS={_one_line(status)}")

    async def keep_alive(self) -> None:
        """Say twice in ``watchdog_s`` that the event loop turns, until cancelled; returns at once
        where nobody wants to know."""
        while self._socket and self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if not self._socket:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as end:
                end.setblocking(False)  # a manager that does not read must not hold this up
                end.connect(_unix_address(self._socket))
                end.send("\n".join(lines).encode())
        except OSError as error:
            if not self._failed:
                _LOG.warning("cannot tell the service manager at %s: %s", self._socket, error)
            self._failed = True


def _unix_address(name: str) -> str:
    """A leading ``@`` stands for the zero byte of an abstract address."""
    return "\0" + name[1:] if name.startswith("@") else name


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """0 unless ``$WATCHDOG_USEC`` is a number of microseconds meant for this process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    meant_for = environment.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdecimal() or meant_for != str(os.getpid()):
        return 0.0
    return int(microseconds) / 1e6
