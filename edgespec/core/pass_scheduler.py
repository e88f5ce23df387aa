"""Which sessions share the next packed pass.

Theory of operation. Sessions that might use a pass wait in line, longest waiting first. When no
pass runs, each is offered the room that is left, at most ``max_rows_per_session`` rows, so that a
long prompt cannot hold up the others; those that decline leave the line until something happens to
them. After a pass that failed, its sessions are tried one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.core.engine_events import EngineLimits
from edgespec.core.estimators import MovingAverage, SlopeEstimator
from edgespec.core.value import value
from edgespec.core.verify_events import Offer, RunPass
from edgespec.core.verify_session import VerifySession
from edgespec.core.work import PassRequest

# Before the first pass was timed. Only ``auto`` run-ahead looks at it.
_GUESSED_PASS_S = 0.02
# Best of 1, 1.5, 2 and 3 on the floor of 200 laptops (docs/measurements.md).
_MARGIN = 1.5


@value
class Batch:
    """A pass that is running: each session with its part."""

    started_at: float
    parts: tuple[tuple[VerifySession, PassRequest], ...]


class PassScheduler:
    def __init__(self, limits: EngineLimits) -> None:
        self.running: Batch | None = None
        self.passes = 0
        self._limits = limits
        self._waiting: dict[str, None] = {}
        self._alone: set[str] = set()
        """Sessions whose last pass failed in company."""
        self._pass_s = MovingAverage()
        self._row_s = SlopeEstimator()
        self._tokens = MovingAverage()

    @property
    def pass_s(self) -> float | None:
        """Moving average of the passes that sampled; None before the first."""
        return self._pass_s.get(0.0) if self._pass_s.count else None

    def enqueue(self, key: str) -> None:
        self._waiting.setdefault(key)

    def forget(self, key: str) -> None:
        self._waiting.pop(key, None)
        self._alone.discard(key)

    def form(
        self, sessions: Mapping[str, VerifySession], now: float
    ) -> tuple[tuple[PassRequest, ...], list[str]]:
        """Offer room in a pass that starts now: its requests, none if no session wants one, and
        the keys that were asked."""
        assert self.running is None
        asked: list[str] = []
        room = self._limits.max_rows_per_pass
        parts: list[tuple[VerifySession, PassRequest]] = []
        pass_s, least_chance = self._pass_s.get(_GUESSED_PASS_S), self.least_chance
        for key in list(self._waiting):
            alone = key in self._alone
            if room <= 0 or (alone and parts):
                break
            session = sessions[key]
            rows = min(room, self._limits.max_rows_per_session)
            asked.append(key)
            del self._waiting[key]
            for action in session.handle(Offer(rows, pass_s, least_chance), now):
                assert isinstance(action, RunPass)
                parts.append((session, action.request))
                room -= action.request.row_count
            if alone and parts:
                break
        if parts:
            self.running = Batch(now, tuple(parts))
        return tuple(request for _, request in parts), asked

    def finish(self, now: float) -> Batch:
        """The pass is over, well or badly."""
        assert self.running is not None
        batch, self.running = self.running, None
        self.passes += 1
        if any(request.sample for _, request in batch.parts):
            self._pass_s.add(now - batch.started_at)
            rows = sum(request.row_count for _, request in batch.parts)
            self._row_s.add(rows, now - batch.started_at)
        return batch

    def count(self, tokens: int) -> None:
        """The pass committed so many, of all its sessions; 0: it did not sample."""
        if tokens:
            self._tokens.add(tokens)

    @property
    def least_chance(self) -> float:
        """Of a draft node that is worth its row. The row makes the pass longer, and while it lasts
        every session waits: a node has to bring more tokens than the same time does otherwise
        (goodput as in SmartSpec, arXiv 2406.14066), and half as many again, as what is left out
        now is there for the next pass. 0 while a row's time is not known."""
        row_s = self._row_s.get()
        pass_s = self._pass_s.get(0.0)
        if row_s is None or pass_s <= 0.0:
            return 0.0
        return _MARGIN * max(0.0, row_s) * self._tokens.get(0.0) / pass_s

    def isolate(self, key: str) -> None:
        """Give this session its next pass alone."""
        self._alone.add(key)

    def trust(self, key: str) -> None:
        self._alone.discard(key)
