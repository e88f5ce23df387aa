"""The results of a run, one summary per arm: the file that reports and sweeps read.

Theory of operation. Simulated and real runs leave the same two things: a trace (``trace.py``) and a
summary. Times are in seconds. Distributions are kept as a few quantiles over requests, so the
summary of a city is as small as that of a laptop. A value that was not measured is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from edgespec.config.files import read_text
from edgespec.config.loading import build
from edgespec_sim.replication import quantile

FORMAT: Final = "edgespec-run"
LOSSY: Final = "LOSSY"
"""Label beside every figure of an arm whose output is not the target's own."""
WARNING: Final = "Warning: "
"""Prefix of notes about settings that are probably not intended. Commands print these notes."""
VERSION: Final = 3
MAX_SUMMARY_BYTES: Final = 1 << 28
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class SummaryError(ValueError):
    """A summary cannot be read. The message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution: its size, its mean and its ``QUANTILES``."""

    count: int
    mean: float
    quantiles: tuple[float, ...]

    @property
    def median(self) -> float:
        return self.quantiles[2]

    @property
    def p95(self) -> float:
        return self.quantiles[4]


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return the distribution of ``values``, with quantiles by linear interpolation. None if
    empty."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(
        len(ordered),
        math.fsum(ordered) / len(ordered),
        tuple(quantile(ordered, share) for share in QUANTILES),
    )


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The requests of one arm, or of one group of devices in it."""

    requests: int
    """Number of completed requests."""
    failed: int
    tokens: int
    """Tokens delivered, without the end token."""
    ttft_s: Spread | None
    """Over requests: time from sending the request to the first token."""
    tpot_s: Spread | None
    """Over requests of at least two tokens: (last - first) / (tokens - 1)."""
    itl_s: Spread | None
    """Over gaps between deliveries. Tokens that arrive together are one delivery, without a gap."""
    tokens_per_second: float
    """Tokens of all requests together, per second of the run."""
    tokens_per_pass: float
    acceptance: float | None
    """Share of positions whose token was the draft's first candidate. None without drafts."""
    wasted_per_token: float
    """Nodes sent that verification did not commit."""
    up_bytes_per_token: float
    down_bytes_per_token: float
    reconnects: int
    request_bytes: float | None = None
    """Mean bytes of a request with its prompt. None if they were not counted."""
    energy_j_per_token: float | None = None
    """Energy of the device: drafting, and its radio in every state. None if a part is unknown."""
    handovers: int = 0
    """Changes of cell during a request."""
    memory_tightened: int = 0
    """How often the memory budget restricted the draft during a request, and lifted a
    restriction."""
    memory_loosened: int = 0
    mismatches: int | None = None
    """Tokens that differ from the target's own stream. None if not compared (relaxed rules)."""
    unfinished: int = 0
    """Requests that had not ended at the end of the run."""
    verifier_j_per_token: float | None = None
    """Energy of the verifiers' passes, divided by rows. None if the power is unknown."""
    verifier_idle_j_per_token: float | None = None
    """Energy of idle verifiers that are on, divided by pass time. None if the power is unknown."""
    guessed: int = 0
    """Nodes that devices sent, and how many of them were accepted."""
    accepted: int = 0
    throttled_share: float | None = None
    """Share of drafting time in which hot devices throttled. None if no device has a
    temperature."""


@dataclass(frozen=True, slots=True)
class Attainment:
    """How the requests of an arm met the objectives. Intervals are 95 % intervals over clusters."""

    asked: int
    """Requests that were judged: all that count and were not cut off by the end of the run."""
    share: float
    """Share of the judged requests that ended well and met every objective."""
    share_interval: tuple[float, float]
    goodput: float
    """Such requests per second."""
    ttft_p95_interval: tuple[float, float] | None
    """95 % interval of the p95 of TTFT, in seconds. None without requests."""
    tpot_p95_interval: tuple[float, float] | None
    slo_ttft_s: float | None = None
    """The objectives for the p95; None if there is none."""
    slo_tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class VerifierSummary:
    name: str
    utilisation: float
    """Share of the run in which a pass or a step of the verifier's own draft model ran."""
    passes: int
    rows_per_pass: float
    sessions_per_pass: float
    queue_s: Spread | None
    """Time from the arrival of drafts to the start of the pass that verifies them."""
    energy_j: float | None = None
    """Energy while passes ran, at the power that the scenario names. None without a power."""
    idle_j: float | None = None
    """Energy while the verifier was on and no pass ran. None if that power is unknown."""
    idle_s: float | None = None
    """Duration of that state, summed over all its machines. None like ``idle_j``."""
    busy_s: float = 0.0
    """Time in passes and draft steps, summed over all its machines and seeds."""
    draft_s: float = 0.0
    """The part of ``busy_s`` in steps of its own draft model."""
    guessed: int = 0
    """Nodes of its own draft model in passes, and how many of them were accepted."""
    accepted: int = 0
    cached_share: float | None = None
    """Share of the tokens of prompts that were cached when a session entered a shared KV cache.
    None without one."""
    ran_s: float | None = None
    """The part of ``busy_s`` that a radio access network on its machines took from passes. None if
    the verifier has them alone."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The mean time per token over the run, in ms, in equal time steps from 0."""

    step_s: float
    values: tuple[float | None, ...]
    """None in a step without a measurement."""
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    """The 95 % interval over several seeds. Empty with one seed."""


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Share of the run in which a link, or the air of one cell, was busy each way. The warm-up is
    included, the time after the end is not. It is the mean over the link's queues, with other
    traffic included."""

    name: str
    up: float
    down: float


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request, for tables. Only the first few hundred of a run are kept."""

    device: str
    verifier: str
    started_s: float
    ttft_s: float | None
    tpot_s: float | None
    tokens: int
    tokens_per_pass: float
    acceptance: float | None
    failed: str = ""
    """The reason of the failure. Empty if the request did not fail."""
    verifier_j: float | None = None
    """Energy of the verifiers' passes, by the request's rows. None if the power is unknown."""
    verifier_idle_j: float | None = None
    """The request's part of the energy between passes. None if the power is unknown."""
    queue_s: float | None = None
    """Mean time from the arrival of drafts at the verifier to the start of their pass. None without
    a pass."""
    up_way_s: float | None = None
    """Mean one-way time of the messages to the verifier, queueing on links included. None if none
    arrived."""
    down_way_s: float | None = None
    """Mean one-way time of the messages to the device. None if none arrived."""
    up_bytes: int = 0
    """Payload of drafts and acknowledgements."""
    down_bytes: int = 0
    """Payload of commits."""
    request_bytes: int = 0
    """Payload of the request itself, with its prompt."""
    device_j: float | None = None
    """Energy of the device: drafting, and its radio in every state. None if a part is unknown."""
    battery: float | None = None
    """Share of the battery's charge at the end of the request. None without a battery."""
    temperature_c: float | None = None
    """Temperature of the device at the end of the request. None if it is not computed."""
    throttled_s: float | None = None
    """Seconds of draft steps that the device throttled. None without battery and temperature."""
    air_up_s: float | None = None
    """Mean time that messages took on a 5G air on their way up: for grants, slots and repetitions.
    None without one."""
    air_down_s: float | None = None
    """Mean time on the way down: for the device's waking, slots and repetitions."""


@dataclass(frozen=True, slots=True)
class PowerCourse:
    """Batteries and temperatures over the run, at the begin of equal time steps from 0: means over
    the devices that have them. None where no device has."""

    step_s: float
    battery: tuple[float | None, ...]
    """Share of the charge that is left."""
    temperature_c: tuple[float | None, ...]
    throttled: tuple[float | None, ...]
    """Share of the devices with a temperature that throttle."""


@dataclass(frozen=True, slots=True)
class ArmSummary:
    arm: str
    label: str
    """Description of the arm. It names the relaxed rule if the output is not the target's own."""
    all: GroupSummary
    groups: dict[str, GroupSummary]
    """Summaries by group of devices. Empty if there is only one group."""
    verifiers: tuple[VerifierSummary, ...]
    pace: Pace | None = None
    rows: tuple[RequestRow, ...] = ()
    speedup: float | None = None
    """Mean TPOT of ``target-only`` in the same run divided by this arm's."""
    speedup_interval: tuple[float, float] | None = None
    """The 95 % interval of ``speedup``. None with a single world, or if it was not computed."""
    gain: float | None = None
    """Mean TPOT of ``RunSummary.alone`` divided by this arm's. None if it was not computed."""
    gain_interval: tuple[float, float] | None = None
    """The 95 % interval of ``gain``. None like ``speedup_interval``."""
    attainment: Attainment | None = None
    """None without objectives and arrivals."""
    tpot_interval: tuple[float, float] | None = None
    """The 95 % interval of the mean TPOT in seconds. None like ``speedup_interval``."""
    links: tuple[LinkLoad, ...] = ()
    """Links whose capacity is known."""
    power: PowerCourse | None = None
    """Batteries and temperatures. None if no device has one."""
    lossy: bool = False
    """Whether a relaxed rule made the output differ from the target's own."""

    @property
    def name(self) -> str:
        """The displayed name, with ``LOSSY`` if the arm is lossy."""
        return f"{self.arm} {LOSSY}" if self.lossy else self.arm

    @property
    def target_ms_per_token(self) -> float:
        """Milliseconds of the verifiers' machines in passes, per delivered token."""
        return self._ms_per_token(math.fsum(one.busy_s - one.draft_s for one in self.verifiers))

    @property
    def draft_ms_per_token(self) -> float:
        """Milliseconds of the verifiers' machines in steps of their own draft models, per token."""
        return self._ms_per_token(math.fsum(one.draft_s for one in self.verifiers))

    def _ms_per_token(self, seconds: float) -> float:
        return 1e3 * seconds / self.all.tokens if self.all.tokens else 0.0


@dataclass(frozen=True, slots=True)
class RunSummary:
    name: str
    about: str
    """Description of the scenario, in a sentence or two."""
    tokens_from: str
    """Source of the tokens: models, a tape, a process."""
    seed: int | None
    simulated: bool
    duration_s: float
    arms: tuple[ArmSummary, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    """The scenario with all its settings, as plain data."""
    notes: tuple[str, ...] = ()
    """Notes that a reader needs: relaxed rules, costs that were not measured, ..."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions, machine and command."""
    seeds: int = 1
    """Number of seeds that were played; ``seed`` is the first of them."""
    alone: str = ""
    """The fastest arm that needs no device: plain streaming, or a server that drafts by itself.
    Empty if no such arm was run."""

    @property
    def marked_name(self) -> str:
        """Name for titles, which begins with the lossy arms if there are any."""
        lossy = [arm.arm for arm in self.arms if arm.lossy]
        return f"{LOSSY} ({', '.join(lossy)}): {self.name}" if lossy else self.name

    def to_json(self) -> str:
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def read_summary(path: Path) -> RunSummary:
    """Read a summary from a file. Raises ``SummaryError``."""
    try:
        data = json.loads(read_text(path, MAX_SUMMARY_BYTES))
        if data.pop("format") != FORMAT or data.pop("version") != VERSION:
            raise ValueError(f"not a summary of format {FORMAT} version {VERSION}")
        return build(RunSummary, data, "it")
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise SummaryError(f"{path}: not readable as a summary: {error}") from error
