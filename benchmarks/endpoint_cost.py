"""What HTTP costs: a text through ``edgespec serve`` against the same through ``Agent.generate``.

    python benchmarks/endpoint_cost.py [--tokens 400] [--repeats 7] [--pass-ms 0,10]
                                       [--requests 600]

Starts a toy verifier and an endpoint in processes of their own. Both ways take turns; the direct
one runs in this process, over the same verifier with the same draft. Of each: time a token, from
the request to the end, and CPU time of the device's process a token (through HTTP that of the
endpoint, without its client). Every text is compared with the toy's own. Then ``--requests`` short
requests, every tenth of them hung up in the middle, and what the endpoint holds of memory then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from edgespec.agent.agent import Agent
from edgespec.compose import TOY_MODEL, build_agent
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.models.toy_tokenizer import ToyTokenizer

PROMPT = "once upon a time"
TEXT = ToyTokenizer()


@contextmanager
def running(*arguments: str) -> Iterator[tuple[str, int]]:
    """``edgespec`` in a process of its own; yields where it listens, and its id."""
    command = [sys.executable, "-m", "edgespec", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"ready on (?:http://)?([\d.]+:\d+)", process.stdout.readline())
            assert found is not None, "it did not start"
            yield found[1], process.pid
        finally:
            process.terminate()


def expected(count: int) -> str:
    """The toy's text, by the scalar specification."""
    prompt = TEXT.encode(PROMPT)
    tokens, params = list(prompt), SamplingParams(max_tokens=count, ignore_eos=True)
    for _ in range(count):
        tokens.append(choose(TOY_MODEL.logits(tokens), params, len(tokens)))
    return TEXT.decode(tokens[len(prompt) :])


async def ask(address: str, count: int, *, hang_up: bool = False) -> str:
    """One streamed request over a connection of its own; the text."""
    host, _, port = address.rpartition(":")
    data = {"prompt": PROMPT, "max_tokens": count, "stream": True, "ignore_eos": True, "seed": 0}
    body = json.dumps(data).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    parts = []
    async for line in reader:
        if line.startswith(b"data: {"):
            parts.append(json.loads(line[6:])["choices"][0]["text"])
            if hang_up:
                writer.transport.abort()
                return ""
    writer.close()
    return "".join(parts)


async def directly(agent: Agent, count: int) -> str:
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return "".join([chunk.text async for chunk in agent.generate(TEXT.encode(PROMPT), params)])


async def compare(pass_ms: float, draft: str, count: int, repeats: int) -> None:
    text = expected(count)
    with running("verifier", "--model", "toy", "--pass-ms", str(pass_ms)) as (verifier, _):
        options = ("--verifier", verifier, "--draft", draft, "--tokenizer", "toy")
        with running("serve", *options) as (address, pid):
            process = psutil.Process(pid)
            config = AgentConfig(
                verifier=verifier, draft=DraftSection(model=draft), tokenizer="toy"
            )
            rows: dict[str, list[tuple[float, float]]] = {"direct": [], "http": []}
            async with build_agent(config) as agent:
                for turn in range(repeats + 1):
                    for way in ("direct", "http"):
                        began, own = time.perf_counter(), time.process_time()
                        theirs = sum(process.cpu_times()[:2])
                        work = directly(agent, count) if way == "direct" else ask(address, count)
                        assert await work == text, f"{way}: not the target's text"
                        took = time.perf_counter() - began
                        cpu = time.process_time() - own
                        if way == "http":
                            cpu = sum(process.cpu_times()[:2]) - theirs
                        if turn:  # the first one opens connections
                            rows[way].append((took / count * 1e3, cpu / count * 1e3))
            shown = f"pass {pass_ms:g} ms, draft {draft}"
            for place, what in ((0, "ms a token"), (1, "CPU ms a token")):
                direct, http = ([row[place] for row in rows[way]] for way in ("direct", "http"))
                pairs = [b / a for a, b in zip(direct, http, strict=True)]
                print(
                    f"{shown}: {what}: ratio {_spread(pairs)}; direct {_spread(direct)},"
                    f" http {_spread(http)}",
                    flush=True,
                )


async def memory(requests: int) -> None:
    with running("verifier", "--model", "toy") as (verifier, _):
        with running("serve", "--verifier", verifier, "--draft", "toy") as (address, pid):
            held = []
            for number in range(requests + 1):
                if number % (requests // 6) == 0:
                    held.append(psutil.Process(pid).memory_info().rss / (1 << 20))
                await ask(address, 24, hang_up=number % 10 == 5)
            counts = ", ".join(f"{one:.1f}" for one in held)
            print(f"MiB after each {requests // 6} of {requests} requests: {counts}", flush=True)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pass-ms", default="0,10")
    parser.add_argument("--requests", type=int, default=600)
    given = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for pass_ms in given.pass_ms.split(","):
        for draft in ("none", "toy"):
            asyncio.run(compare(float(pass_ms), draft, given.tokens, given.repeats))
    if given.requests:
        asyncio.run(memory(given.requests))


if __name__ == "__main__":
    main()
