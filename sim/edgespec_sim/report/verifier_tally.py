"""What one verifier's lines add up to: its load, and each session as seen from there."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec_sim.report.trace_lines import Line


@dataclass(slots=True)
class ServedSession:
    """One session, with the link left out: all times are the verifier's."""

    opened_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    passes: int = 0
    finished: bool = False
    gaps_s: list[float] = field(default_factory=list)


class VerifierTally:
    """Feed it one verifier's lines in order."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.passes = 0
        self.rows = 0
        self.sessions_in_passes = 0
        self.busy: list[tuple[float, float]] = []
        """Begin and end of each pass."""
        self.queues_s: list[float] = []
        self.sessions: dict[str, ServedSession] = {}
        self.commits: list[tuple[float, int]] = []
        self._session_of: dict[int, str] = {}
        self._begun_s: float | None = None

    def read(self, line: Line) -> None:
        at_s = line["at_s"]
        self.first_s = at_s if self.first_s is None else self.first_s
        self.last_s = at_s
        match line["name"]:
            case "StreamOpened":
                session = line["request"]["session_id"]
                self._session_of[line["stream"]] = session
                self.sessions.setdefault(session, ServedSession(at_s))
            case "RunBatch":
                self._begin(at_s, line["requests"])
            case "BatchDone" | "BatchFailed":
                if self._begun_s is not None:
                    self.busy.append((self._begun_s, at_s))
                self._begun_s = None
            case "SendTo" if line["message"]["name"] == "Commit":
                self._commit(line["stream"], at_s, line["message"])

    def _begin(self, at_s: float, requests: list[Line]) -> None:
        self._begun_s = at_s
        self.passes += 1
        self.sessions_in_passes += len(requests)
        for request in requests:
            self.rows += len(request["feed"]) + len(request["tokens"])

    def _commit(self, stream: int, at_s: float, commit: Line) -> None:
        session = self.sessions.get(self._session_of.get(stream, ""))
        if session is None or not commit["tokens"]:
            return
        self.commits.append((at_s, len(commit["tokens"])))
        if commit["rows"]:
            self.queues_s.append(commit["queue_us"] / 1e6)
        if session.last_s is not None:
            session.gaps_s.append(at_s - session.last_s)
        session.first_s = at_s if session.first_s is None else session.first_s
        session.last_s = at_s
        session.tokens += len(commit["tokens"])
        session.passes += bool(commit["verify_us"])
        session.finished |= commit["finish"] is not None
