"""Measure the processor time that the endpoint takes for a token, for each of its APIs.

    python benchmarks/endpoint_cost.py [--tokens 2000] [--streams 5] [--pass-ms 2]

A verifier process with the toy model and an emulated pass commits one token at a time to a device
process, which runs ``edgespec serve`` without a draft. The APIs take turns, one stream each.
Printed for each API: the processor time of the device process a token in milliseconds (least,
median, greatest), and the bytes of the stream a token. The row ``agent`` is the same generation
without HTTP, in a process of its own. The exit status is 1 if a stream lost a token.
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
from watched_verifier import Verifier, kill, line_of, start

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


async def run_agent(address: str, tokens: int, streams: int) -> None:
    """Print the processor times of generations without HTTP, in seconds, as JSON."""
    config = AgentConfig(verifier=address, draft=DraftSection(model="none"), tokenizer="toy")
    times_s = []
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    async with build_agent(config) as agent:
        for _ in range(streams + 1):
            began_s = time.process_time()
            async for chunk in agent.generate(PROMPT, sampling):
                _ = chunk.text
            times_s.append(time.process_time() - began_s)
    print(json.dumps(times_s[1:]))


async def measure(arguments: argparse.Namespace) -> bool:
    """Print the table and return whether every stream had all its tokens."""
    tokens, is_whole = arguments.tokens, True
    with tempfile.TemporaryDirectory() as folder:
        pacing = PacingSection(pass_ms=arguments.pass_ms)
        # Without the verifier's own drafts each token is an event.
        settings = VerifierConfig(model="toy", port=0, pacing=pacing, server_drafts=False)
        verifier = Verifier(settings, Path(folder), "--table")
        serve = None
        try:
            await verifier.start()
            address = f"127.0.0.1:{verifier.port}"
            options = ("--draft", "none", "--port", "0", "--verifier", address)
            serve = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "edgespec", "serve", *options),
                stdin=PIPE,
                stdout=PIPE,
            )
            ready = await line_of(serve)
            port = int(ready.strip().removesuffix("/v1").rpartition(":")[2])
            process = psutil.Process(serve.pid)
            times_ms: dict[str, list[float]] = {path: [] for path in _BODIES}
            size_bytes = dict.fromkeys(_BODIES, 0)
            for number in range(arguments.streams + 1):
                for path, found in times_ms.items():
                    before_s = sum(process.cpu_times()[:2])
                    reply = await stream(port, path, tokens)
                    if number:  # the first round warms everything up
                        took_s = sum(process.cpu_times()[:2]) - before_s
                        found.append(1e3 * took_s / tokens)
                    size_bytes[path] = len(reply)
                    if (count := generated_tokens(reply)) != tokens:
                        is_whole = False
                        print(f"{path}: {count} tokens instead of {tokens}", file=sys.stderr)
            own = ("--tokens", str(tokens), "--streams", str(arguments.streams))
            alone = await start("endpoint_cost.py", AGENT, address, *own)
            agent_s = json.loads(await line_of(alone))
            await alone.wait()
        finally:
            if serve is not None and serve.returncode is None:
                serve.kill()
                await serve.wait()
            await kill(verifier)
    rows = {"agent": [1e3 * one / tokens for one in agent_s], **times_ms}
    print(f"{'API':24}{'least':>8}{'median':>8}{'most':>8}{'bytes':>8}")
    for name, found in rows.items():
        size = f"{size_bytes[name] / tokens:8.0f}" if name in size_bytes else ""
        print(f"{name:24}{min(found):8.3f}{median(found):8.3f}{max(found):8.3f}{size}")
    return is_whole


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
    parser.add_argument("--streams", type=int, default=5, help="streams of each API")
    parser.add_argument("--pass-ms", type=float, default=2.0, help="emulated pass of the target")
    arguments = parser.parse_args()
    if is_agent:
        asyncio.run(run_agent(arguments.address, arguments.tokens, arguments.streams))
    elif not asyncio.run(measure(arguments)):
        sys.exit(1)


if __name__ == "__main__":
    main()
