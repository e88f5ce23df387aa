"""What one verifier process can carry: its CPU time a session and pass, and how late passes are.

    python benchmarks/daemon_load.py [--sessions 1,8,32,128,256,512]
        [--seconds 5] [--repeats 3]

Starts a verifier with an emulated pass of ``--pass-ms`` (the toy target's law, looked up in a
table) and so many emulated devices in a process of their own (``emulated_devices.py``), lets them
run in, and measures for ``--seconds``. Of each point: the period from the start of a pass to the
start of the next, and per token of a session; the CPU time of the event loop's thread, of the whole
process (gRPC's threads and the target's with it) and of the load generator, a session and pass;
messages and bytes a session and pass. ``--nodes 0`` is plain streaming. All
kinds of points take turns within a repeat. Every token
is compared with the target's own text: the exit status is 1 when one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from load_processes import Verifier, kill, line_of, start, tell
from table_target import answer

from edgespec.benchmark.report import machine, versions
from edgespec.compose import TOY_CONTEXT_LENGTH, TOY_MODEL

PROMPT = (5, 11, 7, 3, 29, 2, 17, 13)
RUN_IN_S = 1.5


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement; times of the CPU in microseconds a session and pass."""

    sessions: int
    messages: int
    sends: int
    """Nodes that a device sends for each pass."""
    passes: int
    period_ms: float
    period_p95_ms: float
    late: float
    """How much longer than the emulated pass the median period is, as a share of it."""
    loop_us: float
    process_us: float
    target_us: float
    gc_us: float
    devices_us: float
    messages_up: float
    messages_down: float
    bytes_up: float
    bytes_down: float
    tokens: float
    rows: float
    wrong: int
    ended: int

    @property
    def token_ms(self) -> float:
        """What a reader waits for a token: not every session takes part in every pass."""
        return self.period_ms / self.tokens if self.tokens else float("inf")


async def measure(sessions: int, messages: int, nodes: int, options: argparse.Namespace) -> Point:
    """One verifier and its devices, from their start to their end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        length = TOY_CONTEXT_LENGTH - len(PROMPT) - 64
        text = {"prompt": PROMPT, "answer": answer(PROMPT, length)}
        text["vocabulary_size"] = TOY_MODEL.vocabulary_size
        (folder / "text.json").write_text(json.dumps(text))
        verifier = Verifier(verifier_options(sessions, options), folder)
        devices = None
        try:
            await verifier.start()
            devices = await start(
                "emulated_devices.py",
                *(str(verifier.port), str(folder / "text.json"), "--devices", str(sessions)),
                *("--nodes", str(nodes), "--messages", str(messages)),
                *("--rate", str(options.rate), "--pass-ms", str(options.pass_ms)),
            )
            await line_of(devices)
            await asyncio.sleep(RUN_IN_S)
            before = await counts(verifier, devices)
            await asyncio.sleep(options.seconds)
            after = await counts(verifier, devices)
            assert devices.stdin is not None
            devices.stdin.close()
            await devices.wait()
            await verifier.stop()
        finally:
            for process in (devices, getattr(verifier, "process", None)):
                kill(process)
                if process is not None:
                    await process.wait()
    return point((sessions, messages, nodes), before, after, options.pass_ms)


def verifier_options(sessions: int, options: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(
        server_drafts=False,  # what is measured is what devices send
        model="toy",
        max_sessions=min(1024, 2 * sessions + 8),
        cached_tokens=min(1 << 30, (sessions + 8) * TOY_CONTEXT_LENGTH),
        rows_per_pass=16 * (sessions + 8),
        lease_s=1.0,
        pass_ms=options.pass_ms,
        profile=options.profile,
        verifier_flags=("--table", *shlex.split(options.verifier_flags)),
    )


async def counts(verifier: Verifier, devices: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    await tell(devices, "count")
    theirs: dict[str, Any] = json.loads(await line_of(devices))
    return await verifier.look(), theirs


def point(
    kind: tuple[int, int, int],
    before: tuple[dict[str, Any], dict[str, Any]],
    after: tuple[dict[str, Any], dict[str, Any]],
    pass_ms: float,
) -> Point:
    sessions, passes = kind[0], after[0]["passes"] - before[0]["passes"]
    starts = [at for at in after[0]["starts_s"] if at > before[0]["starts_s"][-1]]
    periods = sorted(1e3 * (later - sooner) for sooner, later in pairwise(starts))

    def each(name: str, who: int, scale: float = 1.0) -> float:
        change = after[who].get(name, 0) - before[who].get(name, 0)
        return scale * change / (sessions * passes)

    sent = [each(kind, 1) for kind in ("Open", "Draft", "Received")]
    return Point(
        *kind,
        passes,
        period_ms=statistics.median(periods),
        period_p95_ms=periods[int(0.95 * (len(periods) - 1))],
        late=statistics.median(periods) / pass_ms - 1.0,
        loop_us=each("loop_cpu_s", 0, 1e6),
        process_us=each("process_cpu_s", 0, 1e6),
        target_us=each("target_cpu_s", 0, 1e6),
        gc_us=each("gc_cpu_s", 0, 1e6),
        devices_us=each("cpu_s", 1, 1e6),
        messages_up=sum(sent),
        messages_down=each("commit", 1),
        bytes_up=each("bytes_up", 1),
        bytes_down=each("bytes_down", 1),
        tokens=each("tokens", 1),
        rows=each("drafted", 0),
        wrong=int(after[1].get("wrong", 0)),
        ended=int(after[1].get("ended", 0)),
    )


_COLUMNS = (
    ("sessions", "sessions", "{:.0f}"),
    ("messages", "messages", "{:.0f}"),
    ("sends", "sends", "{:.0f}"),
    ("period ms", "period_ms", "{:.2f}"),
    ("p95", "period_p95_ms", "{:.2f}"),
    ("late %", "late", "{:.1%}"),
    ("ms/token", "token_ms", "{:.1f}"),
    ("loop us", "loop_us", "{:.0f}"),
    ("process us", "process_us", "{:.0f}"),
    ("target us", "target_us", "{:.0f}"),
    ("gc us", "gc_us", "{:.1f}"),
    ("devices us", "devices_us", "{:.0f}"),
    ("up", "messages_up", "{:.2f}"),
    ("down", "messages_down", "{:.2f}"),
    ("B up", "bytes_up", "{:.0f}"),
    ("B down", "bytes_down", "{:.0f}"),
    ("tokens", "tokens", "{:.2f}"),
    ("nodes", "rows", "{:.2f}"),
    ("ended", "ended", "{:.0f}"),
)


def table(points: list[Point]) -> str:
    """A row for each kind of point: the median of its repeats, and the spread of what matters."""
    lines = ["  ".join(f"{title:>10}" for title, _, _ in _COLUMNS)]
    kinds = dict.fromkeys((point.sessions, point.messages, point.sends) for point in points)
    for kind in sorted(kinds):
        same = [p for p in points if (p.sessions, p.messages, p.sends) == kind]
        cells = []
        for _, name, form in _COLUMNS:
            values = [getattr(found, name) for found in same]
            cell = form.format(statistics.median(values))
            if name in ("token_ms", "loop_us") and len(values) > 1:
                cell += f" ±{(max(values) - min(values)) / 2:.2g}"
            cells.append(f"{cell:>10}")
        lines.append("  ".join(cells))
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> list[Point]:
    points: list[Point] = []
    kinds = [
        (sessions, messages, nodes)
        for sessions in numbers(options.sessions)
        for messages in numbers(options.messages)
        for nodes in numbers(options.nodes)
    ]
    for repeat in range(options.repeats):
        turn = repeat % len(kinds)
        for kind in kinds[turn:] + kinds[:turn]:
            try:
                points.append(await measure(*kind, options))
            except (TimeoutError, RuntimeError) as error:
                why = f"{type(error).__name__} {error}"
                print(f"{kind[0]} sessions could not be played: {why}", file=sys.stderr)
                continue
            shown = table(points[-1:]).splitlines()
            print("\n".join(shown if len(points) == 1 else shown[1:]), file=sys.stderr, flush=True)
    return points


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", default="1,8,32,128,256,512")
    parser.add_argument("--messages", default="1", help="in which a device sends a pass's nodes")
    parser.add_argument("--nodes", default="8", help="that a device sends for each pass")
    parser.add_argument("--rate", type=float, default=0.8, help="how often a first choice is right")
    parser.add_argument("--pass-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verifier-flags", default="", help="of watched_verifier.py")
    parser.add_argument("--profile", type=Path, help="where the verifier's cProfile goes")
    parser.add_argument("--json", type=Path, help="where all points go")
    options = parser.parse_args()
    head = {
        "command": shlex.join(sys.argv),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
    }
    points = asyncio.run(run(options))
    for name, value in head.items():
        print(f"{name}: {value}")
    print(table(points))
    if options.json is not None:
        rows = [{name: getattr(p, name) for name in p.__dataclass_fields__} for p in points]
        options.json.write_text(json.dumps({**head, "points": rows}, indent=1))
    wrong = sum(found.wrong for found in points)
    if wrong:
        print(f"{wrong} commits differ from the target's own text")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
