"""Differences between operating systems: what a system lacks, and what is done in its place.

Modules and functions that Unix alone has are imported and called here and nowhere else
(``tests/test_floors.py``). Each function of this file works on every system, and its docstring
names the systems where it does less. What a system has is found by looking for it, not by the
system's name, so the tests can take it away. This file imports the standard library alone, because
a child process with limits loads it by its path (``models/limited_process.py``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

IS_WINDOWS: Final = sys.platform == "win32"

# --- signals --------------------------------------------------------------------------------------

_STOPPING: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
STOPPING_SIGNALS: Final = tuple(
    [signal.Signals(getattr(signal, name)) for name in _STOPPING if hasattr(signal, name)]
)
"""Signals that end a command. SIGHUP, which the end of a terminal sends, is not on Windows. Windows
sends SIGBREAK for that, and for Ctrl-Break."""
HANGUP: Final = signal.Signals(signal.SIGHUP) if hasattr(signal, "SIGHUP") else None
"""Signal of a terminal that was closed, or None where there is none (Windows)."""
RUNS_VERIFIERS: Final = HANGUP is not None
"""Whether ``edgespec verifier`` runs on this system. Windows lacks SIGHUP, on which it reads its
keys again, and limits for the child processes that compile grammars."""
VERIFIER_SYSTEMS: Final = (
    "a verifier runs on Linux (on a Mac's processor untested), not on this system: start it in WSL"
    " 2 or on another machine, and name it with --verifier HOST:PORT"
)
"""Error message for a command that would start a verifier here."""


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Hold back the signals that stop a command until the end of the block. A process that is
    started in the block inherits the blocked signals. On Windows nothing is held back."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_process_group() -> None:
    """Put this process into a group of its own and let the stopping signals in again. A signal to
    the former group, such as that of ``timeout``, does not reach this process from here on. Nothing
    is done on Windows."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING_SIGNALS)


# --- processes ------------------------------------------------------------------------------------


def own_session() -> dict[str, Any]:
    """Return the arguments of ``subprocess.Popen`` for a child that a Ctrl-C in the terminal does
    not reach."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def kill_session(leader_id: int) -> None:
    """Kill a process that was started with ``own_session``, and the processes that it has started.
    Nothing is done if they have ended."""
    if sys.platform == "win32":
        command = ["taskkill", "/F", "/T", "/PID", str(leader_id)]
        subprocess.run(command, capture_output=True, check=False)
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader_id, signal.SIGKILL)


def usable_cores() -> int:
    """Return the number of cores that this process may use. macOS and Windows do not say which, so
    it is the machine's number there."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def max_open_files() -> int | None:
    """Return the limit on this process's open files (``ulimit -n``), or None if there is none, as
    on Windows."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if allowed == resource.RLIM_INFINITY else allowed


def peak_resident_bytes() -> int | None:
    """Return the most memory that this process has held, or None where the system does not say
    (Windows)."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def lower_priority(niceness: int) -> None:
    """Let other processes go first, the more the higher ``niceness`` is (0 to 19). Nothing is done
    on Windows."""
    if hasattr(os, "nice"):
        os.nice(niceness)


def limit_data(most_bytes: int) -> bool:
    """Limit the memory that this process may allocate, and write no image of it when it crashes.
    Return whether the system keeps that limit; Windows does not, and macOS need not."""
    try:
        import resource
    except ModuleNotFoundError:
        return False
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    except (OSError, ValueError):  # macOS refuses some limits
        return False
    return sys.platform == "linux"


def limit_cpu(most_s: int) -> bool:
    """End this process once it has used ``most_s`` seconds of processor time since its start.
    Return whether the system does that; Windows does not."""
    try:
        import resource
    except ModuleNotFoundError:
        return False
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most))
    return True


# --- files ----------------------------------------------------------------------------------------

HAS_FILE_MODES: Final = os.name == "posix"
"""Whether the mode of a file says who may read it. On Windows a file has the rights of its
folder."""
OPEN_AT_ONCE: Final = sum(
    [
        getattr(os, name)
        for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT")
        if hasattr(os, name)
    ]
)
"""Flags of ``os.open`` for a file that child processes do not inherit and whose bytes stay as they
are. Where the system can, opening a pipe does not wait for its other end."""
_REPLACE_WITHIN_S: Final = 2.0
_REPLACE_AGAIN_S: Final = 0.05


def move_path(source: str | Path, target: str | Path) -> None:
    """Give ``source`` the name ``target``, in one step. A file that is there is replaced.

    On Windows a file cannot be renamed or replaced while another program has it open, as virus
    scanners and indexers do for a moment. So it is tried again there for ``_REPLACE_WITHIN_S``.
    Raises ``OSError``."""
    until_s = time.monotonic() + _REPLACE_WITHIN_S
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if not IS_WINDOWS or time.monotonic() >= until_s:
                raise
        time.sleep(_REPLACE_AGAIN_S)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Let one process at a time be in this block for ``folder``. The system frees the lock of a
    process that was killed. A folder that cannot be opened is not locked. On Windows a file
    ``.edgespec.lock`` stays in the folder, and the block is entered without a lock after 10 s."""
    try:
        handle = _lock(folder)
    except OSError:
        handle = None
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)  # this frees the lock


def _lock(folder: Path) -> int | None:
    """Wait for the lock of a folder, and return the open file that holds it. Raises ``OSError``."""
    if sys.platform == "win32":
        import msvcrt

        handle = os.open(folder / ".edgespec.lock", os.O_RDWR | os.O_CREAT | OPEN_AT_ONCE)
        msvcrt.locking(handle, msvcrt.LK_LOCK, 1)  # tries for 10 s
        return handle
    try:
        import fcntl
    except ModuleNotFoundError:
        return None
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def set_blocking(handle: int) -> None:
    """Let reads and writes of an open file wait. They do anyway on Windows."""
    if hasattr(os, "O_NONBLOCK"):
        os.set_blocking(handle, True)


def wait_for_data(handle: int, timeout_s: float) -> bool:
    """Return whether a read of this pipe or device finds data or its end within ``timeout_s``.
    Windows cannot wait for a pipe, so a read may wait there."""
    if not hasattr(select, "poll"):
        return True
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(timeout_s * 1e3))


def set_file_mode(handle: int, path: str | Path, mode: int) -> None:
    """Set the permissions of the open file ``path``. On Windows only the write permission of its
    owner has a meaning."""
    # The descriptor is used because the folder's owner could exchange the file by its name.
    os.chmod(handle if os.chmod in os.supports_fd else path, mode)


def give_file(handle: int, owner: int, group: int) -> bool:
    """Give an open file to the user ``owner`` (-1: leave that) and to ``group``. Return whether
    that was possible; on Windows a file keeps its owner."""
    if not hasattr(os, "chown"):
        return True
    try:
        os.chown(handle, owner, group)
    except OSError:  # not permitted, or unknown to a container
        return False
    return True


# --- memory ---------------------------------------------------------------------------------------

CAN_DROP_MEMORY: Final = hasattr(mmap, "MADV_DONTNEED")
"""Whether parts of a mapping can be given back to the system. Windows takes back the whole only."""


def map_memory(size_bytes: int) -> mmap.mmap:
    """Return private memory of this process, of which the system gives a page when it is first
    written. Pages are small where the system can be asked for that. Raises ``OSError`` if there is
    no address space."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size_bytes)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages has only small ones
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory


def drop_memory(memory: mmap.mmap, start: int = 0, length: int | None = None) -> None:
    """Give pages of a mapping back to the system. On Linux they read as zeros afterwards; elsewhere
    they may stay as they were."""
    if hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED, start, len(memory) - start if length is None else length)


# --- sockets --------------------------------------------------------------------------------------

HAS_UNIX_SOCKETS: Final = os.name == "posix" and hasattr(socket, "AF_UNIX")
"""Whether two processes, or two parts of one, can talk over a socket without a port."""


def claim_port(listener: socket.socket) -> None:
    """Prepare a socket before it is bound, so that a server can listen at once after the last one
    has ended, and no other program can listen at the same port."""
    if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
        # On Windows SO_REUSEADDR would let a second program take the port of a running server.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def send_datagram(address: str, content: bytes) -> None:
    """Send a datagram to the Unix socket at ``address``, without waiting for its reader. Raises
    ``OSError``, also on a system without Unix sockets."""
    if not HAS_UNIX_SOCKETS:
        raise OSError("this system has no Unix sockets")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.setblocking(False)
        end.connect(address)
        end.send(content)


# --- the terminal ---------------------------------------------------------------------------------


def can_move_cursor() -> bool:
    """Return whether the terminal of this process can move its cursor, if it has one. Windows names
    no kind of terminal, and its consoles all can."""
    usual = "windows" if IS_WINDOWS else "dumb"
    return os.environ.get("TERM", usual) not in ("dumb", "unknown")


def has_controlling_terminal() -> bool:
    """Return whether a terminal belongs to this process, whatever its standard streams are. It is
    not found on Windows."""
    if not hasattr(os, "O_NOCTTY"):
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def silent_keyboard(handle: int) -> Iterator[None]:
    """Turn off the echo of the terminal ``handle`` in this block. Typed keys wait, and Ctrl-C still
    works.

    The console of Windows shows keys only where a program reads them, so nothing is done there."""
    try:
        import termios
    except ModuleNotFoundError:
        yield
        return
    before = termios.tcgetattr(handle)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    silent[0] &= ~termios.ICRNL  # the editor needs Enter as a carriage return
    termios.tcsetattr(handle, termios.TCSANOW, silent)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(handle, termios.TCSANOW, before)


def prepare_console() -> None:
    """Let the console obey control sequences, such as colours. Only consoles of Windows
    have to be asked; an old one that cannot is left as it is."""
    if sys.platform == "win32":
        import ctypes

        obey = 0x0004  # ENABLE_VIRTUAL_TERMINAL_PROCESSING
        system = ctypes.windll.kernel32
        for which in (-11, -12):  # the standard output and the standard error
            handle, mode = system.GetStdHandle(which), ctypes.c_uint32()
            if system.GetConsoleMode(handle, ctypes.byref(mode)):
                system.SetConsoleMode(handle, mode.value | obey)


# --- what this system lacks -----------------------------------------------------------------------

_COARSE_CLOCK_S: Final = 5e-3


def list_lacks() -> list[str]:
    """Return what edgespec goes without on this system, one phrase for each."""
    lacks: list[tuple[Callable[[], bool], str]] = [
        (lambda: not RUNS_VERIFIERS, "a verifier of its own (it needs Linux)"),
        (lambda: HANGUP is None, "SIGHUP"),
        (lambda: not HAS_UNIX_SOCKETS, "Unix sockets (so no early connection)"),
        (lambda: not HAS_FILE_MODES, "file modes (private files have the rights of their folder)"),
        (lambda: max_open_files() is None, "limits on child processes (they watch themselves)"),
    ]
    return [phrase for is_lacking, phrase in lacks if is_lacking()]


def clock_step_s() -> float:
    """Return the step of the monotonic clock if it is coarse, else 0. Python 3.11 and 3.12 on
    Windows have a step of 15.6 ms, too coarse to time a draft step or a short round trip."""
    step_s = time.get_clock_info("monotonic").resolution
    return step_s if step_s > _COARSE_CLOCK_S else 0.0
