"""What can happen to a ``VerifyEngine`` and what it asks of its driver.

Streams are named by a number the driver chooses; sequences in the target's cache by session id.
"""

from __future__ import annotations

from edgespec.core.messages import Cancel, Downlink, Draft, Open, Received
from edgespec.core.sampling import SamplingParams
from edgespec.core.value import value
from edgespec.core.work import PassRequest, PassResult


@value
class EngineLimits:
    max_sessions: int = 64
    max_rows_per_pass: int = 1024
    """Rows of one packed pass: fed tokens and nodes of all its sessions."""
    max_rows_per_session: int = 512
    """Of these, one session's; a longer prompt is fed in several passes."""


# --- events ---------------------------------------------------------------------------------


@value
class StreamOpened:
    """A stream's first message."""

    stream: int
    request: Open


@value
class StreamMessage:
    """Any later message of a stream."""

    stream: int
    message: Draft | Received | Cancel


@value
class StreamLost:
    """The device let go, or the link broke."""

    stream: int


@value
class BatchDone:
    results: tuple[PassResult, ...]
    """In the order of the batch's requests."""


@value
class BatchFailed:
    """Nothing was cached or sampled. ``full``: the target had no room for the pass."""

    why: str
    full: bool = False


@value
class SequenceRefused:
    """The target had no room to open this sequence."""

    key: str
    why: str


@value
class Poll:
    """The deadline has come."""


EngineEvent = (
    StreamOpened | StreamMessage | StreamLost | BatchDone | BatchFailed | SequenceRefused | Poll
)


# --- actions: to be carried out in order ----------------------------------------------------


@value
class SendTo:
    """Hand this message to the stream, in order."""

    stream: int
    message: Downlink


@value
class CloseStream:
    """End the stream after what was sent on it; no ``StreamLost`` need follow."""

    stream: int


@value
class OpenSequence:
    """Reserve a sequence in the target (``ports.TargetModel.open``)."""

    key: str
    prompt_length: int
    sampling: SamplingParams


@value
class CloseSequence:
    """Free it again."""

    key: str


@value
class KeepNodes:
    """Which nodes of its last pass stay cached (``ports.TargetModel.keep``)."""

    key: str
    nodes: tuple[int, ...]


@value
class RunBatch:
    """One packed forward pass; answer with ``BatchDone`` or ``BatchFailed``."""

    requests: tuple[PassRequest, ...]


EngineAction = SendTo | CloseStream | OpenSequence | CloseSequence | KeepNodes | RunBatch
