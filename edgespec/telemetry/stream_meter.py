"""What the streams of a verifier got, and when: plain counts for metrics, a record for each stream.

Theory of operation. A *record* lives from a stream's ``Open`` until its generation is complete, the
device cancels, or the stream ends; then whoever listens gets it. Commits of passes are counted
when they are handed to their stream: once, so what a device that comes back is sent again is not
counted again. This runs for every message, so it adds small numbers and makes no objects but for
what it has to remember.

The round trip is seen from here: from the hand-over of a commit to the ``Received`` that
acknowledges exactly its last token. It includes what the device needs to read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Open,
    Opened,
    Received,
)
from edgespec.core.verifier.engine_events import (
    BatchDone,
    BatchFailed,
    EngineAction,
    EngineEvent,
    OpenSequence,
    RunBatch,
    SendTo,
    StreamMessage,
    StreamOpened,
)
from edgespec.telemetry.histogram import COUNTS, LATENCY_S, Histogram
from edgespec.telemetry.request_id import request_id, trace_parent

MAX_POSITIONS = 16
"""Places in a draft that are counted one by one; deeper ones are in the total alone."""
# Commits of one stream whose acknowledgement is waited for; flow control stops a device sooner.
_MAX_UNACKNOWLEDGED = 256
LOST = "lost"
"""The link broke, or the device let go, before the generation was complete."""
REASONS = (
    *(reason.value for reason in FinishReason if reason is not FinishReason.CONTEXT),
    *(code.value for code in FaultCode),
    LOST,
)
"""How a stream can end. The verifier's word for a full context is ``length``, as on the wire."""


class StreamRecord:
    """One stream, for logs and spans; times are of the verifier's monotonic clock."""

    __slots__ = (
        "accepted",
        "credential",
        "ended_at",
        "first_at",
        "first_tokens",
        "last_at",
        "model",
        "nodes",
        "opened",
        "opened_at",
        "peer",
        "reason",
        "request",
        "request_id",
        "resumed",
        "tokens",
        "trace_parent",
        "unacknowledged",
    )

    def __init__(self, event: StreamOpened, now: float) -> None:
        self.request: Open = event.request
        self.request_id, self.trace_parent = request_id.get(), trace_parent.get()
        self.model = ""
        """That serves it; empty before it is opened."""
        self.peer = event.peer.removeprefix("ipv4:").removeprefix("ipv6:")
        self.credential = event.credential.name
        self.opened = False
        """Whether the verifier took the generation."""
        self.resumed = bool(event.request.committed)
        """Whether another stream, here or elsewhere, began the generation."""
        self.opened_at = now
        self.first_at: float | None = None
        """When the first tokens were handed to the stream, and the last so far."""
        self.last_at = 0.0
        self.first_tokens = 0
        """How many came first, all at once."""
        self.ended_at = now
        self.tokens = self.accepted = self.nodes = 0
        """Committed by passes, of these drafted, and draft nodes that passes looked at."""
        self.reason = LOST
        self.unacknowledged: deque[tuple[int, float]] = deque(maxlen=_MAX_UNACKNOWLEDGED)

    @property
    def ttft_s(self) -> float | None:
        """From the opening of the stream to its first tokens."""
        return None if self.first_at is None else self.first_at - self.opened_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after those that came first; None with nothing after them."""
        later = self.tokens - self.first_tokens
        if self.first_at is None or later <= 0:
            return None
        return (self.last_at - self.first_at) / later


Ended = Callable[[StreamRecord], None]


class StreamMeter:
    """Implements ``EngineTelemetry``. All counts only grow. ``ended`` hears of each stream once."""

    def __init__(self, *ended: Ended) -> None:
        self.ttft_s = Histogram(LATENCY_S)
        self.itl_s = Histogram(LATENCY_S)
        self.rtt_s = Histogram(LATENCY_S)
        self.pass_s = Histogram(LATENCY_S)
        self.pass_rows = Histogram(COUNTS)
        self.pass_tokens = Histogram(COUNTS)
        self.prompt_tokens = self.generation_tokens = 0
        self.drafts = self.draft_nodes = self.accepted = 0
        self.accepted_at = [0] * MAX_POSITIONS
        self.run_ahead_tokens = self.stale = self.wasted = 0
        self.failed_passes = self.late_streams = 0
        self.finished = dict.fromkeys(REASONS, 0)
        self.rejected = {code.value: 0 for code in FaultCode}
        self._ended = ended
        self._records: dict[int, StreamRecord] = {}
        self._pass_at: float | None = None

    def observe(self, event: EngineEvent, actions: Sequence[EngineAction], now: float) -> None:
        if type(event) is StreamMessage:
            if type(event.message) is not Draft:
                self._heard(event, now)
        elif type(event) is BatchDone:
            self.late_streams += len(event.behind)
            return self._passed(actions, now)
        elif type(event) is StreamOpened:
            self._open(event, actions, now)
        elif type(event) is BatchFailed:
            self.failed_passes += 1
            self._pass_at = None
        for action in actions:
            if type(action) is RunBatch:
                self._start(action, now)

    def told(self, stream: int, fault: Fault) -> None:
        if (record := self._records.get(stream)) is not None:
            record.reason = fault.code.value

    def gone(self, stream: int, now: float) -> None:
        if (record := self._records.get(stream)) is not None:
            self._end(stream, record.reason, now)

    def refused(self, code: FaultCode) -> None:
        """A stream was ended with this code before a generation began on it."""
        self.rejected[code.value] += 1

    # --- streams ---------------------------------------------------------------------------

    def _open(self, event: StreamOpened, actions: Sequence[EngineAction], now: float) -> None:
        record = self._records[event.stream] = StreamRecord(event, now)
        for action in actions:
            match action:
                case SendTo(event.stream, Opened(model=model)):
                    record.opened, record.model = True, model
                case SendTo(event.stream, Commit(finish=finish)) if finish is not None:
                    self._end(event.stream, finish.value, now)
                case OpenSequence():
                    self.prompt_tokens += len(event.request.prompt)
                case _:
                    pass

    def _end(self, stream: int, reason: str, now: float) -> None:
        if (record := self._records.pop(stream, None)) is None:
            return
        record.reason, record.ended_at = reason, now
        if record.opened:
            self.finished[reason] += 1
        for ended in self._ended:
            ended(record)

    def _heard(self, event: StreamMessage, now: float) -> None:
        message = event.message
        if isinstance(message, Cancel):
            self._end(event.stream, FinishReason.CANCELLED.value, now)
        elif isinstance(message, Received):
            if (record := self._records.get(event.stream)) is not None:
                self._acknowledged(record, message.position, now)

    def _acknowledged(self, record: StreamRecord, position: int, now: float) -> None:
        sent = record.unacknowledged
        while sent and sent[0][0] <= position:
            length, at = sent.popleft()
            if length == position:
                self.rtt_s.add(now - at)

    # --- passes ----------------------------------------------------------------------------

    def _start(self, batch: RunBatch, now: float) -> None:
        self._pass_at = now
        self.pass_rows.add(sum([len(one.feed) + len(one.tokens) for one in batch.requests]))

    def _passed(self, actions: Sequence[EngineAction], now: float) -> None:
        if self._pass_at is not None:
            self.pass_s.add(now - self._pass_at)
            self._pass_at = None
        tokens = drafts = nodes = accepted = run_ahead = stale = 0
        records, gaps, lengths = self._records, dict[float, int](), dict[int, int]()
        for action in actions:
            if type(action) is not SendTo:
                if type(action) is RunBatch:
                    self._start(action, now)
                continue
            commit = action.message
            if type(commit) is not Commit or (record := records.get(action.stream)) is None:
                continue
            count = len(commit.tokens)
            if not count:
                continue
            tokens += count
            stale += commit.stale
            if rows := commit.rows:
                drafts += 1
                nodes += rows
                record.nodes += rows
                if right := commit.accepted:
                    accepted += right
                    record.accepted += right
                    lengths[right] = lengths.get(right, 0) + 1
            else:
                run_ahead += count
            if record.tokens:
                gap_s = (now - record.last_at) / count
                gaps[gap_s] = gaps.get(gap_s, 0) + count
            else:
                self._first(record, count, now)
            record.last_at = now
            record.tokens += count
            record.unacknowledged.append((commit.position + count, now))
            if commit.finish is not None:
                self._end(action.stream, commit.finish.value, now)
        for gap_s, count in gaps.items():
            self.itl_s.add(gap_s, count)
        for length, count in lengths.items():
            for place in range(min(length, MAX_POSITIONS)):
                self.accepted_at[place] += count
        self.generation_tokens += tokens
        self.drafts += drafts
        self.draft_nodes += nodes
        self.accepted += accepted
        self.wasted += nodes - accepted
        self.run_ahead_tokens += run_ahead
        self.stale += stale
        if tokens:
            self.pass_tokens.add(tokens)

    def _first(self, record: StreamRecord, count: int, now: float) -> None:
        record.first_at, record.first_tokens = now, count
        if not record.resumed:
            self.ttft_s.add(now - record.opened_at)
