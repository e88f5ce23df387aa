"""The verifier command as users run it, in a process that a bench can look into.

    python benchmarks/watched_verifier.py REPORT [--profile FILE] [options of edgespec verifier]

At SIGUSR1 it writes a JSON object to REPORT: its asyncio tasks, sessions, streams, key-value blocks
held, passes and their rows, and the messages taken and sent so far, by type. ``--profile`` runs it
under cProfile and leaves the statistics of the event loop's thread in FILE. Nothing else differs.
"""

from __future__ import annotations

import asyncio
import cProfile
import importlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from edgespec.__main__ import main as edgespec
from edgespec.core.protocol.messages import Draft, Message


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

        def counted(requests: Any) -> Any:
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
            }
            draft = report.with_suffix(".part")
            draft.write_text(json.dumps(found))
            draft.replace(report)

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write)
        return verifier, server

    command.build_verifier = build_watched


def main() -> None:
    arguments = sys.argv[2:]
    watch(Path(sys.argv[1]))
    profile = None
    if arguments[:1] == ["--profile"]:
        profile, arguments = Path(arguments[1]), arguments[2:]
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
