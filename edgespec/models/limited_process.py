"""Child processes for input of other parties, with limits on memory and processor time.

Grammars of clients are compiled in such a process first (``grammar_trial.py``); chat templates and
tokenizers of other parties stay in one (``text_worker.py``). The process runs this file, which sets
the limits and then runs the given script by calling its ``main(bounds, ...)``. Its environment is
that of its parent without the variables that begin with ``EDGESPEC_``, such as keys. When its
parent is killed, its standard input ends; a script that does not read it ends at its limits.

Where the system keeps no such limits (Windows; that on memory on macOS), a thread of the process
looks at its memory and its processor time and ends it. A library that neither yields to other
threads nor returns can put that off; the deadlines of the parent end the process then.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

STOPPING: Final = "this side is stopping"
_SECRET: Final = "EDGESPEC_"
_OPERATING_SYSTEM: Final = Path(__file__).resolve().parent.parent / "operating_system.py"
_LOOK_EVERY_S: Final = 0.05
OVER_LIMIT: Final = 137
"""Exit code of a process that has ended itself because it took too much, as after SIGKILL."""


class LimitedProcesses:
    """Starter of processes from any thread. ``close`` ends every process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def start(
        self, script: str, most_bytes: int, arguments: Sequence[str] = (), niceness: int = 0
    ) -> subprocess.Popen[bytes]:
        """Start ``script`` with at most ``most_bytes`` of data. The caller passes the process to
        ``forget`` at its end. Raises ``OSError``, also after ``close``."""
        from edgespec.operating_system import own_session

        with self._lock:
            if self._closed:
                raise OSError(STOPPING)
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", __file__, script, str(most_bytes), str(niceness)),
                    *arguments,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # the message of a panic may quote a client
                env={n: text for n, text in os.environ.items() if not n.startswith(_SECRET)},
                **own_session(),  # a Ctrl-C must not reach it
            )
            self._running.add(process)
        return process

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Forget a process that has ended or was killed."""
        with self._lock:
            self._running.discard(process)

    def close(self) -> None:
        """Kill all processes, and start no more. A second call does nothing."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()

    def reap(self) -> None:
        """Kill all processes, wait for their end and close their pipes. No more are started."""
        self.close()
        for process in list(self._running):
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # the process did not read everything
                        pipe.close()
            self.forget(process)


class Bounds:
    """The limits of this process, for the script that runs in it."""

    def __init__(self, most_bytes: int, niceness: int) -> None:
        # The process imports nothing of edgespec, so it loads this file by its path.
        self._system = _load_file("edgespec_operating_system", str(_OPERATING_SYSTEM))
        self._system.lower_priority(niceness)
        self._watch: _Watch | None = None
        if not self._system.limit_data(most_bytes):
            self._watch = _Watch(most_bytes)

    def allow_cpu(self, cpu_s: int) -> None:
        """Let this process use this much more processor time; it is killed after that."""
        # The limit counts from the start of a process.
        limit_s = math.ceil(time.process_time()) + cpu_s
        if not self._system.limit_cpu(limit_s) and self._watch is not None:
            self._watch.max_cpu_s = limit_s


class _Watch:
    """A thread that ends this process once it holds more than ``most_bytes`` of memory, or has used
    more than ``max_cpu_s`` seconds of processor time."""

    def __init__(self, most_bytes: int) -> None:
        self.max_cpu_s = math.inf
        self._most_bytes = most_bytes
        threading.Thread(target=self._look, name="limits", daemon=True).start()

    def _look(self) -> None:
        import psutil

        process = psutil.Process()
        while time.process_time() <= self.max_cpu_s:
            if process.memory_info().rss > self._most_bytes:
                break
            time.sleep(_LOOK_EVERY_S)
        os._exit(OVER_LIMIT)


def _load_file(name: str, path: str) -> ModuleType:
    """Return the module in the file ``path``, which need not be importable."""
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _main(script: str, most_bytes: str, niceness: str, *arguments: str) -> None:
    bounds = Bounds(int(most_bytes), int(niceness))
    _load_file("edgespec_limited", script).main(bounds, *arguments)


if __name__ == "__main__":
    _main(*sys.argv[1:])
