"""Run devices that behave: they join, generate a text, check it, pause, and leave.

    python benchmarks/honest_devices.py PORT REQUESTS --devices 100 [--drafting 8] [--keys FOLDER]

It runs until its standard input ends and then prints a JSON object with the outcomes of all texts.
A line "cut" on standard input lets the links of every tenth device break now and then from there
on; "mend" ends that. REQUESTS is a file that ``write_requests`` wrote: the prompts, and the
target's own text for each. With ``--keys`` device N shows the key in the file ``device-N`` of that
folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from watched_verifier import line_of, start, tell

from edgespec.config import AgentConfig, DraftSection
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.build import build_agent
from edgespec.models.toy import TOY_MODEL
from tests.kit.gate import Gate
from tests.kit.live_verifier import toy_text

# An overloaded verifier may keep a new stream waiting; no device should give up for that.
PATIENT = ReconnectPolicy(give_up_first_s=60.0, give_up_s=60.0)
LONGEST_PAUSE_S = 2.0
CUT_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and the target's own answer to it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    expected: tuple[int, ...] = ()


def make_requests(count: int, seed: int, longest: int) -> list[Request]:
    """Make short and long prompts and texts; every third is sampled, every sixth with penalties."""
    dice = random.Random(seed)
    requests: list[Request] = []
    for number in range(count):
        prompt_length = dice.choice((8, 20, 40, longest // 2))
        sampled = number % 3 == 2
        sampling = SamplingParams(
            temperature=0.9 if sampled else 0.0,
            top_p=0.95 if sampled else 1.0,
            frequency_penalty=0.2 if number % 6 == 5 else 0.0,
            seed=number,
            max_tokens=dice.choice((20, 60, longest)),
            ignore_eos=True,
        )
        prompt = tuple(dice.randrange(1, 64) for _ in range(prompt_length))
        requests.append(Request(prompt, sampling))
    return requests


def read_requests(path: Path) -> list[Request]:
    rows = json.loads(path.read_text())
    return [Request(tuple(p), SamplingParams(**law), tuple(e)) for p, law, e in rows]


def write_requests(path: Path, requests: Sequence[Request]) -> None:
    laws = ("temperature", "top_p", "frequency_penalty", "seed", "max_tokens", "ignore_eos")
    rows = [
        (one.prompt, {name: getattr(one.sampling, name) for name in laws}, one.expected)
        for one in requests
    ]
    path.write_text(json.dumps(rows))


@dataclass
class Tally:
    """The outcomes of the texts."""

    texts: int = 0
    tokens: int = 0
    reconnects: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@dataclass
class Waits:
    """Waits of devices in seconds: for first tokens, and for the tokens after them."""

    first_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)


@dataclass
class Device:
    """One device; it adds its waits to ``waits`` if that is given."""

    agent: Agent
    dice: random.Random
    tally: Tally
    waits: Waits | None = None

    async def generate(self, request: Request) -> None:
        """Generate one text and compare it token by token; a failure is recorded, not raised."""
        tokens: list[int] = []
        asked_s = came_s = time.perf_counter()
        try:
            async for chunk in self.agent.generate(request.prompt, request.sampling):
                now_s = time.perf_counter()
                if chunk.tokens and self.waits is not None:
                    if not tokens:
                        self.waits.first_s.append(now_s - asked_s)
                    else:
                        self.waits.next_s.append(now_s - came_s)
                    self.waits.next_s += [0.0] * (len(chunk.tokens) - 1)
                came_s = now_s
                tokens += chunk.tokens
        except GenerationError as error:
            self.tally.lost.append(f"after {len(tokens)} tokens: {error}")
            await asyncio.sleep(1.0)
            return
        self.tally.texts += 1
        self.tally.tokens += len(tokens)
        if self.agent.stats is not None:
            self.tally.reconnects += self.agent.stats.counters.reconnects
        if tuple(tokens) != request.expected:
            self.tally.wrong.append(f"{tokens} is not {list(request.expected)}")

    async def live(self, requests: Sequence[Request], longest_pause_s: float) -> None:
        """Generate texts until cancelled."""
        while True:
            await asyncio.sleep(self.dice.random() * longest_pause_s)
            await self.generate(self.dice.choice(requests))


def device_agent(address: str, model: str, *, drafting: bool, key_file: str = "") -> Agent:
    draft = DraftSection(model=model if drafting else "none", threads=1)
    config = AgentConfig(
        verifier=address,
        tokenizer=model,
        draft=draft,
        reconnect=PATIENT,
        api_key_file=key_file,
    )
    return build_agent(config)


def key_file(folder: Path | None, number: int) -> str:
    """Return the file with the key of this device, or an empty string if it needs none."""
    return "" if folder is None else str(folder / f"device-{number}")


def toy_answers(requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the toy target's own texts, by the scalar specification."""
    return [
        replace(one, expected=tuple(toy_text(one.prompt, one.sampling, TOY_MODEL)))
        for one in requests
    ]


async def answers(agent: Agent, requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the verifier's texts, generated while no other device is
    connected."""
    found = list[Request]()
    for one in requests:
        chunks = [chunk.tokens async for chunk in agent.generate(one.prompt, one.sampling)]
        found.append(replace(one, expected=tuple(token for part in chunks for token in part)))
    return found


class Crowd:
    """The process of this file, from outside."""

    async def start(self, port: int, requests: Path, options: Any) -> None:
        arguments: tuple[str, ...] = (str(port), str(requests), "--devices", str(options.devices))
        if options.keys:
            arguments += ("--keys", str(requests.parent))
        more = ("--model", options.model, "--seed", str(options.seed))
        self.process = await start("honest_devices.py", *arguments, *more)
        await line_of(self.process)

    async def cut_links(self, yes: bool) -> None:
        await tell(self.process, "cut" if yes else "mend")

    async def stop(self) -> dict[str, Any]:
        """Stop the devices; return the outcomes of their texts."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        found: dict[str, Any] = json.loads(await line_of(self.process))
        await self.process.wait()
        return found


async def crowd(options: argparse.Namespace) -> Tally:
    os.nice(5)
    requests, tally = read_requests(options.requests), Tally()
    loop, stopped, breaking = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def hear() -> None:
        words = os.read(sys.stdin.fileno(), 4096).decode().split()
        if not words:
            loop.remove_reader(sys.stdin.fileno())
            stopped.set()
        for word in words:
            breaking.set() if word == "cut" else breaking.clear()

    loop.add_reader(sys.stdin.fileno(), hear)
    async with AsyncExitStack() as stack:
        relays: list[Gate] = []
        tasks: list[asyncio.Task[Any]] = []
        for number in range(options.devices):
            address = f"127.0.0.1:{options.port}"
            if number % 10 == 9:
                relays.append(await stack.enter_async_context(Gate(options.port)))
                address = relays[-1].address
            drafting = bool(options.drafting) and number % options.drafting == 0
            key = key_file(options.keys, number)
            agent = device_agent(address, options.model, drafting=drafting, key_file=key)
            await stack.enter_async_context(agent)
            dice = random.Random(f"{options.seed} device {number}")
            device = Device(agent, dice, tally)
            tasks.append(asyncio.create_task(device.live(requests, LONGEST_PAUSE_S)))
        dice = random.Random(f"{options.seed} cuts")

        async def cut() -> None:
            while relays:
                await asyncio.sleep(dice.random() * 2 * CUT_EVERY_S)
                await breaking.wait()
                dice.choice(relays).cut()

        tasks.append(asyncio.create_task(cut()))
        print("ready", flush=True)
        await stopped.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("port", type=int)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--drafting", type=int, default=8, help="every so manieth drafts; 0: none")
    parser.add_argument("--model", default="toy", choices=("toy", "bundled"))
    parser.add_argument("--keys", type=Path, help="folder with a key for each device")
    parser.add_argument("--seed", type=int, default=1)
    tally = asyncio.run(crowd(parser.parse_args()))
    print(json.dumps(vars(tally)), flush=True)


if __name__ == "__main__":
    main()
