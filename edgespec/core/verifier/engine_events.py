"""What can happen to a ``VerifyEngine``, what it asks of its driver, and the bounds it keeps.

Streams are named by a number the driver chooses; sequences in the target's cache by session id.
"""

from __future__ import annotations

from dataclasses import field

from edgespec.core.protocol.messages import EXACT_RULE, Cancel, Downlink, Draft, Open, Received
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.own_drafts import DraftsDone as DraftsDone
from edgespec.core.verifier.own_drafts import RunDrafts as RunDrafts


@statically_frozen
class EngineLimits:
    max_sessions: int = 64
    max_rows_per_pass: int = 1024
    """Rows of one packed pass: fed tokens and nodes of all its sessions."""
    max_rows_per_session: int = 512
    """Of these, one session's; a longer prompt is fed in several passes."""
    max_sessions_per_peer: int = 0
    """Of the sessions, those of one peer (a device's address); 0: as many as there are."""
    cache: CacheShape | None = None
    """The target's key-value cache; None: it has room for whatever is admitted."""
    share_prefixes: SharePrefixes = SharePrefixes.ALL
    """Whose cached prefixes a session may use; without ``cache`` there is nothing to share."""
    stall_s: float = 20.0
    """A device that acknowledges nothing for so long, though it should, counts as gone. TCP sends a
    packet six times in that time; a phone in a tunnel comes back to its lease."""
    silence_s: float = 10.0
    """A device that was sent nothing for so long is sent a sign of life. It is a third of the time
    after which devices take a link for broken (``ReconnectPolicy.silence_s``)."""
    stuck_pass_s: float = 600.0
    """A pass that takes longer never ends: the target hangs. The first pass of an engine compiles
    its kernels, which takes minutes."""
    server_drafts: bool = False
    """May passes carry guesses of the verifier's own? (``served_drafts.py``)"""
    trees: bool = True
    """Can the target verify trees? If not, a pass has the likeliest chain of each."""
    drafter: bool = False
    """Has the verifier a draft model of its own? (``own_drafts.py``)"""
    own_drafts: int = 0
    """As ``PassShape.own_drafts``."""
    rules: tuple[str, ...] = (EXACT_RULE,)
    """Acceptance rules that devices may ask for, by name (any parameters) or with these alone."""


# --- events ---------------------------------------------------------------------------------


@statically_frozen
class StreamOpened:
    stream: int
    request: Open
    peer: str = ""
    """Whom the session counts for: the device's address."""
    credential: Credential = ANYBODY


@statically_frozen
class StreamMessage:
    """Any later message of a stream."""

    stream: int
    message: Draft | Received | Cancel


@statically_frozen
class StreamLost:
    """The device let go, or the link broke."""

    stream: int


@statically_frozen
class BatchDone:
    results: tuple[PassResult, ...]
    """In the order of the batch's requests, less those whose sequence failed before the pass."""
    target_s: float | None = None
    """What the target itself took; None: it is not known apart from the time until this event."""
    behind: tuple[int, ...] = ()
    """Streams on which something of before this pass waits to leave. Their sessions take part in
    no pass until ``StreamCaughtUp``: a token that cannot leave helps nobody."""


@statically_frozen
class StreamCaughtUp:
    """All that a stream of ``BatchDone.behind`` was to be sent has left."""

    stream: int


@statically_frozen
class BatchFailed:
    """Nothing was cached or sampled. ``full``: the target had no room. ``culprit``: the session
    that it failed for, where that is known; ``requested``: for what its device asked for."""

    why: str
    full: bool = False
    culprit: str = ""
    requested: bool = False


@statically_frozen
class DraftsFailed:
    """The draft model failed in a round: it is not asked any more."""

    why: str


@statically_frozen
class SequenceFailed:
    """The target could not open the sequence (``full``: for want of room), or keep its nodes. Said
    before the ``BatchDone`` of the pass that the sequence misses."""

    key: str
    why: str
    full: bool = False


@statically_frozen
class ProbeDone:
    """How ``RunProbe`` ended: ``why`` says what failed, None that the target works."""

    why: str | None = None


@statically_frozen
class Poll:
    """The deadline has come."""


StreamEvent = StreamOpened | StreamMessage | StreamLost | StreamCaughtUp
TargetEvent = BatchDone | BatchFailed | DraftsDone | DraftsFailed | SequenceFailed | ProbeDone
EngineEvent = StreamEvent | TargetEvent | Poll


# --- actions: to be carried out in order ----------------------------------------------------


@statically_frozen
class SendTo:
    """Hand this message to the stream, in order."""

    stream: int
    message: Downlink


@statically_frozen
class CloseStream:
    """End the stream after what was sent on it; no ``StreamLost`` need follow."""

    stream: int


@statically_frozen
class OpenSequence:
    """Reserve a sequence in the target (``ports.TargetModel.open``)."""

    key: str
    prompt_length: int
    sampling: SamplingParams
    text: tuple[int, ...] = field(default=(), repr=False)  # long, and its stream's first message
    """The committed tokens so far: the prompt, and what a device brought with it."""
    adapter: str = field(default="", repr=False)  # as its stream's first message says
    """The name of one of the target's; empty: none."""


@statically_frozen
class CloseSequence:
    """Free it again."""

    key: str


@statically_frozen
class KeepNodes:
    """Which nodes of its last pass stay cached (``ports.TargetModel.keep``)."""

    key: str
    nodes: tuple[int, ...]


@statically_frozen
class RunBatch:
    """One packed forward pass; answer with ``BatchDone`` or ``BatchFailed``. A target that
    speculates by itself proposes ``draft_steps`` tokens behind it (``ports.set_draft_steps``)."""

    requests: tuple[PassRequest, ...]
    draft_steps: int = 0


@statically_frozen
class RunProbe:
    """Open a sequence, run this one request, close it; answer with ``ProbeDone``."""

    request: PassRequest


@statically_frozen
class ReportFailure:
    """Write down for the operator what went wrong with one session; it has been ended."""

    key: str
    details: str
    stream: int | None = None


@statically_frozen
class ReportDraftsOff:
    """Write down for the operator why the verifier's own model drafts no more; texts go on."""

    why: str


@statically_frozen
class GiveUp:
    """The target is broken: say so to health checks and end the process with a failure."""

    why: str


@statically_frozen
class ReportDraftsRest:
    """Write down for the operator that the verifier's own model drafts less often from now on, or
    as often as before, and why."""

    why: str


TargetAction = OpenSequence | CloseSequence | KeepNodes | RunBatch | RunDrafts | RunProbe
Report = ReportFailure | ReportDraftsOff | ReportDraftsRest
EngineAction = SendTo | CloseStream | TargetAction | Report | GiveUp
