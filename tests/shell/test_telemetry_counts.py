"""The counters under the metrics. Oracle: by hand, on a clock of the test's own."""

from __future__ import annotations

from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Open,
    Opened,
    Received,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.telemetry.metric_table import Histogram
from edgespec.telemetry.verifier_counts import StreamMeter, StreamRecord

PROMPT = (1, 2, 3)


def test_a_histogram_counts_up_to_and_including_its_bounds() -> None:
    found = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 3), (9.0, 4)):
        found.add(value, times)
    assert found.cumulative == [3, 6, 10]
    assert found.total == 0.5 + 2 * 1.0 + 3 * 1.5 + 4 * 9.0


class Scene:
    """One stream and its meter."""

    def __init__(self, committed: tuple[int, ...] = ()) -> None:
        self.records: list[StreamRecord] = []
        self.meter = StreamMeter(self.records.append)
        opened = ee.StreamOpened(7, Open("s", "", "", PROMPT, committed), "peer")
        actions = (
            ee.OpenSequence("s", len(PROMPT), SamplingParams()),
            ee.SendTo(7, Opened(Limits(), "toy", len(PROMPT))),
        )
        self.meter.observe(opened, actions, 10.0)

    def commit(self, at: float, commit: Commit, pass_s: float = 0.5) -> None:
        batch = ee.RunBatch((PassRequest("s", 0, PROMPT, (4,), (-1,)),))
        self.meter.observe(ee.Poll(), (batch,), at - pass_s)
        self.meter.observe(ee.BatchDone(()), (ee.SendTo(7, commit),), at)


def test_times_and_tokens_of_a_stream() -> None:
    scene, meter = Scene(), None
    meter = scene.meter
    scene.commit(11.0, Commit(3, (5,)))
    scene.commit(12.0, Commit(4, (6, 7), accepted=1, rows=3, stale=2))
    scene.commit(15.0, Commit(6, (8,), rows=1, finish=FinishReason.STOP))
    assert (sum(meter.ttft_s.counts), meter.ttft_s.total) == (1, 1.0)
    assert (sum(meter.itl_s.counts), meter.itl_s.total) == (3, 4.0)
    assert (sum(meter.pass_s.counts), meter.pass_s.total) == (3, 1.5)
    assert (sum(meter.pass_rows.counts), meter.pass_rows.total) == (3, 12)
    assert (meter.generation_tokens, meter.prompt_tokens, meter.run_ahead_tokens) == (4, 3, 1)
    assert (meter.drafts, meter.draft_nodes, meter.accepted, meter.wasted) == (2, 4, 1, 3)
    assert (meter.stale, meter.accepted_at[:2]) == (2, [1, 0])
    assert meter.finished["stop"] == 1
    (record,) = scene.records
    assert (record.tokens, record.accepted, record.nodes, record.reason) == (4, 1, 4, "stop")
    assert (record.ttft_s, record.ended_at, record.peer) == (1.0, 15.0, "peer")
    meter.gone(7, 16.0)
    meter.told(7, Fault(FaultCode.INTERNAL, ""))
    assert len(scene.records) == 1


def test_a_round_trip_is_that_of_the_commit_acknowledged() -> None:
    scene = Scene()
    for at, position in ((11.0, 3), (12.0, 4), (13.0, 5), (14.0, 6)):
        scene.commit(at, Commit(position, (5,)))
    for at, position in ((15.0, 5), (15.5, 5), (16.0, 99)):
        scene.meter.observe(ee.StreamMessage(7, Received(position, 0)), (), at)
    assert (sum(scene.meter.rtt_s.counts), scene.meter.rtt_s.total) == (1, 15.0 - 12.0)


def test_streams_end_once_for_one_reason() -> None:
    cancelled, lost, faulted = Scene(), Scene(), Scene()
    cancelled.meter.observe(ee.StreamMessage(7, Draft(1, (0,), (4,))), (), 10.5)
    cancelled.meter.observe(ee.StreamMessage(7, Cancel()), (), 11.0)
    faulted.meter.told(7, Fault(FaultCode.OVERLOADED, ""))
    for scene, reason in ((cancelled, "cancelled"), (lost, "lost"), (faulted, "overloaded")):
        scene.meter.gone(7, 12.0)
        assert [record.reason for record in scene.records] == [reason]
        assert {key for key, count in scene.meter.finished.items() if count} == {reason}


def test_a_failed_pass_has_no_length() -> None:
    scene = Scene()
    batch = ee.RunBatch((PassRequest("s", 0, PROMPT),))
    scene.meter.observe(ee.Poll(), (batch,), 11.0)
    scene.meter.observe(ee.BatchFailed("no"), (batch,), 12.0)
    scene.meter.observe(ee.BatchDone(()), (), 15.0)
    assert (sum(scene.meter.pass_s.counts), scene.meter.pass_s.total) == (1, 3.0)
    assert scene.meter.failed_passes == 1


def test_streams_that_are_behind_count_at_every_pass_that_finds_them_so() -> None:
    scene = Scene()
    for behind in ((), (3, 7), (7,)):
        scene.meter.observe(ee.BatchDone((), behind=behind), (), 1.0)
    assert scene.meter.late_streams == 3
