"""Relaxed acceptance rules beside the exact one: speed over quality, in virtual time.

    python benchmarks/rules.py [--rules "exact typical dsd:0.3"] [--arms edgespec,vanilla]
        [--rtts 20,100] [--temperature 0] [--tokens 96] [--prompts FILE.jsonl] [--limit 24]

The bundled pair runs for real and the clock does not: a pass takes 25 ms and a draft step 8 ms, so
the machine's load changes no figure. Every rule plays the same prompts (by default those of the
simulator's tapes) with the same seeds; ``vanilla`` drafts four deep and waits. A line has the time
a token takes, tokens a pass, the speed over the exact rule, text by text, the share of tokens that
are not the target's own, the target's perplexity of the texts (raw, at temperature 1) over that of
its exact ones, and how many texts behind Python are Python as far as their last whole line.
Intervals are 95 % over texts.
"""

from __future__ import annotations

import argparse
import math
from codeop import compile_command
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final

from edgespec.bench.arms import Arm, arm_settings
from edgespec.bench.measurement import mean_interval, ratio_interval
from edgespec.bench.prompts import read_prompts
from edgespec.config import VerifierConfig
from edgespec.core.device.estimates import Learned
from edgespec.core.device.events import Deliver
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import EXACT_RULE, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.build import load_tokenizer
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.folders import Role, resolve_model
from edgespec.verifier.build import load_target
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.sessions import FixedDelay, PassTime, SimulatedDevice, SimulatedVerifier, Stream

RULES: Final = (
    "exact typical typical:0.3,0.6 top-k:2 top-k:5 margin:0.7 margin:2 dsd:0.8 dsd:0.5 dsd:0.2"
    " bild:1 bild:3"
)
TAPES: Final = Path(__file__).parents[1] / "sim" / "edgespec_sim" / "data/prompts/tapes.jsonl"


@dataclass(slots=True)
class Played:
    """A text, and as its device's tracer the raw log-probability of each token."""

    logprobs: list[float] = field(default_factory=list)
    tpot_s: float = 0.0
    passes: int = 0
    replaced: int = 0
    compiles: bool | None = None
    """None: the prompt is no code."""

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if isinstance(item, Deliver):
            self.logprobs += [one.logprob for one in item.logprobs]


def is_python(text: str) -> bool:
    """Whether it is Python, or begins it."""
    with suppress(SyntaxError, ValueError, OverflowError):
        compile_command(text, symbol="exec")
        return True
    return False


def play(stage: argparse.Namespace, request: Open, learned: Learned) -> Played:
    queue, found = EventQueue(), Played()
    limits, offered = Limits(stage.target.info.context_length), EngineLimits(rules=(request.rule,))
    engine = VerifyEngine(stage.target.info, limits, offered)
    compute = PassTime(queue, lambda batch: 0.025)
    verifier = SimulatedVerifier(queue, engine, stage.target, compute)
    policy, context = stage.arm.policy, stage.drafter.info.context_length
    session = DraftSession(request, policy, ReconnectPolicy(), context, learned=learned)

    def connect() -> tuple[Stream, float]:
        delay = FixedDelay(queue, stage.rtt_s / 2)
        verifier.accept(stream := Stream(queue, delay, delay))
        return stream, stage.rtt_s

    device = SimulatedDevice(queue, session, stage.drafter, lambda kept, fed: 0.008, connect, found)
    device.start()
    queue.run(until_s=1e5)
    said, times_s = device.delivery.tokens, device.delivery.times_s
    if len(said) != request.sampling.max_tokens or len(said) != len(found.logprobs):
        raise RuntimeError(f"the text did not end: {device.delivery.ended}")
    found.tpot_s = (times_s[-1] - times_s[0]) / (len(said) - 1)
    found.passes, found.replaced = session.counters.passes, session.counters.replaced
    if is_python(stage.text.decode(request.prompt)):
        found.compiles = is_python(stage.text.decode([*request.prompt, *said]).rpartition("\n")[0])
    return found


def row(found: Sequence[Played], exact: Sequence[Played]) -> str:
    counts = [[float(len(one.logprobs)) for one in found], [float(one.passes) for one in found]]
    times = [[one.tpot_s for one in side] for side in (exact, found)]
    shares = [one.replaced / len(one.logprobs) for one in found]
    worse = [fmean(b.logprobs) - fmean(a.logprobs) for a, b in zip(found, exact, strict=True)]
    code = [one.compiles for one in found if one.compiles is not None]
    cells = [
        (sum(counts[0]) / sum(counts[1]), ratio_interval(*counts)),
        (sum(times[0]) / sum(times[1]), ratio_interval(*times)),
        (fmean(shares), mean_interval(shares)),
        (math.exp(fmean(worse)), [math.exp(one) for one in mean_interval(worse)]),
    ]
    told = [f"{value:.3f} ({low:.3f} to {high:.3f})" for value, (low, high) in cells]
    pace = f"{1e3 * fmean(times[1]):.1f}"
    return " | ".join([pace, *told, f"{sum(code)} of {len(code)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rules", default=RULES, help="with spaces between")
    parser.add_argument("--arms", default="edgespec,vanilla", help="with commas")
    parser.add_argument("--rtts", default="20,100", help="milliseconds, with commas")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompts", type=Path, default=TAPES, help="a JSON Lines file")
    parser.add_argument("--limit", type=int, default=24, help="texts")
    options = parser.parse_args()
    options.target = load_target(VerifierConfig(canonical=False, threads=1))
    options.drafter = OnnxDrafter(resolve_model("bundled", Role.DRAFT), threads=1)
    options.text = load_tokenizer("bundled")
    prompts = [tuple(options.text.encode(one.text)) for one in read_prompts(options.prompts)]
    prompts = [one for one in prompts if len(one) < 400][: options.limit]
    print("| arm | RTT | rule | ms | tokens a pass | speed | replaced | perplexity | compile |")
    print("| --- | ---: | --- | ---: | --- | --- | --- | --- | ---: |")
    for arm, rtt_ms in product(options.arms.split(","), map(float, options.rtts.split(","))):
        options.arm, options.rtt_s = arm_settings(Arm(arm), 4), rtt_ms / 1e3
        exact: list[Played] = []
        for rule in dict.fromkeys((EXACT_RULE, *options.rules.split())):
            learned, found = Learned(), list[Played]()
            for seed, prompt in enumerate(prompts):
                sampling = SamplingParams(
                    options.temperature, seed=seed, max_tokens=options.tokens, ignore_eos=True
                )
                ahead = options.arm.run_ahead
                asked = Open("s", "", "", prompt, (), sampling, ahead, rule, logprobs=1)
                found.append(play(options, asked, learned))
            exact = exact or found
            print(f"| {arm} | {rtt_ms:g} | {rule} | {row(found, exact)} |", flush=True)


if __name__ == "__main__":
    main()
