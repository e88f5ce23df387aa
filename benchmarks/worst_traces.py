"""An endpoint on the worst networks that were recorded: is every answer complete and exact?

    python benchmarks/worst_traces.py [--seconds 600] [--traces NAME,...] [--json FILE]

A verifier (bundled target) and, for each trace, a relay, an ``edgespec serve`` (bundled draft)
whose only way to the verifier it is, and a client that asks one streamed completion after the
other. A relay holds what it carries back for as long as the trace of ``EDGESPEC_DATA`` says, over
TCP: delays, losses as retransmissions, outages. On top of the outages of the trace come some of 5
to 30 seconds, one in every ``--outage-every-s``, at a moment drawn by seed.

    5g        a car at the edge of a private cell: delays of up to 31 s
    drive     a phone on a highway (no train was recorded), from a minute before its 30 s outages
    starlink  a dish on a ship, the recording that lost most

Every text is compared with the one that the verifier gives without drafts, on no relay. Told are
answers, tokens, reconnects of the device, and the longest pause. The exit status is 1 when an
answer was cut short, failed or differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from openai import AsyncOpenAI, OpenAIError

from edgespec.benchmark.prompts import DEFAULT_PROMPTS
from edgespec.benchmark.report import machine, versions
from edgespec.compose import build_agent
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.protocol.sampling import SamplingParams
from edgespec_sim.links.from_trace import TraceLinks
from edgespec_sim.traces.readers import read_trace
from tests.shell.gate import Gate

ROOT: Final = Path(__file__).resolve().parent.parent
START_WITHIN_S: Final = 120.0
OUTAGE_S: Final = (5.0, 30.0)
TRACES: Final = {
    "5g": ("cicv5g/south_n8_v10_05.txt", 0.0),
    "drive": ("cellular_us_drive/2023-08-05_verizon.ping.txt", None),
    "starlink": ("starlink_fjordlink/2024-12-12-20-10-51-starlink.csv", 0.0),
}
"""The file, and where in it the replay begins; None: a minute before its first long outage."""


class TraceRelay(Gate):
    """Carries connections to ``port`` as slowly as a link of a trace, from the start of the event
    loop's clock at ``__aenter__`` on."""

    def __init__(self, port: int, name: str, options: argparse.Namespace) -> None:
        super().__init__(port)
        file, start_s = TRACES[name]
        trace = read_trace(Path(os.environ["EDGESPEC_DATA"]) / "traces" / file)
        if start_s is None:
            long = [at for at, end in trace.outages_s if end - at >= OUTAGE_S[0]]
            start_s = max(0.0, min(long, default=60.0) - 60.0)
        dice = random.Random(f"{options.seed} {name}")
        self.added_s = tuple(
            (at + (room := dice.uniform(0.0, options.outage_every_s - length)), at + room + length)
            for at in range(0, int(options.seconds), int(options.outage_every_s))
            for length in [dice.uniform(*OUTAGE_S)]
        )
        links = TraceLinks.of(trace)
        self._up, self._down = links.pair(
            offset_s=start_s, seed=options.seed, outages_s=self.added_s
        )
        self._origin_s = 0.0

    async def __aenter__(self) -> TraceRelay:
        self._origin_s = asyncio.get_running_loop().time()
        await super().__aenter__()
        return self

    async def _carry(self, source: socket.socket, sink: socket.socket, *, upwards: bool) -> None:
        loop = asyncio.get_running_loop()
        link, under_way = self._up if upwards else self._down, asyncio.Queue[tuple[float, bytes]]()

        async def deliver() -> None:
            data = b"."
            while data:
                at_s, data = await under_way.get()
                await asyncio.sleep(at_s + self._origin_s - loop.time())
                if data:
                    await loop.sock_sendall(sink, data)
            sink.shutdown(socket.SHUT_WR)

        async with asyncio.TaskGroup() as both:
            both.create_task(deliver())
            data = b"."
            while data:
                data = await loop.sock_recv(source, 1 << 16)
                now_s = loop.time() - self._origin_s
                under_way.put_nowait((link.arrival(now_s, len(data)), data))


# --- the processes ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running(*arguments: str, log: Path) -> AsyncIterator[tuple[str, int]]:
    """``edgespec`` in a process of its own; yields where it listens, and its id."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "sim")))
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "edgespec", *arguments, "--port", "0"),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": paths},
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_WITHIN_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"ready on (?:http://)?([\d.]+:\d+)", line)
        if found is None:
            raise RuntimeError(f"{arguments[0]} did not start; {log} may say why")
        yield found[1], process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.wait()


# --- the client ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str
    seed: int
    temperature: float
    expected: str = ""


@dataclass
class Told:
    """Of one trace."""

    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    longest_pause_s: float = 0.0
    pauses_over_5_s: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def questions(options: argparse.Namespace, address: str) -> list[Question]:
    """With the target's own answers."""
    config = AgentConfig(verifier=address, draft=DraftSection(model="none"))
    found: list[Question] = []
    async with build_agent(config) as agent:
        for number, one in enumerate(DEFAULT_PROMPTS):
            asked = Question(one.text, number, 0.8 if number % 2 else 0.0)
            sampling = SamplingParams(
                max_tokens=options.tokens, seed=asked.seed, temperature=asked.temperature
            )
            text = "".join([chunk.text async for chunk in agent.generate(asked.prompt, sampling)])
            found.append(Question(asked.prompt, asked.seed, asked.temperature, text))
    return found


async def client(
    options: argparse.Namespace, address: str, asked: list[Question], told: Told
) -> None:
    """Asks until it is cancelled, or the time is over; the last answer is read to its end."""
    dice, ends_s = random.Random(f"{options.seed} client"), time.monotonic() + options.seconds
    async with AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=600.0
    ) as openai:
        while time.monotonic() < ends_s:
            question = dice.choice(asked)
            text, finish, last_s = "", None, time.monotonic()
            try:
                stream = await openai.completions.create(
                    model="edgespec",
                    prompt=question.prompt,
                    max_tokens=options.tokens,
                    temperature=question.temperature,
                    seed=question.seed,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for chunk in stream:
                    now_s = time.monotonic()
                    note_pause(told, now_s - last_s)
                    last_s = now_s
                    for choice in chunk.choices:
                        text += choice.text
                        finish = choice.finish_reason or finish
                    note_usage(told, chunk.usage)
            except OpenAIError as error:
                told.failed.append(f"after {len(text)} characters: {error}"[:300])
                continue
            told.answers += 1
            if finish is None:
                told.failed.append(f"cut short after {len(text)} characters")
            elif text != question.expected:
                told.wrong.append(f"{text!r} is not {question.expected!r}"[:600])


def note_pause(told: Told, seconds: float) -> None:
    told.longest_pause_s = round(max(told.longest_pause_s, seconds), 2)
    told.pauses_over_5_s += seconds > 5.0


def note_usage(told: Told, usage: Any) -> None:
    if usage is None:
        return
    told.tokens += usage.completion_tokens
    counts = getattr(usage, "edgespec", None) or {}
    told.drafted += counts.get("drafted_tokens", 0)
    told.accepted += counts.get("accepted_tokens", 0)


# --- the command --------------------------------------------------------------------------------


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    settings = folder / "device.yaml"
    settings.write_text(json.dumps({"reconnect": {"give_up_first_s": options.patience_s}}))
    flags = ("--pass-ms", str(options.pass_ms))
    async with contextlib.AsyncExitStack() as stack:
        start = running("verifier", "--model", "bundled", *flags, log=folder / "verifier.log")
        address, _ = await stack.enter_async_context(start)
        asked = await questions(options, address)
        clients = []
        for name in options.traces.split(","):
            relay = TraceRelay(int(address.rpartition(":")[2]), name, options)
            await stack.enter_async_context(relay)
            config = ("--config", str(settings), "--verifier", relay.address)
            serve = running("serve", *config, log=folder / f"{name}.log")
            endpoint, _ = await stack.enter_async_context(serve)
            told = Told()
            outages_s = [round(end - at, 1) for at, end in relay.added_s]
            found[name] = {"trace": TRACES[name][0], "added_outages_s": outages_s, "told": told}
            clients.append(client(options, endpoint, asked, told))
        await asyncio.gather(*clients)
    for name, row in found.items():
        row["told"] = asdict(row["told"])
        log = (folder / f"{name}.log").read_text()
        row["tracebacks"] = log.count("Traceback")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--pass-ms", type=float, default=25.0, help="emulated")
    parser.add_argument("--outage-every-s", type=float, default=75.0, help="above 30")
    parser.add_argument("--patience-s", type=float, default=60.0, help="for a first stream")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "EDGESPEC_DATA" not in os.environ:
        print("EDGESPEC_DATA is not set: the traces are there")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    bad = 0
    for name, row in found.items():
        print(f"{name}: {json.dumps(row)}")
        told = row["told"]
        bad += len(told["failed"]) + len(told["wrong"]) + row["tracebacks"] + (not told["answers"])
    result = {"traces": found, "machine": machine(), "versions": versions()}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"{bad} findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
