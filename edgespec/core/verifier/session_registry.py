"""The sessions of one verifier: opening, resuming, the streams they are bound to, and their end.

The registry routes: it binds streams to sessions, passes each event to its session, and translates
the session's actions into the engine's. It forms no pass; the engine does (``engine.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from edgespec.core.protocol.acceptance import AcceptanceRule
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.failures import describe_without_messages
from edgespec.core.protocol.messages import Fault, FaultCode, Limits, Open, RunAhead
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.admission import DISPLACED_FAULT, SessionSlots, limits_of, refuse_open
from edgespec.core.verifier.run_ahead import DraftHistories, RunAheadPolicy
from edgespec.core.verifier.server_drafts import ServerDraftsFactory
from edgespec.core.verifier.server_model import ChainStart
from edgespec.core.verifier.session import VerifySession, same_device, same_generation

RunAheadFactory = Callable[[RunAhead], RunAheadPolicy]
RuleFactory = Callable[[str], AcceptanceRule]


class SessionRegistry:
    """The sessions of one verifier: how they open, which device may resume them, and how they end.

    Every session has a key (its id on the wire), at most one stream, and a sequence in the target
    until it is finished. The actions that sessions request are collected in ``actions``. The keys
    of sessions that changed are collected in ``changed_keys``, for the engine to review. A session
    whose machine raises is ended alone; with ``contain`` False the exception is raised instead, for
    tests.
    """

    def __init__(
        self,
        model: ModelInfo,
        limits: Limits,
        engine_limits: ee.EngineLimits,
        rules: RuleFactory,
        run_ahead: RunAheadFactory,
        *,
        contain: bool,
        adapters: Sequence[ModelInfo] = (),
    ) -> None:
        self.sessions: dict[str, VerifySession] = {}
        self.actions: list[ee.EngineAction] = []
        self.changed_keys: dict[str, None] = {}
        self.stream_of: dict[str, int] = {}
        """The driver's number of each session's stream, while it has one; ``key_of`` is the
        inverse."""
        self.key_of: dict[int, str] = {}
        self._model, self._limits, self._rules = model, limits, rules
        self._models = {one.name: one for one in (model, *adapters)}
        self._run_ahead, self._contain = run_ahead, contain
        self._trees, self._offered = engine_limits.trees, engine_limits.rules
        self._slots = SessionSlots(engine_limits, self.sessions)
        self.credential_of: Mapping[str, Credential] = self._slots.credential_of
        self.draft_sources = ServerDraftsFactory(
            text=engine_limits.server_drafts,
            model=engine_limits.drafter,
            speculator=engine_limits.speculator_tokens > 0,
        )
        self._histories = DraftHistories()
        self._cached: set[str] = set()

    # --- streams ---------------------------------------------------------------------------

    def open(self, event: ee.StreamOpened, now: float) -> None:
        """Handle the first message of a stream: open a session, resume one, or refuse."""
        stream, request, key = event.stream, event.request, event.request.session_id
        known = self.sessions.get(key)
        limits = limits_of(event.credential, self._limits)
        model, served = self._model_of(request), tuple(self._models)
        fault = refuse_open(request, model, limits, self._offered, event.credential, served)
        if fault is None and known is not None:
            fault = self._check_reopening(known, request, event.credential)
        if fault is None and key not in self.sessions:
            fault = self._add_session(event, limits, now)
        if fault is not None:
            self.actions += (ee.SendTo(stream, fault), ee.CloseStream(stream))
            return
        self._close_stream(key)
        self.stream_of[key], self.key_of[stream] = stream, key
        self.dispatch(key, ev.Attach(request), now)

    def _check_reopening(
        self, known: VerifySession, request: Open, credential: Credential
    ) -> Fault | None:
        """Return the fault that keeps this device from a session of that id, or None.

        A device must show the credential of the session as well as its secret. A session that was
        opened without a secret is open to every device that has its credential and its id. If the
        session's own device opens another generation, the session is ended, and the request opens
        it anew.
        """
        first, key = known.request, request.session_id
        is_owner = self.credential_of[key].name == credential.name
        is_same_device = is_owner and same_device(first, request)
        if is_same_device and same_generation(first, request, known.prefix):
            return None
        if not is_same_device or not request.session_secret:
            return Fault(FaultCode.INVALID, "the session id is in use by another generation")
        self.remove(key, Fault(FaultCode.INVALID, "the device began another generation"))
        return None

    def _add_session(self, event: ee.StreamOpened, limits: Limits, now: float) -> Fault | None:
        request, credential, key = event.request, event.credential, event.request.session_id
        displaced_key = self._slots.make_room(key, event.peer, credential, now)
        if isinstance(displaced_key, Fault):
            return displaced_key
        if displaced_key is not None:
            self.remove(displaced_key, DISPLACED_FAULT)
        rule, run_ahead = self._rules(request.rule), self._run_ahead(request.run_ahead)
        model = self._model_of(request)
        draft_sources = self.draft_sources(request, credential, model.eos_token_ids)
        history = self._histories.get(
            credential.name,
            samples=request.sampling.temperature > 0.0,
            run_ahead=request.run_ahead,
        )
        self.sessions[key] = VerifySession(
            request=request,
            model=model,
            limits=limits,
            rule=rule,
            run_ahead=run_ahead,
            now=now,
            server_drafts=draft_sources,
            trees=self._trees,
            history=history,
        )
        self._slots.occupy(key, event.peer, credential, now)
        self._cached.add(key)
        text = (*request.prompt, *request.committed)
        adapter = self.adapter_of(key)
        opening = ee.OpenSequence(
            key=key,
            prompt_length=len(request.prompt),
            sampling=request.sampling,
            text=text,
            adapter=adapter,
        )
        self.actions.append(opening)
        return None

    def _model_of(self, request: Open) -> ModelInfo:
        return self._models.get(request.model, self._model)

    def adapter_of(self, key: str) -> str:
        """Return the name of the session's adapter, or the empty string if it uses the model
        itself."""
        model = self._model_of(self.sessions[key].request)
        return "" if model is self._model else model.name

    def handle_message(self, event: ee.StreamMessage, now: float) -> None:
        """Handle a later message; a message on a stream without a session is dropped."""
        if (key := self.key_of.get(event.stream)) is not None:
            self.dispatch(key, event.message, now)

    def handle_loss(self, stream: int, now: float) -> None:
        """Handle the loss of a stream; its session stays for the lease."""
        if (key := self.key_of.get(stream)) is not None:
            self._unbind_stream(key)
            self.dispatch(key, ev.Detach(), now)

    def mark_behind(self, stream: int) -> None:
        """Note that the send queue of the stream still holds messages from before the last pass."""
        if (key := self.key_of.get(stream)) is not None:
            self.sessions[key].device.is_behind = True

    def mark_caught_up(self, stream: int) -> None:
        if (key := self.key_of.get(stream)) is not None:
            self.sessions[key].device.is_behind = False
            self.changed_keys.setdefault(key)

    # --- sessions --------------------------------------------------------------------------

    def dispatch(self, key: str, event: ev.VerifyEvent, now: float) -> None:
        """Pass an event to a session and translate its actions."""
        self.changed_keys.setdefault(key)
        for action in self._handle(key, event, now):
            match action:  # The cases name no fields, since matching on fields takes twice as long.
                case ev.Send():
                    if (stream := self.stream_of.get(key)) is not None:
                        self.actions.append(ee.SendTo(stream, action.message))
                case ev.Keep():
                    self.actions.append(ee.KeepNodes(key, action.nodes))
                case ev.Hangup():
                    self._close_stream(key)
                case ev.RunPass() | ev.WantChain():
                    raise AssertionError("it only follows an offer")
                case _:
                    assert_never(action)

    def offer_rows(self, key: str, offer: ev.Offer, now: float) -> PassRequest | None:
        """Offer the session rows in a pass that starts now; return its request, or None if it
        declines."""
        request = None
        for action in self._handle(key, offer, now):
            assert isinstance(action, ev.RunPass)
            request = action.request
        return request

    def offer_chain(self, key: str, offer: ev.DraftOffer, now: float) -> ChainStart | None:
        """Return where a chain of the server model would begin for this session, or None."""
        start = None
        for action in self._handle(key, offer, now):
            assert isinstance(action, ev.WantChain)
            start = action.start
        return start

    def remove(self, key: str, fault: Fault | None) -> None:
        """Remove a session; its stream is sent ``fault``, if there is one, and is closed."""
        if self.sessions.pop(key, None) is None:
            return
        self.changed_keys.setdefault(key)
        self._slots.release(key)
        if fault is not None and (stream := self.stream_of.get(key)) is not None:
            self.actions.append(ee.SendTo(stream, fault))
        self._close_stream(key)
        self.close_sequence(key)

    def close_sequence(self, key: str) -> None:
        """Free the session's sequence in the target."""
        if key in self._cached:
            self._cached.discard(key)
            self.actions.append(ee.CloseSequence(key))

    def _handle(self, key: str, event: ev.VerifyEvent, now: float) -> tuple[ev.VerifyAction, ...]:
        if (session := self.sessions.get(key)) is None:
            return ()  # ended by an earlier action
        try:
            return session.handle(event, now)
        except Exception as error:
            if not self._contain:
                raise
            stream = self.stream_of.get(key)
            self.actions.append(ee.ReportFailure(key, describe_without_messages(error), stream))
            fault = Fault(FaultCode.INTERNAL, "the verifier failed in this session", 1.0)
            self.remove(key, fault)
            return ()

    def _unbind_stream(self, key: str) -> int | None:
        stream = self.stream_of.pop(key, None)
        if stream is not None:
            del self.key_of[stream]
        return stream

    def _close_stream(self, key: str) -> None:
        if (stream := self._unbind_stream(key)) is not None:
            self.actions.append(ee.CloseStream(stream))
