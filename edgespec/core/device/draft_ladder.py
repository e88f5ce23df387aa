"""The ladder keeps drafting from emptying a battery, heating a device or crowding others out.

Theory of operation. A driver reads the machine now and then and tells the ladder. Each *source*
(battery, temperature, cores that other programs use) wants a rung by how near it is to its limit,
and the lowest one wins:

    all -> narrow: one guess a step -> thrifty: only steps that save a tenth of a token -> none

Going down is at once, and begins before the limit is reached. Going up is one rung at a time, when
every source has been clear of the rung's bound by its margin for ``RECOVERY_S``. A source that
says nothing wants nothing. Whatever the rung, the text is the same: drafts are hints.

``LadderPolicy`` is the draft policy of a device with a ladder: that of the rung it stands on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

from edgespec.core.device.draft_view import DraftView
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import (
    DraftPolicy,
    FixedPolicy,
    PearlPolicy,
    WindowedPolicy,
)
from edgespec.core.device.preference import WORTH, Prefer

RECOVERY_S: Final = 30.0
"""How long all must have been well before the next rung up."""


class Rung(IntEnum):
    """How much is drafted, most first."""

    ALL = 0
    NARROW = 1
    THRIFTY = 2
    NONE = 3


@dataclass(frozen=True, slots=True)
class MachineReading:
    """What the machine says of itself; None: nothing."""

    battery: float | None = None
    """Charge from 0 to 1, of a battery that is being emptied; None while it is plugged in."""
    celsius: float | None = None
    """Of the hottest sensor."""
    others_load: float | None = None
    """Share of all cores that other programs use."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a source asks for the rungs below ``ALL``, in their order, and by how much it has to be
    clear of a bound to go back above its rung. Raises ``ValueError`` unless they get worse."""

    bounds: tuple[float, float, float]
    margin: float
    falling: bool = False
    """Less is worse."""

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.bounds, reverse=self.falling))
        if self.bounds != ordered or self.margin <= 0.0:
            raise ValueError(
                f"bounds are {self.bounds} with a margin of {self.margin:g}, but must get"
                f" {'lower' if self.falling else 'higher'} with a margin above 0"
            )

    def rung(self, value: float, margin: float = 0.0) -> Rung:
        """The lowest rung whose bound is reached, or missed by less than ``margin``."""
        sign = -1.0 if self.falling else 1.0
        reached = sum(sign * value + margin >= sign * bound for bound in self.bounds)
        return Rung(reached)


BATTERY: Final = Bounds((0.3, 0.2, 0.1), margin=0.05, falling=True)
CELSIUS: Final = Bounds((70.0, 78.0, 85.0), margin=4.0)
"""Processors of laptops and phones slow themselves down between 85 and 100 degrees."""
OTHERS_LOAD: Final = Bounds((0.6, 0.8, 0.95), margin=0.1)


class DraftLadder:
    """``observe`` after each reading; ``rung`` and ``why`` hold until the next one."""

    def __init__(
        self,
        battery: Bounds = BATTERY,
        celsius: Bounds = CELSIUS,
        others_load: Bounds = OTHERS_LOAD,
        recovery_s: float = RECOVERY_S,
    ) -> None:
        self.rung = Rung.ALL
        self.why = ""
        """What asked for the rung, in words; empty on the highest."""
        self.walked_down = 0
        """How often a rung was left downwards."""
        self._battery, self._celsius, self._load = battery, celsius, others_load
        self._recovery_s = recovery_s
        self._well_since: float | None = None

    def observe(self, seen: MachineReading, now: float) -> Rung | None:
        """The rung that holds from now on; None: as before."""
        wanted = max((bounds.rung(value) for bounds, value, _ in self._sources(seen)), default=0)
        if wanted > self.rung:
            self.walked_down += 1
            return self._stand(Rung(wanted), seen)
        held = max(
            (bounds.rung(value, bounds.margin) for bounds, value, _ in self._sources(seen)),
            default=0,
        )
        if self.rung is Rung.ALL or held >= self.rung:
            self._well_since = None
            return None
        if self._well_since is None:
            self._well_since = now
        if now - self._well_since < self._recovery_s:
            return None
        return self._stand(Rung(self.rung - 1), seen)

    def _stand(self, rung: Rung, seen: MachineReading) -> Rung:
        self.rung, self._well_since = rung, None
        worst = max(self._sources(seen), key=lambda one: one[0].rung(one[1]), default=None)
        if rung is Rung.ALL:
            self.why = ""
        elif worst is not None and worst[0].rung(worst[1]) >= rung:
            self.why = worst[2]
        return rung

    def _sources(self, seen: MachineReading) -> Iterator[tuple[Bounds, float, str]]:
        if seen.battery is not None:
            yield self._battery, seen.battery, f"the battery is at {seen.battery:.0%}"
        if seen.celsius is not None:
            yield self._celsius, seen.celsius, f"the device is at {seen.celsius:.0f} °C"
        if seen.others_load is not None:
            load = seen.others_load
            yield self._load, load, f"other programs use {load:.0%} of the cores"


@dataclass(frozen=True, slots=True)
class LadderPolicy:
    """``inner`` on the highest rung of ``ladder``, and what is left of it below."""

    inner: DraftPolicy
    ladder: DraftLadder

    @property
    def width(self) -> int:
        return self.standing.width

    @property
    def least_choice(self) -> float:
        return self.standing.least_choice

    def extend(self, view: DraftView) -> int | None:
        return None if self.ladder.rung is Rung.NONE else self.standing.extend(view)

    def flush(self, view: DraftView) -> bool:
        if self.ladder.rung is Rung.NONE:
            return view.unsent > 0  # what was drafted before is sent, and no more comes
        return self.standing.flush(view)

    @property
    def standing(self) -> DraftPolicy:
        """That of the rung, which on the lowest is not asked what to draft."""
        inner = self.inner
        if self.ladder.rung is Rung.ALL:
            return inner
        if self.ladder.rung is Rung.NARROW and isinstance(
            inner, WindowedPolicy | GoodputPolicy | FixedPolicy | PearlPolicy
        ):
            return replace(inner, width=1)
        return GoodputPolicy(1, WORTH[Prefer.BATTERY].least_gain)
