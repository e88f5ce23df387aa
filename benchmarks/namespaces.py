"""Two network namespaces of their own with a lossy link between them, gone with this process.

Theory of operation. A namespace belongs to a *thread* that unshared it (unshare(2)): what that
thread opens or starts lives in it. Nothing has a name on the host: no ``ip netns``, no interface
outside. So when this process ends, in whatever way, the kernel removes namespaces and devices by
itself, and processes started here die with their starter (prctl(2), PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from packet_relay import LineSettings, PacketRelay

DEVICE_ADDRESS, VERIFIER_ADDRESS = "10.231.7.1", "10.231.7.2"
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_TUN = "/dev/net/tun"
CONGESTION_CONTROL = "cubic"
# The kernel's own defaults, whatever the host was tuned to.
KERNEL_SETTINGS: Mapping[str, str] = {
    "tcp_slow_start_after_idle": "1",
    "tcp_no_metrics_save": "1",  # each connection is measured for itself
    "tcp_sack": "1",
    "tcp_recovery": "1",
    "tcp_early_retrans": "3",
}

_Result = TypeVar("_Result")
_libc = ctypes.CDLL(None, use_errno=True)
# Run by the new process itself and not between fork and exec: a fork would call the handlers of
# libraries, and gRPC's starts its threads anew, in this thread's namespace and for good.
_LAUNCH = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
os.execvp(sys.argv[1], sys.argv[1:])
"""


class NoNamespaces(Exception):
    """Namespaces or TUN devices cannot be made here; says why."""


class Namespace:
    """A network namespace with one TUN device ``packets``; use as a context manager."""

    def __init__(self, address: str, peer: str) -> None:
        self._address, self._peer = address, peer
        self._thread = ThreadPoolExecutor(1, f"namespace {address}")
        self.tun = -1

    def __enter__(self) -> Namespace:
        try:
            self.run(self._make)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def run(self, action: Callable[[], _Result]) -> _Result:
        """Do it in the namespace: sockets and processes that it opens stay there."""
        return self._thread.submit(action).result()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """A process in the namespace, that is killed when this one dies."""
        launched = (sys.executable, "-c", _LAUNCH, *command)
        return self.run(partial(subprocess.Popen, launched, **options))

    def counters(self) -> dict[str, int]:
        """TCP's counters of the namespace since it was made (TcpExt, those that are not 0)."""
        # /proc/net is the process's first thread's.
        text = self.run(lambda: Path("/proc/thread-self/net/netstat").read_text())
        names, values, *_ = (line.split()[1:] for line in text.splitlines())
        return {name: int(value) for name, value in zip(names, values, strict=True) if int(value)}

    def _make(self) -> None:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            raise NoNamespaces(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        try:
            self.tun = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
            wish = struct.pack("16sH14x", b"packets", _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(self.tun, _TUNSETIFF, wish)
        except OSError as error:
            raise NoNamespaces(f"no TUN device from {_TUN}: {error}") from None
        _ip("link", "set", "lo", "up")
        _ip("address", "add", self._address, "peer", self._peer, "dev", "packets")
        _ip("link", "set", "packets", "mtu", "1500", "txqueuelen", "1000", "up")
        # By the route: only the host's own namespace may choose any algorithm as the default.
        route = ("route", "replace", self._peer, "dev", "packets", "src", self._address)
        _ip(*route, "congctl", CONGESTION_CONTROL)
        for name, value in KERNEL_SETTINGS.items():
            # Of the thread's own namespace.
            Path(f"/proc/sys/net/ipv4/{name}").write_text(value)

    def _close(self) -> None:
        if self.tun >= 0:
            os.close(self.tun)
            self.tun = -1
        self._thread.shutdown()


@contextlib.contextmanager
def linked_namespaces(
    up: LineSettings, down: LineSettings
) -> Iterator[tuple[Namespace, Namespace, PacketRelay]]:
    """The device's namespace, the verifier's, and the link between. Raises ``NoNamespaces``."""
    with (
        Namespace(DEVICE_ADDRESS, VERIFIER_ADDRESS) as device,
        Namespace(VERIFIER_ADDRESS, DEVICE_ADDRESS) as verifier,
        PacketRelay(device.tun, verifier.tun, up, down) as relay,
    ):
        yield device, verifier, relay


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(("ip", *words), capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoNamespaces("the command ip (package iproute2) is not there") from None
    if done.returncode:
        raise NoNamespaces(f"ip {' '.join(words)}: {done.stderr.strip()}")


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends, in whatever way."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
