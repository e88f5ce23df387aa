"""Events and actions of a ``VerifyEngine``, and the limits it keeps.

Streams are named by a number that the driver chooses; sequences in the target's cache are named by
session id.
"""

from __future__ import annotations

from dataclasses import field

from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.messages import (
    EXACT_RULE,
    Cancel,
    Downlink,
    Draft,
    Open,
    PicturePart,
    PrefixTokens,
    Received,
)
from edgespec.core.protocol.pictures import ReadPictures
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.draft_round import DraftsDone as DraftsDone
from edgespec.core.verifier.draft_round import RunDrafts as RunDrafts
from edgespec.core.verifier.prefix_store import PREFIX_BLOCK


@statically_frozen
class EngineLimits:
    """Bounds and abilities of one verifier's engine."""

    max_sessions: int = 64
    max_rows_per_pass: int = 1024
    """Rows of one packed pass: fed tokens and nodes of all its sessions."""
    max_rows_per_session: int = 512
    """Rows of one session in a pass; a longer prompt is fed in several passes."""
    prefill_share: float = 0.22
    """Share by which prompts may make a pass longer while other sessions decode in it."""
    max_sessions_per_peer: int = 0
    """Sessions of one peer (a device's address); 0 means no limit but ``max_sessions``."""
    cache: CacheShape | None = None
    """The target's KV cache; None if it has room for whatever is admitted."""
    share_prefixes: SharePrefixes = SharePrefixes.ALL
    """Which sessions may share cached prefixes; without ``cache`` there is nothing to share."""
    prefix_bytes: int = 0
    """Memory for the ids of recent generations, whose beginnings devices can name instead of
    sending them (``prefix_store.py``); 0: none are kept."""
    prefix_block: int = PREFIX_BLOCK
    """Tokens of a block of such a beginning."""
    picture_bytes: int = 0
    """Memory for recent pictures (``picture_store.py``), and again as much for arriving ones. It
    matters only for a model that reads pictures."""
    stall_s: float = 20.0
    """Seconds after which a device that owes an acknowledgement counts as gone. TCP sends a packet
    six times in that time; a phone in a tunnel comes back within its lease."""
    silence_s: float = 10.0
    """Seconds without a message after which a device is sent a sign of life. This is a third of the
    time after which devices take a link for broken (``ReconnectPolicy.silence_s``)."""
    stuck_pass_s: float = 600.0
    """Seconds after which a pass is taken to hang. The first pass of an engine compiles its
    kernels, which takes minutes."""
    server_drafts: bool = False
    """True if passes may carry nodes of server lookup (``server_drafts.py``)."""
    trees: bool = True
    """True if the target can verify trees. Otherwise each session's part of a pass is its likeliest
    chain."""
    drafter: bool = False
    """True if the verifier has a draft model of its own (``server_model.py``)."""
    speculator_tokens: int = 0
    """Most tokens that the engine speculator can propose, as in ``PassShape.speculator_tokens``."""
    speculator_blocks: bool = False
    """True if it proposes them in one run, as in ``PassShape.speculator_blocks``."""
    rules: tuple[str, ...] = (EXACT_RULE,)
    """Acceptance rules that devices may ask for. A bare name allows all parameters; a name with
    parameters allows only these."""


# --- events ---------------------------------------------------------------------------------


@statically_frozen
class StreamOpened:
    """A stream opened and sent its first message."""

    stream: int
    request: Open
    peer: str = ""
    """The device's address, for which ``max_sessions_per_peer`` holds."""
    credential: Credential = ANYBODY


@statically_frozen
class StreamMessage:
    """A later message of a stream."""

    stream: int
    message: Draft | Received | Cancel | PrefixTokens | PicturePart


@statically_frozen
class StreamLost:
    """The device closed the stream, or the link broke."""

    stream: int


@statically_frozen
class BatchDone:
    """A packed pass has ended."""

    results: tuple[PassResult, ...]
    """Results in the order of the batch's requests, without requests whose sequence failed before
    the pass."""
    target_s: float | None = None
    """Seconds that the target itself took; None if only the time until this event is known."""
    behind: tuple[int, ...] = ()
    """Streams whose send queue still holds messages from before this pass. Their sessions take part
    in no pass until ``StreamCaughtUp``, since a token that cannot be sent is of no use."""


@statically_frozen
class StreamCaughtUp:
    """The send queue of a stream from ``BatchDone.behind`` is empty."""

    stream: int


@statically_frozen
class BatchFailed:
    """The pass failed; nothing was cached or sampled.

    ``full``: the target had no room. ``culprit``: the session that caused the failure, if known.
    ``requested``: the failure follows from what that session's device requested.
    """

    why: str
    full: bool = False
    culprit: str = ""
    requested: bool = False


@statically_frozen
class DraftsFailed:
    """The server model failed in a round; it is not used any more."""

    why: str


@statically_frozen
class SequenceFailed:
    """The target could not open the sequence, or could not keep its nodes.

    ``full``: it had no room for the sequence. This event comes before the ``BatchDone`` of the pass
    in which the sequence is missing.
    """

    key: str
    why: str
    full: bool = False


@statically_frozen
class ProbeDone:
    """The result of ``RunProbe``: ``why`` says what failed, None means that the target works."""

    why: str | None = None


@statically_frozen
class PicturesRead:
    """The result of ``ReadPictureData``."""

    stream: int
    pictures: ReadPictures | None
    """The pictures as the target has read them; None if it refuses them."""
    why: str = ""
    """Why it refuses them."""


@statically_frozen
class Poll:
    """The engine's deadline has come."""


StreamEvent = StreamOpened | StreamMessage | StreamLost | StreamCaughtUp
TargetEvent = BatchDone | BatchFailed | DraftsDone | DraftsFailed | SequenceFailed | ProbeDone
EngineEvent = StreamEvent | TargetEvent | PicturesRead | Poll


# --- actions: to be carried out in order ----------------------------------------------------


@statically_frozen
class SendTo:
    """Send this message on the stream, in order."""

    stream: int
    message: Downlink


@statically_frozen
class CloseStream:
    """Close the stream after its messages were sent; no ``StreamLost`` need follow."""

    stream: int


@statically_frozen
class OpenSequence:
    """Reserve a sequence in the target (``ports.TargetModel.open``)."""

    key: str
    prompt_length: int
    sampling: SamplingParams
    # The next two are not shown: the stream's first message contains them, and the text is long.
    text: tuple[int, ...] = field(default=(), repr=False)
    """The committed tokens so far: the prompt, and the tokens that a resuming device brought."""
    adapter: str = field(default="", repr=False)
    """Name of the target's adapter to use; empty for none."""
    pictures: ReadPictures | None = field(default=None, repr=False)
    """The pictures of the prompt; None if it has none."""


@statically_frozen
class ReadPictureData:
    """Let the target read the pictures of a prompt (``ports.TargetModel.read_pictures``), beside
    its passes; answer with ``PicturesRead``."""

    stream: int
    prompt: tuple[int, ...] = field(repr=False)
    data: tuple[bytes, ...] = field(repr=False)
    """The bytes of each picture."""
    positions: tuple[int, ...]
    """Indices of the placeholders in the prompt."""


@statically_frozen
class CloseSequence:
    """Free the sequence."""

    key: str


@statically_frozen
class KeepNodes:
    """Keep these nodes of the sequence's last pass in the cache (``ports.TargetModel.keep``)."""

    key: str
    nodes: tuple[int, ...]


@statically_frozen
class RunBatch:
    """Run one packed pass; answer with ``BatchDone`` or ``BatchFailed``.

    An engine speculator proposes ``draft_steps`` tokens behind the pass
    (``ports.TargetModel.set_draft_steps``).
    """

    requests: tuple[PassRequest, ...]
    draft_steps: int = 0


@statically_frozen
class RunProbe:
    """Open a sequence, run this one request, close it; answer with ``ProbeDone``."""

    request: PassRequest


@statically_frozen
class ReportFailure:
    """Log for the operator what went wrong with one session, which has been ended."""

    key: str
    details: str
    stream: int | None = None


@statically_frozen
class ReportDraftsOff:
    """Log for the operator why the server model drafts no more; sessions continue without it."""

    why: str


@statically_frozen
class GiveUp:
    """Report to health checks that the target is broken, and end the process with a failure."""

    why: str


@statically_frozen
class ReportDraftsRest:
    """Log for the operator that the server model drafts less often from now on, or as often as
    before, and why."""

    why: str


TargetAction = OpenSequence | CloseSequence | KeepNodes | RunBatch | RunDrafts | RunProbe
Report = ReportFailure | ReportDraftsOff | ReportDraftsRest
EngineAction = SendTo | CloseStream | TargetAction | ReadPictureData | Report | GiveUp
