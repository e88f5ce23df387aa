"""Child processes for input of other parties, with limits on memory and processor time.

Grammars of clients are compiled in such a process first (``grammar_trial.py``); chat templates and
tokenizers of other parties stay in one (``text_worker.py``). The process runs this file, which sets
the limits and then runs the given script by calling its ``main(bounds, ...)``. Its environment is
that of its parent without the variables that begin with ``EDGESPEC_``, such as keys. When its
parent is killed, its standard input ends; a script that does not read it ends at its limits.
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
from typing import Final

STOPPING: Final = "this side is stopping"
_SECRET: Final = "EDGESPEC_"


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
                start_new_session=True,  # a Ctrl-C must not reach it
                env={n: text for n, text in os.environ.items() if not n.startswith(_SECRET)},
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
        import resource  # not on every platform

        os.nice(niceness)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))

    def allow_cpu(self, cpu_s: int) -> None:
        """Let this process use this much more processor time; it is killed after that."""
        import resource

        # The limit counts from the start of a process.
        limit = math.ceil(time.process_time()) + cpu_s
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


def _main(script: str, most_bytes: str, niceness: str, *arguments: str) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    bounds = Bounds(int(most_bytes), int(niceness))
    spec = spec_from_file_location("edgespec_limited", script)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(bounds, *arguments)


if __name__ == "__main__":
    _main(*sys.argv[1:])
