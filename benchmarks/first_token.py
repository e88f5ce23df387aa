"""Measure the first token by round trip: warm and cold, through a real delaying proxy, over the
emulated link, and simulated.

    python benchmarks/first_token.py [--repeats 5] [--rtt-ms 2,50,200] [--json FILE]

A verifier process serves the bundled target, whose passes take 20 ms. The proxy runs in this
process on the loopback, and delays every byte by half a round trip in each direction. The kernel
answers TCP's handshake on the loopback at once, so the proxy charges it at accept: it passes on
nothing, and does not connect to the verifier, before the handshake would have ended.

What counts: seconds from the call of ``edgespec.connect`` (cold) or ``Agent.stream`` (warm), with
the prompt at hand, to the first chunk. Each cold sample is a new agent, with new connections, in a
process that has imported everything before and generated once elsewhere, so the time of Python's
imports is not in it. ``own`` has the target's tokenizer as a folder, ``cached`` takes the
verifier's from the cache, and ``fetched`` has an empty cache. With two verifiers, both are proxies
in front of the one process.

Trips are the seconds, less the pass, divided by the round trip. Everything that the device computes
is in them, so they say little at 2 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import edgespec
from edgespec.bench.arms import Arm
from edgespec.bench.report import describe_machine, list_versions
from edgespec.cli.verifier import PLAIN_STREAMING, verifier_process
from edgespec.wire.grpc_client import GrpcTransport
from edgespec_sim.scenario import sections as sc
from edgespec_sim.world.assembly import World
from edgespec_sim.world.run import make_token_source
from edgespec_sim.world.site import WorldSetup

PASS_MS: Final = 20.0
STATES: Final = ("warm", "own", "cached", "fetched")
PROMPT: Final = "Once upon a time there was a"
WITHIN: Final = 0.05
"""Largest difference between the emulated and the real link that is asked for."""


# --- the delaying proxy ---------------------------------------------------------------------------


class DelayingProxy:
    """Carries connections to 127.0.0.1:``port``, with ``rtt_s`` on the way. Bytes keep their order,
    and both directions are independent. Only this machine can connect."""

    def __init__(self, port: int, rtt_s: float) -> None:
        self._port, self._rtt_s = port, rtt_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""
        self.bytes_up = self.bytes_down = 0

    async def __aenter__(self) -> DelayingProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        accepted_s, accepting = time.monotonic(), asyncio.current_task()
        assert accepting is not None
        self._tasks.add(accepting)
        accepting.add_done_callback(self._tasks.discard)
        opened: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        # Reading begins at once: the system has accepted the connection, so the device sends now
        # what it would send when the handshake has come back.
        self._start(self._carry(near, opened, accepted_s + self._rtt_s, is_up=True))
        try:
            # The device's acknowledgement, which ends the handshake, arrives after 1.5 trips.
            await asyncio.sleep(1.5 * self._rtt_s)
            far, to_far = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            opened.cancel()
            to_near.close()
            return
        opened.set_result(to_far)
        returning: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        returning.set_result(to_near)
        self._start(self._carry(far, returning, 0.0, is_up=False))

    def _start(self, carrying: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(carrying)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(
        self,
        source: asyncio.StreamReader,
        opened: asyncio.Future[asyncio.StreamWriter],
        earliest_s: float,
        *,
        is_up: bool,
    ) -> None:
        """Carry one direction to the writer that ``opened`` gets. Bytes that were sent before
        ``earliest_s`` count as sent then."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            sink = await opened
            while True:
                due_s, data = await waiting.get()
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                if not data:
                    with suppress(OSError, RuntimeError):
                        sink.write_eof() if sink.can_write_eof() else sink.close()
                    return
                sink.write(data)

        delivering = asyncio.create_task(deliver())
        try:
            while True:
                try:
                    data = await source.read(1 << 16)
                except OSError:
                    data = b""
                if is_up:
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
                sent_s = max(time.monotonic(), earliest_s)
                waiting.put_nowait((sent_s + self._rtt_s / 2, data))
                if not data:
                    await delivering
                    return
        except OSError:
            return
        finally:
            delivering.cancel()
            if opened.done() and not opened.cancelled():
                opened.result().close()


# --- one process that measures --------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """The measurements of one process: the states of one link at each round trip."""

    way: str
    tls_ca: str
    verifiers: int
    tokenizer: str
    addresses: dict[str, list[str]]
    """Addresses of the verifiers by round trip in milliseconds."""
    elsewhere: str
    """Address without a delay."""
    states: tuple[str, ...]


async def first_chunk_s(agent: edgespec.Agent, started_s: float) -> float:
    async with agent.stream(PROMPT, max_tokens=1) as stream:
        await anext(stream)
        return time.perf_counter() - started_s


async def sample(task: Task, rtt: str, state: str) -> float:
    """Return the seconds to the first chunk in this state.

    A new process has no tokenizer loaded, so earlier agents are freed with theirs."""
    gc.collect()
    options: dict[str, Any] = {"draft": "none"}
    if state in ("own", "warm"):
        options["tokenizer"] = task.tokenizer
    options["tls"] = edgespec.TLS(ca=task.tls_ca)
    if task.way == "emulated":
        options["link"] = edgespec.Link(rtt_ms=float(rtt))
    started_s = time.perf_counter()
    async with edgespec.connect(task.addresses[rtt], **options) as agent:
        found_s = await first_chunk_s(agent, started_s)
        if state == "warm":
            found_s = await first_chunk_s(agent, time.perf_counter())
        return found_s


async def measure(task: Task) -> dict[str, dict[str, float]]:
    """Return seconds by round trip and state."""
    if task.way == "proxy":  # which is on this machine, but stands for another one
        GrpcTransport._may_send_early = lambda self: True  # type: ignore[method-assign]
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as rehearsal:
        os.environ["XDG_CACHE_HOME"] = rehearsal
        tls = edgespec.TLS(ca=task.tls_ca)
        for _ in range(2):
            async with edgespec.connect(task.elsewhere, draft="none", tls=tls) as agent:
                await first_chunk_s(agent, 0.0)
    for rtt in task.addresses:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            found[rtt] = {}
            for state in ("fetched", "cached", "own", "warm"):  # the first one fills the cache
                if state in task.states or state == "fetched":
                    found[rtt][state] = await sample(task, rtt, state)
    return found


# --- all of it ------------------------------------------------------------------------------------


@dataclass
class Cell:
    """One row of the table."""

    rtt_ms: float
    state: str
    tls: bool
    verifiers: int
    proxy_ms: list[float]
    emulated_ms: list[float]
    simulated_ms: float | None

    def trips(self, values_ms: Sequence[float]) -> float:
        return (median(values_ms) - PASS_MS) / self.rtt_ms


def simulate_ms(rtt_ms: float, state: str, *, tls: bool) -> float | None:
    """Return the simulated first token. The simulator knows no tokenizers."""
    if state in ("cached", "fetched"):
        return None
    scenario = sc.Scenario(
        name="first token",
        duration_s=60.0,
        arms=(Arm.TARGET_ONLY,),
        links={"wan": sc.LinkSection(rtt_ms=rtt_ms)},
        devices={
            "one": sc.DeviceSection(
                path=("wan",),
                workload=sc.WorkloadSection(
                    prompt_tokens=8, output_tokens=1, requests=2, think_s=1.0, start_within_s=0.0
                ),
            )
        },
        verifiers={"one": sc.VerifierSection(pass_time=sc.CostSection(ms=PASS_MS))},
        connect_trips=2 if tls else 1,
    )
    here = Path(__file__).parent
    setup = WorldSetup(make_token_source(scenario, 1, here), here)
    records = World(scenario, Arm.TARGET_ONLY, "1", setup).run().meters.records
    ttft_s = records[1 if state == "warm" else 0].ttft_s
    return None if ttft_s is None else 1e3 * ttft_s


@asynccontextmanager
async def proxies(
    port: int, rtts: Sequence[float], count: int
) -> AsyncIterator[dict[str, list[str]]]:
    async with AsyncExitStack() as stack:
        found = {
            f"{rtt:g}": [
                (await stack.enter_async_context(DelayingProxy(port, rtt / 1e3))).address
                for _ in range(count)
            ]
            for rtt in rtts
        }
        yield found


async def run_task(task: Task) -> dict[str, dict[str, float]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--task", json.dumps(asdict(task))),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"a measuring process failed with {process.returncode}")
    found: dict[str, dict[str, float]] = json.loads(out)
    return found


async def run(args: argparse.Namespace) -> list[Cell]:
    rtts = [float(one) for one in args.rtt_ms.split(",")]
    cells: dict[tuple[float, str, bool, int], Cell] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in ("ca", "server"):
            names = ["localhost", "127.0.0.1"] if name == "server" else []
            certs = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "edgespec", "certs", name, *names, "--dir", str(folder)),
                stdout=asyncio.subprocess.DEVNULL,
            )
            await certs.wait()
        files = ["--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")]
        common = ["--model", "bundled", "--pass-ms", f"{PASS_MS:g}", PLAIN_STREAMING]
        for tls in (False, True):
            options = [*common, *files] if tls else common
            address, _ = await stack.enter_async_context(verifier_process(options))
            port = int(address.rpartition(":")[2])
            direct = f"127.0.0.1:{port}"
            for repeat in range(args.repeats):
                for verifiers in (1, 2):
                    async with proxies(port, rtts, verifiers) as far:
                        near = {rtt: [direct, f"localhost:{port}"][:verifiers] for rtt in far}
                        for way, addresses in (("proxy", far), ("emulated", near)):
                            label = (
                                f"repeat {repeat}: {way}, {verifiers}, {'TLS' if tls else 'plain'}"
                            )
                            print(label, file=sys.stderr, flush=True)
                            ca = str(folder / "ca.pem") if tls else ""
                            task = Task(
                                way, ca, verifiers, "bundled", addresses, direct, tuple(STATES)
                            )
                            for rtt, states in (await run_task(task)).items():
                                for state, seconds in states.items():
                                    key = (float(rtt), state, tls, verifiers)
                                    cell = cells.setdefault(key, Cell(*key, [], [], None))
                                    values = cell.proxy_ms if way == "proxy" else cell.emulated_ms
                                    values.append(1e3 * seconds)
    for cell in cells.values():
        cell.simulated_ms = simulate_ms(cell.rtt_ms, cell.state, tls=cell.tls)
    order = {state: place for place, state in enumerate(STATES)}
    return sorted(
        cells.values(), key=lambda one: (one.rtt_ms, order[one.state], one.tls, one.verifiers)
    )


def show(cells: Sequence[Cell]) -> None:
    print(
        "| RTT, ms | state | TLS | verifiers | proxy, ms (spread) | trips | emulated, ms |"
        " emulated/proxy | simulated, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for cell in cells:
        proxy, emulated = median(cell.proxy_ms), median(cell.emulated_ms)
        simulated = "–" if cell.simulated_ms is None else f"{cell.simulated_ms:.0f}"
        print(
            f"| {cell.rtt_ms:g} | {cell.state} | {'yes' if cell.tls else 'no'} | {cell.verifiers}"
            f" | {proxy:.0f} ({min(cell.proxy_ms):.0f}–{max(cell.proxy_ms):.0f})"
            f" | {cell.trips(cell.proxy_ms):.2f} | {emulated:.0f} | {emulated / proxy:.3f}"
            f" | {simulated} |"
        )
    compared = [one for one in cells if one.state in ("warm", "own") and one.rtt_ms >= 50]
    good = sum(
        abs(median(one.emulated_ms) / median(one.proxy_ms) - 1.0) <= WITHIN for one in compared
    )
    print(
        f"\n{good} of {len(compared)} cells from 50 ms on, warm or with an own tokenizer, are"
        f" within {WITHIN:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rtt-ms", default="2,50,200", help="round trips, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        given = json.loads(args.task)
        task = replace(Task(**given), states=tuple(given["states"]))
        print(json.dumps(asyncio.run(measure(task))))
        return
    cells = asyncio.run(run(args))
    show(cells)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"machine": describe_machine(), "versions": list_versions(), "command": sys.argv}
        args.json.write_text(
            json.dumps(about | {"cells": [asdict(one) for one in cells]}, indent=1)
        )


if __name__ == "__main__":
    main()
