"""Measure the processor time that the endpoint takes for a token, for each of its APIs.

    python benchmarks/endpoint_cost.py [--tokens 2000] [--rounds 7] [--pass-ms 2]

A verifier process with the toy model and an emulated pass commits one token at a time to a device
process, which runs ``edgespec serve`` without a draft. In each round every API has one stream, and
a process without HTTP has the same generation with the agent alone. Only processor time counts,
so other programs disturb it little.

Printed for each API, in milliseconds a token: the median of the device process, and the endpoint's
share, which is the difference to the agent of the same round, as its median and its range over the
rounds. With 7 rounds the range holds the true median with a probability of 1 - 2 ** -6 = 98 %. The
last column has the bytes of the stream a token. The exit status is 1 if a stream lost a token, or
if the median share of an API is above ``--most-ms``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from watched_verifier import Verifier, kill, line_of

from edgespec.config import AgentConfig, DraftSection, PacingSection, VerifierConfig
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent

AGENT = "agent-alone"
"""First argument that makes this process generate without HTTP."""
PROMPT = "once upon a time"
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/messages": _CHAT,
    "/api/chat": _CHAT,
    "/api/generate": {"prompt": PROMPT},
}


def body_of(path: str, tokens: int) -> bytes:
    length: dict[str, Any] = {"max_tokens": tokens}
    if path == "/v1/responses":
        length = {"max_output_tokens": tokens}
    elif path.startswith("/api/"):
        length = {"options": {"num_predict": tokens}}
    data = {"model": "edgespec", **_BODIES[path], **length, "stream": True, "ignore_eos": True}
    if path in ("/v1/chat/completions", "/v1/completions"):
        data["stream_options"] = {"include_usage": True}
    return json.dumps(data).encode()


async def stream(port: int, path: str, tokens: int) -> bytes:
    """Return the bytes of one streamed response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = body_of(path, tokens)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    reply = await reader.read()
    writer.close()
    return reply


def generated_tokens(reply: bytes) -> int:
    """Return the number of tokens that the usage at the end of a stream reports."""
    names = (b'"completion_tokens":', b'"output_tokens":', b'"eval_count":')
    places = [(reply.rfind(name), name) for name in names]
    place, name = max(places)
    digits = reply[place + len(name) :].lstrip()
    return int(digits[: len(digits) - len(digits.lstrip(b"0123456789"))] or b"0")


async def run_agent(address: str, tokens: int) -> None:
    """Generate once for each line of stdin, and print the processor time of each generation in
    seconds."""
    config = AgentConfig(verifier=address, draft=DraftSection(model="none"), tokenizer="toy")
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    async with build_agent(config) as agent:
        while await asyncio.to_thread(sys.stdin.readline):
            began_s = time.process_time()
            async for chunk in agent.generate(PROMPT, sampling):
                _ = chunk.text
            print(time.process_time() - began_s, flush=True)


async def time_agent(process: asyncio.subprocess.Process) -> float:
    """Return the processor time of the next generation of ``run_agent`` in seconds."""
    assert process.stdin is not None
    process.stdin.write(b"\n")
    await process.stdin.drain()
    return float(await line_of(process))


async def measure(arguments: argparse.Namespace) -> bool:
    """Print the table and return whether every stream had all its tokens, at no more than the
    wanted cost."""
    tokens, is_whole = arguments.tokens, True
    times_ms: dict[str, list[float]] = {name: [] for name in (AGENT, *_BODIES)}
    size_bytes = dict.fromkeys(_BODIES, 0)
    with tempfile.TemporaryDirectory() as folder:
        pacing = PacingSection(pass_ms=arguments.pass_ms)
        # Without the verifier's own drafts each token is an event.
        settings = VerifierConfig(model="toy", port=0, pacing=pacing, server_drafts=False)
        verifier = Verifier(settings, Path(folder), "--table")
        started: list[asyncio.subprocess.Process] = []
        try:
            await verifier.start()
            address = f"127.0.0.1:{verifier.port}"
            options = ("--draft", "none", "--port", "0", "--verifier", address)
            for command in (
                ("-m", "edgespec", "serve", *options),
                (__file__, AGENT, address, "--tokens", str(tokens)),
            ):
                started.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable, *command, stdin=PIPE, stdout=PIPE
                    )
                )
            serve, alone = started
            port = int((await line_of(serve)).strip().removesuffix("/v1").rpartition(":")[2])
            process = psutil.Process(serve.pid)
            for number in range(arguments.rounds + 1):
                found = {AGENT: await time_agent(alone)}
                for path in _BODIES:
                    before_s = sum(process.cpu_times()[:2])
                    reply = await stream(port, path, tokens)
                    found[path] = sum(process.cpu_times()[:2]) - before_s
                    size_bytes[path] = len(reply)
                    if (count := generated_tokens(reply)) != tokens:
                        is_whole = False
                        print(f"{path}: {count} tokens instead of {tokens}", file=sys.stderr)
                if number:  # the first round warms everything up
                    for name, took_s in found.items():
                        times_ms[name].append(1e3 * took_s / tokens)
        finally:
            for one in started:
                if one.returncode is None:
                    one.kill()
                    await one.wait()
            await kill(verifier)
    print(f"{'API':24}{'process':>9}{'endpoint':>10}{'least':>8}{'most':>8}{'bytes':>7}")
    print(f"{'agent without HTTP':24}{median(times_ms[AGENT]):9.3f}")
    is_cheap = True
    for path, size in size_bytes.items():
        shares = [one - own for one, own in zip(times_ms[path], times_ms[AGENT], strict=True)]
        is_cheap &= median(shares) <= arguments.most_ms
        print(
            f"{path:24}{median(times_ms[path]):9.3f}{median(shares):10.3f}{min(shares):8.3f}"
            f"{max(shares):8.3f}{size / tokens:7.0f}"
        )
    return is_whole and is_cheap


def main() -> None:
    """Measure, or generate without HTTP if the first argument says so."""
    is_agent = AGENT in sys.argv[1:2]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if is_agent:
        parser.add_argument("mode")
        parser.add_argument("address")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=7, help="streams of each API")
    parser.add_argument("--most-ms", type=float, default=0.25, help="greatest share a token")
    parser.add_argument("--pass-ms", type=float, default=2.0, help="emulated pass of the target")
    arguments = parser.parse_args()
    if is_agent:
        asyncio.run(run_agent(arguments.address, arguments.tokens))
    elif not asyncio.run(measure(arguments)):
        sys.exit(1)


if __name__ == "__main__":
    main()
