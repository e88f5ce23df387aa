"""Configuration of a device: keys, defaults and ranges. The text below a field is its help."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from edgespec.config import common
from edgespec.config.groups import advanced_field, emulation_field
from edgespec.core.association.failover import FailoverPolicy
from edgespec.core.association.policies import Association
from edgespec.core.device.comparison_policies import MAX_GAMMA
from edgespec.core.device.goodput_policy import (
    DEFAULT_POLICY,
    POLICIES_WITH_GAMMA,
    POLICIES_WITH_WINDOW,
    PolicyName,
)
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.memory import KvType, parse_budget
from edgespec.core.device.policy import DEFAULT_WIDTH
from edgespec.core.ports import DEFAULT_CACHES, MAX_CACHES
from edgespec.core.protocol.acceptance import parse_rule
from edgespec.core.protocol.checks import Section, check_limits, choice_field, range_field
from edgespec.core.protocol.messages import EXACT_RULE, RunAhead
from edgespec.core.protocol.sampling import MAX_TOKENS, SamplingParams

ANY_ORIGIN = "*"
_ORIGIN = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://(\[[0-9A-Fa-f:]+\]|[^\s/:@\[\]?#]+)(:([0-9]+|\*))?"
)
_BODY_BYTES, _BODY_BYTES_IN_BUDGET = 16 << 20, 4 << 20
"""Largest size of one request's body, without and with a memory budget. Reading a body takes a few
times its size for a moment: its text, and the bytes of its pictures."""
_BODIES = 16
"""Request bodies of the largest size that fit in memory together, within the limits below."""
_BODIES_BYTES, _BODIES_BYTES_IN_BUDGET = 64 << 20, 16 << 20
"""Bytes of all request bodies together, without and with a memory budget."""


@dataclass(frozen=True, slots=True)
class EndpointSection:
    """HTTP endpoint of ``edgespec serve``."""

    host: str = common.DEFAULT_HOST
    """Address to listen at; 0.0.0.0 lets other machines connect, which requires a key."""
    port: int = range_field(7421, 0, 65_535)
    """Port to listen at; 0 takes any free one, which the ready line names."""
    key_file: str = ""
    """File with the API key that clients must send. ``EDGESPEC_ENDPOINT_KEY`` in the environment
    wins over it. Empty requires no key, which is allowed on this machine only."""
    insecure: bool = False
    """Listen for other machines without requiring a key."""
    allow_origins: tuple[str, ...] = ()
    """Admit requests from web pages of this origin, such as https://chat.example. ``*`` stands for
    any part of a host or for any port (https://*.example, chrome-extension://*); alone it admits
    every origin. If the endpoint listens on this machine only, pages of this machine
    (http://localhost:3000) and installed applications are admitted anyway."""
    allow_local_apps: bool = False
    """Admit browser extensions, and wherever the endpoint listens also pages of this machine and
    installed applications (app://, tauri://, capacitor://, vscode-webview://). If the
    endpoint listens on this machine only, all but extensions are admitted anyway."""
    allow_hosts: tuple[str, ...] = ()
    """Names that a ``Host`` header may carry besides ``localhost``. Give the public name of a
    reverse proxy in front of the endpoint."""
    max_concurrent: int = range_field(8, 1, 1024)
    """Generations that run at the same time. A request for n choices counts n times."""
    max_per_client: int | None = advanced_field(range_field(None, 1, 1024))
    """Generations of one client that run at the same time. A client is an address; for IPv6 it is
    the first 64 bits. null means all of ``max_concurrent`` if only this machine can connect, else
    three quarters of it. Behind a proxy all clients have one address: set it to
    ``max_concurrent`` there."""
    max_queue: int = range_field(512, 0, 65_536)
    """Requests that may wait until another one is done. Further requests are answered with 429."""
    max_queue_tokens: int = advanced_field(range_field(4 << 20, 1, 1 << 30))
    """Prompt tokens, 4 bytes each, of all waiting requests together. A request beyond this limit is
    answered with 429."""
    queue_within_s: float = advanced_field(range_field(600.0, 0.1, 86_400.0))
    """Seconds that a request may wait before it runs. After that it is answered with 429."""
    max_body_bytes: int | None = advanced_field(range_field(None, 1024, 1 << 30))
    """Largest body of a request, in bytes. A larger one is answered with 413. null means 16 MiB,
    which fits pictures of 12 MB, or 4 MiB with a memory budget."""
    max_bodies_bytes: int | None = advanced_field(range_field(None, 2048, 1 << 34))
    """Bytes that the bodies of all requests may hold together until they are read. A request beyond
    this limit is answered with 503. null means 16 times ``max_body_bytes``, at most 64 MiB, or 16
    MiB with a memory budget. The limit is never below twice ``max_body_bytes``."""
    picture_urls: bool = False
    """Fetch pictures that a request names by an address (http:// or https://). A client then
    chooses what this device connects to; only addresses of the public internet are dialed. false
    refuses them, and pictures are sent as data URLs."""
    default_max_tokens: int | None = range_field(None, 1, MAX_TOKENS)
    """Longest output, in tokens, for a request that sets no limit. null lets a chat fill the
    context, and gives a completion ``sampling.max_tokens``."""
    model_sampling: bool = True
    """Take sampling parameters that neither a request nor ``sampling`` sets from the model's
    ``generation_config.json``. false makes them greedy."""
    keep_alive_s: float = advanced_field(range_field(10.0, 0.01, 3600.0))
    """Seconds between the comments that keep a stream alive while it has no token."""
    body_within_s: float = advanced_field(range_field(30.0, 0.1, 3600.0))
    """Seconds that a request may take to arrive."""
    write_within_s: float = advanced_field(range_field(60.0, 0.1, 3600.0))
    """Seconds without reading after which a client counts as gone."""
    unread_within_s: float = advanced_field(range_field(5.0, 0.01, 3600.0))
    """Seconds without reading after which a client counts as gone while another request waits."""
    drain_s: float = range_field(5.0, 0.0, 3600.0)
    """Seconds that running requests may continue after Ctrl-C or SIGTERM."""

    @property
    def most_of_client(self) -> int:
        """Generations of one client that may run at the same time."""
        if self.max_per_client is not None:
            return min(self.max_per_client, self.max_concurrent)
        if common.is_loopback(self.host):
            return self.max_concurrent
        return max(1, self.max_concurrent - max(1, self.max_concurrent // 4))

    def most_body_bytes(self, *, has_budget: bool) -> int:
        """Return the largest size of a request's body, in bytes. ``has_budget`` says whether the
        process has a memory budget."""
        return self.max_body_bytes or (_BODY_BYTES_IN_BUDGET if has_budget else _BODY_BYTES)

    def most_bodies_bytes(self, *, has_budget: bool) -> int:
        """Return the bytes that all request bodies may hold together. ``has_budget`` says whether
        the process has a memory budget."""
        most = _BODIES_BYTES_IN_BUDGET if has_budget else _BODIES_BYTES
        of_one = self.most_body_bytes(has_budget=has_budget)
        return max(self.max_bodies_bytes or min(_BODIES * of_one, most), 2 * of_one)

    def __post_init__(self) -> None:
        check_limits(self)
        common.check_not_empty("host", self.host)
        for origin in self.allow_origins:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                null = ": null is any sandboxed page, which only * admits, with all others"
                raise ValueError(
                    f"allow_origins holds {origin!r}, but must be like https://chat.example,"
                    f" http://localhost:*, or *{null if origin == 'null' else ''}"
                )


MAX_VERIFIERS, MAX_PORT = 64, 65_535
MAX_RECORD_MIB = 32  # the limit of a corpus, which a recording can be used as
FALLBACK_DRAFT = "draft"
"""Word of ``fallback`` for the draft model itself."""
MODELS_THAT_WRITE_NOTHING = ("none", "lookup", "random")
"""Words of ``draft.model`` that stand for no model with a text of its own."""
PROVIDERS = ("cpu", "cuda", "tensorrt", "dml", "coreml", "openvino")


@dataclass(frozen=True, slots=True)
class DraftSection:
    """Draft sources of the device: its draft model, lookup and texts."""

    model: str = "bundled"
    """Draft model of this device: a folder, an .onnx or .gguf file, a Hub id, a name that `edgespec
    pull` fetched, bundled, lookup (draft from earlier text, without a model) or none (stream only).
    A checkpoint or GGUF file is exported once, into the cache; an ``.onnx`` file is used as it is.
    In place of ``bundled`` the draft of the catalogue is used if the verifier serves the target of
    its pair. ``toy`` and ``random`` are for tests."""
    variant: str = advanced_field("auto")
    """Name of the ONNX graph to use where there are several, such as ``q4`` or ``fp16``. ``auto``
    takes the first of q4, q4f16, int8, ... that works."""
    threads: int = range_field(0, 0, 64)
    """Threads of a draft step. 0 takes one for a small model, and two for a larger one if there are
    two cores."""
    context_length: int = advanced_field(range_field(0, 0, 1 << 20))
    """Tokens of context that the draft model uses. 0 takes the model's own context length; fewer
    need less memory."""
    draft_ms: float = emulation_field(range_field(0.0, 0.0, common.MINUTE_MS))
    """Milliseconds that each draft step takes at least, to emulate a slower device."""
    bits: int = advanced_field(choice_field(0, (0, 4, 8, 32)))
    """Bits of a weight when a checkpoint is exported: 4, 8 or 32. 0 takes what the catalogue states
    for a pair that was pulled, and 4 for any other model."""
    kv_type: KvType | None = advanced_field(None)
    """Type of the cached keys and values when a checkpoint is exported. null takes float32, or the
    type that the memory budget needs."""
    window: int | None = advanced_field(range_field(None, 0, 1 << 20))
    """Tokens of a generation that the draft's KV cache keeps, the first ones and the latest. Fewer
    need less memory, and make steps behind long prompts shorter. null takes as many as the draft
    was trained on, according to its ``edgespec.json``, else ``context_length`` if it is set, else
    1,024. 0 takes the whole context in place of 1,024, as a draft model that is also the
    ``fallback`` does."""
    memory_budget: str = ""
    """Most memory that this process may hold, as 600MiB, 25% or auto. ``auto`` takes what is free
    on the machine. Empty sets no budget."""
    caches: int = advanced_field(range_field(DEFAULT_CACHES, 1, MAX_CACHES))
    """Generations that are drafted for at the same time; further ones are only streamed. A memory
    budget may allow fewer."""
    lookup: bool = False
    """Add lookup candidates to the draft model's. Lookup continues a phrase as it went on the last
    time in the prompt, the output or an earlier text of this process; the best candidates of both
    sources become draft nodes."""
    corpus: tuple[str, ...] = ()
    """Draft also from this file or folder, such as the project that is being edited; may be given
    more than once. Its candidates join those of lookup, with or without a model. Files that
    ``.gitignore`` leaves out, hidden, binary and large ones are skipped. An index is built in the
    cache once, and files that change while the device runs are read again."""
    provider: str = advanced_field(choice_field("cpu", PROVIDERS))
    """Part of onnxruntime that runs the draft: cpu, cuda and tensorrt (edgespec[gpu]), dml
    (Windows, edgespec[directml]), coreml (macOS) or openvino (edgespec[openvino]). An accelerator
    may be slower than the CPU, because keys and values are copied at each step."""

    def __post_init__(self) -> None:
        check_limits(self)
        common.check_not_empty("model", self.model)
        common.check_not_empty("variant", self.variant)
        if self.from_text and self.model == "none":
            key = "corpus is given" if self.corpus else "lookup is true"
            raise ValueError(
                f"{key}, but model is 'none', which drafts nothing: choose 'lookup' to draft"
                " without a model"
            )
        for name in self.corpus:
            common.check_not_empty("corpus", name)
        if self.memory_budget:
            parse_budget(self.memory_budget)

    @property
    def from_text(self) -> bool:
        """Whether lookup adds candidates to those of the draft model."""
        return self.lookup or bool(self.corpus)


@dataclass(frozen=True, slots=True)
class LinkSection(Section):
    """Link that is emulated on top of the real one. All zeros leave the real link as it is."""

    rtt_ms: float = range_field(0.0, 0.0, common.MINUTE_MS)
    """Milliseconds of round trip that the emulated link adds."""
    jitter_ms: float = range_field(0.0, 0.0, common.MINUTE_MS)
    """Mean random delay, in milliseconds, that the emulated link adds in each direction."""
    mbps: float = range_field(0.0, 0.0, 1e6)
    """Bandwidth of the emulated link in each direction, in Mbit/s. 0 sets no limit."""
    loss: float = range_field(0.0, 0.0, 0.99)
    """Share of packets that the emulated link loses. They are sent again, so they arrive late."""
    seed: int = range_field(0, 0, (1 << 64) - 1)
    """Seed of the emulated delays; the same seed gives the same delays."""

    @property
    def shaped(self) -> bool:
        return any((self.rtt_ms, self.jitter_ms, self.mbps, self.loss))


@dataclass(frozen=True, slots=True)
class PolicySection:
    """Draft policy: when the device drafts, and when it sends (``core/device/policy.py``)."""

    name: PolicyName = DEFAULT_POLICY
    """Draft policy. ``goodput``, the default, drafts nodes that are expected to save more time than
    they cost. The others exist for comparison only: ``windowed`` drafts the likeliest nodes within
    a window, ``pearl`` sends the first node early and the rest during its verification, ``fixed``
    drafts ``gamma`` nodes, sends them and waits."""
    gamma: int | None = range_field(None, 1, MAX_GAMMA)
    """Draft length of the policies ``fixed`` and ``pearl``, in nodes. null adapts it."""
    width: int = range_field(DEFAULT_WIDTH, 1, 16)
    """Candidates of a draft step that become draft nodes. 1 makes a chain, more make a tree."""
    window: int | None = range_field(None, 1, 256)
    """Draft steps that ``goodput`` and ``windowed`` may have awaiting their verdict. null adapts
    it."""
    run_ahead: RunAhead = RunAhead.AUTO
    """Whether the verifier decodes on while no draft arrives: auto, always or never. ``never``
    exists for comparison only."""

    def __post_init__(self) -> None:
        check_limits(self)
        for key, users in (("gamma", POLICIES_WITH_GAMMA), ("window", POLICIES_WITH_WINDOW)):
            if (value := getattr(self, key)) is not None and self.name not in users:
                names = " or ".join(one.value for one in users)
                has_none = f"{key} is {value}, but policy {self.name.value!r} has none"
                raise ValueError(f"{has_none}: leave it out, or choose {names}")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Configuration of a device: its verifiers, draft sources, sampling and endpoint."""

    verifier: str | tuple[str, ...] = common.DEFAULT_ADDRESS
    """Address of the verifier, host:port or unix:path; give several for failover. ``association``
    chooses one of several, and when it fails, the generation continues at another."""
    model: str = ""
    """Name of the target or adapter to generate with. Empty takes the verifier's default."""
    rule: str = EXACT_RULE
    """Rule by which drafts are accepted; every rule but exact is faster and LOSSY. The others are
    typical, top-k:K, margin:NATS, dsd:SHARE and bild:NATS, and the verifier must offer the one that
    you choose. Under them likely draft nodes replace the target's own tokens, and the output
    depends on the draft and on timing."""
    tokenizer: str = ""
    """Folder or Hub id of the tokenizer for prompts. Empty takes the verifier's, or the draft's if
    the verifier sends none."""
    draft: DraftSection = field(default_factory=DraftSection)
    fallback: str = ""
    """Model of this device that answers while no verifier can be reached: ``draft``, which is the
    draft model, or another folder, .onnx or .gguf file, Hub id or pulled name. Such an answer is
    the text of a smaller model, and every response names it. A text that a verifier began is never
    continued by it. Empty answers with an error instead."""
    link: LinkSection = emulation_field(field(default_factory=LinkSection))
    policy: PolicySection = advanced_field(field(default_factory=PolicySection))
    sampling: SamplingParams = field(default_factory=SamplingParams)
    reconnect: ReconnectPolicy = advanced_field(field(default_factory=ReconnectPolicy))
    failover: FailoverPolicy = advanced_field(field(default_factory=FailoverPolicy))
    association: Association = Association.LOWEST_DELAY
    """Way to choose among several verifiers. ``lowest-delay`` takes the shortest round trip and
    pass together, ``listed`` the first one that answers, and ``rendezvous`` keeps each conversation
    at a verifier of its own, which suits replicas."""
    tls: common.DeviceTlsSection = field(default_factory=common.DeviceTlsSection)
    api_key_file: str = ""
    """File with the API key for the verifier, if it requires one. ``EDGESPEC_API_KEY`` in the
    environment wins over it."""
    insecure: bool = False
    """Send the API key even over a link on which others can read it."""
    keep_warm_s: float = advanced_field(range_field(45.0, 0.0, 3600.0))
    """Seconds without use after which a program that waits for requests calls its verifier, so that
    proxies and address translators on the way keep the connection open: ALB and nginx close one
    after 60 to 75 s. Each call has 290 bytes over TLS. 0 makes no such calls; then the first
    token after a pause may take a few more round trips."""
    endpoint: EndpointSection = field(default_factory=EndpointSection)
    record: str = ""
    """Record outputs as token ids in this file, readable by you alone. ``--draft-corpus`` drafts
    from such a file, and ``edgespec distill --online`` learns from it."""
    record_mib: int = range_field(16, 1, MAX_RECORD_MIB)
    """Largest size of the recording, in MiB. The oldest outputs are dropped."""
    trace: str = ""
    """File to which every event of the session is written, as JSON lines, for analysis."""
    trace_tokens: str = advanced_field(choice_field(common.HASHED, common.TRACE_TOKENS))
    """Form of tokens in a trace. ``hashed`` shows only which tokens are equal; ``plain`` shows the
    tokens themselves."""
    log_level: str = choice_field("warning", common.LOG_LEVELS)
    """Least severe messages that are logged: debug, info, warning or error."""
    log_format: str = choice_field("text", common.LOG_FORMATS)
    """Format of the log: text, or json with one object per line."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not 1 <= len(self.verifiers) <= MAX_VERIFIERS:
            raise ValueError(
                f"verifier has {len(self.verifiers)} addresses, but must have 1 to {MAX_VERIFIERS}"
            )
        for address in self.verifiers:
            check_address(address)
        parse_rule(self.rule)
        if self.fallback in MODELS_THAT_WRITE_NOTHING:
            raise ValueError(
                f"fallback is {self.fallback!r}, which writes no text: name a model, or 'draft'"
            )
        if self.fallback == FALLBACK_DRAFT and self.draft.model in MODELS_THAT_WRITE_NOTHING:
            raise ValueError(
                f"fallback is {FALLBACK_DRAFT!r}, but draft.model is {self.draft.model!r}, which"
                " writes no text: choose a draft model, or name another model as the fallback"
            )

    @property
    def verifiers(self) -> tuple[str, ...]:
        """All addresses of ``verifier``, without repetitions."""
        given = (self.verifier,) if isinstance(self.verifier, str) else self.verifier
        return tuple(dict.fromkeys(given))


def check_address(address: str) -> None:
    """Raise ``ValueError`` if ``address`` is no address of a verifier.

    gRPC would take the lower 16 bits of a port that is too large, and no port from an IPv6 address
    without brackets, whatever its last part looks like."""
    common.check_not_empty("verifier", address)
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
