"""The composition root: from configuration to running parts.

The one place that knows which class stands behind which setting. Heavy libraries are loaded by the
function that needs them; one that is missing is a ``SetupError`` with the line that installs it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgespec.access import DeviceAccess, ServerAccess, device_access
from edgespec.agent.agent import Agent, AgentOptions
from edgespec.agent.machine_watch import MachineWatch
from edgespec.agent.text import TextDecoder
from edgespec.config import AgentConfig, LinkSection, PolicyName, PolicySection, VerifierConfig
from edgespec.config.sections import VLLM
from edgespec.constraint_readers import device_reader, verifier_reader
from edgespec.core.device.draft_ladder import DraftLadder
from edgespec.core.device.policy import DEFAULT_WIDTH, DraftPolicy
from edgespec.core.device.policy_names import named_policy
from edgespec.core.device.preference import Prefer
from edgespec.core.network.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.core.protocol.messages import Limits
from edgespec.core.protocol.work import CacheShape
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.fair_shares import ShareLimits
from edgespec.core.verifier.stream_budget import UplinkLimits
from edgespec.engines.loading import vllm_target
from edgespec.many_verifiers import verifiers_of
from edgespec.many_verifiers import with_port as with_port
from edgespec.models.chat_template import ChatTokenizer
from edgespec.models.draft_sources import resolve_texts
from edgespec.models.folders import DRAFT_MANIFEST, Role, check_folder, model_info, resolve_model
from edgespec.models.toy_tokenizer import TOY_ALPHABET, TOY_EOS, ToyTokenizer
from edgespec.models.vocabulary import vocabulary_fingerprint
from edgespec.models.vocabulary_info import vocabulary_info
from edgespec.models.weights import text_fingerprint, weights_fingerprint
from edgespec.ports import Drafter, ModelInfo, TargetModel, Transport, pass_shape
from edgespec.setup_error import SetupError as SetupError
from edgespec.setup_error import needs as needs
from edgespec.target_memory import pool_budget
from edgespec.telemetry.current_span import current_trace_parent
from edgespec.telemetry.machine_sensors import MachineSensors
from edgespec.telemetry.trace import Tracer
from edgespec.telemetry.watch import Watch
from edgespec.verifier.daemon import Verifier

if TYPE_CHECKING:
    from edgespec.transport.grpc_server import GrpcServer

BUNDLED, TOY, NONE, RANDOM, LOOKUP = "bundled", "toy", "none", "random", "lookup"
TOY_CONTEXT_LENGTH = 4096
_TOY_BLOCK_TOKENS = 16
TOY_MODEL = ToyModel(len(TOY_ALPHABET), order=3, sharpness=3.0, eos_token=TOY_EOS)
# Right in about four of five contexts, as a good draft is.
_TOY_DRAFT_NOISE = 0.25
# What a device sends is bounded by the verifier's context, which it learns later: the longest that
# can be configured.
_MAX_CONTEXT_LENGTH = 1 << 20

Say = Callable[[str], None]


class PromptTokenizer(ChatTokenizer, Protocol):
    """The text side of a model: ``models.TextTokenizer`` or the toy's."""

    @property
    def has_chat_template(self) -> bool: ...

    def stream(self, prompt: Sequence[int] = ()) -> TextDecoder: ...


# --- the verifier ---------------------------------------------------------------------------


def load_target(config: VerifierConfig) -> TargetModel:
    """The target model of ``config``, paced when it says so; canonical mode has been self-tested.

    Raises ``SetupError``, or ``ValueError`` naming the file or the setting.
    """
    if config.engine == VLLM:
        target: TargetModel = vllm_target(config, model_name(config))
    else:
        target = _toy_target(config) if config.model == TOY else _torch_target(config)
    if config.pacing.pass_ms == 0.0 and config.pacing.row_ms == 0.0:
        return target
    from edgespec.targets.paced import PacedTarget

    return PacedTarget(target, config.pacing.pass_ms, config.pacing.row_ms)


def target_mode(target: TargetModel) -> str:
    """How the target computes, in words, for the ready line."""
    inner = getattr(target, "inner", target)
    words = [str(getattr(inner, "mode", "toy"))]
    if inner is not target:
        words.append("emulated pass time")
    return ", ".join(words)


def build_verifier(
    config: VerifierConfig,
    *,
    target: TargetModel | None = None,
    tracer: Tracer | None = None,
    access: ServerAccess | None = None,
    watch: Watch | None = None,
) -> tuple[Verifier, GrpcServer]:
    """A verifier and the server that listens for it; call ``await server.start()``. ``access`` None
    reads the keys and certificates that ``config`` names; ``watch`` counts what both do."""
    with needs("grpc", "edgespec"):
        from edgespec.transport.grpc_server import GrpcServer
        from edgespec.transport.wire_limits import WireLimits
    access = access or ServerAccess(config)
    target = target or load_target(config)
    bounds, shape = config.limits, pass_shape(target)
    context_length = target.info.context_length
    if target.cache is not None:  # the longest text has to fit by itself
        context_length = min(context_length, target.cache.tokens)
    limits = Limits(
        context_length=context_length,
        max_nodes_outstanding=bounds.max_nodes_outstanding,
        max_nodes_per_pass=min(bounds.max_nodes_per_pass, shape.max_nodes),
        max_unreceived=bounds.max_unreceived,
        lease_s=bounds.lease_s,
    )
    engine_limits = EngineLimits(
        max_sessions=bounds.max_sessions,
        max_rows_per_pass=min(bounds.max_rows_per_pass, shape.max_rows),
        max_rows_per_session=bounds.max_rows_per_session,
        max_sessions_per_peer=max(1, round(bounds.max_sessions * bounds.peer_share)),
        cache=target.cache,
        share_prefixes=bounds.share_prefixes,
        stall_s=bounds.stall_s,
        server_drafts=config.server_drafts,
        trees=shape.trees,
    )
    streams = None if watch is None else watch.streams
    read = None if config.engine == VLLM else verifier_reader(config.model)
    verifier = Verifier(
        target, limits, engine_limits, tracer=tracer, telemetry=streams, read_constraint=read
    )
    wire = WireLimits.for_context(limits.context_length)
    # Streams beyond the sessions are let in, so that they are told why they are refused.
    server = GrpcServer(
        config.address,
        verifier.serve,
        lambda: verifier.info,
        limits=wire,
        max_streams=bounds.max_sessions + 64,
        peer_share=bounds.peer_share,
        meter=None if watch is None else watch.traffic,
        refused=None if streams is None else streams.refused,
        waits=None if watch is None else watch.waits.add,
        uplink=UplinkLimits(
            shares=ShareLimits(bounds.shared_message_rate, bounds.least_message_rate),
            address_rate=bounds.address_message_rate,
        ),
        credentials=access.credentials,
        authenticate=access.authenticate if access.asks_for_keys else None,
    )
    return verifier, server


def model_name(config: VerifierConfig) -> str:
    """What devices may ask for: the name given, the folder's, or the reference itself."""
    if config.name:
        return config.name
    path = Path(config.model).expanduser()
    return path.resolve().name if path.is_dir() else config.model


def prefer_reproducible_products() -> None:
    """Ask MKL, if it is there, for products whose bits do not depend on the number of rows.

    That is a promise of Intel's library (conditional numerical reproducibility, strict), which
    makes canonical mode cheaper; canonical mode tries what holds and does not rely on it. It has
    an effect only before this process's first matrix product. A value that is set is left alone.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def _toy_target(config: VerifierConfig) -> TargetModel:
    from edgespec.targets.toy import ToyTarget

    return ToyTarget(
        TOY_MODEL,
        name=model_name(config),
        vocabulary=_toy_info().vocabulary,
        fingerprint=text_fingerprint(repr(TOY_MODEL)),
        context_length=min(config.max_model_len or TOY_CONTEXT_LENGTH, TOY_CONTEXT_LENGTH),
        max_sessions=config.limits.max_sessions,
        cache=CacheShape(
            -(-config.limits.max_cached_tokens // _TOY_BLOCK_TOKENS), _TOY_BLOCK_TOKENS
        ),
    )


def _torch_target(config: VerifierConfig) -> TargetModel:
    folder = resolve_model(config.model, Role.TARGET)
    check_folder(folder, Role.TARGET)
    info = model_info(folder)
    if config.canonical is not False:
        prefer_reproducible_products()
    with needs("torch", "edgespec[server]"):
        from edgespec.targets.tensor_parallel import torch_target
    try:
        return torch_target(
            str(folder),
            ranks=config.tensor_parallel.size,
            pass_within_s=config.tensor_parallel.pass_within_s,
            name=model_name(config),
            vocabulary=info.vocabulary,
            weights=weights_fingerprint(folder, info.vocabulary),
            dtype=config.dtype,
            device=config.device,
            max_cached_tokens=config.limits.max_cached_tokens,
            max_sessions=config.limits.max_sessions,
            context_length=config.max_model_len,
            canonical=config.canonical,
            model_threads=config.threads,
            quantize=config.quantize,
            pool_budget=pool_budget(config.limits),
        )
    except (ValueError, OSError):
        raise
    except Exception as error:  # the ranks, safetensors and torch have exceptions of their own
        raise SetupError(f"{folder}: the model cannot be loaded: {error}") from error


# --- the device -----------------------------------------------------------------------------


def load_drafter(config: AgentConfig, *, say: Say | None = None) -> Drafter | None:
    """The drafter of ``config.draft``, paced or routed when it says so; None for ``none``.

    A Hugging Face folder is exported into the cache first; ``say`` hears of it. Raises
    ``SetupError``, or ``ValueError`` naming the file or the setting.
    """
    drafter = _drafter(config, say or (lambda text: None))
    if drafter is not None and config.draft.draft_ms:
        from edgespec.drafters.paced import PacedDrafter

        drafter = PacedDrafter(drafter, config.draft.draft_ms, row_ms=config.draft.row_ms)
    if drafter is not None and config.draft.lookup and config.draft.model != LOOKUP:
        from edgespec.drafters.routed import RoutedDrafter

        drafter = RoutedDrafter(drafter)
    return drafter


def load_tokenizer(reference: str) -> PromptTokenizer:
    """The tokenizer of a model reference. Raises ``ValueError`` naming the file."""
    if reference == TOY:
        return ToyTokenizer()
    from edgespec.models.tokenizer import TextTokenizer

    # The bundled one is read from the draft's folder: a device may hold no other.
    return TextTokenizer(resolve_texts(reference))


def tokenizer_reference(config: AgentConfig) -> str:
    """Which tokenizer goes with ``config``: the one named, the draft's, else the bundled one."""
    has_no_model = config.draft.model in (NONE, RANDOM, LOOKUP)
    return config.tokenizer or (BUNDLED if has_no_model else config.draft.model)


def vocabulary_of(reference: str) -> str:
    """The fingerprint of a reference's vocabulary. Raises ``ValueError`` naming the file."""
    if reference == TOY:
        return _toy_info().vocabulary
    folder = resolve_texts(reference)
    if (folder / DRAFT_MANIFEST).is_file():
        return model_info(folder).vocabulary
    return vocabulary_fingerprint(folder / "tokenizer.json")


def connect(
    address: str,
    link: LinkSection | None = None,
    access: DeviceAccess | None = None,
    server_name: str = "",
) -> Transport:
    """A transport to the verifier at ``address``, behind an emulated link if that has any delay.

    Nothing is sent before the first use. A missing port means the default one. ``server_name`` is
    what its certificate has to name if ``access`` does not say, and not the host. Raises
    ``ConfigError`` when ``access`` holds a key that others could read on its way there.
    """
    with needs("grpc", "edgespec"):
        from edgespec.transport.grpc_client import GrpcTransport
        from edgespec.transport.shaped import ShapedTransport
        from edgespec.transport.wire_limits import WireLimits
    wire = WireLimits.for_context(_MAX_CONTEXT_LENGTH)
    access = access or DeviceAccess()
    transport = GrpcTransport(
        with_port(address),
        limits=wire,
        credentials=access.credentials,
        shows_certificate=access.shows_certificate,
        server_name=access.server_name or server_name,
        api_key=access.key_for(with_port(address)),
        trace_parent=current_trace_parent,
    )
    if link is None or not link.shaped:
        return transport
    up, down = link_models(link)
    return ShapedTransport(transport, up, down, limits=wire)


def link_models(link: LinkSection) -> tuple[LinkModel, LinkModel]:
    """Both directions of an emulated link: half the round trip each, queues of their own."""
    bits_per_s = link.mbps * 1e6 if link.mbps else math.inf
    settings = LinkSettings(
        one_way_s=link.rtt_ms / 2e3, jitter_s=link.jitter_ms / 1e3, loss=link.loss, seed=link.seed
    )
    up = LinkModel(settings, SharedQueue(bits_per_s))
    down = LinkModel(replace(settings, seed=link.seed + 1), SharedQueue(bits_per_s))
    return up, down


def build_policy(
    name: PolicyName | str = PolicyName.WINDOWED,
    gamma: int | None = None,
    width: int = DEFAULT_WIDTH,
    window: int | None = None,
    prefer: Prefer | str = Prefer.SPEED,
) -> DraftPolicy:
    """A draft policy by name; ``gamma`` and ``window`` None adapt. Raises ``ValueError``."""
    name = PolicyName(name)
    PolicySection(name, gamma, width, window)  # checks the ranges
    return named_policy(name, gamma, width, window, Prefer(prefer))


def build_agent(
    config: AgentConfig, *, tracer: Tracer | None = None, say: Say | None = None
) -> Agent:
    """A ready agent; it connects at its first generation. Raises as ``load_drafter`` does."""
    tokenizer = load_tokenizer(reference := tokenizer_reference(config))
    access = device_access(config)
    dial = partial(connect, link=config.link, access=access)
    transport = verifiers_of(config, access, dial)
    policy = config.policy
    options = AgentOptions(
        policy=build_policy(policy.name, policy.gamma, policy.width, policy.window, policy.prefer),
        prefer=policy.prefer,
        watch=MachineWatch(DraftLadder(), MachineSensors().read) if config.draft.ladder else None,
        run_ahead=policy.run_ahead,
        reconnect=config.patience,
        model=config.model,
        vocabulary=vocabulary_of(reference),
        draft_caches=config.draft.caches,
        offline=config.offline_policy,
    )
    drafter = load_drafter(config, say=say)
    encode, stream, read = tokenizer.encode, tokenizer.stream, device_reader(reference)
    return Agent(transport, drafter, encode, stream, options, tracer=tracer, read_constraint=read)


def _drafter(config: AgentConfig, say: Say) -> Drafter | None:
    draft = config.draft
    if draft.model == NONE:
        return None
    if draft.model == TOY:
        from edgespec.drafters.toy import ToyDrafter

        return ToyDrafter(TOY_MODEL.perturbed(_TOY_DRAFT_NOISE), _toy_info())
    if draft.model == LOOKUP:
        from edgespec.drafters.model_free import ModelFreeDrafter

        if (reference := tokenizer_reference(config)) == TOY:
            return ModelFreeDrafter(_toy_info())
        longest, folder = draft.context_length, resolve_model(reference, Role.DRAFT)
        return ModelFreeDrafter(vocabulary_info(folder, longest or _MAX_CONTEXT_LENGTH))
    if draft.model == RANDOM:
        from edgespec.drafters.adversarial import RandomDrafter

        reference = tokenizer_reference(config)
        if reference == TOY:
            return RandomDrafter(_toy_info())
        return RandomDrafter(model_info(resolve_texts(reference)))
    from edgespec.model_drafter import model_drafter

    tokenizer = "" if config.tokenizer == TOY else config.tokenizer
    return model_drafter(draft, tokenizer, config.policy, say)


def _toy_info() -> ModelInfo:
    size = len(TOY_ALPHABET)
    return ModelInfo("toy", f"toy-{size}", size, TOY_CONTEXT_LENGTH, (TOY_EOS,))
