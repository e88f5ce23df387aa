"""The link's half of a ``DraftSession``: it keeps a stream to the verifier open, or gives up.

Theory of operation. Four things can be wrong with a verifier, and each has its bound, in
``ReconnectPolicy``: nobody is there (``give_up_s``), nobody greets (``answer_s``, and ``grammar_s``
more where it has a constraint to read before), a stream falls silent (``silence_s``), or it talks
and brings nothing: then either a stream lasts too long without a token (``progress_s``), or too
many end without one (``max_streams_without_token``). The first three end in another attempt as long
as there is patience, the last two in ``Fail``.

Invariant: in every state but ``IDLE`` and ``DONE`` there is a ``deadline``, so no session waits
for ever. What a stranger says passes ``one_line`` before it gets into a ``Fail``. And no text goes
on with another model than it was begun with: a verifier that has become one of another is asked
again for as long as one that brings no token.
"""

from __future__ import annotations

from edgespec.core.device import events as ev
from edgespec.core.device.reconnect import Reconnect, ReconnectPolicy
from edgespec.core.device.transitions import DRAFT_MOVES
from edgespec.core.protocol.checks import one_line, transition
from edgespec.core.protocol.messages import Cancel, Fault, FaultCode, ModelIdentity, Open, Opened

# A verifier that is full or going away is not sick: asking again costs it nothing.
_BUSY = (FaultCode.OVERLOADED, FaultCode.SHUTTING_DOWN)


class LinkKeeper:
    """``state`` and ``deadline`` of one session. Its methods return what is to be done."""

    def __init__(
        self, policy: ReconnectPolicy, jitter_seed: int, counters: ev.DraftCounters
    ) -> None:
        self.state = ev.IDLE
        self.deadline: float | None = None
        self._counters = counters
        self._policy, self._attempts = policy, Reconnect(policy, jitter_seed)
        self._greeted = False
        """Whether the verifier has answered on this stream."""
        self._brought_token = False
        """Whether a token has come on this stream."""
        self._model: ModelIdentity | None = None
        """What the verifier of this stream serves it with."""
        self._began: ModelIdentity | None = None
        """What the text was begun with."""
        self._answer_s = policy.answer_s
        """How long this stream may take to greet."""
        self._waiting_since = 0.0
        """When this stream greeted or last brought a token."""
        self._waited_s = 0.0
        """What the streams before it waited since the last token, in vain."""

    # --- what happens to the stream --------------------------------------------------------

    def connect(self, now: float) -> list[ev.DraftAction]:
        self._greeted = self._brought_token = False
        self._answer_s = self._policy.answer_s
        self._move(ev.CONNECTING, now + self._policy.answer_s)
        return [ev.Connect()]

    def connected(self, request: Open) -> None:
        """The stream is there; the verifier still has to greet, by the same deadline, or later if
        it has a constraint to read first."""
        deadline = self.deadline
        if deadline is not None and request.sampling.constraint is not None:
            deadline += self._policy.grammar_s
            self._answer_s += self._policy.grammar_s
        self._move(ev.STREAMING, deadline)

    def opened(self, request: Open, opened: Opened, now: float) -> list[ev.DraftAction]:
        """The verifier greets. One that does not keep the constraint which was sent, or serves
        another model by now, would answer with another text: better none."""
        if (constraint := request.sampling.constraint) is not None and not opened.constrained:
            kind = constraint.kind.value
            why = f"the verifier is too old to hold a text to a {kind}: it did not say that it does"
            return [ev.Transmit(Cancel()), *self.end(ev.Fail(why, FaultCode.INVALID))]
        self.greeted(now)
        self._model = model = ModelIdentity.of(opened)
        if self._began is None or model.is_model_of(self._began):
            return []
        why = f"the verifier serves {model} now, but the text was begun by {self._began}"
        return [ev.Transmit(Cancel()), *self.abandon(one_line(why), now)]

    def greeted(self, now: float) -> None:
        self._greeted, self._waiting_since = True, now
        self._attempts.greeted()
        self.heard(now)

    def heard(self, now: float) -> None:
        """The verifier said something, if only that it is alive."""
        if self._greeted:
            self.deadline = min(now + self._policy.silence_s, self._token_is_owed_at)

    def progressed(self, now: float) -> None:
        """A token was delivered."""
        self._began = self._model
        self._brought_token, self._waiting_since, self._waited_s = True, now, 0.0
        self._attempts.progressed()
        self.heard(now)

    # --- how it ends -----------------------------------------------------------------------

    def tick(self, now: float) -> list[ev.DraftAction]:
        """The deadline may have come."""
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is ev.BACKING_OFF:
            return self.connect(now)
        policy = self._policy
        if not self._greeted:
            why = f"no answer from the verifier within {self._answer_s:g} s"
        elif now >= self._token_is_owed_at:
            return self.end(ev.Fail(f"no new token from the verifier for {policy.progress_s:g} s"))
        else:
            why = f"not a word from the verifier for {policy.silence_s:g} s"
        return self.abandon(why, now)

    def down(self, event: ev.LinkDown, now: float) -> list[ev.DraftAction]:
        """The stream ended or could not be had."""
        why = one_line(event.why)
        if not event.retryable:
            return self.end(ev.Fail(why))
        at_once = event.again_s is not None and event.again_s <= 0.0
        return self._again(why, now, retry_after_s=event.again_s or 0.0, at_once=at_once)

    def refused(self, fault: Fault, now: float) -> list[ev.DraftAction]:
        """The verifier ended the stream, and said why."""
        why, code = one_line(fault.message), fault.code
        if not code.retryable:
            return self.end(ev.Fail(why, code))
        if not self._greeted and code not in _BUSY:
            self.greeted(now)  # a refusal is an answer, though one that brought nothing
        return [ev.Disconnect(), *self._again(why, now, code, fault.retry_after_s)]

    def abandon(self, why: str, now: float) -> list[ev.DraftAction]:
        """The stream is of no use: let go of it and try another."""
        return [ev.Disconnect(), *self._again(why, now)]

    def end(self, last: ev.Finish | ev.Fail) -> list[ev.DraftAction]:
        """The session is over."""
        self._move(ev.DONE, None)
        return [ev.Disconnect(), last]

    def _again(
        self,
        why: str,
        now: float,
        code: FaultCode = FaultCode.OVERLOADED,
        retry_after_s: float = 0.0,
        *,
        at_once: bool = False,
    ) -> list[ev.DraftAction]:
        if self._greeted:
            self._waited_s += now - self._waiting_since
            if not self._brought_token:
                self._attempts.brought_nothing()
        again_at = self._attempts.failed(now, retry_after_s, at_once=at_once)
        if count := self._attempts.out_of_patience():
            return self.end(ev.Fail(f"gave up on the verifier {count}: {why}", code))
        if again_at is None:
            return self.end(ev.Fail(f"gave up on the verifier: {why}", code))
        self._counters.reconnects += 1
        self._move(ev.BACKING_OFF, again_at)
        return []

    @property
    def _token_is_owed_at(self) -> float:
        return self._waiting_since + self._policy.progress_s - self._waited_s

    def _move(self, state: ev.LinkState, deadline: float | None) -> None:
        self.state, self.deadline = transition(DRAFT_MOVES, self.state, state), deadline
