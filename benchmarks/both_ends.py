"""Check that a text is the target's own whatever both ends draft.

    PYTHONPATH=. python benchmarks/both_ends.py [--texts 1000]
    PYTHONPATH=. vllm-env/bin/python benchmarks/both_ends.py --vllm draft_model pard [--texts 200]

The models are the bundled pair, behind the real daemon. Oracle: the target by itself, one token per
pass, without engine, daemon and drafts. Each *world* is a verifier with a draft model, small caches
and many sessions at once; devices and draft model are right, wrong, late, failing or all of it by
turns. ``--texts`` is the number of texts for each of the ten rows (five kinds of drafters, greedy
and sampled). A text that differs, and a row in which one end drafts nothing, are findings: the exit
status is 1. With ``--vllm NAME ...`` the target is vLLM with a speculator of its own, one after the
other (``tests/verifier/speculators.py``). Its proposals get lost where a draft model would fail,
texts have no grammars, and the oracle is the native target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast
from unittest import mock

from edgespec.config import AgentConfig, DraftSection, PolicyName, VerifierConfig
from edgespec.config.verifier import LimitsSection
from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.ports import (
    MAX_CACHES,
    Cancelled,
    Drafter,
    TargetModel,
    make_twin,
    never_cancelled,
)
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import Limits, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.protocol.work import (
    CacheShape,
    Candidate,
    DraftStep,
    PassRequest,
    PassResult,
)
from edgespec.core.verifier.draft_round import RoundTimes
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.row_price import RowPriceEstimator
from edgespec.core.verifier.server_model import DraftTimes
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import load_drafter, load_tokenizer
from edgespec.models.grammar import device_grammar_reader, target_grammar_reader
from edgespec.testing import LoopbackTransport
from edgespec.verifier.build import load_server_drafter, load_target
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.packed_drafter import DraftModel, PackedDrafter
from edgespec.verifier.vllm.core import VllmCore
from edgespec.verifier.vllm.target import VllmTarget
from tests.adversarial import WrappedDrafter
from tests.api.test_end_to_end import PROMPTS
from tests.kit.live_verifier import wait_until
from tests.present import require
from tests.verifier.speculators import SPECULATORS, write_speculator

AT_ONCE = 50
SERVED = VerifierConfig(
    draft="bundled", device="cpu", limits=LimitsSection(max_cached_tokens=2048, max_sessions=64)
)


def serve_on_vllm(speculator: str, folder: Path) -> VerifierConfig:
    """Return ``SERVED`` on vLLM with a speculator, whose files are written to ``folder``."""
    settings = write_speculator(speculator, folder / speculator, 4)
    flags = ("--enforce-eager", "--kv-cache-memory-bytes", "200000000")
    return replace(
        SERVED,
        draft="",
        device="auto",
        engine="vllm",
        max_model_len=256,
        engine_flags=(*flags, "--speculative-config", json.dumps(settings)),
    )


FIELDS = {"n": {"type": "integer"}, "s": {"type": "string"}}
OBJECT = {"type": "object", "properties": FIELDS, "required": ["n", "s"]}
GRAMMARS = (
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(OBJECT)),
    Constraint(ConstraintKind.REGEX, "[a-z ]{10,60}"),
)
KINDS = ("right", "wrong", "late", "mixed", "failing")
DEVICES = {kind: KINDS if kind == "mixed" else (kind,) for kind in KINDS}
Case = tuple[list[int], SamplingParams]
HASTY = ReconnectPolicy(first_s=0.01, longest_s=0.05, give_up_first_s=60.0, give_up_s=60.0)
TEXT, READER = load_tokenizer("bundled"), target_grammar_reader("bundled")


class Mood:
    """The treatment of a drafter's guesses; one that fails does so after some steps."""

    def __init__(self, kind: str, dice: random.Random) -> None:
        self.kind, self.dice = kind, dice
        self.begin()

    def begin(self) -> None:
        self._left = self.dice.randrange(10, 60) if self.kind == "failing" else 1 << 30

    def of(self, found: Sequence[Candidate | None], size: int) -> list[Candidate | None]:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("out of memory")
        if self.kind == "late":
            threading.Event().wait(0.004)
        return [None if one is None else self._spoil_one(one, size) for one in found]

    def _spoil_one(self, guess: Candidate, size: int) -> Candidate | None:
        kind = self.dice.choice(("right", "wrong", "")) if self.kind == "mixed" else self.kind
        if kind == "wrong":
            return Candidate(self.dice.randrange(size), guess.logprob)
        return guess if kind else None


class MoodyDrafter(WrappedDrafter):
    def __init__(self, inner: Drafter, mood: Mood) -> None:
        super().__init__(inner)
        self._mood = mood

    def twin(self) -> Drafter:
        return MoodyDrafter(make_twin(self.inner), Mood(self._mood.kind, self._mood.dice))

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._mood.begin()
        super().begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        found = super().step(keep_length, feed, width, cancelled)
        guesses = self._mood.of(found, self.info.vocabulary_size)
        return tuple({one.token: one for one in guesses if one is not None}.values())


class MoodyServerDrafter(PackedDrafter):
    def __init__(self, model: DraftModel, mood: Mood) -> None:
        super().__init__(model)
        self._mood = mood

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        found = [self._mood.of(one, self.info.vocabulary_size) for one in super().step(batch)]
        return [tuple([guess for guess in one if guess is not None]) for one in found]

    def close_all(self) -> None:
        for key in [*self._sequences]:
            self.close(key)


class MoodyTarget:
    """A vLLM target with a speculator of its own, whose proposals may get lost."""

    def __init__(self, inner: TargetModel, mood: Mood) -> None:
        self._inner, self._mood = inner, mood

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        return [
            replace(one, guesses=self._guesses(one.guesses)) for one in self._inner.forward(batch)
        ]

    def _guesses(self, proposed: tuple[int, ...]) -> tuple[int, ...]:
        size = self._inner.info.vocabulary_size
        try:
            found = self._mood.of([Candidate(token, 0.0) for token in proposed], size)
        except RuntimeError:
            self._mood.begin()
            return ()
        return tuple(one.token for one in found if one is not None)


def law(dice: random.Random, greedy: bool) -> SamplingParams:
    some: dict[str, Any] = {"max_tokens": dice.randrange(20, 29), "ignore_eos": dice.random() < 0.5}
    if not greedy:
        nucleus = dice.choice((True, False))
        some |= {"temperature": 0.7 if nucleus else 1.0, "top_p": 0.9 if nucleus else 1.0}
        some["seed"] = dice.getrandbits(40)
    if dice.random() < 0.25:
        some |= {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    if dice.random() < 0.2:
        some["logit_bias"] = {dice.randrange(400): dice.uniform(-3.0, 3.0) for _ in range(9)}
    if dice.random() < 0.2:
        some["stop_token_ids"] = tuple(dice.sample(range(400), 12))
    if dice.random() < 0.15:
        some |= {"constraint": dice.choice(GRAMMARS), "ignore_eos": False}
    return SamplingParams(**some)


def alone(target: TargetModel, cases: Sequence[Case]) -> list[list[int]]:
    """Compute the oracle: all these texts, one token of each per pass."""
    texts: list[list[int]] = [[] for _ in cases]
    feeds = {at: tuple(prompt) for at, (prompt, _) in enumerate(cases)}
    for at, (prompt, params) in enumerate(cases):
        if params.constraint is not None:
            params = replace(params, constraint=READER(params.constraint))
        target.open(str(at), len(prompt), params)
    cached = dict.fromkeys(feeds, 0)
    while feeds:
        batch = [PassRequest(str(at), cached[at], feed) for at, feed in feeds.items()]
        for at, result in zip([*feeds], target.forward(batch), strict=True):
            (token,), params = result.targets, cases[at][1]
            texts[at].append(token)
            cached[at] += len(feeds[at])
            feeds[at] = (token,)
            ends = token in target.info.eos_token_ids and not params.ignore_eos
            if ends or token in params.stop_token_ids or len(texts[at]) == params.max_tokens:
                del feeds[at]
                target.close(str(at))
    return texts


class Models(NamedTuple):
    oracle: TargetModel
    target: TargetModel
    draft: DraftModel | None
    """The draft model; None if the target has a speculator of its own."""
    may_be_silent: bool = False
    """True for n-grams, which propose nothing in a short text that repeats nothing."""


async def play(
    models: Models, kind: str, dice: random.Random, cases: Sequence[Case]
) -> tuple[list[list[int]], VerifyEngine]:
    """Play one world; return its texts and the engine."""
    target, mood, drafter = models.target, Mood(kind, dice), None
    blocks, server_drafts = dice.choice((64, 128)), dice.random() < 0.5
    if models.draft is None:
        shape = target.pass_shape
        limits = EngineLimits(
            trees=shape.trees,
            speculator_tokens=shape.speculator_tokens,
            speculator_blocks=shape.speculator_blocks,
            server_drafts=server_drafts,
        )
        target = cast(TargetModel, MoodyTarget(target, mood))
    else:
        drafter = MoodyServerDrafter(models.draft, mood)
        limits = EngineLimits(
            cache=CacheShape(blocks, 16), drafter=True, server_drafts=server_drafts
        )
    # a reader of its own, which the verifier closes when it stops
    read = target_grammar_reader("bundled")
    verifier = Verifier(
        target, Limits(context_length=256), limits, read_constraint=read, drafter=drafter
    )
    transport = LoopbackTransport(verifier.serve, lambda: verifier.info)
    agents = [device(transport, one, dice) for one in (*DEVICES[kind], "")]

    async def text(agent: Agent, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        return [t async for chunk in agent.generate(prompt, params) for t in chunk.tokens]

    found = [
        asyncio.create_task(text(agents[i % len(agents)], *case)) for i, case in enumerate(cases)
    ]
    if kind == "mixed":
        await asyncio.wait(found, return_when=asyncio.FIRST_COMPLETED)
        transport.cut()
    texts = await asyncio.gather(*found)
    for agent in agents:
        await agent.close()
    await wait_until(lambda: not (verifier.engine.sessions or verifier.engine.running))
    await verifier.stop()
    if drafter is not None:
        drafter.close_all()
    return texts, verifier.engine


@cache
def load_bundled() -> Drafter:
    """Return the bundled draft, of which each device gets a twin."""
    return require(load_drafter(AgentConfig(draft=DraftSection("bundled", threads=1))))


def device(transport: LoopbackTransport, kind: str, dice: random.Random) -> Agent:
    """Make a device's agent; without a ``kind`` it only streams."""
    drafter = None
    if kind:
        drafter = MoodyDrafter(make_twin(load_bundled()), Mood(kind, dice))
    name = dice.choice((PolicyName.FIXED, PolicyName.WINDOWED))
    options = AgentOptions(
        policy=make_policy(name, 3) if name is PolicyName.FIXED else make_policy(name, width=2),
        run_ahead=dice.choice((RunAhead.AUTO, RunAhead.ALWAYS)),
        reconnect=HASTY,
        draft_caches=MAX_CACHES,
        text_tables=TextTables(ngrams=True) if dice.random() < 0.5 else None,
    )
    read = (
        device_grammar_reader("bundled") if dice.random() < 0.5 else None
    )  # otherwise drafts break grammars
    return Agent(transport, drafter, TEXT.encode, TEXT.stream, options, read_constraint=read)


def cases_of(greedy: bool, texts: int) -> Iterator[list[Case]]:
    """Yield the cases of a world, the same for every row, so that the oracle runs once."""
    dice = random.Random(greedy)
    prompts = [TEXT.encode(prompt) for prompt in PROMPTS]
    for first in range(0, texts, AT_ONCE):
        yield [
            (
                # A prompt that repeats itself gives n-grams something to propose.
                dice.choice(prompts) * dice.randrange(1, 3)
                + dice.choices(range(400), k=dice.randrange(3)),
                law(dice, greedy),
            )
            for _ in range(min(AT_ONCE, texts - first))
        ]


def cases_with_texts(
    models: Models, greedy: bool, texts: int, known: dict[bool, list[list[list[int]]]]
) -> Iterator[tuple[list[Case], list[list[int]]]]:
    """Yield the cases of each world with the oracle's texts, which are kept in ``known``."""
    worlds = known.setdefault(greedy, [])
    for number, cases in enumerate(cases_of(greedy, texts)):
        if models.draft is None:
            cases = [(prompt, replace(params, constraint=None)) for prompt, params in cases]
        if number == len(worlds):
            half = AT_ONCE // 2
            found = alone(models.oracle, cases[:half]) + alone(models.oracle, cases[half:])
            worlds.append(found)
        yield cases, worlds[number]


async def findings(
    models: Models, greedy: bool, texts: int, known: dict[bool, list[list[list[int]]]]
) -> list[str]:
    dice, counts, found = random.Random(7), dict[str, Counter[str]](), list[str]()
    for cases, expected in cases_with_texts(models, greedy, texts, known):
        for kind in KINDS:
            said, engine = await play(models, kind, dice, cases)
            for mine, theirs, case in zip(said, expected, cases, strict=True):
                if mine != theirs:
                    found.append(f"{kind}: another text of {case}")
                    print(found[-1], flush=True)
            of = engine.draft_counts
            counts.setdefault(kind, Counter()).update(
                texts=len(said), device=of.device.nodes, model=of.model.nodes, text=of.text.nodes
            )
    for kind, count in counts.items():
        print(f"{'greedy' if greedy else 'sampled'}, {kind}: {dict(count)}", flush=True)
        if not (count["device"] and (count["model"] or models.may_be_silent)):
            found.append(f"{kind}: one end drafted nothing")
            print(found[-1], flush=True)
    return found


def start_models(target: TargetModel, speculators: Sequence[str]) -> Iterator[tuple[str, Models]]:
    """Yield the models of each campaign, with its name."""
    if not speculators:
        drafter = load_server_drafter(SERVED, target)
        assert isinstance(drafter, PackedDrafter)
        yield "bundled draft", Models(target, target, drafter._model)
    for name in speculators:
        with TemporaryDirectory() as folder:
            served = load_target(serve_on_vllm(name, Path(folder)))
            assert isinstance(served, VllmTarget)
            core = served._engine
            assert isinstance(core, VllmCore)
            yield name, Models(target, served, None, may_be_silent=name == "ngram")
            core.shut_down()


def main() -> int:
    """Run all rows. Steps and rows are made to seem cheap, so that everything is drafted on any
    machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=1000, help="of each row")
    parser.add_argument(
        "--vllm",
        nargs="+",
        choices=SPECULATORS,
        default=[],
        help="the target is vLLM with these speculators; ngram has to be the last",
    )
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    target, known = load_target(SERVED), dict[bool, list[list[list[int]]]]()
    cheap = RoundTimes(1.0, 0.05, 0.0, 0.0, 512)
    total = 0
    with (
        mock.patch.object(DraftTimes, "round_times", return_value=cheap),
        mock.patch.object(RowPriceEstimator, "bare_pass_s", 1.0),
        mock.patch.object(RowPriceEstimator, "waiting_per_decoding", 1.0),
        mock.patch.object(RowPriceEstimator, "least_chance", 0.02),
        mock.patch.object(RowPriceEstimator, "least_lookup_chance", 0.02),
    ):
        for name, models in start_models(target, args.vllm):
            began_s = time.process_time()
            found = [
                line
                for greedy in (True, False)
                for line in asyncio.run(findings(models, greedy, args.texts, known))
            ]
            total += len(found)
            result = f"{len(found)} findings" if found else f"{10 * args.texts} texts, none differs"
            used_s = time.process_time() - began_s
            print(f"{name}: {result}, {used_s:.0f} s of processor time", flush=True)
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
