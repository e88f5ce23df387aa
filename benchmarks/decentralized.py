"""A target spread over N nodes: what drafts, run-ahead, trees and a relaxed rule are worth.

    python benchmarks/decentralized.py [--compute-ms 24] [--step-ms 5] [--rtt-ms 30] [--tokens 240]

The product's own sessions in virtual time on toy models: exact for the protocol, whatever machine
this runs on. All layers take ``--compute-ms`` together, so a node takes its N-th part; a link takes
t1 one way. Speed-ups are over plain autoregressive decoding on the same nodes. "near" drafts on the
first node (no round trip to the verifier), which is where arXiv 2511.11733 (DSD) drafts and waits
for each pass; "far" is a device ``--rtt-ms`` away. LOSSY arms tolerate drafts of at least
``--threshold`` of the best token's probability: their text is not the target's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from edgespec.core.device.policy import DraftPolicy, FixedPolicy, WindowedPolicy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Limits, Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.telemetry.cost_profile import TimeLaw
from edgespec_sim.actors.device import SimulatedDevice
from edgespec_sim.actors.server import SimulatedVerifier
from edgespec_sim.actors.stream import FixedDelay, Stream
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.planning.replication import mean_interval
from edgespec_sim.scenario.costs import Operation, law_of
from edgespec_sim.scenario.sections import CostSection, StagesSection
from edgespec_sim.scenario.stage_links import straggling
from edgespec_sim.token_sources.relaxed_rule import LossySource, rule_of, rules_of
from edgespec_sim.token_sources.source import TokenSource
from edgespec_sim.token_sources.toy import ToySource
from edgespec_sim.world.hardware import Stages
from edgespec_sim.world.site import Machine

NODES = (2, 3, 4, 6, 8)
LINKS_MS = (1.0, 5.0, 15.0, 30.0)
SEEDS = (1, 2)
JITTER_SEEDS, OTHER_SEEDS = range(1, 9), range(101, 109)
MODEL = ToyModel(vocabulary_size=64, order=3, sharpness=2.0)
NOISE = 0.3


@dataclass(frozen=True, slots=True)
class Way:
    """One column: who drafts where, how, and whether the rule is relaxed."""

    name: str
    far: bool
    policy: DraftPolicy | None
    run_ahead: RunAhead
    lossy: bool = False


PLAIN = Way("plain", False, None, RunAhead.ALWAYS)
WAYS = (
    Way("near: DSD", False, FixedPolicy(), RunAhead.NEVER),
    Way("DSD LOSSY", False, FixedPolicy(), RunAhead.NEVER, lossy=True),
    Way("ours w2", False, WindowedPolicy(width=2), RunAhead.AUTO),
    Way("far: DSD", True, FixedPolicy(), RunAhead.NEVER),
    Way("windowed", True, WindowedPolicy(width=1), RunAhead.NEVER),
    Way("ours w1", True, WindowedPolicy(width=1), RunAhead.AUTO),
    Way("ours w2", True, WindowedPolicy(width=2), RunAhead.AUTO),
    Way("ours w3", True, WindowedPolicy(width=3), RunAhead.AUTO),
    Way("w2 LOSSY", True, WindowedPolicy(width=2), RunAhead.AUTO, lossy=True),
)


@dataclass(frozen=True, slots=True)
class Settings:
    compute_ms: float
    step_ms: float
    rtt_ms: float
    tokens: int
    threshold: float


@dataclass(frozen=True, slots=True)
class Outcome:
    tpot_ms: float
    tokens_per_pass: float
    changed: float
    """Share of tokens that are not the target's own."""


def source_of(settings: Settings, way: Way, seed: int) -> TokenSource:
    sampling = SamplingParams(seed=seed)
    if way.lossy:
        return LossySource(MODEL, NOISE, sampling, settings.threshold)
    return ToySource(MODEL, NOISE, sampling)


def play(
    settings: Settings,
    way: Way,
    nodes: int,
    link_ms: float,
    seed: int,
    jitter_ms: float = 0.0,
    stragglers: float = 0.0,
) -> Outcome:
    queue, source = EventQueue(), source_of(settings, way, seed)
    cost = CostSection(ms=settings.compute_ms)
    section = StagesSection(
        nodes=nodes, link_ms=link_ms, jitter_ms=jitter_ms, stragglers=stragglers
    )

    def law_of_share(share: float) -> TimeLaw:
        return straggling(law_of(cost, Operation.TARGET_PASS, Path(), share), section)

    machines = tuple(
        Machine(queue, law_of_share(1.0 / nodes), f"{seed}/{index}") for index in range(nodes)
    )
    compute = Stages(queue, section, law_of_share, machines, seed=f"{seed}")
    target = source.target()
    limits = Limits(context_length=1 << 16)
    engine = VerifyEngine(target.info, limits, EngineLimits(), rules_of(source))
    verifier = SimulatedVerifier(queue, engine, target, compute)
    asked = source.request(seed, 8, settings.tokens)
    request = Open(
        "one",
        "",
        "",
        asked.prompt,
        sampling=asked.sampling,
        run_ahead=way.run_ahead,
        rule=rule_of(source),
        drafting=way.policy is not None,
    )
    policy = way.policy or WindowedPolicy()
    session = DraftSession(request, policy, ReconnectPolicy(), 1 << 20)
    one_way_s = settings.rtt_ms / 2e3 if way.far else 0.0

    def connect() -> tuple[Stream, float]:
        stream = Stream(queue, FixedDelay(queue, one_way_s), FixedDelay(queue, one_way_s))
        verifier.accept(stream)
        return stream, 2.0 * one_way_s

    step_s = settings.step_ms / 1e3
    device = SimulatedDevice(queue, session, source.drafter(), lambda kept, fed: step_s, connect)
    device.start()
    queue.run(until_s=3600.0)
    times_s, tokens = device.delivery.times_s, device.delivery.tokens
    assert len(tokens) == settings.tokens
    changed = source.changed(asked, tokens) if isinstance(source, LossySource) else 0
    counters = session.counters
    return Outcome(
        1e3 * (times_s[-1] - times_s[0]) / (len(times_s) - 1),
        counters.committed / counters.passes,
        changed / len(tokens),
    )


def mean_of(settings: Settings, way: Way, nodes: int, link_ms: float) -> Outcome:
    outcomes = [play(settings, way, nodes, link_ms, seed) for seed in SEEDS]
    return Outcome(
        fmean(one.tpot_ms for one in outcomes),
        fmean(one.tokens_per_pass for one in outcomes),
        fmean(one.changed for one in outcomes),
    )


def print_formula(settings: Settings) -> None:
    print("communication saved a token, (N-1) t1 (k-1)/k (stop-and-wait of 4), in ms.")
    print("links constant, k of the same run, so an identity of pipelines:")

    way = Way("fixed", False, FixedPolicy(4), RunAhead.NEVER)
    for nodes, link_ms in ((2, 5.0), (4, 15.0), (8, 30.0)):

        def added_ms(one: Way, nodes: int = nodes, link_ms: float = link_ms) -> float:
            far, near = (play(settings, one, nodes, link, 1).tpot_ms for link in (link_ms, 0.0))
            return far - near

        k = play(settings, way, nodes, link_ms, 1).tokens_per_pass
        saved_ms, links_ms = added_ms(PLAIN) - added_ms(way), (nodes - 1) * link_ms
        formula_ms = links_ms * (k - 1.0) / k
        print(
            f"  N {nodes}, t1 {link_ms:2g}: k {k:.2f}, measured {saved_ms:.2f},"
            f" formula {formula_ms:.2f}, off by {abs(saved_ms / formula_ms - 1.0):.2%}"
        )


def print_formula_under_jitter(settings: Settings) -> None:
    """The same where it could fail: jittered links, stragglers, and k of other texts."""
    way = Way("fixed", False, FixedPolicy(4), RunAhead.NEVER)
    print("\nthe same with jitter (mean t1 / 2) and 5 % stragglers of 4 times, k of other seeds:")
    for nodes, link_ms in ((2, 5.0), (4, 15.0), (8, 30.0)):
        jitter_ms = link_ms / 2
        k = fmean(play(settings, way, nodes, link_ms, seed).tokens_per_pass for seed in OTHER_SEEDS)
        expected_ms = (nodes - 1) * (link_ms + jitter_ms) * (k - 1.0) / k
        shares = []
        for seed in JITTER_SEEDS:
            saved_ms = 0.0
            for one, sign in ((PLAIN, 1.0), (way, -1.0)):
                far = play(settings, one, nodes, link_ms, seed, jitter_ms, 0.05)
                near = play(settings, one, nodes, 0.0, seed, 0.0, 0.05)
                saved_ms += sign * (far.tpot_ms - near.tpot_ms)
            shares.append(saved_ms / expected_ms)
        low, high = mean_interval(shares)
        print(
            f"  N {nodes}, t1 {link_ms:2g}: k {k:.2f}, formula {expected_ms:.2f} ms, measured"
            f" {fmean(shares):.3f} of it (95 % over {len(shares)} seeds: {low:.3f} to {high:.3f})"
        )


def print_speedups(settings: Settings) -> None:
    print("\nspeed-up over plain decoding (tokens a pass)")
    print("  N  t1 t1/t0  plain ms " + "".join(f"{way.name:>13}" for way in WAYS))
    changed: dict[str, list[float]] = {}
    for nodes in NODES:
        for link_ms in LINKS_MS:
            plain = mean_of(settings, PLAIN, nodes, link_ms)
            cells = []
            for way in WAYS:
                one = mean_of(settings, way, nodes, link_ms)
                cells.append(f"{plain.tpot_ms / one.tpot_ms:6.2f} ({one.tokens_per_pass:4.1f})")
                if way.lossy:
                    changed.setdefault(way.name, []).append(one.changed)
            ratio = link_ms / (settings.compute_ms / nodes)
            print(
                f"{nodes:3d} {link_ms:3.0f} {ratio:5.2f} {plain.tpot_ms:9.1f} "
                + "".join(f"{cell:>13}" for cell in cells)
            )
    for name, shares in changed.items():
        print(f"{name}: {fmean(shares):.1%} of the tokens are not the target's own")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--compute-ms", type=float, default=24.0)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--rtt-ms", type=float, default=30.0)
    parser.add_argument("--tokens", type=int, default=240)
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--formula", action="store_true", help="the formula alone")
    options = parser.parse_args()
    settings = Settings(
        options.compute_ms, options.step_ms, options.rtt_ms, options.tokens, options.threshold
    )
    source = source_of(settings, PLAIN, 1)
    print(f"{source.about}; {settings}")
    print_formula(settings)
    print_formula_under_jitter(settings)
    if not options.formula:
        print_speedups(settings)


if __name__ == "__main__":
    main()
