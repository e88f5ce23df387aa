"""A Python that lacks what Unix alone has, as on Windows. Put this folder on ``PYTHONPATH``.

Modules are refused to this project's own code only, since libraries have their own ways around
them. Attributes of modules are gone for all code, so the few places of the standard library that
need one at a call are mended first, as they are on Windows. Child processes begin in the same way,
isolated ones (``python -I``) too. The oracle of this file is ``test_the_block_holds``.
"""

import asyncio
import builtins
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

import psutil  # noqa: F401 # on Linux it reads what is taken away at its import

MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty", "uvloop")
ATTRIBUTES = {
    signal: "SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGQUIT SIGTSTP SIGCHLD pthread_sigmask",
    os: "fork forkpty getuid geteuid getgid getegid killpg setpgid setsid nice fchmod chown pread"
    " pwrite set_blocking sched_getaffinity O_NONBLOCK O_CLOEXEC O_NOCTTY O_DIRECTORY mkfifo",
    socket: "AF_UNIX",
    select: "poll epoll",
    mmap: "MADV_DONTNEED MADV_NOHUGEPAGE",
}
_KILL = 9
_usual_import = builtins.__import__
_usual_start = subprocess.Popen.__init__
_isolated = (
    "import runpy, sys; sys.argv[:] = sys.argv[1:]; runpy.run_path({hook!r});"
    " runpy.run_path(sys.argv[0], run_name='__main__')"
)


def refuse(name: str, given: Any = None, *more: Any, **named: Any) -> Any:
    if name.partition(".")[0] in MODULES and str((given or {}).get("__name__")).startswith(
        ("edgespec", "__main__")
    ):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _usual_import(name, given, *more, **named)


def refuse_handlers(*_: Any) -> None:
    raise NotImplementedError


def connect_pair(*_: Any) -> tuple[socket.socket, socket.socket]:
    """Return two sockets that are connected, without Unix sockets."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        ours = socket.socket()
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


def start(process: Any, command: Any, *more: Any, **given: Any) -> None:
    if isinstance(command, list) and command[:2] == [sys.executable, "-I"]:
        command = [*command[:2], "-c", _isolated.format(hook=__file__), *command[2:]]
    _usual_start(process, command, *more, **given)


def kill(process: Any) -> None:
    """End a process at once, without the name of a signal."""
    process.send_signal(_KILL)


def take_away() -> None:
    """Take everything away, once."""
    for module, names in ATTRIBUTES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    builtins.__import__ = refuse  # type: ignore[assignment]
    asyncio.SelectorEventLoop.add_signal_handler = refuse_handlers  # type: ignore[assignment]
    socket.socketpair = connect_pair  # type: ignore[assignment]
    subprocess.Popen.__init__ = start  # type: ignore[assignment, method-assign]
    subprocess.Popen.kill = kill  # type: ignore[assignment, method-assign]


if hasattr(signal, "SIGHUP"):
    take_away()
