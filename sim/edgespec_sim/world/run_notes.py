"""Notes for the reader of a run: where times and energies come from, and what was assumed.

A summary without its assumptions is easily taken for a measurement. So every number that the
scenario states, and every effect that it leaves out, gets a sentence beside the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from edgespec.bench.arms import Arm
from edgespec_sim import run_summary as rs
from edgespec_sim.links.grants_5g import mean_waits_s
from edgespec_sim.run_summary import WARNING
from edgespec_sim.scenario import sections
from edgespec_sim.scenario.device_power import load_profile
from edgespec_sim.scenario.verifiers import describe_cost_source
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.network import load_mobility, load_trace


def make_notes(scenario: sections.Scenario, profiles: Sequence[str] = ()) -> tuple[str, ...]:
    """Return notes on the sources of times and energies. ``profiles`` are notes on the profiles
    that were applied to the scenario."""
    notes = [
        f"Draft steps of {name}: {describe_cost_source(section.draft)}."
        for name, section in scenario.devices.items()
    ]
    notes += [
        f"Passes of {name}: {describe_cost_source(section.pass_time)}."
        for name, section in scenario.verifiers.items()
    ]
    notes += map(scenario.memory_note, scenario.verifiers)
    notes += [
        f"Steps of {name}'s own draft: assumed ({draft.ms:g} ms); its memory is not counted."
        for name, section in scenario.verifiers.items()
        if (draft := section.server_draft) is not None
    ]
    notes += [
        f"GPU of {name}: a radio access network takes {ran.about}; a pass takes as much longer."
        for name, section in scenario.verifiers.items()
        if (ran := section.ran) is not None
    ]
    notes += profiles
    notes += [_energy_note(name, section) for name, section in scenario.devices.items()]
    notes += [
        note for name, section in scenario.devices.items() for note in _power_notes(name, section)
    ]
    notes += [
        _power_note(name, section)
        for name, section in scenario.verifiers.items()
        if section.power_busy_w
    ]
    return tuple(notes)


def _energy_note(name: str, section: sections.DeviceSection) -> str:
    if section.radio_power and section.draft_w:
        return (
            f"Energy of {name}: {section.draft_w:g} W assumed while drafting, and the published"
            f" power of a {section.radio_power} radio (phones of 2012) while it sends, receives,"
            " stays connected and idles, until the next request."
        )
    missing = "radio_power" if not section.radio_power else "draft_w"
    return f"Energy of {name}: not reported, because the scenario has no {missing} for it."


def _power_notes(name: str, section: sections.DeviceSection) -> Iterator[str]:
    """Yield notes on the battery and the temperature of a group of devices."""
    if (battery := section.battery) is not None:
        radio = "radio included" if section.radio_power else "radio left out"
        yield (
            f"Battery of {name}: {battery.full_j / 3600.0:.1f} Wh, from {battery.start:.0%} down to"
            f" {battery.cutoff_v:g} V; idle at {section.idle_w:g} W, {radio}."
        )
    if (thermal := section.thermal) is not None:
        yield (
            f"Heat of {name}: {thermal.k_per_w:g} K/W and {thermal.time_constant_s:g} s in air of"
            f" {thermal.ambient_c:g} °C; steps take {thermal.slowdown:g} times as long from"
            f" {thermal.limit_c:g} °C until it has cooled down to {thermal.cooled_c:g} °C."
        )


def profile_notes(scenario: sections.Scenario, folder: Path) -> tuple[str, ...]:
    """Return a note on each profile of devices that a scenario names. Raises ``ConfigError``."""
    notes = []
    for name, section in scenario.devices.items():
        if section.profile:
            profile = load_profile(section.profile, folder)
            figures = ", ".join(
                f"{key} {figure.value:g} ({figure.kind.value})" for key, figure in profile.figures
            )
            notes.append(f"Profile of {name}: {profile.name}; {figures} (docs/energy.md).")
    return tuple(notes)


def _power_note(name: str, section: sections.VerifierSection) -> str:
    idle_w, busy_w = section.power_idle_w, section.power_busy_w
    if idle_w is None:
        return f"Energy of {name}: at most {busy_w:g} W while a pass runs; idle power is unknown."
    return (
        f"Energy of {name}: at most {busy_w:g} W while a pass runs, and {idle_w:g} W while it is"
        " on and idle. Host, fans and power supply are not included."
    )


def is_lossy(scenario: sections.Scenario, arm: Arm) -> bool:
    """Whether the arm's output may differ from the target's own."""
    return scenario.tokens.lossy_threshold is not None and arm.drafts


def make_loss_notes(
    scenario: sections.Scenario, outcomes: Sequence[tuple[Arm, WorldOutcome]]
) -> tuple[str, ...]:
    """Return one note for each arm whose output is not the target's own."""
    notes = []
    for arm in scenario.arms:
        if is_lossy(scenario, arm):
            counts = [outcome.meters.replaced_tokens for one, outcome in outcomes if one is arm]
            changed, tokens = (sum(column) for column in zip(*counts, strict=True))
            share = changed / tokens if tokens else 0.0
            notes.append(
                f"{rs.LOSSY}: {arm.value} accepts drafts of at least"
                f" {scenario.tokens.lossy_threshold:g} of the best token's probability; {share:.1%}"
                " of its tokens are not the target's."
            )
    return tuple(notes)


def service_notes(scenario: sections.Scenario, arms: Sequence[rs.ArmSummary]) -> tuple[str, ...]:
    """Return notes on the load and the window."""
    notes = []
    if scenario.arrivals is not None:
        notes.append(f"Open loop: {scenario.arrivals.about}. TTFT is from arrival.")
    if scenario.warm_up_s or scenario.drain_limit_s:
        notes.append(
            f"Requests sent from {scenario.warm_up_s:g} to {scenario.duration_s:g} s count;"
            f" they had up to {scenario.drain_limit_s:g} s more to end."
        )
    for one in arms:
        if scenario.drain_limit_s and one.all.unfinished:
            notes.append(
                f"{one.arm}: {one.all.unfinished} requests had not ended by then; they count as"
                " misses, and percentiles do not include the times that they lack."
            )
    return tuple(notes)


def trace_notes(scenario: sections.Scenario, folder: Path) -> tuple[str, ...]:
    """Return notes on the traces of a scenario's links: values that were guessed or not measured,
    and settings that are probably not intended. Raises as ``load_trace``."""
    notes: list[str] = []
    if scenario.radio is not None and (mobility := load_mobility(scenario.radio, folder)):
        where = f"radio.mobility: {mobility.name}"
        notes += [f"{WARNING}{where}: {one}." for one in mobility.warnings]
        if mobility.span_s < scenario.duration_s:
            notes.append(
                f"{where}: its last position is at {mobility.span_s:.0f} s, where the devices stay."
            )
    for name, section in scenario.links.items():
        trace = load_trace(section, "notes", scenario.duration_s, folder)
        if trace is None:
            continue
        where = f"links.{name}.trace: {trace.name}"
        if section.radio_5g is not None and trace.rtt_s is not None:
            notes.append(
                f"{WARNING}{where}: has delays, which include the air's own if it was recorded"
                f" behind one; links.{name}.radio_5g adds them again."
            )
        notes += [f"{WARNING}{where}: {one}." for one in trace.warnings]
        notes += [f"{where}: {one}." for one in trace.remarks]
        if trace.rtt_s is None:
            delay = f"links.{name}.rtt_ms is {section.rtt_ms:g}"
            if section.rtt_ms:
                notes.append(f"{where}: has capacity but no delay; {delay}.")
            else:
                notes.append(
                    f"{WARNING}{where}: has capacity but no delay, and {delay}, so this link has"
                    f" no delay: set it with --set links.{name}.rtt_ms=MS."
                )
        ways = {"up": trace.up_bits_per_s, "down": trace.down_bits_per_s}
        for way, other in (("up", "down"), ("down", "up")):
            no_limit = getattr(section, f"{way}_mbps") == math.inf
            if ways[way] is None and ways[other] is not None and no_limit:
                notes.append(
                    f"{WARNING}{where}: has only the capacity {other}, so the capacity {way} has no"
                    f" limit: set it with --set links.{name}.{way}_mbps=MBPS."
                )
    return tuple(notes)


def air_notes(scenario: sections.Scenario) -> tuple[str, ...]:
    """Return a note on the 5G air of each link that has one."""
    notes = []
    for name, section in scenario.links.items():
        if (air := section.radio_5g) is not None:
            up_s, down_s = mean_waits_s(air)
            notes.append(
                f"links.{name}: 5G air ({air.about}). A lone small message takes {1e3 * up_s:.1f}"
                f" ms on it up and {1e3 * down_s:.1f} ms down, in the mean."
            )
    return tuple(notes)
