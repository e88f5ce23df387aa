"""The verifier command as users run it, in a process that a bench can look into.

    python benchmarks/watched_verifier.py REPORT [--profile FILE] [--table] [--uvloop] [--costs]
    [options of edgespec verifier]

At SIGUSR1 it writes a JSON object to REPORT: its asyncio tasks, sessions, streams, key-value blocks
held, passes and their rows, the messages taken and sent so far, by type, the CPU time of the event
loop's thread, of the target's and of the whole process, and when the latest passes were started.
``--profile`` runs it under cProfile and leaves the statistics of the event loop's thread in FILE.
``--costs`` tells what the loop spends on whom (``loop_costs.py``).
``--table`` looks the toy target's tokens up in a table, and ``--uvloop`` runs on that event loop.
Nothing else differs.
"""

from __future__ import annotations

import asyncio
import cProfile
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from edgespec.__main__ import main as edgespec
from edgespec.core.protocol.messages import Draft, Message

# Of a point of ``daemon_load.py``: half a minute of passes.
_STARTS_KEPT = 1_200


class MessageCounter:
    """A ``ByteMeter`` that counts messages by type, and the nodes of drafts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, message: Message, size: int) -> None:
        self.counts[type(message).__name__] += 1
        if isinstance(message, Draft):
            self.counts["nodes"] += len(message.tokens)


def watch(report: Path) -> None:
    """Make the verifier that this process builds answer SIGUSR1."""
    command: Any = importlib.import_module("edgespec.cli.serving")
    build = command.build_verifier

    def build_watched(*arguments: Any, **options: Any) -> Any:
        verifier, server = build(*arguments, **options)
        meter = server._meter = MessageCounter()
        submit, rows, asked = verifier._worker.submit, Counter[str](), 0
        starts: deque[float] = deque(maxlen=_STARTS_KEPT)
        collecting = CollectorWatch()

        def counted(requests: Any) -> Any:
            if requests:
                starts.append(time.monotonic())
            rows["fed"] += sum(len(request.feed) for request in requests)
            rows["drafted"] += sum(len(request.tokens) for request in requests)
            return submit(requests)

        verifier._worker.submit = counted

        def write() -> None:
            nonlocal asked
            asked += 1
            ledger = verifier.engine.keeper.ledger
            found = {
                "asked": asked,
                "tasks": len(asyncio.all_tasks()),
                "sessions": len(verifier.engine.sessions),
                "streams": len(verifier._streams),
                "blocks": 0 if ledger is None else ledger.block_count - ledger.free_count,
                "passes": verifier.engine.passes,
                "fed": rows["fed"],
                "drafted": rows["drafted"],
                "evictions": verifier.engine.keeper.evictions,
                "messages": dict(meter.counts),
                "loop_cpu_s": time.thread_time(),
                "target_cpu_s": sum(map(cpu_s, verifier._worker._thread._threads)),
                "process_cpu_s": time.process_time(),
                "gc_cpu_s": collecting.total_s,
                "loop_costs_s": costs(),
                "starts_s": list(starts),
            }
            draft = report.with_suffix(".part")
            draft.write_text(json.dumps(found))
            draft.replace(report)

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write)
        return verifier, server

    command.build_verifier = build_watched


class CollectorWatch:
    """The CPU time that garbage collections take from whatever thread they happen in."""

    def __init__(self) -> None:
        self.total_s = self._began_s = 0.0
        gc.callbacks.append(self._hear)

    def _hear(self, phase: str, _: dict[str, int]) -> None:
        now_s = time.thread_time()
        if phase == "start":
            self._began_s = now_s
        else:
            self.total_s += now_s - self._began_s


def cpu_s(thread: threading.Thread) -> float:
    """CPU time that a running thread has used."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def costs() -> dict[str, float]:
    """What the event loop spent on whom so far; empty without ``--costs``."""
    module = sys.modules.get("loop_costs")
    return {} if module is None else dict(module.cpu_s)


def look_tokens_up() -> None:
    """Replace the toy target that this process loads by its table; the pace of passes stays."""
    from table_target import TableTarget

    from edgespec.targets.paced import PacedTarget

    command: Any = importlib.import_module("edgespec.cli.serving")
    load = command.load_target

    def load_table(config: Any) -> Any:
        target = load(config)
        assert isinstance(target, PacedTarget)
        target.inner = TableTarget(target.inner)
        return target

    command.load_target = load_table


def main() -> None:
    arguments = sys.argv[2:]
    watch(Path(sys.argv[1]))
    profile = None
    if arguments[:1] == ["--profile"]:
        profile, arguments = Path(arguments[1]), arguments[2:]
    if "--costs" in arguments:
        import loop_costs

        arguments.remove("--costs")
        loop_costs.install()
    if "--table" in arguments:
        arguments.remove("--table")
        look_tokens_up()
    if "--uvloop" in arguments:
        import uvloop

        arguments.remove("--uvloop")
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    sys.argv = ["edgespec", "verifier", *arguments]
    if profile is None:
        edgespec()
        return
    profiler = cProfile.Profile()
    try:
        profiler.runcall(edgespec)
    finally:
        profiler.dump_stats(os.fspath(profile))


if __name__ == "__main__":
    main()
