"""What can be configured of a verifier, with defaults and ranges."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.config import common
from edgespec.core.device.memory import parse_budget
from edgespec.core.protocol.checks import Section, among, check_limits, limited
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.relaxed_rules import check_offer

QUANTIZE_FORMATS = ("", "int8", "int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")
NATIVE, VLLM = "native", "vllm"
"""Engines: this project's own, and vLLM."""


@dataclass(frozen=True, slots=True)
class PacingSection(Section):
    """Emulate a slower target: a pass takes ``pass_ms`` plus ``row_ms`` for each of its rows; the
    same of the draft model's steps."""

    pass_ms: float = limited(0.0, 0.0, common.MINUTE_MS)
    """Emulate a slower target: make each pass take so many milliseconds."""
    row_ms: float = limited(0.0, 0.0, common.MINUTE_MS)
    """So much longer takes a pass for each row."""
    draft_ms: float = limited(0.0, 0.0, common.MINUTE_MS)
    """Emulate a slower draft model of the verifier: make each step take so many milliseconds."""
    draft_row_ms: float = limited(0.0, 0.0, common.MINUTE_MS)
    """So much longer takes a step for each row."""


@dataclass(frozen=True, slots=True)
class LimitsSection:
    """Bounds a verifier enforces (``Limits`` and ``EngineLimits``)."""

    max_sessions: int = limited(64, 1, 1024)
    """Texts at a time; more are refused."""
    peer_share: float = limited(0.75, 0.001, 1.0)
    """Of the streams and sessions, how many one address may hold; 1 behind a proxy that hides the
    addresses."""
    max_cached_tokens: int = limited(65_536, 1, 1 << 30)
    """Key-value rows over all sessions. Sessions beyond it wait; a text is at most as long."""
    kv_budget: str = ""
    """Memory for cached keys and values: 4GiB, 25% or auto. It takes the place of
    ``max_cached_tokens``; ``auto`` is what is free."""
    gpu_memory_utilization: float | None = limited(None, 0.01, 1.0)
    """Or the share of a GPU that weights, passes and cache may take together."""
    share_prefixes: SharePrefixes = SharePrefixes.ALL
    """Whose cached beginnings of texts a session may use: of ``all``, of the same ``credential``,
    or of ``none``. With ``all``, the time to the first token tells a device whether somebody else
    has sent the same beginning lately."""
    max_nodes_outstanding: int = limited(128, 1, 256)
    """Draft nodes of a session that wait for their verdict."""
    max_nodes_per_pass: int = limited(64, 1, 256)
    """Of these, how many one pass takes."""
    max_unreceived: int = limited(256, 1, 4096)
    """Committed tokens that a device has not acknowledged; then its session waits."""
    max_rows_per_pass: int = limited(1024, 1, 1 << 16)
    """Rows of a pass, prompts included."""
    max_rows_per_session: int = limited(512, 1, 1 << 16)
    """Of these, what one session may have."""
    lease_s: float = limited(30.0, 0.0, 86_400.0)
    """For so long a session whose link is lost is kept."""
    stall_s: float = limited(20.0, 1.0, 3600.0)
    """A device that acknowledges nothing for so long counts as gone."""
    shared_message_rate: float = limited(500.0, 1.0, 1e6)
    """Messages a second that all keys (without keys: addresses) together may send, besides four for
    each commit with right drafts: who wants more than a fair share waits while others are there."""
    least_message_rate: float = limited(100.0, 1.0, 1e6)
    """Of these, what a key may send however many there are."""
    address_message_rate: float = limited(1_000.0, 1.0, 1e6)
    """The same of an address, where there are no keys: it may be a whole site."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.kv_budget:
            parse_budget(self.kv_budget, "kv_budget")
            if self.gpu_memory_utilization is not None:
                raise ValueError(
                    f"kv_budget is {self.kv_budget!r} and gpu_memory_utilization is "
                    f"{self.gpu_memory_utilization}, but only one of them can size the cache"
                )


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
    engine: str = among(NATIVE, (NATIVE, VLLM))
    """native, or vllm for many users and several GPUs. Install ``edgespec[vllm]`` for it."""
    engine_flags: tuple[str, ...] = ()
    """vLLM's own flags, as on its command line."""
    host: str = common.DEFAULT_HOST
    """Address to listen at, 0.0.0.0 for all."""
    port: int = limited(common.DEFAULT_PORT, 0, 65_535)
    """Port to listen at. 0 is any free one; the ready line names it."""
    dtype: str = among("auto", DTYPES)
    """auto, float32, bfloat16 or float16. ``auto`` is float32 on a CPU."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N. ``auto`` is a GPU if there is one."""
    quantize: str = among("", QUANTIZE_FORMATS)
    """Round the weights to int8 or int4, on a CPU, for shorter passes. Empty leaves them as they
    are."""
    canonical: bool | None = None
    """Make bits that do not depend on the schedule. null is on where that holds."""
    threads: int | None = limited(None, 1, 1024)
    """Threads of a pass on a CPU. null is one for each core."""
    max_model_len: int | None = limited(None, 2, 1 << 20)
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
    tls: common.ServerTlsSection = field(default_factory=common.ServerTlsSection)
    insecure: bool = False
    """Listen beyond this machine without TLS."""
    drain_s: float = limited(30.0, 0.0, 86_400.0)
    """How long running texts may go on after a request to stop."""
    trace: str = ""
    """Write every event to this file."""
    trace_tokens: str = among(common.HASHED, common.TRACE_TOKENS)
    """What a trace shows of tokens: ``hashed`` which are equal, ``plain`` which they are."""
    log_level: str = among("warning", common.LOG_LEVELS)
    """Log debug, info, warning or error."""
    log_format: str = among("text", common.LOG_FORMATS)
    """``text``, or ``json``, one object a line."""
    metrics_port: int | None = limited(None, 0, 65_535)
    """Serve Prometheus metrics at this port. 0 is any free one; null is nowhere."""
    metrics_host: str = common.DEFAULT_HOST
    """Address of the metrics."""

    def __post_init__(self) -> None:
        check_limits(self)
        for name in ("model", "host", "metrics_host"):
            common.not_empty(name, getattr(self, name))
        for rule in self.rules:
            check_offer(rule)
        self._check_engine()
        if not (self.tls.used or self.insecure or common.is_loopback(self.host)):
            raise ValueError(
                f"host is {self.host!r}, which others can reach, and there is no TLS: give"
                " --tls-cert and --tls-key (`edgespec certs` makes them), or --insecure"
            )

    def _check_engine(self) -> None:
        wrong: dict[str, tuple[object, str]] = {
            "engine_flags": (list(self.engine_flags), "only --engine vllm has any")
        }
        if self.engine == VLLM:
            behind = "give its flag behind --"
            own = "vLLM drafts by itself: give its --speculative-config behind --"
            exact = "vLLM accepts a draft only where it is the target's own token: leave them out"
            sees = "must be auto: vLLM takes the devices it sees (CUDA_VISIBLE_DEVICES)"
            sizes, limits = f"vLLM sizes its own cache: {behind}", self.limits
            wrong = {
                "draft": (self.draft, own),
                "rules": (list(self.rules), exact),
                "canonical": (self.canonical, "only the native engine can be canonical"),
                "threads": (self.threads, "vLLM chooses its own"),
                "kv_budget": (limits.kv_budget, sizes),
                "gpu_memory_utilization": (limits.gpu_memory_utilization, sizes),
                "quantize": (self.quantize, f"vLLM has its own formats: {behind}"),
                "device": (self.device.removeprefix("auto"), sees),
            }
        for name, (value, why) in wrong.items():
            if value:
                raise ValueError(f"{name} is {value!r}, but {why}")

    @property
    def address(self) -> str:
        return common.joined(self.host, self.port)
