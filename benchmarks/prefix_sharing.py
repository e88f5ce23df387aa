"""The time to the first token of ten devices that share a long system prompt.

python benchmarks/prefix_sharing.py [--rounds 5] [--target toy|bundled] [--prompt-tokens 2000]
                                    [--pass-ms 25] [--row-ms 0.2] [--json FILE]

Two verifiers stand side by side, one that shares prefixes and one that does not. In each round a
system prompt that neither has seen is sent to both, one after the other, by ten devices with a
question each: one device after another, and, with a new prompt, all at once. Told are the times of
the second to the tenth device as a share of the first's. Asked is at most 0.2 with sharing, when
one comes after another; the exit code is 1 when that is missed or the two verifiers' texts differ.

Pass times are emulated for the toy (a pass takes ``--pass-ms``, and ``--row-ms`` for each of its
rows, as those of a large model's prompts do) and real for the bundled model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Final

from edgespec.agent.agent import Agent
from edgespec.benchmark.report import machine, versions
from edgespec.compose import build_agent
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.protocol.sampling import SamplingParams

ROOT: Final = Path(__file__).resolve().parent.parent
ARMS: Final = {"shared": "all", "private": "none"}
ASKED: Final = 0.2
QUESTION_TOKENS: Final = 12
OUTPUT_TOKENS: Final = 4
VOCABULARY: Final = {"toy": 60, "bundled": 4000}
"""Ids below this are ordinary tokens of the model."""
PROMPT_TOKENS: Final = {"toy": 2000, "bundled": 900}


@contextlib.asynccontextmanager
async def verifier(options: argparse.Namespace, share: str, folder: Path) -> AsyncIterator[str]:
    """The address of a daemon in a process of its own."""
    toy = options.target == "toy"
    pace = {"pass_ms": options.pass_ms, "row_ms": options.row_ms} if toy else {}
    config = folder / f"{share}.yaml"
    config.write_text(json.dumps({"pacing": pace, "limits": {"share_prefixes": share}}))
    paths = os.pathsep.join((str(ROOT), str(ROOT / "sim")))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "edgespec", "verifier", "--model", options.target, "--port", "0"),
        *("--config", str(config), "--log-level", "error"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(r"ready on \S+:(\d+): ", line)
        if found is None:
            raise RuntimeError(f"the verifier did not start: {line!r}")
        yield f"127.0.0.1:{found[1]}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def ask(agent: Agent, prompt: list[int]) -> tuple[float, tuple[int, ...]]:
    """The time to the first token, and the text."""
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    started_s, first_s = time.perf_counter(), 0.0
    tokens: list[int] = []
    async with contextlib.aclosing(agent.generate(prompt, sampling)) as chunks:
        async for chunk in chunks:
            if chunk.tokens and not tokens:
                first_s = time.perf_counter() - started_s
            tokens += chunk.tokens
    return first_s, tuple(tokens)


Answers = list[tuple[float, tuple[int, ...]]]


async def one_after_another(agents: list[Agent], prompts: list[list[int]]) -> Answers:
    return [await ask(agent, prompt) for agent, prompt in zip(agents, prompts, strict=True)]


async def all_at_once(agents: list[Agent], prompts: list[list[int]]) -> Answers:
    return list(await asyncio.gather(*map(ask, agents, prompts)))


ARRANGEMENTS: Final = {"one after another": one_after_another, "all at once": all_at_once}


async def measure(options: argparse.Namespace) -> dict[str, dict[str, list[list[float]]]]:
    """By arrangement and arm the times of each round, device by device, in seconds."""
    dice = random.Random(options.seed)
    times_s: dict[str, dict[str, list[list[float]]]] = {
        arrangement: {arm: [] for arm in ARMS} for arrangement in ARRANGEMENTS
    }
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        agents: dict[str, list[Agent]] = {}
        for arm, share in ARMS.items():
            address = await stack.enter_async_context(verifier(options, share, folder))
            config = AgentConfig(
                verifier=address, tokenizer=options.target, draft=DraftSection(model="none")
            )
            agents[arm] = [
                await stack.enter_async_context(build_agent(config)) for _ in range(options.devices)
            ]
            await one_after_another(agents[arm], _prompts(dice, options, 20))  # connections
        for number in range(options.rounds):
            for arrangement, play in ARRANGEMENTS.items():
                prompts = _prompts(dice, options, options.prompt_tokens)
                texts = []
                for arm in list(ARMS)[:: 1 - 2 * (number % 2)]:
                    answers = await play(agents[arm], prompts)
                    times_s[arrangement][arm].append([first_s for first_s, _ in answers])
                    texts.append([text for _, text in answers])
                if texts[0] != texts[1]:
                    raise RuntimeError(f"round {number}, {arrangement}: the arms' texts differ")
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return times_s


def _prompts(dice: random.Random, options: argparse.Namespace, length: int) -> list[list[int]]:
    """One system prompt of ``length`` tokens, and a question for each device."""

    def tokens(count: int) -> list[int]:
        return [dice.randrange(1, VOCABULARY[options.target]) for _ in range(count)]

    system = tokens(length)
    return [system + tokens(QUESTION_TOKENS) for _ in range(options.devices)]


def report(times_s: dict[str, dict[str, list[list[float]]]]) -> dict[str, float]:
    """Prints a table; the median share of the later devices by arrangement and arm."""
    shares: dict[str, float] = {}
    print(f"{'':<28}{'first, ms':>22}{'second to tenth, ms':>24}{'share of first':>22}")
    for arrangement, arms in times_s.items():
        for arm, rounds in arms.items():
            first = [1e3 * one[0] for one in rounds]
            later = [1e3 * median(one[1:]) for one in rounds]
            share = [median(one[1:]) / one[0] for one in rounds]
            shares[f"{arrangement}, {arm}"] = median(share)
            columns = (_spread(first, 0), _spread(later, 0), _spread(share, 3))
            print(f"{arrangement + ', ' + arm:<28}{columns[0]:>22}{columns[1]:>24}{columns[2]:>22}")
    return shares


def _spread(values: list[float], digits: int) -> str:
    """Median, least and most."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--target", choices=sorted(VOCABULARY), default="toy")
    parser.add_argument("--prompt-tokens", type=int, help="2000 for the toy, 900 for the bundled")
    parser.add_argument("--pass-ms", type=float, default=25.0, help="of the toy, emulated")
    parser.add_argument("--row-ms", type=float, default=0.2, help="of the toy, emulated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not 1 <= options.rounds <= 1000 or not 2 <= options.devices <= 64:
        parser.error("--rounds must be in [1, 1000] and --devices in [2, 64]")
    options.prompt_tokens = options.prompt_tokens or PROMPT_TOKENS[options.target]
    times_s = asyncio.run(measure(options))
    paced = f"emulated, {options.pass_ms:g} ms and {options.row_ms:g} ms a row"
    print(f"machine: {machine()}\nversions: {versions()}\ncommand: {' '.join(sys.argv)}")
    print(
        f"{options.devices} devices, a system prompt of {options.prompt_tokens} tokens and a"
        f" question of {QUESTION_TOKENS}; median (least-most) of {options.rounds} rounds;"
        f" pass times {paced if options.target == 'toy' else 'real'}"
    )
    shares = report(times_s)
    if options.json is not None:
        found = {"machine": machine(), "versions": versions(), "command": " ".join(sys.argv)}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**found, "shares": shares, "times_s": times_s}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if shares["one after another, shared"] <= ASKED else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
