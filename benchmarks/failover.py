"""How long a device waits for its next token when its verifier is lost and another one is there.

    python benchmarks/failover.py [--losses 200] [--how kill|stop|drain] [--devices 4] [--json FILE]

Two real verifier processes (toy model, emulated pass time), and devices that know both and stream
one text after the other, every second one with drafts. At random moments the verifier that serves
them is lost: killed (SIGKILL), stopped (SIGSTOP: its kernel still answers, it does not), or drained
(SIGTERM: after half a second, what still runs is told to resume elsewhere). It is started again on
its port, and once it is back the next one is lost. Each text is compared with the target's own,
token for token. Printed are the gaps in which a device lost its stream and found another one
(*stalls*), and all other gaps between tokens. The exit status is 1 when a text was lost or wrong,
or a stall was longer than 6 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Final

from honest_devices import PATIENT, Request, make_requests, toy_text
from load_processes import START_WITHIN_S, ready_verifier

from edgespec.agent.agent import Agent, GenerationError
from edgespec.benchmark.report import machine, versions
from edgespec.compose import build_agent
from edgespec.config import AgentConfig, DraftSection

ASKED_LONGEST_S: Final = 6.0
DRAIN_S: Final = 0.5
# Between the moment when both are there and the next loss.
LOSE_AFTER_S: Final = (0.2, 1.5)
# How long a stopped process stays, before it is killed and started again.
STOPPED_S: Final = 5.0
SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "drain": signal.SIGTERM}


class Verifier:
    """A verifier process that comes back on the same port."""

    def __init__(self, pass_ms: float) -> None:
        self._pass_ms, self.port = pass_ms, 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        options = ("--model", "toy", "--pass-ms", str(self._pass_ms), "--drain-s", str(DRAIN_S))
        self._process, self.port = await ready_verifier("--port", str(self.port), *options)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self) -> None:
        """Wait until it has ended."""
        if self._process is not None:
            await asyncio.wait_for(self._process.wait(), START_WITHIN_S)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.end()


@dataclass
class Gaps:
    """Between tokens, and from a question to its first token; seconds."""

    stalls: list[float] = field(default_factory=list)
    """Those in which the stream was lost and another one was found."""
    others: list[float] = field(default_factory=list)


class Device:
    """Streams until it is cancelled; raises at the first lost or wrong text."""

    def __init__(self, agent: Agent, requests: list[Request], dice: random.Random) -> None:
        self.texts = self.tokens = self.failovers = self.reconnects = 0
        self.using = ""
        self._agent, self._requests, self._dice = agent, requests, dice

    async def run(self, gaps: Gaps) -> None:
        while True:
            request, tokens = self._dice.choice(self._requests), list[int]()
            since_s, streams = time.perf_counter(), 0
            async for chunk in self._agent.generate(request.prompt, request.sampling):
                stats, now_s = self._agent.stats, time.perf_counter()
                assert stats is not None
                assert stats.route is not None
                lost = stats.counters.reconnects > streams
                (gaps.stalls if lost else gaps.others).append(now_s - since_s)
                since_s, streams = now_s, stats.counters.reconnects
                tokens += chunk.tokens
                self.using = stats.route.last
            if tuple(tokens) != request.expected:
                raise RuntimeError(f"{tokens} is not {list(request.expected)}")
            self.texts += 1
            self.tokens += len(tokens)
            self.failovers += stats.failovers
            self.reconnects += stats.counters.reconnects


async def lose(verifier: Verifier, how: str) -> None:
    """Until it is back."""
    verifier.signal(SIGNALS[how])
    if how == "stop":
        await asyncio.sleep(STOPPED_S)
        await verifier.kill()
    await verifier.end()
    await verifier.start()


async def measure(options: argparse.Namespace) -> dict[str, object]:
    dice, gaps = random.Random(options.seed), Gaps()
    requests = [
        Request(one.prompt, one.sampling, toy_text(one))
        for one in make_requests(12, options.seed, options.tokens)
    ]
    verifiers = [Verifier(options.pass_ms), Verifier(options.pass_ms)]
    living: list[asyncio.Task[None]] = []
    async with contextlib.AsyncExitStack() as stack:
        for one in verifiers:
            stack.push_async_callback(one.kill)
            await one.start()
        addresses = tuple(one.address for one in verifiers)
        devices: list[Device] = []
        for number in range(options.devices):
            draft = DraftSection(model="none" if number % 2 else "toy")
            config = AgentConfig(addresses, tokenizer="toy", draft=draft, reconnect=PATIENT)
            agent = await stack.enter_async_context(build_agent(config))
            devices.append(Device(agent, requests, random.Random(f"{options.seed} {number}")))
        living = [asyncio.create_task(one.run(gaps)) for one in devices]
        try:
            for number in range(options.losses):
                await _pause(living, dice.uniform(*LOSE_AFTER_S))
                used = [one.using for one in devices]
                victim = max(verifiers, key=lambda one: used.count(one.address))
                await lose(victim, options.how)
                if (number + 1) % 20 == 0:
                    longest_s = max(gaps.stalls, default=0.0)
                    print(f"{number + 1} losses: longest stall {longest_s:.2f} s", file=sys.stderr)
            await _pause(living, 2.0)
        finally:
            for task in living:
                task.cancel()
            await asyncio.wait(living)
    return {
        "how": options.how,
        "losses": options.losses,
        "texts": sum(one.texts for one in devices),
        "tokens": sum(one.tokens for one in devices),
        "failovers": sum(one.failovers for one in devices),
        "reconnects": sum(one.reconnects for one in devices),
        "stalls": len(gaps.stalls),
        "stall": _spread(gaps.stalls),
        "other_gaps": _spread(gaps.others),
    }


async def _pause(living: list[asyncio.Task[None]], seconds: float) -> None:
    """Raises what a device raised meanwhile, or before."""
    done, _ = await asyncio.wait(living, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def _spread(times_s: list[float]) -> dict[str, float]:
    cuts = quantiles(times_s, n=100, method="inclusive")
    found = {"median_s": median(times_s), "p99_s": cuts[98], "longest_s": max(times_s)}
    return {name: round(value, 4) for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=200)
    parser.add_argument("--how", choices=sorted(SIGNALS), default="kill")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400, help="of the longest text")
    parser.add_argument("--pass-ms", type=float, default=10.0, help="emulated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    started_s = time.perf_counter()
    try:
        found = asyncio.run(measure(options))
    except (GenerationError, RuntimeError) as error:
        print(f"finding: {error}")
        return 1
    found["took_s"] = round(time.perf_counter() - started_s, 1)
    found |= {"machine": machine(), "versions": versions(), "command": " ".join(sys.argv)}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for name in ("machine", "versions", "command"):
        print(f"{name}: {found.pop(name)}")
    print(json.dumps(found))
    stall = found["stall"]
    assert isinstance(stall, dict)
    return 0 if stall["longest_s"] <= ASKED_LONGEST_S else 1


if __name__ == "__main__":
    sys.exit(main())
