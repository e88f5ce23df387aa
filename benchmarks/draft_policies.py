"""Every draft policy on every recorded network, every preference, and where drafting cannot pay.

    EDGESPEC_DATA=... python benchmarks/draft_policies.py traces [--texts 4] [--tokens 96]
    python benchmarks/draft_policies.py prefer
    python benchmarks/draft_policies.py break-even

The product's own sessions in virtual time, with the recorded agreement of the bundled pair: exact
for the protocol, whatever machine this runs on. A pass takes 25 ms, a draft step 8 ms. Texts are
played one after another on one device, which keeps what it has learned; text i starts at part i of
the trace. Intervals are 95 % over texts.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from edgespec.core.device.estimates import RowPrice
from edgespec.core.device.events import Fail
from edgespec.core.device.learned import Learned
from edgespec.core.device.policy import DraftPolicy, FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.device.policy_names import PolicyName, named_policy
from edgespec.core.device.preference import WORTH, Prefer
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.network.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.core.protocol.messages import Limits, Open, RunAhead
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec_sim.actors.device import SimulatedDevice
from edgespec_sim.actors.server import PassTime, SimulatedVerifier
from edgespec_sim.actors.stream import Stream
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.from_trace import TraceLinks
from edgespec_sim.links.path import OneHop
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw
from edgespec_sim.token_sources.process import ProcessSource
from edgespec_sim.token_sources.source import TokenSource
from edgespec_sim.token_sources.tape import TapeSource, tape_named
from edgespec_sim.traces.readers import read_trace

PASS_S, STEP_S, ROW_S = 0.025, 0.008, 0.0
RTTS_MS = (20, 50, 200)
_CONTEXT_LENGTH = 1 << 24
# Of two-sided 95 % intervals by Student's t, for 2 to 12 texts.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)
_NEVER, _AUTO = RunAhead.NEVER, RunAhead.AUTO


@dataclass(frozen=True, slots=True)
class Way:
    """How a device drafts; ``policy`` None: it only streams."""

    policy: DraftPolicy | None
    run_ahead: RunAhead = _AUTO
    floor: float = 0.0
    fixed: bool = False
    """A setting that adapts to nothing, or the scheme of a paper."""


WAYS: Mapping[str, Way] = {
    "target-only": Way(None, RunAhead.ALWAYS),
    **{f"fixed {gamma}": Way(FixedPolicy(gamma), _NEVER, fixed=True) for gamma in (1, 3, 6)},
    "pearl": Way(PearlPolicy(), _NEVER, fixed=True),
    "windowed 1": Way(WindowedPolicy(1, gather=0.1), fixed=True),
    "windowed 2": Way(named_policy(PolicyName.WINDOWED), fixed=True),
    "windowed 3": Way(WindowedPolicy(3, gather=0.1), fixed=True),
    "fixed": Way(named_policy(PolicyName.FIXED, width=1), _NEVER),
    "specdec++": Way(named_policy(PolicyName.SPECDEC), _NEVER),
    "bandit": Way(named_policy(PolicyName.BANDIT), _NEVER),
    "specdec++, auto": Way(named_policy(PolicyName.SPECDEC)),
    "bandit, auto": Way(named_policy(PolicyName.BANDIT)),
    "goodput": Way(named_policy(PolicyName.GOODPUT)),
}


@dataclass(frozen=True, slots=True)
class Times:
    step_s: float = STEP_S
    pass_s: float = PASS_S
    row_s: float = ROW_S


@dataclass(frozen=True, slots=True)
class Outcome:
    tpot_s: float
    wasted: float
    """Nodes a token."""
    rested: float
    """Share of the tokens."""
    acceptance: float


def play(
    source: TokenSource,
    number: int,
    tokens: int,
    way: Way,
    links: tuple[LinkModel, LinkModel],
    rtt_s: float,
    times: Times,
    learned: Learned,
) -> Outcome:
    """One text. Raises ``RuntimeError`` when the session does not finish."""
    queue, target, drafter = EventQueue(), source.target(), source.drafter()
    request = source.request(number, 0 if isinstance(source, TapeSource) else 16, tokens)
    engine = VerifyEngine(target.info, Limits(context_length=_CONTEXT_LENGTH), EngineLimits())
    compute = PassTime(
        queue, lambda batch: times.pass_s + times.row_s * sum(len(one.tokens) for one in batch)
    )
    verifier = SimulatedVerifier(queue, engine, target, compute)
    drafting, sampling = way.policy is not None, request.sampling
    opened = Open("one", "", "", request.prompt, (), sampling, way.run_ahead, drafting=drafting)
    policy = way.policy or WindowedPolicy()
    price = RowPrice(floor=way.floor)
    session = DraftSession(opened, policy, ReconnectPolicy(), 1 << 24, price=price, learned=learned)
    up, down = OneHop(queue, links[0]), OneHop(queue, links[1])

    def connect() -> tuple[Stream, float]:
        stream = Stream(queue, up, down)
        verifier.accept(stream)
        return stream, rtt_s

    device = SimulatedDevice(queue, session, drafter, lambda kept, fed: times.step_s, connect)
    device.start()
    queue.run(until_s=1e6)
    ended, at_s, counters = device.delivery.ended, device.delivery.times_s, session.counters
    if ended is None or isinstance(ended, Fail) or len(at_s) < 2:
        raise RuntimeError(f"the session did not finish: {ended}")
    count = len(at_s)
    tpot_s = (at_s[-1] - at_s[0]) / (count - 1)
    rested = counters.rested / count
    return Outcome(tpot_s, counters.wasted / count, rested, counters.acceptance)


def interval(values: Sequence[float]) -> str:
    """Mean and half a 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.1f}"
    half = _T95[min(len(values), 12) - 2] * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.1f}±{half:.1f}"


def fixed_rtt(rtt_ms: float) -> tuple[LinkModel, LinkModel]:
    settings = LinkSettings(one_way_s=rtt_ms / 2e3)
    return LinkModel(settings, SharedQueue(math.inf)), LinkModel(settings)


def on_traces(texts: int, tokens: int, only: str) -> None:
    folder = Path(os.environ["EDGESPEC_DATA"]) / "traces"
    with (folder / "index.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not row["file"].startswith("matrices")]
    source = TapeSource(tape_named("bundled-greedy"))
    print(f"{source.about}; ms a token, {texts} texts of at most {tokens} tokens")
    ratios: dict[str, list[float]] = {name: [] for name in WAYS}
    for row in rows:
        if only not in row["file"]:
            continue
        trace = read_trace(folder / row["file"])
        links = TraceLinks.of(trace)
        found: dict[str, list[float]] = {}
        for name, way in WAYS.items():
            learned = Learned()
            found[name] = [
                1e3
                * play(
                    source,
                    number,
                    tokens,
                    way,
                    links.pair(offset_s=number * trace.duration_s / texts),
                    0.05,
                    Times(),
                    learned,
                ).tpot_s
                for number in range(texts)
            ]
        best = min((name for name in WAYS if WAYS[name].fixed), key=lambda n: fmean(found[n]))
        cells = ", ".join(f"{name} {interval(values)}" for name, values in found.items())
        print(f"{row['file']} ({row['rtt_median_ms']} ms): best fixed is {best}; {cells}")
        for name, values in found.items():
            ratios[name].append(fmean(values) / fmean(found[best]))
    print(
        f"\ntime over that of the best fixed setting of each trace, {len(ratios['pearl'])} traces"
    )
    for name, values in ratios.items():
        print(
            f"{name:16s} mean {fmean(values):.3f}  least {min(values):.3f}  most {max(values):.3f}"
        )


def by_preference(texts: int, tokens: int) -> None:
    print("ms a token, wasted nodes a token, share of tokens without drafting, at RTT", *RTTS_MS)
    for tape in ("bundled-greedy", "bundled-sampled"):
        source = TapeSource(tape_named(tape))
        print(source.about)
        for prefer in (None, *Prefer):
            cells = []
            for rtt_ms in RTTS_MS:
                way = WAYS["target-only"]
                if prefer is not None:
                    policy = named_policy(PolicyName.WINDOWED, prefer=prefer)
                    way = Way(policy, floor=WORTH[prefer].row_chance)
                cells.append(_mean(source, texts, tokens, way, rtt_ms, Times()))
            print(f"{'target-only' if prefer is None else prefer.value:12s}", "   ".join(cells))


def break_even(texts: int, tokens: int) -> None:
    """What drafting costs where it cannot bring anything: time over target-only's."""
    tape = TapeSource(tape_named("bundled-greedy"))
    poor = ProcessSource(AcceptanceLaw.of(0.2), seed=1)
    cases: Mapping[str, tuple[TokenSource, float, Times]] = {
        "draft slower than a pass, 20 ms": (tape, 20.0, Times(step_s=0.035)),
        "draft slower than a pass, 2 ms": (tape, 2.0, Times(step_s=0.035)),
        "acceptance 0.2, 20 ms": (poor, 20.0, Times()),
        "acceptance 0.2, 2 ms": (poor, 2.0, Times()),
        "acceptance 0.2, 20 ms, rows 1 ms": (poor, 20.0, Times(row_s=0.001)),
        "acceptance 0.2, 2 ms, rows 1 ms": (poor, 2.0, Times(row_s=0.001)),
        "RTT 300 ms": (tape, 300.0, Times()),
        "RTT 300 ms, rows 1 ms": (tape, 300.0, Times(row_s=0.001)),
    }
    ways = {"target-only": WAYS["target-only"], "windowed": WAYS["windowed 2"]}
    ways["goodput"] = WAYS["goodput"]
    for prefer in (Prefer.BALANCED, Prefer.BATTERY, Prefer.DATA):
        policy = named_policy(PolicyName.WINDOWED, prefer=prefer)
        ways[prefer.value] = Way(policy, floor=WORTH[prefer].row_chance)
    for what, (source, rtt_ms, times) in cases.items():
        cells, base_s = [], 0.0
        for name, way in ways.items():
            found = _played(source, texts, tokens, way, rtt_ms, times)
            mean_s = fmean(outcome.tpot_s for outcome in found)
            base_s = base_s or mean_s
            wasted = fmean(outcome.wasted for outcome in found)
            cells.append(f"{name} {mean_s / base_s:.3f} ({wasted:.1f})")
        print(f"{what:36s}", ", ".join(cells))


def _played(
    source: TokenSource, texts: int, tokens: int, way: Way, rtt_ms: float, times: Times
) -> list[Outcome]:
    learned = Learned()
    return [
        play(source, number, tokens, way, fixed_rtt(rtt_ms), rtt_ms / 1e3, times, learned)
        for number in range(texts)
    ]


def _mean(
    source: TokenSource, texts: int, tokens: int, way: Way, rtt_ms: float, times: Times
) -> str:
    found = _played(source, texts, tokens, way, rtt_ms, times)
    tpot = interval([1e3 * outcome.tpot_s for outcome in found])
    wasted = fmean(outcome.wasted for outcome in found)
    return f"{tpot}/{wasted:.2f}/{fmean(outcome.rested for outcome in found):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("traces", "prefer", "break-even"))
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--only", default="", help="Traces whose names contain this")
    args = parser.parse_args()
    if args.table == "traces":
        on_traces(args.texts, args.tokens, args.only)
    elif args.table == "prefer":
        by_preference(args.texts, args.tokens)
    else:
        break_even(args.texts, args.tokens)


if __name__ == "__main__":
    main()
