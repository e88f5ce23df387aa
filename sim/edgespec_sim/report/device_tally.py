"""What one device session's lines add up to, request by request."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.core.protocol.messages import FinishReason
from edgespec_sim.report.guesses import Guesses
from edgespec_sim.report.trace_lines import Line, sized
from edgespec_sim.wire_size import message_bytes

UNFINISHED = "the trace ends before the request does"


@dataclass(slots=True)
class Request:
    """One generation, as its device counted it; times on the device's clock."""

    started_s: float
    ended_s: float
    guesses: Guesses = field(default_factory=Guesses)
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    """Delivered before the end token."""
    gaps_s: list[float] = field(default_factory=list)
    """Between deliveries."""
    committed: int = 0
    sent: int = 0
    accepted: int = 0
    passes: int = 0
    rows: int = 0
    connects: int = 0
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

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)


class DeviceTally:
    """Feed it one session's lines in order; generations that follow each other are kept apart."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.deliveries: list[tuple[float, int]] = []
        """When, and how many tokens."""
        self._streaming = False
        self._ends = False

    def read(self, line: Line) -> None:
        name, at_s = line["name"], line["at_s"]
        if name == "Start":
            self.requests.append(Request(at_s, at_s))
            self._streaming = self._ends = False
        if not self.requests or self.requests[-1].over:
            return  # the trace begins in the middle, or this is what comes after the end
        request = self.requests[-1]
        request.ended_s = at_s
        match name:
            case "Connect":
                request.connects += 1
            case "Connected":
                self._streaming = True
            case "Disconnect" | "LinkDown":
                self._streaming = False
            case "StartStep":
                request.guesses.step(line)
            case "StepDone":
                request.guesses.step_done(line)
            case "Transmit":
                self._send(request, line["message"])
            case "Commit" if self._streaming:
                self._receive(request, line)
            case "Deliver":
                self._deliver(request, line)
            case "Finish":
                request.over, request.failed = True, ""
            case "Fail":
                request.over, request.failed = True, str(line["why"]) or "failed"

    def _send(self, request: Request, message: Line) -> None:
        request.up_bytes += _payload_bytes(message)
        if message["name"] == "Draft":
            request.sent += len(message["tokens"])
        elif message["name"] == "Open":
            request.guesses.opened(len(message["prompt"]) + len(message["committed"]))

    def _receive(self, request: Request, line: Line) -> None:
        request.down_bytes += _payload_bytes(line)
        if line["position"] <= (request.guesses.held or 0):
            request.passes += bool(line["verify_us"])
            request.rows += line["rows"]
        self._ends = line["finish"] == FinishReason.STOP.value

    def _deliver(self, request: Request, line: Line) -> None:
        request.guesses.delivered(line)
        request.committed += len(line["tokens"])
        request.accepted += line["kinds"].count("accepted")
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
        self.deliveries.append((at_s, count))


def _payload_bytes(message: Line) -> int:
    payload = sized(message)
    return 0 if payload is None else message_bytes(payload)
