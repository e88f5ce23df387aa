"""What holding a text to a grammar costs a pass, and what it brings that the device knows it too.

    python benchmarks/grammar_cost.py [--rounds 40] [--prompts 6] [--vocabulary 151936]

Times are CPU milliseconds of the thread, medians (lowest to highest) with and without a constraint
in turn, of passes with one fed token and four right nodes a session. *pass*: the bundled target,
all of it. *sampling*: of a large vocabulary, masks and choice alone, beside the vocabulary
projection of a model that is 1,024 wide, which is the least of any such model's pass. *drafts*:
nodes that the target accepted, of those it looked at, for the bundled pair, where the device drafts
under the mask and where it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from edgespec.agent.agent import Agent, AgentOptions
from edgespec.benchmark.report import machine, versions
from edgespec.compose import build_verifier, connect, load_drafter, load_target, load_tokenizer
from edgespec.config import AgentConfig, VerifierConfig
from edgespec.constraint_readers import device_reader, verifier_reader
from edgespec.core.protocol.constrained_text import ConstrainedText
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.grammar import GrammarReader
from edgespec.ports import PassRequest, TargetModel
from edgespec.targets.sampler import SampleBlock, choose_tokens

NODES = 4
WIDTH = 1024
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps({"type": "array", "items": PERSON, "minItems": 20, "maxItems": 40}),
)
PROMPTS = (
    "def read(path):",
    "Once upon a time",
    "import json\n",
    "The list of people:",
    "class Person:\n    def __init__(self, name, age):",
    "<html>",
    "README",
    "for name in names:",
)


def timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1e3


def shown(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"


def compared(title: str, run: Callable[[int, bool], object], rounds: int) -> None:
    """Without and with, in turn; the first time counts for neither."""
    took: tuple[list[float], list[float]] = ([], [])
    for place in range(rounds + 1):
        times = timed(partial(run, place, False)), timed(partial(run, place, True))
        if place:
            for found, one in zip(took, times, strict=True):
                found.append(one)
    ratio = statistics.median(took[1]) / statistics.median(took[0])
    print(f"  {title}: {ratio:.3f} times; {shown(took[0])} ms without, {shown(took[1])} ms with")


def passes(target: TargetModel, constraint: Constraint, rounds: int) -> None:
    held, plain = SamplingParams(constraint=constraint), SamplingParams()
    encode = load_tokenizer("bundled").encode
    for sessions in (1, 8):
        texts: list[list[int]] = []
        for number in range(sessions):
            prompt = encode(PROMPTS[number])
            tokens = list(prompt)
            target.open("text", len(prompt), held)
            while len(tokens) < len(prompt) + rounds + NODES + 2:
                cached = 0 if len(tokens) == len(prompt) else len(tokens) - 1
                request = PassRequest("text", cached, tuple(tokens[cached:]))
                tokens.append(target.forward([request])[0].targets[0])
            target.close("text")
            texts.append(tokens)
            for name, law in (("held", held), ("plain", plain)):
                key = f"{name}{number}"
                target.open(key, len(prompt), law)
                target.forward([PassRequest(key, 0, tuple(prompt))])
        starts = [len(text) - rounds - NODES - 2 for text in texts]

        def run(place: int, held: bool, texts: Any = texts, starts: Any = starts) -> None:
            batch, name = [], "held" if held else "plain"
            for number, (text, start) in enumerate(zip(texts, starts, strict=True)):
                at = start + place
                nodes = tuple(text[at + 1 : at + 1 + NODES])
                chain = tuple(range(-1, NODES - 1))
                batch.append(PassRequest(f"{name}{number}", at, (text[at],), nodes, chain))
            target.forward(batch)

        compared(f"{sessions} sessions", run, rounds)
        for number in range(sessions):
            target.close(f"held{number}")
            target.close(f"plain{number}")


class Words:
    """A vocabulary of bytes and random words, for llguidance."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)

    def __init__(self, size: int) -> None:
        dice = random.Random(1)
        letters = 'abcdefghijklmnopqrstuvwxyz      {}[]":,0123456789'
        words = {bytes((byte,)): None for byte in range(256)}
        while len(words) < size - 1:
            words["".join(dice.choices(letters, k=dice.randrange(2, 9))).encode()] = None
        self.tokens = [b"<end>", *words]

    def __call__(self, text: bytes | str) -> list[int]:
        return [1 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


def sampling(vocabulary: int, rounds: int) -> None:
    from llguidance import TokenizerWrapper

    words = Words(vocabulary)
    reader = GrammarReader(lambda: TokenizerWrapper(words), tries=False)
    constraint = reader.read(PEOPLE)
    made = torch.Generator().manual_seed(1)
    head = torch.randn(WIDTH, vocabulary, generator=made)
    written = json.dumps([{"name": "ann", "age": 30, "tags": ["new"]}] * 20).encode()
    ids = [1 + byte for byte in written]
    law, chain = SamplingParams(), tuple(range(-1, NODES - 1))
    for sessions in (1, 8):
        rows = sessions * (1 + NODES)
        logits = torch.randn(rows, vocabulary, generator=made)
        hidden = torch.randn(rows, WIDTH, generator=made)
        texts = [ConstrainedText(constraint, (0,)) for _ in range(sessions)]

        def run(place: int, held: bool, texts: Any = texts, logits: Any = logits) -> None:
            blocks = []
            for number, text in enumerate(texts):
                masks: Sequence[bytes | None] = ()
                if held:
                    text.follow(ids[:place])
                    masks = text.masks(ids[place : place + NODES], chain)
                blocks.append(SampleBlock(str(number), law, range(1 + NODES), masks=masks))
            choose_tokens(logits, blocks)

        projection = [timed(partial(torch.matmul, hidden, head)) for _ in range(rounds)]
        print(f"  {sessions} sessions: the projection alone {shown(projection)} ms")
        compared("    sampling", run, rounds)


async def drafts(target: TargetModel, constraint: Constraint, prompts: int) -> None:
    verifier, server = build_verifier(VerifierConfig(model="bundled", port=0), target=target)
    await server.start()
    config, text = AgentConfig(), load_tokenizer("bundled")
    options = AgentOptions(run_ahead=RunAhead.NEVER)
    for temperature in (0.0, 0.8):
        for name, read in (("with the mask", device_reader("bundled")), ("without", None)):
            transport = connect(f"127.0.0.1:{server.port}")
            drafter = load_drafter(config)
            tried = hits = passed = committed = 0
            texts = []
            async with Agent(
                transport, drafter, text.encode, text.stream, options, read_constraint=read
            ) as one:
                for seed, prompt in enumerate(PROMPTS[:prompts]):
                    law = SamplingParams(
                        temperature=temperature, seed=seed, max_tokens=96, constraint=constraint
                    )
                    texts.append("".join([c.text async for c in one.generate(prompt, law)]))
                    assert one.stats is not None
                    found = one.stats.counters
                    tried, hits = tried + found.tried, hits + found.hits
                    passed, committed = passed + found.passes, committed + found.committed
            print(
                f"  temperature {temperature}, {name}: {hits / tried:.3f} of {tried} accepted,"
                f" {committed / passed:.2f} tokens a pass, text {hash(tuple(texts)) & 0xFFFF:04x}"
            )
    await verifier.stop()
    await server.stop(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    args = parser.parse_args()
    print(machine(), versions())
    target = load_target(VerifierConfig(model="bundled", port=0))
    constraint = verifier_reader("bundled")(PEOPLE)
    print(f"pass of the bundled target, {target.info.vocabulary_size} words")
    passes(target, constraint, args.rounds)
    print(f"sampling, {args.vocabulary} words")
    sampling(args.vocabulary, args.rounds)
    print("drafts of the bundled pair")
    asyncio.run(drafts(target, constraint, args.prompts))


if __name__ == "__main__":
    main()
