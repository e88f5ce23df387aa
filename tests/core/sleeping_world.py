"""A device, a link and a verifier in virtual time, each of which can stand still for a while.

The device drafts ``TEXT``'s token with a fixed rate. The verifier is the real engine with passes of
a fixed time. A part that stands still goes on afterwards as if no time had passed for it, except
that its clock has run on: a machine whose clock stands still as well notices nothing.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from edgespec.core.device import events as ev
from edgespec.core.device.estimates import KeptEstimates, VerifierEstimates
from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import Candidate
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo, PassRequest, PassResult
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.engine import VerifyEngine

SIZE = 50
PROMPT = (1, 2)
MODEL = ModelInfo("big", "", SIZE, 1 << 16)


def token_at(position: int) -> int:
    """Return the token of the text at a position."""
    return random.Random(position).randrange(3, SIZE)


class Part:
    """A part of the world that may stand still. What happens to it then comes afterwards."""

    def __init__(self) -> None:
        self.still_until_s = 0.0


@dataclass
class World:
    """The times are in seconds. ``acceptance`` is the rate at which the draft is right."""

    rtt_s: float = 0.02
    pass_s: float = 0.03
    step_s: float = 0.006
    acceptance: float = 0.8
    now: float = 0.0
    verifier: VerifierEstimates = field(default_factory=VerifierEstimates)
    learned: KeptEstimates = field(default_factory=KeptEstimates)

    def __post_init__(self) -> None:
        self._order, self._events = itertools.count(), list[tuple[float, int, Callable[[], None]]]()
        self.device, self.server, self.link = Part(), Part(), Part()
        limits = m.Limits(context_length=MODEL.context_length, max_unreceived=4096)
        self.engine = VerifyEngine(MODEL, limits, ee.EngineLimits(), contain=False)
        self._streams, self._stream = 0, 0
        self.output: list[int] = []
        self.accepted_at: list[float] = []
        """Time of each token that the device had drafted."""
        self.ended: ev.Finish | ev.Fail | None = None

    def generate(self, tokens: int, stops: Sequence[Stop] = ()) -> DraftSession:
        """Run one generation to its end, with what it stands still for."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        number = next(self._order)
        request = m.Open(f"s{number}", "", "", PROMPT, sampling=params)
        self.output, self.ended, self.accepted_at = [], None, []
        self._session = DraftSession(
            request,
            make_policy(),
            ReconnectPolicy(),
            draft_context_length=1 << 16,
            vocabulary_size=SIZE,
            verifier=self.verifier,
            learned=self.learned,
        )
        waiting = sorted(stops, key=lambda one: one.at_token)
        self._tell(ev.Start())
        while not self._has_ended:
            while waiting and len(self.output) >= waiting[0].at_token:
                one = waiting.pop(0)
                part: Part = getattr(self, one.part)
                part.still_until_s = self.now + one.seconds
            self._run_next()
        return self._session

    @property
    def _has_ended(self) -> bool:
        return self.ended is not None

    # --- time ------------------------------------------------------------------------------

    def _at(self, part: Part, delay_s: float, do: Callable[[], None]) -> None:
        """Do something that ``part`` does, ``delay_s`` from now."""

        def when_awake() -> None:
            if self.now < part.still_until_s:
                heapq.heappush(self._events, (part.still_until_s, next(self._order), when_awake))
            else:
                do()

        heapq.heappush(self._events, (self.now + delay_s, next(self._order), when_awake))

    def _run_next(self) -> None:
        assert self._events, "nothing happens any more"
        at_s, _, do = heapq.heappop(self._events)
        self.now = max(self.now, at_s)
        do()

    # --- the device ------------------------------------------------------------------------

    def _tell(self, event: ev.DraftEvent) -> None:
        for action in self._session.handle(event, self.now):
            self._do(action)
        deadline = self._session.deadline
        if deadline is not None:
            session = self._session
            self._at(
                self.device,
                max(0.0, deadline - self.now),
                lambda: self._tick(session, deadline),
            )

    def _tick(self, session: DraftSession, deadline: float) -> None:
        if session is self._session and session.deadline == deadline:
            self._tell(ev.Tick())

    def _do(self, action: ev.DraftAction) -> None:
        match action:
            case ev.Connect():
                self._streams += 1
                self._stream = self._streams
                self._at(self.device, self.rtt_s, lambda: self._tell(ev.Connected()))
            case ev.Disconnect():
                stream, self._stream = self._stream, 0
                self._send_up(ee.StreamLost(stream))
            case ev.Transmit(message):
                stream = self._stream
                if isinstance(message, m.Open):
                    self._send_up(ee.StreamOpened(stream, message))
                else:
                    self._send_up(ee.StreamMessage(stream, message))
            case ev.StartStep() as step:
                session = self._session
                self._at(self.device, self.step_s, lambda: self._finish_step(session, step))
            case ev.Deliver() as delivered:
                self.output += delivered.tokens
                accepted = [one is ev.TokenKind.ACCEPTED for one in delivered.kinds]
                self.accepted_at += [self.now] * sum(accepted)
            case ev.Finish() | ev.Fail():
                self.ended = action

    def _finish_step(self, session: DraftSession, step: ev.StartStep) -> None:
        if session is not self._session:
            return
        position = step.keep_length + len(step.feed)
        right = random.Random(f"{position}").random() < self.acceptance
        token = token_at(position) if right else 2
        self._tell(ev.StepDone((Candidate(token, -0.2),)))

    # --- the link --------------------------------------------------------------------------

    def _send_up(self, event: ee.EngineEvent) -> None:
        def arrive() -> None:
            self._at(self.server, 0.0, lambda: self._serve(self.engine.handle(event, self.now)))

        self._at(self.link, self.rtt_s / 2, arrive)

    def _send_down(self, stream: int, message: m.Downlink) -> None:
        def arrive() -> None:
            self._at(self.device, 0.0, lambda: self._receive(stream, message))

        self._at(self.link, self.rtt_s / 2, arrive)

    def _receive(self, stream: int, message: m.Downlink) -> None:
        if stream == self._stream:
            self._tell(message)

    # --- the verifier ----------------------------------------------------------------------

    def _serve(self, actions: tuple[ee.EngineAction, ...]) -> None:
        for action in actions:
            match action:
                case ee.RunBatch(requests):
                    self._at(self.server, self.pass_s, partial(self._finish, requests))
                case ee.SendTo(stream, message):
                    self._send_down(stream, message)
        deadline = self.engine.deadline
        if deadline is not None:
            self._at(self.server, max(0.0, deadline - self.now), lambda: self._poll(deadline))

    def _poll(self, deadline: float) -> None:
        if self.engine.deadline == deadline:
            self._serve(self.engine.handle(ee.Poll(), self.now))

    def _finish(self, requests: tuple[PassRequest, ...]) -> None:
        results = [PassResult(one.key, _targets(one) if one.sample else ()) for one in requests]
        self._serve(self.engine.handle(ee.BatchDone(tuple(results)), self.now))


@dataclass(frozen=True)
class Stop:
    """A part stands still for a time once the device has ``at_token`` tokens."""

    part: str
    at_token: int
    seconds: float


def _targets(request: PassRequest) -> tuple[int, ...]:
    first = request.cache_length + len(request.feed)
    depths: list[int] = []
    for parent in request.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return tuple(token_at(first + depth) for depth in (0, *depths))
