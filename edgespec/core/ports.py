"""The seams: what the sessions' drivers need from models, links and clocks.

Protocols only (structural, at most four methods), standard library and ``core`` only. Two
implementations of each stand in this project from the start: a real one and a toy, loopback or
virtual one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from edgespec.core.protocol.messages import Downlink, Uplink, VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape as CacheShape
from edgespec.core.protocol.work import Candidate as Candidate
from edgespec.core.protocol.work import DraftStep as DraftStep
from edgespec.core.protocol.work import ModelInfo as ModelInfo
from edgespec.core.protocol.work import PassRequest as PassRequest
from edgespec.core.protocol.work import PassResult as PassResult
from edgespec.core.protocol.work import PassShape as PassShape
from edgespec.core.verifier.credential import Credential as Credential

# --- drafting -------------------------------------------------------------------------------

PREFILL_CHUNK = 64
"""A drafter looks at ``cancelled`` at least once per so many fed tokens."""

Cancelled = Callable[[], bool]
"""Asked by a draft step, in its thread, whether anybody still wants its result."""


def never_cancelled() -> bool:
    """The step is wanted."""
    return False


class StepCancelledError(RuntimeError):
    """A draft step ended early because it was cancelled; it has no result."""


class Drafter(Protocol):
    """A draft model with one sequence in its cache. Calls come one at a time, off the event loop.

    The session tracks what is cached; the drafter only truncates and appends."""

    @property
    def info(self) -> ModelInfo: ...

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        """Empty the cache and start a sequence whose first ``prompt_length`` tokens are prompt."""

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        """Truncate the cache to ``keep_length`` tokens, append ``feed`` (at least one token), and
        return the ``width`` best guesses, best first, for position ``keep_length + len(feed)``,
        by the draft's own law with the shared noise of ``sampling.seed`` at that position. A
        drafter may have fewer guesses, or none: then nothing is drafted behind until a commit.

        A long feed asks ``cancelled`` before every ``PREFILL_CHUNK`` tokens and then raises
        ``StepCancelledError``; what is cached behind ``keep_length`` tokens is lost."""

    def close(self) -> None: ...


DEFAULT_CACHES, MAX_CACHES = 4, 64
"""Texts that an agent drafts for at once: by default, and at most."""


@runtime_checkable
class Twinned(Protocol):
    """A drafter that can have further caches: one sequence each, on the same weights."""

    def twin(self) -> Drafter:
        """Another drafter with an empty cache of its own, to be closed before this one. Its calls
        come from the same thread, one at a time with those of this one. Raises ``MemoryError`` or
        whatever else the model raises when there is no room for it."""


# --- the target -----------------------------------------------------------------------------


class TargetModel(Protocol):
    """The big model: all sessions with work go through one packed ``forward``.

    A pass writes the cache rows of ``feed`` and of the nodes, and no others: what lies before
    ``cache_length`` may be shared. The next request of that key keeps those it names. Calls come
    one at a time, off the event loop."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def cache(self) -> CacheShape | None:
        """Its key-value cache, whose blocks the engine gives out (``PassRequest.blocks``); None
        for a target that always has room."""

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        """Reserve a sequence. Raises ``CapacityError`` when there is no room for one more. There is
        for one more than sessions are served: a probe must not fail because all are there.

        ``text`` are the tokens that are committed already, the prompt first. A pass may begin
        behind some of them that were never fed: then its ``blocks`` hold their rows, which
        another sequence has computed."""

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        """One pass over all requests, in order, sampling with each session's parameters.

        Raises ``ValueError`` for a request that does not fit what is cached, ``CapacityError``,
        and ``ModelOutputError``, which names the session that cannot go on; any call may raise
        ``TargetLostError``, after which there is nothing left to call."""

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """After a pass: the indices of its nodes, root to leaf, that became committed. The cache
        is then ``cache_length + len(feed) + len(nodes)`` long; all other node rows are freed."""

    def close(self, key: str) -> None:
        """Free the sequence; unknown keys are ignored."""


def pass_shape(target: object) -> PassShape:
    """What ``target`` can take of one pass: its ``pass_shape``, where it cannot take every one."""
    # Not by ``isinstance``, which from Python 3.12 on does not see what a wrapper passes on.
    shape: PassShape = getattr(target, "pass_shape", PassShape())
    return shape


class ServerDrafter(Protocol):
    """The verifier's own draft model: all sessions that draft share one packed step. Calls come one
    at a time, in the target's thread; what raises here ends drafting, and no text."""

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        """As ``TargetModel.open``, but room is taken at the first step."""

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        """One packed step: of each sequence the draft's own choices behind its feed, by the
        sampling law with the shared noise of that position, best first; one or more. Empty where
        none is wanted, and where the sequence has no room or failed: then it is fed anew."""

    def close(self, key: str) -> None:
        """Free the sequence; unknown keys are ignored."""


def set_draft_steps(target: object, count: int) -> None:
    """How many tokens ``target`` is to propose behind the passes that follow, by its own
    ``set_draft_steps``, if it speculates (``PassShape.own_drafts``); 0: none."""
    set_steps = getattr(target, "set_draft_steps", None)
    if set_steps is not None:
        set_steps(count)


def adapters_of(target: object) -> tuple[ModelInfo, ...]:
    """What ``target`` serves beside its model, its ``adapters``: the model with each of them
    (LoRA), by a name and with a fingerprint of its own."""
    adapters: tuple[ModelInfo, ...] = getattr(target, "adapters", ())
    return adapters


def use_adapter(target: object, key: str, name: str) -> None:
    """The sequence, which was opened just now, is of the model with this adapter. Raises
    ``ValueError`` for a target that has none."""
    use = getattr(target, "use_adapter", None)
    if use is None:
        raise ValueError(f"the target has no adapter {name!r}")
    use(key, name)


class CapacityError(RuntimeError):
    """No room for one more session or token; the message names the bound and the value."""


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message names what it has and what is supported."""


class ModelOutputError(ValueError):
    """One session cannot go on; ``key`` names it. ``requested``: what the device asked for is the
    reason (a constraint that outgrows its bounds), so coming back does not help."""

    def __init__(self, key: str, reason: str, *, requested: bool = False) -> None:
        super().__init__(f"{key!r}: {reason}")
        self.key, self.requested = key, requested


class TargetLostError(RuntimeError):
    """The target as a whole is gone and no session can go on, now or later."""


# --- links ----------------------------------------------------------------------------------


class LinkError(ConnectionError):
    """The link is gone or was refused; the message says which peer and why.

    ``again_s`` is what ``core.device.events.LinkDown`` says of it; ``alive``: the peer itself said
    no, so it is there."""

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = True,
        again_s: float | None = None,
        alive: bool = False,
    ) -> None:
        super().__init__(message)
        self.retryable, self.again_s, self.alive = retryable, again_s, alive


class UntrustedPeerError(LinkError):
    """Somebody answers, but without TLS; the message says whose certificate fails, and why."""


class DeviceStream(Protocol):
    """The device's end of one generation's stream."""

    async def send(self, message: Uplink) -> None:
        """Hand over one message, in order. Raises ``LinkError`` when the stream is gone, and
        ``ValueError`` naming the field and the bound when the message breaks one of the wire's."""

    async def receive(self) -> Downlink:
        """The next message. Raises ``LinkError`` when the stream has ended."""

    async def close(self) -> None:
        """Let go, at once; never raises."""


class VerifierStream(Protocol):
    """The verifier's end of one generation's stream.

    ``receive`` raises ``LinkError`` also when the device only sends no more, but still reads."""

    @property
    def peer(self) -> str:
        """What fairness counts by: the device's address without its port, ``unix`` for a unix
        socket, ``loopback`` within one process."""

    @property
    def credential(self) -> Credential:
        """Whose key the device showed; ``ANYBODY`` where none is asked for."""

    async def send(self, message: Downlink) -> None: ...

    async def receive(self) -> Uplink: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """Opens streams to one verifier."""

    async def connect(self) -> DeviceStream:
        """Raises ``LinkError`` naming the peer and the reason."""

    async def info(self) -> VerifierInfo:
        """What the verifier serves and how busy it is. Raises ``LinkError``."""

    async def close(self) -> None: ...


def is_idle(transport: object) -> bool:
    """Whether nobody misses anything when ``transport`` is closed, which holds no stream then and
    has no call under way; False where it cannot tell (``idle``)."""
    return bool(getattr(transport, "idle", False))


ServeStream = Callable[[VerifierStream], Awaitable[None]]
"""What a server transport calls for each stream a device opens."""

Authenticate = Callable[[str], Credential | None]
"""Whose key it is that a device showed (empty: it showed none); None: nobody's, refuse it."""
