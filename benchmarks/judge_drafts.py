"""Drafts and policies beside one another on the target's own texts, in virtual time.

    EDGESPEC_DATA=... python benchmarks/judge_drafts.py [--draft OLD NEW]
        [--policy windowed,goodput] [--sources model,text,both] [--rtts 20,50]
        [--temperatures 0,0.7] [--tokens 96]

The target says each text once; then every draft, which is run for real, drafts it under every
policy: the model alone, guesses from the text alone, or both in one tree. A pass takes 25 ms and a
step 8 ms, with a tenth more for each further token that is fed, so the machine's load changes no
figure. Texts are played one after another on one device, which keeps what it has learned: a line of
the table begins with nothing. Sets of texts: the bench's built-in prompts, those of the simulator's
tapes, and code, chat and maths of ``EDGESPEC_DATA`` (left out without it). Times are means over the
texts with 95 % intervals; the speed is 25 ms over that, and the last column the time over that of
the first row, text by text. Exits 1 if a text is not the target's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from edgespec.bench.measurement import mean_interval, ratio_interval
from edgespec.bench.prompts import DEFAULT_PROMPTS, read_prompts
from edgespec.bench.report import machine, versions
from edgespec.config import VerifierConfig
from edgespec.core.device.estimates import Learned
from edgespec.core.device.events import Finish
from edgespec.core.device.goodput_policy import PolicyName, named_policy
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_guesses import TextTables
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.build import load_tokenizer
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.toy import SilentDrafter
from edgespec.models.folders import Role, resolve_model
from edgespec.telemetry.cost_profile import constant
from edgespec.telemetry.match_tape import MatchTape, TapedGeneration
from edgespec.verifier.build import load_target
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.sessions import FixedDelay, SimulatedDevice, SimulatedVerifier, Stream
from edgespec_sim.token_sources.source import TapeSource
from edgespec_sim.world.site import Machine
from tests.shell.torch_schedules import decode_alone

KINDS: Final = ("code", "chat", "maths")
PASS_S: Final = 0.025
STEP_S: Final = 0.008
MODEL, TEXT, BOTH = "model", "text", "both"
_TAPES: Final = Path(__file__).parents[1] / "sim" / "edgespec_sim" / "data" / "prompts"
_LONGEST_S: Final = 1e5
_LONGEST_PROMPT: Final = 700


@dataclass(frozen=True, slots=True)
class Text:
    """What the target says to a prompt."""

    prompt: tuple[int, ...]
    said: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Played:
    tpot_ms: float
    sent: float
    """Nodes a token."""
    steps: float
    """Draft steps a token."""
    pass_tokens: float
    """Tokens a pass."""
    wasted: float
    """Nodes a token that were sent and verified in vain."""
    exact: bool


def texts(folder: Path, kind: str) -> list[str]:
    """The prompts of a kind, in the order of their file."""

    def rows(name: str) -> Iterator[dict[str, Any]]:
        with (folder / name).open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    match kind:
        case "code":
            return [row["prompt"] for row in rows("humaneval.jsonl")]
        case "chat":
            return [row["turns"][0] for row in rows("mt_bench.jsonl")]
        case _:
            return [row["question"] for row in rows("gsm8k_test.jsonl")]


def prompt_sets(limit: int) -> Iterator[tuple[str, list[str]]]:
    yield "built-in", [prompt.text for prompt in DEFAULT_PROMPTS][:limit]
    yield "tapes", [prompt.text for prompt in read_prompts(_TAPES / "tapes.jsonl")][:limit]
    folder = Path(os.environ.get("EDGESPEC_DATA", "")) / "prompts"
    if not (folder / "humaneval.jsonl").is_file():
        print(
            f"left out: {folder}/humaneval.jsonl is not to be found, EDGESPEC_DATA names the data"
        )
        return
    for kind in KINDS:
        every = texts(folder, kind)
        yield kind, [every[number * len(every) // limit] for number in range(limit)]


def said(prompts: Sequence[str], temperature: float, tokens: int) -> list[Text]:
    encode = load_tokenizer("bundled").encode
    return said_behind(
        [tuple(encode(text)[:_LONGEST_PROMPT]) for text in prompts], temperature, tokens
    )


def said_behind(prompts: Sequence[tuple[int, ...]], temperature: float, tokens: int) -> list[Text]:
    target, found = load_target(VerifierConfig(canonical=False, threads=1)), list[Text]()
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature, seed=number, max_tokens=tokens, ignore_eos=True)
        answer = decode_alone(target, prompt, tokens, sampling)
        found.append(Text(prompt, tuple(answer), sampling))
    return found


def step_s(kept: int, fed: int) -> float:
    """Five tokens take about 1.4 times as long as one; a prompt counts as eight."""
    return STEP_S * (0.9 + 0.1 * min(fed, 8))


def play(
    text: Text,
    drafter: OnnxDrafter,
    policy: DraftPolicy,
    rtt_s: float,
    learned: Learned,
    said: TextTables | None,
    *,
    model: bool = True,
) -> Played:
    count = len(text.said)
    taped = TapedGeneration("text", text.prompt, text.said, (0,) * count)
    target = TapeSource(MatchTape("bundled", "bundled", 1, (taped,))).target()
    queue = EventQueue()
    engine = VerifyEngine(
        target.info, Limits(context_length=1 << 20), EngineLimits(server_drafts=False)
    )
    verifier = SimulatedVerifier(queue, engine, target, Machine(queue, constant(PASS_S), ""))
    session = DraftSession(
        Open("text", "", "", text.prompt, sampling=text.sampling),
        policy,
        ReconnectPolicy(),
        drafter.info.context_length,
        learned=learned,
        text=said,
    )

    def connect() -> tuple[Stream, float]:
        stream = Stream(queue, FixedDelay(queue, rtt_s / 2), FixedDelay(queue, rtt_s / 2))
        verifier.accept(stream)
        return stream, rtt_s

    device = SimulatedDevice(
        queue,
        session,
        drafter if model else SilentDrafter(drafter.info),
        step_s if model else lambda kept, fed: 0.0,
        connect,
    )
    device.start()
    queue.run(until_s=_LONGEST_S)
    found, counters = device.delivery, session.counters
    if not isinstance(found.ended, Finish):
        raise RuntimeError(f"the session did not finish: {found.ended}")
    return Played(
        1e3 * (found.times_s[-1] - found.times_s[0]) / (count - 1),
        counters.sent / count,
        counters.steps / count,
        counters.committed / counters.passes,
        counters.wasted / count,
        tuple(found.tokens) == text.said,
    )


def row(found: Sequence[Played], first: Sequence[Played]) -> str:
    """The last columns of a line."""
    times, base = [one.tpot_ms for one in found], [one.tpot_ms for one in first]
    (low, high), (least, most) = mean_interval(times), ratio_interval(times, base)
    mean = fmean(times)
    return (
        f"{mean:.2f} ({low:.2f} to {high:.2f}) | {1e3 * PASS_S / mean:.2f} |"
        f" {fmean(one.sent for one in found):.2f} | {fmean(one.steps for one in found):.2f} |"
        f" {mean / fmean(base):.3f} ({least:.3f} to {most:.3f}) |"
    )


def compare(
    heard: Sequence[Text], drafts: Mapping[str, OnnxDrafter], options: Any, head: str
) -> int:
    """Print the lines of one set of texts at one temperature; the number of wrong texts."""
    wrong = 0
    for rtt_ms in map(float, options.rtts.split(",")):
        first: list[Played] = []
        for draft, drafter in drafts.items():
            for policy, source in product(options.policy.split(","), options.sources.split(",")):
                learned, chosen = Learned(), named_policy(PolicyName(policy))
                said = None if source == MODEL else TextTables(ngrams=True)
                found = [
                    play(one, drafter, chosen, rtt_ms / 1e3, learned, said, model=source != TEXT)
                    for one in heard
                ]
                first = first or found
                wrong += sum(not one.exact for one in found)
                name = f"{Path(draft).name}, {policy}, {source}"
                print(f"{head} {rtt_ms:g} | {name} | {row(found, first)}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draft", nargs="+", default=["bundled"], help="bundled, or folders")
    parser.add_argument("--policy", default="windowed,goodput", help="names, with commas")
    parser.add_argument("--sources", default=MODEL, help="model, text, both, with commas")
    parser.add_argument("--rtts", default="20,50", help="milliseconds, with commas")
    parser.add_argument("--temperatures", default="0,0.7", help="with commas")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--limit", type=int, default=24, help="texts of each set")
    options = parser.parse_args()
    if unknown := {*options.sources.split(",")} - {MODEL, TEXT, BOTH}:
        parser.error(f"sources: {sorted(unknown)} are unknown; there are {MODEL}, {TEXT}, {BOTH}")
    print(json.dumps({"machine": machine(), "versions": versions()}))
    drafts = {one: OnnxDrafter(resolve_model(one, Role.DRAFT), threads=1) for one in options.draft}
    wrong = 0
    print(
        "| texts | T | RTT | draft, policy | ms a token | speed | nodes | steps | over the first |"
    )
    print("| --- | ---: | ---: | --- | --- | ---: | ---: | ---: | --- |")
    for name, prompts in prompt_sets(options.limit):
        for temperature in map(float, options.temperatures.split(",")):
            heard = said(prompts, temperature, options.tokens)
            wrong += compare(heard, drafts, options, f"| {name} ({len(heard)}) | {temperature:g} |")
    for drafter in drafts.values():
        drafter.close()
    if wrong:
        print(f"{wrong} texts are not the target's")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
