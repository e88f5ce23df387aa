"""One device session's lines as spans: its steps and stalls, and its ends of the crossings."""

from __future__ import annotations

from collections import defaultdict

from edgespec_sim.report.spans import Args, Crossing, CrossingKey, Lane, Mark, Span
from edgespec_sim.report.trace_lines import Line, fed_by


class DeviceSpans:
    """Feed it one session's lines in order. Several generations under one name may follow each
    other; marks go to ``marks`` as (written by a device, mark)."""

    def __init__(self, marks: list[tuple[bool, Mark]]) -> None:
        self.spans: list[Span] = []
        self.sent: dict[CrossingKey, list[Crossing]] = defaultdict(list)
        self.arrived: dict[CrossingKey, list[Crossing]] = defaultdict(list)
        self._marks = marks
        self._step: tuple[float, int] | None = None
        """When it began, and the tokens fed."""
        self._waiting_since: float | None = None
        self._ended = True

    def read(self, line: Line) -> int:
        """How many spans and ends of spans that made."""
        at_s, session, name = line["at_s"], line["session"], line["name"]
        before = len(self.spans)
        ends = 0
        match name:
            case "Start":
                self._ended, self._waiting_since = False, at_s
            case "StartStep":
                self._stall(session, at_s)
                self._step = (at_s, fed_by(line))
            case "StepDone" | "StepFailed":
                self._step_over(line)
            case "Transmit" if line["message"]["name"] == "Draft":
                self._send(session, at_s, line["message"])
                ends = 1
            case "Commit" if not self._ended:
                key = CrossingKey(session, Lane.DOWNLINK, line["position"], len(line["tokens"]))
                self.arrived[key].append(Crossing(at_s, "commit"))
                self._stall(session, at_s)
                self._wait(at_s)
                ends = 1
            case "Deliver":
                corrected = line["kinds"].count("corrected")
                if corrected:
                    self._mark(line, "correction", tokens=corrected, position=line["position"])
            case "LinkDown":
                self._mark(line, "link down", why=str(line["why"]))
            case "LadderMoved":
                self._mark(line, f"drafting: {line['rung']}", why=str(line["why"]))
            case "DraftRestricted":
                self._mark(line, "draft's memory", window=line["window"], width=line["width"])
            case "Connected":
                self._mark(line, "connected")
            case "Finish" | "Fail":
                self._over(line)
        return len(self.spans) - before + ends

    def _send(self, session: str, at_s: float, draft: Line) -> None:
        size = len(draft["tokens"])
        key = CrossingKey(session, Lane.UPLINK, draft["first_node_id"], size)
        name = f"draft of {size}" if size else "no draft"
        args: Args = {"tokens": size, "first_node_id": draft["first_node_id"]}
        self.sent[key].append(Crossing(at_s, name, args))

    def _step_over(self, line: Line) -> None:
        if self._step is not None:
            start_s, fed = self._step
            answers = (line.get("candidates", ()), *line.get("others", ()))
            args: Args = {"fed": fed, "guesses": sum(len(one) for one in answers)}
            name = "draft step" if line["name"] == "StepDone" else "failed step"
            span = Span(line["session"], Lane.DRAFT, start_s, line["at_s"], name, args)
            self.spans.append(span)
        self._step = None
        self._wait(line["at_s"])

    def _wait(self, at_s: float) -> None:
        if not self._ended and self._step is None:
            self._waiting_since = at_s

    def _stall(self, session: str, at_s: float) -> None:
        """The device waited until now, if it did."""
        since, self._waiting_since = self._waiting_since, None
        if since is not None and at_s > since:
            self.spans.append(Span(session, Lane.STALL, since, at_s, "waits"))

    def _over(self, line: Line) -> None:
        if not self._ended:
            self._stall(line["session"], line["at_s"])
            self._ended = True
            if line["name"] == "Fail":
                self._mark(line, "failed", why=str(line["why"]))
            else:
                self._mark(line, "finished", reason=str(line["reason"]))

    def _mark(self, line: Line, name: str, **args: int | float | str) -> None:
        self._marks.append((True, Mark(line["session"], line["at_s"], name, args)))
