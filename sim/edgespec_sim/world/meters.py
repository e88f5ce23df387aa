"""The measurements of a running scenario, and their summary.

Worlds of one seed are added (``merge``) and seeds are pooled (``pool``): rates are means over
seeds, while requests, tokens and distributions cover all seeds.

Rules of this file: only delivered tokens before the end token count, and times are those that the
user sees. A commit of four tokens is one delivery, with one gap before it and none inside.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from edgespec.core.device.events import DraftCounters
from edgespec_sim.replication import TpotTotal, ratio_interval
from edgespec_sim.run_summary import (
    GroupSummary,
    Pace,
    PowerCourse,
    RequestRow,
    Spread,
    spread_of,
)

MAX_ROWS = 500
"""Most requests in the tables of a run: more would make its page slow, and the distributions show
the rest."""
PACE_STEPS = 30
"""Time steps of the time per token over a run. More steps would need more tokens per step."""


@dataclass(slots=True)
class RequestRecord:
    """One request, as far as it got."""

    group: str
    device: str
    verifier: str
    started_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    tokens: int = 0
    counters: DraftCounters = field(default_factory=DraftCounters)
    up_bytes: int = 0
    down_bytes: int = 0
    request_bytes: int = 0
    """Bytes of the request itself, its prompt included. The other two leave it out."""
    energy_j: float = 0.0
    mismatches: int = 0
    lossy: bool = False
    """Whether mismatches come from a relaxed rule and are no fault."""
    complete: bool = False
    """False if the world ended first, perhaps before the request began."""
    failed: str = ""
    handovers: int = 0
    """Changes of cell during the request."""
    memory_tightened: int = 0
    """How often the memory budget restricted the draft during the request, and lifted a
    restriction."""
    memory_loosened: int = 0
    pace_s: float | None = None
    """Like ``tpot_s``, but also measured so far for a request that the world's end cut off."""
    energy_known: bool = False
    """Whether ``energy_j`` is complete: drafting, and the radio in each state."""
    up_way_s: float | None = None
    """Mean one-way time of the messages to the verifier, from sending to arrival; None if none
    arrived."""
    down_way_s: float | None = None
    """Mean one-way time of the messages to the device."""
    drafting_s: float = 0.0
    """Seconds of draft steps."""
    throttled_s: float | None = None
    """The throttled part of ``drafting_s``. None without a temperature or a battery."""
    battery: float | None = None
    """Share of the battery's charge at the end of the request. None without a battery."""
    temperature_c: float | None = None
    """Temperature of the device at the end of the request."""
    air_up_s: float | None = None
    """Mean time that the request's messages took on the 5G air up. None without one."""
    air_down_s: float | None = None
    session: str = ""
    """Session id of the request. Empty if it never had a session."""
    verifier_j: float | None = None
    verifier_idle_j: float | None = None
    """The request's part of its verifiers' energy, computed at the world's end."""


@dataclass(slots=True)
class PowerSample:
    """Batteries and temperatures at one time, summed over the devices that have them."""

    batteries: int = 0
    battery: float = 0.0
    devices: int = 0
    """Number of devices with a temperature."""
    temperature_c: float = 0.0
    throttled: int = 0

    def add(self, other: PowerSample) -> None:
        self.batteries += other.batteries
        self.battery += other.battery
        self.devices += other.devices
        self.temperature_c += other.temperature_c
        self.throttled += other.throttled


@dataclass(slots=True)
class Meters:
    """The measurements of one arm; shards of a world are added. Records, gaps and times per token
    are those of requests that count. The time per token ends at ``duration_s``, even if requests
    end later."""

    duration_s: float
    window_s: float
    """Length of the window in which requests that count are sent. Rates refer to it."""
    records: list[RequestRecord] = field(default_factory=list)
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    pace_at: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)] * PACE_STEPS)
    """For each time step, over the tokens after a request's first that arrived in it: the summed
    times since the previous token, and the number of tokens."""
    power_at: list[PowerSample] = field(default_factory=list)
    """For each time step, the devices' batteries and temperatures at its begin. Empty if no device
    has one."""
    seeds: int = 1
    """Number of pooled seeds."""

    def record_power(
        self, step: int, battery: float | None, temperature_c: float | None, is_throttled: bool
    ) -> None:
        """Record one device's battery and temperature at the begin of a time step."""
        if not self.power_at:
            self.power_at = [PowerSample() for _ in range(PACE_STEPS)]
        sample = self.power_at[step]
        if battery is not None:
            sample.batteries += 1
            sample.battery += battery
        if temperature_c is not None:
            sample.devices += 1
            sample.temperature_c += temperature_c
            sample.throttled += is_throttled

    def record_delivery(self, times_s: Sequence[float]) -> None:
        """Record the arrival times of all tokens of one request that counts."""
        for before_s, at_s in itertools.pairwise(times_s):
            if at_s > before_s:
                self.gaps_s.append(at_s - before_s)
            if at_s <= self.duration_s:
                step = min(int(at_s / self.duration_s * PACE_STEPS), PACE_STEPS - 1)
                seconds, tokens = self.pace_at[step]
                self.pace_at[step] = (seconds + at_s - before_s, tokens + 1)

    def merge(self, other: Meters) -> None:
        """Add the measurements of another shard of the same world."""
        self.records += other.records
        self.gaps_s.extend(other.gaps_s)
        for step, (seconds, tokens) in enumerate(other.pace_at):
            mine_s, mine = self.pace_at[step]
            self.pace_at[step] = (mine_s + seconds, mine + tokens)
        if not self.power_at:
            self.power_at = [PowerSample() for _ in other.power_at]
        for sample, more in zip(self.power_at, other.power_at, strict=True):
            sample.add(more)

    def pool(self, other: Meters) -> None:
        """Add another seed of the same arm."""
        self.merge(other)
        self.seeds += other.seeds

    @property
    def tpot(self) -> TpotTotal:
        """Total of the TPOTs of the requests that have one."""
        times_s = _drop_none(one.tpot_s for one in self.records)
        return TpotTotal(math.fsum(times_s), len(times_s))

    @property
    def replaced_tokens(self) -> tuple[int, int]:
        """Tokens that a relaxed rule changed, and tokens delivered under such a rule."""
        lossy = [one for one in self.records if one.lossy]
        return sum(one.mismatches for one in lossy), sum(one.tokens for one in lossy)

    def rows(self) -> tuple[RequestRow, ...]:
        """Return the first ``MAX_ROWS`` requests as rows of a table."""
        return tuple(make_request_row(one) for one in self.records[:MAX_ROWS])

    def whole(self) -> GroupSummary:
        """Return the summary of all requests."""
        return self._group(self.records, spread_of(self.gaps_s))

    def queue_s(self, verifier: str) -> Spread | None:
        """Return the distribution of the time from the arrival of drafts to their pass, as the mean
        of each request that the verifier served."""
        return spread_of(
            [
                one.counters.queue_s / one.counters.passes
                for one in self.records
                if one.verifier == verifier and one.counters.passes
            ]
        )

    def groups(self) -> dict[str, GroupSummary]:
        """Return the summary of each group of devices; empty if there is only one."""
        names = dict.fromkeys(one.group for one in self.records)
        if len(names) < 2:
            return {}
        return {
            name: self._group([one for one in self.records if one.group == name], None)
            for name in names
        }

    def power_course(self) -> PowerCourse | None:
        """Return the mean battery and temperature over time. None if no device has one."""
        if not self.power_at:
            return None
        return PowerCourse(
            self.duration_s / PACE_STEPS,
            tuple(one.battery / one.batteries if one.batteries else None for one in self.power_at),
            tuple(
                one.temperature_c / one.devices if one.devices else None for one in self.power_at
            ),
            tuple(one.throttled / one.devices if one.devices else None for one in self.power_at),
        )

    def _group(self, records: Sequence[RequestRecord], gaps_s: Spread | None) -> GroupSummary:
        def total(value: Callable[[RequestRecord], float]) -> float:
            return math.fsum(map(value, records))

        tokens = int(total(lambda one: one.tokens))
        tried = total(lambda one: one.counters.tried)
        known = tokens and all(one.energy_known for one in records)
        return GroupSummary(
            requests=sum(one.complete and not one.failed for one in records),
            failed=sum(bool(one.failed) for one in records),
            unfinished=sum(not one.complete for one in records),
            tokens=tokens,
            ttft_s=spread_of(_drop_none(one.ttft_s for one in records)),
            tpot_s=spread_of(_drop_none(one.tpot_s for one in records)),
            itl_s=gaps_s,
            tokens_per_second=tokens / (self.window_s * self.seeds),
            tokens_per_pass=ratio(
                total(lambda one: one.counters.committed), total(lambda one: one.counters.passes)
            ),
            acceptance=total(lambda one: one.counters.hits) / tried if tried else None,
            wasted_per_token=ratio(total(lambda one: one.counters.wasted), tokens),
            up_bytes_per_token=ratio(total(lambda one: one.up_bytes), tokens),
            down_bytes_per_token=ratio(total(lambda one: one.down_bytes), tokens),
            request_bytes=ratio(total(lambda one: one.request_bytes), len(records)) or None,
            reconnects=int(total(lambda one: one.counters.reconnects)),
            handovers=int(total(lambda one: one.handovers)),
            memory_tightened=int(total(lambda one: one.memory_tightened)),
            memory_loosened=int(total(lambda one: one.memory_loosened)),
            energy_j_per_token=total(lambda one: one.energy_j) / tokens if known else None,
            mismatches=_count_mismatches(records),
            verifier_j_per_token=_energy_per_token([one.verifier_j for one in records], tokens),
            verifier_idle_j_per_token=_energy_per_token(
                [one.verifier_idle_j for one in records], tokens
            ),
            throttled_share=_find_throttled_share(records),
            guessed=int(total(lambda one: one.counters.sent)),
            accepted=int(total(lambda one: one.counters.accepted)),
        )


def make_request_row(one: RequestRecord) -> RequestRow:
    """Return a request as a row of tables."""
    counters = one.counters
    return RequestRow(
        one.device,
        one.verifier,
        one.started_s,
        one.ttft_s,
        one.tpot_s,
        one.tokens,
        ratio(one.counters.committed, one.counters.passes),
        one.counters.acceptance,
        one.failed or ("" if one.complete else "the world ended first"),
        verifier_j=one.verifier_j,
        verifier_idle_j=one.verifier_idle_j,
        queue_s=counters.queue_s / counters.passes if counters.passes else None,
        up_way_s=one.up_way_s,
        down_way_s=one.down_way_s,
        up_bytes=one.up_bytes,
        down_bytes=one.down_bytes,
        request_bytes=one.request_bytes,
        device_j=one.energy_j if one.energy_known else None,
        battery=one.battery,
        temperature_c=one.temperature_c,
        throttled_s=one.throttled_s,
        air_up_s=one.air_up_s,
        air_down_s=one.air_down_s,
    )


def _find_throttled_share(records: Sequence[RequestRecord]) -> float | None:
    """Return the share of drafting time that was throttled. None if no device has a temperature."""
    known = [one for one in records if one.temperature_c is not None]
    if not known:
        return None
    throttled_s = math.fsum(one.throttled_s or 0.0 for one in known)
    return ratio(throttled_s, math.fsum(one.drafting_s for one in known))


def _count_mismatches(records: Sequence[RequestRecord]) -> int | None:
    lossy = any(one.lossy for one in records)
    return None if lossy else sum(one.mismatches for one in records)


def _energy_per_token(joules: Sequence[float | None], tokens: int) -> float | None:
    """Return the energy per token. None if a part is unknown."""
    if not tokens or None in joules:
        return None
    return math.fsum(one or 0.0 for one in joules) / tokens


def _drop_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def compute_pace(seeds: Sequence[Meters]) -> Pace:
    """Return the time per token over all tokens in each time step. With several seeds it has
    intervals."""
    found = [ratio_interval(same) for same in zip(*(one.pace_at for one in seeds), strict=True)]
    several = len(seeds) > 1
    return Pace(
        seeds[0].duration_s / PACE_STEPS,
        tuple(None if one is None else 1e3 * one.value for one in found),
        tuple(None if one is None else 1e3 * one.low for one in found) if several else (),
        tuple(None if one is None else 1e3 * one.high for one in found) if several else (),
    )
