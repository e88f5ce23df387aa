"""Configuration of a verifier: keys, defaults and ranges. The text below a field is its help."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.config import common
from edgespec.config.groups import advanced_field, emulation_field
from edgespec.core.device.memory import parse_budget
from edgespec.core.protocol.acceptance import check_offer
from edgespec.core.protocol.checks import Section, check_limits, choice_field, range_field
from edgespec.core.protocol.pictures import MAX_PICTURE_BYTES, MAX_PICTURES, PictureInput
from edgespec.core.verifier.block_ledger import SharePrefixes

QUANTIZE_FORMATS = ("", "int8", "int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")
NATIVE, VLLM = "native", "vllm"
"""Engines: this project's own, and vLLM."""


@dataclass(frozen=True, slots=True)
class PacingSection(Section):
    """Emulated durations. A pass of the target takes at least ``pass_ms`` plus ``row_ms`` for each
    of its rows, a step of the verifier's draft model likewise."""

    pass_ms: float = range_field(0.0, 0.0, common.MINUTE_MS)
    """Milliseconds that each pass takes at least, to emulate a larger target."""
    row_ms: float = range_field(0.0, 0.0, common.MINUTE_MS)
    """Milliseconds that each row adds to an emulated pass."""
    draft_ms: float = range_field(0.0, 0.0, common.MINUTE_MS)
    """Milliseconds that each step of the verifier's draft model takes at least, to emulate a larger
    one."""
    draft_row_ms: float = range_field(0.0, 0.0, common.MINUTE_MS)
    """Milliseconds that each row adds to an emulated step of the verifier's draft model."""


@dataclass(frozen=True, slots=True)
class LimitsSection:
    """Limits that a verifier enforces (``Limits`` and ``EngineLimits``)."""

    max_sessions: int = range_field(64, 1, 1024)
    """Sessions at the same time; further ones are refused."""
    peer_share: float = range_field(0.75, 0.001, 1.0)
    """Share of all streams and sessions that one address may hold. Set it to 1 behind a proxy that
    hides the devices' addresses."""
    max_cached_tokens: int | None = range_field(None, 1, 1 << 30)
    """Positions of the KV cache, for all sessions together. Sessions wait while the cache is full,
    and no generation can be longer than the cache. null takes 65,536 on a GPU. On a CPU it takes
    the model's context, from 8,192 to 65,536, and at most a quarter of the free memory; give more
    to a verifier with many long generations."""
    kv_budget: str = ""
    """Memory for the KV cache, as 4GiB, 25% or auto; it decides how many and how long generations
    can be. It replaces ``max_cached_tokens``. ``auto`` takes what is free."""
    gpu_memory_utilization: float | None = range_field(None, 0.01, 1.0)
    """Share of a GPU's memory for weights, passes and KV cache together. It is another way to size
    the cache, in place of ``kv_budget``."""
    share_prefixes: SharePrefixes = SharePrefixes.ALL
    """Sessions whose cached prompt beginnings another session may use: ``all``, those of the same
    ``credential``, or ``none``. With ``all``, the time to the first token reveals to a device that
    the same beginning was sent recently by another one."""
    prefix_mib: int = range_field(64, 0, 1 << 20)
    """Memory in MiB for the token ids of recent prompts and outputs, so that a device sends only
    what is new in a conversation; 64 MiB hold some 8 million ids. 0 keeps none, and devices send
    whole prompts. A device can use only what it sent itself, under the same API key."""
    picture_mib: int = range_field(256, 0, 1 << 20)
    """Memory in MiB for the pictures of recent prompts, so that a device sends each one once in a
    conversation, and again as much for pictures that arrive; one prompt may have pictures of half
    of it. 0 refuses pictures. It matters only for a model that reads pictures."""
    max_pictures: int = range_field(8, 1, MAX_PICTURES)
    """Pictures of one prompt, at most 64."""
    max_picture_mib: int = range_field(8, 1, MAX_PICTURE_BYTES >> 20)
    """Size of one picture in MiB, as it is sent, at most 64."""
    max_picture_megapixels: int = range_field(16, 1, 1024)
    """Pixels of one picture, in units of 1,048,576: width times height, read from the header
    before anything is decoded. A decoded pixel takes some 3 to 30 bytes."""
    max_nodes_outstanding: int = advanced_field(range_field(256, 1, 1024))
    """Draft nodes of one session that may await their verdict. A device with a prediction fills
    them, so over a distant link its speed grows with them."""
    max_nodes_per_pass: int = advanced_field(range_field(64, 1, 256))
    """Draft nodes of one session in one pass."""
    max_unreceived: int = advanced_field(range_field(256, 1, 4096))
    """Committed tokens that a device may leave unacknowledged. Its session waits at this limit."""
    max_rows_per_pass: int = advanced_field(range_field(1024, 1, 1 << 16))
    """Rows of one pass, prompts included. More rows read prompts faster, and delay the tokens of
    other sessions."""
    max_rows_per_session: int = advanced_field(range_field(512, 1, 1 << 16))
    """Rows that one session may have in one pass."""
    prefill_share: float = advanced_field(range_field(0.22, 0.01, 100.0))
    """Share by which prompts may make a pass longer while other sessions decode. With 0.25 the
    others' tokens come at most a quarter later. With more, long prompts are read sooner, and the
    others' tokens come later. Prompts that came before all such sessions began get a fair part,
    as long as one client alone is served."""
    lease_s: float = advanced_field(range_field(30.0, 0.0, 86_400.0))
    """Seconds that a disconnected session is kept, so that its device can resume it."""
    stall_s: float = advanced_field(range_field(20.0, 1.0, 3600.0))
    """Seconds without an acknowledgement after which a device counts as gone."""
    shared_message_rate: float = advanced_field(range_field(500.0, 1.0, 1e6))
    """Messages per second that all API keys together may send (all addresses together, if there are
    no keys). Four more are allowed for each commit with accepted drafts. When the rate is reached,
    senders above their fair share wait."""
    least_message_rate: float = advanced_field(range_field(100.0, 1.0, 1e6))
    """Messages per second that each API key may send, however many keys there are."""
    address_message_rate: float = advanced_field(range_field(1_000.0, 1.0, 1e6))
    """Messages per second that each address may send if there are no API keys. An address may be
    that of a whole site."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.kv_budget:
            parse_budget(self.kv_budget, "kv_budget")
            if self.gpu_memory_utilization is not None:
                raise ValueError(
                    f"kv_budget is {self.kv_budget!r} and gpu_memory_utilization is "
                    f"{self.gpu_memory_utilization}, but only one of them can size the cache"
                )

    def picture_input(self, token: int) -> PictureInput | None:
        """Return the bounds on pictures for a model whose placeholder is ``token``; None if
        pictures are refused."""
        if not self.picture_mib:
            return None
        return PictureInput(
            token=token,
            max_count=self.max_pictures,
            max_bytes=self.max_picture_mib << 20,
            max_pixels=self.max_picture_megapixels << 20,
        )


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """Configuration of a verifier, the server of one target model."""

    model: str = "bundled"
    """Target model: a folder, a .gguf file, a Hub id, a name that `edgespec pull` fetched,
    ollama:NAME, hf.co/USER/REPO:QUANT, bundled or toy (for tests)."""
    draft: str = ""
    """Small model with which the verifier drafts as well: a folder, a .gguf file, a Hub id, bundled
    or toy; use it for devices that draft badly or not at all. It needs the target's tokenizer, and
    shares the target's hardware and the memory of ``limits``. Empty uses no such model."""
    name: str = ""
    """Name by which devices can ask for the target. Empty derives it from ``model``."""
    engine: str = choice_field(NATIVE, (NATIVE, VLLM))
    """Engine that runs the target: native for a CPU or one GPU, vllm for many users and several
    GPUs. Install ``edgespec[vllm]`` for the latter."""
    engine_flags: tuple[str, ...] = ()
    """Flags for vLLM, as on its own command line, after --."""
    host: str = common.DEFAULT_HOST
    """Address to listen at; 0.0.0.0 lets other machines connect, which requires TLS."""
    port: int = range_field(common.DEFAULT_PORT, 0, 65_535)
    """Port to listen at; 0 takes any free one, which the ready line names."""
    dtype: str = choice_field("auto", DTYPES)
    """Number format of the weights: auto, float32, bfloat16 or float16. ``auto`` takes float32 on a
    CPU, and the checkpoint's format on a GPU."""
    device: str = "auto"
    """Hardware that runs the target: auto, cpu, cuda or cuda:N. ``auto`` takes a GPU if there is
    one."""
    quantize: str = choice_field("", QUANTIZE_FORMATS)
    """Round the weights to int8 or int4, for faster passes on a CPU; this changes the target. Empty
    leaves the weights as they are."""
    canonical: bool | None = advanced_field(None)
    """Compute rows whose bits do not depend on what else is in the pass. null does so where the
    start-up test shows that it holds."""
    threads: int | None = range_field(None, 1, 1024)
    """Threads of a pass on a CPU. null takes one for each core."""
    max_model_len: int | None = range_field(None, 2, 1 << 20)
    """Longest context, in tokens of prompt and output together; a shorter one needs less memory.
    null takes the model's own."""
    server_drafts: bool = True
    """Draft by lookup in the prompt and the output where a device sends no draft."""
    rules: tuple[str, ...] = ()
    """LOSSY acceptance rule that devices may choose instead of exact; may be given more than once.
    It is typical, top-k, margin, dsd or bild, either alone, which allows every parameter, or with
    the parameter to allow, such as ``dsd:0.5``."""
    pacing: PacingSection = emulation_field(field(default_factory=PacingSection))
    limits: LimitsSection = field(default_factory=LimitsSection)
    keys: str = ""
    """File of API keys (`edgespec keys`): only devices with one of them are admitted. Empty admits
    every device that can connect."""
    tls: common.ServerTlsSection = field(default_factory=common.ServerTlsSection)
    insecure: bool = False
    """Listen for other machines without TLS, where the network itself is trusted."""
    drain_s: float = range_field(30.0, 0.0, 86_400.0)
    """Seconds that running generations may continue after Ctrl-C or SIGTERM."""
    trace: str = ""
    """File to which every event of all sessions is written, as JSON lines, for analysis."""
    trace_tokens: str = advanced_field(choice_field(common.HASHED, common.TRACE_TOKENS))
    """Form of tokens in a trace. ``hashed`` shows only which tokens are equal; ``plain`` shows the
    tokens themselves."""
    log_level: str = choice_field("warning", common.LOG_LEVELS)
    """Least severe messages that are logged: debug, info, warning or error."""
    log_format: str = choice_field("text", common.LOG_FORMATS)
    """Format of the log: text, or json with one object per line."""
    metrics_port: int | None = range_field(None, 0, 65_535)
    """Port at which Prometheus metrics are served; 0 takes any free one. null serves none."""
    metrics_host: str = common.DEFAULT_HOST
    """Address at which the metrics are served."""

    def __post_init__(self) -> None:
        check_limits(self)
        for name in ("model", "host", "metrics_host"):
            common.check_not_empty(name, getattr(self, name))
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
            "engine_flags": (list(self.engine_flags), "only --engine vllm has any: leave them out")
        }
        if self.engine == VLLM:
            flag_advice = "give its flag after --"
            draft_advice = "vLLM has a drafter of its own: give its --speculative-config after --"
            rules_advice = "vLLM accepts by the rule exact only: leave rules out"
            device_advice = "must be auto: choose the GPUs of vLLM by CUDA_VISIBLE_DEVICES"
            cache_advice, limits = f"vLLM sizes its own cache: {flag_advice}", self.limits
            wrong = {
                "draft": (self.draft, draft_advice),
                "rules": (list(self.rules), rules_advice),
                "canonical": (
                    self.canonical,
                    "only the native engine can be canonical: leave it out",
                ),
                "threads": (self.threads, "vLLM chooses its own threads: leave it out"),
                "kv_budget": (limits.kv_budget, cache_advice),
                "gpu_memory_utilization": (limits.gpu_memory_utilization, cache_advice),
                "quantize": (self.quantize, f"vLLM has formats of its own: {flag_advice}"),
                "device": (self.device.removeprefix("auto"), device_advice),
            }
        for name, (value, why) in wrong.items():
            if value:
                raise ValueError(f"{name} is {value!r}, but {why}")

    @property
    def address(self) -> str:
        return common.join_host_port(self.host, self.port)
