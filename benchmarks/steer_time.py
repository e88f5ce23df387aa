"""What a steered draft's gain is worth in time: the guesses of ``steer_draft.py`` replayed.

    python benchmarks/steer_time.py OUT.pt [--rtts 2,20,50,200] [--limit 40]

Virtual time: 25 ms a pass, 8 ms a step, one device. A guess has the place and the confidence that
the arm's draft gave it at its distance behind the last commit that the device has when it begins
the step. ``default`` is the default policy with run-ahead; ``vanilla`` drafts four deep and waits.
Speed is the time a token of the plain draft over the arm's, text by text, with 95 %; then
commits a token, each of which would bring 256 bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from judge_drafts import PASS_S, STEP_S

from edgespec.bench.arms import Arm, arm_settings
from edgespec.bench.measurement import ratio_interval
from edgespec.core.device.events import Deliver, Finish
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec_sim.cost_profile import constant
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.sessions import FixedDelay, SimulatedDevice, SimulatedVerifier, Stream
from edgespec_sim.token_sources.match_tape import MatchTape, TapedGeneration
from edgespec_sim.token_sources.source import Script, ScriptedDrafter, TapeSource
from edgespec_sim.world.site import Machine


class Known:
    """How many tokens the device has; a tracer of it."""

    def __init__(self) -> None:
        self.length = self.commits = 0

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if isinstance(item, Deliver):
            self.length += len(item.tokens)
            self.commits += 1


class Column(Sequence[Any]):
    """One number of each guess, at the distance it has now."""

    def __init__(self, values: list[list[float]], known: Known) -> None:
        self._values, self._known = values, known

    def __len__(self) -> int:
        return len(self._values[0])

    def __getitem__(self, index: Any) -> Any:
        behind = max(0, min(index - self._known.length, len(self._values) - 1))
        return self._values[behind][index]


def played(
    prompt: tuple[int, ...], said: tuple[int, ...], table: torch.Tensor, rtt_s: float, arm: Arm
) -> tuple[float, float]:
    """Milliseconds and commits a token."""
    known, queue, law = Known(), EventQueue(), SamplingParams(max_tokens=len(said), ignore_eos=True)
    source = TapeSource(
        MatchTape("t", "d", 2, (TapedGeneration("text", prompt, said, (0,) * len(said)),))
    )
    target = source.target()
    columns = [Column(table[:, :, at].tolist(), known) for at in range(3)]
    script = Script(said, *columns)
    drafter = ScriptedDrafter(target.info, lambda prompt, most: script, 2)
    engine = VerifyEngine(target.info, Limits(context_length=1 << 20), EngineLimits())
    verifier = SimulatedVerifier(queue, engine, target, Machine(queue, constant(PASS_S), ""))
    settings = arm_settings(arm, 4)
    asked = Open("text", "", "", prompt, sampling=law, run_ahead=settings.run_ahead)
    session = DraftSession(asked, settings.policy, ReconnectPolicy(), drafter.info.context_length)

    def connect() -> tuple[Stream, float]:
        delay = FixedDelay(queue, rtt_s / 2)
        verifier.accept(stream := Stream(queue, delay, delay))
        return stream, rtt_s

    device = SimulatedDevice(queue, session, drafter, lambda kept, fed: STEP_S, connect, known)
    device.start()
    queue.run(until_s=1e5)
    times_s = device.delivery.times_s
    assert isinstance(device.delivery.ended, Finish)
    assert tuple(device.delivery.tokens) == said
    return 1e3 * (times_s[-1] - times_s[0]) / (len(said) - 1), known.commits / len(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("guessed", type=Path)
    parser.add_argument("--rtts", default="2,20,50,200")
    parser.add_argument("--limit", type=int, default=40, help="texts of each temperature")
    options = parser.parse_args()
    held, results = torch.load(options.guessed, weights_only=False)
    print("| device | T | RTT | arm | ms a token | speed over plain | commits a token |")
    for arm, heat, rtt_ms in product(
        (Arm.EDGESPEC, Arm.VANILLA), (0.0, 0.7), map(float, options.rtts.split(","))
    ):
        at = [n for n, one in enumerate(held) if one[0] == heat and len(one[2][0]) - one[2][1] > 32]
        base: list[float] = []
        for name, tables in results.items():
            found = []
            for number in at[: options.limit]:
                tokens, start = held[number][2]
                prompt, said = tuple(tokens[:start]), tuple(tokens[start:])
                found.append(played(prompt, said, tables[number], rtt_ms / 1e3, arm))
            times = [one for one, _ in found]
            base = base or times
            low, high = ratio_interval(base, times)
            speed = f"{sum(base) / sum(times):.3f} ({low:.3f} to {high:.3f})"
            head = f"| {arm.value} | {heat:g} | {rtt_ms:g} | {name}, n {len(times)}"
            commits = fmean(one for _, one in found)
            print(f"{head} | {fmean(times):.1f} | {speed} | {commits:.2f} |", flush=True)


if __name__ == "__main__":
    main()
