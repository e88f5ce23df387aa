"""The sessions of one verifier: how they open, who may resume them, what they are told, how they
end.

Theory of operation. Every session has a key (its id on the wire), at most one stream, and a
sequence in the target from its opening until it is finished. What a session asks for is translated
into the engine's actions and collected in ``actions``; keys of sessions to which something happened
are collected in ``touched``, for the engine to look after.

A session whose machine raises is ended alone: its device hears a fault that is worth a reconnect,
the operator gets the details, and nobody else notices. ``contain`` False lets the exception out
instead, for tests.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from edgespec.core.protocol.messages import (
    Fault,
    FaultCode,
    Limits,
    Open,
    RunAhead,
)
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.acceptance import AcceptanceRule
from edgespec.core.verifier.admission import limits_of, refuse_open
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.resume import same_device, same_generation
from edgespec.core.verifier.run_ahead import RunAheadPolicy
from edgespec.core.verifier.served_drafts import ServedDraftsMaker
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_slots import DISPLACED, SessionSlots
from edgespec.core.verifier.stream_table import StreamTable

RunAheadFactory = Callable[[RunAhead], RunAheadPolicy]


class SessionRegistry:
    def __init__(
        self,
        model: ModelInfo,
        limits: Limits,
        engine_limits: ee.EngineLimits,
        rules: Mapping[str, AcceptanceRule],
        run_ahead: RunAheadFactory,
        *,
        contain: bool,
        adapters: Sequence[ModelInfo] = (),
    ) -> None:
        self.sessions: dict[str, VerifySession] = {}
        """By key, in the order of opening."""
        self.actions: list[ee.EngineAction] = []
        self.touched: dict[str, None] = {}
        self.streams = StreamTable()
        self._model, self._limits, self._rules = model, limits, rules
        self._served = {one.name: one for one in (model, *adapters)}
        self._run_ahead, self._contain = run_ahead, contain
        self._trees = engine_limits.trees
        self._slots = SessionSlots(engine_limits, self.sessions)
        self.credential_of: Mapping[str, Credential] = self._slots.credential_of
        """Whose each session is, by key."""
        self._guesses = ServedDraftsMaker() if engine_limits.server_drafts else None
        self._cached: set[str] = set()
        """Sessions for which the target holds a sequence."""

    # --- streams ---------------------------------------------------------------------------

    def open(self, event: ee.StreamOpened, now: float) -> None:
        """A stream's first message: a new session, a resumed one, or a refusal."""
        stream, request, key = event.stream, event.request, event.request.session_id
        known = self.sessions.get(key)
        limits = limits_of(event.credential, self._limits)
        rules = frozenset(self._rules)
        model = self._model_of(request)
        fault = refuse_open(request, model, limits, rules, event.credential, tuple(self._served))
        if fault is None and known is not None:
            fault = self._refuse_known(known, request)
        if fault is None and key not in self.sessions:
            fault = self._new(event, limits, now)
        if fault is not None:
            self.actions += (ee.SendTo(stream, fault), ee.CloseStream(stream))
            return
        if (old := self.streams.part(key)) is not None:
            self.actions.append(ee.CloseStream(old))
        self.streams.join(stream, key)
        self.tell(key, ev.Attach(request), now)

    def _refuse_known(self, known: VerifySession, request: Open) -> Fault | None:
        """Why the session is not for this device, or None. What its own device does not continue
        is ended, and the request opens it anew."""
        mine, key = known.request, request.session_id
        proven = same_device(mine, request)
        if proven and same_generation(mine, request, known.prefix):
            return None
        if not proven or not request.session_secret:
            return Fault(FaultCode.INVALID, "the session id is in use by another generation")
        self.end(key, Fault(FaultCode.INVALID, "the device began another generation"))
        return None

    def _new(self, event: ee.StreamOpened, limits: Limits, now: float) -> Fault | None:
        request, credential, key = event.request, event.credential, event.request.session_id
        displaced = self._slots.displaced_by(key, event.peer, credential, now)
        if isinstance(displaced, Fault):
            return displaced
        if displaced is not None:
            self.end(displaced, DISPLACED)
        rule, run_ahead = self._rules[request.rule], self._run_ahead(request.run_ahead)
        guesses = None if self._guesses is None else self._guesses(request, credential)
        model = self._model_of(request)
        self.sessions[key] = VerifySession(
            request, model, limits, rule, run_ahead, now, guesses, trees=self._trees
        )
        self._slots.take(key, event.peer, credential, now)
        self._cached.add(key)
        text = (*request.prompt, *request.committed)
        adapter = self.adapter_of(key)
        opening = ee.OpenSequence(key, len(request.prompt), request.sampling, text, adapter)
        self.actions.append(opening)
        return None

    def _model_of(self, request: Open) -> ModelInfo:
        return self._served.get(request.model, self._model)

    def adapter_of(self, key: str) -> str:
        """The name of the session's adapter; empty: it has the model itself."""
        model = self._model_of(self.sessions[key].request)
        return "" if model is self._model else model.name

    def message(self, event: ee.StreamMessage, now: float) -> None:
        """A later message; one of a stream that has no session any more is dropped."""
        if (key := self.streams.key(event.stream)) is not None:
            self.tell(key, event.message, now)

    def lost(self, stream: int, now: float) -> None:
        """The stream is gone; its session stays for the lease."""
        if (key := self.streams.key(stream)) is not None:
            self.streams.part(key)
            self.tell(key, ev.Detach(), now)

    def fell_behind(self, stream: int) -> None:
        """What the stream was to be sent before the last pass still waits to leave."""
        if (key := self.streams.key(stream)) is not None:
            self.sessions[key].device.behind = True

    def caught_up(self, stream: int) -> None:
        """It has left."""
        if (key := self.streams.key(stream)) is not None:
            self.sessions[key].device.behind = False
            self.touched.setdefault(key)

    # --- sessions --------------------------------------------------------------------------

    def tell(self, key: str, event: ev.VerifyEvent, now: float) -> None:
        """Hand an event to a session and translate what it asks for."""
        self.touched.setdefault(key)
        for action in self._handle(key, event, now):
            match action:  # without names for its fields, which would take twice as long
                case ev.Send():
                    if (stream := self.streams.stream(key)) is not None:
                        self.actions.append(ee.SendTo(stream, action.message))
                case ev.Keep():
                    self.actions.append(ee.KeepNodes(key, action.nodes))
                case ev.Hangup():
                    self._hang_up(key)
                case ev.RunPass():
                    raise AssertionError("a pass only follows an offer")
                case _:
                    assert_never(action)

    def ask(self, key: str, offer: ev.Offer, now: float) -> PassRequest | None:
        """What the session wants of a pass that starts now; None if it declines."""
        request = None
        for action in self._handle(key, offer, now):
            assert isinstance(action, ev.RunPass)
            request = action.request
        return request

    def end(self, key: str, fault: Fault | None) -> None:
        """Forget a session; its stream hears ``fault`` and ends."""
        if self.sessions.pop(key, None) is None:
            return
        self.touched.setdefault(key)
        self._slots.free(key)
        if fault is not None and (stream := self.streams.stream(key)) is not None:
            self.actions.append(ee.SendTo(stream, fault))
        self._hang_up(key)
        self.close_sequence(key)

    def close_sequence(self, key: str) -> None:
        """The target need not hold the session's sequence any more."""
        if key in self._cached:
            self._cached.discard(key)
            self.actions.append(ee.CloseSequence(key))

    def _handle(self, key: str, event: ev.VerifyEvent, now: float) -> tuple[ev.VerifyAction, ...]:
        if (session := self.sessions.get(key)) is None:
            return ()  # ended by what came before
        try:
            return session.handle(event, now)
        except Exception:
            if not self._contain:
                raise
            stream = self.streams.stream(key)
            self.actions.append(ee.ReportFailure(key, traceback.format_exc(), stream))
            fault = Fault(FaultCode.INTERNAL, "the verifier failed in this session", 1.0)
            self.end(key, fault)
            return ()

    def _hang_up(self, key: str) -> None:
        if (stream := self.streams.part(key)) is not None:
            self.actions.append(ee.CloseStream(stream))
