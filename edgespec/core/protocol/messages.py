"""What travels between a device and a verifier, as plain data.

The protobuf form (``protos/edgespec/v1/speculation.proto``) is one encoding of these classes;
``wire/codec.py`` translates and enforces the bounds. Positions are absolute indices into
prompt + generated tokens. ``length`` of a committed prefix is the position of the next token.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo, TokenScore
from edgespec.core.statically_frozen import statically_frozen

PROTOCOL_VERSION = 1
EXACT_RULE = "exact"
MAX_COMMIT_TOKENS = 4096
"""Tokens in one Commit. A device that comes back further behind is sent several of them."""
MAX_ADAPTERS = 64
"""Models that one verifier serves beside its own, each of them that with an adapter."""
MAX_NAME_BYTES = 256
"""Of a model's name, in UTF-8."""
MAX_SECRET_BYTES = 64
MAX_PRICE = 1000
"""In thousandths: no draft pays for its row."""


class RunAhead(Enum):
    """May the verifier decode on without a draft? (``core/verifier/drafts.py``)"""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class FinishReason(Enum):
    """Why a generation is complete. On the wire ``LENGTH`` stands for ``CONTEXT`` too; the device
    tells them apart by what it holds."""

    STOP = "stop"
    """A stop id, the end of text, or a stop string."""
    LENGTH = "length"
    """``max_tokens`` were generated."""
    CANCELLED = "cancelled"
    CONTEXT = "context"
    """The context was full before ``max_tokens`` were generated."""


class FaultCode(Enum):
    """Why the verifier ended a stream. ``retryable`` ones are worth a reconnect: a bounded number
    of them (``core/device/link_keeper.py``)."""

    RESYNC = "resync"
    INVALID = "invalid"
    UNKNOWN_MODEL = "unknown_model"
    VOCABULARY_MISMATCH = "vocabulary_mismatch"
    CONTEXT_TOO_LONG = "context_too_long"
    OVERLOADED = "overloaded"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"
    UNAUTHENTICATED = "unauthenticated"
    """The device showed no key, an unknown one, or one that was revoked."""

    @property
    def retryable(self) -> bool:
        return self in (
            FaultCode.RESYNC,
            FaultCode.OVERLOADED,
            FaultCode.SHUTTING_DOWN,
            FaultCode.INTERNAL,
        )


@statically_frozen
class Limits:
    """Bounds a verifier announces in ``Opened`` and enforces."""

    context_length: int = 4096
    """Prompt plus output, in tokens."""
    max_nodes_outstanding: int = 128
    """Alive nodes of one session's speculation tree."""
    max_nodes_per_pass: int = 64
    max_unreceived: int = 256
    """Committed tokens the device has not acknowledged before the verifier pauses."""
    lease_s: float = 30.0
    """How long a session outlives its link, in seconds: a change of network or a restart of the
    device's program takes less, and the cache that is held for it is others' too."""


@statically_frozen
class Open:
    session_id: str
    model: str
    """Name of the model wanted; empty accepts whatever the verifier serves."""
    vocabulary: str
    """Fingerprint of the drafter's vocabulary; empty when the device does not draft."""
    prompt: tuple[int, ...]
    committed: tuple[int, ...] = ()
    """Generated tokens the device already holds (resume)."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    run_ahead: RunAhead = RunAhead.AUTO
    rule: str = EXACT_RULE
    drafting: bool = True
    """False: no draft will come, decode on."""
    version: int = PROTOCOL_VERSION
    session_secret: bytes = field(default=b"", repr=False)
    """Who does not send it again cannot resume, end or replace the session. Kept out of reprs,
    traces and logs. Empty: the id alone is the proof."""
    logprobs: int = 0
    """How many likeliest tokens to tell with each one, up to ``MAX_LOGPROBS``; 0: no scores."""


@statically_frozen
class Draft:
    """Guesses. Node ``first_node_id + i`` has token ``tokens[i]`` and parent ``parents[i]``.

    Parent 0 is the end of the committed prefix at ``base_position``, whose rolling hash is
    ``base_hash``; both are 0 when no node hangs there. A draft without nodes says "no draft is
    coming now: decode on"."""

    first_node_id: int
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    base_position: int = 0
    base_hash: int = 0


@statically_frozen
class Received:
    """The device holds all tokens before ``position``. ``echo`` comes back in the next Commit."""

    position: int
    echo: int


@statically_frozen
class Cancel:
    """The device wants no more tokens."""


@statically_frozen
class Opened:
    limits: Limits
    model: str
    position: int
    """Committed length at which the stream goes on (that of the device's own tokens)."""
    fingerprint: str = ""
    """As ``ModelInfo.fingerprint``."""
    constrained: bool = False
    """The verifier keeps ``SamplingParams.constraint``; one that does not know it never says so."""
    min_tokens: int = 0
    """The ``SamplingParams.min_tokens`` that the verifier keeps; 0 from one that does not know
    it."""


@statically_frozen
class Commit:
    """The target's tokens for positions ``position`` .. ``position + len(tokens) - 1``.

    At most ``MAX_COMMIT_TOKENS``; without tokens and finish: the verifier is still at work."""

    position: int
    tokens: tuple[int, ...]
    accepted: int = 0
    """How many of them were drafted and verified in this pass (a prefix of ``tokens``)."""
    stale: int = 0
    """Nodes dropped since the last commit: their parent was dead, unknown or did not agree."""
    queue_us: int = 0
    """From the oldest verified node's arrival to the start of the pass."""
    verify_us: int = 0
    """The pass itself."""
    rows: int = 0
    """Draft nodes the pass looked at."""
    echo: int = 0
    held_us: int = 0
    """How long the verifier held ``echo`` before this commit left."""
    finish: FinishReason | None = None
    row_price: int | None = None
    """Thousandths: a node that is right with less does not pay for its row now. None: rows cost
    nothing, or are not priced."""
    credit: int | None = None
    """How many nodes the device may have outstanding now; None: as many as ``Opened`` said."""
    logprobs: tuple[TokenScore, ...] = ()
    """Of ``tokens``, one each, if the session asked for them and the verifier still has them."""
    replaced: tuple[int, ...] = ()
    """Places in ``tokens`` of drafted ones that a relaxed rule took in place of the target's own;
    none under the exact rule."""
    read: int = 0
    """How many committed tokens the verifier has read, while it reads a prompt; 0: not told."""


@statically_frozen
class Fault:
    """The verifier ends the stream; ``message`` names the bound and the value."""

    code: FaultCode
    message: str
    retry_after_s: float = 0.0


Uplink = Open | Draft | Received | Cancel

Downlink = Opened | Commit | Fault

Message = Uplink | Downlink


@statically_frozen
class DraftTotals:
    """Since a verifier began: nodes that passes looked at and those of them that became tokens, by
    who drafted them (devices, the verifier's model, the text); and what the model's steps took."""

    device_nodes: int = 0
    device_accepted: int = 0
    model_nodes: int = 0
    model_accepted: int = 0
    text_nodes: int = 0
    text_accepted: int = 0
    model_steps: int = 0
    model_us: int = 0
    model_failures: int = 0
    """How often it failed; after that the verifier drafts with it no more."""


@statically_frozen
class VerifierInfo:
    """What a verifier serves and how busy it is; limits and counts are 0 when it does not tell."""

    model: ModelInfo
    limits: Limits
    """What ``Opened`` would announce."""
    sessions: int
    """Held now, counting those whose link is lost until their lease ends."""
    max_sessions: int
    """With as many held, a new one is refused as ``OVERLOADED``."""
    pass_us: int = 0
    """Moving average of the length of a pass under the load of late; 0: none was timed yet."""
    adapters: tuple[ModelInfo, ...] = ()
    """Served beside ``model``, each by its name: the model with an adapter."""
    drafts: DraftTotals | None = None
    """Who drafted what; None: not told."""

    @property
    def served(self) -> tuple[ModelInfo, ...]:
        return (self.model, *self.adapters)

    def of(self, name: str) -> ModelInfo | None:
        """What who opens a session for ``name`` gets; None: nothing of that name is served."""
        if not name:
            return self.model
        return next((one for one in self.served if one.name == name), None)


@statically_frozen
class ModelIdentity:
    """What a verifier tells of its model when it opens a session."""

    name: str
    fingerprint: str
    """Empty: one that does not tell it; then the name has to do."""
    context_length: int

    @classmethod
    def of(cls, opened: Opened) -> ModelIdentity:
        return cls(opened.model, opened.fingerprint, opened.limits.context_length)

    def is_model_of(self, other: ModelIdentity) -> bool:
        """Whether both are one model. A verifier that tells no fingerprint is not known to serve
        the model of one that does, whatever its name."""
        if self.fingerprint or other.fingerprint:
            return self.fingerprint == other.fingerprint
        return self.name == other.name

    def __str__(self) -> str:
        return f"{self.name!r} ({self.fingerprint[:12] or 'no fingerprint'})"


def why_not(begun: ModelIdentity, here: ModelIdentity, needed_length: int) -> str | None:
    """Why a text that ``begun`` began cannot go on ``here``, or None. ``needed_length`` is prompt
    and longest output, 0: not known."""
    if not here.is_model_of(begun):
        return f"it serves the model {here}, but the text was begun by {begun}"
    if not begun.context_length:
        return None
    wanted = min(begun.context_length, needed_length or begun.context_length)
    if here.context_length < wanted:
        return (
            f"its context is {here.context_length} tokens, but the text was begun with"
            f" {begun.context_length} and may take {wanted}"
        )
    return None
