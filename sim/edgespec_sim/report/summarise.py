"""Computes a ``RunSummary`` with one arm from a trace of devices, and of verifiers if there is one.

The devices' lines give what the user experienced, the verifiers' lines their load. Clocks of two
machines are never compared here: each duration is measured on one clock.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Final

from edgespec.core.device.events import DraftCounters
from edgespec.core.protocol.messages import Commit, Draft, FinishReason, Received
from edgespec_sim import run_summary as rs
from edgespec_sim.message_sizes import message_bytes
from edgespec_sim.report.timeline import DEVICE, TraceLine
from edgespec_sim.world.meters import Meters, RequestRecord, ratio

# --- the totals of one device session, request by request --------------------------------------

UNFINISHED = "the trace ends before the request does"


class DeviceTally:
    """Adds up one session's lines, which ``read`` takes in order, for each of its generations.

    Times are on the device's clock. Counters are the device's own, from the line that follows the
    end of a generation. If the trace ends before that line, only tokens are counted."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.gaps_s: list[float] = []
        """Times between deliveries."""
        self.longest_s = 0.0
        """Longest time from a request's start to its last line."""
        self._first_s = self._last_s = 0.0
        """Times of the first and the latest delivery of the last request."""
        self._streaming = False
        self._ends = False

    def read(self, line: TraceLine) -> None:
        name, at_s = line["name"], line["at_s"]
        if name == "Start":
            self.records.append(RequestRecord("", line["session"], "", at_s, failed=UNFINISHED))
            self._streaming = self._ends = False
        if not self.records:
            return  # The trace begins in the middle of a generation.
        record = self.records[-1]
        if name == "DraftCounters":
            known = {one.name: line[one.name] for one in fields(DraftCounters)}
            record.counters = DraftCounters(**known)
        if record.complete:
            return
        self.longest_s = max(self.longest_s, at_s - record.started_s)
        match name:
            case "Connected":
                self._streaming = True
            case "Disconnect" | "LinkDown":
                self._streaming = False
            case "Transmit":
                record.up_bytes += _payload_bytes(line["message"])
            case "Commit" if self._streaming:
                record.down_bytes += _payload_bytes(line)
                self._ends = line["finish"] == FinishReason.STOP.value
            case "Deliver":
                self._deliver(record, line)
            case "Finish" | "Fail":
                record.complete, record.tpot_s = True, record.pace_s
                record.failed = "" if name == "Finish" else str(line["why"]) or "failed"

    def _deliver(self, record: RequestRecord, line: TraceLine) -> None:
        record.counters.committed += len(line["tokens"])
        # If a stop id ended the output, that id is its last token, and the user does not see it.
        count = len(line["tokens"]) - self._ends
        if not count:
            return
        at_s = line["at_s"]
        if record.ttft_s is None:
            self._first_s, record.ttft_s = at_s, at_s - record.started_s
        else:
            self.gaps_s.append(at_s - self._last_s)
        self._last_s = at_s
        record.tokens += count
        if record.tokens > 1:
            record.pace_s = (at_s - self._first_s) / (record.tokens - 1)


_SIZED_MESSAGES: Final[dict[str, tuple[type[Draft | Received | Commit], str]]] = {
    "Draft": (Draft, "first_node_id parents tokens base_position base_hash"),
    "Received": (Received, "position echo"),
    "Commit": (Commit, "position tokens accepted stale queue_us verify_us rows echo held_us"),
}


def _payload_bytes(message: TraceLine) -> int:
    """Return a message's size. It is 0 for messages sent once per stream, whose size depends on the
    prompt rather than on the way of decoding. A commit's finish reason is left out."""
    kind, names = _SIZED_MESSAGES.get(message["name"], (None, ""))
    return 0 if kind is None else message_bytes(kind(**{n: message[n] for n in names.split()}))


# --- the totals of one verifier ----------------------------------------------------------------


class VerifierTally:
    """Adds up one verifier's lines, which ``read`` takes in order."""

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

    def read(self, line: TraceLine) -> None:
        at_s = line["at_s"]
        self.first_s = at_s if self.first_s is None else self.first_s
        self.last_s = at_s
        match line["name"]:
            case "StreamOpened":
                self.sessions.add(line["request"]["session_id"])
            case "RunBatch":
                requests = line["requests"]
                self._begun_s = at_s
                self.passes += 1
                self.sessions_in_passes += len(requests)
                self.rows += sum(len(one["feed"]) + len(one["tokens"]) for one in requests)
            case "BatchDone" | "BatchFailed":
                if self._begun_s is not None:
                    self.busy_s += at_s - self._begun_s
                self._begun_s = None
            case "SendTo" if line["message"]["name"] == "Commit":
                if line["message"]["rows"]:
                    self.queues_s.append(line["message"]["queue_us"] / 1e6)


_NO_VERIFIER: Final = "Only devices' traces were given, so the verifiers' load is unknown."


def summarise(lines: Iterable[TraceLine], name: str = "run") -> rs.RunSummary:
    """Summarise a trace; ``name`` is the name of the run and of its arm. Raises ``ValueError`` if
    the trace has no request."""
    devices: dict[str, DeviceTally] = defaultdict(DeviceTally)
    verifiers: dict[str, VerifierTally] = defaultdict(VerifierTally)
    first_s, last_s = math.inf, -math.inf
    for line in lines:
        if line["side"] == DEVICE:
            first_s, last_s = min(first_s, line["at_s"]), max(last_s, line["at_s"])
            devices[line["session"]].read(line)
        else:
            verifiers[line["session"]].read(line)
    records = [one for tally in devices.values() for one in tally.records]
    if not records:
        raise ValueError("the trace has no request of a device: it contains no Start")
    duration_s = last_s - first_s
    if verifiers:  # Each device may have its own clock; all verifiers share one.
        seen_s = [at_s for one in verifiers.values() for at_s in (one.first_s or 0.0, one.last_s)]
        longest_s = max(one.longest_s for one in devices.values())
        duration_s = max(max(seen_s) - min(seen_s), longest_s)
    served_by = {key: of for of, verifier in verifiers.items() for key in verifier.sessions}
    zero_s = records[0].started_s
    for record in records:
        record.started_s -= zero_s
        record.verifier = served_by.get(record.device, "")
    gaps_s = array("d", [gap_s for tally in devices.values() for gap_s in tally.gaps_s])
    meters = Meters(duration_s, duration_s or 1.0, records, gaps_s)
    arm = rs.ArmSummary(
        arm=name,
        label="as traced",
        all=replace(meters.whole(), mismatches=None, unfinished=0),
        groups={},
        verifiers=tuple(
            _verifier_summary(of, tally, duration_s) for of, tally in verifiers.items()
        ),
        rows=meters.rows(),
    )
    return rs.RunSummary(
        name=name,
        about="Computed from the trace of a run.",
        tokens_from="the trace",
        seed=None,
        simulated=False,
        duration_s=duration_s,
        arms=(arm,),
        notes=() if verifiers else (_NO_VERIFIER,),
    )


def _verifier_summary(name: str, tally: VerifierTally, duration_s: float) -> rs.VerifierSummary:
    return rs.VerifierSummary(
        name=name or "verifier",
        utilisation=ratio(tally.busy_s, duration_s),
        passes=tally.passes,
        rows_per_pass=ratio(tally.rows, tally.passes),
        sessions_per_pass=ratio(tally.sessions_in_passes, tally.passes),
        queue_s=rs.spread_of(tally.queues_s),
    )
