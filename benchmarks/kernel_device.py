"""Sessions of one device over real gRPC, timed: what ``kernel_network.py`` starts in a namespace.

    python benchmarks/kernel_device.py ADDRESS

Each line of its input is a ``Load`` as JSON, played over a new connection.
Every session has an agent and a toy drafter of its own; all share one transport, so one HTTP/2
connection carries them. Requests are the simulator's own (``source_of``). The first of each
session warms up. Prints "ready", and after each load a JSON list of [session, TTFT, TPOT], both in
seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import asdict, dataclass, replace

from edgespec.agent.agent import Agent
from edgespec.benchmark.arm_options import arm_options
from edgespec.benchmark.arms import Arm
from edgespec.benchmark.measurement import measure
from edgespec.compose import connect, load_drafter, load_tokenizer
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.ports import Drafter, Transport
from edgespec.target_loading import TOY_MODEL
from edgespec_sim.token_sources.source import Request
from edgespec_sim.token_sources.toy import ToySource
from edgespec_sim.world.user import REQUESTS_PER_USER

NOISE = 0.25
_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Load:
    """What the sessions do."""

    arm: str = "target-only"
    sessions: int = 1
    requests: int = 20
    prompt_tokens: int = 32
    tokens: int = 24
    think_s: float = 0.2
    draft_ms: float = 12.0
    pass_ms: float = 40.0
    seed: int = 1


class EndlessToy(ToySource):
    """The toy whose texts go on to the length that was asked for."""

    def request(self, number: int, prompt_length: int, max_tokens: int) -> Request:
        found = super().request(number, prompt_length, max_tokens)
        return replace(found, sampling=replace(found.sampling, ignore_eos=True))


def load_of(arm: str, sessions: int, seed: int) -> Load:
    """Sixteen sessions have longer passes and steps, so that one core drafts for all of them."""
    if sessions == 1:
        return Load(arm=arm, requests=50, seed=seed)
    return Load(arm, sessions, requests=10, draft_ms=60.0, pass_ms=120.0, seed=seed, tokens=16)


def source_of(load: Load) -> EndlessToy:
    return EndlessToy(TOY_MODEL, NOISE, SamplingParams(temperature=_TEMPERATURE, seed=load.seed))


async def session(
    number: int, load: Load, transport: Transport, started: asyncio.Event
) -> list[tuple[int, float | None, float | None]]:
    config = AgentConfig(draft=DraftSection(model="toy", draft_ms=load.draft_ms))
    arm, source, found = Arm(load.arm), source_of(load), []
    drafter: Drafter | None = load_drafter(config) if arm.drafts else None
    tokenizer = load_tokenizer("toy")
    options = arm_options(arm)
    # Not closed: that would close the transport, which is everybody's.
    agent = Agent(transport, drafter, tokenizer.encode, tokenizer.stream, options)
    dice = random.Random(f"{load.seed}/{number}")
    await started.wait()
    for asked in range(load.requests + 1):
        await asyncio.sleep(dice.expovariate(1.0 / load.think_s))
        request = source.request(
            number * REQUESTS_PER_USER + asked, load.prompt_tokens, load.tokens
        )
        done = await measure(agent, request.prompt, request.sampling, ())
        if asked:
            found.append((number, done.ttft_s, done.tpot_s))
    return found


async def play(address: str, load: Load) -> list[tuple[int, float | None, float | None]]:
    transport = connect(address)
    started = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(session(number, load, transport, started))
            for number in range(load.sessions)
        ]
        await transport.info()
        started.set()
    await transport.close()
    return [row for task in tasks for row in task.result()]


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(play(sys.argv[1], Load(**json.loads(line))))), flush=True)


def as_json(load: Load) -> str:
    return json.dumps(asdict(load))


if __name__ == "__main__":
    main()
