"""The verifier command as users run it, in a process that a bench can inspect; and the parent's
side of that process and of others.

    python benchmarks/watched_verifier.py REPORT [--table] [options of edgespec verifier]

At SIGUSR1 it writes a JSON object to REPORT: its asyncio tasks, sessions, streams, KV blocks held,
passes and their rows, the messages received and sent so far, by type, the CPU time of the event
loop's thread, of the target's and of the whole process, and the start times of the latest passes.
``--table`` looks the toy target's tokens up in a table: a model on an accelerator takes no time
from the event loop, and the toy's own arithmetic would. Nothing else differs.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from edgespec.__main__ import main as edgespec
from edgespec.config import VerifierConfig, dump_config
from edgespec.core.ports import ModelInfo, SimpleTarget, TargetModel
from edgespec.core.protocol.messages import Draft, Message
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.models.toy import TOY_MODEL
from edgespec.wire.access import KeyEntry, KeyFile, make_key, save_keys

HERE = Path(__file__).resolve().parent
# The limit leaves room for a loaded machine.
START_WITHIN_S = 120.0
UPLINK = ("Open", "Draft", "Received", "Cancel")
# Kept starts of passes: half a minute of a point of ``daemon_load.py``.
_STARTS_KEPT = 1_200


# --- the parent's side ---------------------------------------------------------------------------


async def start(script: str, *arguments: str, stderr: Any = None) -> Process:
    """Start a script of this folder in a process of its own, with pipes to and from it."""
    paths = os.pathsep.join((str(HERE.parent), str(HERE.parent / "sim")))
    command = (sys.executable, str(HERE / script), *arguments)
    environment = {**os.environ, "PYTHONPATH": paths}
    return await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=stderr, env=environment, limit=1 << 26
    )


async def line_of(process: Process, within_s: float = START_WITHIN_S) -> str:
    """Return the next line that the process prints. Raises ``RuntimeError`` if there is none."""
    assert process.stdout is not None
    async with asyncio.timeout(within_s):
        line = (await process.stdout.readline()).decode()
    if not line:
        raise RuntimeError(f"process {process.pid} ended with {await process.wait()}")
    return line


async def tell(process: Process, word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n".encode())
    await process.stdin.drain()


async def kill(part: Any) -> None:
    """End the ``process`` of ``part``, if it has one yet, after a run that failed."""
    process: Process | None = getattr(part, "process", None)
    if process is not None:
        if process.returncode is None:
            process.kill()
        await process.wait()


def make_keys(folder: Path, max_sessions: Mapping[str, int]) -> str:
    """Write a key for each name into a file of that name, with its bound (0: none); return the
    verifier's key file."""
    entries: dict[str, KeyEntry] = {}
    for name, bound in max_sessions.items():
        key, digest = make_key()
        (folder / name).touch(0o600)
        (folder / name).write_text(key)
        entries[name] = KeyEntry(digest, max_sessions=bound)
    path = folder / "keys.yaml"
    save_keys(path, KeyFile(entries))
    return str(path)


class Verifier:
    """The daemon in a process of its own, with its log in a file; ``look`` returns its state. After
    a restart it listens at the same port."""

    process: Process

    def __init__(
        self, config: VerifierConfig, folder: Path, *flags: str, name: str = "verifier"
    ) -> None:
        self.port = self.context_length = self._looks = 0
        self._log, self._report = folder / f"{name}.log", folder / f"{name}.json"
        self._config, self._flags = folder / f"{name}.yaml", flags
        self._config.write_text(dump_config(config))

    async def start(self) -> None:
        settings = ("--config", str(self._config), "--port", str(self.port))
        with self._log.open("a") as log:
            self.process = await start(
                "watched_verifier.py", str(self._report), *self._flags, *settings, stderr=log
            )
        line = await line_of(self.process)
        if "ready on" not in line:
            raise RuntimeError(f"the verifier did not start: {line}{self.log}")
        self._looks, self.port = 0, int(line.split(": ")[0].rpartition(":")[2])
        self.context_length = int(line.rpartition("context ")[2])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def resident_bytes(self) -> int:
        """Return the memory of the process, or 0 if it has died."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    async def look(self) -> dict[str, Any]:
        """Return the verifier's own counts, and its memory, file descriptors and CPU time from
        outside."""
        self._looks += 1
        self.process.send_signal(signal.SIGUSR1)
        for _ in range(1_000):
            await asyncio.sleep(0.01)
            if self._report.exists():
                found: dict[str, Any] = json.loads(self._report.read_text())
                if found["asked"] == self._looks:
                    break
        else:
            raise RuntimeError("the verifier does not answer")
        outside = psutil.Process(self.process.pid)
        times = outside.cpu_times()
        found["resident_bytes"] = outside.memory_info().rss
        found["descriptors"] = outside.num_fds()
        found["cpu_s"] = times.user + times.system
        found["read"] = sum(found["messages"].get(name, 0) for name in UPLINK)
        return found

    async def stop(self, within_s: float = START_WITHIN_S) -> list[str]:
        """End it like a supervisor; return the findings: an exit status other than 0,
        tracebacks."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        found = list[str]()
        try:
            status = await asyncio.wait_for(self.process.wait(), within_s)
        except TimeoutError:
            self.process.kill()
            status = await self.process.wait()
        if status:
            found.append(f"the verifier's exit status is {status}")
        log = self.log
        if "Traceback" in log:
            first = log[log.index("Traceback") :][:4_000]
            found.append(f"{log.count('Traceback')} tracebacks; the first:\n{first}")
        return found


# --- the process itself --------------------------------------------------------------------------


class MessageCounter:
    """Counts messages by type, and the nodes of drafts."""

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
        meter: Any = MessageCounter()
        server.watch = replace(server.watch, traffic=meter)
        submit, rows, asked = verifier._worker.submit, Counter[str](), 0
        starts: deque[float] = deque(maxlen=_STARTS_KEPT)

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
            ledger = verifier.engine.cache_scheduler.ledger
            found = {
                "asked": asked,
                "tasks": len(asyncio.all_tasks()),
                "sessions": len(verifier.engine.sessions),
                "streams": len(verifier._streams),
                "blocks": 0 if ledger is None else ledger.block_count - ledger.free_count,
                "passes": verifier.engine.passes,
                "fed": rows["fed"],
                "drafted": rows["drafted"],
                "evictions": verifier.engine.cache_scheduler.evictions,
                "messages": dict(meter.counts),
                "loop_cpu_s": time.thread_time(),
                "target_cpu_s": sum(map(cpu_s, verifier._worker._thread._threads)),
                "process_cpu_s": time.process_time(),
                "starts_s": list(starts),
            }
            draft = report.with_suffix(".part")
            draft.write_text(json.dumps(found))
            draft.replace(report)

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write)
        return verifier, server

    command.build_verifier = build_watched


def cpu_s(thread: threading.Thread) -> float:
    """Return the CPU time that a running thread has used."""
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


class TableTarget(SimpleTarget):
    """The toy target as a table: its greedy choices, without its checks."""

    mode = "table"

    def __init__(self, inner: TargetModel) -> None:
        self._info, self._cache = inner.info, inner.cache
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
        # A sequence may find a beginning of its prompt that another one has fed.
        tail = text[:cached] if cached <= len(text) else self._tails[key]
        root = (*tail[-TOY_MODEL.order :], *request.feed)[-TOY_MODEL.order :]
        self._tails[key], self._fed[key] = root, (root, request)
        if not request.sample:
            return PassResult(key, ())
        tails: list[tuple[int, ...]] = []
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
    """Return the target's own text after ``prompt``, of ``length`` tokens."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tuple(tokens[-TOY_MODEL.order :])))
    return tokens[len(prompt) :]


def main() -> None:
    if sys.argv[1:] in ([], ["--help"]):
        raise SystemExit(__doc__)
    arguments = sys.argv[2:]
    watch(Path(sys.argv[1]))
    if "--table" in arguments:
        arguments.remove("--table")
        look_tokens_up()
    sys.argv = ["edgespec", "verifier", *arguments]
    edgespec()


if __name__ == "__main__":
    main()
