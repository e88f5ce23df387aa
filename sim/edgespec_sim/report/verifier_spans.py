"""One verifier's lines as spans: queues and passes by session, and its ends of the crossings."""

from __future__ import annotations

from collections import defaultdict

from edgespec_sim.report.spans import Args, Crossing, CrossingKey, Lane, Mark, Span
from edgespec_sim.report.trace_lines import Line


class VerifierSpans:
    """Feed it one verifier's lines in order; marks go to ``marks`` as (by a device, mark)."""

    def __init__(self, marks: list[tuple[bool, Mark]]) -> None:
        self.spans: list[Span] = []
        self.sent: dict[CrossingKey, list[Crossing]] = defaultdict(list)
        self.arrived: dict[CrossingKey, list[Crossing]] = defaultdict(list)
        self._marks = marks
        self._session_of: dict[int, str] = {}
        self._batch: tuple[float, list[Line]] | None = None
        self._passes: dict[str, Span] = {}
        """The pass of each session that ended last, until its commit is seen."""

    def read(self, line: Line) -> int:
        """How many spans and ends of spans that made."""
        at_s = line["at_s"]
        before = len(self.spans)
        ends = 0
        match line["name"]:
            case "StreamOpened":
                session = line["request"]["session_id"]
                self._session_of[line["stream"]] = session
            case "StreamLost":
                lost = self._session_of.pop(line["stream"], None)
                if lost is not None:
                    self._marks.append((False, Mark(lost, at_s, "stream lost")))
            case "CloseStream":
                self._session_of.pop(line["stream"], None)
            case "StreamMessage" if line["message"]["name"] == "Draft":
                ends = self._on_draft(line["stream"], at_s, line["message"])
            case "RunBatch":
                self._batch = (at_s, line["requests"])
            case "BatchDone" | "BatchFailed":
                self._end(at_s, failed=line["name"] == "BatchFailed")
            case "SendTo" if line["message"]["name"] == "Commit":
                ends = self._on_commit(line["stream"], at_s, line["message"])
        return len(self.spans) - before + ends

    def _on_draft(self, stream: int, at_s: float, draft: Line) -> int:
        session = self._session_of.get(stream)
        if session is None:
            return 0
        size = len(draft["tokens"])
        key = CrossingKey(session, Lane.UPLINK, draft["first_node_id"], size)
        self.arrived[key].append(Crossing(at_s, "draft"))
        return 1

    def _end(self, at_s: float, *, failed: bool) -> None:
        if self._batch is None:
            return  # the trace begins in the middle of a pass
        start_s, requests = self._batch
        self._batch = None
        rows = [len(request["feed"]) + len(request["tokens"]) for request in requests]
        for request, own in zip(requests, rows, strict=True):
            args: Args = {
                "rows": own,
                "nodes": len(request["tokens"]),
                "batch_rows": sum(rows),
                "batch_sessions": len(requests),
            }
            name = "failed pass" if failed else "pass" if request["sample"] else "prefill"
            span = Span(request["key"], Lane.PASS, start_s, at_s, name, args)
            self._passes[span.session] = span
            self.spans.append(span)

    def _on_commit(self, stream: int, at_s: float, commit: Line) -> int:
        session = self._session_of.get(stream)
        if session is None:
            return 0
        tokens, accepted = len(commit["tokens"]), commit["accepted"]
        ended = self._passes.pop(session, None)
        if ended is not None and commit["verify_us"]:
            ended.args.update({"committed": tokens, "accepted": accepted})
            self._queued(ended, commit)
        key = CrossingKey(session, Lane.DOWNLINK, commit["position"], tokens)
        args: Args = {"tokens": tokens, "accepted": accepted, "stale": commit["stale"]}
        self.sent[key].append(Crossing(at_s, f"commit of {tokens}", args))
        return 1

    def _queued(self, taken: Span, commit: Line) -> None:
        """Which arrivals a pass has taken up only its commit tells: others had gone stale."""
        if commit["rows"] and commit["queue_us"]:
            since_s = taken.start_s - commit["queue_us"] / 1e6
            args: Args = {"nodes": commit["rows"]}
            self.spans.append(
                Span(taken.session, Lane.QUEUE, since_s, taken.start_s, "waits", args)
            )
