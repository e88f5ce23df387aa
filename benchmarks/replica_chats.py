"""Chats of several turns with replicas of one verifier, for ``replicas.py``: the processes, what is
said, and what the clients notice."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from honest_devices import PATIENT, Request, toy_text
from load_processes import START_WITHIN_S, ready_verifier

from edgespec.agent.agent import Agent, AgentOptions, GenerationError
from edgespec.agent.verifier_pool import VerifierPool
from edgespec.compose import connect
from edgespec.core.association.failover import Failover
from edgespec.core.association.policies import AssociationPolicy, DeviceView, Links, VerifierView
from edgespec.core.association.route import FailoverPolicy
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.toy_tokenizer import ToyTokenizer
from edgespec.transport.directory import VerifierDirectory

VOCABULARY: Final = 60
DRAIN_S: Final = 2.0


class Replica:
    """A verifier process that comes back on its port."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.port, self._metrics = 0, _free_port()
        self._pass_ms, self._config = options.pass_ms, folder / f"{self._metrics}.yaml"
        pacing = {"pass_ms": options.pass_ms, "row_ms": options.row_ms}
        limits = {"max_sessions": 256, "peer_share": 1.0}
        self._config.write_text(json.dumps({"pacing": pacing, "limits": limits}))
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._process, self.port = await ready_verifier(
            *("--config", str(self._config), "--model", "toy", "--port", str(self.port)),
            *("--metrics-port", str(self._metrics), "--drain-s", str(DRAIN_S)),
        )

    async def end(self, number: signal.Signals) -> None:
        """Have it end by this signal, and wait for that."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            await asyncio.wait_for(self._process.wait(), START_WITHIN_S)

    async def prefix_tokens(self) -> tuple[int, int]:
        """Of the tokens of prompts, those that were cached, and all."""
        return await self._count("prefix_cache_hits_total"), await self._count(
            "prefix_cache_queries_total"
        )

    async def running(self) -> int:
        """Sessions that it holds."""
        return await self._count("num_requests_running")

    async def _count(self, name: str) -> int:
        url = f"http://127.0.0.1:{self._metrics}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
        found = re.search(rf"^\S*{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
        assert isinstance(port, int)
        return port


class AnyReplica:
    """An ``AssociationPolicy`` that throws a die for each text, as a balancer without memory."""

    name = "any"

    def __init__(self, seed: object) -> None:
        self._dice = random.Random(f"any {seed}")

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        return tuple(self._dice.randrange(len(verifiers)) for _ in devices)


def make_agent(addresses: Sequence[str], policy: AssociationPolicy, number: int) -> Agent:
    """A device that only streams."""
    failover = Failover(
        FailoverPolicy(),
        policy,
        DeviceView(f"device {number}", 0.01),
        number,
        ask_first=policy.name == "lowest-delay",
    )
    text, options = ToyTokenizer(), AgentOptions(reconnect=PATIENT)
    directory = VerifierDirectory(addresses, lambda address, server_name="": connect(address))
    return Agent(VerifierPool(directory, failover), None, text.encode, text.stream, options)


async def open_channels(agents: Sequence[Agent]) -> None:
    """So that no first token waits for a connection."""
    for agent in agents:
        assert isinstance(agent.transport, VerifierPool)
        for transport in (await agent.transport.known()).values():
            await transport.info()


# --- what is said -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chat:
    """Its turns: the whole conversation so far, and the target's own answer."""

    name: str
    turns: tuple[Request, ...]


def make_chat(name: str, options: argparse.Namespace) -> Chat:
    dice, turns = random.Random(name), list[Request]()
    sampling = SamplingParams(max_tokens=options.answer_tokens, ignore_eos=True)
    text = tuple(dice.randrange(1, VOCABULARY) for _ in range(options.system_tokens))
    for _ in range(options.turns):
        text += tuple(dice.randrange(1, VOCABULARY) for _ in range(options.question_tokens))
        asked = Request(text, sampling)
        turns.append(Request(text, sampling, toy_text(asked)))
        text += turns[-1].expected
    return Chat(name, tuple(turns))


# --- what is noticed ----------------------------------------------------------------------------


@dataclass
class Notes:
    """Of all clients, for a while; seconds."""

    first_s: list[list[float]] = field(default_factory=list)
    """To the first token, by turn."""
    gaps_s: list[float] = field(default_factory=list)
    """Between tokens of one text whose stream stayed."""
    stalls_s: list[float] = field(default_factory=list)
    """Those in which its verifier was lost and another one was found."""
    texts: int = 0
    moved: int = 0
    """How often a text went on at another replica."""
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    """Texts by the replica that ended them."""

    def first(self, turn: int, seconds: float) -> None:
        while len(self.first_s) <= turn:
            self.first_s.append([])
        self.first_s[turn].append(seconds)


async def play(
    agent: Agent, chat: Chat, notes: Callable[[], Notes], dice: random.Random, think_s: float
) -> None:
    """One chat, turn after turn; what happens goes to whatever ``notes`` says at that moment."""
    for turn, asked in enumerate(chat.turns):
        await asyncio.sleep(dice.random() * think_s)
        tokens, streams, since_s = list[int](), 0, time.perf_counter()
        stats = None
        try:
            async for chunk in agent.generate(asked.prompt, asked.sampling, conversation=chat.name):
                stats, now_s = agent.stats, time.perf_counter()
                assert stats is not None
                gap_s, since_s = now_s - since_s, now_s
                if stats.counters.reconnects > streams:
                    notes().stalls_s.append(gap_s)
                elif tokens:
                    notes().gaps_s.append(gap_s)
                else:
                    notes().first(turn, gap_s)
                streams = stats.counters.reconnects
                tokens += chunk.tokens
        except GenerationError as error:
            notes().lost.append(f"after {len(tokens)} tokens: {error}")
            continue
        notes().texts += 1
        if stats is not None:
            notes().moved += stats.failovers
            notes().served[stats.verifiers[-1]] += 1
        if tuple(tokens) != asked.expected:
            notes().wrong.append(f"{tokens} is not {list(asked.expected)}")
