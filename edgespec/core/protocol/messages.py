"""Messages between a device and a verifier, as plain data.

The protobuf form (``protos/edgespec/v1/speculation.proto``) is one encoding of these classes;
``wire/codec.py`` translates and enforces the bounds. Positions are absolute indices into prompt +
generated tokens. The ``length`` of a committed prefix is the position of the next token.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum

from edgespec.core.protocol.errors import FaultCode as FaultCode
from edgespec.core.protocol.pictures import Picture
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo, TokenScore
from edgespec.core.statically_frozen import statically_frozen

PROTOCOL_VERSION = 1
EXACT_RULE = "exact"
MAX_COMMIT_TOKENS = 4096
"""Tokens in one ``Commit``. A device that resumes further behind gets several commits."""
MAX_TOKEN_ID = (1 << 24) - 1
"""Largest token id in messages and files, some sixty times the largest vocabularies. Each end
checks ids against its own vocabulary too."""
MAX_ADAPTERS = 64
"""Models that one verifier serves beside its own: that model with one adapter each."""
MAX_NAME_BYTES = 256
"""Bound on the length of a model's name in UTF-8."""
MAX_SECRET_BYTES = 64
"""Bound on the length of a session's secret, and of the key of prefix names."""
MAX_PRICE = 1000
"""Highest price of a row, in thousandths: at this price no draft node is worth its row."""


class RunAhead(Enum):
    """Whether the verifier may decode on without waiting for a draft
    (``core/verifier/run_ahead.py``)."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class FinishReason(Enum):
    """Why a generation is complete.

    On the wire ``LENGTH`` also stands for ``CONTEXT``; the device distinguishes the two by the
    number of tokens it holds."""

    STOP = "stop"
    """A stop id, the model's end token, or a stop string."""
    LENGTH = "length"
    """``max_tokens`` were generated."""
    CANCELLED = "cancelled"
    CONTEXT = "context"
    """The context was full before ``max_tokens`` were generated."""


@statically_frozen
class Limits:
    """Bounds that a verifier announces in ``Opened`` and enforces."""

    context_length: int = 4096
    """Prompt plus output, in tokens."""
    max_nodes_outstanding: int = 256
    """Alive draft nodes of one session's speculation tree. A device with a prediction fills four
    passes with them, which a distant link holds."""
    max_nodes_per_pass: int = 64
    max_unreceived: int = 256
    """Committed tokens that may be unacknowledged before the verifier pauses."""
    lease_s: float = 30.0
    """Seconds that a session is kept after its link is lost. A change of network or a restart of
    the device's program takes less, and the cache that is held for it is shared with others."""


@statically_frozen
class Prefix:
    """The first ids of an ``Open``, prompt and committed tokens, given by their name."""

    length: int
    """Number of tokens that are named and not sent: full blocks of ``Opened.prefix_block``."""
    name: bytes = field(repr=False)
    """Their name under ``Open.prefix_key`` (``prefix_names.py``)."""
    prompt_length: int
    """Length of the whole prompt. A longer prefix ends in the committed tokens."""


@statically_frozen
class Open:
    session_id: str
    model: str
    """Name of the requested model; empty accepts whatever the verifier serves."""
    vocabulary: str
    """Fingerprint of the drafter's vocabulary; empty when the device does not draft."""
    prompt: tuple[int, ...]
    """Ids of the prompt; with ``prefix`` those behind it."""
    committed: tuple[int, ...] = ()
    """Generated tokens that the device already holds, when it resumes; with ``prefix`` those behind
    it."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    run_ahead: RunAhead = RunAhead.AUTO
    rule: str = EXACT_RULE
    drafting: bool = True
    """False if no draft will come, so that the verifier decodes on without waiting."""
    version: int = PROTOCOL_VERSION
    session_secret: bytes = field(default=b"", repr=False)
    """Secret that must be sent again to resume, end or replace the session. It is kept out of
    reprs, traces and logs. If it is empty, the session id alone is enough."""
    logprobs: int = 0
    """Number of likeliest tokens to report with each token, up to ``MAX_LOGPROBS``; 0: no scores.
    """
    plain: bool = False
    """Whether the verifier leaves out its own draft nodes too, so that the generation is plain
    streaming. The output is the same. A version that does not know the field drafts on."""
    prefix_key: bytes = field(default=b"", repr=False)
    """Key of the names that this device gives to beginnings of its texts. The verifier may keep the
    ids of a generation that was opened with a key. Empty: it keeps none."""
    prefix: Prefix | None = None
    """The first ids by their name, if the verifier keeps them; None: all ids are in ``prompt`` and
    ``committed``. A verifier without them answers ``PrefixMissing``."""
    pictures: tuple[Picture, ...] = ()
    """Pictures of the prompt by their names, in the order of their placeholders. A verifier that
    lacks some answers ``PicturesMissing``."""

    @property
    def prompt_length(self) -> int:
        """Length of the whole prompt, in tokens."""
        return len(self.prompt) if self.prefix is None else self.prefix.prompt_length

    @property
    def committed_length(self) -> int:
        """Number of all committed tokens that the device holds."""
        if self.prefix is None:
            return len(self.committed)
        sent = len(self.prompt) + len(self.committed)
        return self.prefix.length + sent - self.prefix.prompt_length


@statically_frozen
class PrefixTokens:
    """The ids of ``Open.prefix``, which the verifier does not have."""

    tokens: tuple[int, ...]


@statically_frozen
class PicturePart:
    """A part of a picture that the verifier lacks. Its parts come in order, and so do pictures."""

    number: int
    """Index of the picture in ``Open.pictures``."""
    offset: int
    """Index of the first byte in the picture."""
    data: bytes = field(repr=False)


@statically_frozen
class Draft:
    """Draft nodes. Node ``first_node_id + i`` has token ``tokens[i]`` and parent ``parents[i]``.

    Parent 0 is the end of the committed prefix at ``base_position``, whose rolling hash is
    ``base_hash``; both are 0 if no node has parent 0. A draft without nodes means that no draft is
    coming now, so that the verifier decodes on."""

    first_node_id: int
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    base_position: int = 0
    base_hash: int = 0


@statically_frozen
class Received:
    """The device holds all tokens before ``position``. ``echo`` is returned in the next
    ``Commit``."""

    position: int
    echo: int


@statically_frozen
class Cancel:
    """The device needs no more tokens."""


@statically_frozen
class Opened:
    limits: Limits
    model: str
    position: int
    """Committed length at which the stream goes on, which is that of the device's own tokens."""
    fingerprint: str = ""
    """Fingerprint of the model, as in ``ModelInfo.fingerprint``."""
    constrained: bool = False
    """Whether the verifier keeps ``SamplingParams.constraint``. A version that does not know
    constraints never sets it."""
    min_tokens: int = 0
    """The ``SamplingParams.min_tokens`` that the verifier keeps; 0 from a version that does not
    know it."""
    prefix_block: int = 0
    """Tokens of a block of prefix names: the verifier keeps the ids of this generation while it has
    room, and a later ``Open`` may name the beginning in full blocks. 0: it keeps none, or does not
    know prefix names."""
    picture_tokens: int = 0
    """Tokens that the pictures of the prompt take in the model's context, less their placeholders.
    0: there are no pictures, or the verifier is of a version that does not report it."""


@statically_frozen
class PrefixMissing:
    """The verifier does not have the ids of ``Open.prefix``. The device sends ``PrefixTokens``."""


@statically_frozen
class PicturesMissing:
    """The verifier does not have these pictures of ``Open.pictures``. The device sends their bytes
    in ``PicturePart``s."""

    numbers: tuple[int, ...]
    """Their indices, in ascending order."""


@statically_frozen
class Commit:
    """The target's tokens for positions ``position`` .. ``position + len(tokens) - 1``.

    There are at most ``MAX_COMMIT_TOKENS``. A commit without tokens and without ``finish`` is a
    sign of life."""

    position: int
    tokens: tuple[int, ...]
    accepted: int = 0
    """Number of leading ``tokens`` that were drafted and verified in this pass."""
    stale: int = 0
    """Draft nodes dropped since the last commit because their parent was dead or unknown, or
    because they did not agree with a committed token."""
    queue_us: int = 0
    """Time from the arrival of the oldest verified node to the start of the pass."""
    verify_us: int = 0
    """Duration of the pass."""
    rows: int = 0
    """Draft nodes in the pass."""
    echo: int = 0
    held_us: int = 0
    """Time between the arrival of ``echo`` and the sending of this commit."""
    finish: FinishReason | None = None
    row_price: int | None = None
    """Price of a row in thousandths: a node that is less likely to be right is not worth its row
    now. None if rows cost nothing or are not priced."""
    credit: int | None = None
    """Number of draft nodes that the device may have outstanding now; None: as many as ``Opened``
    allows."""
    logprobs: tuple[TokenScore, ...] = ()
    """Scores, one for each of ``tokens``, if the session asked for them and the verifier still has
    them."""
    replaced: tuple[int, ...] = ()
    """Indices in ``tokens`` of drafted tokens that a relaxed rule accepted in place of the target's
    own. Empty under the exact rule."""
    read: int = 0
    """Number of committed tokens that the verifier has computed, while it prefills a prompt; 0: not
    reported."""


@statically_frozen
class Fault:
    """The verifier ends the stream. ``message`` names the bound and the value."""

    code: FaultCode
    message: str
    retry_after_s: float = 0.0


Uplink = Open | Draft | Received | Cancel | PrefixTokens | PicturePart

Downlink = Opened | Commit | Fault | PrefixMissing | PicturesMissing

Message = Uplink | Downlink


@statically_frozen
class DraftTotals:
    """Counters since a verifier started, by draft source: devices, the server model, server lookup.

    ``*_nodes`` are draft nodes that passes computed and ``*_accepted`` those that became tokens.
    ``model_steps`` and ``model_us`` count the server model's draft steps and their duration."""

    device_nodes: int = 0
    device_accepted: int = 0
    model_nodes: int = 0
    model_accepted: int = 0
    text_nodes: int = 0
    text_accepted: int = 0
    model_steps: int = 0
    model_us: int = 0
    model_failures: int = 0
    """Failures of the server model. After the last one the verifier no longer drafts with it."""


@statically_frozen
class VerifierInfo:
    """The models that a verifier serves, and its load. Limits and counts are 0 if it does not
    report them."""

    model: ModelInfo
    limits: Limits
    """Limits that ``Opened`` would announce."""
    sessions: int
    """Sessions held now, including disconnected ones until their lease ends."""
    max_sessions: int
    """Number of held sessions at which a new one is refused as ``OVERLOADED``."""
    pass_us: int = 0
    """Moving average of a pass's duration under the recent load; 0: none was timed yet."""
    adapters: tuple[ModelInfo, ...] = ()
    """Models served beside ``model``, each under its own name: the model with an adapter."""
    drafts: DraftTotals | None = None
    """Counters by draft source; None: not reported."""

    @property
    def models(self) -> tuple[ModelInfo, ...]:
        return (self.model, *self.adapters)

    def find_model(self, name: str) -> ModelInfo | None:
        """Return the model served under ``name``, or None. The empty name is the default model."""
        if not name:
            return self.model
        return next((one for one in self.models if one.name == name), None)


@statically_frozen
class ModelIdentity:
    """Identity of the model that a verifier reports when it opens a session."""

    name: str
    fingerprint: str
    """Fingerprint of the model. It is empty from a verifier that does not report one; then the
    names are compared."""
    context_length: int

    @classmethod
    def of(cls, opened: Opened) -> ModelIdentity:
        return cls(opened.model, opened.fingerprint, opened.limits.context_length)

    def is_model_of(self, other: ModelIdentity) -> bool:
        """Return whether both are the same model.

        A verifier that reports no fingerprint never counts as serving the model of one that does,
        whatever the names."""
        if self.fingerprint or other.fingerprint:
            return self.fingerprint == other.fingerprint
        return self.name == other.name

    def __str__(self) -> str:
        return f"{self.name!r} ({self.fingerprint[:12] or 'no fingerprint'})"


def describe_model_mismatch(
    begun: ModelIdentity, here: ModelIdentity, needed_length: int
) -> str | None:
    """Return why a generation that began on ``begun`` cannot go on on ``here``, or None if it can.

    ``needed_length`` is the length of the prompt plus the longest output; 0: not known."""
    if not here.is_model_of(begun):
        return f"it serves the model {here}, but the generation began on {begun}"
    if not begun.context_length:
        return None
    wanted = min(begun.context_length, needed_length or begun.context_length)
    if here.context_length < wanted:
        return (
            f"its context is {here.context_length} tokens, but the generation began with"
            f" {begun.context_length} and may take {wanted}"
        )
    return None
