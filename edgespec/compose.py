"""The composition root: from configuration to running parts.

The one place that knows which class stands behind which setting. Heavy libraries are loaded by the
function that needs them; one that is missing is a ``SetupError`` with the line that installs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from edgespec.access import DeviceAccess, ServerAccess, device_access
from edgespec.agent.agent import Agent, AgentOptions
from edgespec.agent.conversation import current_conversation
from edgespec.agent.machine_watch import MachineWatch
from edgespec.agent.text import TextDecoder
from edgespec.agent.verifier_pool import VerifierPool
from edgespec.config import AgentConfig, LinkSection, PolicyName, PolicySection, VerifierConfig
from edgespec.config.verifier import VLLM
from edgespec.constraint_readers import device_reader, verifier_reader
from edgespec.core.device.draft_ladder import DraftLadder
from edgespec.core.device.learned import Learned
from edgespec.core.device.policy import DEFAULT_WIDTH, DraftPolicy
from edgespec.core.device.policy_names import DEFAULT_POLICY, named_policy
from edgespec.core.device.preference import Prefer
from edgespec.core.network.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.core.protocol.messages import Limits
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.fair_shares import ShareLimits
from edgespec.core.verifier.stream_budget import UplinkLimits
from edgespec.export_cache import cache_folder
from edgespec.many_verifiers import verifiers_of
from edgespec.many_verifiers import with_port as with_port
from edgespec.models.chat_template import ChatTokenizer
from edgespec.models.draft_sources import resolve_texts
from edgespec.models.folders import DRAFT_MANIFEST, Role, model_info, resolve_model
from edgespec.models.toy_tokenizer import ToyTokenizer
from edgespec.models.vocabulary import vocabulary_fingerprint
from edgespec.models.vocabulary_info import vocabulary_info
from edgespec.ports import Drafter, TargetModel, Transport, pass_shape
from edgespec.row_cost_file import RowCostFile
from edgespec.setup_error import SetupError as SetupError
from edgespec.setup_error import needs as needs
from edgespec.target_loading import TOY as TOY
from edgespec.target_loading import TOY_CONTEXT_LENGTH as TOY_CONTEXT_LENGTH
from edgespec.target_loading import TOY_MODEL as TOY_MODEL
from edgespec.target_loading import load_target as load_target
from edgespec.target_loading import packed_texts, toy_info
from edgespec.target_loading import prefer_reproducible_products as prefer_reproducible_products
from edgespec.target_loading import target_mode as target_mode
from edgespec.telemetry.current_span import current_trace_parent
from edgespec.telemetry.machine_sensors import MachineSensors
from edgespec.telemetry.trace import Tracer
from edgespec.telemetry.watch import Watch
from edgespec.verifier.daemon import Verifier

if TYPE_CHECKING:
    from edgespec.transport.grpc_client import GrpcTransport
    from edgespec.transport.grpc_server import GrpcServer
    from edgespec.transport.wire_limits import WireLimits

BUNDLED, NONE, RANDOM, LOOKUP = "bundled", "none", "random", "lookup"
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
        texts=partial(packed_texts, config.model),
    )
    return verifier, server


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
        return toy_info().vocabulary
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
    transport = dial(address, access, server_name)
    if link is None or not link.shaped:
        return transport
    from edgespec.transport.shaped import ShapedTransport

    up, down = link_models(link)
    return ShapedTransport(transport, up, down, limits=_wire_limits())


def dial(address: str, access: DeviceAccess | None = None, server_name: str = "") -> GrpcTransport:
    """``connect`` without an emulated link."""
    with needs("grpc", "edgespec"):
        from edgespec.transport.grpc_client import GrpcTransport
    access = access or DeviceAccess()
    return GrpcTransport(
        with_port(address),
        limits=_wire_limits(),
        credentials=access.credentials,
        shows_certificate=access.shows_certificate,
        server_name=access.server_name or server_name,
        api_key=access.key_for(with_port(address)),
        trace_parent=current_trace_parent,
        conversation=current_conversation,
    )


def _wire_limits() -> WireLimits:
    from edgespec.transport.wire_limits import WireLimits

    return WireLimits.for_context(_MAX_CONTEXT_LENGTH)


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
    name: PolicyName | str = DEFAULT_POLICY,
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
    options = agent_options(config, vocabulary_of(reference))
    drafter = load_drafter(config, say=say)
    if drafter is not None and config.policy.leaves > 1:
        known = RowCostFile(cache_folder(), config.draft)
        options = replace(options, learned=Learned(rows=known.read()), keep=known.keep)
    encode, stream, read = tokenizer.encode, tokenizer.stream, device_reader(reference)
    transport = verifier_transport(config)
    return Agent(transport, drafter, encode, stream, options, tracer=tracer, read_constraint=read)


def verifier_transport(config: AgentConfig) -> Transport | VerifierPool:
    """To the verifiers of ``config``, behind its emulated link. Raises ``ConfigError``."""
    access = device_access(config)
    return verifiers_of(config, access, partial(connect, link=config.link, access=access))


def agent_options(config: AgentConfig, vocabulary: str) -> AgentOptions:
    """The options of an agent whose tokenizer has this fingerprint; empty is not checked."""
    policy = config.policy
    return AgentOptions(
        policy=build_policy(policy.name, policy.gamma, policy.width, policy.window, policy.prefer),
        prefer=policy.prefer,
        watch=MachineWatch(DraftLadder(), MachineSensors().read) if config.draft.ladder else None,
        run_ahead=policy.run_ahead,
        reconnect=config.patience,
        model=config.model,
        vocabulary=vocabulary,
        draft_caches=config.draft.caches,
        offline=config.offline_policy,
    )


def _drafter(config: AgentConfig, say: Say) -> Drafter | None:
    draft = config.draft
    if draft.model == NONE:
        return None
    if draft.model == TOY:
        from edgespec.drafters.toy import ToyDrafter

        return ToyDrafter(TOY_MODEL.perturbed(_TOY_DRAFT_NOISE), toy_info())
    if draft.model == LOOKUP:
        from edgespec.drafters.model_free import ModelFreeDrafter

        if (reference := tokenizer_reference(config)) == TOY:
            return ModelFreeDrafter(toy_info())
        longest, folder = draft.context_length, resolve_model(reference, Role.DRAFT)
        return ModelFreeDrafter(vocabulary_info(folder, longest or _MAX_CONTEXT_LENGTH))
    if draft.model == RANDOM:
        from edgespec.drafters.adversarial import RandomDrafter

        reference = tokenizer_reference(config)
        if reference == TOY:
            return RandomDrafter(toy_info())
        return RandomDrafter(model_info(resolve_texts(reference)))
    from edgespec.model_drafter import model_drafter

    tokenizer = "" if config.tokenizer == TOY else config.tokenizer
    return model_drafter(draft, tokenizer, config.policy, say)
