"""A trace added up, the devices' lines and perhaps the verifiers', as a ``RunSummary`` of one arm.

Device lines say what the user felt, verifier lines what the verifier was busy with. Clocks of two
machines are never compared here: each duration is taken on one clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from edgespec.core.device.events import DraftCounters
from edgespec.core.protocol.messages import Commit, Draft, FinishReason, Received
from edgespec_sim import run_summary as rs
from edgespec_sim.report.timeline import DEVICE, Line
from edgespec_sim.sessions import message_bytes

# --- what one device session's lines add up to, request by request -----------------------------

UNFINISHED = "the trace ends before the request does"


@dataclass(slots=True)
class Request:
    """One generation, as its device counted it; times on the device's clock."""

    started_s: float
    ended_s: float
    counters: DraftCounters = field(default_factory=DraftCounters)
    """The device's own, from the line behind the end; of a trace that ends before, tokens alone."""
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    """Delivered before the end token."""
    gaps_s: list[float] = field(default_factory=list)
    """Between deliveries."""
    up_bytes: int = 0
    down_bytes: int = 0
    over: bool = False
    failed: str = UNFINISHED

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


class DeviceTally:
    """Feed it one session's lines in order; generations that follow each other are kept apart."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._streaming = False
        self._ends = False

    def read(self, line: Line) -> None:
        name, at_s = line["name"], line["at_s"]
        if name == "Start":
            self.requests.append(Request(at_s, at_s))
            self._streaming = self._ends = False
        if not self.requests:
            return  # the trace begins in the middle
        request = self.requests[-1]
        if name == "DraftCounters":
            known = {one.name: line[one.name] for one in fields(DraftCounters)}
            request.counters = DraftCounters(**known)
        if request.over:
            return
        request.ended_s = at_s
        match name:
            case "Connected":
                self._streaming = True
            case "Disconnect" | "LinkDown":
                self._streaming = False
            case "Transmit":
                request.up_bytes += _payload_bytes(line["message"])
            case "Commit" if self._streaming:
                request.down_bytes += _payload_bytes(line)
                self._ends = line["finish"] == FinishReason.STOP.value
            case "Deliver":
                self._deliver(request, line)
            case "Finish":
                request.over, request.failed = True, ""
            case "Fail":
                request.over, request.failed = True, str(line["why"]) or "failed"

    def _deliver(self, request: Request, line: Line) -> None:
        request.counters.committed += len(line["tokens"])
        # What a stop id ended ends with that id, which the user is not shown.
        count = len(line["tokens"]) - self._ends
        if not count:
            return
        at_s = line["at_s"]
        if request.last_s is not None:
            request.gaps_s.append(at_s - request.last_s)
        request.first_s = at_s if request.first_s is None else request.first_s
        request.last_s = at_s
        request.tokens += count


_SIZED: Final[dict[str, tuple[type[Draft | Received | Commit], str]]] = {
    "Draft": (Draft, "first_node_id parents tokens base_position base_hash"),
    "Received": (Received, "position echo"),
    "Commit": (Commit, "position tokens accepted stale queue_us verify_us rows echo held_us"),
}


def _payload_bytes(message: Line) -> int:
    """0 for those that travel once a stream, whose size says more about the prompt than about the
    way of decoding. A commit's reason to finish is left out."""
    kind, names = _SIZED.get(message["name"], (None, ""))
    return 0 if kind is None else message_bytes(kind(**{n: message[n] for n in names.split()}))


# --- what one verifier's lines add up to -------------------------------------------------------


class VerifierTally:
    """Feed it one verifier's lines in order."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.passes = 0
        self.rows = 0
        self.sessions_in_passes = 0
        self.busy_s = 0.0
        self.queues_s: list[float] = []
        self.sessions: set[str] = set()
        self._begun_s: float | None = None

    def read(self, line: Line) -> None:
        at_s = line["at_s"]
        self.first_s = at_s if self.first_s is None else self.first_s
        self.last_s = at_s
        match line["name"]:
            case "StreamOpened":
                self.sessions.add(line["request"]["session_id"])
            case "RunBatch":
                self._begin(at_s, line["requests"])
            case "BatchDone" | "BatchFailed":
                if self._begun_s is not None:
                    self.busy_s += at_s - self._begun_s
                self._begun_s = None
            case "SendTo" if line["message"]["name"] == "Commit":
                if line["message"]["rows"]:
                    self.queues_s.append(line["message"]["queue_us"] / 1e6)

    def _begin(self, at_s: float, requests: list[Line]) -> None:
        self._begun_s = at_s
        self.passes += 1
        self.sessions_in_passes += len(requests)
        for request in requests:
            self.rows += len(request["feed"]) + len(request["tokens"])


MAX_ROWS: Final = 300
_NO_VERIFIER: Final = "Only devices' traces were given: the verifiers' load is not known."


def summarise(lines: Iterable[Line], name: str = "run") -> rs.RunSummary:
    """``name``: of the run and its arm. Raises ``ValueError`` without a request."""
    devices: dict[str, DeviceTally] = defaultdict(DeviceTally)
    verifiers: dict[str, VerifierTally] = defaultdict(VerifierTally)
    first_s, last_s = math.inf, -math.inf
    for line in lines:
        if line["side"] == DEVICE:
            first_s, last_s = min(first_s, line["at_s"]), max(last_s, line["at_s"])
            devices[line["session"]].read(line)
        else:
            verifiers[line["session"]].read(line)
    requests = [(key, one) for key, tally in devices.items() for one in tally.requests]
    if not requests:
        raise ValueError("no device's trace, or none with a request: no Start is in it")
    duration_s = last_s - first_s
    if verifiers:  # devices may be on machines with clocks of their own; verifiers share one
        seen_s = [at_s for one in verifiers.values() for at_s in (one.first_s or 0.0, one.last_s)]
        longest_s = max(one.ended_s - one.started_s for _, one in requests)
        duration_s = max(max(seen_s) - min(seen_s), longest_s)
    served_by = {key: of for of, verifier in verifiers.items() for key in verifier.sessions}
    whole = _whole([one for _, one in requests], duration_s)
    rows = tuple(
        _row(key, served_by.get(key, ""), one, requests[0][1].started_s)
        for key, one in requests[:MAX_ROWS]
    )
    notes = () if verifiers else (_NO_VERIFIER,)
    arm = rs.ArmSummary(
        arm=name,
        label="as traced",
        all=whole,
        groups={},
        verifiers=tuple(_load(of, tally, duration_s) for of, tally in verifiers.items()),
        rows=rows,
    )
    return rs.RunSummary(
        name=name,
        about="Summed up from the trace of a run.",
        tokens_from="the trace",
        seed=None,
        simulated=False,
        duration_s=duration_s,
        arms=(arm,),
        notes=notes,
    )


def _whole(requests: Sequence[Request], duration_s: float) -> rs.GroupSummary:
    done = [one for one in requests if not one.failed]

    def total(of: Callable[[DraftCounters], int]) -> int:
        return sum(of(one.counters) for one in requests)

    tokens, committed = sum(one.tokens for one in requests), total(lambda one: one.committed)
    tried = total(lambda one: one.tried)
    return rs.GroupSummary(
        requests=len(done),
        failed=len(requests) - len(done),
        tokens=tokens,
        ttft_s=rs.spread_of([one.ttft_s for one in done if one.ttft_s is not None]),
        tpot_s=rs.spread_of([one.tpot_s for one in done if one.tpot_s is not None]),
        itl_s=rs.spread_of([gap for one in requests for gap in one.gaps_s]),
        tokens_per_second=_per(tokens, duration_s),
        tokens_per_pass=_per(committed, total(lambda one: one.passes)),
        acceptance=total(lambda one: one.hits) / tried if tried else None,
        wasted_per_token=_per(total(lambda one: one.wasted), committed),
        up_bytes_per_token=_per(sum(one.up_bytes for one in requests), committed),
        down_bytes_per_token=_per(sum(one.down_bytes for one in requests), committed),
        reconnects=total(lambda one: one.reconnects),
    )


def _row(device: str, verifier: str, one: Request, zero_s: float) -> rs.RequestRow:
    return rs.RequestRow(
        device=device,
        verifier=verifier,
        started_s=one.started_s - zero_s,
        ttft_s=one.ttft_s,
        tpot_s=one.tpot_s,
        tokens=one.tokens,
        tokens_per_pass=_per(one.counters.committed, one.counters.passes),
        acceptance=one.counters.acceptance,
        failed=one.failed,
    )


def _load(name: str, tally: VerifierTally, duration_s: float) -> rs.VerifierSummary:
    return rs.VerifierSummary(
        name=name or "verifier",
        utilisation=_per(tally.busy_s, duration_s),
        passes=tally.passes,
        rows_per_pass=_per(tally.rows, tally.passes),
        sessions_per_pass=_per(tally.sessions_in_passes, tally.passes),
        queue_s=rs.spread_of(tally.queues_s),
    )


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0
