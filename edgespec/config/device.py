"""What can be configured of a device, with defaults and ranges."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from edgespec.config import common
from edgespec.core.association.failover import FailoverPolicy
from edgespec.core.association.policies import Association
from edgespec.core.device.goodput_policy import DEFAULT_POLICY, GAMMA_OF, WINDOW_OF, PolicyName
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.device.memory import KvType, parse_budget
from edgespec.core.device.policy import DEFAULT_WIDTH, MAX_GAMMA
from edgespec.core.ports import DEFAULT_CACHES, MAX_CACHES
from edgespec.core.protocol.checks import Section, among, check_limits, limited
from edgespec.core.protocol.messages import EXACT_RULE, RunAhead
from edgespec.core.protocol.sampling import MAX_TOKENS, SamplingParams
from edgespec.core.verifier.relaxed_rules import parse_rule

ANY_ORIGIN = "*"
_ORIGIN = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://(\[[0-9A-Fa-f:]+\]|[^\s/:@\[\]?#]+)(:([0-9]+|\*))?"
)
_BODIES = 16
"""Bodies of the longest length for which there is room at a time, within the sums below."""
_BODIES_BYTES, _BODIES_BYTES_IN_BUDGET = 64 << 20, 16 << 20


@dataclass(frozen=True, slots=True)
class EndpointSection:
    """OpenAI's API in front of a device."""

    host: str = common.DEFAULT_HOST
    """Address to listen at, 0.0.0.0 for all."""
    port: int = limited(7421, 0, 65_535)
    """Port to listen at. 0 is any free one; the ready line names it."""
    key_file: str = ""
    """File that holds the key that clients must show. ``EDGESPEC_ENDPOINT_KEY`` in the environment
    wins over it; empty asks for none."""
    insecure: bool = False
    """Listen beyond this machine without a key."""
    allow_origins: tuple[str, ...] = ()
    """Let web pages of this origin ask, such as https://chat.example. ``*`` stands for any part of
    a host or for any port (https://*.example, chrome-extension://*), alone for all. Pages of this
    machine (http://localhost:3000) and installed applications may ask anyway if the endpoint
    listens on this machine only."""
    allow_hosts: tuple[str, ...] = ()
    """Names that a ``Host`` header may have besides ``localhost``, such as a proxy's."""
    max_concurrent: int = limited(8, 1, 1024)
    """Texts that are written beside each other. A request for n texts counts n times."""
    max_per_client: int | None = limited(None, 1, 1024)
    """Texts of one client beside each other. A client is an address, of IPv6 its first 64 bits.
    null: all of ``max_concurrent`` if only this machine can ask, else three quarters of it; set it
    to ``max_concurrent`` behind a proxy, where all clients have one address."""
    max_queue: int = limited(512, 0, 65_536)
    """Requests that may wait for their turn. Those beyond are answered with 429."""
    max_queue_tokens: int = limited(4 << 20, 1, 1 << 30)
    """Prompt tokens, 4 bytes each, of all requests that wait. A request beyond them gets 429."""
    queue_within_s: float = limited(600.0, 0.1, 86_400.0)
    """How long a request may wait for its turn. After that it is answered with 429."""
    max_body_bytes: int = limited(4 << 20, 1024, 1 << 30)
    """Bytes of a request's body at most."""
    max_bodies_bytes: int | None = limited(None, 2048, 1 << 34)
    """Bytes that the bodies of all requests may hold until they are read; those beyond are
    answered with 503. null: 16 times ``max_body_bytes``, at most 64 MiB, or 16 MiB with a memory
    budget. At least twice ``max_body_bytes`` is taken."""
    default_max_tokens: int | None = limited(None, 1, MAX_TOKENS)
    """Tokens for a request that does not say. null: a chat may fill the context, a completion has
    ``sampling.max_tokens``."""
    model_sampling: bool = True
    """Take what neither a request nor ``sampling`` says from ``generation_config.json`` in the
    tokenizer's folder. False: greedy."""
    keep_alive_s: float = limited(10.0, 0.01, 3600.0)
    """Seconds between the comments that a stream sends while it has no token."""
    body_within_s: float = limited(30.0, 0.1, 3600.0)
    """How long a request may take to arrive."""
    write_within_s: float = limited(60.0, 0.1, 3600.0)
    """A client that reads nothing for so long counts as gone."""
    unread_within_s: float = limited(5.0, 0.01, 3600.0)
    """The same while another request waits for its turn."""
    drain_s: float = limited(5.0, 0.0, 3600.0)
    """How long running requests may go on after a request to stop."""

    @property
    def most_of_client(self) -> int:
        """Texts of one client that run at a time."""
        if self.max_per_client is not None:
            return min(self.max_per_client, self.max_concurrent)
        if common.is_loopback(self.host):
            return self.max_concurrent
        return max(1, self.max_concurrent - max(1, self.max_concurrent // 4))

    def most_bodies_bytes(self, *, has_budget: bool) -> int:
        """Bytes of all bodies together; ``has_budget``: the process has a memory budget."""
        most = _BODIES_BYTES_IN_BUDGET if has_budget else _BODIES_BYTES
        usual = min(_BODIES * self.max_body_bytes, most)
        return max(self.max_bodies_bytes or usual, 2 * self.max_body_bytes)

    def __post_init__(self) -> None:
        check_limits(self)
        common.not_empty("host", self.host)
        for origin in self.allow_origins:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                null = ": null is any sandboxed page, which only * lets in, with all others"
                raise ValueError(
                    f"allow_origins holds {origin!r}, but must be like https://chat.example,"
                    f" http://localhost:*, or *{null if origin == 'null' else ''}"
                )


MAX_VERIFIERS, MAX_PORT = 64, 65_535
MAX_RECORD_MIB = 32  # what a corpus takes
PROVIDERS = ("cpu", "cuda", "tensorrt", "dml", "coreml", "openvino")


@dataclass(frozen=True, slots=True)
class DraftSection:
    """The model on the device."""

    model: str = "bundled"
    """A folder, a Hub id, bundled, lookup or none. A checkpoint is exported once, into the cache;
    an ``.onnx`` file is taken as it is. ``lookup`` guesses from the text, without a model; ``none``
    only streams; ``toy`` and ``random`` are for tests."""
    variant: str = "auto"
    """Which of several ONNX graphs to use, such as ``q4`` or ``fp16``. ``auto`` takes the
    first of q4, q4f16, int8, ... that works."""
    threads: int = limited(0, 0, 64)
    """Threads of a draft step. 0 is one for a small model, else two, where there are two cores."""
    context_length: int = limited(0, 0, 1 << 20)
    """Tokens that the draft may look at. 0 is the model's own; less needs less memory."""
    draft_ms: float = limited(0.0, 0.0, common.MINUTE_MS)
    """Emulate a slower device, whose draft step takes at least this long."""
    bits: int = among(4, (4, 8, 32))
    """Bits of a weight when a checkpoint is exported: 4, 8 or 32."""
    kv_type: KvType | None = None
    """Type of cached keys and values when a checkpoint is exported. null is float32, or what the
    memory budget asks for."""
    window: int = limited(0, 0, 1 << 20)
    """Tokens of a text that the draft's cache holds, the first and last. 0: as many as the draft
    was trained on, by its ``edgespec.json``, else the whole context."""
    memory_budget: str = ""
    """Memory of the process: 600MiB, 25% or auto. ``auto`` is what is free on the machine;
    empty is no budget."""
    caches: int = limited(DEFAULT_CACHES, 1, MAX_CACHES)
    """Texts beside each other that are drafted for; those beyond are streamed. A memory budget may
    grant fewer."""
    lookup: bool = False
    """Guesses from the text stand in the tree beside the model's, by what each is worth
    (``--draft lookup`` has no others)."""
    corpus: tuple[str, ...] = ()
    """Guess from this file or folder too. Give it once for each; such guesses stand
    beside those from the text, as with ``lookup``. An index is made in the cache once, and anew
    when a file has changed."""
    provider: str = among("cpu", PROVIDERS)
    """What of onnxruntime the draft runs on: cpu, cuda, tensorrt, dml, coreml or openvino."""

    def __post_init__(self) -> None:
        check_limits(self)
        common.not_empty("model", self.model)
        common.not_empty("variant", self.variant)
        if self.from_text and self.model == "none":
            key = "corpus is given" if self.corpus else "lookup is true"
            raise ValueError(
                f"{key}, but model is 'none', which drafts nothing: say 'lookup' to draft"
                " without a model"
            )
        for name in self.corpus:
            common.not_empty("corpus", name)
        if self.memory_budget:
            parse_budget(self.memory_budget)

    @property
    def from_text(self) -> bool:
        """Whether texts are guessed from too, beside the model."""
        return self.lookup or bool(self.corpus)


@dataclass(frozen=True, slots=True)
class LinkSection(Section):
    """A link emulated on top of the real one; all zero: the real one as it is."""

    rtt_ms: float = limited(0.0, 0.0, common.MINUTE_MS)
    """Emulate a link of this round trip."""
    jitter_ms: float = limited(0.0, 0.0, common.MINUTE_MS)
    """Mean extra delay of each direction."""
    mbps: float = limited(0.0, 0.0, 1e6)
    """Bandwidth of each direction. 0 is without limit."""
    loss: float = limited(0.0, 0.0, 0.99)
    """Share of packets that are sent again. They come late, never not at all."""
    seed: int = limited(0, 0, (1 << 64) - 1)
    """The same seed gives the same delays."""

    @property
    def shaped(self) -> bool:
        return any((self.rtt_ms, self.jitter_ms, self.mbps, self.loss))


@dataclass(frozen=True, slots=True)
class PolicySection:
    """What to draft and when to send it (``core/device/policy.py``)."""

    name: PolicyName = DEFAULT_POLICY
    """What to draft. ``goodput`` drafts what is expected to save more than it costs, ``windowed``
    what is likeliest; ``pearl`` pre- and post-verifies; ``fixed`` drafts, sends and waits."""
    gamma: int | None = limited(None, 1, MAX_GAMMA)
    """Draft length of ``fixed`` and ``pearl``. null adapts."""
    width: int = limited(DEFAULT_WIDTH, 1, 16)
    """Choices that a draft step adds. 1 is a chain, more a tree."""
    window: int | None = limited(None, 1, 256)
    """Steps that ``goodput`` and ``windowed`` may have outstanding. null adapts."""
    run_ahead: RunAhead = RunAhead.AUTO
    """Whether the verifier may decode on without a draft."""

    def __post_init__(self) -> None:
        check_limits(self)
        for key, users in (("gamma", GAMMA_OF), ("window", WINDOW_OF)):
            if (value := getattr(self, key)) is not None and self.name not in users:
                names = " or ".join(one.value for one in users)
                has_none = f"{key} is {value}, but policy {self.name.value!r} has none"
                raise ValueError(f"{has_none}: leave it out, or choose {names}")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The device: where the verifier is, what drafts, what the text shall be like."""

    verifier: str | tuple[str, ...] = common.DEFAULT_ADDRESS
    """Where the verifier is, or several of them. Of several, ``association`` chooses one, and the
    text goes on at another when it fails."""
    model: str = ""
    """Ask for this target or adapter by name. Empty takes what the verifier serves."""
    rule: str = EXACT_RULE
    """Accept drafts by this rule; all but exact are LOSSY. Of typical, top-k:K, margin:NATS,
    dsd:SHARE and bild:NATS the verifier has to offer the one you name. Under these likely drafts
    replace the target's own tokens, and the text depends on the draft and on time."""
    tokenizer: str = ""
    """Folder or Hub id, if it is not the draft's. Empty is the draft's, or the verifier's when no
    model drafts."""
    draft: DraftSection = field(default_factory=DraftSection)
    link: LinkSection = field(default_factory=LinkSection)
    policy: PolicySection = field(default_factory=PolicySection)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    reconnect: ReconnectPolicy = field(default_factory=ReconnectPolicy)
    failover: FailoverPolicy = field(default_factory=FailoverPolicy)
    """How to get from one of several verifiers to another."""
    association: Association = Association.LOWEST_DELAY
    """By what to choose among several verifiers: ``lowest-delay``, ``listed`` (the first that
    answers), or ``rendezvous`` (each conversation has one of its own)."""
    tls: common.DeviceTlsSection = field(default_factory=common.DeviceTlsSection)
    api_key_file: str = ""
    """File that holds the key for the verifier. ``EDGESPEC_API_KEY`` in the environment wins over
    it."""
    insecure: bool = False
    """Send the key even where it can be read on its way."""
    endpoint: EndpointSection = field(default_factory=EndpointSection)
    """Of ``edgespec serve``."""
    record: str = ""
    """Keep what texts say in this file, readable by you alone. ``--draft-corpus`` guesses from it,
    ``edgespec distill --online`` learns from it."""
    record_mib: int = limited(16, 1, MAX_RECORD_MIB)
    """MiB of that file at most; the oldest texts leave."""
    trace: str = ""
    """Write every event to this file."""
    trace_tokens: str = among(common.HASHED, common.TRACE_TOKENS)
    """What a trace shows of tokens: ``hashed`` which are equal, ``plain`` which they are."""
    log_level: str = among("warning", common.LOG_LEVELS)
    """Log debug, info, warning or error."""
    log_format: str = among("text", common.LOG_FORMATS)
    """``text``, or ``json``, one object a line."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not 1 <= len(self.verifiers) <= MAX_VERIFIERS:
            raise ValueError(
                f"verifier has {len(self.verifiers)} addresses, not 1 to {MAX_VERIFIERS}"
            )
        for address in self.verifiers:
            check_address(address)
        parse_rule(self.rule)

    @property
    def verifiers(self) -> tuple[str, ...]:
        """All addresses given, each once."""
        given = (self.verifier,) if isinstance(self.verifier, str) else self.verifier
        return tuple(dict.fromkeys(given))


def check_address(address: str) -> None:
    """Raises ``ValueError`` for what is no address of a verifier: of a larger port gRPC would take
    the lower 16 bits, and of a bare IPv6 address none, whatever its last part looks like."""
    common.not_empty("verifier", address)
    if "://" in address:
        raise ValueError(f"verifier is {address!r}, but must be host:port or unix:path")
    last = address.strip().rpartition("]")[2]
    _, colon, port = last.rpartition(":")
    if not colon or "/" in address or address.startswith("unix"):
        return
    if last.count(":") > 1:
        raise ValueError(f"verifier is {address!r}, but an IPv6 address must be like [::1]:7420")
    if not (port.isascii() and port.isdecimal() and 1 <= int(port[:9]) <= MAX_PORT):
        raise ValueError(f"verifier is {address!r}, but its port must be in [1, {MAX_PORT}]")
