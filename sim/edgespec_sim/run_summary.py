"""What came out of a run, one summary an arm: the file that reports and sweeps read.

Theory of operation. A simulated run and a real one leave the same two things: a trace
(``trace.py``) and a summary. Times are in seconds; distributions are kept as a few quantiles over
requests, so that a city's summary is as small as a laptop's. What was not measured is None.
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
"""Beside every figure of an arm whose output is not the target's own."""
WARNING: Final = "Warning: "
"""A note that begins so is about something that is hardly meant; commands print it."""
VERSION: Final = 3
MAX_SUMMARY_BYTES: Final = 1 << 28
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class SummaryError(ValueError):
    """A summary cannot be read; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution: its mean, its size and ``QUANTILES``."""

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
    """None of nothing. Quantiles by linear interpolation."""
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
    """Completed."""
    failed: int
    tokens: int
    """Delivered before the end token."""
    ttft_s: Spread | None
    """Over requests: from asking to the first token."""
    tpot_s: Spread | None
    """Over requests of two tokens or more: (last - first) / (tokens - 1)."""
    itl_s: Spread | None
    """Over gaps between deliveries: tokens that come together are one delivery, without a gap."""
    tokens_per_second: float
    """Of all requests together, per second of the run."""
    tokens_per_pass: float
    acceptance: float | None
    """Share of positions whose token was the draft's first choice; None without drafts."""
    wasted_per_token: float
    """Nodes sent that were not committed by being verified."""
    up_bytes_per_token: float
    down_bytes_per_token: float
    reconnects: int
    energy_j_per_token: float | None = None
    """Of the device: drafting, and its radio in every state; None where a part is not known."""
    handovers: int = 0
    """Changes of cell while a request ran."""
    memory_tightened: int = 0
    """Restrictions of a draft by its memory budget while a request ran, and their ends."""
    memory_loosened: int = 0
    mismatches: int | None = None
    """Tokens that differ from the target's own stream; None: not compared (relaxed rules)."""
    unfinished: int = 0
    """Asked, and not over when the run was."""
    verifier_j_per_token: float | None = None
    """Of the verifiers' passes, by rows in them; None where powers are not known."""
    verifier_idle_j_per_token: float | None = None
    """Of idle powered verifiers, by what passes took for these requests; None as above."""
    guessed: int = 0
    """Nodes that devices sent, and how many were accepted."""
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Attainment:
    """What the requests of an arm came to beside objectives. Intervals are of 95 %, by pairs."""

    asked: int
    """Requests that were judged: all that count and were not cut off by the run's end."""
    share: float
    """Of them, those that ended well and kept to every objective."""
    share_interval: tuple[float, float]
    goodput: float
    """Such requests a second."""
    ttft_p95_interval: tuple[float, float] | None
    """Seconds."""
    tpot_p95_interval: tuple[float, float] | None
    slo_ttft_s: float | None = None
    """The objectives for 95 % of the requests; None: there is none."""
    slo_tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class VerifierSummary:
    name: str
    utilisation: float
    """Share of the run in which a pass ran, or a step of its own draft model."""
    passes: int
    rows_per_pass: float
    sessions_per_pass: float
    queue_s: Spread | None
    """From the arrival of drafts to the start of the pass that takes them."""
    energy_j: float | None = None
    """While passes ran, at the power that the scenario names; None without one."""
    idle_j: float | None = None
    """While it was powered and no pass ran; None where that power is not known."""
    idle_s: float | None = None
    """How long that was, of all its machines; None as ``idle_j``."""
    busy_s: float = 0.0
    """In which passes and draft steps ran, of all its machines and seeds."""
    draft_s: float = 0.0
    """Of it, in steps of its own draft model."""
    guessed: int = 0
    """Nodes of that model in passes, and how many were accepted."""
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """The mean time per token over the run, in ms, in equal steps from 0."""

    step_s: float
    values: tuple[float | None, ...]
    """None where there was nothing to measure."""
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    """The 95 % interval over several seeds; empty for one."""


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """How busy one link, or the air of one cell, was each way: a share of the run, warm-up included
    and what comes behind its end not, the mean over its queues, other people's traffic included."""

    name: str
    up: float
    down: float


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request, for tables; only the first some hundred of a run are kept."""

    device: str
    verifier: str
    started_s: float
    ttft_s: float | None
    tpot_s: float | None
    tokens: int
    tokens_per_pass: float
    acceptance: float | None
    failed: str = ""
    """Why; empty if it did not."""
    verifier_j: float | None = None
    """Of the verifiers' passes, by its rows; None where powers are not known."""
    verifier_idle_j: float | None = None
    """Its part of what verifiers drew between passes; None as above."""


@dataclass(frozen=True, slots=True)
class ArmSummary:
    arm: str
    label: str
    """What the arm is; names its relaxation if its output is not the target's own."""
    all: GroupSummary
    groups: dict[str, GroupSummary]
    """By group of devices; empty when there is only one."""
    verifiers: tuple[VerifierSummary, ...]
    pace: Pace | None = None
    rows: tuple[RequestRow, ...] = ()
    speedup: float | None = None
    """Mean TPOT of ``target-only`` in the same run over this one's."""
    speedup_interval: tuple[float, float] | None = None
    """Its 95 % interval; None of a single world, or where it was not computed."""
    gain: float | None = None
    """Mean TPOT of ``RunSummary.alone`` over this one's; None where it was not computed."""
    gain_interval: tuple[float, float] | None = None
    """The 95 % interval of ``gain``; None as for ``speedup_interval``."""
    attainment: Attainment | None = None
    """None without objectives and arrivals."""
    tpot_interval: tuple[float, float] | None = None
    """The 95 % interval of the mean TPOT, seconds; None as for ``speedup_interval``."""
    links: tuple[LinkLoad, ...] = ()
    """Those whose capacity is known."""
    lossy: bool = False
    """A relaxed rule: its output is not the target's own."""

    @property
    def name(self) -> str:
        """As it is shown, with ``LOSSY`` beside it where it is."""
        return f"{self.arm} {LOSSY}" if self.lossy else self.arm

    @property
    def target_ms_per_token(self) -> float:
        """Milliseconds of the verifiers' machines in passes, for each delivered token."""
        return self._ms_per_token(sum(one.busy_s - one.draft_s for one in self.verifiers))

    @property
    def draft_ms_per_token(self) -> float:
        """The same in steps of the verifiers' own draft models."""
        return self._ms_per_token(sum(one.draft_s for one in self.verifiers))

    def _ms_per_token(self, seconds: float) -> float:
        return 1e3 * seconds / self.all.tokens if self.all.tokens else 0.0


@dataclass(frozen=True, slots=True)
class RunSummary:
    name: str
    about: str
    """What the scenario is, in a sentence or two."""
    tokens_from: str
    """The source of tokens: models, a tape, a process."""
    seed: int | None
    simulated: bool
    duration_s: float
    arms: tuple[ArmSummary, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    """The scenario as it was run, plain data."""
    notes: tuple[str, ...] = ()
    """What a reader has to know: relaxed rules, costs that were not measured, ..."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions, machine, command."""
    seeds: int = 1
    """How many were played, ``seed`` the first of them."""
    alone: str = ""
    """The fastest arm that needs no device: plain streaming, or a server that drafts by itself.
    Empty where no such arm was run."""

    @property
    def marked_name(self) -> str:
        """For titles: says first that an arm is lossy."""
        lossy = [arm.arm for arm in self.arms if arm.lossy]
        return f"{LOSSY} ({', '.join(lossy)}): {self.name}" if lossy else self.name

    def to_json(self) -> str:
        data = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def read_summary(path: Path) -> RunSummary:
    """Raises ``SummaryError``."""
    try:
        data = json.loads(read_text(path, MAX_SUMMARY_BYTES))
        if data.pop("format") != FORMAT or data.pop("version") != VERSION:
            raise ValueError(f"not a summary of format {FORMAT} version {VERSION}")
        return build(RunSummary, data, "it")
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise SummaryError(f"{path}: not readable as a summary: {error}") from error
