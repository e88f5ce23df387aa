"""Answers that begin while no verifier can be reached, in every interface that shows them.

    python benchmarks/offline_answers.py [--pair bundled|toy] [--answers 20] [--tokens 48]

A device with ``offline: draft`` and an OpenAI endpoint of its own; its verifier, a process of the
product, is behind a gate that is shut. ``--answers`` texts are begun, half by the Python API and
half as streamed completions, every second one sampled; once each has been shown unverified text the
gate is opened. Each text is compared with what the same verifier gives without drafts, letter for
letter. Told are tokens shown unverified, those of them that were taken back, by
the readers' own count and by the agent's metrics; the wait for the first unverified token; and the
*stall*: from the opening of the gate to the first verified token. The exit status is 1 where a text
was wrong, something unverified was left, an interface did not mark it, or the counts differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from load_processes import ready_verifier
from openai import AsyncOpenAI

from edgespec.agent.agent import Agent
from edgespec.agent.reply import Chunk, ReplyText, UnverifiedChunk
from edgespec.agent.status import StatusSource
from edgespec.benchmark.report import machine, versions
from edgespec.compose import PromptTokenizer, build_agent, connect, load_tokenizer
from edgespec.config import AgentConfig, DraftSection, EndpointSection
from edgespec.core.device.offline import Correction, Offline
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.endpoint.app import build_app
from edgespec.endpoint.server import EndpointServer, listen
from edgespec.endpoint.service import Endpoint
from edgespec.endpoint.verifiers import VerifierWatch
from edgespec.telemetry.agent_metrics import PREFIX
from tests.shell.gate import Gate

WITHIN_S = 400.0
PATIENT = ReconnectPolicy(give_up_first_s=WITHIN_S, give_up_s=WITHIN_S)
PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\ndef load(path):\n",
    "def is_prime(n):\n",
    "for name in names:\n",
)


@dataclass
class Reader:
    """One answer, as whoever asked for it sees it; times from ``began_s``."""

    prompt: str
    sampling: SamplingParams
    began_s: float = 0.0
    text: str = ""
    left: str = ""
    """Unverified at the end."""
    shown: int = 0
    taken_back: int = 0
    first_unverified_s: float | None = None
    first_verified_s: float | None = None
    seen: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, tokens: int) -> None:
        if self.first_unverified_s is None:
            self.first_unverified_s = time.monotonic() - self.began_s
        self.shown += tokens
        self.seen.set()

    def verify(self) -> None:
        if self.first_verified_s is None:
            self.first_verified_s = time.monotonic()


async def by_api(agent: Agent, reader: Reader) -> None:
    reader.began_s, end, kept = time.monotonic(), 0, ReplyText()
    async for event in agent.follow(reader.prompt, reader.sampling):
        kept.add(event)
        if isinstance(event, UnverifiedChunk):
            reader.show(len(event.tokens))
            end = event.position + len(event.tokens)
        elif isinstance(event, Correction):
            reader.taken_back += end - event.position
        elif isinstance(event, Chunk) and event.tokens:
            reader.verify()
    reader.text, reader.left = kept.verified, kept.unverified


async def by_http(url: str, reader: Reader) -> None:
    """By OpenAI's client; what is ours in its events it hands on as it is."""
    law, end = reader.sampling, 0
    reader.began_s = time.monotonic()
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S
    ) as client:
        events = await client.completions.create(
            model="edgespec",
            prompt=reader.prompt,
            stream=True,
            max_tokens=law.max_tokens,
            temperature=law.temperature,
            seed=law.seed,
            stream_options={"include_usage": True},
        )
        async for event in events:
            told = (event.model_extra or {}).get("edgespec", {})
            if "unverified" in told:
                reader.show(told["tokens"])
                end = told["position"] + told["tokens"]
            elif "discard_from" in told:
                reader.taken_back += end - told["discard_from"]
                end = told["discard_from"]
            for choice in event.choices:
                if choice.text:
                    reader.text += choice.text
                    reader.verify()
            if event.usage is not None and end > event.usage.completion_tokens:
                reader.left = f"{end - event.usage.completion_tokens} tokens"


@contextlib.asynccontextmanager
async def endpoint(agent: Agent, text: PromptTokenizer, address: str) -> AsyncIterator[str]:
    settings = EndpointSection(max_concurrent=64, port=0)
    watch = VerifierWatch({address: connect(address)})
    with listen(settings.host, 0) as listener:
        status = StatusSource(agent, (address,))
        served = Endpoint(agent, text, watch, settings)
        server = EndpointServer(served, build_app(served, status), listener)
        await server.start()
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            await server.stop(0.0)
            await status.close()
            await watch.close()


async def metrics_of(url: str) -> dict[str, float]:
    def fetched() -> str:
        with urllib.request.urlopen(f"{url}/metrics") as reply:
            return str(reply.read().decode())

    lines = (await asyncio.to_thread(fetched)).splitlines()
    pairs = (line.split() for line in lines if line.startswith(PREFIX) and "{" not in line)
    return {name.removeprefix(PREFIX): float(value) for name, value in pairs}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    pair = options.pair
    process, port = await ready_verifier("--model", pair, "--port", "0")
    address, text = f"127.0.0.1:{port}", load_tokenizer(pair)
    readers = [
        Reader(
            PROMPTS[number % len(PROMPTS)] if pair != "toy" else f"one day {number} in may",
            SamplingParams(max_tokens=options.tokens, temperature=0.8 * (number % 2), seed=number),
        )
        for number in range(options.answers)
    ]
    try:
        plain = AgentConfig(verifier=address, draft=DraftSection("none"), tokenizer=pair)
        expected = []
        async with build_agent(plain) as agent:
            for reader in readers:
                found = [
                    chunk.text async for chunk in agent.generate(reader.prompt, reader.sampling)
                ]
                expected.append("".join(found))
        async with Gate(None) as gate:
            config = AgentConfig(
                verifier=gate.address,
                draft=DraftSection(pair, caches=options.caches),
                tokenizer=pair,
                offline=Offline.DRAFT,
                reconnect=PATIENT,
            )
            async with build_agent(config) as agent, endpoint(agent, text, gate.address) as url:
                jobs = [
                    asyncio.create_task(
                        by_http(url, one) if number >= len(readers) // 2 else by_api(agent, one)
                    )
                    for number, one in enumerate(readers)
                ]
                shown = asyncio.gather(*(one.seen.wait() for one in readers))
                await asyncio.wait([shown, *jobs], return_when=asyncio.FIRST_COMPLETED)
                assert shown.done(), "an answer ended without a verifier"
                await asyncio.sleep(options.offline_s)
                before = await metrics_of(url)
                opened_s, gate.port = time.monotonic(), port
                await asyncio.gather(*jobs)
                after = await metrics_of(url)
    finally:
        process.terminate()
        await process.wait()
    return told(readers, expected, opened_s, before, after)


def told(
    readers: list[Reader],
    expected: list[str],
    opened_s: float,
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, Any]:
    waits = [one.first_unverified_s or 0.0 for one in readers]
    stalls = [(one.first_verified_s or opened_s) - opened_s for one in readers]
    half = len(readers) // 2
    return {
        "answers": len(readers),
        "equal": sum(one.text == text for one, text in zip(readers, expected, strict=True)),
        "left unverified": sum(bool(one.left) for one in readers),
        "marked by the API": all(one.shown for one in readers[:half]),
        "marked over HTTP": all(one.shown for one in readers[half:]),
        "shown": sum(one.shown for one in readers),
        "shown by metrics": int(after["unverified_tokens_total"]),
        "shown by metrics before the link came": int(before["unverified_tokens_total"]),
        "taken back": sum(one.taken_back for one in readers),
        "taken back by metrics": int(after["taken_back_tokens_total"]),
        "first unverified s": [round(f(waits), 2) for f in (min, median, max)],
        "stall s": [round(f(stalls), 2) for f in (min, median, max)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", choices=("bundled", "toy"), default="bundled")
    parser.add_argument("--answers", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--caches", type=int, default=4)
    parser.add_argument(
        "--offline-s", type=float, default=5.0, help="once all have been shown some"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(machine(), versions())
    found = asyncio.run(measure(options))
    for name, value in found.items():
        print(f"  {name}: {value}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    marked = found["marked by the API"] and found["marked over HTTP"]
    exact = found["equal"] == found["answers"] and not found["left unverified"]
    counted = found["shown"] == found["shown by metrics"]
    counted = counted and found["taken back"] == found["taken back by metrics"]
    sys.exit(0 if exact and marked and counted else 1)


if __name__ == "__main__":
    main()
