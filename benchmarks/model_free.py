"""What a drafter without a model brings a device, alone and beside the bundled draft.

    EDGESPEC_DATA=... python benchmarks/model_free.py [--tapes DIR] [--limit 6] [--rtts 20,50,200]

The bundled target says real texts to prompts of four kinds (code, summaries, chat, maths), greedy
and at temperature 0.7, and the bundled draft walks along them; with ``--tapes`` that is recorded
once. Then the product's own sessions play every text in virtual time: a pass takes 25 ms, a step of
the model 8 ms and 0.8 ms for each further token it is fed, a lookup 0.2 ms. So tokens, passes and
times are exact whatever this machine does meanwhile. A device keeps its drafter from one text of a
kind to the next. Prints medians over the texts, with the lowest and the highest. Exits 1 if a text
is not the target's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from edgespec.benchmark.report import machine, versions
from edgespec.benchmark.tape_recorder import tape_about
from edgespec.compose import load_drafter, load_target, load_tokenizer
from edgespec.config import AgentConfig, DraftSection, VerifierConfig
from edgespec.core.device.events import Finish
from edgespec.core.device.policy_names import default_policy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.drafters.model_free import ModelFreeDrafter
from edgespec.drafters.routed import RoutedDrafter
from edgespec.ports import (
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    TargetModel,
    never_cancelled,
)
from edgespec.telemetry.match_tape import (
    MatchTape,
    TapedGeneration,
    ranks_along,
    read_tape,
    write_tape,
)
from edgespec_sim.actors.device import SimulatedDevice
from edgespec_sim.actors.server import PassTime, SimulatedVerifier
from edgespec_sim.actors.stream import FixedDelay, Stream
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.token_sources.scripted_models import ScriptError
from edgespec_sim.token_sources.source import Request
from edgespec_sim.token_sources.tape import TapeSource

TEMPERATURES: Final = (0.0, 0.7)
KINDS: Final = ("code", "summaries", "chat", "maths")
ARMS: Final = ("none", "model", "lookup", "routed")
WIDTH: Final = 4
_LONGEST_S: Final = 1e5


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of what the models do."""

    pass_s: float
    row_s: float
    step_s: float
    more_s: float
    """Of each token that a step of the model is fed beyond the first."""
    lookup_s: float


@dataclass(frozen=True, slots=True)
class Played:
    tpot_s: float
    tokens_per_pass: float
    accepted: float
    """Share of the positions with a guess at which the first one was right."""
    accepted_tokens: float
    """Share of the tokens that were drafted on the device."""
    sent: float
    """Nodes a token."""
    model_steps: float
    """Steps of the model a token."""
    exact: bool


# --- the texts ------------------------------------------------------------------------------


def texts(folder: Path, kind: str) -> list[str]:
    """The prompts of a kind, in the order of their file."""

    def rows(name: str) -> Iterator[dict[str, Any]]:
        with (folder / name).open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    match kind:
        case "code":
            return [row["prompt"] for row in rows("humaneval.jsonl")]
        case "summaries":
            wanted = (r for r in rows("spec_bench.jsonl") if r["category"] == "summarization")
            return [row["turns"][0] for row in wanted]
        case "chat":
            return [row["turns"][0] for row in rows("mt_bench.jsonl")]
        case _:
            return [row["question"] for row in rows("gsm8k_test.jsonl")]


def record(options: Any, folder: Path, temperature: float) -> MatchTape:
    """All kinds at one temperature: the target's texts, and the draft's ranks along them."""
    encode = load_tokenizer("bundled").encode
    target = load_target(VerifierConfig(canonical=False, threads=1))
    drafter = load_drafter(AgentConfig(draft=DraftSection(threads=1)))
    assert drafter is not None
    room = target.info.context_length - options.max_tokens - 1
    prompts: dict[str, tuple[int, ...]] = {}
    for kind in KINDS:
        every = texts(folder, kind)
        for number in range(options.limit):
            prompt = encode(every[number * len(every) // options.limit])
            prompts[f"{kind}-{number}"] = tuple(prompt[:room])
    sampling = {
        name: SamplingParams(temperature, seed=n, max_tokens=options.max_tokens, ignore_eos=True)
        for n, name in enumerate(prompts)
    }
    said = target_texts(target, prompts, sampling)
    generations = []
    for name, prompt in prompts.items():
        drafter.begin(len(prompt), sampling[name])
        ranks = ranks_along(drafter.step, prompt, said[name], WIDTH)
        generations.append(TapedGeneration(name, prompt, tuple(said[name]), ranks))
    drafter.close()
    about = tape_about(_command(), sampling[next(iter(prompts))], "shared prompts")
    return MatchTape("bundled", "bundled", WIDTH, tuple(generations), (), about)


def target_texts(
    target: TargetModel,
    prompts: dict[str, tuple[int, ...]],
    sampling: dict[str, SamplingParams],
) -> dict[str, list[int]]:
    """What the target says to each of the prompts, all side by side."""
    said: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        target.open(name, len(prompt), sampling[name])
        (result,) = target.forward([PassRequest(name, 0, prompt)])
        target.keep(name, ())
        said[name] = [result.targets[0]]
    for length in range(1, next(iter(sampling.values())).max_tokens):
        batch = [
            PassRequest(name, len(prompt) + length - 1, (said[name][-1],))
            for name, prompt in prompts.items()
        ]
        for result in target.forward(batch):
            target.keep(result.key, ())
            said[result.key].append(result.targets[0])
    for name in prompts:
        target.close(name)
    return said


def tapes(options: Any, folder: Path) -> Iterator[tuple[float, MatchTape]]:
    for temperature in TEMPERATURES:
        path = None if options.tapes is None else options.tapes / f"{temperature:g}.jsonl"
        if path is not None and path.is_file():
            yield temperature, read_tape(path)
            continue
        tape = record(options, folder, temperature)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tape(tape, path)
        yield temperature, tape


# --- playing them ---------------------------------------------------------------------------


class TapedDraft:
    """The tape's draft, which may be fed a prompt in parts: before its end it has no answer."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self._prompt_length = 0

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._prompt_length = prompt_length
        self._inner.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        partial = keep_length + len(feed) < self._prompt_length
        with contextlib.suppress(*([ScriptError] if partial else [])):
            return self._inner.step(keep_length, feed, width, cancelled)
        return ()

    def close(self) -> None:
        self._inner.close()


class Device:
    """One device's drafter and what its last step took."""

    def __init__(self, arm: str, source: TapeSource, costs: Costs) -> None:
        self.model_steps = 0
        self._costs, self._arm = costs, arm
        model = TapedDraft(source.drafter())
        drafters: dict[str, Callable[[], Drafter]] = {
            "lookup": lambda: ModelFreeDrafter(model.info),
            "routed": lambda: RoutedDrafter(model),
        }
        self.drafter: Drafter = drafters.get(arm, lambda: model)()

    def step_s(self, kept: int, fed: int) -> float:
        """What the step that was just computed takes."""
        costs = self._costs
        if isinstance(self.drafter, RoutedDrafter):
            fed = self.drafter.fed
        if self._arm == "lookup" or fed == 0:
            return costs.lookup_s
        self.model_steps += 1
        routing_s = costs.lookup_s if self._arm == "routed" else 0.0
        return costs.step_s + (fed - 1) * costs.more_s + routing_s


def play(
    arm: str,
    served: bool,
    source: TapeSource,
    request: Request,
    device: Device,
    rtt_s: float,
    costs: Costs,
) -> Played:
    """One text on one arm; ``served``: may the verifier guess, too?"""
    queue, target = EventQueue(), source.target()
    limits = Limits(context_length=1 << 20)
    engine = VerifyEngine(target.info, limits, EngineLimits(server_drafts=served))

    def pass_s(batch: tuple[PassRequest, ...]) -> float:
        return costs.pass_s + costs.row_s * sum(one.row_count for one in batch)

    verifier = SimulatedVerifier(queue, engine, target, PassTime(queue, pass_s))
    opened = Open("one", "", "", request.prompt, sampling=request.sampling, drafting=arm != "none")
    drafter, steps = device.drafter, device.model_steps
    session = DraftSession(opened, default_policy(), ReconnectPolicy(), drafter.info.context_length)

    def connect() -> tuple[Stream, float]:
        stream = Stream(queue, FixedDelay(queue, rtt_s / 2), FixedDelay(queue, rtt_s / 2))
        verifier.accept(stream)
        return stream, rtt_s

    simulated = SimulatedDevice(queue, session, drafter, device.step_s, connect)
    simulated.start()
    queue.run(until_s=_LONGEST_S)
    found, counters = simulated.delivery, session.counters
    if not isinstance(found.ended, Finish):
        raise RuntimeError(f"the session did not finish: {found.ended}")
    count = len(found.tokens)
    return Played(
        (found.times_s[-1] - found.times_s[0]) / (count - 1),
        count / engine.passes,
        counters.acceptance,
        counters.accepted / count,
        counters.sent / count,
        (device.model_steps - steps) / count,
        list(found.tokens) == list(source.expected(request, count)),
    )


def compare(
    options: Any, temperature: float, tape: MatchTape, costs: Costs
) -> Iterator[dict[str, Any]]:
    """One row for each kind, round trip, arm, and verifier with and without guesses."""
    for kind in KINDS:
        own = [one for one in tape.generations if one.name.startswith(f"{kind}-")]
        source = TapeSource(MatchTape(tape.target, tape.draft, tape.width, tuple(own)))
        requests = [source.request(number, 0, options.max_tokens) for number in range(len(own))]
        for rtt_ms in map(float, options.rtts.split(",")):
            alone: list[Played] = []
            for served in (False, True) if options.server_guesses else (False,):
                for arm in ARMS:
                    device = Device(arm, source, costs)
                    found = [
                        play(arm, served, source, request, device, rtt_ms / 1e3, costs)
                        for request in requests
                    ]
                    alone = alone or found
                    yield {
                        "temperature": temperature,
                        "kind": kind,
                        "rtt_ms": rtt_ms,
                        "server_guesses": served,
                        "arm": arm,
                        "texts": len(found),
                        "speed_up": [
                            a.tpot_s / b.tpot_s for a, b in zip(alone, found, strict=True)
                        ],
                        "tokens_per_pass": [one.tokens_per_pass for one in found],
                        "accepted": [one.accepted for one in found],
                        "drafted_tokens": [one.accepted_tokens for one in found],
                        "sent_per_token": [one.sent for one in found],
                        "model_steps_per_token": [one.model_steps for one in found],
                        "wrong_texts": sum(not one.exact for one in found),
                    }


# --- the table ------------------------------------------------------------------------------


def shown(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Speed against target-only streaming of the same text, by arm."""
    print("| T | prompts | verifier guesses | RTT |", " | ".join(ARMS), "|")
    print("| ---: | --- | --- | ---: |", " | ".join("---" for _ in ARMS), "|")
    for first in range(0, len(rows), len(ARMS)):
        row = rows[first]
        head = (
            f"| {row['temperature']:g} | {row['kind']} | {'yes' if row['server_guesses'] else 'no'}"
            f" | {row['rtt_ms']:g} |"
        )
        print(head, " | ".join(shown(one["speed_up"]) for one in rows[first:][: len(ARMS)]), "|")
    print()
    print(
        "| T | prompts | arm | tokens/pass | first guess right | nodes/token | model steps/token |"
    )
    print("| ---: | --- | --- | --- | --- | --- | --- |")
    names = ("tokens_per_pass", "accepted", "sent_per_token", "model_steps_per_token")
    last = rows[-1]["rtt_ms"]
    for row in rows:
        if row["rtt_ms"] == last and not row["server_guesses"] and row["arm"] != "none":
            cells = " | ".join(shown(row[name]) for name in names)
            print(f"| {row['temperature']:g} | {row['kind']} | {row['arm']} | {cells} |")


def _command() -> str:
    return shlex.join(("python", *sys.argv))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rtts", default="20,50,200", help="milliseconds, with commas")
    parser.add_argument("--pass-ms", type=float, default=25.0)
    parser.add_argument("--row-ms", type=float, default=0.0, help="of each row of a pass")
    parser.add_argument("--draft-ms", type=float, default=8.0)
    parser.add_argument("--server-guesses", action="store_true", help="a verifier with them, too")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--tapes", type=Path, help="keep what was recorded in this folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = Path(os.environ.get("EDGESPEC_DATA", "")) / "prompts"
    if not (folder / "humaneval.jsonl").is_file():
        print(f"skipped: {folder}/humaneval.jsonl is not to be found, EDGESPEC_DATA names the data")
        return 0
    step_s = options.draft_ms / 1e3
    costs = Costs(options.pass_ms / 1e3, options.row_ms / 1e3, step_s, 0.1 * step_s, 0.0002)
    rows: list[dict[str, Any]] = []
    for temperature, tape in tapes(options, folder):
        rows += compare(options, temperature, tape, costs)
    show(rows)
    about = {"command": _command(), "machine": machine(), "versions": versions()}
    print(json.dumps(about))
    if options.json is not None:
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    wrong = sum(row["wrong_texts"] for row in rows)
    if wrong:
        print(f"{wrong} texts are not the target's")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
