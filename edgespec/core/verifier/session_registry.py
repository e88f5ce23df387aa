"""The sessions of one verifier: how they open, which device may resume them, and how they end.

Theory of operation. An ``Open`` passes through these steps. Each step may refuse it:

    open              If the device named the beginning of its prompt, its ids are looked up. If
                      they are not here, the device is asked for them (``PrefixMissing``).
    _open_whole       The request is checked. If it continues a session of this verifier, the
                      stream is bound to that session, and the steps below are left out.
    _gather_pictures  If the prompt has pictures, the device is asked for each that is not here
                      (``PicturesMissing``). Then the target reads them (``ReadPictureData``).
    _add_session      The session gets a slot, perhaps that of a session whose device is gone.

While the device is asked, or the target reads, the stream waits in ``incomplete``.

A session outlives its stream, so that its device can resume it. It ends when its output is finished
and acknowledged, when its lease has expired, when it is displaced by another, or when it fails. A
session whose machine raises is ended alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from edgespec.core.protocol.acceptance import AcceptanceRule
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.failures import describe_without_messages
from edgespec.core.protocol.messages import (
    Cancel,
    Fault,
    FaultCode,
    Limits,
    Open,
    PicturePart,
    PicturesMissing,
    PrefixMissing,
    PrefixTokens,
    RunAhead,
)
from edgespec.core.protocol.pictures import ReadPictures, check_picture
from edgespec.core.protocol.prefix_names import PrefixNames
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.admission import (
    DISPLACED_FAULT,
    SessionSlots,
    limits_of,
    refuse_open,
    shorten_context,
)
from edgespec.core.verifier.draft_round import ChainStart
from edgespec.core.verifier.picture_store import ArrivingPictures, PictureStore
from edgespec.core.verifier.prefix_store import PrefixStore
from edgespec.core.verifier.run_ahead import DraftHistories, RunAheadPolicy
from edgespec.core.verifier.server_drafts import ServerDraftsFactory
from edgespec.core.verifier.session import VerifySession, same_device, same_generation

RunAheadFactory = Callable[[RunAhead], RunAheadPolicy]
RuleFactory = Callable[[str], AcceptanceRule]


@dataclass(slots=True)
class IncompleteOpen:
    """An ``Open`` that cannot open a session yet, because its device was asked for the ids of its
    prefix or for its pictures, or because the target reads the pictures."""

    event: ee.StreamOpened
    since: float
    """Time at which the device was asked, or sent the last part of a picture. Infinite while the
    target reads the pictures."""
    arriving: ArrivingPictures | None = None
    """The pictures; None while the ids of the prefix are awaited."""
    names: PrefixNames | None = None
    """The names of the beginning of the prompt, if they are known."""


class SessionRegistry:
    """The sessions of one verifier, with their streams and their sequences in the target.

    Every session has a key (its id on the wire), at most one stream, and a sequence in the target
    until it is finished. The engine takes two things from here after each event: ``actions``, which
    the sessions requested, and ``changed_keys``, the sessions to review.

    ``adapters`` are the adapters that the target serves beside ``model``. ``rules`` and
    ``run_ahead`` make the acceptance rule and the run-ahead policy that a request names. With
    ``contain`` False an exception in a session is raised instead of ending that session, for tests.
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
        """All sessions by key, in the order of opening."""
        self.actions: list[ee.EngineAction] = []
        self.changed_keys: dict[str, None] = {}
        self.stream_of: dict[str, int] = {}
        """The driver's number of each session's stream, while it has one."""
        self.key_of: dict[int, str] = {}
        """The inverse of ``stream_of``."""
        self._model, self._limits, self._rules = model, limits, rules
        self._models = {one.name: one for one in (model, *adapters)}
        self._run_ahead, self._contain = run_ahead, contain
        self._verifies_trees, self._offered_rules = engine_limits.trees, engine_limits.rules
        self._slots = SessionSlots(engine_limits, self.sessions)
        self.credential_of: Mapping[str, Credential] = self._slots.credential_of
        self.draft_sources = ServerDraftsFactory(
            text=engine_limits.server_drafts,
            model=engine_limits.drafter,
            speculator=engine_limits.speculator_tokens > 0,
        )
        self._histories = DraftHistories()
        self._has_sequence: set[str] = set()
        """Keys of the sessions that have a sequence in the target."""
        self.prefixes = PrefixStore(engine_limits.prefix_bytes, engine_limits.prefix_block)
        self._keeps_prefixes = engine_limits.prefix_bytes > 0
        self.pictures = PictureStore(engine_limits.picture_bytes)
        self._prefix_names: dict[str, PrefixNames] = {}
        """Names of the beginnings of each session's text, by session id, if they are kept."""
        self.incomplete: dict[int, IncompleteOpen] = {}
        """Opens that wait for the ids of their prefix, or for their pictures, by stream."""

    # --- streams ---------------------------------------------------------------------------

    def open(self, event: ee.StreamOpened, now: float) -> None:
        """Handle the first message of a stream, in the steps at the head of this file."""
        stream, key, names = event.stream, event.request.session_id, None
        if (prefix := event.request.prefix) is not None:
            # A device that resumes may name tokens that were committed just now.
            self._keep_text(key)
            owner, prefix_key = event.credential.name, event.request.prefix_key
            if (text := self.prefixes.find(owner, prefix_key, prefix)) is None:
                self.incomplete[stream] = IncompleteOpen(event, now)
                self.actions.append(ee.SendTo(stream, PrefixMissing()))
                return
            event, names = _complete_open(event, text.tokens), text.names
        self._open_whole(event, names, now)

    def _open_with_prefix(self, stream: int, message: PrefixTokens, now: float) -> None:
        """Open the session of a stream that has sent the ids of its prefix.

        The ids are not compared with the name that stood for them. They are what the device means,
        and another version of edgespec may give them another name."""
        event, tokens = self.incomplete.pop(stream).event, message.tokens
        prefix = event.request.prefix
        if prefix is None or len(tokens) != prefix.length:
            named = 0 if prefix is None else prefix.length
            why = f"{len(tokens)} ids were sent for a prefix of {named}"
            self.refuse_stream(stream, Fault(FaultCode.INVALID, why))
            return
        self._open_whole(_complete_open(event, tokens), None, now)

    def refuse_incomplete(self, since: float) -> None:
        """Refuse the streams whose device has sent nothing that was asked for since ``since``."""
        for stream, waiting in tuple(self.incomplete.items()):
            if waiting.since <= since:
                what = "the ids of the prefix" if waiting.arriving is None else "the pictures"
                why = f"{what} did not arrive in time"
                self.refuse_stream(stream, Fault(FaultCode.OVERLOADED, why, 1.0))

    def refuse_stream(self, stream: int, fault: Fault) -> None:
        """End a stream that has no session."""
        self._drop_incomplete(stream)
        self.actions += (ee.SendTo(stream, fault), ee.CloseStream(stream))

    def _drop_incomplete(self, stream: int) -> None:
        self.incomplete.pop(stream, None)
        self.pictures.release(stream)

    # --- pictures --------------------------------------------------------------------------

    def _gather_pictures(
        self, event: ee.StreamOpened, names: PrefixNames | None, now: float
    ) -> None:
        """Look for the pictures of an admissible ``Open``, and ask for each that is not here. If
        all are here, the target reads them."""
        stream, request, owner = event.stream, event.request, event.credential.name
        total = sum([one.size_bytes for one in request.pictures])
        if total > self.pictures.most_bytes_of_prompt:
            why = (
                f"the pictures have {total} bytes in all, but a prompt may have at most"
                f" {self.pictures.most_bytes_of_prompt} (half of limits.picture_mib)"
            )
            self.refuse_stream(stream, Fault(FaultCode.INVALID, why))
            return
        if (full := self.pictures.admit(stream, event.peer, total)) is not None:
            self.refuse_stream(stream, Fault(FaultCode.OVERLOADED, full, 1.0))
            return
        known: list[bytes | None] = []
        for one in request.pictures:
            data = self.pictures.find(owner, request.prefix_key, one.sha256)
            known.append(data if data is not None and len(data) == one.size_bytes else None)
        arriving = ArrivingPictures(request.pictures, known)
        self.incomplete[stream] = IncompleteOpen(event, now, arriving, names)
        if not arriving.missing:
            self._read_pictures(stream)
            return
        # A picture that stands in the prompt several times is asked for once.
        first_of: dict[bytes, int] = {}
        for number in arriving.missing:
            first_of.setdefault(request.pictures[number].sha256, number)
        self.actions.append(ee.SendTo(stream, PicturesMissing(tuple(first_of.values()))))

    def _add_part(self, stream: int, part: PicturePart, now: float) -> None:
        waiting = self.incomplete[stream]
        arriving, request = waiting.arriving, waiting.event.request
        if arriving is None or not arriving.missing:
            why = "a part of a picture was sent, but none is missing"
            self.refuse_stream(stream, Fault(FaultCode.INVALID, why))
            return
        name = request.pictures[arriving.missing[0]].sha256
        try:
            data = arriving.add(part)
        except ValueError as error:
            self.refuse_stream(stream, Fault(FaultCode.INVALID, str(error)))
            return
        waiting.since = now
        if data is not None:
            owner = waiting.event.credential.name
            self.pictures.keep(owner, request.prefix_key, name, data)
            if not arriving.missing:
                self._read_pictures(stream)

    def _read_pictures(self, stream: int) -> None:
        """Let the target read the pictures, which are complete. Refuse the stream if their headers
        exceed the bounds."""
        waiting = self.incomplete[stream]
        request, arriving = waiting.event.request, waiting.arriving
        bounds = self._model_of(request).pictures
        assert arriving is not None
        assert bounds is not None
        for number, data in enumerate(arriving.data):
            try:
                check_picture(data, bounds)
            except ValueError as error:
                self.refuse_stream(stream, Fault(FaultCode.INVALID, f"picture {number} {error}"))
                return
        waiting.since = math.inf
        positions = tuple([picture.position for picture in request.pictures])
        self.actions.append(ee.ReadPictureData(stream, request.prompt, arriving.data, positions))

    def open_with_pictures(self, event: ee.PicturesRead, now: float) -> None:
        """Open the session of a stream whose pictures the target has read, or refuse it."""
        stream, waiting = event.stream, self.incomplete.get(event.stream)
        if waiting is None or waiting.arriving is None:
            return  # the stream is gone
        if event.pictures is None:
            self.refuse_stream(stream, Fault(FaultCode.INVALID, event.why))
            return
        self._drop_incomplete(stream)
        self._open_whole(waiting.event, waiting.names, now, event.pictures)

    # --- whole opens -----------------------------------------------------------------------

    def _open_whole(
        self,
        event: ee.StreamOpened,
        names: PrefixNames | None,
        now: float,
        pictures: ReadPictures | None = None,
    ) -> None:
        """Handle an ``Open`` with all its ids: refuse it, resume its session, or open one.

        ``names`` are the names of its beginning, if they are known. ``pictures`` are the pictures
        of its prompt as the target has read them; None if it has none, or if they are still to be
        gathered."""
        stream, request, key = event.stream, event.request, event.request.session_id
        known = self.sessions.get(key)
        limits = limits_of(event.credential, self._limits)
        model, served = self._model_of(request), tuple(self._models)
        extra_tokens = 0 if pictures is None else pictures.extra_tokens
        fault = refuse_open(
            request, model, limits, self._offered_rules, event.credential, served, extra_tokens
        )
        if fault is None and known is not None:
            fault = self._check_reopening(known, request, event.credential)
        if fault is None and key not in self.sessions:
            if request.pictures and pictures is None:
                self._gather_pictures(event, names, now)
                return
            limits = shorten_context(limits, extra_tokens)
            fault = self._add_session(event, limits, names, pictures, now)
        if fault is not None:
            self.refuse_stream(stream, fault)
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

    def _add_session(
        self,
        event: ee.StreamOpened,
        limits: Limits,
        names: PrefixNames | None,
        pictures: ReadPictures | None,
        now: float,
    ) -> Fault | None:
        """Open a session, or return the fault that refuses it for lack of a slot. ``limits`` are
        the request's own; ``_open_whole`` explains the other arguments."""
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
        keeps = self._keeps_prefixes and bool(request.prefix_key)
        self.sessions[key] = VerifySession(
            request=request,
            model=model,
            limits=limits,
            rule=rule,
            run_ahead=run_ahead,
            now=now,
            server_drafts=draft_sources,
            trees=self._verifies_trees,
            history=history,
            prefix_block=self.prefixes.block_tokens if keeps else 0,
            picture_tokens=0 if pictures is None else pictures.extra_tokens,
        )
        self._slots.occupy(key, event.peer, credential, now)
        if keeps:
            size = self.prefixes.block_tokens
            self._prefix_names[key] = names or PrefixNames(request.prefix_key, size)
            self._keep_text(key)
        self._has_sequence.add(key)
        text = (*request.prompt, *request.committed)
        adapter = self.adapter_of(key)
        opening = ee.OpenSequence(
            key=key,
            prompt_length=len(request.prompt),
            sampling=request.sampling,
            text=text,
            adapter=adapter,
            pictures=pictures,
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
        """Handle a later message; a message on a stream without a session is dropped, unless the
        ids of its prefix are awaited."""
        stream, message = event.stream, event.message
        if (key := self.key_of.get(stream)) is not None:
            if isinstance(message, PrefixTokens):
                why = "PrefixTokens were sent, but no prefix is missing"
                self.remove(key, Fault(FaultCode.INVALID, why))
            elif isinstance(message, PicturePart):
                why = "a part of a picture was sent, but none is missing"
                self.remove(key, Fault(FaultCode.INVALID, why))
            else:
                self.dispatch(key, message, now)
        elif stream in self.incomplete:
            if isinstance(message, PrefixTokens):
                self._open_with_prefix(stream, message, now)
            elif isinstance(message, PicturePart):
                self._add_part(stream, message, now)
            elif isinstance(message, Cancel):
                self._drop_incomplete(stream)
                self.actions.append(ee.CloseStream(stream))

    def handle_loss(self, stream: int, now: float) -> None:
        """Handle the loss of a stream; its session stays for the lease."""
        self._drop_incomplete(stream)
        if (key := self.key_of.get(stream)) is not None:
            self._keep_text(key)
            self._unbind_stream(key)
            self.dispatch(key, ev.Detach(), now)

    def mark_behind(self, stream: int) -> None:
        """Note that the send queue of the stream still holds messages from before the last pass."""
        if (key := self.key_of.get(stream)) is not None:
            self.sessions[key].device.is_behind = True

    def mark_caught_up(self, stream: int) -> None:
        """Note that the send queue of the stream is empty, so its session may use a pass again."""
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
        self._keep_text(key)
        self._prefix_names.pop(key, None)
        if self.sessions.pop(key, None) is None:
            return
        self.changed_keys.setdefault(key)
        self._slots.release(key)
        if fault is not None and (stream := self.stream_of.get(key)) is not None:
            self.actions.append(ee.SendTo(stream, fault))
        self._close_stream(key)
        self.close_sequence(key)

    def close_sequence(self, key: str) -> None:
        """Free the session's sequence in the target, and keep its text."""
        if key in self._has_sequence:
            self._has_sequence.discard(key)
            self._keep_text(key)
            self.actions.append(ee.CloseSequence(key))

    def _keep_text(self, key: str) -> None:
        """Store the ids of the session's text, if they are to be kept."""
        if (names := self._prefix_names.get(key)) is not None:
            owner = self.credential_of[key].name
            self.prefixes.keep(owner, names, self.sessions[key].prefix.tokens)

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

    def forget_texts(self, credential: str) -> None:
        """Drop the ids of all texts of a credential, because it was revoked."""
        for key in tuple(self._prefix_names):
            if self.credential_of[key].name == credential:
                del self._prefix_names[key]
        self.prefixes.forget(credential)
        self.pictures.forget(credential)

    def _unbind_stream(self, key: str) -> int | None:
        """Separate the session from its stream, and return the stream if there was one."""
        stream = self.stream_of.pop(key, None)
        if stream is not None:
            del self.key_of[stream]
        return stream

    def _close_stream(self, key: str) -> None:
        if (stream := self._unbind_stream(key)) is not None:
            self.actions.append(ee.CloseStream(stream))


def _complete_open(event: ee.StreamOpened, prefix: tuple[int, ...]) -> ee.StreamOpened:
    """Return the event with the ids of its prefix in their places."""
    request, prompt_length = event.request, event.request.prompt_length
    whole = replace(
        request,
        prompt=prefix[:prompt_length] + request.prompt,
        committed=prefix[prompt_length:] + request.committed,
        prefix=None,
    )
    return replace(event, request=whole)
