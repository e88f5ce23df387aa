"""Run-ahead, width and gathering in virtual time: what each of them costs and saves.

    python benchmarks/policies.py [--seeds 4] [--tokens 300]

The product's own sessions on the simulator's clock with toy models: time per token, passes per
token, wasted nodes per token and messages with drafts a pass are exact for the protocol, whatever
machine this runs on. A pass takes 25 ms. ``--seeds`` texts of ``--tokens`` tokens are averaged.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from edgespec.core.device.events import DraftEvent, Transmit
from edgespec.core.device.policy import GATHER_SHARE, WindowedPolicy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Draft, Limits, Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.run_ahead import AlwaysRunAhead, AutoRunAhead, RunAheadPolicy
from edgespec.drafters.toy import ToyDrafter
from edgespec.targets.toy import ToyTarget
from edgespec_sim.actors.device import SimulatedDevice
from edgespec_sim.actors.server import PassTime, SimulatedVerifier
from edgespec_sim.actors.stream import FixedDelay, Stream
from edgespec_sim.event_queue import EventQueue

PASS_S = 0.025
RTTS_MS = (2, 20, 50, 100, 200)
STEPS_MS = (3, 8, 16)
GATHER = WindowedPolicy(2, gather=GATHER_SHARE)
POLICIES: tuple[tuple[str, WindowedPolicy, RunAheadPolicy], ...] = (
    ("width 1, always", WindowedPolicy(1), AlwaysRunAhead()),
    ("width 2, always", WindowedPolicy(2), AlwaysRunAhead()),
    ("width 2, always, gathers", GATHER, AlwaysRunAhead()),
    ("width 3, always", WindowedPolicy(3), AlwaysRunAhead()),
    ("width 2, auto", WindowedPolicy(2), AutoRunAhead()),
    ("width 2, auto, gathers", GATHER, AutoRunAhead()),
    ("width 2, waits", WindowedPolicy(2), AutoRunAhead(least_share=1.0)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    tpot_ms: float
    passes: float
    wasted: float
    drafts: float
    """Messages a pass."""
    acceptance: float


def play(
    policy: WindowedPolicy,
    run_ahead: RunAheadPolicy,
    rtt_ms: int,
    step_ms: int,
    noise: float,
    seed: int,
    n: int,
) -> Outcome:
    queue = EventQueue()
    model = ToyModel(vocabulary_size=64, order=3, seed=seed)
    target, drafter = ToyTarget(model), ToyDrafter(model.perturbed(noise))
    engine = VerifyEngine(target.info, Limits(), EngineLimits(), run_ahead=lambda kind: run_ahead)
    compute = PassTime(queue, lambda batch: PASS_S)
    verifier = SimulatedVerifier(queue, engine, target, compute)
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=n)
    request = Open("policies", "", "", (1, 2, 3), (), sampling, RunAhead.AUTO)
    session = DraftSession(request, policy, ReconnectPolicy(), 1 << 20)
    handle, drafts = session.handle, 0

    def counted(event: DraftEvent, now: float) -> Any:
        nonlocal drafts
        actions = handle(event, now)
        for action in actions:
            drafts += isinstance(action, Transmit) and isinstance(action.message, Draft)
        return actions

    session.handle = counted  # type: ignore[method-assign]

    def connect() -> tuple[Stream, float]:
        stream = Stream(queue, FixedDelay(queue, rtt_ms / 2e3), FixedDelay(queue, rtt_ms / 2e3))
        verifier.accept(stream)
        return stream, rtt_ms / 1e3

    device = SimulatedDevice(queue, session, drafter, lambda kept, fed: step_ms / 1e3, connect)
    device.start()
    queue.run(until_s=3600.0)
    times_s, counters = device.delivery.times_s, session.counters
    return Outcome(
        (times_s[-1] - times_s[0]) / (len(times_s) - 1) * 1e3,
        target.passes / n,
        counters.wasted / n,
        drafts / target.passes,
        counters.acceptance,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    what = "ms/token / passes a token / wasted nodes a token / drafts a pass"
    print(f"{what}, at RTT (ms)", *RTTS_MS)
    for noise in (0.15, 0.25, 0.5):
        for step_ms in STEPS_MS:
            for name, policy, run_ahead in POLICIES:
                cells, rates = [], []
                for rtt_ms in RTTS_MS:
                    found = [
                        play(policy, run_ahead, rtt_ms, step_ms, noise, seed, args.tokens)
                        for seed in range(args.seeds)
                    ]
                    rates += [outcome.acceptance for outcome in found]
                    cells.append(
                        f"{fmean(o.tpot_ms for o in found):5.1f}/"
                        f"{fmean(o.passes for o in found):.2f}/"
                        f"{fmean(o.wasted for o in found):.1f}/"
                        f"{fmean(o.drafts for o in found):.1f}"
                    )
                head = f"acceptance {fmean(rates):.2f}, step {step_ms:2d} ms, {name:24s}"
                print(head, "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
