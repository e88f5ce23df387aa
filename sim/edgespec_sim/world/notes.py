"""What a reader of a run has to know: where times and energies come from, and what was relaxed."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.bench.arms import Arm
from edgespec_sim.scenario.costs import measured
from edgespec_sim.scenario.sections import DeviceSection, Scenario, VerifierSection
from edgespec_sim.world.assembly import WorldOutcome


def notes_of(scenario: Scenario) -> tuple[str, ...]:
    """Where times and energies come from."""
    notes = [
        f"Draft steps of {name}: {measured(section.draft)}."
        for name, section in scenario.devices.items()
    ]
    notes += [
        f"Passes of {name}: {measured(section.pass_time)}."
        for name, section in scenario.verifiers.items()
    ]
    notes += [_energy_note(name, section) for name, section in scenario.devices.items()]
    notes += [
        _power_note(name, section)
        for name, section in scenario.verifiers.items()
        if section.power_busy_w
    ]
    return tuple(notes)


def _energy_note(name: str, section: DeviceSection) -> str:
    if section.radio_power and section.draft_w:
        return (
            f"Energy of {name}: {section.draft_w:g} W assumed while drafting, and the published"
            f" powers of a {section.radio_power} radio (phones of 2012) while it sends, receives,"
            " stays connected and idles, until the next question."
        )
    missing = "radio_power" if not section.radio_power else "draft_w"
    return f"Energy of {name}: not reported, as the scenario has no {missing} for it."


def _power_note(name: str, section: VerifierSection) -> str:
    idle_w, busy_w = section.power_idle_w, section.power_busy_w
    if idle_w is None:
        return f"Energy of {name}: {busy_w:g} W while a pass runs, at most; idle time is not known."
    return (
        f"Energy of {name}: {busy_w:g} W while a pass runs, at most, and {idle_w:g} W while it is"
        " powered and idle. Host, fans and power supply are not in it."
    )


def is_lossy(scenario: Scenario, arm: Arm) -> bool:
    """Whether its output may differ from the target's own."""
    return scenario.tokens.lossy_threshold is not None and arm.drafts


def losses_of(scenario: Scenario, outcomes: Sequence[tuple[Arm, WorldOutcome]]) -> tuple[str, ...]:
    """One note an arm whose output is not the target's own."""
    notes = []
    for arm in scenario.arms:
        if is_lossy(scenario, arm):
            counts = [outcome.meters.changed for one, outcome in outcomes if one is arm]
            changed, tokens = (sum(column) for column in zip(*counts, strict=True))
            share = changed / tokens if tokens else 0.0
            rising = ", more for what matters" if scenario.tokens.lossy_by_importance else ""
            notes.append(
                f"LOSSY: {arm.value} tolerates drafts from {scenario.tokens.lossy_threshold:g} of"
                f" the best token's probability on{rising}; {share:.1%} of its tokens are"
                " not the target's."
            )
    return tuple(notes)
