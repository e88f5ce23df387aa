"""What can be configured of a verifier, with defaults and ranges."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.config.common import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    HASHED,
    LOG_FORMATS,
    LOG_LEVELS,
    MINUTE_MS,
    TRACE_TOKENS,
    ServerTlsSection,
    is_loopback,
    not_empty,
    one_of,
)
from edgespec.core.device.memory import parse_budget
from edgespec.core.protocol.checks import bounded
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.relaxed_rules import check_offer

QUANTIZE_FORMATS = ("", "int8", "int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")
NATIVE, VLLM = "native", "vllm"
"""Engines: this project's own, and vLLM."""


@dataclass(frozen=True, slots=True)
class PacingSection:
    """Emulate a slower target: a pass takes ``pass_ms`` plus ``row_ms`` for each of its rows; the
    same of the draft model's steps."""

    pass_ms: float = 0.0
    """Emulate a slower target: make each pass take so many milliseconds."""
    row_ms: float = 0.0
    """So much longer takes a pass for each row."""
    draft_ms: float = 0.0
    """Emulate a slower draft model of the verifier: make each step take so many milliseconds."""
    draft_row_ms: float = 0.0
    """So much longer takes a step for each row."""

    def __post_init__(self) -> None:
        for name in ("pass_ms", "row_ms", "draft_ms", "draft_row_ms"):
            bounded(name, getattr(self, name), 0.0, MINUTE_MS)


@dataclass(frozen=True, slots=True)
class PipelineSection:
    """Experimental: lay the layers of one model on several processes, one behind another."""

    stages: int = 1
    """Processes; at most the model's layers."""
    delay_ms: float = 0.0
    """Added to each link between two of them, one way, for trials."""
    pass_within_s: float = 300.0
    """A pass that takes longer hangs: the verifier ends, and its devices resume elsewhere."""

    def __post_init__(self) -> None:
        bounded("stages", self.stages, 1, 64)
        bounded("delay_ms", self.delay_ms, 0.0, MINUTE_MS)
        bounded("pass_within_s", self.pass_within_s, 1.0, 86_400.0)
        if self.delay_ms > 0.0 and self.stages == 1:
            raise ValueError(
                f"delay_ms is {self.delay_ms:g}, but there is no link to delay: stages is 1"
            )


@dataclass(frozen=True, slots=True)
class LimitsSection:
    """Bounds a verifier enforces (``Limits`` and ``EngineLimits``)."""

    max_sessions: int = 64
    """Texts at a time; more are refused."""
    peer_share: float = 0.75
    """Of the streams and sessions, how many one address may hold; 1 behind a proxy that hides the
    addresses."""
    max_cached_tokens: int = 65_536
    """Key-value rows over all sessions. Sessions beyond it wait; a text is at most as long."""
    kv_budget: str = ""
    """Memory for cached keys and values: 4GiB, 25% or auto. It takes the place of
    ``max_cached_tokens``; ``auto`` is what is free."""
    gpu_memory_utilization: float | None = None
    """Or the share of a GPU that weights, passes and cache may take together."""
    share_prefixes: SharePrefixes = SharePrefixes.ALL
    """Whose cached beginnings of texts a session may use: of ``all``, of the same ``credential``,
    or of ``none``. With ``all``, the time to the first token tells a device whether somebody else
    has sent the same beginning lately."""
    max_nodes_outstanding: int = 128
    """Draft nodes of a session that wait for their verdict."""
    max_nodes_per_pass: int = 64
    """Of these, how many one pass takes."""
    max_unreceived: int = 256
    """Committed tokens that a device has not acknowledged; then its session waits."""
    max_rows_per_pass: int = 1024
    """Rows of a pass, prompts included."""
    max_rows_per_session: int = 512
    """Of these, what one session may have."""
    lease_s: float = 30.0
    """For so long a session whose link is lost is kept."""
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
        if self.kv_budget:
            parse_budget(self.kv_budget, "kv_budget")
        if self.gpu_memory_utilization is not None:
            bounded("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
            if self.kv_budget:
                raise ValueError(
                    f"kv_budget is {self.kv_budget!r} and gpu_memory_utilization is "
                    f"{self.gpu_memory_utilization}, but only one of them can size the cache"
                )
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
    """The target model: a folder, a Hub id, bundled or toy."""
    draft: str = ""
    """Draft on the verifier too, with this small model: a folder, a Hub id, bundled or toy. It
    needs the target's tokenizer and shares its device and the memory of ``limits``. Empty is
    none."""
    name: str = ""
    """What devices may ask for by name. Empty is derived from ``model``."""
    engine: str = NATIVE
    """native, or vllm for many users and several GPUs. Install ``edgespec[vllm]`` for it."""
    engine_flags: tuple[str, ...] = ()
    """vLLM's own flags, as on its command line."""
    host: str = DEFAULT_HOST
    """Address to listen at, 0.0.0.0 for all."""
    port: int = DEFAULT_PORT
    """Port to listen at. 0 is any free one; the ready line names it."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16. ``auto`` is float32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N. ``auto`` is a GPU if there is one."""
    quantize: str = ""
    """Round the weights to int8 or int4, on a CPU. Empty leaves them as they are."""
    canonical: bool | None = None
    """Make bits that do not depend on the schedule. null is on for CPUs, off for GPUs."""
    threads: int | None = None
    """Threads of the model in plain mode. null is torch's choice."""
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    max_model_len: int | None = None
    """Tokens of prompt and output together. null is the model's own context."""
    server_drafts: bool = True
    """Guess from the text itself where a device sends no draft."""
    rules: tuple[str, ...] = ()
    """LOSSY acceptance rules that devices may ask for besides exact: typical, top-k, margin, dsd or
    bild, each for all its parameters, or with those that it may have, such as ``dsd:0.5``."""
    pacing: PacingSection = field(default_factory=PacingSection)
    limits: LimitsSection = field(default_factory=LimitsSection)
    keys: str = ""
    """Let in who shows one of the keys in this file (``edgespec keys``). Empty lets in whoever can
    connect."""
    tls: ServerTlsSection = field(default_factory=ServerTlsSection)
    insecure: bool = False
    """Listen beyond this machine without TLS."""
    drain_s: float = 30.0
    """How long running texts may go on after a request to stop."""
    trace: str = ""
    """Write every event to this file."""
    trace_tokens: str = HASHED
    """What a trace shows of tokens: ``hashed`` which are equal, ``plain`` which they are."""
    log_level: str = "warning"
    """Log debug, info, warning or error."""
    log_format: str = "text"
    """``text``, or ``json``, one object a line."""
    metrics_port: int | None = None
    """Serve Prometheus metrics at this port. 0 is any free one; null is nowhere."""
    metrics_host: str = DEFAULT_HOST
    """Address of the metrics."""

    def __post_init__(self) -> None:
        not_empty("model", self.model)
        not_empty("host", self.host)
        not_empty("metrics_host", self.metrics_host)
        if self.metrics_port is not None:
            bounded("metrics_port", self.metrics_port, 0, 65_535)
        bounded("port", self.port, 0, 65_535)
        one_of("dtype", self.dtype, DTYPES)
        one_of("quantize", self.quantize, QUANTIZE_FORMATS)
        for rule in self.rules:
            check_offer(rule)
        self._check_engine()
        one_of("log_level", self.log_level, LOG_LEVELS)
        one_of("log_format", self.log_format, LOG_FORMATS)
        one_of("trace_tokens", self.trace_tokens, TRACE_TOKENS)
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

    def _check_engine(self) -> None:
        one_of("engine", self.engine, (NATIVE, VLLM))
        if self.pipeline.stages > 1:
            stages = f"pipeline.stages is {self.pipeline.stages}"
            if self.engine != NATIVE:
                raise ValueError(f"{stages}, but only the native engine has stages: leave it at 1")
            if self.model == "toy":
                raise ValueError(f"{stages}, but the toy model has no layers: leave it at 1")
        if self.engine == NATIVE:
            if self.engine_flags:
                raise ValueError(
                    f"engine_flags are {list(self.engine_flags)}, but only --engine vllm has any"
                )
            return
        if self.draft:
            raise ValueError(
                f"draft is {self.draft!r}, but vLLM drafts by itself: give its --speculative-config"
                " behind --"
            )
        if self.rules:
            raise ValueError(
                f"rules are {list(self.rules)}, but vLLM accepts a draft only where it is the"
                " target's own token: leave them out"
            )
        if self.canonical:
            raise ValueError("canonical is true, but only the native engine can be canonical")
        if self.threads is not None:
            raise ValueError(f"threads is {self.threads}, but vLLM chooses its own")
        for name in ("kv_budget", "gpu_memory_utilization"):
            if value := getattr(self.limits, name):
                raise ValueError(
                    f"{name} is {value}, but vLLM sizes its own cache: give its flag behind --"
                )
        if self.quantize:
            raise ValueError(
                f"quantize is {self.quantize!r}, but vLLM has its own formats: give its flag behind"
                " --"
            )
        if self.device != "auto":
            raise ValueError(
                f"device is {self.device!r}, but must be auto: vLLM takes the devices it sees"
                " (CUDA_VISIBLE_DEVICES)"
            )

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
