"""Whom a failure belongs to: a session, or the target as a whole.

Theory of operation. A session whose own machine or sequence fails is ended, and its device told to
come back. A pass that fails is tried again session by session; when a session fails alone, a
*probe* (one row of a fresh sequence) finds out whether the session or the target is to blame. A
broken target ends everything (``GiveUp``), and so does a pass that does not end.
"""

from __future__ import annotations

from edgespec.core.protocol.messages import Fault, FaultCode
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.core.verifier.session_registry import SessionRegistry

_PROBE_KEY = "\0probe"  # no session has it: ids on the wire are printable
RESTARTS = Fault(FaultCode.SHUTTING_DOWN, "the verifier failed and restarts", 1.0)


class Containment:
    """Ends what failed, and nothing else."""

    def __init__(
        self, registry: SessionRegistry, scheduler: PassScheduler, keeper: CacheKeeper
    ) -> None:
        self.broken: str | None = None
        """Why this verifier serves nobody any more; None while it does."""
        self._registry, self._scheduler, self._keeper = registry, scheduler, keeper
        self._suspect: tuple[str, str, float] | None = None  # who failed alone, why, and when

    @property
    def probing_since(self) -> float | None:
        """When the probe that runs now was asked for; None without one."""
        return None if self._suspect is None else self._suspect[2]

    def batch_failed(self, failure: ee.BatchFailed, now: float) -> None:
        """A pass failed: blame a session, or find out."""
        batch = self._scheduler.finish(now)
        for session, request in batch.parts:
            key = request.key
            if self._registry.sessions.get(key) is not session:
                continue
            self._registry.tell(key, ev.PassFailed(), now)
            if failure.culprit == key and failure.requested:
                self._registry.end(key, Fault(FaultCode.INVALID, failure.why))
            elif failure.culprit == key:
                self.end(key, FaultCode.INTERNAL, failure.why)
            elif len(batch.parts) > 1:
                if not failure.culprit:
                    self._scheduler.run_alone(key)
            elif failure.full:
                self.end(key, FaultCode.OVERLOADED, failure.why)
            else:
                self._probe(key, failure.why, now)

    def _probe(self, key: str, why: str, now: float) -> None:
        self._suspect = key, why, now
        self._keeper.distrust(key)
        self._keeper.release(key)
        self._registry.tell(key, ev.Evicted(), now)
        table = self._keeper.reserve(_PROBE_KEY, 1)
        request = PassRequest(_PROBE_KEY, 0, (0,), blocks=table)
        self._registry.actions.append(ee.RunProbe(request))

    def probe_done(self, broken: str | None) -> None:
        """The probe ended; ``broken`` says what failed, None that the target works."""
        assert self._suspect is not None
        (key, why, _), self._suspect = self._suspect, None
        self._keeper.release(_PROBE_KEY)
        if broken is None:
            self.end(key, FaultCode.INTERNAL, why)
        else:
            self.give_up(f"{why}; then a probe failed: {broken}")

    def end(self, key: str, code: FaultCode, why: str) -> None:
        """End one session; its device may come back in a second."""
        if code is FaultCode.INTERNAL:
            self._keeper.distrust(key)
        self._registry.end(key, Fault(code, why, retry_after_s=1.0))

    def give_up(self, why: str) -> None:
        """End everything."""
        self.broken = why
        for key in tuple(self._registry.sessions):
            self._registry.end(key, RESTARTS)
        self._registry.actions.append(ee.GiveUp(why))
