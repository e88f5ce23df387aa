"""Compare drafts, policies and relaxed rules on the target's own texts, in virtual time.

    EDGESPEC_DATA=... python benchmarks/judge_drafts.py [--draft OLD NEW]
        [--policy windowed,goodput] [--sources model,text,both] [--rtts 20,50]
        [--temperatures 0,0.7] [--tokens 96]
    python benchmarks/judge_drafts.py --rules "typical dsd:0.3" [--arms edgespec,vanilla]
        [--prompts FILE.jsonl]

The target generates each text once. Then every draft, which is run for real, drafts it under every
policy: the model alone, lookup in the text alone, or both in one tree. A pass takes 25 ms and a
step 8 ms, with a tenth more for each further token that is fed, so the machine's load changes no
figure. Texts are played one after another on one device, which keeps its estimates; each line of
the table begins without any. Sets of texts: the bench's built-in prompts, those of the simulator's
tapes, and code, chat and maths of ``EDGESPEC_DATA`` (omitted without it). Times are means over the
texts with 95 % intervals. The speed is 25 ms over that, and the last column is the time over that
of the first row, text by text. The exit status is 1 if a text is not the target's.

With ``--rules`` the bundled draft plays the prompts of a file (by default the tapes') under each of
these rules and the exact one, every step in 8 ms; ``vanilla`` drafts four deep and waits. A line
has the time per token, tokens per pass, the speed over the exact rule, text by text, the share of
tokens that are not the target's own, the target's perplexity of the texts (raw, at temperature 1)
over that of its exact ones, and the number of texts after Python prompts that are valid Python up
to their last whole line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from codeop import compile_command
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from edgespec.bench.arms import Arm, arm_settings
from edgespec.bench.intervals import mean_interval, ratio_interval
from edgespec.bench.prompts import DEFAULT_PROMPTS, read_prompts
from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import VerifierConfig
from edgespec.core.device.estimates import KeptEstimates
from edgespec.core.device.events import Deliver, Finish
from edgespec.core.device.goodput_policy import PolicyName, make_policy
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import Drafter, TargetModel
from edgespec.core.protocol.messages import EXACT_RULE, Limits, Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.build import load_tokenizer
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.toy import SilentDrafter
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.tokenizer import TextTokenizer
from edgespec.verifier.build import load_target
from edgespec_sim.cost_profile import constant_law
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import HopPath
from edgespec_sim.sessions import SimulatedDevice, SimulatedVerifier, Stream
from edgespec_sim.token_sources.match_tape import MatchTape, TapedGeneration
from edgespec_sim.token_sources.source import TapeSource
from edgespec_sim.world.site import Machine
from tests.verifier.torch_schedules import decode_alone

KINDS: Final = ("code", "chat", "maths")
PASS_S: Final = 0.025
STEP_S: Final = 0.008
MODEL, TEXT, BOTH = "model", "text", "both"
_TAPES: Final = Path(__file__).parents[1] / "sim" / "edgespec_sim" / "data/prompts/tapes.jsonl"
_LONGEST_S: Final = 1e5
_LONGEST_PROMPT: Final = 700


@dataclass(frozen=True, slots=True)
class Text:
    """The target's own output for a prompt."""

    prompt: tuple[int, ...]
    said: tuple[int, ...]
    sampling: SamplingParams


@dataclass(slots=True)
class Played:
    """The outcome of a text. As a tracer of its device it also collects the raw log-probability of
    each token."""

    logprobs: list[float] = field(default_factory=list)
    tpot_ms: float = 0.0
    passes: int = 0
    sent: float = 0.0
    """Nodes per token."""
    steps: float = 0.0
    """Draft steps per token."""
    replaced: float = 0.0
    """Share of tokens that are not the target's own."""
    said: tuple[int, ...] = ()

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if isinstance(item, Deliver):
            self.logprobs += [one.logprob for one in item.logprobs]


def texts(folder: Path, kind: str) -> list[str]:
    """Return the prompts of a kind, in the order of their file."""

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
    yield "tapes", [prompt.text for prompt in read_prompts(_TAPES)][:limit]
    folder = Path(os.environ.get("EDGESPEC_DATA", "")) / "prompts"
    if not (folder / "humaneval.jsonl").is_file():
        print(
            f"left out: {folder}/humaneval.jsonl is not to be found, EDGESPEC_DATA names the data"
        )
        return
    for kind in KINDS:
        every = texts(folder, kind)
        yield kind, [every[number * len(every) // limit] for number in range(limit)]


def generate_texts(prompts: Sequence[str], temperature: float, tokens: int) -> list[Text]:
    target, found = load_target(VerifierConfig(canonical=False, threads=1)), list[Text]()
    encode = load_tokenizer("bundled").encode
    for number, text in enumerate(prompts):
        prompt = tuple(encode(text)[:_LONGEST_PROMPT])
        sampling = SamplingParams(temperature, seed=number, max_tokens=tokens, ignore_eos=True)
        answer = decode_alone(target, list(prompt), tokens, sampling)
        found.append(Text(prompt, tuple(answer), sampling))
    return found


def step_s(kept: int, fed: int) -> float:
    """Return the seconds of a step: five tokens take about 1.4 times as long as one; a prompt
    counts as eight."""
    return STEP_S * (0.9 + 0.1 * min(fed, 8))


@dataclass(frozen=True, slots=True)
class Stage:
    """The set-up with which texts are played, one after another."""

    drafter: Drafter
    policy: DraftPolicy
    rtt_s: float
    step_s: Callable[[int, int], float]
    tables: TextTables | None = None
    """Tables for lookup in the text."""
    target: TargetModel | None = None
    """The target; None: a tape of the text, since the exact rule needs no other."""
    rule: str = EXACT_RULE
    run_ahead: RunAhead = RunAhead.AUTO
    learned: KeptEstimates = field(default_factory=KeptEstimates)


def taped(text: Text) -> TargetModel:
    generation = TapedGeneration("text", text.prompt, text.said, (0,) * len(text.said))
    return TapeSource(MatchTape("bundled", "bundled", 1, (generation,))).target()


def play(text: Text, stage: Stage) -> Played:
    target, queue, found = stage.target or taped(text), EventQueue(), Played()
    engine = VerifyEngine(
        target.info, Limits(context_length=1 << 20), EngineLimits(rules=(stage.rule,))
    )
    verifier = SimulatedVerifier(queue, engine, target, Machine(queue, constant_law(PASS_S), ""))
    asked = Open(
        "text",
        "",
        "",
        text.prompt,
        sampling=text.sampling,
        run_ahead=stage.run_ahead,
        rule=stage.rule,
        logprobs=int(stage.target is not None),
    )
    session = DraftSession(
        asked,
        stage.policy,
        ReconnectPolicy(),
        stage.drafter.info.context_length,
        learned=stage.learned,
        text=stage.tables,
    )

    def connect() -> tuple[Stream, float]:
        delay = HopPath(queue, fixed_s=stage.rtt_s / 2)
        verifier.accept(stream := Stream(queue, delay, delay))
        return stream, stage.rtt_s

    device = SimulatedDevice(queue, session, stage.drafter, stage.step_s, connect, found)
    device.start()
    queue.run(until_s=_LONGEST_S)
    times_s, count = device.delivery.times_s, len(device.delivery.tokens)
    if not isinstance(device.delivery.ended, Finish):
        raise RuntimeError(f"the session did not finish: {device.delivery.ended}")
    found.tpot_ms = 1e3 * (times_s[-1] - times_s[0]) / (count - 1)
    counters, found.said = session.counters, tuple(device.delivery.tokens)
    found.sent, found.steps = counters.sent / count, counters.steps / count
    found.passes, found.replaced = counters.passes, counters.replaced / count
    return found


# --- drafts and policies -------------------------------------------------------------------------


def row(found: Sequence[Played], first: Sequence[Played]) -> str:
    """Return the last columns of a line."""
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
    """Print the lines of one set of texts at one temperature; return the number of wrong texts."""
    wrong = 0
    for rtt_ms in map(float, options.rtts.split(",")):
        first: list[Played] = []
        for draft, drafter in drafts.items():
            for policy, source in product(options.policy.split(","), options.sources.split(",")):
                stage = Stage(
                    SilentDrafter(drafter.info) if source == TEXT else drafter,
                    make_policy(PolicyName(policy)),
                    rtt_ms / 1e3,
                    (lambda kept, fed: 0.0) if source == TEXT else step_s,
                    None if source == MODEL else TextTables(ngrams=True),
                )
                found = [play(one, stage) for one in heard]
                first = first or found
                wrong += sum(one.said != text.said for one, text in zip(found, heard, strict=True))
                name = f"{Path(draft).name}, {policy}, {source}"
                print(f"{head} {rtt_ms:g} | {name} | {row(found, first)}", flush=True)
    return wrong


# --- rules ---------------------------------------------------------------------------------------


def is_python(text: str) -> bool:
    """Return whether the text is Python, or the beginning of it."""
    with suppress(SyntaxError, ValueError, OverflowError):
        compile_command(text, symbol="exec")
        return True
    return False


def rule_row(
    found: Sequence[Played], exact: Sequence[Played], prompts: Sequence[tuple[int, ...]]
) -> str:
    decode = TextTokenizer(resolve_source("bundled", Purpose.TARGET).folder).decode
    counts = [[float(len(one.said)) for one in found], [float(one.passes) for one in found]]
    times = [[one.tpot_ms for one in side] for side in (exact, found)]
    shares = [one.replaced for one in found]
    worse = [fmean(b.logprobs) - fmean(a.logprobs) for a, b in zip(found, exact, strict=True)]
    code = [
        is_python(decode([*prompt, *one.said]).rpartition("\n")[0])
        for prompt, one in zip(prompts, found, strict=True)
        if is_python(decode(prompt))
    ]
    cells = [
        (sum(counts[0]) / sum(counts[1]), ratio_interval(*counts)),
        (sum(times[0]) / sum(times[1]), ratio_interval(*times)),
        (fmean(shares), mean_interval(shares)),
        (math.exp(fmean(worse)), [math.exp(one) for one in mean_interval(worse)]),
    ]
    told = [f"{value:.3f} ({low:.3f} to {high:.3f})" for value, (low, high) in cells]
    return " | ".join([f"{fmean(times[1]):.1f}", *told, f"{sum(code)} of {len(code)}"])


def compare_rules(options: Any) -> None:
    target = load_target(VerifierConfig(canonical=False, threads=1))
    drafter = OnnxDrafter(resolve_source("bundled", Purpose.DRAFT).folder, threads=1)
    encode = load_tokenizer("bundled").encode
    prompts = [tuple(encode(one.text)) for one in read_prompts(options.prompts)]
    prompts = [one for one in prompts if len(one) < 400][: options.limit]
    print("| arm | T | RTT | rule | ms | tokens a pass | speed | replaced | perplexity | compile |")
    print("| --- | ---: | ---: | --- | --- | --- | --- | --- | --- | ---: |")
    numbers = (map(float, words.split(",")) for words in (options.temperatures, options.rtts))
    for arm, temperature, rtt_ms in product(options.arms.split(","), *numbers):
        (policy, run_ahead), exact = arm_settings(Arm(arm), 4), list[Played]()
        texts = []
        for seed, prompt in enumerate(prompts):
            law = SamplingParams(temperature, seed=seed, max_tokens=options.tokens, ignore_eos=True)
            texts.append(Text(prompt, (), law))
        for rule in dict.fromkeys((EXACT_RULE, *options.rules.split())):
            stage = Stage(
                drafter,
                policy,
                rtt_ms / 1e3,
                lambda kept, fed: STEP_S,
                target=target,
                rule=rule,
                run_ahead=run_ahead,
            )
            found = [play(text, stage) for text in texts]
            exact = exact or found
            head = f"| {arm} | {temperature:g} | {rtt_ms:g} | {rule}"
            print(f"{head} | {rule_row(found, exact, prompts)} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draft", nargs="+", default=["bundled"], help="bundled, or folders")
    parser.add_argument("--policy", default="windowed,goodput", help="names, with commas")
    parser.add_argument("--sources", default=MODEL, help="model, text, both, with commas")
    parser.add_argument("--rtts", default="20,50", help="milliseconds, with commas")
    parser.add_argument("--temperatures", default="0,0.7", help="with commas")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--limit", type=int, default=24, help="texts of each set")
    parser.add_argument("--rules", default="", help="with spaces between; compare these instead")
    parser.add_argument("--arms", default="edgespec,vanilla", help="of --rules, with commas")
    parser.add_argument("--prompts", type=Path, default=_TAPES, help="of --rules: JSON Lines")
    options = parser.parse_args()
    if unknown := {*options.sources.split(",")} - {MODEL, TEXT, BOTH}:
        parser.error(f"sources: {sorted(unknown)} are unknown; there are {MODEL}, {TEXT}, {BOTH}")
    print(json.dumps({"machine": describe_machine(), "versions": list_versions()}))
    if options.rules:
        compare_rules(options)
        return 0
    drafts = {
        one: OnnxDrafter(resolve_source(one, Purpose.DRAFT).folder, threads=1)
        for one in options.draft
    }
    wrong = 0
    print(
        "| texts | T | RTT | draft, policy | ms a token | speed | nodes | steps | over the first |"
    )
    print("| --- | ---: | ---: | --- | --- | ---: | ---: | ---: | --- |")
    for name, prompts in prompt_sets(options.limit):
        for temperature in map(float, options.temperatures.split(",")):
            heard = generate_texts(prompts, temperature, options.tokens)
            wrong += compare(heard, drafts, options, f"| {name} ({len(heard)}) | {temperature:g} |")
    for drafter in drafts.values():
        drafter.close()
    if wrong:
        print(f"{wrong} texts are not the target's")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
