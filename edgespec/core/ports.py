"""The interfaces that the sessions' drivers need from models and links.

They are structural protocols and use the standard library and ``core`` only. Each has at least two
implementations in this project: a real one and a toy, loopback or virtual one. A protocol states
every member that its callers use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, runtime_checkable

from edgespec.core.protocol.credential import Credential as Credential
from edgespec.core.protocol.messages import Downlink, Uplink, VerifierInfo
from edgespec.core.protocol.pictures import ReadPictures as ReadPictures
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape as CacheShape
from edgespec.core.protocol.work import Candidate as Candidate
from edgespec.core.protocol.work import DraftStep as DraftStep
from edgespec.core.protocol.work import ModelInfo as ModelInfo
from edgespec.core.protocol.work import PassRequest as PassRequest
from edgespec.core.protocol.work import PassResult as PassResult
from edgespec.core.protocol.work import PassShape as PassShape

# --- drafting -------------------------------------------------------------------------------

PREFILL_CHUNK = 64
"""Number of fed tokens after which a drafter must call ``cancelled`` again."""

Cancelled = Callable[[], bool]
"""Called by a draft step, in its thread: whether its result is no longer needed."""


def never_cancelled() -> bool:
    """Return False: the step's result is needed."""
    return False


class StepCancelledError(RuntimeError):
    """The draft step ended early because it was cancelled; it has no result."""


class Drafter(Protocol):
    """A draft model with one sequence in its cache. Calls come one at a time, off the event loop.

    The session tracks what is cached; the drafter only truncates and appends."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def inner(self) -> Drafter | None:
        """The drafter that this one wraps; None for one that computes candidates itself."""

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        """Start an empty sequence whose first ``prompt_length`` tokens are the prompt.

        A drafter may keep rows of the sequence before, and use them where the new one begins with
        the same tokens."""

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        """Truncate the cache to ``keep_length`` tokens, append ``feed`` (at least one token), and
        draft.

        Returns the ``width`` best candidates, best first, for position ``keep_length + len(feed)``,
        by the draft's own law with the shared noise of ``sampling.seed`` at that position. A
        drafter may return fewer candidates, or none: then nothing is drafted behind this position
        until a commit.

        A long feed calls ``cancelled`` before every ``PREFILL_CHUNK`` tokens, and raises
        ``StepCancelledError`` if it returns True; then the rows behind ``keep_length`` tokens are
        lost."""

    def close(self) -> None: ...


MAX_PLACES = 16
"""Most consecutive positions for which one step may offer candidates."""


@dataclass(frozen=True, slots=True)
class ParallelDraft:
    """The way in which a draft model fills several positions in one run."""

    mask_token: int
    """Id that stands for a token that is not known yet."""
    tokens: int
    """Most positions that one run fills: the next one and a mask token for each further one."""


@runtime_checkable
class ParallelDrafter(Drafter, Protocol):
    """A drafter whose step can offer candidates for several consecutive positions, its *places*
    (PARD, arXiv 2504.18583). Other drafters need no change: they are asked for one place."""

    @property
    def max_places(self) -> int:
        """Most places of a step, 1 to ``MAX_PLACES``."""

    def step_places(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        places: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[tuple[Candidate, ...], ...]:
        """Run a step as ``step`` does, and draft for up to ``places`` positions.

        Returns the candidates of each place, the next position first. Each place has what ``step``
        would return for it, with the noise of its own position. A further place stands behind the
        first candidates of the places before it, but its candidates hardly depend on those. Fewer
        places may be returned, or none. The cache ends with ``feed``, as after ``step``."""


def count_places(drafter: Drafter) -> int:
    """Return the most places of a step of ``drafter``; 1 for one that is not parallel."""
    return drafter.max_places if isinstance(drafter, ParallelDrafter) else 1


def draft_places(
    drafter: Drafter,
    keep_length: int,
    feed: Sequence[int],
    width: int,
    places: int,
    cancelled: Cancelled = never_cancelled,
) -> tuple[tuple[Candidate, ...], ...]:
    """Run a step of any ``drafter`` for up to ``places`` positions, and return the candidates of
    each place. A drafter that is not parallel returns one place."""
    if places > 1 and isinstance(drafter, ParallelDrafter):
        return drafter.step_places(keep_length, feed, width, places, cancelled)
    return (drafter.step(keep_length, feed, width, cancelled),)


DEFAULT_CACHES, MAX_CACHES = 4, 64
"""Caches of an agent's drafter, one for each generation that drafts at the same time: the default,
and the maximum."""


@runtime_checkable
class Twinned(Protocol):
    """A drafter that can have further caches, each for one sequence, on the same weights."""

    def twin(self) -> Drafter:
        """Return another drafter with an empty cache of its own, to be closed before this one.

        Its calls come from the same thread, never at the same time as those of this one. Raises
        ``MemoryError``, or whatever else the model raises when there is no room for it."""


@runtime_checkable
class Resuming(Protocol):
    """A drafter whose long feeds may be interrupted at little cost."""

    @property
    def resumes_feeds(self) -> bool:
        """Whether a step that is repeated after ``StepCancelledError`` computes only what the first
        attempt did not."""


def make_twin(drafter: Drafter) -> Drafter:
    """Return another sequence on the weights of ``drafter`` (``Twinned``).

    Raises ``TypeError`` naming its class if it can have only one, and the drafter's own error if
    there is no room."""
    if not isinstance(drafter, Twinned):
        raise TypeError(f"{type(drafter).__name__} holds one sequence only")
    return drafter.twin()


# --- the target -----------------------------------------------------------------------------


class TargetModel(Protocol):
    """The target model. All sessions with work go through one packed ``forward``.

    A pass writes the cache rows of ``feed`` and of the nodes, and no others: rows before
    ``cache_length`` may be shared. The session's next request keeps the rows that it names. Calls
    come one at a time, off the event loop."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def mode(self) -> str:
        """How the target computes, in words, for the verifier's ready line."""

    @property
    def cache(self) -> CacheShape | None:
        """Shape of the KV cache, whose blocks the engine assigns (``PassRequest.blocks``); None for
        a target that always has room."""

    @property
    def pass_shape(self) -> PassShape:
        """Bounds on what the target can compute in one pass."""

    @property
    def adapters(self) -> tuple[ModelInfo, ...]:
        """Models that the target serves beside its own: each is that model with a LoRA adapter,
        under a name and with a fingerprint of its own."""

    @property
    def cache_share(self) -> float:
        """Share of the KV cache in use, 0 to 1, of a target that assigns its blocks itself; 0 for
        any other. It may be read in another thread, during a pass."""

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        """Reserve a sequence. Raises ``CapacityError`` if there is no room for one more.

        Implementations hold max_sessions + 1 sequences, so that a health probe works at full load.
        ``text`` are the tokens that are committed already, the prompt first. A pass may begin
        behind some of them that were never fed: then its ``blocks`` hold their rows, which another
        sequence has computed."""

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        """Run one pass over all requests, in order, sampling with each session's parameters.

        Raises ``ValueError`` for a request that does not fit what is cached, ``CapacityError``, and
        ``ModelOutputError`` for a session that cannot go on. Any call may raise
        ``TargetLostError``; no call may follow that."""

    def use_adapter(self, key: str, name: str) -> None:
        """Let a sequence that was opened just now use the adapter ``name``. Raises ``ValueError``
        if the target has no such adapter."""

    def read_pictures(
        self, prompt: Sequence[int], pictures: Sequence[bytes], positions: Sequence[int]
    ) -> ReadPictures:
        """Read the pictures of a prompt, the tokens at ``positions`` being their placeholders.
        Their headers are within the bounds of ``info.pictures``.

        This may be called in another thread, at the same time as a pass. Raises ``ValueError`` with
        the reason for pictures that cannot be used."""

    def use_pictures(self, key: str, pictures: ReadPictures) -> None:
        """Let a sequence that was opened just now, with the prompt for which they were read, have
        these pictures. All lengths and positions of its passes go on counting a picture as one
        token."""

    def set_draft_steps(self, count: int) -> None:
        """Set how many tokens the target's own speculator proposes behind the passes that follow,
        at most ``PassShape.speculator_tokens``; 0 for none, as before the first call. A target
        without a speculator ignores it."""

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """Record which of the last pass's nodes became committed, as indices from root to leaf.

        The cache is then ``cache_length + len(feed) + len(nodes)`` long; all other node rows are
        freed."""

    def close(self, key: str) -> None:
        """Free the sequence; unknown keys are ignored."""


class TextTarget:
    """Base class of a target that reads text only."""

    def read_pictures(
        self, prompt: Sequence[int], pictures: Sequence[bytes], positions: Sequence[int]
    ) -> ReadPictures:
        raise ValueError("the model reads text only")

    def use_pictures(self, key: str, pictures: ReadPictures) -> None:
        raise ValueError("the model reads text only")


class SimpleTarget(TextTarget):
    """Base class of a target that has no adapters, no speculator and no bounds on a pass, and reads
    text only, and whose blocks the engine assigns. It implements these members of
    ``TargetModel``."""

    pass_shape = PassShape()
    adapters: tuple[ModelInfo, ...] = ()
    cache_share = 0.0

    def use_adapter(self, key: str, name: str) -> None:
        raise ValueError(f"the target has no adapter {name!r}")

    def set_draft_steps(self, count: int) -> None:
        """Ignore ``count``."""


class ServerDrafter(Protocol):
    """The server's draft model. All sessions that draft share one packed step.

    Calls come one at a time, in the target's thread. An exception here ends drafting by this model,
    and no generation."""

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        """Reserve a sequence as ``TargetModel.open`` does, but take its room at the first step."""

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        """Run one packed draft step.

        Returns for each sequence the draft's own candidates behind its feed, by the sampling law
        with the shared noise of that position, best first; at least one. The result is empty where
        no candidates are needed, and where the sequence has no room or failed; such a sequence is
        fed again from its start."""

    def close(self, key: str) -> None:
        """Free the sequence; unknown keys are ignored."""


class CapacityError(RuntimeError):
    """There is no room for one more session or token; the message gives the bound and the value."""


class UnsupportedModelError(ValueError):
    """The model cannot be served; the message gives what it has and what is supported."""


class ModelOutputError(ValueError):
    """One session, named by ``key``, cannot go on.

    ``requested`` True means that the device's request is the reason, such as a constraint that
    outgrows its bounds, so that trying again does not help."""

    def __init__(self, key: str, reason: str, *, requested: bool = False) -> None:
        super().__init__(f"{key!r}: {reason}")
        self.key, self.requested = key, requested


class TargetLostError(RuntimeError):
    """The whole target failed, and no session can go on, now or later."""


# --- links ----------------------------------------------------------------------------------


class LinkError(ConnectionError):
    """The link is gone or was refused; the message gives the peer and the reason.

    ``again_s`` has the meaning of ``core.device.events.LinkDown.again_s``. ``alive`` True means
    that the peer itself refused, so it is reachable."""

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
    """The peer answers without TLS, or its certificate fails; the message gives the reason."""


class DeviceStream(Protocol):
    """The device's end of one generation's stream."""

    @property
    def verifier(self) -> str:
        """Name of the verifier at the other end, such as its address. What is noted about the
        verifier's memory of earlier texts is noted under it."""

    async def send(self, message: Uplink) -> None:
        """Send one message, in order. Raises ``LinkError`` if the stream is gone, and
        ``ValueError`` with the field and the bound if the message exceeds a bound of the wire."""

    async def receive(self) -> Downlink:
        """Return the next message. Raises ``LinkError`` when the stream has ended."""

    async def close(self) -> None:
        """Close the stream at once. Never raises."""


class VerifierStream(Protocol):
    """The verifier's end of one generation's stream.

    ``receive`` raises ``LinkError`` also when the device only stops sending and still reads."""

    @property
    def peer(self) -> str:
        """Identity of the device for fairness: its address without the port, ``unix`` for a unix
        socket, or ``loopback`` within one process."""

    @property
    def credential(self) -> Credential:
        """Credential of the API key that the device sent; ``ANYBODY`` if no key is required."""

    async def send(self, message: Downlink) -> None: ...

    def send_now(self, message: Downlink) -> bool:
        """Send a message if that needs no wait, and return whether it was sent. If not, ``send``
        must be called. May always return False."""

    async def receive(self) -> Uplink: ...

    async def feed(self, take: Callable[[Uplink], None]) -> NoReturn:
        """Pass each message to ``take`` as it arrives, until the stream ends.

        Then raises as ``receive`` does, or the error of ``take``. It is equivalent to calling
        ``take`` with the result of ``receive`` for ever, and may be quicker."""

    async def close(self) -> None: ...


class Transport(Protocol):
    """Opens streams to one verifier."""

    @property
    def is_idle(self) -> bool:
        """Whether the transport has no open stream and no pending call, so that it can be closed.
        May always be False; then it is closed only with its owner."""

    async def connect(self) -> DeviceStream:
        """Open a stream. Raises ``LinkError`` with the peer and the reason."""

    async def info(self) -> VerifierInfo:
        """Return what the verifier serves and its load. Raises ``LinkError``."""

    async def close(self) -> None: ...


class Connection(Transport, Protocol):
    """A transport over one connection, on which a device also borrows texts of the target."""

    async def call_unary(self, name: str, request: bytes) -> bytes:
        """Make one unary call of the service, such as ``Tokenizer``. Raises ``LinkError``."""

    def renew(self) -> None:
        """Use a new connection from now on. What runs on the old one breaks."""


ServeStream = Callable[[VerifierStream], Awaitable[None]]
"""Called by a server transport for each stream that a device opens."""

Authenticate = Callable[[str], Credential | None]
"""Returns the credential of an API key that a device sent (empty: it sent none); None: refuse it.
"""
