"""Three replicas of a verifier under sixty chats: what the choice by conversation brings, and what
clients notice when one of them drains or dies.

    python benchmarks/replicas.py [--sessions 60] [--rounds 3] [--seconds 8] [--json FILE]
    python benchmarks/replicas.py --envoy envoy ...     # the same through deploy/envoy, by its hash

Real verifier processes (toy model; a pass takes ``--pass-ms``, and ``--row-ms`` for each of its
rows, as those of a large model's prompts do) and devices that only stream, one chat each, in this
process. First the ways to choose take turns, with chats that no replica has seen: ``rendezvous``
(by a hash of the conversation), ``any`` (a die for each text, as a balancer without memory) and
``lowest-delay``. Told are the texts that each replica got, the share of prompt tokens that were
cached, and the time to the first token of the turns behind the first. Then, by conversation, one
drill follows the other in each round:

    calm    nothing happens: what the others are compared with
    drain   SIGTERM for one of the three; what has not ended in two seconds goes on elsewhere
    back    it is started again
    kill    SIGKILL for one that has a quarter of its share of the sessions in mid-answer, or more;
            it is started again at half-time

Told are the waits for a first token, the gaps between tokens, and the stalls, which are the waits
of a text that lost its replica for its next token. Every text is compared with the target's own:
the exit status is 1 when one is lost or wrong, or a stall is longer than 6 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from drill_service import until
from load_processes import START_WITHIN_S
from replica_chats import (
    AnyReplica,
    Chat,
    Notes,
    Replica,
    make_agent,
    make_chat,
    open_channels,
    play,
)

from edgespec.agent.agent import Agent
from edgespec.benchmark.report import machine, versions
from edgespec.core.association.policies import AssociationPolicy, LowestDelay
from edgespec.core.association.rendezvous import RendezvousHash
from tests.shell.envoy_proxy import proxy, without_tls

REPLICAS: Final = 3
LONGEST_STALL_S: Final = 6.0
ARMS: Final[dict[str, Callable[[object], AssociationPolicy]]] = {
    RendezvousHash.name: lambda seed: RendezvousHash(),
    AnyReplica.name: AnyReplica,
    LowestDelay.name: lambda seed: LowestDelay(),
}


# --- the ways to choose -------------------------------------------------------------------------


async def compare(
    options: argparse.Namespace, replicas: Sequence[Replica]
) -> dict[str, list[dict[str, Any]]]:
    """Of each arm a row a round."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        # Through a proxy a device has one address, and nothing to choose.
        arms = [RendezvousHash.name] if options.proxy else list(ARMS)
        for arm in [*arms[number % len(arms) :], *arms[: number % len(arms)]]:
            names = [f"{options.seed} {arm} {number} {one}" for one in range(options.sessions)]
            chats = [make_chat(name, options) for name in names]
            before = [await one.prefix_tokens() for one in replicas]
            notes = await one_arm(options, replicas, arm, chats)
            after = [await one.prefix_tokens() for one in replicas]
            hits, asked = (
                sum(b[part] - a[part] for a, b in zip(before, after, strict=True))
                for part in (0, 1)
            )
            later_s = [seconds for turn in notes.first_s[1:] for seconds in turn]
            rows.setdefault(arm, []).append(
                {
                    "texts_by_replica": sorted(notes.served.values()),
                    "cached_share": round(hits / max(1, asked), 3),
                    "first_turn": spread(notes.first_s[0]),
                    "later_turns": spread(later_s),
                    **failures(notes),
                }
            )
            print(f"round {number + 1}, {arm}: {json.dumps(rows[arm][-1])}", flush=True)
    return rows


async def one_arm(
    options: argparse.Namespace, replicas: Sequence[Replica], arm: str, chats: Sequence[Chat]
) -> Notes:
    """All chats beside each other, once."""
    notes = Notes()
    async with contextlib.AsyncExitStack() as stack:
        agents = await agents_of(options, replicas, ARMS[arm], stack)
        await asyncio.gather(
            *(
                play(agent, chat, lambda: notes, random.Random(f"{arm} {n}"), options.think_s)
                for n, (agent, chat) in enumerate(zip(agents, chats, strict=True))
            )
        )
    return notes


async def agents_of(
    options: argparse.Namespace,
    replicas: Sequence[Replica],
    make: Callable[[object], AssociationPolicy],
    stack: contextlib.AsyncExitStack,
) -> list[Agent]:
    addresses = [options.proxy] if options.proxy else [one.address for one in replicas]
    agents = [
        await stack.enter_async_context(make_agent(addresses, make(number), number))
        for number in range(options.sessions)
    ]
    await open_channels(agents)
    return agents


# --- the drills ---------------------------------------------------------------------------------


class Drills:
    """Chats that go on and on by conversation, while something happens to a replica."""

    def __init__(self, options: argparse.Namespace, replicas: Sequence[Replica]) -> None:
        self._options, self._replicas, self.now = options, replicas, Notes()
        self._dice = random.Random(f"{options.seed} drills")
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._agents: list[Agent] = []

    async def run(self) -> None:
        options = self._options
        names = [[f"{options.seed} {n} {k}" for k in range(2)] for n in range(options.sessions)]
        chats = [[make_chat(name, options) for name in two] for two in names]
        async with contextlib.AsyncExitStack() as stack:
            agents = await agents_of(options, self._replicas, ARMS[RendezvousHash.name], stack)
            self._agents = agents
            living = [
                asyncio.create_task(self._live(agent, chats[number], number))
                for number, agent in enumerate(agents)
            ]
            try:
                await self._wait(living, options.seconds / 2)
                for number in range(options.rounds):
                    await self._round(living, self._replicas[number % REPLICAS])
            finally:
                for task in living:
                    task.cancel()
                await asyncio.gather(*living, return_exceptions=True)

    async def _live(self, agent: Agent, chats: Sequence[Chat], number: int) -> None:
        dice = random.Random(f"{self._options.seed} device {number}")
        while True:
            for chat in chats:
                await play(agent, chat, lambda: self.now, dice, self._options.think_s)

    async def _round(self, living: list[asyncio.Task[None]], victim: Replica) -> None:
        seconds = self._options.seconds
        await self._drill(living, "calm")
        draining = asyncio.create_task(victim.end(signal.SIGTERM))
        await self._drill(living, "drain")
        await draining
        await victim.start()
        await self._drill(living, "back")
        await self._until_serving(victim)
        await victim.end(signal.SIGKILL)
        killed = self.now = Notes()
        await self._wait(living, seconds / 2)
        await victim.start()
        await self._drill(living, "kill", seconds / 2, killed)

    async def _until_serving(self, victim: Replica) -> None:
        """Wait until a quarter of its share of the texts are in the middle there."""
        least = max(1, self._options.sessions // (4 * REPLICAS))
        if not self._options.proxy:
            await until(lambda: self._texts_at(victim) >= least, START_WITHIN_S)
            return
        async with asyncio.timeout(START_WITHIN_S):  # who serves a text only Envoy knows
            while await victim.running() < least:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _texts_at(self, replica: Replica) -> int:
        running = [one for agent in self._agents for one in agent.activity.running.values()]
        return sum(
            one.verifier == replica.address and one.session.counters.committed > 0
            for one in running
        )

    async def _drill(
        self,
        living: list[asyncio.Task[None]],
        name: str,
        seconds: float | None = None,
        notes: Notes | None = None,
    ) -> None:
        self.now = notes = notes or Notes()
        await self._wait(living, self._options.seconds if seconds is None else seconds)
        row = {
            "texts_by_replica": sorted(notes.served.values()),
            "moved": notes.moved,
            "first": spread([seconds for turn in notes.first_s for seconds in turn]),
            "gaps": spread(notes.gaps_s),
            "stalls": spread(notes.stalls_s),
            **failures(notes),
        }
        self.rows.setdefault(name, []).append(row)
        print(f"{name}: {json.dumps(row)}", flush=True)

    async def _wait(self, living: list[asyncio.Task[None]], seconds: float) -> None:
        """Raises what a device raised meanwhile, or before."""
        done, _ = await asyncio.wait(living, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


# --- what is told -------------------------------------------------------------------------------


def failures(notes: Notes) -> dict[str, Any]:
    found = {"texts": notes.texts, "lost": len(notes.lost), "wrong": len(notes.wrong)}
    return found | {
        f"first_{name}": one[0] for name in ("lost", "wrong") if (one := getattr(notes, name))
    }


def spread(times_s: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    if len(times_s) < 2:
        return {"count": len(times_s)}
    cuts = quantiles(times_s, n=100, method="inclusive")
    found = {"p50": median(times_s), "p95": cuts[94], "p99": cuts[98], "longest": max(times_s)}
    return {"count": len(times_s)} | {name: round(one * 1e3, 1) for name, one in found.items()}


def findings(rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    found = []
    for name, of_rounds in rows.items():
        for row in of_rounds:
            if row["lost"] or row["wrong"]:
                found.append(f"{name}: {row['lost']} texts lost, {row['wrong']} wrong")
            if row.get("stalls", {}).get("longest", 0.0) > LONGEST_STALL_S * 1e3:
                found.append(f"{name}: a stall of {row['stalls']['longest']:.0f} ms")
    return found


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    replicas = [Replica(options, folder) for _ in range(REPLICAS)]
    async with contextlib.AsyncExitStack() as stack:
        for one in replicas:
            stack.push_async_callback(one.end, signal.SIGKILL)
            await one.start()
        if options.envoy:
            ports = [one.port for one in replicas]
            running = proxy(options.envoy, folder, without_tls(), ports)
            options.proxy = (await stack.enter_async_context(running)).address
        arms = await compare(options, replicas)
        drills = Drills(options, replicas)
        await drills.run()
    return {"arms": arms, "drills": drills.rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system-tokens", type=int, default=600)
    parser.add_argument("--question-tokens", type=int, default=30)
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--think-s", type=float, default=4.0, help="at most, before a turn")
    parser.add_argument("--pass-ms", type=float, default=50.0, help="emulated")
    parser.add_argument("--row-ms", type=float, default=0.1, help="emulated, of each row")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a drill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--envoy", metavar="COMMAND", default="", help="run the devices through it")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(proxy="")
    options = parser.parse_args()
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    found["took_s"] = round(time.perf_counter() - started_s, 1)
    found |= {"machine": machine(), "versions": versions(), "command": " ".join(sys.argv)}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    told = findings(found["arms"]) + findings(found["drills"])
    for one in told:
        print(f"finding: {one}")
    print(f"took {found['took_s']} s; {len(told)} findings")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
