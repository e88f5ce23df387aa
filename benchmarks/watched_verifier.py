"""The verifier command as users run it, in a process that a bench can look into.

    python benchmarks/watched_verifier.py REPORT [--profile FILE] [--table]
    [options of edgespec verifier]

At SIGUSR1 it writes a JSON object to REPORT: its asyncio tasks, sessions, streams, key-value blocks
held, passes and their rows, the messages taken and sent so far, by type, the CPU time of the event
loop's thread, of the target's and of the whole process, and when the latest passes were started.
``--profile`` runs it under cProfile and leaves the statistics of the event loop's thread in FILE.
``--table`` looks the toy target's tokens up in a table: a model on an accelerator takes no time
from the event loop, and the toy's own arithmetic would. Nothing else differs.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.__main__ import main as edgespec
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.messages import Draft, Message
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.models.toy import TOY_MODEL

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
    command: Any = importlib.import_module("edgespec.cli.verifier")
    build = command.build_verifier

    def build_watched(*arguments: Any, **options: Any) -> Any:
        verifier, server = build(*arguments, **options)
        meter = server._meter = MessageCounter()
        submit, rows, asked = verifier._worker.submit, Counter[str](), 0
        starts: deque[float] = deque(maxlen=_STARTS_KEPT)
        collecting = CollectorWatch()

        def counted(requests: Any, draft_steps: int = 0) -> Any:
            if requests:
                starts.append(time.monotonic())
            rows["fed"] += sum(len(request.feed) for request in requests)
            rows["drafted"] += sum(len(request.tokens) for request in requests)
            return submit(requests, draft_steps)

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


def look_tokens_up() -> None:
    """Replace the toy target that this process loads by its table; the pace of passes stays."""
    from edgespec.verifier.targets.paced import PacedTarget

    command: Any = importlib.import_module("edgespec.cli.verifier")
    load = command.load_target

    def load_table(config: Any) -> Any:
        target = load(config)
        assert isinstance(target, PacedTarget)
        target.inner = TableTarget(target.inner)
        return target

    command.load_target = load_table


GREEDY = SamplingParams(ignore_eos=True)


class TableTarget:
    """The toy target as a table: its greedy choices, without its checks."""

    def __init__(self, inner: object) -> None:
        self._info: ModelInfo = inner.info  # type: ignore[attr-defined]
        self._cache: CacheShape | None = inner.cache  # type: ignore[attr-defined]
        self._tails: dict[str, tuple[int, ...]] = {}
        self._texts: dict[str, tuple[int, ...]] = {}
        self._fed: dict[str, tuple[tuple[int, ...], PassRequest]] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def cache(self) -> CacheShape | None:
        return self._cache

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._tails[key], self._texts[key] = (), tuple(text)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        return [self._run(request) for request in batch]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        tokens = self._fed[key][1].tokens
        tail = (*self._tails[key], *[tokens[node] for node in nodes])
        self._tails[key] = tail[-TOY_MODEL.order :]

    def close(self, key: str) -> None:
        self._tails.pop(key, None)
        self._texts.pop(key, None)
        self._fed.pop(key, None)

    def _run(self, request: PassRequest) -> PassResult:
        key = request.key
        text, cached = self._texts[key], request.cache_length
        # Of its prompt, a sequence may find a beginning that another one has fed.
        tail = text[:cached] if cached <= len(text) else self._tails[key]
        root = (*tail[-TOY_MODEL.order :], *request.feed)[-TOY_MODEL.order :]
        self._tails[key], self._fed[key] = root, (root, request)
        if not request.sample:
            return PassResult(key, ())
        tails = []
        for token, parent in zip(request.tokens, request.parents, strict=True):
            tails.append((*(tails[parent] if parent >= 0 else root)[1:], token))
        return PassResult(key, tuple([next_token(root), *map(next_token, tails)]))


_TABLE: dict[tuple[int, ...], int] = {}


def next_token(tail: tuple[int, ...]) -> int:
    token = _TABLE.get(tail)
    if token is None:
        token = _TABLE[tail] = choose(TOY_MODEL.logits(tail), GREEDY, 0, (), ())
    return token


def answer(prompt: Sequence[int], length: int) -> list[int]:
    """The target's own text behind ``prompt``, of ``length`` tokens."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tuple(tokens[-TOY_MODEL.order :])))
    return tokens[len(prompt) :]


def main() -> None:
    arguments = sys.argv[2:]
    watch(Path(sys.argv[1]))
    profile = None
    if arguments[:1] == ["--profile"]:
        profile, arguments = Path(arguments[1]), arguments[2:]
    if "--table" in arguments:
        arguments.remove("--table")
        look_tokens_up()
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
