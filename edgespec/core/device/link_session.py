"""The link's half of a ``DraftSession``: it keeps a stream to the verifier open, or fails.

Theory of operation. A verifier can fail in four ways, and ``ReconnectPolicy`` has a bound for each:
no connection (``give_up_s``), no ``Opened`` (``answer_s``, plus ``grammar_s`` if it has to parse a
constraint first), a silent stream (``silence_s``), or messages without progress. Progress is a
token, or that more of the prompt is computed. Without progress either a stream lasts too long
(``progress_s``), or too many streams end without a token (``max_streams_without_token``). The first
three end in another attempt while the bound allows it, the fourth ends in ``Fail``.

Invariants: in every state but ``IDLE`` and ``DONE`` there is a ``deadline``, so no session waits
for ever. Text from the verifier passes ``make_one_line`` before it gets into a ``Fail``. A
generation never goes on with another model than it began with: if the verifier now serves another
model, that counts as a stream without tokens and is retried within the same limit.

Before attempt n = 1, 2, ... the session waits for

    wait_s = min(first_s * 2**(n - 1), longest_s) * (1 - jitter / 2),    jitter in [0, 1)

where the jitter is the device's own, so that many devices do not come back together. With
``first_s`` 0.1 and ``longest_s`` 1 the fifth wait is min(1.6, 1) = 1 s, shortened to between 0.5
and 1 s: all devices reconnect within a second after a verifier is back. A verifier that asks for
more time gets it, plus up to half a ``longest_s``, again so that not all devices come at once.

The waits start over when a token was delivered, not when a stream was opened: a verifier that opens
streams without progress is contacted less and less often, and in the end not any more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from edgespec.core.device import events as ev
from edgespec.core.protocol.checks import check_range, check_transition, make_one_line
from edgespec.core.protocol.messages import Cancel, Fault, FaultCode, ModelIdentity, Open, Opened
from edgespec.core.protocol.sampling import noise_bits

# Faults of a verifier that is full or shutting down. It is not broken, so a retry costs nothing.
_BUSY = (FaultCode.OVERLOADED, FaultCode.SHUTTING_DOWN)

MIN_WAIT_S: Final = 1e-3
MAX_WAIT_S: Final = 1e7
MAX_STREAMS: Final = 10_000
SLOWEST_BYTES_PER_S: Final = 16_384.0
"""Uplink that is slow enough to wait for: pictures that take longer than at this speed end the
stream."""
# 2**30 milliseconds are twelve days: a longer wait is of no use, and no float overflows.
_MAX_DOUBLINGS: Final = 30


@dataclass(frozen=True, slots=True)
class ReconnectPolicy:
    """How long a device waits and retries; times are in seconds.

    Raises ``ValueError`` with the field, the value and the limit."""

    first_s: float = 0.1
    """Seconds of the first wait; each further wait is twice as long. A proxy that moves a stream is
    ready by then."""
    longest_s: float = 1.0
    """Longest wait in seconds, unless the verifier asks for more time. A user notices about a
    second."""
    give_up_first_s: float = 5.0
    """Seconds to try to open the first stream. A user is waiting, and the address may be wrong."""
    give_up_s: float = 60.0
    """Seconds to try to reconnect after a stream broke. A restart of a verifier with a large model
    takes tens of seconds, and giving up would lose the output so far."""
    answer_s: float = 10.0
    """Seconds that connecting and opening the session may take. Three lost SYN packets are sent
    again within 7 s."""
    grammar_s: float = 60.0
    """Additional seconds for opening a session with a constraint. The verifier compiles a new
    grammar first, beside its other work."""
    silence_s: float = 30.0
    """Seconds without any message after which an open stream counts as broken. An empty ``Commit``
    is sent every 10 s as a sign of life."""
    progress_s: float = 300.0
    """Seconds after which a generation fails if the verifier responds but has neither sent a token
    nor computed more of the prompt."""
    max_streams_without_token: int = 8
    """Number of streams in a row without a token after which the generation fails."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.endswith("_s"):
                check_range(field.name, getattr(self, field.name), MIN_WAIT_S, MAX_WAIT_S)
        check_range("max_streams_without_token", self.max_streams_without_token, 1, MAX_STREAMS)
        for name, limit in (("first_s", "longest_s"), ("silence_s", "progress_s")):
            if (value := getattr(self, name)) > (most := getattr(self, limit)):
                raise ValueError(f"{name} is {value}, but must be at most {limit}, which is {most}")


class LinkSession:
    """Keeps ``state`` and ``deadline`` of one session. Its methods return the actions to take."""

    def __init__(
        self, policy: ReconnectPolicy, jitter_seed: int, counters: ev.DraftCounters
    ) -> None:
        self.state = ev.IDLE
        self.deadline: float | None = None
        self._counters = counters
        self._policy, self._seed = policy, jitter_seed
        self._attempts = self._streams_without_token = 0
        self._failing_since: float | None = None
        self._was_ever_opened = False
        self._is_opened = False
        self._has_brought_token = False
        """Whether a token arrived on this stream."""
        self._model: ModelIdentity | None = None
        """Model that the verifier of this stream serves."""
        self._first_model: ModelIdentity | None = None
        """Model that the generation began with."""
        self._open_timeout_s = policy.answer_s
        """Seconds that opening the session on this stream may take."""
        self._waiting_since = 0.0
        """Time at which this stream was opened, or last made progress."""
        self._max_prompt_read = 0
        """Most prompt tokens that the verifier of this stream has computed."""
        self._wasted_s = 0.0
        """Seconds that earlier streams waited in vain since the last token."""

    # --- what happens to the stream --------------------------------------------------------

    def connect(self, now: float) -> list[ev.DraftAction]:
        self._is_opened = self._has_brought_token = False
        self._max_prompt_read = 0
        self._open_timeout_s = self._policy.answer_s
        self._move(ev.CONNECTING, now + self._policy.answer_s)
        return [ev.Connect()]

    def on_connected(self, request: Open) -> None:
        """The stream is connected. The verifier still has to open the session by the same deadline,
        or later if it has to parse a constraint first."""
        deadline = self.deadline
        if deadline is not None and request.sampling.constraint is not None:
            deadline += self._policy.grammar_s
            self._open_timeout_s += self._policy.grammar_s
        self._move(ev.STREAMING, deadline)

    def on_opened(self, request: Open, opened: Opened, now: float) -> list[ev.DraftAction]:
        """Handle the verifier's ``Opened``.

        A verifier that does not keep a constraint or a ``min_tokens`` that was sent, or now serves
        another model, would produce another output; then the stream is given up."""
        if (constraint := request.sampling.constraint) is not None and not opened.constrained:
            kind = constraint.kind.value
            why = f"the verifier is too old for a {kind} constraint: it did not confirm it"
            return [ev.Transmit(Cancel()), *self.end(ev.Fail(why, FaultCode.INVALID))]
        if (least := request.sampling.min_tokens) != opened.min_tokens:
            why = f"the verifier is too old for min_tokens {least}: it did not confirm it"
            return [ev.Transmit(Cancel()), *self.end(ev.Fail(why, FaultCode.INVALID))]
        self.note_opened(now)
        self._model = model = ModelIdentity.of(opened)
        if self._first_model is None or model.is_model_of(self._first_model):
            return []
        why = f"the verifier serves {model} now, but the generation began on {self._first_model}"
        return [ev.Transmit(Cancel()), *self.abandon(make_one_line(why), now)]

    def note_opened(self, now: float) -> None:
        self._is_opened, self._waiting_since = True, now
        # The time limit for reconnecting starts over, the waits do not.
        self._failing_since, self._was_ever_opened = None, True
        self.note_message(now)

    def on_prefix_missing(self, now: float) -> None:
        """Give the verifier as long as before to open the session, since it needs ids first."""
        if not self._is_opened:
            self.deadline = now + self._open_timeout_s

    def on_pictures_missing(self, size_bytes: int, now: float) -> None:
        """Give the verifier as long as before to open the session, and the time that a slow link
        takes for its missing pictures."""
        if not self._is_opened:
            self.deadline = now + self._open_timeout_s + size_bytes / SLOWEST_BYTES_PER_S

    @property
    def is_opened(self) -> bool:
        """Whether the verifier opened the session on this stream."""
        return self._is_opened

    def note_message(self, now: float) -> None:
        """Postpone the deadline because a message arrived, if only a sign of life."""
        if self._is_opened:
            self.deadline = min(now + self._policy.silence_s, self._progress_deadline)

    def note_prompt_progress(self, count: int, now: float) -> None:
        """Record how many prompt tokens the verifier has computed.

        More than before on this stream is progress. A verifier that loses computed tokens and
        computes them again makes none."""
        if count > self._max_prompt_read:
            self._max_prompt_read = count
            self._waiting_since, self._wasted_s = now, 0.0
        self.note_message(now)

    def note_token(self, now: float) -> None:
        self._first_model = self._model
        self._has_brought_token, self._waiting_since, self._wasted_s = True, now, 0.0
        self._attempts, self._failing_since, self._streams_without_token = 0, None, 0
        self.note_message(now)

    # --- how it ends -----------------------------------------------------------------------

    def on_tick(self, now: float) -> list[ev.DraftAction]:
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is ev.BACKING_OFF:
            return self.connect(now)
        policy = self._policy
        if not self._is_opened:
            why = f"no answer from the verifier within {self._open_timeout_s:g} s"
        elif now >= self._progress_deadline:
            why = f"no new token from the verifier for {policy.progress_s:g} s"
            if self._max_prompt_read and not self._has_brought_token:
                why += f", and its prefill stopped at {self._max_prompt_read} tokens of the prompt"
            return self.end(ev.Fail(why, is_disconnected=True))
        else:
            why = f"no message from the verifier for {policy.silence_s:g} s"
        return self.abandon(why, now)

    def on_link_down(self, event: ev.LinkDown, now: float) -> list[ev.DraftAction]:
        """Handle a stream that ended or could not be opened."""
        why = make_one_line(event.why)
        if not event.retryable:
            return self.end(ev.Fail(why, is_disconnected=True))
        at_once = event.again_s is not None and event.again_s <= 0.0
        return self._retry_later(why, now, retry_after_s=event.again_s or 0.0, at_once=at_once)

    def on_fault(self, fault: Fault, now: float) -> list[ev.DraftAction]:
        """Handle a fault with which the verifier ended the stream."""
        why, code = make_one_line(fault.message), fault.code
        if not code.retryable:
            return self.end(ev.Fail(why, code))
        if not self._is_opened and code not in _BUSY:
            self.note_opened(now)  # a refusal shows that the verifier is reachable
        return [ev.Disconnect(), *self._retry_later(why, now, code, fault.retry_after_s)]

    def abandon(self, why: str, now: float, *, at_once: bool = False) -> list[ev.DraftAction]:
        """Close the stream and try another one, without a wait if ``at_once`` is set."""
        return [ev.Disconnect(), *self._retry_later(why, now, at_once=at_once)]

    def end(self, last: ev.Finish | ev.Fail) -> list[ev.DraftAction]:
        self._move(ev.DONE, None)
        return [ev.Disconnect(), last]

    def _retry_later(
        self,
        why: str,
        now: float,
        code: FaultCode | None = None,
        retry_after_s: float = 0.0,
        *,
        at_once: bool = False,
    ) -> list[ev.DraftAction]:
        if self._is_opened:
            self._wasted_s += now - self._waiting_since
            self._streams_without_token += not self._has_brought_token
        count = self._streams_without_token
        if count >= self._policy.max_streams_without_token:
            after = f"after {count} streams without a new token"
            return self._give_up(f"gave up on the verifier {after}: {why}", code, retry_after_s)
        again_at = self._next_attempt_at(now, retry_after_s, at_once)
        if again_at is None:
            return self._give_up(f"gave up on the verifier: {why}", code, retry_after_s)
        self._counters.reconnects += 1
        self._move(ev.BACKING_OFF, again_at)
        return []

    def _give_up(
        self, why: str, code: FaultCode | None, retry_after_s: float
    ) -> list[ev.DraftAction]:
        """End the generation after the last attempt. ``code`` is None if the verifier sent no
        fault, so that the connection is to blame."""
        if code is None:
            return self.end(ev.Fail(why, is_disconnected=True))
        return self.end(ev.Fail(why, code, retry_after_s))

    def _next_attempt_at(self, now: float, retry_after_s: float, at_once: bool) -> float | None:
        """Return when to try again, or None if the time limit for reconnecting has passed.

        ``at_once`` means that another verifier can be tried: then there is no wait, and later waits
        do not grow."""
        policy = self._policy
        if self._failing_since is None:
            self._failing_since = now
        at = now
        if not at_once:
            self._attempts += 1
            doublings = min(self._attempts - 1, _MAX_DOUBLINGS)
            wait_s = min(policy.first_s * 2**doublings, policy.longest_s)
            jitter = noise_bits(self._seed, self._attempts, 0) / 2**32
            at = now + wait_s * (1 - jitter / 2)
            if now + retry_after_s > at:
                at = now + retry_after_s + policy.longest_s * jitter / 2
        allowed_s = policy.give_up_s if self._was_ever_opened else policy.give_up_first_s
        return at if at - self._failing_since <= allowed_s else None

    @property
    def _progress_deadline(self) -> float:
        return self._waiting_since + self._policy.progress_s - self._wasted_s

    def _move(self, state: ev.LinkState, deadline: float | None) -> None:
        self.state, self.deadline = check_transition(ev.DRAFT_MOVES, self.state, state), deadline
