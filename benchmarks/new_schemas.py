"""How long a text waits for its constraint when nobody has asked for that one before.

    python benchmarks/new_schemas.py [--rounds 15] [--vocabulary 151936] [--no-verifier]

Wall-clock milliseconds, median (lowest to highest). *Read*: what a verifier does with a new JSON
schema, or with a grammar as forced tool calls have them, in the bundled vocabulary and in one of
``--vocabulary`` words; with *hostile*, beside a schema that never ends. *First token*: of a
verifier process with the bundled target, over gRPC, from the question to the first token, without
a schema, with one that it knows and with a new one, in turn; the device reads none itself. To
compare two trees run both with their own ``PYTHONPATH``, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from load_processes import ready_verifier

from edgespec.agent.agent import Agent
from edgespec.benchmark.report import machine, versions
from edgespec.compose import connect, load_tokenizer
from edgespec.constraint_readers import verifier_reader
from edgespec.core.protocol.constraint import Constraint, ConstraintError, ConstraintKind
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.grammar import GrammarReader

dice = random.Random()
ENDLESS = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps({"allOf": [{"type": "string", "pattern": f".*a{n}.*"} for n in range(30)]}),
)


def schema() -> Constraint:
    """An ordinary one, which nobody has seen."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": dice.randrange(8, 10**6)},
            "age": {"type": "integer", "minimum": 0, "maximum": dice.randrange(99, 10**6)},
            "mail": {"type": "string", "pattern": "^[a-z]{1,16}@[a-z]{1,16}\\.org$"},
            "tags": {"type": "array", "items": {"enum": ["new", "old", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "age", "mail", "tags"],
        "additionalProperties": False,
    }
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "array", "items": person}))


def call() -> Constraint:
    """A forced tool call in Qwen's format."""
    rule = f'start: "<tool_call>\\n" "{{\\"name\\": \\"f{dice.randrange(10**6)}\\", " arguments'
    lines = (rule, 'arguments: %json {"type": "object", "properties": {"a": {"type": "integer"}}}')
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(lines))


def words(size: int) -> str:
    """A tokenizer.json with random words, as large as that of a large model."""
    letters = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
    vocabulary = {letter: place for place, letter in enumerate(letters[:256])}
    draw = random.Random(1)
    while len(vocabulary) < size - 1:
        word = "".join(draw.choices(letters[32:90], k=draw.randrange(2, 9)))
        vocabulary.setdefault(word, len(vocabulary))
    end = {"id": size - 1, "content": "<|im_end|>", "special": True, "normalized": False}
    end |= {"single_word": False, "lstrip": False, "rstrip": False}
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return json.dumps(
        {"added_tokens": [end], "pre_tokenizer": levels, "decoder": levels, "model": model}
    )


def took_ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def shown(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})"


def reads(title: str, reader: GrammarReader, rounds: int) -> None:
    first = took_ms(getattr(reader, "get_ready", lambda: None))
    second = took_ms(partial(reader.read, schema()))
    print(f"{title}: made ready in {first:.0f} ms, first schema {second:.0f} ms")
    kinds: dict[str, Callable[[], Constraint]] = {"schema": schema, "tool call": call}
    reader.read(call())
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, made in kinds.items():
            times[name].append(took_ms(partial(reader.read, made())))
    for name, found in times.items():
        print(f"  read a new {name}: {shown(found)}")
    hostile = threading.Thread(target=_until_refused, args=(reader,), daemon=True)
    hostile.start()
    beside = [took_ms(partial(reader.read, schema())) for _ in range(rounds)]
    print(f"  read a new schema, hostile: {shown(beside)}; it still ran: {hostile.is_alive()}")
    getattr(reader, "close", lambda: None)()


def _until_refused(reader: GrammarReader) -> None:
    try:
        reader.read(ENDLESS)
    except ConstraintError:
        pass


async def first_tokens(rounds: int) -> None:
    process, port = await ready_verifier("--model", "bundled", "--port", "0")
    text = load_tokenizer("bundled")
    known = schema()
    arms: dict[str, Callable[[], Constraint | None]] = {
        "without a schema": lambda: None,
        "with a known one": lambda: known,
        "with a new one": schema,
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    try:
        async with Agent(connect(f"127.0.0.1:{port}"), None, text.encode, text.stream) as agent:
            for place in range(rounds + 1):
                for name, made in arms.items():
                    took = await _first_ms(agent, made())
                    if place:
                        times[name].append(took)
                    elif made is schema:
                        print(f"first token with the first schema of all: {took:.0f}")
    finally:
        process.terminate()
        await process.wait()
    for name, found in times.items():
        print(f"first token {name}: {shown(found)}")


async def _first_ms(agent: Agent, constraint: Constraint | None) -> float:
    law, began = SamplingParams(max_tokens=2, constraint=constraint), time.perf_counter()
    first: float | None = None
    async for chunk in agent.generate("The list of people: ", law):
        if first is None and chunk.tokens:
            first = time.perf_counter() - began
    assert first is not None
    return first * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--no-verifier", action="store_true")
    args = parser.parse_args()
    print(machine(), versions())
    bundled: Any = verifier_reader("bundled")
    reads("bundled", getattr(bundled, "__self__", bundled), args.rounds)
    tokenizer = words(args.vocabulary)
    reads(f"{args.vocabulary} words", GrammarReader(lambda: tokenizer), args.rounds)
    if not args.no_verifier:
        asyncio.run(first_tokens(args.rounds))


if __name__ == "__main__":
    main()
