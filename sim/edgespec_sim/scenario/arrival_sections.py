"""When requests come from outside, and what they are held against: arrivals, and objectives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from edgespec.core.protocol.checks import bounded

HOURS = 24
MOST_PER_S = 10_000.0
DRAIN_S = 60.0
"""Of an open loop whose scenario does not say."""


class ArrivalKind(Enum):
    POISSON = "poisson"
    DIURNAL = "diurnal"
    RECORDED = "recorded"


class AtDevice(Enum):
    """What becomes of a request whose device is busy."""

    OWN = "own"
    """It waits there, behind those that came before it."""
    FREE = "free"
    """It takes the next free device of the same group, and waits for one if there is none."""


@dataclass(frozen=True, slots=True)
class ArrivalsSection:
    """An open loop: requests come whether or not earlier ones have ended. Each comes at a device
    that is drawn evenly; instants, devices, lengths and questions are the same for every arm."""

    kind: ArrivalKind = ArrivalKind.POISSON
    rate: float = 0.0
    """poisson: requests a second, of all devices together."""
    rates: tuple[float, ...] = ()
    """diurnal: requests a second at 0 h, 1 h, ... 23 h; a line between, and the day begins anew."""
    from_h: float = 0.0
    """diurnal: the hour of the day at which the world begins."""
    compress: float = 1.0
    """diurnal: seconds of the day that one second of the world stands for. Rates stay as they
    are: 24 h in 24 minutes have a sixtieth of the requests."""
    file: str = ""
    """recorded: CSV or JSONL with ``time_s`` (or ``timestamp``), and lengths where it has them."""
    speed: float = 1.0
    """recorded: how many times faster it is played; the rate rises with it."""
    at: AtDevice = AtDevice.OWN

    def __post_init__(self) -> None:
        given = {"rate": bool(self.rate), "rates": bool(self.rates), "file": bool(self.file)}
        wanted = {
            ArrivalKind.POISSON: "rate",
            ArrivalKind.DIURNAL: "rates",
            ArrivalKind.RECORDED: "file",
        }[self.kind]
        for name, is_given in given.items():
            if is_given != (name == wanted):
                verb = "is missing" if name == wanted else "is given"
                raise ValueError(f"{name} {verb}, but {self.kind.value} arrivals take {wanted}")
        if self.kind is ArrivalKind.POISSON:
            bounded("rate", self.rate, 0.0, MOST_PER_S, open_low=True)
        if self.rates and len(self.rates) != HOURS:
            raise ValueError(f"rates has {len(self.rates)} numbers, but must have {HOURS}")
        for rate in self.rates:
            bounded("rates", rate, 0.0, MOST_PER_S)
        if self.rates and not any(self.rates):
            raise ValueError("rates are all 0, but one of them must be above it")
        bounded("from_h", self.from_h, 0.0, float(HOURS))
        bounded("compress", self.compress, 1.0, 86_400.0)
        bounded("speed", self.speed, 1e-3, 1e4)

    @property
    def about(self) -> str:
        """For a reader: what comes, and where it waits."""
        if self.kind is ArrivalKind.POISSON:
            what = f"Poisson, {self.rate:g} requests/s"
        elif self.kind is ArrivalKind.DIURNAL:
            what = f"a day's curve, {min(self.rates):g} to {max(self.rates):g} requests/s"
        else:
            faster = f", {self.speed:g} times as fast" if self.speed != 1.0 else ""
            what = f"recorded in {self.file}{faster}"
        where = {
            AtDevice.OWN: "at its own device, and waits there",
            AtDevice.FREE: "at a free device, and waits for one",
        }[self.at]
        return f"{what}; each comes {where}"

    def rate_at(self, now_s: float) -> float:
        """Requests a second (poisson and diurnal)."""
        if self.kind is ArrivalKind.POISSON:
            return self.rate
        hour = (self.from_h + now_s * self.compress / 3600.0) % HOURS
        low = int(hour) % HOURS
        share = hour - int(hour)
        return (1.0 - share) * self.rates[low] + share * self.rates[(low + 1) % HOURS]

    @property
    def most(self) -> float:
        """The highest rate of all (poisson and diurnal)."""
        return max((self.rate, *self.rates))

    def divided(self, parts: int) -> ArrivalsSection:
        """One of so many equal shares. Raises ``ValueError`` for recorded ones."""
        if self.kind is ArrivalKind.RECORDED:
            raise ValueError(
                f"shards is {parts}, but recorded arrivals are played in one world: shards 1"
            )
        rates = tuple(rate / parts for rate in self.rates)
        return replace(self, rate=self.rate / parts, rates=rates)

    def check_workloads(self, requests: Mapping[str, int]) -> None:
        """``requests``: how many each group of devices is to ask by itself, which must be none.
        Raises ``ValueError``."""
        for name, count in requests.items():
            if count:
                raise ValueError(
                    f"devices.{name}.workload.requests is {count}, but with"
                    " arrivals the requests come from there: 0"
                )


@dataclass(frozen=True, slots=True)
class SloSection:
    """Objectives of service: 95 % of the requests have to keep to each. A request attains them if
    it ended well and keeps to both."""

    ttft_p95_ms: float | None = None
    tpot_p95_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft_p95_ms", self.ttft_p95_ms), ("tpot_p95_ms", self.tpot_p95_ms)):
            if value is not None:
                bounded(name, value, 0.1, 3_600_000.0)

    @property
    def ttft_s(self) -> float:
        """Infinite where there is none."""
        return math.inf if self.ttft_p95_ms is None else self.ttft_p95_ms / 1e3

    @property
    def tpot_s(self) -> float:
        return math.inf if self.tpot_p95_ms is None else self.tpot_p95_ms / 1e3

    @property
    def given(self) -> bool:
        return self.ttft_p95_ms is not None or self.tpot_p95_ms is not None


def window_s(duration_s: float, warm_up_s: float) -> float:
    """How long requests count that are asked in it. Raises ``ValueError``."""
    if not 0.0 <= warm_up_s < duration_s:
        raise ValueError(
            f"warm_up_s is {warm_up_s:g}, but must be at least 0 and less than duration_s, "
            f"{duration_s:g}"
        )
    return duration_s - warm_up_s
