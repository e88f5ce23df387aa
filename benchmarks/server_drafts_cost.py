"""What the verifier's own guesses cost in its engine: CPU time a session and pass.

    python benchmarks/server_drafts_cost.py [--sessions 16] [--passes 400]

Sessions decode texts that are known beforehand, over ``VerifyEngine`` alone: no model, no network.
``loop`` repeats a line of 40 tokens, ``copy`` goes on with passages of its prompt (a new one every
30 tokens), ``noise`` is random and cannot be guessed. Times are the process's CPU time, the least
of the repeats: the engine without guesses, with them, and the difference a session and pass and a
token.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.benchmark.report import machine, versions
from edgespec.core.protocol.messages import Limits, Open, Received, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo, PassRequest, PassResult
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    EngineLimits,
    RunBatch,
    StreamMessage,
    StreamOpened,
)

PROMPT_LENGTH, VOCABULARY = 500, 32_000
LENGTH = 20_000
MODEL = ModelInfo("text", "", VOCABULARY, LENGTH)


def loop(dice: random.Random) -> list[int]:
    line = [dice.randrange(VOCABULARY) for _ in range(40)]
    return line * (LENGTH // 40)


def copy(dice: random.Random) -> list[int]:
    text = [dice.randrange(VOCABULARY) for _ in range(PROMPT_LENGTH)]
    while len(text) < LENGTH:
        start = dice.randrange(PROMPT_LENGTH - 30)
        text += text[start : start + 30]
    return text[:LENGTH]


def noise(dice: random.Random) -> list[int]:
    return [dice.randrange(VOCABULARY) for _ in range(LENGTH)]


TEXTS: tuple[Callable[[random.Random], list[int]], ...] = (loop, copy, noise)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the engine alone, over a number of passes of all sessions."""

    cpu_s: float
    tokens: int


def play(texts: Sequence[list[int]], passes: int, *, served: bool) -> Cost:
    """Decode all texts side by side for so many passes, after the prompts."""
    count = len(texts)
    limits = Limits(context_length=LENGTH, max_unreceived=4096)
    engine = VerifyEngine(
        MODEL, limits, EngineLimits(count, max_rows_per_pass=1 << 16, server_drafts=served)
    )
    sampling = SamplingParams(max_tokens=LENGTH - PROMPT_LENGTH)
    now, spent_s, tokens, decoded = 0.0, 0.0, 0, 0
    run: RunBatch | None = None

    def handle(event: StreamOpened | StreamMessage | BatchDone) -> None:
        nonlocal spent_s, run
        start_s = time.process_time()
        actions = engine.handle(event, now)
        spent_s += time.process_time() - start_s
        run = next((action for action in actions if isinstance(action, RunBatch)), run)

    for number, text in enumerate(texts):
        prompt = tuple(text[:PROMPT_LENGTH])
        request = Open(str(number), "", "", prompt, (), sampling, RunAhead.ALWAYS, drafting=False)
        handle(StreamOpened(number, request))
    while decoded < passes:
        now += 0.025
        assert run is not None
        batch, run = run, None
        all_decode = all(len(request.feed) == 1 for request in batch.requests)
        before = spent_s
        results = tuple(answer(texts[int(request.key)], request) for request in batch.requests)
        handle(BatchDone(results))
        if all_decode and len(batch.requests) == count:
            decoded += 1
            tokens += sum(right(texts[int(one.key)], one) for one in batch.requests)
        else:
            spent_s = before  # prompts, and the passes in which not all take part
        for number in range(count):
            kept = spent_s
            length = engine.sessions[str(number)].prefix.length
            handle(StreamMessage(number, Received(length, 0)))
            spent_s = kept
    return Cost(spent_s, tokens)


def answer(text: Sequence[int], request: PassRequest) -> PassResult:
    """What a target says whose text this is, whatever the guesses are."""
    if not request.sample:
        return PassResult(request.key, ())
    at = request.cache_length + len(request.feed)
    depths: list[int] = []
    for parent in request.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return PassResult(request.key, tuple(text[at + depth] for depth in (0, *depths)))


def right(text: Sequence[int], request: PassRequest) -> int:
    """How many tokens the pass commits."""
    at, node = request.cache_length + len(request.feed), -1
    nodes = {
        (parent, token): index
        for index, (parent, token) in enumerate(zip(request.parents, request.tokens, strict=True))
    }
    count = 1
    while (following := nodes.get((node, text[at + count - 1]))) is not None:
        node, count = following, count + 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--passes", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| text | tokens/pass | engine us | with guesses us | more us | more us a token |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kind in TEXTS:
        texts = [kind(random.Random(number)) for number in range(options.sessions)]
        least: dict[bool, Cost] = {}
        for _ in range(options.repeats):
            for served in (False, True):
                cost = play(texts, options.passes, served=served)
                if served not in least or cost.cpu_s < least[served].cpu_s:
                    least[served] = cost
        parts = options.sessions * options.passes
        plain, with_it = (least[served].cpu_s / parts * 1e6 for served in (False, True))
        rate = least[True].tokens / parts
        print(
            f"| {kind.__name__} | {rate:.2f} | {plain:.1f} | {with_it:.1f} |"
            f" {with_it - plain:.1f} | {(with_it - plain) / rate:.1f} |",
            flush=True,
        )
    command = shlex.join(("python", *sys.argv))
    print(json.dumps({"command": command, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
