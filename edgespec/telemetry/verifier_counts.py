"""Measurements of a verifier's streams: plain counts for metrics, and a record of each stream.

Theory of operation. A *record* lives from a stream's ``Open`` until its generation is complete, the
device cancels, or the stream ends; then a callback receives it. The tokens of a pass are counted
when its commits are handed to their streams. This happens once, so tokens that are sent again to a
device that reconnects are not counted again. The code runs for every message, so it adds small
numbers and creates only objects that it keeps.

The round-trip time is measured here: from handing over a commit to the ``Received`` that
acknowledges exactly its last token. It includes the time that the device takes to read the commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

from edgespec.core.protocol import messages as m
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.session_events import FINISHED, PASSING
from edgespec.core.verifier.traffic_budget import WaitReason
from edgespec.telemetry.logs import request_id
from edgespec.telemetry.metric_table import LATENCY_S, Histogram, parse_metrics

_COUNT_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_LAG_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
MAX_POSITIONS = 16
"""Number of positions in a draft that are counted separately. Deeper ones are in the total
alone."""
# Limit on the unacknowledged commits of one stream. Flow control stops a device sooner.
_MAX_UNACKNOWLEDGED = 256
LOST = "lost"
"""Reason of a stream whose link broke, or that the device closed, before the generation was
complete."""
REASONS = (
    *(reason.value for reason in m.FinishReason if reason is not m.FinishReason.CONTEXT),
    *(code.value for code in m.FaultCode),
    LOST,
)
"""Reasons for the end of a stream. A full context is ``length``, as on the wire."""


@dataclass(slots=True)
class StreamRecord:
    """One stream, for the log. Times are on the verifier's monotonic clock."""

    request: m.Open
    opened_at: float
    peer: str = ""
    credential: str = ""
    request_id: str = field(default_factory=request_id.get)
    opened: bool = False
    """Whether the verifier admitted the generation."""
    first_at: float | None = None
    """Time of handing the first tokens to the stream; ``last_at`` is the time of the latest
    ones."""
    last_at: float = 0.0
    first_tokens: int = 0
    """Number of tokens in the first commit."""
    ended_at: float = 0.0
    tokens: int = 0
    """Tokens committed by passes. ``accepted`` are the drafted ones, ``nodes`` the draft
    nodes in the passes."""
    accepted: int = 0
    nodes: int = 0
    reason: str = LOST
    unacknowledged: deque[tuple[int, float]] = field(
        default_factory=lambda: deque(maxlen=_MAX_UNACKNOWLEDGED)
    )

    @property
    def resumed(self) -> bool:
        """Whether the generation was begun by another stream, on this verifier or on another."""
        return self.request.committed_length > 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.opened_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first commit; None before the second."""
        later = self.tokens - self.first_tokens
        if self.first_at is None or later <= 0:
            return None
        return (self.last_at - self.first_at) / later


class StreamMeter:
    """Counts and durations taken from each step of an engine. Counts only grow. ``ended`` is called
    with the record of each ended stream."""

    def __init__(self, ended: Callable[[StreamRecord], None] | None = None) -> None:
        self.ttft_s = Histogram(LATENCY_S)
        self.itl_s = Histogram(LATENCY_S)
        self.rtt_s = Histogram(LATENCY_S)
        self.pass_s = Histogram(LATENCY_S)
        self.pass_rows = Histogram(_COUNT_BOUNDS)
        self.pass_tokens = Histogram(_COUNT_BOUNDS)
        self.prompt_tokens = self.generation_tokens = 0
        self.drafts = self.draft_nodes = self.accepted = self.wasted = self.replaced = 0
        self.accepted_at = [0] * MAX_POSITIONS
        self.run_ahead_tokens = self.stale = self.failed_passes = self.late_streams = 0
        self.finished = dict.fromkeys(REASONS, 0)
        self.rejected = {code.value: 0 for code in m.FaultCode}
        self._ended = ended
        self._records: dict[int, StreamRecord] = {}
        self._pass_at: float | None = None

    def observe(
        self, event: ee.EngineEvent, actions: Sequence[ee.EngineAction], now: float
    ) -> None:
        if type(event) is ee.StreamMessage:
            if type(event.message) is not m.Draft:
                self._handle_message(event, actions, now)
        elif type(event) is ee.BatchDone:
            self.late_streams += len(event.behind)
            return self._record_pass(actions, now)
        elif type(event) is ee.StreamOpened:
            self._open(event, actions, now)
        elif type(event) is ee.PicturesRead:
            if (record := self._records.get(event.stream)) is not None:
                self._note_opening(event.stream, record, actions, now)
        elif type(event) is ee.BatchFailed:
            self.failed_passes += 1
            self._pass_at = None
        for action in actions:
            if type(action) is ee.RunBatch:
                self._record_pass_start(action, now)

    def record_fault(self, stream: int, fault: m.Fault) -> None:
        if (record := self._records.get(stream)) is not None:
            record.reason = fault.code.value

    def end_stream(self, stream: int, now: float) -> None:
        if (record := self._records.get(stream)) is not None:
            self._end(stream, record.reason, now)

    def count_refusal(self, code: m.FaultCode) -> None:
        """Count a stream that was refused with this code before its generation began."""
        self.rejected[code.value] += 1

    def _open(self, event: ee.StreamOpened, actions: Sequence[ee.EngineAction], now: float) -> None:
        peer = event.peer.removeprefix("ipv4:").removeprefix("ipv6:")
        record = StreamRecord(event.request, now, peer, event.credential.name)
        self._records[event.stream] = record
        self._note_opening(event.stream, record, actions, now)

    def _note_opening(
        self,
        stream: int,
        record: StreamRecord,
        actions: Sequence[ee.EngineAction],
        now: float,
    ) -> None:
        """Note what an ``Open``, or the ids or pictures that it lacked, led to."""
        for action in actions:
            match action:
                case ee.SendTo(number, m.Opened()) if number == stream:
                    record.opened = True
                case ee.SendTo(number, m.Commit(finish=finish)) if (
                    number == stream and finish is not None
                ):
                    self._end(stream, finish.value, now)
                case ee.OpenSequence(pictures=pictures):
                    self.prompt_tokens += record.request.prompt_length
                    self.prompt_tokens += 0 if pictures is None else pictures.extra_tokens
                case _:
                    pass

    def _end(self, stream: int, reason: str, now: float) -> None:
        if (record := self._records.pop(stream, None)) is None:
            return
        record.reason, record.ended_at = reason, now
        if record.opened:
            self.finished[reason] += 1
        if self._ended is not None:
            self._ended(record)

    def _handle_message(
        self, event: ee.StreamMessage, actions: Sequence[ee.EngineAction], now: float
    ) -> None:
        message = event.message
        if isinstance(message, m.PrefixTokens | m.PicturePart):
            if (opening := self._records.get(event.stream)) is not None:
                self._note_opening(event.stream, opening, actions, now)
            return
        if isinstance(message, m.Cancel):
            self._end(event.stream, m.FinishReason.CANCELLED.value, now)
        elif isinstance(message, m.Received):
            record = self._records.get(event.stream)
            sent = deque[tuple[int, float]]() if record is None else record.unacknowledged
            while sent and sent[0][0] <= message.position:
                length, at = sent.popleft()
                if length == message.position:
                    self.rtt_s.add(now - at)

    def _record_pass_start(self, batch: ee.RunBatch, now: float) -> None:
        self._pass_at = now
        self.pass_rows.add(sum([len(one.feed) + len(one.tokens) for one in batch.requests]))

    def _record_pass(self, actions: Sequence[ee.EngineAction], now: float) -> None:
        if self._pass_at is not None:
            self.pass_s.add(now - self._pass_at)
            self._pass_at = None
        tokens, records = 0, self._records
        for action in actions:
            if type(action) is not ee.SendTo:
                if type(action) is ee.RunBatch:
                    self._record_pass_start(action, now)
                continue
            commit = action.message
            if type(commit) is not m.Commit or (record := records.get(action.stream)) is None:
                continue
            if not (count := len(commit.tokens)):
                continue
            tokens += count
            self.stale += commit.stale
            if rows := commit.rows:
                accepted_count = commit.accepted
                record.nodes += rows
                record.accepted += accepted_count
                self.drafts += 1
                self.draft_nodes += rows
                self.accepted += accepted_count
                self.wasted += rows - accepted_count
                self.replaced += len(commit.replaced)
                for place in range(min(accepted_count, MAX_POSITIONS)):
                    self.accepted_at[place] += 1
            else:
                self.run_ahead_tokens += count
            if record.tokens:
                self.itl_s.add((now - record.last_at) / count, count)
            else:
                record.first_at, record.first_tokens = now, count
                if not record.resumed:
                    self.ttft_s.add(now - record.opened_at)
            record.last_at = now
            record.tokens += count
            record.unacknowledged.append((commit.position + count, now))
            if commit.finish is not None:
                self._end(action.stream, commit.finish.value, now)
        if tokens:
            self.generation_tokens += tokens
            self.pass_tokens.add(tokens)


_LOG = logging.getLogger(__name__)


def log_stream(record: StreamRecord) -> None:
    """Log the end of a stream at level INFO; see ``StreamMeter``."""
    if not _LOG.isEnabledFor(logging.INFO):
        return
    ttft_s, tpot_s = record.ttft_s, record.tpot_s
    parts = [f"{record.tokens} tokens, {record.accepted} of {record.nodes} drafted ones accepted"]
    if ttft_s is not None:
        parts.append(f"first after {ttft_s * 1e3:.0f} ms")
    if tpot_s is not None:
        parts.append(f"then {tpot_s * 1e3:.1f} ms a token")
    client = f"key {record.credential} at {record.peer}" if record.credential else record.peer
    fields = {
        "event": "stream",
        "reason": record.reason,
        "served": record.opened,
        "resumed": record.resumed,
        "prompt_tokens": record.request.prompt_length,
        "tokens": record.tokens,
        "accepted": record.accepted,
        "nodes": record.nodes,
        "ttft_s": None if ttft_s is None else round(ttft_s, 6),
        "tpot_s": None if tpot_s is None else round(tpot_s, 6),
        "duration_s": round(record.ended_at - record.opened_at, 6),
        "key": record.credential,
        "peer": record.peer,
    }
    outcome = f"{'ended' if record.opened else 'refused'} ({record.reason}): {', '.join(parts)}"
    extra = {"request_id": record.request_id, "fields": fields}
    _LOG.info("stream of %s %s", client, outcome, extra=extra)


def _kind_of(message_class: type[m.Message]) -> str:
    """Return the name of a message's class in metrics, such as ``prefixtokens``."""
    return message_class.__name__.lower()


_UPLINK_KINDS: Final = tuple(map(_kind_of, get_args(m.Uplink)))
_DOWNLINK_KINDS: Final = tuple(map(_kind_of, get_args(m.Downlink)))


class TrafficCounts:
    """Messages and their payload bytes by kind. Every kind of message begins with 0."""

    def __init__(self) -> None:
        self.received_messages = dict.fromkeys(_UPLINK_KINDS, 0)
        self.received_bytes = dict.fromkeys(_UPLINK_KINDS, 0)
        self.sent_messages = dict.fromkeys(_DOWNLINK_KINDS, 0)
        self.sent_bytes = dict.fromkeys(_DOWNLINK_KINDS, 0)

    def count(self, message: m.Message, payload_bytes: int) -> None:
        kind = _kind_of(type(message))
        messages, sizes = self.sent_messages, self.sent_bytes
        if kind in self.received_messages:
            messages, sizes = self.received_messages, self.received_bytes
        messages[kind] += 1
        sizes[kind] += payload_bytes


LAG_SAMPLE_INTERVAL_S = 0.1


class LoopLag:
    """Lag of an event loop between ``start`` and ``stop``: the delay that every message and every
    pass has beyond its own work. It is sampled ten times a second, which takes a ten-thousandth of
    the loop's time."""

    def __init__(self) -> None:
        self.lag_s = Histogram(_LAG_BOUNDS_S)
        self._handle: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + LAG_SAMPLE_INTERVAL_S

        def sample() -> None:
            self.lag_s.add(max(0.0, loop.time() - due))
            self.start(loop)

        self._handle = loop.call_at(due, sample)

    def stop(self) -> None:
        """End sampling. A second call does nothing."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


@dataclass(frozen=True, slots=True)
class VerifierTelemetry:
    """Measurements of one verifier. ``streams`` measures the engine, ``traffic`` the wire, ``lag``
    the event loop. ``waits`` are the seconds for which streams were not read, by reason."""

    streams: StreamMeter = field(default_factory=StreamMeter)
    traffic: TrafficCounts = field(default_factory=TrafficCounts)
    lag: LoopLag = field(default_factory=LoopLag)
    waits: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys([one.value for one in WaitReason], 0.0)
    )

    def add_wait(self, reason: WaitReason, wait_s: float) -> None:
        """Add the time for which one stream is not read. Simultaneous waits are all added."""
        self.waits[reason.value] += wait_s


class EngineSample:
    """Source of a verifier's metrics: its counts, and the state of its engine at this moment.

    It is read in another thread than the engine's, without a lock. Tables are copied in one step
    and numbers are read one by one, so two numbers may be one event apart."""

    def __init__(
        self, watch: VerifierTelemetry, engine: VerifyEngine, version: str, target_share: float
    ) -> None:
        """``target_share`` is ``TargetModel.cache_share``."""
        self.streams, self.traffic, self.engine = watch.streams, watch.traffic, engine
        self._target_share = target_share
        self.cache, self.waits, self.lag = engine.cache_scheduler, watch.waits, watch.lag.lag_s
        self.prefixes, self.pictures = engine.prefixes, engine.pictures
        self.drafts = drafts = engine.draft_counts
        sources = {"device": drafts.device, "model": drafts.model, "text": drafts.text}
        self.source_nodes = {name: counts.nodes for name, counts in sources.items()}
        self.source_accepted = {name: counts.accepted for name, counts in sources.items()}
        self.build = {version: 1}
        self.accepted_at = {str(at): count for at, count in enumerate(self.streams.accepted_at)}
        self.running = self.waiting = self.detached = 0
        for session in tuple(engine.sessions.values()):
            if session.state is FINISHED:
                continue
            if not session.attached:
                self.detached += 1
            elif session.state is PASSING or session.cache_length:
                self.running += 1
            else:
                self.waiting += 1

    @property
    def cache_share(self) -> float:
        """Share of the key-value blocks that is in use, of the engine's ledger or of the target's
        own cache."""
        ledger = self.cache.ledger
        if ledger is None:
            return self._target_share
        return 1.0 - ledger.free_count / ledger.block_count


PREFIX: Final = "edgespec_"
METRICS: Final = parse_metrics("""
histogram time_to_first_token_seconds streams.ttft_s From Open to the first tokens of a new stream
histogram inter_token_latency_seconds streams.itl_s Time between a token and the one before
histogram rtt_seconds streams.rtt_s From handing over a commit to its acknowledgement
gauge num_requests_running running Sessions with a device that are in the KV cache
gauge num_requests_waiting waiting Sessions with a device that wait for room in the KV cache
gauge num_requests_detached detached Sessions without a device, kept until their lease ends
counter requests_finished_total{reason} streams.finished Streams that ended after they were opened
counter requests_rejected_total{reason} streams.rejected Streams refused before they were opened
counter prompt_tokens_total streams.prompt_tokens Prompt tokens of the sessions opened
counter generation_tokens_total streams.generation_tokens Tokens committed by passes and sent
counter run_ahead_tokens_total streams.run_ahead_tokens Committed tokens of passes without a draft
counter server_drafted_tokens_total drafts.server_tokens Committed tokens the verifier drafted
counter source_nodes_total{source} source_nodes Draft nodes judged in passes, by draft source
counter source_accepted_total{source} source_accepted Draft nodes accepted, by draft source
counter server_draft_steps_total drafts.steps Steps of the verifier's own draft model
counter server_draft_seconds_total drafts.seconds Seconds of the verifier's own draft steps
counter server_draft_failures_total drafts.failures Failures of the verifier's draft model, final
counter spec_decode_num_drafts_total streams.drafts Sessions with draft nodes, summed over passes
counter spec_decode_num_draft_tokens_total streams.draft_nodes Draft nodes judged in passes
counter spec_decode_num_accepted_tokens_total streams.accepted Draft nodes accepted
counter replaced_tokens_total streams.replaced LOSSY: nodes accepted that are not the target's own
counter spec_decode_num_accepted_tokens_per_pos_total{position} accepted_at Nodes accepted, by depth
counter stale_nodes_total streams.stale Draft nodes dropped on arrival: late or impossible
counter wasted_nodes_total streams.wasted Draft nodes judged in a pass and rejected
histogram pass_seconds streams.pass_s Duration of a pass
histogram pass_rows streams.pass_rows Rows of a pass: fed tokens and draft nodes
histogram pass_tokens streams.pass_tokens Tokens that a pass committed, over all its sessions
counter failed_passes_total streams.failed_passes Passes that failed and were repeated
gauge kv_cache_usage_perc cache_share Share of the key-value blocks in use, 0 to 1
counter evictions_total cache.evictions Sessions whose key-value blocks were evicted
counter preemptions_total cache.preemptions Evicted sessions that had work to do
counter prefix_cache_queries_total cache.prefix_query_tokens Tokens looked up in the prefix cache
counter prefix_cache_hits_total cache.prefix_hit_tokens Tokens found in the prefix cache
counter named_prefixes_found_total prefixes.found Beginnings of prompts named by devices and kept
counter named_prefixes_missed_total prefixes.missed Named beginnings that were not kept any more
counter named_prefix_tokens_total prefixes.found_tokens Token ids that were named and not sent
gauge prefix_store_bytes prefixes.held_bytes Memory of the ids kept for named beginnings
counter pictures_found_total pictures.found Pictures named by devices and kept
counter pictures_missed_total pictures.missed Named pictures that devices had to send
counter pictures_evicted_total pictures.evicted Kept pictures that made room for others
counter picture_bytes_total pictures.received_bytes Bytes of pictures that devices sent
gauge picture_store_bytes pictures.held_bytes Memory of the kept pictures
gauge arriving_picture_bytes pictures.arriving_bytes Pictures of prompts that wait for some of them
counter received_bytes_total{kind} traffic.received_bytes Payload bytes of messages from devices
counter received_messages_total{kind} traffic.received_messages Messages from devices
counter sent_bytes_total{kind} traffic.sent_bytes Payload bytes of messages to devices
counter sent_messages_total{kind} traffic.sent_messages Messages to devices
counter read_wait_seconds_total{reason} waits Seconds for which streams were not read
counter late_streams_total streams.late_streams Streams left out of a pass: send queue not empty
histogram event_loop_lag_seconds lag Lag of the event loop, sampled ten times a second
gauge build_info{version} build 1; the label is the running version
""")
"""Metrics of an ``EngineSample``: kind, name, attribute and help text."""
