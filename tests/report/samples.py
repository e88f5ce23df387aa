"""Samples for the tests of reports: a run of five arms with made-up numbers, and real traces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from edgespec.config import (
    AgentConfig,
    DraftSection,
    LinkSection,
    PacingSection,
    PolicyName,
    PolicySection,
    VerifierConfig,
)
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent
from edgespec.telemetry.trace import TraceFile
from edgespec.verifier.build import build_verifier
from edgespec_sim.report.timeline import Lane, Span, Timeline
from edgespec_sim.run_summary import (
    ArmSummary,
    GroupSummary,
    LinkLoad,
    Pace,
    RequestRow,
    RunSummary,
    VerifierSummary,
    spread_of,
)

ARMS = ("target-only", "vanilla", "pearl", "windowed", "edgespec")
_TPOT_S = (0.0421, 0.0713, 0.0384, 0.0262, 0.0182)
_LABELS = (
    "plain streaming",
    "stop-and-wait at its best draft length",
    "pre-verify and post-verify",
    "one chain of drafts",
    "windowed tree of width 2, run-ahead auto",
)


def five_arms(notes: tuple[str, ...] = ("Costs are those of a laptop's profile.",)) -> RunSummary:
    arms = tuple(_make_arm(index) for index in range(len(ARMS)))
    return RunSummary(
        name="household",
        about="Three devices at home share one access link and one verifier, 38 ms away.",
        tokens_from="a match tape of 40 generations",
        seed=7,
        simulated=True,
        duration_s=60.0,
        arms=arms,
        settings={"link": {"rtt_ms": 38.0, "loss": 0.002}, "devices": 3},
        notes=notes,
        environment={"edgespec": "0.1.0", "command": "edgespec-sim run household --seed 7"},
    )


def _make_arm(index: int) -> ArmSummary:
    name, tpot_s = ARMS[index], _TPOT_S[index]
    tpots = [tpot_s * (0.7 + 0.02 * (i * 7 % 31)) for i in range(31)]
    whole = _make_group(name, tpots, per_pass=1.0 + 0.55 * index)
    groups = {
        group: replace(_make_group(name, [value * factor for value in tpots], 1.0 + 0.5 * index))
        for group, factor in (("laptops", 0.9), ("phones", 1.3))
    }
    load = VerifierSummary("edge-1", 0.61 - 0.09 * index, 1400 - 200 * index, 5.1, 1.6, None)
    other = VerifierSummary("edge-2", 0.3, 900, 4.0, 1.2, spread_of([0.001, 0.004, 0.012]))
    return ArmSummary(
        arm=name,
        label=_LABELS[index],
        all=whole,
        groups=groups,
        verifiers=(load, other),
        rows=tuple(
            RequestRow(f"laptop {i}", "edge-1", 2.0 * i, 0.21, tpot_s, 64, 2.5, 0.71)
            for i in range(4)
        ),
        speedup=_TPOT_S[0] / tpot_s,
    )


def _make_group(arm: str, tpots: list[float], per_pass: float) -> GroupSummary:
    drafts = arm != "target-only"
    return GroupSummary(
        requests=31,
        failed=0,
        tokens=1984,
        ttft_s=spread_of([0.16 + 2 * value for value in tpots]),
        tpot_s=spread_of(tpots),
        itl_s=spread_of([2.2 * value for value in tpots]),
        tokens_per_second=33.1,
        tokens_per_pass=per_pass,
        acceptance=0.71 if drafts else None,
        wasted_per_token=0.9 * drafts,
        up_bytes_per_token=8.2 if drafts else 0.7,
        down_bytes_per_token=9.4,
        reconnects=2,
        energy_j_per_token=0.021 if drafts else None,
        mismatches=0,
    )


def make_pictured() -> RunSummary:
    """Return two of the arms with all the data of pictures."""
    run = five_arms()
    base, ours = run.arms[0], run.arms[4]
    arms = tuple(_make_pictured_arm(arm, index) for index, arm in enumerate((base, ours)))
    return replace(run, arms=arms, seeds=4)


def _make_pictured_arm(arm: ArmSummary, index: int) -> ArmSummary:
    levels = tuple(None if i == 3 else 40.0 - 20.0 * index + i for i in range(6))
    pace = Pace(
        10.0,
        levels,
        tuple(None if value is None else value - 2.0 for value in levels),
        tuple(None if value is None else value + 2.0 for value in levels),
    )
    links = (LinkLoad("access", 0.2 + 0.1 * index, 0.1),)
    return replace(arm, pace=pace, links=links)


def asked_alike() -> dict[str, Timeline]:
    """Return a first request of each arm of ``make_pictured``."""
    return {
        arm: _make_timeline(arm, step_s)
        for arm, step_s in (("target-only", 0.04), ("edgespec", 0.02))
    }


def _make_timeline(arm: str, step_s: float) -> Timeline:
    lanes = (Lane.STALL, Lane.PASS) if arm == "target-only" else (Lane.DRAFT, Lane.PASS)
    spans = tuple(
        Span(f"{arm}#1", lane, 5.0 + step_s * number, 5.0 + step_s * (number + 1), lane.value)
        for number in range(30)
        for lane in lanes
    )
    return Timeline((f"{arm}#1",), spans, (), {})


@asynccontextmanager
async def traced_run(folder: Path, rtt_ms: float = 8.0) -> AsyncIterator[Agent]:
    """Run a toy agent and a toy verifier over gRPC and a shaped link. Both ends write their traces
    to ``device.jsonl`` and ``verifier.jsonl``, which are complete when the context ends."""
    with TraceFile(folder / "device.jsonl") as device, TraceFile(folder / "verifier.jsonl") as side:
        settings = VerifierConfig(model="toy", port=0, pacing=PacingSection(pass_ms=4.0))
        verifier, server = build_verifier(settings, tracer=side)
        await server.start()
        config = agent_config(f"127.0.0.1:{server.port}", rtt_ms)
        try:
            async with build_agent(config, tracer=device) as agent:
                yield agent
        finally:
            await verifier.stop()
            await server.stop(0.0)


def agent_config(address: str, rtt_ms: float) -> AgentConfig:
    return AgentConfig(
        verifier=address,
        tokenizer="toy",
        draft=DraftSection(model="toy", draft_ms=1.0),
        policy=PolicySection(name=PolicyName.WINDOWED, run_ahead=RunAhead.NEVER),
        link=LinkSection(rtt_ms=rtt_ms),
        reconnect=ReconnectPolicy(first_s=0.01, longest_s=0.05, give_up_s=20.0),
    )


SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, top_k=20, seed=11)


def made_up_sweep() -> list[tuple[dict[str, int], RunSummary]]:
    """Return the summaries of three RTTs by two counts of devices."""
    return [
        ({"rtt_ms": rtt_ms, "devices": devices}, five_arms())
        for rtt_ms in (10, 40, 160)
        for devices in (1, 10)
    ]
