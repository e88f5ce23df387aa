"""Measure what a turn of a conversation sends to its verifier, by the length of what came before.

    python benchmarks/conversation_bytes.py [--json FILE] [--tokenizer FOLDER]

An agent and a verifier talk over gRPC on this machine. A conversation begins with a prompt of the
given length, and two turns follow, with a new message each. The verifier counts the payload bytes
of a turn, with the prompt's beginning named, with it sent whole
(``limits.prefix_mib`` 0), and with a verifier that was restarted before the turn. Every output is
compared with the one of whole prompts. The event loops of both ends wait for the naming and the
looking up of a beginning of that length; these take processor time, which is measured too.

With ``--tokenizer`` it also measures what a turn costs a device before anything is sent: rendering
the chat template, and tokenizing the whole text or only its last message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from edgespec.core.ports import ModelInfo, PassRequest, PassResult, SimpleTarget
from edgespec.core.protocol.messages import Limits, Prefix
from edgespec.core.protocol.prefix_names import PrefixNames
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.prefix_store import PrefixStore
from edgespec.device.agent import Agent
from edgespec.models.text_process import template_worker
from edgespec.models.tokenizer import TextTokenizer
from edgespec.telemetry.verifier_counts import VerifierTelemetry
from edgespec.verifier.daemon import Verifier
from edgespec.wire.codec import WireLimits
from edgespec.wire.grpc_client import GrpcTransport
from edgespec.wire.grpc_server import GrpcServer

LENGTHS = (1_024, 4_096, 16_384, 65_536)
VOCABULARY = 150_000
CONTEXT = 1 << 17
MESSAGE_TOKENS, OUTPUT_TOKENS = 100, 100
STORE_BYTES = 64 << 20
ARMS = ("named", "whole", "restarted")


class TextTarget(SimpleTarget):
    """A target whose token at each position is a hash of the position and of the last token."""

    mode, cache = "hashed", None
    info = ModelInfo("hashed", "hashed", VOCABULARY, CONTEXT)

    def __init__(self) -> None:
        self._texts: dict[str, list[int]] = {}

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._texts[key] = []

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        return [self._run(request) for request in batch]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """Keep nothing: no node is drafted here."""

    def close(self, key: str) -> None:
        self._texts.pop(key, None)

    def _run(self, request: PassRequest) -> PassResult:
        text = self._texts[request.key]
        text[request.cache_length :] = request.feed
        if not request.sample:
            return PassResult(request.key, ())
        token = hash((len(text), *text[-4:])) % VOCABULARY
        return PassResult(request.key, (token,))


class NoText:
    """A decoder for tokens that have no text."""

    def push(self, tokens: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Machine:
    """A verifier at a port of its own, which can be restarted there."""

    def __init__(self, prefix_bytes: int) -> None:
        self._bytes, self.address = prefix_bytes, "127.0.0.1:0"
        self.watch = VerifierTelemetry()

    async def start(self) -> None:
        limits = EngineLimits(prefix_bytes=self._bytes)
        self._verifier = Verifier(
            TextTarget(), Limits(context_length=CONTEXT), limits, telemetry=self.watch.streams
        )
        self._server = GrpcServer(
            self.address,
            self._verifier.serve,
            lambda: self._verifier.info,
            limits=WireLimits.for_context(CONTEXT),
            watch=self.watch,
        )
        await self._server.start()
        self.address = f"127.0.0.1:{self._server.port}"

    async def stop(self) -> None:
        await self._verifier.stop()
        await self._server.stop(0.0)

    @property
    def bytes_up(self) -> int:
        counted = self.watch.traffic.received_bytes
        return counted["open"] + counted["prefixtokens"]


async def play(length: int, arm: str) -> tuple[list[int], list[int]]:
    """Play a conversation; return the bytes of each turn, and all outputs."""
    dice = random.Random(length)
    machine = Machine(0 if arm == "whole" else STORE_BYTES)
    await machine.start()
    transport = GrpcTransport(machine.address, limits=WireLimits.for_context(CONTEXT))
    agent = Agent(transport, None, lambda text: [], lambda prompt: NoText())
    prompt = [dice.randrange(VOCABULARY) for _ in range(length)]
    turns, outputs = list[int](), list[int]()
    try:
        for turn in range(3):
            if arm == "restarted" and turn:
                await machine.stop()
                await machine.start()
            before, output = machine.bytes_up, list[int]()
            sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            async for chunk in agent.generate(prompt, sampling):
                output += chunk.tokens
            turns.append(machine.bytes_up - before)
            outputs += output
            prompt += output
            prompt += [dice.randrange(VOCABULARY) for _ in range(MESSAGE_TOKENS)]
    finally:
        await agent.close()
        await machine.stop()
    return turns, outputs


def processor_ms(work: Callable[[], object]) -> float:
    """Return the least processor time of a few calls, in milliseconds."""
    least_s = 1e9
    for _ in range(5):
        began_s = time.process_time()
        work()
        least_s = min(least_s, time.process_time() - began_s)
    return 1e3 * least_s


def measure_times(length: int) -> dict[str, float]:
    dice, key = random.Random(length), bytes(16)
    text = [dice.randrange(VOCABULARY) for _ in range(length)]
    store = PrefixStore(STORE_BYTES)
    names = PrefixNames(key, store.block_tokens)
    store.keep("", names, text)
    named = len(names.names) * store.block_tokens
    prefix = Prefix(named, names.names[-1], named)

    def keep_whole() -> None:
        PrefixStore(STORE_BYTES).keep("", PrefixNames(key, store.block_tokens), text)

    return {
        "device_ms": processor_ms(lambda: PrefixNames(key, store.block_tokens).extend(text)),
        "found_ms": processor_ms(lambda: store.find("", key, prefix)),
        "kept_ms": processor_ms(keep_whole),
    }


def measure_texts(length: int, folder: Path) -> dict[str, float]:
    """Measure the texts of one turn behind ``length`` tokens."""
    tokenizer = TextTokenizer(folder, template_worker())
    template, dice = tokenizer.chat_template(), random.Random(length)
    assert template is not None, f"{folder} has no chat template"
    words = Path(__file__).read_text(encoding="utf-8").split()
    messages = list[dict[str, str]]()
    text = ""
    while len(tokenizer.encode_many([text])[0]) < length:
        for role in ("user", "assistant"):
            content = " ".join(dice.choices(words, k=min(400, length // 8)))
            messages.append({"role": role, "content": content})
        text = template.render(messages)
    tokenizer.encode(text, add_special_tokens=False)
    times_ms = []
    for turn in range(5):
        messages.append(
            {"role": "user", "content": f"{turn} " + " ".join(dice.choices(words, k=60))}
        )
        began_s = time.perf_counter()
        text = template.render(messages)
        rendered_s = time.perf_counter()
        began_cpu_s = time.process_time()
        ids = tokenizer.encode(text, add_special_tokens=False)
        grown_s, whole_began_s = time.process_time() - began_cpu_s, time.process_time()
        assert ids == tokenizer.encode_many([text])[0]
        whole_s = time.process_time() - whole_began_s
        times_ms.append((1e3 * (rendered_s - began_s), 1e3 * grown_s, 1e3 * whole_s))
    names = ("render_ms", "grown_ms", "whole_ms")
    return dict(zip(names, map(min, zip(*times_ms, strict=True)), strict=True))


async def measure(lengths: Sequence[int]) -> list[dict[str, float]]:
    rows = []
    for length in lengths:
        row: dict[str, float] = {"tokens": length, **measure_times(length)}
        texts = []
        for arm in ARMS:
            turns, outputs = await play(length, arm)
            row |= {f"{arm}_first": turns[0], arm: max(turns[1:])}
            texts.append(outputs)
        row["texts_that_differ"] = sum(text != texts[0] for text in texts)
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens before")
    parser.add_argument(
        "--tokenizer", type=Path, help="folder with a chat template, to time it too"
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args(argv)
    rows = asyncio.run(measure(args.lengths))
    print("tokens before | bytes named | whole | after a restart | ms to name | to find | to keep")
    for row in rows:
        shown = [f"{int(row[name]):,}" for name in ("tokens", *ARMS)]
        shown += [f"{row[name]:.2f}" for name in ("device_ms", "found_ms", "kept_ms")]
        print(" | ".join(shown))
    if args.tokenizer is not None:
        print("tokens before | ms to render | ms to tokenize what is new | ms to tokenize all")
        for row in rows:
            row |= measure_texts(int(row["tokens"]), args.tokenizer)
            shown = [f"{row[name]:.1f}" for name in ("render_ms", "grown_ms", "whole_ms")]
            print(" | ".join((f"{int(row['tokens']):,}", *shown)))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["texts_that_differ"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
