"""The device, from its configuration to running parts.

This is the one place that knows which class stands behind which setting of a device. Heavy
libraries are loaded by the function that needs them. A missing one is a ``SetupError`` with the
line that installs it.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.config import DEFAULT_PORT, AgentConfig, ConfigError, LinkSection
from edgespec.config.common import SetupError, require_library
from edgespec.config.device import FALLBACK_DRAFT
from edgespec.core.association.failover import Failover
from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.device.memory import (
    Held,
    MemoryTerm,
    in_mib,
    margin_bytes,
    parse_budget,
    sampling_bytes,
)
from edgespec.core.guarded_drafter import Restrictable
from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.core.ports import PREFILL_CHUNK, Connection, Drafter, ModelInfo, Transport
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import EarlierTexts, TextTables
from edgespec.device import verifier_pool as vp
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.drafter_pool import DrafterPool, in_own_ids
from edgespec.device.drafters.toy import PacedDrafter, RandomDrafter, SilentDrafter, ToyDrafter
from edgespec.device.prober import ProbeResult, probe_all
from edgespec.models import model_source
from edgespec.models.catalogue import Side, find_pair, find_pulled
from edgespec.models.grammar import device_grammar_reader
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.remote_tokenizer import RemoteTokenizer
from edgespec.models.shared_ids import OtherVocabularyError, SharedIds, find_differing_ids
from edgespec.models.text_process import template_worker
from edgespec.models.text_worker import TEMPLATE_BYTES_IN_BUDGET
from edgespec.models.tokenizer import TextTokenizer
from edgespec.models.toy import TOY, TOY_MODEL, ToyTokenizer, toy_info
from edgespec.telemetry.process_memory import machine_memory, resident_bytes
from edgespec.telemetry.recording import Recording, RecordingError
from edgespec.telemetry.trace import Tracer
from edgespec.wire.access import DeviceAccess, load_device_access

if TYPE_CHECKING:
    from edgespec.device.local_model import LocalModel
    from edgespec.models.translation import Translation
    from edgespec.wire.codec import WireLimits
    from edgespec.wire.grpc_client import GrpcTransport

BUNDLED, NONE, RANDOM, LOOKUP = "bundled", "none", "random", "lookup"
# With this noise the toy draft is right in about four of five contexts, as a good draft is.
_TOY_DRAFT_NOISE = 0.25
FALLBACK_CONTEXT = 2048
"""Longest context, in tokens, of a fallback in a memory budget."""
# The verifier's context bounds a device's messages. This is the longest that can be configured.
_MAX_CONTEXT_LENGTH = 1 << 20
_MAX_LEADERS = 4096

Say = Callable[[str], None]
Lease = Callable[..., Transport]
"""Returns a transport that shares a connection (``Connections.lease``)."""
PromptTokenizer = model_source.PromptTokenizer


def load_drafter(
    config: AgentConfig, *, say: Say | None = None, beside: Fallback | None = None
) -> Drafter | None:
    """Return the drafter of ``config.draft``, or None for ``none``.

    It is slowed down if the configuration sets ``draft_ms``. A Hugging Face folder is exported into
    the cache first; ``say`` is called with a line about it. A memory budget leaves room for the
    model ``beside`` it. Raises ``SetupError``, and ``ValueError`` naming the file or the
    setting."""
    reserved = () if beside is None else beside.growth
    drafter = _make_drafter(config, say or (lambda text: None), reserved)
    if drafter is not None and config.draft.draft_ms:
        drafter = PacedDrafter(drafter, config.draft.draft_ms, time.sleep, time.monotonic)
    return drafter


_MODEL_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_tokenizer(reference: str) -> PromptTokenizer:
    """Return the tokenizer of a model reference (``ModelSource.load_tokenizer``)."""
    return resolve_source(reference, Purpose.TEXTS).load_tokenizer()


def tokenizer_reference(config: AgentConfig) -> str:
    """Return the tokenizer's reference: the one in ``config``, else the draft's, else the bundled
    one."""
    has_no_model = config.draft.model in (NONE, RANDOM, LOOKUP)
    return config.tokenizer or (BUNDLED if has_no_model else config.draft.model)


def with_model_sampling(sampling: SamplingParams, reference: str) -> SamplingParams:
    """Return ``sampling``, or the model's defaults if nothing of it was chosen.

    The defaults are in ``generation_config.json`` beside the tokenizer ``reference``. Raises
    ``ValueError`` naming the file, the key and the value."""
    neutral = SamplingParams()
    if any(getattr(sampling, name) != getattr(neutral, name) for name in _MODEL_SAMPLING):
        return sampling
    defaults = resolve_source(reference, Purpose.TEXTS).sampling
    return replace(sampling, **{name: getattr(defaults, name) for name in _MODEL_SAMPLING})


def vocabulary_of(reference: str) -> str:
    """Return the fingerprint of a reference's vocabulary. Raises ``ValueError`` naming the file."""
    return resolve_source(reference, Purpose.TEXTS).vocabulary


def connect(
    address: str,
    link: LinkSection | None = None,
    access: DeviceAccess | None = None,
    server_name: str = "",
) -> Connection:
    """Return a transport to the verifier at ``address``, behind an emulated link if one is
    configured.

    Nothing is sent before the first use. A missing port means the default one. ``server_name`` is
    the name that the verifier's certificate must carry, unless ``access`` names one; if both are
    empty, it is the host. Raises ``ConfigError`` if ``access`` holds an API key that others could
    read on the way."""
    transport = dial(address, access, server_name)
    if link is None or not link.shaped:
        return transport
    from edgespec.wire.shaped import PLAIN_TRIPS, TLS_TRIPS, ShapedTransport

    up, down = link_models(link)
    trips = TLS_TRIPS if access is not None and access.credentials is not None else PLAIN_TRIPS
    return ShapedTransport(transport, up, down, limits=_wire_limits(), handshake_trips=trips)


def dial(address: str, access: DeviceAccess | None = None, server_name: str = "") -> GrpcTransport:
    """Return a transport like ``connect``, but without an emulated link."""
    with require_library("grpc", "edgespec"):
        from edgespec.wire.grpc_client import GrpcTransport
    access = access or DeviceAccess()
    access = replace(access, server_name=access.server_name or server_name)
    limits, conversation = _wire_limits(), vp.current_conversation
    return GrpcTransport(with_port(address), access, limits=limits, conversation=conversation)


def _wire_limits() -> WireLimits:
    from edgespec.wire.codec import WireLimits

    return WireLimits.for_context(_MAX_CONTEXT_LENGTH)


def link_models(link: LinkSection) -> tuple[LinkModel, LinkModel]:
    """Return both directions of an emulated link, each with half the round trip and its own
    queue."""
    bits_per_s = link.mbps * 1e6 if link.mbps else math.inf
    settings = LinkSettings(
        one_way_s=link.rtt_ms / 2e3, jitter_s=link.jitter_ms / 1e3, loss=link.loss, seed=link.seed
    )
    up = LinkModel(settings, SharedQueue(bits_per_s))
    return up, LinkModel(replace(settings, seed=link.seed + 1), SharedQueue(bits_per_s))


def build_agent(
    config: AgentConfig,
    *,
    tracer: Tracer | None = None,
    say: Say | None = None,
    target: ModelInfo | None = None,
    beside: Fallback | None = None,
    lease: Lease | None = None,
) -> Agent:
    """Return a ready agent.

    ``target`` is the model that its verifier serves, or None if that is not known. ``beside`` is
    a model that was loaded before. The transports come from ``lease``; without it the agent
    connects by itself at its first generation. Raises the errors of ``load_drafter`` and
    ``find_translation``."""
    tokenizer = load_tokenizer(reference := tokenizer_reference(config))
    if config.draft.memory_budget:
        template_worker().most_bytes = TEMPLATE_BYTES_IN_BUDGET
    options = agent_options(config, vocabulary_of(reference))
    add_corpus(options.text_tables, config, tokenizer, say)
    pair = find_translation(config, options.vocabulary, target)  # A budget counts its tables.
    drafter = load_drafter(config, say=say, beside=beside)
    options, drafter = fit_drafter(options, drafter, config, target, pair)
    if pair is not None and say is not None:
        say(describe_pair(pair))
    encode, stream, read = tokenizer.encode, tokenizer.stream, device_grammar_reader(reference)
    return Agent(
        verifier_transport(config, lease),
        drafter,
        encode,
        stream,
        options,
        tracer=tracer,
        read_constraint=read,
        encode_continuation=partial(encode, add_special_tokens=False),
    )


# --- a model that answers while no verifier can be reached ----------------------------------------


@dataclass(frozen=True, slots=True)
class Fallback:
    """The model that ``AgentConfig.fallback`` names, before the agent is built."""

    reference: str
    """The reference of the model, from which its tokenizer is loaded."""
    drafter: Drafter | None = None
    """The loaded model. None: it is the agent's own draft model."""
    growth: tuple[MemoryTerm, ...] = ()
    """Memory that the model takes while it writes, beyond what it holds when it is loaded."""


def fallback_reference(config: AgentConfig) -> str:
    """Return the reference of the model that ``config.fallback`` names."""
    return config.draft.model if config.fallback == FALLBACK_DRAFT else config.fallback


def load_fallback(config: AgentConfig, say: Say) -> Fallback | None:
    """Return the fallback of ``config``, or None if it has none. Call it before the agent is built,
    so that a memory budget counts the model.

    In a memory budget a model of its own has a context of at most ``FALLBACK_CONTEXT`` tokens.
    Raises what ``load_drafter`` raises."""
    if not config.fallback:
        return None
    reference, has_budget = fallback_reference(config), bool(config.draft.memory_budget)
    if config.fallback == FALLBACK_DRAFT:
        return Fallback(reference)
    draft = replace(
        config.draft, model=reference, memory_budget="", window=0, lookup=False, corpus=()
    )
    if has_budget:
        longest = resolve_source(reference, Purpose.TEXTS).info.context_length
        draft = replace(draft, context_length=min(longest, FALLBACK_CONTEXT))
    drafter = _make_drafter(replace(config, draft=draft, tokenizer="", fallback=""), say)
    assert drafter is not None  # ``AgentConfig`` refuses words that name no model
    if not has_budget:
        return Fallback(reference, drafter)
    return Fallback(reference, drafter, (_plan_growth(drafter, config.draft.memory_budget),))


def _plan_growth(drafter: Drafter, budget: str) -> MemoryTerm:
    """Return the memory that a loaded model takes while it writes a text of its whole context. Its
    first run is made here, because it loads what is measured as a part of the process. Raises
    ``SetupError`` for a model whose memory cannot be bounded, or which does not fit the budget."""
    if not isinstance(drafter, Restrictable):
        raise SetupError(
            "fallback has a memory that cannot be bounded: leave out draft.memory_budget"
        )
    drafter.begin(1, SamplingParams())
    drafter.step(0, (0,) * PREFILL_CHUNK, 1)
    length, ids = drafter.info.context_length, drafter.info.vocabulary_size
    size = drafter.growth_bytes(length) + sampling_bytes(ids)
    limit_bytes = parse_budget(budget).resolve(machine_memory())
    needed_bytes = resident_bytes() + size + margin_bytes(limit_bytes)
    if needed_bytes > limit_bytes:
        raise SetupError(
            f"memory budget is {in_mib(limit_bytes)}, but this process needs at least"
            f" {in_mib(needed_bytes)} with the fallback {drafter.info.name!r}: allow more, or"
            " choose a smaller one (--fallback draft)"
        )
    why = f"keys and values of {length} tokens of the model that answers without a verifier"
    return MemoryTerm("fallback", size, why, Held.RESERVED)


def local_model(fallback: Fallback, agent: Agent) -> LocalModel:
    """Return the model of ``fallback``, ready to write. If it is the draft model, it shares the
    caches of ``agent``; otherwise it has as many of its own, or one in a memory budget. Raises
    ``ValueError`` naming the file of a tokenizer."""
    if fallback.drafter is None:
        return _make_local_model(fallback.reference, agent.drafter, agent.drafter_pool)
    caches = 1 if fallback.growth else agent.options.draft_caches
    return _make_local_model(fallback.reference, fallback.drafter, caches=caches)


def open_local_model(config: AgentConfig, say: Say) -> LocalModel:
    """Return the fallback of ``config`` without an agent, ready to write one text at a time. Raises
    what ``load_fallback`` and ``load_drafter`` raise."""
    fallback = load_fallback(config, say)
    assert fallback is not None
    drafter = fallback.drafter or load_drafter(config, say=say)
    return _make_local_model(fallback.reference, drafter, caches=1)


def _make_local_model(
    reference: str, drafter: Drafter | None, pool: DrafterPool | None = None, caches: int = 1
) -> LocalModel:
    """Return a model on ``drafter``, in the caches of ``pool`` or in its own."""
    from edgespec.device.local_model import LocalModel, with_own_context

    assert drafter is not None  # ``AgentConfig`` refuses a fallback without a draft model
    info = in_own_ids(drafter).info
    source = resolve_source(reference, Purpose.TEXTS)
    return LocalModel(
        with_own_context(info, source.info),
        pool or DrafterPool(drafter, caches),
        source.load_tokenizer(),
        read_constraint=device_grammar_reader(reference),
        owns_pool=pool is None,
    )


def find_translation(
    config: AgentConfig, vocabulary: str, target: ModelInfo | None = None
) -> Translation | None:
    """Return how the ids of a ``vocabulary`` become the draft's and back, for a draft of another
    family of tokenizers. None if ids are shared, or if there is no draft model.

    ``target`` is the model whose vocabulary it is, if that is known. Raises ``SetupError`` for
    tokenizers that cannot be translated, and ``ValueError`` naming a file."""
    if not vocabulary or _shares_ids(config, vocabulary, target):
        return None
    from edgespec.models.byte_vocabulary import ByteVocabulary, NoBytesError
    from edgespec.models.translation import Translation

    reference = tokenizer_reference(config)
    target_name = reference if target is None else target.name
    source = resolve_source(config.draft.model, Purpose.TEXTS)
    try:
        return Translation(
            ByteVocabulary(_load_pieces(reference), target_name),
            ByteVocabulary(_load_pieces(config.draft.model), source.name),
            target_ends=() if target is None else target.eos_token_ids,
            draft_ends=source.info.eos_token_ids,
        )
    except NoBytesError as error:
        raise _cannot_translate(config, error) from error


def _shares_ids(config: AgentConfig, vocabulary: str, target: ModelInfo | None) -> bool:
    """Return whether the draft's vocabulary is ``vocabulary``, or one of its family."""
    if config.draft.model in (NONE, TOY, RANDOM, LOOKUP):
        return True
    if vocabulary_of(config.draft.model) == vocabulary:
        return True
    try:
        _find_ids_apart(config, target)
    except OtherVocabularyError:
        if TOY in (config.tokenizer, config.draft.model):
            raise
        return False
    return True


def _load_pieces(reference: str) -> TextTokenizer | RemoteTokenizer:
    """Return a tokenizer that can be translated. Raises ``SetupError`` for the toy's."""
    tokenizer = load_tokenizer(reference)
    if isinstance(tokenizer, ToyTokenizer):
        raise SetupError("the toy has letters only: its drafts are the toy's or random")
    return tokenizer


def _cannot_translate(config: AgentConfig, error: ValueError) -> SetupError:
    return SetupError(
        f"draft {config.draft.model!r} has another tokenizer than the target, and cannot be"
        f" translated: {error}; give --draft a model of the target's family, or lookup"
    )


def describe_pair(pair: Translation) -> str:
    """Return one line for users about a translated draft."""
    from edgespec.models.translation import describe_translation

    return describe_translation(pair)


def fit_drafter(
    options: AgentOptions,
    drafter: Drafter | None,
    config: AgentConfig,
    target: ModelInfo | None = None,
    pair: Translation | None = None,
) -> tuple[AgentOptions, Drafter | None]:
    """Return ``options`` and the drafter in the ids of the target: translated by ``pair`` if that
    is given, else with the ids that both share. Raises what ``with_shared_ids`` raises."""
    if drafter is None or pair is None:
        return with_shared_ids(options, drafter, config, target), drafter
    from edgespec.device.translating_drafter import TranslatingDrafter

    if target is None:
        target = replace(drafter.info, vocabulary=options.vocabulary, vocabulary_size=0)
        target = replace(target, eos_token_ids=pair.target_ends)
    options = replace(
        options, vocabulary_size=target.vocabulary_size, translated_share=pair.shared_share
    )
    return options, TranslatingDrafter(drafter, pair, target)


def with_shared_ids(
    options: AgentOptions,
    drafter: Drafter | None,
    config: AgentConfig,
    target: ModelInfo | None = None,
) -> AgentOptions:
    """Return ``options`` with the ids that the draft shares with ``options.vocabulary``, which is
    None if it shares all of them.

    Raises ``SetupError`` for a draft whose ids stand for other texts."""
    size = 0 if target is None else target.vocabulary_size
    if drafter is None:
        return replace(options, vocabulary_size=size)
    info = drafter.info
    shared = SharedIds(info.vocabulary_size, size, stand_in=min(info.eos_token_ids, default=0))
    if options.vocabulary and info.vocabulary != options.vocabulary:
        shared = replace(shared, differing=_find_ids_apart(config, target))
    shares_all = info.vocabulary_size == size and not shared.differing
    return replace(options, vocabulary_size=size, shared_ids=None if shares_all else shared)


def with_pulled_draft(config: AgentConfig, target: ModelInfo, say: Say) -> AgentConfig:
    """Return ``config`` with the catalogue's draft for ``target``, if the user chose no draft and
    the verifier serves the target of a pair. ``say`` is called with a line about it.

    Raises ``SetupError`` if that draft was not pulled."""
    pair = find_pair(target.name)
    if config.draft.model != BUNDLED or pair is None:
        return config
    name = target.name
    if find_pulled(name, pair.side_of_weights(Side.DRAFT)) is None:
        if vocabulary_of(BUNDLED) == target.vocabulary:  # a verifier with a name of its own
            return config
        raise SetupError(
            f"the verifier serves {name!r}, whose draft is not on this device\n"
            f"  fetch it:             edgespec pull {name} --only draft\n"
            "  or draft from text:   --draft lookup"
        )
    if vocabulary_of(name) != target.vocabulary:
        return config
    say(f"drafting with {name}, which was pulled (--draft chooses another)")
    return replace(config, draft=replace(config.draft, model=name))


def check_draft(config: AgentConfig, target: ModelInfo) -> None:
    """Check a configuration before anything large is loaded.

    The tokenizer of ``config`` must be that of ``target``. The draft must share its ids, or have a
    tokenizer that can be translated. Raises ``SetupError``, and ``ValueError`` naming the file."""
    reference = tokenizer_reference(config)
    if (own_vocabulary := vocabulary_of(reference)) != target.vocabulary:
        raise SetupError(
            f"the tokenizer of {reference!r} (vocabulary {own_vocabulary}) is not that of the"
            f" verifier's {target.name!r} ({target.vocabulary}); give --draft one that"
            " shares it, or name its tokenizer: --set tokenizer=FOLDER"
        )
    if _shares_ids(config, target.vocabulary, target):
        return
    from edgespec.models.byte_vocabulary import NoBytesError, check_keeps_bytes

    try:
        for name, one in ((target.name, reference), (config.draft.model, config.draft.model)):
            check_keeps_bytes(_load_pieces(one), name)
    except NoBytesError as error:
        raise _cannot_translate(config, error) from error


def _find_ids_apart(config: AgentConfig, target: ModelInfo | None) -> frozenset[int]:
    """Return the ids of the draft that differ from those of the tokenizer of ``config``.

    That tokenizer may come from a stranger, so this process reads none of its files. Raises the
    errors of ``find_differing_ids`` and ``load_tokenizer``."""
    own = load_tokenizer(config.draft.model)
    others = load_tokenizer(tokenizer_reference(config))
    return find_differing_ids(
        own.token_bytes,
        others.token_bytes,
        range(max(own.id_count, others.id_count)),
        draft=config.draft.model,
        target=config.tokenizer if target is None else target.name,
    )


def verifier_transport(
    config: AgentConfig, lease: Lease | None = None
) -> Transport | vp.VerifierPool:
    """Return a transport to the only verifier of ``config``, or a pool of several, by ``lease`` or
    on connections of their own.

    One name may stand for several verifiers. Raises ``ConfigError`` if others could read the API
    key."""
    addresses = tuple(map(with_port, config.verifiers))
    connect_to = lease
    if connect_to is None:
        access = load_device_access(config)
        for address in addresses:
            access.key_for(address)
        connect_to = partial(connect, link=config.link, access=access)
    if len(addresses) == 1 and not vp.is_name(addresses[0]):
        return connect_to(addresses[0])
    failover = Failover(config.failover, config.association, secrets.randbits(32))
    return vp.VerifierPool(vp.VerifierDirectory(addresses, connect_to), failover)


async def probe_verifiers(config: AgentConfig, *, timed: bool = False) -> dict[str, ProbeResult]:
    """Probe the verifiers of ``config``. Return the answers by address. Raises ``ConfigError``."""
    access = load_device_access(config)
    links = {with_port(one): connect(one, access=access) for one in config.verifiers}
    try:
        return await probe_all(links, timed=timed)
    finally:
        await asyncio.gather(*(link.close() for link in links.values()))


def with_port(address: str) -> str:
    """Return ``address``, with the default port if it has none."""
    address = address.strip()
    last = address.rpartition("]")[2]
    return address if ":" in last or "/" in address else f"{address}:{DEFAULT_PORT}"


def agent_options(config: AgentConfig, vocabulary: str) -> AgentOptions:
    """Return the options of an agent whose tokenizer has this fingerprint; empty is not checked.

    Raises ``ConfigError`` for a recording that cannot be written."""
    policy = config.policy
    return AgentOptions(
        policy=make_policy(policy.name, policy.gamma, policy.width, policy.window),
        run_ahead=policy.run_ahead,
        reconnect=config.reconnect,
        model=config.model,
        rule=config.rule,
        vocabulary=vocabulary,
        draft_caches=config.draft.caches,
        text_tables=text_tables(config),
        recording=_open_recording(config),
    )


def _open_recording(config: AgentConfig) -> Recording | None:
    """Return the recording of ``config``, or None. Raises ``ConfigError``."""
    if not config.record:
        return None
    try:
        return Recording(Path(config.record).expanduser(), config.record_mib << 20)
    except RecordingError as error:
        raise ConfigError(f"record: {error}") from None


def text_tables(config: AgentConfig) -> TextTables | None:
    """Return empty tables of texts if ``config`` uses lookup. They take less than 5 MiB."""
    if not (config.draft.from_text or config.draft.model == LOOKUP):
        return None
    return TextTables(ngrams=True, max_leaders=_MAX_LEADERS, earlier=EarlierTexts())


def add_corpus(
    text: TextTables | None, config: AgentConfig, tokenizer: PromptTokenizer, say: Say | None
) -> None:
    """Load the corpus of ``config``, if it has one, into ``text``.

    ``tokenizer`` must be that of ``config``. Raises the errors of ``FollowedCorpus``."""
    if text is None or not config.draft.corpus:
        return
    from edgespec.device.followed_corpus import FollowedCorpus
    from edgespec.device.model_drafter import max_corpus_bytes

    text.corpus = FollowedCorpus(
        config.draft.corpus,
        vocabulary_of(tokenizer_reference(config)),
        partial(tokenizer.encode, add_special_tokens=False),
        say or (lambda text: None),
        max_corpus_bytes(config.draft),
    )


def _make_drafter(
    config: AgentConfig, say: Say, reserved: Sequence[MemoryTerm] = ()
) -> Drafter | None:
    draft = config.draft
    if draft.model == NONE:
        return None
    if draft.model == TOY:
        return ToyDrafter(TOY_MODEL.perturbed(_TOY_DRAFT_NOISE), toy_info())
    reference = tokenizer_reference(config)
    if draft.model == LOOKUP:
        if not config.tokenizer:
            raise ConfigError(
                f"draft.model is {LOOKUP!r}, which has no tokenizer of its own: set tokenizer to a"
                " folder or Hub id of the target (an agent that knows its verifier takes it from"
                " there)"
            )
        source = resolve_source(reference, Purpose.TEXTS)
        info = source.vocabulary_info(draft.context_length or _MAX_CONTEXT_LENGTH)
        return SilentDrafter(replace(info, name=LOOKUP))
    if draft.model == RANDOM:
        return RandomDrafter(resolve_source(reference, Purpose.TEXTS).info)
    from edgespec.device.model_drafter import load_model_drafter

    tokenizer = "" if config.tokenizer == TOY else config.tokenizer
    writes = config.fallback == FALLBACK_DRAFT
    return load_model_drafter(
        draft, tokenizer, config.policy, say, reserved, endpoint=config.endpoint, writes=writes
    )
