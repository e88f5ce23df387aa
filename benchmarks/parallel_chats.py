"""Many chats at once on one device: who gets drafts, and what that does to tokens a second.

    python benchmarks/parallel_chats.py [--chats 20] [--rounds 5] [--pair toy|bundled]
                                        [--rtt-ms 20] [--pass-ms 25] [--draft-ms 8]
                                        [--caches 1,4,20] [--generations 0] [--json FILE]

A verifier process serves one device that runs so many texts. The arms of a round, which are played
one after another in an order that turns with the rounds:

    in turn      one text after the other, each with all of the drafter
    undrafted    all at once, no drafts
    first only   all at once, the first drafted for (what one agent did before it shared)
    caches=N     all at once, drafted for in turn, with N caches

Told are tokens a second over all texts, and of the shared arms how much drafting the text with the
least of it got, as a share of an equal part, and the share of tokens that came from drafts. Every
text is compared with the one of the first arm. A pass takes ``--pass-ms`` and a draft step
``--draft-ms`` at least (emulated; 0: as long as they take).

With ``--generations N`` so many more run, ``--chats`` at a time, and resident memory, open files
and tasks of the device and of the verifier are told before, half way and behind.

The exit code is 1 when a text differs, a text got no draft at all though the verifier wanted drafts
throughout (it says when none can pay for its row: ``unwanted``), or the shared arms are slower than
one text after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from load_processes import ready_verifier

from edgespec.agent.agent import Agent
from edgespec.benchmark.prompts import DEFAULT_PROMPTS
from edgespec.benchmark.report import machine, versions
from edgespec.compose import build_agent
from edgespec.config import AgentConfig, DraftSection, LinkSection
from edgespec.core.device.events import Deliver, StepDone, TokenKind
from edgespec.core.protocol.messages import Commit
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.telemetry.process_memory import resident_bytes

IN_TURN, UNDRAFTED, FIRST_ONLY = "in turn", "undrafted", "first only"
MIB: Final = 1 << 20


class Counts:
    """A tracer that counts draft steps and accepted tokens by session."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.unwanted = 0
        """Commits by which the verifier wanted no drafts: none could pay for its row."""

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if isinstance(item, StepDone):
            self.steps[session] += 1
        elif isinstance(item, Commit):
            self.unwanted += item.credit == 0
        elif isinstance(item, Deliver):
            self.steps[session] += 0
            self.accepted[session] += item.kinds.count(TokenKind.ACCEPTED)


@dataclass
class Played:
    """One arm, once."""

    tokens_per_s: float
    slowest_s: float
    """From the start to the end of the last text."""
    accepted: float
    """Share of the tokens that were drafted."""
    least: float
    """Draft steps of the text that got fewest, over an equal part."""
    unwanted: int
    """Commits by which the verifier wanted no drafts."""
    texts: list[list[int]] = field(default_factory=list, repr=False)


def agent_of(options: argparse.Namespace, address: str, caches: int, counts: Counts) -> Agent:
    draft = DraftSection(
        model="none" if caches == 0 else options.pair,
        draft_ms=options.draft_ms if caches else 0.0,
        caches=max(1, caches),
    )
    config = AgentConfig(
        verifier=address,
        tokenizer=options.pair,
        draft=draft,
        link=LinkSection(rtt_ms=options.rtt_ms),
    )
    return build_agent(config, tracer=counts)


async def text_of(agent: Agent, index: int, options: argparse.Namespace) -> list[int]:
    prompt = DEFAULT_PROMPTS[index % len(DEFAULT_PROMPTS)].text + f" ({index})"
    if options.pair == "toy":
        prompt = "".join(one if one.isalpha() else " " for one in prompt.lower())
    params = SamplingParams(max_tokens=options.tokens, seed=index, ignore_eos=True)
    return [token async for chunk in agent.generate(prompt, params) for token in chunk.tokens]


async def play(arm: str, options: argparse.Namespace, address: str) -> Played:
    counts = Counts()
    caches = {IN_TURN: 1, UNDRAFTED: 0, FIRST_ONLY: 1}.get(arm) if "=" not in arm else None
    if caches is None:
        caches = int(arm.partition("=")[2])
    agent = agent_of(options, address, caches, counts)
    others = agent_of(options, address, 0, counts) if arm == FIRST_ONLY else agent
    chats = range(options.chats)
    async with agent, others:
        await text_of(agent, 10_000, options)  # connects, and loads what is loaded late
        await text_of(others, 10_000, options)
        counts.steps.clear()
        counts.accepted.clear()
        started_s = time.monotonic()
        if arm == IN_TURN:
            texts = [await text_of(agent, index, options) for index in chats]
        else:
            jobs = (text_of(others if index else agent, index, options) for index in chats)
            texts = list(await asyncio.gather(*jobs))
        took_s = time.monotonic() - started_s
    tokens = sum(map(len, texts))
    steps = sum(counts.steps.values())
    least = min(counts.steps.values()) * len(counts.steps) / steps if steps else 0.0
    accepted = sum(counts.accepted.values()) / tokens
    return Played(tokens / took_s, took_s, accepted, least, counts.unwanted, texts)


def memory_of(pid: int) -> tuple[float, int]:
    """Resident MiB and open files of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB, len(os.listdir(f"/proc/{pid}/fd"))


async def endure(options: argparse.Namespace, address: str, pid: int) -> list[dict[str, Any]]:
    """Many generations, ``chats`` at a time; what is held before, half way and behind."""
    found: list[dict[str, Any]] = []

    def look(done: int) -> None:
        gc.collect()
        resident, files = memory_of(pid)
        found.append(
            {
                "generations": done,
                "device_mib": round(resident_bytes() / MIB, 1),
                "device_files": len(os.listdir("/proc/self/fd")),
                "device_tasks": len(asyncio.all_tasks()),
                "verifier_mib": round(resident, 1),
                "verifier_files": files,
            }
        )
        print("  " + ", ".join(f"{name} {value}" for name, value in found[-1].items()), flush=True)

    async with agent_of(options, address, options.caches[-1], Counts()) as agent:
        done, marks = 0, {options.generations // 2, options.generations}
        for _ in range(2):
            await asyncio.gather(*(text_of(agent, one, options) for one in range(options.chats)))
        await asyncio.sleep(1.0)
        look(0)
        while done < options.generations:
            count = min(options.chats, options.generations - done)
            await asyncio.gather(*(text_of(agent, done + one, options) for one in range(count)))
            done += count
            if any(done - count < mark <= done for mark in marks):
                await asyncio.sleep(1.0)
                look(done)
    return found


def spread(values: Sequence[float], form: str = ".1f") -> str:
    return f"{median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def told(found: dict[str, list[Played]]) -> bool:
    """Print the table; whether all is as asked."""
    base = found[IN_TURN]
    fine = True
    for arm, runs in found.items():
        speeds = [run.tokens_per_s for run in runs]
        ratios = [
            one.tokens_per_s / other.tokens_per_s for one, other in zip(runs, base, strict=True)
        ]
        line = f"{arm:11} {spread(speeds):>24} tok/s  x{spread(ratios, '.2f'):18}"
        line += f" accepted {spread([run.accepted for run in runs], '.2f')}"
        if "=" in arm or arm == IN_TURN:
            line += f" least {spread([run.least for run in runs], '.2f')}"
            line += f" unwanted {spread([run.unwanted for run in runs], '.0f')}"
        print(line, flush=True)
        exact = all(run.texts == base[0].texts for run in runs)
        if not exact:
            print(f"  {arm}: a text differs from that of {IN_TURN!r}")
        fine = fine and exact
        if "=" in arm:
            starved = any(run.least == 0.0 and not run.unwanted for run in runs)
            fine = fine and median(ratios) >= 1.0 and not starved
    return fine


async def main(options: argparse.Namespace) -> int:
    arms = [IN_TURN, UNDRAFTED, FIRST_ONLY, *(f"caches={one}" for one in options.caches)]
    found: dict[str, list[Played]] = {arm: [] for arm in arms}
    held: list[dict[str, Any]] = []
    process, port = await ready_verifier(
        *("--port", "0", "--model", options.pair, "--pass-ms", str(options.pass_ms))
    )
    try:
        address = f"127.0.0.1:{port}"
        for turn in range(options.rounds):
            first = turn % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                found[arm].append(await play(arm, options, address))
        fine = told(found) if options.rounds else True
        if options.generations:
            held = await endure(options, address, process.pid)
    finally:
        process.kill()
        await process.wait()
    if options.json:
        write(options, found, held)
    return 0 if fine else 1


def write(
    options: argparse.Namespace, found: dict[str, list[Played]], held: list[dict[str, Any]]
) -> None:
    """Everything, as JSON."""
    report = {
        "command": " ".join(sys.argv),
        "machine": machine(),
        "versions": versions(),
        "arms": {
            arm: [
                {
                    "tokens_per_s": run.tokens_per_s,
                    "slowest_s": run.slowest_s,
                    "accepted": run.accepted,
                    "least": run.least,
                    "unwanted": run.unwanted,
                }
                for run in runs
            ]
            for arm, runs in found.items()
        },
        "held": held,
    }
    Path(options.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pair", choices=("toy", "bundled"), default="bundled")
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--pass-ms", type=float, default=25.0)
    parser.add_argument("--draft-ms", type=float, default=8.0)
    parser.add_argument("--caches", default="1,4,20")
    parser.add_argument("--generations", type=int, default=0)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    options.caches = [int(one) for one in options.caches.split(",")]
    return options


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parsed())))
