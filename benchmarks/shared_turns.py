"""How a shared draft model is best given out, in virtual time: turns, caches, links.

    python benchmarks/shared_turns.py [--chats 1,4,20] [--rtt-ms 20] [--pass-ms 25] [--row-ms 0.1]
                                      [--draft-ms 8] [--prefill-ms 0.8] [--tokens 96] [--seeds 3]

The product's own sessions, verifier and ``DraftTurns`` on a toy pair. A text's prompt has
``--prompt-tokens`` tokens; filling a cache anew costs ``--prefill-ms`` a token. Told are tokens a
second over all texts as a ratio to no drafts, the share of tokens that came from drafts, the draft
steps of the text with fewest over an equal part, and the share of drafting that went into filling.
``keep=1`` is one cache whose first half of the prompt is the same in all texts and stays, as if it
were cut back to the common prefix instead of being begun anew.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

from edgespec.core.device import turn_events as turn
from edgespec.core.device.draft_turns import DraftTurns
from edgespec.core.device.events import (
    DraftAction,
    StartStep,
    StepDone,
    StepWaits,
    StepWithdrawn,
    TokenKind,
)
from edgespec.core.device.policy_names import default_policy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.device.turn_policy import TurnPolicy
from edgespec.core.protocol.messages import EXACT_RULE, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.acceptance import ExactRule
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.run_ahead import run_ahead_policy
from edgespec.drafters.toy import ToyDrafter
from edgespec.targets.toy import ToyTarget
from edgespec_sim.actors.device import SimulatedDevice
from edgespec_sim.actors.server import PassTime, SimulatedVerifier
from edgespec_sim.actors.stream import FixedDelay, Stream
from edgespec_sim.event_queue import EventQueue

MODEL = ToyModel(vocabulary_size=24, order=2, sharpness=3.0)
NEVER = 1e9


@dataclass
class Desk:
    """The shared drafter: the machine, and one step at a time in virtual time."""

    queue: EventQueue
    turns: DraftTurns
    draft_s: float
    prefill_s: float
    common: int
    devices: dict[str, SharedDevice] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)
    filling_s: float = 0.0
    drafting_s: float = 0.0

    def tell(self, *events: turn.TurnEvent) -> None:
        pending = list(events)
        while pending:
            for action in self.turns.handle(pending.pop(0), self.queue.now):
                assert isinstance(action, turn.Run)
                pending += self._run(action)

    def _run(self, action: turn.Run) -> list[turn.TurnEvent]:
        device = self.devices[action.key]
        step, device.asked = device.asked, None
        if step is not None and (device.waits or (action.fills and step.keep_length)):
            device.replans = True
            device.handle(StepWithdrawn(forgotten=action.fills))
            device.replans = False
            step, device.asked = device.asked, None
        device.waits = False
        if step is None:
            return [turn.Ended(action.key, 0.0)]
        if action.fills:
            device.begin()
        fed = len(step.feed) - (min(self.common, step.keep_length or NEVER) if action.fills else 0)
        took_s = self.draft_s + self.prefill_s * max(0.0, fed - 1)
        if action.fills:
            self.filling_s += took_s - self.draft_s
        self.drafting_s += took_s
        self.steps[action.key] += 1
        done = StepDone(device.draft(step))
        self.queue.after(took_s, lambda: self._ended(device, done, took_s))
        return []

    def _ended(self, device: SharedDevice, done: StepDone, took_s: float) -> None:
        device.settling = True
        device.handle(done)
        device.settling = False
        asked = [turn.Asked(device.key, device.accepted)] if device.asked else []
        self.tell(*asked, turn.Ended(device.key, took_s))
        device.told()


class SharedDevice(SimulatedDevice):
    """A device among others at one drafter."""

    desk: Desk
    key: str
    asked: StartStep | None = None
    waits = replans = settling = False

    @property
    def accepted(self) -> int:
        return self.session.counters.accepted

    def begin(self) -> None:
        request = self.session.request
        self._drafter.begin(len(request.prompt), request.sampling)

    def draft(self, step: StartStep) -> tuple:  # type: ignore[type-arg] # of candidates
        return self._drafter.step(step.keep_length, step.feed, step.width)

    def told(self) -> None:
        if self.asked is not None and not self.waits:
            self.waits = True
            self.handle(StepWaits())

    def _do(self, action: DraftAction) -> None:
        if not isinstance(action, StartStep):
            super()._do(action)
            return
        self.asked = action
        if not (self.replans or self.settling):
            self.desk.tell(turn.Asked(self.key, self.accepted))
            self.told()


@dataclass
class Found:
    tokens_per_s: float
    accepted: float
    least: float
    filling: float


def play(options: argparse.Namespace, chats: int, caches: int, steps: int, seed: int) -> Found:
    """``caches`` 0: no drafts."""
    queue = EventQueue()
    target = ToyTarget(MODEL)
    limits = EngineLimits(max_sessions=64, server_drafts=False)
    engine = VerifyEngine(
        target.info, Limits(), limits, {EXACT_RULE: ExactRule()}, run_ahead_policy
    )

    def pass_s(requests: tuple[PassRequest, ...]) -> float:
        return (options.pass_ms + options.row_ms * sum(one.row_count for one in requests)) / 1e3

    server = SimulatedVerifier(queue, engine, target, PassTime(queue, pass_s))
    turns = DraftTurns(max(1, caches), TurnPolicy(turn_steps=steps, hang_s=NEVER / 1e3))
    common = options.prompt_tokens // 2 if options.keep else 0
    desk = Desk(queue, turns, options.draft_ms / 1e3, options.prefill_ms / 1e3, common)

    def connect() -> tuple[Stream, float]:
        delay_s = options.rtt_ms / 2e3
        stream = Stream(queue, FixedDelay(queue, delay_s), FixedDelay(queue, delay_s))
        server.accept(stream)
        return stream, 2 * delay_s

    devices = []
    for index in range(chats):
        prompt = tuple((seed * 7 + index * 5 + at * 3) % 24 for at in range(options.prompt_tokens))
        sampling = SamplingParams(
            max_tokens=options.tokens, temperature=0.7, seed=1000 * seed + index
        )
        request = Open(f"chat {index}", "", "", prompt, sampling=sampling, drafting=caches > 0)
        session = DraftSession(request, default_policy(), ReconnectPolicy(), 1 << 16)
        drafter = ToyDrafter(MODEL.perturbed(options.noise))
        device = SharedDevice(queue, session, drafter, lambda kept, fed: 0.0, connect)
        device.desk, device.key = desk, request.session_id
        desk.devices[device.key] = device
        device._on_end = lambda key=device.key: desk.tell(turn.Left(key))
        devices.append(device)
        desk.tell(turn.Joined(device.key))
        device.start()
    while any(device.delivery.ended is None for device in devices):
        assert queue.step(NEVER)
    tokens = sum(len(device.delivery.tokens) for device in devices)
    kinds = [kind for device in devices for kind in device.delivery.kinds]
    total = sum(desk.steps.values())
    least = min(desk.steps[key] for key in desk.devices) * chats / total if total else 0.0
    ended_s = max(device.delivery.times_s[-1] for device in devices)
    return Found(
        tokens / ended_s,
        kinds.count(TokenKind.ACCEPTED) / tokens,
        least,
        desk.filling_s / desk.drafting_s if desk.drafting_s else 0.0,
    )


def main(options: argparse.Namespace) -> int:
    for chats in options.chats:
        plain = [play(options, chats, 0, 1, seed) for seed in range(options.seeds)]
        for caches in options.caches:
            for steps in options.turn_steps:
                runs = [play(options, chats, caches, steps, seed) for seed in range(options.seeds)]
                pairs = zip(runs, plain, strict=True)
                ratios = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
                print(
                    f"chats {chats:3} caches {caches:3} turn {steps:3}: x{median(ratios):.3f}"
                    f" ({min(ratios):.3f}-{max(ratios):.3f})"
                    f" accepted {median([run.accepted for run in runs]):.3f}"
                    f" least {median([run.least for run in runs]):.2f}"
                    f" filling {median([run.filling for run in runs]):.2f}",
                    flush=True,
                )
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    numbers = {"chats": "1,4,20", "caches": "1,2,4,8,20", "turn-steps": "1,2,4,8,16"}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", default=default)
    times = {"rtt-ms": 20.0, "pass-ms": 25.0, "row-ms": 0.1, "draft-ms": 8.0, "prefill-ms": 0.8}
    for name, value in times.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--noise", type=float, default=0.25)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=int, default=0)
    options = parser.parse_args()
    for name in ("chats", "caches", "turn_steps"):
        setattr(options, name, [int(one) for one in getattr(options, name).split(",")])
    return options


if __name__ == "__main__":
    sys.exit(main(parsed()))
