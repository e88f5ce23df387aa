"""What can be configured, role by role, with defaults and ranges.

Every section checks itself: ``ValueError`` names the field, the value and the range.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from edgespec.config.endpoint import EndpointSection
from edgespec.config.security import DeviceTlsSection, ServerTlsSection, is_loopback
from edgespec.core.association.policies import POLICIES, LowestDelay
from edgespec.core.association.route import FailoverPolicy
from edgespec.core.device.kv_type import KvType
from edgespec.core.device.memory_size import parse_budget
from edgespec.core.device.offline import Offline, OfflinePolicy
from edgespec.core.device.policy import DEFAULT_WIDTH, MAX_GAMMA
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.turn_policy import DEFAULT_CACHES, MAX_CACHES
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.ranges import bounded
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.block_names import SharePrefixes

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7420
DEFAULT_ADDRESS = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
MAX_VERIFIERS = 64
LEARNED = "learned:"
"""What comes before the file of a learned association."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
_MINUTE_MS = 60_000.0


class PolicyName(Enum):
    WINDOWED = "windowed"
    PEARL = "pearl"
    FIXED = "fixed"


@dataclass(frozen=True, slots=True)
class PacingSection:
    """Emulate a slower target: a pass takes ``pass_ms`` plus ``row_ms`` for each of its rows."""

    pass_ms: float = 0.0
    row_ms: float = 0.0

    def __post_init__(self) -> None:
        bounded("pass_ms", self.pass_ms, 0.0, _MINUTE_MS)
        bounded("row_ms", self.row_ms, 0.0, _MINUTE_MS)


@dataclass(frozen=True, slots=True)
class TensorParallelSection:
    """Share one model among several processes of this host, a GPU each."""

    size: int = 1
    """Processes (ranks); must divide the model's key-value heads."""
    pass_within_s: float = 300.0
    """A pass that takes longer hangs: the verifier ends, and its devices resume elsewhere."""

    def __post_init__(self) -> None:
        bounded("size", self.size, 1, 64)
        bounded("pass_within_s", self.pass_within_s, 1.0, 86_400.0)


@dataclass(frozen=True, slots=True)
class LimitsSection:
    """Bounds a verifier enforces (``core.messages.Limits`` and ``core.engine_events``)."""

    max_sessions: int = 64
    peer_share: float = 0.75
    """Of the streams and sessions, how many one address may hold; 1 behind a proxy that hides the
    addresses."""
    max_cached_tokens: int = 65_536
    """Key-value rows over all sessions. Sessions beyond it wait; a text is at most as long."""
    share_prefixes: SharePrefixes = SharePrefixes.ALL
    """Whose cached beginnings of texts a session may use: of ``all``, of the same ``credential``,
    or of ``none``. With ``all``, the time to the first token tells a device whether somebody else
    has sent the same beginning lately."""
    max_nodes_outstanding: int = 128
    max_nodes_per_pass: int = 64
    max_unreceived: int = 256
    max_rows_per_pass: int = 1024
    max_rows_per_session: int = 512
    lease_s: float = 30.0
    stall_s: float = 20.0
    """A device that acknowledges nothing for so long counts as gone."""
    shared_message_rate: float = 500.0
    """Messages a second that all keys (without keys: addresses) together may send, besides four for
    each commit with right drafts: who wants more than a fair share waits while others are there."""
    least_message_rate: float = 100.0
    """Of these, what a key may send however many there are."""
    address_message_rate: float = 1_000.0
    """The same of an address, where there are no keys: it may be a whole site."""

    def __post_init__(self) -> None:
        bounded("max_sessions", self.max_sessions, 1, 1024)
        bounded("peer_share", self.peer_share, 0.001, 1.0)
        bounded("stall_s", self.stall_s, 1.0, 3600.0)
        bounded("max_cached_tokens", self.max_cached_tokens, 1, 1 << 30)
        bounded("max_nodes_outstanding", self.max_nodes_outstanding, 1, 256)
        bounded("max_nodes_per_pass", self.max_nodes_per_pass, 1, 256)
        bounded("max_unreceived", self.max_unreceived, 1, 4096)
        bounded("max_rows_per_pass", self.max_rows_per_pass, 1, 1 << 16)
        bounded("max_rows_per_session", self.max_rows_per_session, 1, 1 << 16)
        bounded("lease_s", self.lease_s, 0.0, 86_400.0)
        bounded("shared_message_rate", self.shared_message_rate, 1.0, 1e6)
        bounded("least_message_rate", self.least_message_rate, 1.0, 1e6)
        bounded("address_message_rate", self.address_message_rate, 1.0, 1e6)


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """The daemon that serves one target model."""

    model: str = "bundled"
    """``bundled``, a folder, a Hub id, or ``toy``."""
    name: str = ""
    """What devices may ask for; empty: derived from ``model``."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0: any free one; the ready line tells which."""
    dtype: str = "auto"
    device: str = "auto"
    canonical: bool | None = None
    """Bits that do not depend on the schedule; null: on for CPUs, off for GPUs."""
    threads: int | None = None
    """Of the model, in plain mode; null: torch's choice."""
    tensor_parallel: TensorParallelSection = field(default_factory=TensorParallelSection)
    max_model_len: int | None = None
    """Prompt plus output, in tokens; null: the model's own context."""
    server_drafts: bool = True
    """May a pass without a draft of the device carry guesses of the verifier's own?"""
    pacing: PacingSection = field(default_factory=PacingSection)
    limits: LimitsSection = field(default_factory=LimitsSection)
    keys: str = ""
    """File of the keys that are let in (``edgespec keys``); empty: whoever can connect is."""
    tls: ServerTlsSection = field(default_factory=ServerTlsSection)
    insecure: bool = False
    """Listen beyond this machine without TLS."""
    drain_s: float = 30.0
    """How long running streams may go on after a request to stop."""
    trace: str = ""
    """Write a trace (JSON lines) to this file."""
    log_level: str = "warning"
    log_format: str = "text"
    """``text``, or ``json``: one object a line."""
    metrics_port: int | None = None
    """Where Prometheus fetches metrics; 0: any free one; null: nowhere, and nothing is counted."""
    metrics_host: str = DEFAULT_HOST

    def __post_init__(self) -> None:
        _not_empty("model", self.model)
        _not_empty("host", self.host)
        _not_empty("metrics_host", self.metrics_host)
        if self.metrics_port is not None:
            bounded("metrics_port", self.metrics_port, 0, 65_535)
        bounded("port", self.port, 0, 65_535)
        _one_of("dtype", self.dtype, DTYPES)
        if self.tensor_parallel.size > 1 and self.model == "toy":
            raise ValueError(
                f"tensor_parallel.size is {self.tensor_parallel.size}, but the toy model is not"
                " shared: leave it at 1"
            )
        _one_of("log_level", self.log_level, LOG_LEVELS)
        _one_of("log_format", self.log_format, LOG_FORMATS)
        bounded("drain_s", self.drain_s, 0.0, 86_400.0)
        if not (self.tls.used or self.insecure or is_loopback(self.host)):
            raise ValueError(
                f"host is {self.host!r}, which others can reach, and there is no TLS: give"
                " --tls-cert and --tls-key (`edgespec certs` makes them), or --insecure"
            )
        if self.threads is not None:
            bounded("threads", self.threads, 1, 1024)
        if self.max_model_len is not None:
            bounded("max_model_len", self.max_model_len, 2, 1 << 20)

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class DraftSection:
    """The model on the device."""

    model: str = "bundled"
    """``bundled``, an exported folder, a Hugging Face folder or Hub id (exported once, into the
    cache, or its ONNX graph as it is), an ``.onnx`` file, ``none`` (only stream),
    ``lookup`` (guesses from the text and earlier ones, without a model), ``toy``, or ``random``
    (guesses at chance: a check)."""
    variant: str = "auto"
    """Which ONNX graph of others to use, such as ``q4`` or ``fp16``; ``auto``: the fastest there
    is, or the smallest to download."""
    threads: int = 0
    """0: chosen by the size of the model."""
    context_length: int = 0
    """0: the model's own. Less bounds the memory of keys and values."""
    draft_ms: float = 0.0
    """Emulate a slower device: a step takes at least this long."""
    row_ms: float = 0.0
    """And so much longer for each leaf of it after the first."""
    bits: int = 4
    """Of the weights when a Hugging Face folder is exported."""
    kv_type: KvType | None = None
    """Of cached keys and values when a Hugging Face folder is exported; null: float32, or what the
    memory budget asks for."""
    window: int = 0
    """Tokens whose keys and values are held, the last ones of a text; 0: the whole context."""
    memory_budget: str = ""
    """What the whole process may take: a size such as ``600MiB``, a share of the machine's memory
    such as ``25%``, or ``auto``, what is free. Empty: no budget."""
    caches: int = DEFAULT_CACHES
    """Generations beside each other whose keys and values are held at once; those beyond take turns
    at the caches. A memory budget may grant fewer."""
    lookup: bool = False
    """Let guesses from the text answer where they are as good as the model's (``--draft lookup``
    has no others)."""

    def __post_init__(self) -> None:
        _not_empty("model", self.model)
        _not_empty("variant", self.variant)
        if self.lookup and self.model == "none":
            raise ValueError(
                "lookup is true, but model is 'none', which drafts nothing: say 'lookup' to draft"
                " without a model"
            )
        bounded("threads", self.threads, 0, 64)
        bounded("context_length", self.context_length, 0, 1 << 20)
        bounded("draft_ms", self.draft_ms, 0.0, _MINUTE_MS)
        bounded("row_ms", self.row_ms, 0.0, _MINUTE_MS)
        _one_of("bits", self.bits, (4, 8, 32))
        bounded("window", self.window, 0, 1 << 20)
        bounded("caches", self.caches, 1, MAX_CACHES)
        if self.memory_budget:
            parse_budget(self.memory_budget)


@dataclass(frozen=True, slots=True)
class LinkSection:
    """A link emulated on top of the real one; all zero: the real one as it is."""

    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    """Mean extra delay of each direction."""
    mbps: float = 0.0
    """Bandwidth of each direction; 0: without limit."""
    loss: float = 0.0
    """Share of packets sent again; they come late, never not at all."""
    seed: int = 0

    def __post_init__(self) -> None:
        bounded("rtt_ms", self.rtt_ms, 0.0, _MINUTE_MS)
        bounded("jitter_ms", self.jitter_ms, 0.0, _MINUTE_MS)
        bounded("mbps", self.mbps, 0.0, 1e6)
        bounded("loss", self.loss, 0.0, 0.99)
        bounded("seed", self.seed, 0, (1 << 64) - 1)

    @property
    def shaped(self) -> bool:
        return any((self.rtt_ms, self.jitter_ms, self.mbps, self.loss))


@dataclass(frozen=True, slots=True)
class PolicySection:
    """What to draft and when to send it (``core/device/policy.py``)."""

    name: PolicyName = PolicyName.WINDOWED
    gamma: int | None = None
    """Draft length of ``fixed`` and ``pearl``; null adapts."""
    width: int = DEFAULT_WIDTH
    """Choices a draft step adds: 1 is a chain, more a tree."""
    window: int | None = None
    """Steps ``windowed`` may have outstanding; null adapts."""
    run_ahead: RunAhead = RunAhead.AUTO
    """May the verifier decode on without a draft?"""
    leaves: int = 1
    """Nodes that ``windowed`` may draft behind in one step, as many as pay for their time."""

    def __post_init__(self) -> None:
        if self.gamma is not None:
            bounded("gamma", self.gamma, 1, MAX_GAMMA)
        bounded("width", self.width, 1, 16)
        bounded("leaves", self.leaves, 1, 16)
        if self.window is not None:
            bounded("window", self.window, 1, 256)


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The device: where the verifier is, what drafts, what the text shall be like."""

    verifier: str | tuple[str, ...] = DEFAULT_ADDRESS
    """An address, or several: ``association`` chooses one, the others are for when it fails."""
    model: str = ""
    """Name of the target wanted; empty takes what the verifier serves."""
    tokenizer: str = ""
    """Folder or reference; empty: the draft's, or the bundled one when nothing drafts."""
    draft: DraftSection = field(default_factory=DraftSection)
    link: LinkSection = field(default_factory=LinkSection)
    policy: PolicySection = field(default_factory=PolicySection)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    reconnect: ReconnectPolicy = field(default_factory=ReconnectPolicy)
    offline: Offline = Offline.WAIT
    """When no verifier can be reached: ``wait`` for one, or ``draft`` on and have it checked later.
    With ``draft``, ``reconnect.give_up_s`` bounds the wait for a first verifier too."""
    offline_grace_s: float = OfflinePolicy().grace_s
    """How long no verifier may have answered before the draft writes on alone."""
    failover: FailoverPolicy = field(default_factory=FailoverPolicy)
    """How to get from one of several verifiers to another."""
    association: str = LowestDelay.name
    """By what to choose among several verifiers (``core/association/policies.py``), or
    ``learned:FILE``."""
    tls: DeviceTlsSection = field(default_factory=DeviceTlsSection)
    api_key_file: str = ""
    """File that holds the key for the verifier; ``EDGESPEC_API_KEY`` in the environment wins."""
    insecure: bool = False
    """Send the key also where it can be read on its way."""
    endpoint: EndpointSection = field(default_factory=EndpointSection)
    """Of ``edgespec serve``."""
    trace: str = ""
    """Write a trace (JSON lines) to this file."""
    log_level: str = "warning"
    log_format: str = "text"
    """``text``, or ``json``: one object a line."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.verifiers) <= MAX_VERIFIERS:
            raise ValueError(
                f"verifier has {len(self.verifiers)} addresses, not 1 to {MAX_VERIFIERS}"
            )
        for address in self.verifiers:
            _not_empty("verifier", address)
            if "://" in address:
                raise ValueError(f"verifier is {address!r}, but must be host:port or unix:path")
        bounded("offline_grace_s", self.offline_grace_s, 0.0, 3600.0)
        if not self.association.startswith(LEARNED):
            _one_of("association", self.association, (*POLICIES, f"{LEARNED}FILE"))
        _one_of("log_level", self.log_level, LOG_LEVELS)
        _one_of("log_format", self.log_format, LOG_FORMATS)

    @property
    def offline_policy(self) -> OfflinePolicy:
        return OfflinePolicy(self.offline, self.offline_grace_s)

    @property
    def patience(self) -> ReconnectPolicy:
        """``reconnect``; who writes on without a verifier has more time for the first one."""
        patience = self.reconnect
        if self.offline is Offline.WAIT:
            return patience
        return replace(patience, give_up_first_s=max(patience.give_up_first_s, patience.give_up_s))

    @property
    def verifiers(self) -> tuple[str, ...]:
        """All addresses given, each once."""
        given = (self.verifier,) if isinstance(self.verifier, str) else self.verifier
        return tuple(dict.fromkeys(given))


def _one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(map(str, known))}")


def _not_empty(name: str, value: str) -> None:
    if not value.strip():
        raise ValueError(f"{name} is empty")
