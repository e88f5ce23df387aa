"""What a plan of capacity is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from edgespec.bench.arms import Arm
from edgespec_sim.planning.mean_field import check_mean_field
from edgespec_sim.planning.service_curves import dealt
from edgespec_sim.scenario.arrival_sections import (
    ArrivalKind,
    ArrivalsSection,
    AtDevice,
    SloSection,
)
from edgespec_sim.scenario.sections import MAX_DEVICES, Scenario

MOST_VERIFIERS: Final = 10_000
# Devices of an open loop: so many that a request hardly ever finds its device busy.
_DEVICES_A_RATE: Final = 60.0
_LEAST_DEVICES: Final = 64
WARM_UP_CYCLES: Final = 2.0
"""Of requests, before those that count: nobody is served at the start."""


class Meets(Enum):
    """Whether objectives are met, as far as an interval decides it."""

    YES = "yes"
    LIKELY = "likely"
    UNLIKELY = "unlikely"
    NO = "no"

    @property
    def by_value(self) -> bool:
        return self in (Meets.YES, Meets.LIKELY)

    @property
    def decided(self) -> bool:
        return self in (Meets.YES, Meets.NO)


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """How many verifiers, and which arm, keep ``slo`` for the users of ``scenario``, or for
    ``rate`` requests a second of theirs? Raises ``ValueError`` for what cannot be answered."""

    scenario: Scenario
    """One kind of verifier; its ``count`` does not matter."""
    slo: SloSection
    arms: tuple[Arm, ...]
    folder: Path
    seed: int = 1
    rate: float | None = None
    """None: a closed loop of the scenario's devices."""

    def __post_init__(self) -> None:
        check_mean_field(self.scenario)
        if not self.slo.given:
            raise ValueError("no objective is given: a plan needs --ttft-p95 or --tpot-p95")
        kinds = ", ".join(self.scenario.verifiers)
        if len(self.scenario.verifiers) != 1:
            raise ValueError(f"verifiers are {kinds}, but a plan of capacity takes one kind")
        if self.scenario.radio is not None:
            raise ValueError("the scenario has a radio, but a plan of capacity takes wired links")
        if self.rate is not None:
            ArrivalsSection(rate=self.rate)

    @property
    def kind(self) -> str:
        return next(iter(self.scenario.verifiers))

    @property
    def users(self) -> int:
        return sum(section.count for section in self.scenario.devices.values())

    @property
    def weights(self) -> dict[str, float]:
        """Devices of each group."""
        return {name: float(section.count) for name, section in self.scenario.devices.items()}

    def world(self, arm: Arm, verifiers: int, of: int, window_s: float, cycle_s: float) -> Scenario:
        """``verifiers`` out of ``of`` alike with their part of the load, near the long run from the
        start; ``cycle_s`` is about what a request takes."""
        part = verifiers / of
        scenario, arrivals = self.scenario, None
        if self.rate is None:
            count = max(1, round(self.users * part))
        else:
            arrivals = ArrivalsSection(ArrivalKind.POISSON, self.rate * part, at=AtDevice.FREE)
            count = math.ceil(self.rate * part * _DEVICES_A_RATE) + _LEAST_DEVICES
        if count > MAX_DEVICES:
            raise ValueError(f"a world of {count} devices is asked for, the limit is {MAX_DEVICES}")
        counts = dealt(self.weights, count)
        section = scenario.verifiers[self.kind]
        warm_up_s = WARM_UP_CYCLES * cycle_s
        return replace(
            scenario,
            shards=1,
            arms=(arm,),
            slo=self.slo,
            arrivals=arrivals,
            warm_up_s=warm_up_s,
            duration_s=warm_up_s + window_s,
            drain_s=cycle_s,
            devices={
                name: replace(
                    scenario.devices[name],
                    count=count,
                    workload=replace(scenario.devices[name].workload, start_thinking=True),
                )
                for name, count in counts.items()
            },
            verifiers={self.kind: replace(section, count=verifiers)},
            distances_ms={
                group: row for group, row in scenario.distances_ms.items() if group in counts
            },
        )


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the mean field says of one arm on so many verifiers."""

    verifiers: int
    ttft_p95_s: float
    tpot_p95_s: float
    active: float
    """Sessions a verifier."""
    utilisation: float
    cycle_s: float
    """Of a mean request."""
    within: bool
    """False: more sessions than the curve was measured for, so the times are too short."""

    def meets(self, slo: SloSection, ttft_factor: float = 1.0, tpot_factor: float = 1.0) -> bool:
        """``..._factor``: what events say over what the mean field says."""
        return (
            self.within
            and ttft_factor * self.ttft_p95_s <= slo.ttft_s
            and tpot_factor * self.tpot_p95_s <= slo.tpot_s
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """What events say of one arm on so many verifiers. Triples are a value and its 95 % interval,
    in seconds."""

    verifiers: int
    played: int
    """Of them, with their part of the load."""
    seeds: int
    requests: int
    unfinished: int
    """That had no second token when the world ended."""
    ttft_p95_s: tuple[float, float, float]
    tpot_p95_s: tuple[float, float, float]
    utilisation: float
    meets: Meets


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One arm. ``verifiers`` None: no number of them meets the objectives, and ``why`` says what
    forbids it."""

    arm: Arm
    verifiers: int | None
    predicted: Predicted | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The arm to take, on how many verifiers, and how sure that is."""

    arms: tuple[ArmPlan, ...]
    arm: Arm | None
    """None: none of them meets the objectives."""
    verifiers: int
    interval: tuple[int, int]
    """95 %: what the intervals of the events leave open."""
    observed: Mapping[int, Observed]
    """By number of verifiers, of ``arm``."""
    confirmed: bool
    """Events say that so many meet the objectives and one less does not."""
    why_not: str = ""
    """If it is not confirmed."""
