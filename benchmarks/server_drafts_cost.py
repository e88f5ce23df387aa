"""What the verifier's own guesses cost in its engine: CPU time a session and pass.

    python benchmarks/server_drafts_cost.py [--sessions 16] [--passes 400]

Sessions decode texts that are known beforehand, over ``VerifyEngine`` alone: no model, no network.
``loop`` repeats a line of 40 tokens, ``copy`` goes on with passages of its prompt (a new one every
30 tokens), ``noise`` is random and cannot be guessed. Times are the process's CPU time over all
passes, the least of the repeats, a session and pass: the engine and a stand-in for the target
without guesses and with them; the drafters alone; and what is spent in all a token.
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
from edgespec.core.verifier.follower_tables import Tables
from edgespec.core.verifier.served_drafts import ServedDrafts

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
    """Of one session."""

    pass_s: float
    tokens_per_pass: float


def play(texts: Sequence[list[int]], passes: int, *, served: bool) -> Cost:
    """Decode all texts side by side for so many passes, after the prompts."""
    count = len(texts)
    limits = Limits(context_length=LENGTH, max_unreceived=4096)
    engine = VerifyEngine(
        MODEL, limits, EngineLimits(count, max_rows_per_pass=1 << 16, server_drafts=served)
    )
    sampling = SamplingParams(max_tokens=LENGTH - PROMPT_LENGTH)
    now, tokens, decoded, start_s = 0.0, 0, 0, 0.0
    run: RunBatch | None = None

    def handle(event: StreamOpened | StreamMessage | BatchDone) -> None:
        nonlocal run
        for action in engine.handle(event, now):
            if isinstance(action, RunBatch):
                run = action

    for number, text in enumerate(texts):
        prompt = tuple(text[:PROMPT_LENGTH])
        request = Open(str(number), "", "", prompt, (), sampling, RunAhead.ALWAYS, drafting=False)
        handle(StreamOpened(number, request))
    while decoded < passes:
        now += 0.025
        assert run is not None
        batch, run = run, None
        if all(len(request.feed) == 1 for request in batch.requests):
            start_s = start_s or time.process_time()
            decoded += 1
            tokens += sum(right(texts[int(one.key)], one) for one in batch.requests)
        results = tuple(answer(texts[int(request.key)], request) for request in batch.requests)
        handle(BatchDone(results))
        for number in range(count):
            length = engine.sessions[str(number)].prefix.length
            handle(StreamMessage(number, Received(length, 0)))
    spent_s = time.process_time() - start_s
    return Cost(spent_s / passes / count, tokens / passes / count)


def drafters_alone(text: list[int], passes: int) -> Cost:
    """The same for one session, without an engine."""
    drafts, end, seen = ServedDrafts(Tables(shared=False)), PROMPT_LENGTH, text[:PROMPT_LENGTH]
    drafts.propose(seen, 64, LENGTH, 0.0)
    start_s = time.process_time()
    for _ in range(passes):
        proposal = drafts.propose(seen, 64, LENGTH, 0.0)
        accepted: list[int] = []
        after = -1
        for node, token in enumerate(proposal.tokens):
            if proposal.parents[node] == after and token == text[end + len(accepted)]:
                accepted.append(node)
                after = node
        answers = text[end + 1 : end + 1 + len(proposal.tokens)]
        drafts.learn(proposal.tokens, answers, accepted)
        seen += text[end : end + len(accepted) + 1]
        end = len(seen)
    spent_s = time.process_time() - start_s
    return Cost(spent_s / passes, (end - PROMPT_LENGTH) / passes)


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
    print("| text | tokens/pass | engine us | with guesses us | drafters us | us a token | with |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind in TEXTS:
        texts = [kind(random.Random(number)) for number in range(options.sessions)]
        runs = [
            (
                play(texts, options.passes, served=False),
                play(texts, options.passes, served=True),
                drafters_alone(texts[0], options.passes),
            )
            for _ in range(options.repeats)
        ]
        plain, served, alone = (
            min(cost.pass_s for cost in costs) * 1e6 for costs in zip(*runs, strict=True)
        )
        rate = runs[0][1].tokens_per_pass
        print(
            f"| {kind.__name__} | {rate:.2f} | {plain:.1f} | {served:.1f} | {alone:.1f} |"
            f" {plain:.1f} | {served / rate:.1f} |",
            flush=True,
        )
    command = shlex.join(("python", *sys.argv))
    print(json.dumps({"command": command, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
