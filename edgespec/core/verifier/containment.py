"""Containment: which sessions a failure ends, and when it ends the whole verifier."""

from __future__ import annotations

from edgespec.core.protocol.messages import Fault, FaultCode
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.cache_scheduler import CacheScheduler
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.core.verifier.session_registry import SessionRegistry

_PROBE_KEY = "\0probe"  # No session has this key, since ids on the wire are printable.
RESTART_FAULT = Fault(FaultCode.SHUTTING_DOWN, "the verifier failed and restarts", 1.0)


class Containment:
    """Ends what failed, and nothing else.

    A session whose own machine or sequence fails is ended with a fault that lets its device come
    back. The sessions of a failed pass are tried again one by one. If a session fails alone, a
    *probe* (one row of a fresh sequence) finds out whether the session or the target is at fault. A
    broken target ends everything (``GiveUp``), and so does a pass that does not end.
    """

    def __init__(
        self, registry: SessionRegistry, scheduler: PassScheduler, cache_scheduler: CacheScheduler
    ) -> None:
        self.broken: str | None = None
        """Reason why this verifier serves no requests any more; None while it does."""
        self._registry, self._scheduler, self._cache_scheduler = (
            registry,
            scheduler,
            cache_scheduler,
        )
        self._suspect: tuple[str, str, float] | None = None
        """Key of the session that failed alone, the reason, and the time."""

    @property
    def probing_since(self) -> float | None:
        """Time when the running probe was requested; None if none runs."""
        return None if self._suspect is None else self._suspect[2]

    def batch_failed(self, failure: ee.BatchFailed, now: float) -> None:
        """Handle a failed pass. Its sessions stay, except one that is known to be at fault; if none
        is, they are tried again one by one, and a session that was alone in the pass leads to a
        probe."""
        batch = self._scheduler.finish_pass(now)
        for session, request in batch.parts:
            key = request.key
            if self._registry.sessions.get(key) is not session:
                continue
            self._registry.dispatch(key, ev.PassFailed(), now)
            if failure.culprit == key and failure.requested:
                self._registry.remove(key, Fault(FaultCode.INVALID, failure.why))
            elif failure.culprit == key:
                self.end_session(key, FaultCode.INTERNAL, failure.why)
            elif len(batch.parts) > 1:
                if not failure.culprit:
                    self._scheduler.isolated_keys.add(key)
            elif failure.full:
                self.end_session(key, FaultCode.OVERLOADED, failure.why)
            else:
                self._probe(key, failure.why, now)

    def _probe(self, key: str, why: str, now: float) -> None:
        """Request a probe of the target, because the session ``key`` failed in a pass of its own.

        Its blocks are freed first, so that the probe has room. The session itself stays until the
        probe has ended."""
        self._suspect = key, why, now
        self._cache_scheduler.withdraw(key)
        self._cache_scheduler.release(key)
        self._registry.dispatch(key, ev.Cached(0), now)
        table = self._cache_scheduler.reserve(_PROBE_KEY, 1)
        request = PassRequest(_PROBE_KEY, 0, (0,), blocks=table)
        self._registry.actions.append(ee.RunProbe(request))

    def probe_done(self, broken: str | None) -> None:
        """Handle the end of the probe; ``broken`` says what failed, None means that the target
        works."""
        assert self._suspect is not None
        (key, why, _), self._suspect = self._suspect, None
        self._cache_scheduler.release(_PROBE_KEY)
        if broken is None:
            self.end_session(key, FaultCode.INTERNAL, why)
        else:
            self.give_up(f"{why}; then a probe failed: {broken}")

    def end_session(self, key: str, code: FaultCode, why: str) -> None:
        """End one session; its device may come back after a second."""
        if code is FaultCode.INTERNAL:
            self._cache_scheduler.withdraw(key)
        self._registry.remove(key, Fault(code, why, retry_after_s=1.0))

    def give_up(self, why: str) -> None:
        """End all sessions and this verifier, whose target is broken."""
        self.broken = why
        for key in tuple(self._registry.sessions):
            self._registry.remove(key, RESTART_FAULT)
        self._registry.actions.append(ee.GiveUp(why))
