"""Builds a verifier from its configuration: the target model (native, vLLM or toy), the draft
model, the daemon, and the gRPC server.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.config import VerifierConfig
from edgespec.config.common import SetupError, require_library
from edgespec.config.verifier import VLLM
from edgespec.core.device.memory import parse_budget
from edgespec.core.ports import ServerDrafter, TargetModel
from edgespec.core.protocol.messages import EXACT_RULE, Limits
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.traffic_budget import ShareLimits, UplinkLimits
from edgespec.models import folders
from edgespec.models.gguf_folder import is_gguf
from edgespec.models.grammar import target_grammar_reader
from edgespec.models.model_source import ModelSource, Purpose, SourceKind, resolve_source
from edgespec.models.shared_ids import find_differing_ids
from edgespec.models.toy import TOY, TOY_CONTEXT_LENGTH, TOY_MODEL, TOY_PICTURE, toy_info
from edgespec.telemetry.trace import Tracer
from edgespec.telemetry.verifier_counts import VerifierTelemetry
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.paced import PacedServerDrafter, PacedTarget
from edgespec.verifier.targets.toy import ToyServerDrafter, ToyTarget
from edgespec.verifier.vllm.loading import vllm_target
from edgespec.wire.access import ServerAccess
from edgespec.wire.tokenizer_lending import FACT_FILES, MAX_TEXT_BYTES, TEXT_FILES, PackedTexts

if TYPE_CHECKING:
    from edgespec.verifier.targets.memory_sizing import DraftMemory, PoolBudget
    from edgespec.verifier.targets.torch_target import TorchTarget
    from edgespec.wire.grpc_server import GrpcServer


_LOG = logging.getLogger(__name__)

_TOY_BLOCK_TOKENS, _TOY_CACHED_TOKENS = 16, 65_536
_TOY_DRAFT_NOISE = 0.25
"""The same noise as in a device's toy draft."""


def build_verifier(
    config: VerifierConfig,
    *,
    target: TargetModel | None = None,
    drafter: ServerDrafter | None = None,
    tracer: Tracer | None = None,
    access: ServerAccess | None = None,
    watch: VerifierTelemetry | None = None,
) -> tuple[Verifier, GrpcServer]:
    """Return a verifier and the server that listens for it; call ``await server.start()``.

    Without ``target`` and ``drafter`` it loads those of ``config``. With ``access`` None it reads
    the API keys and certificates that ``config`` names. ``watch`` counts what both do.
    """
    with require_library("grpc", "edgespec"):
        from edgespec.wire.codec import WireLimits
        from edgespec.wire.grpc_server import GrpcServer
    access = access or ServerAccess(config)
    target = target or load_target(config)
    drafter = drafter or load_server_drafter(config, target)
    bounds, shape = config.limits, target.pass_shape
    context_length = target.info.context_length
    if target.cache is not None:  # the longest text must fit alone
        context_length = min(context_length, target.cache.tokens)
    limits = Limits(
        context_length=context_length,
        max_nodes_outstanding=bounds.max_nodes_outstanding,
        max_nodes_per_pass=min(bounds.max_nodes_per_pass, shape.max_nodes),
        max_unreceived=bounds.max_unreceived,
        lease_s=bounds.lease_s,
    )
    verifier = Verifier(
        target,
        limits,
        _engine_limits(config, target, drafts=drafter is not None),
        tracer=tracer,
        telemetry=None if watch is None else watch.streams,
        read_constraint=None if config.engine == VLLM else target_grammar_reader(config.model),
        drafter=drafter,
    )
    # Streams beyond the sessions are accepted, so that they receive the reason of their refusal.
    server = GrpcServer(
        config.address,
        verifier.serve,
        lambda: verifier.info,
        limits=WireLimits.for_context(limits.context_length),
        max_streams=bounds.max_sessions + 64,
        peer_share=bounds.peer_share,
        watch=watch,
        uplink=UplinkLimits(
            shares=ShareLimits(bounds.shared_message_rate, bounds.least_message_rate),
            address_rate=bounds.address_message_rate,
        ),
        credentials=access.credentials,
        authenticate=access.authenticate if access.requires_keys else None,
        texts=packed_texts(config.model),
    )
    return verifier, server


def _engine_limits(config: VerifierConfig, target: TargetModel, *, drafts: bool) -> EngineLimits:
    bounds, shape = config.limits, target.pass_shape
    return EngineLimits(
        max_sessions=bounds.max_sessions,
        max_rows_per_pass=min(bounds.max_rows_per_pass, shape.max_rows),
        max_rows_per_session=bounds.max_rows_per_session,
        prefill_share=bounds.prefill_share,
        max_sessions_per_peer=max(1, round(bounds.max_sessions * bounds.peer_share)),
        cache=target.cache,
        share_prefixes=bounds.share_prefixes,
        prefix_bytes=bounds.prefix_mib << 20,
        picture_bytes=bounds.picture_mib << 20,
        stall_s=bounds.stall_s,
        server_drafts=config.server_drafts,
        drafter=drafts,
        trees=shape.trees,
        speculator_tokens=shape.speculator_tokens,
        speculator_blocks=shape.speculator_blocks,
        rules=(EXACT_RULE, *config.rules),
    )


def load_target(config: VerifierConfig) -> TargetModel:
    """Return the target model of ``config``, with emulated pass times if it sets them.

    Raises ``SetupError``, or ``ValueError`` that names the file or the setting.
    """
    if config.engine == VLLM:
        target: TargetModel = vllm_target(config, model_name(config))
    else:
        target = _toy_target(config) if config.model == TOY else _torch_target(config)
    pass_ms, row_ms = config.pacing.pass_ms, config.pacing.row_ms
    if pass_ms <= 0.0 and row_ms <= 0.0:
        return target
    return PacedTarget(
        inner=target, base_ms=pass_ms, per_row_ms=row_ms, sleep=time.sleep, clock=time.monotonic
    )


def load_server_drafter(config: VerifierConfig, target: TargetModel) -> ServerDrafter | None:
    """Return the verifier's own draft model, with emulated step times if ``config`` sets them; None
    if ``config`` names no draft. Raises as ``load_target`` does."""
    if not config.draft:
        return None
    apart = _check_draft(config, target.info.vocabulary)
    drafter: ServerDrafter
    if config.draft == TOY:
        model = TOY_MODEL.perturbed(_TOY_DRAFT_NOISE)
        drafter = ToyServerDrafter(model, toy_info(), max_cached_tokens=_count_toy_tokens(config))
    else:
        drafter = _packed_drafter(config, target, apart)
    step_ms, row_ms = config.pacing.draft_ms, config.pacing.draft_row_ms
    if step_ms <= 0.0 and row_ms <= 0.0:
        return drafter
    return PacedServerDrafter(
        inner=drafter, base_ms=step_ms, per_row_ms=row_ms, sleep=time.sleep, clock=time.monotonic
    )


def model_name(config: VerifierConfig) -> str:
    if config.name:
        return config.name
    path = Path(os.path.expanduser(config.model))
    if path.is_dir():
        return path.resolve().name
    return path.stem if is_gguf(path) else config.model


def prefer_reproducible_products() -> None:
    """Ask MKL, if it is installed, for products whose bits do not depend on the number of rows,
    which makes canonical mode cheaper. This must precede the process's first matrix product."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def _toy_target(config: VerifierConfig) -> TargetModel:
    _check_draft(config, toy_info().vocabulary)
    return ToyTarget(
        TOY_MODEL,
        name=model_name(config),
        vocabulary=toy_info().vocabulary,
        fingerprint=folders.text_fingerprint(repr(TOY_MODEL)),
        context_length=min(config.max_model_len or TOY_CONTEXT_LENGTH, TOY_CONTEXT_LENGTH),
        max_sessions=config.limits.max_sessions,
        cache=CacheShape(-(-_count_toy_tokens(config) // _TOY_BLOCK_TOKENS), _TOY_BLOCK_TOKENS),
        pictures=config.limits.picture_input(TOY_PICTURE),
    )


def _count_toy_tokens(config: VerifierConfig) -> int:
    """Return how many cached tokens the toys count; they take no memory."""
    tokens = config.limits.max_cached_tokens
    return _TOY_CACHED_TOKENS if tokens is None else tokens


def _check_draft(config: VerifierConfig, vocabulary: str) -> frozenset[int]:
    """Check the draft model before anything large is loaded.

    Returns the ids whose text differs between the draft and the target, whose vocabulary
    fingerprint is ``vocabulary``. Raises ``SetupError`` for a draft with another tokenizer, and
    ``ValueError`` for one that does not exist.
    """
    if not config.draft:
        return frozenset()
    draft = _draft_source(config)
    if (info := draft.info).vocabulary == vocabulary:
        return frozenset()
    if TOY in (config.draft, config.model):
        raise SetupError(
            f"draft {config.draft!r} has another tokenizer than model {config.model!r}: its"
            f" vocabulary is {info.vocabulary}, the model's {vocabulary}; give a draft of the same"
            " family"
        )
    target = resolve_source(config.model, Purpose.TARGET)
    own, others = (folders.read_vocabulary(one.tokenizer_file) for one in (draft, target))
    return find_differing_ids(
        lambda token: own.get(token, ""),
        lambda token: others.get(token, ""),
        own.keys() | others.keys(),
        draft=config.draft,
        target=config.model,
    )


def _draft_source(config: VerifierConfig) -> ModelSource:
    """Return the source of the draft's weights; an exported graph alone is not enough. Raises
    ``ModelFolderError``."""
    try:
        source = resolve_source(config.draft, Purpose.DRAFT_WEIGHTS)
        if source.kind is not SourceKind.TOY:
            folders.check_folder(source.folder)
    except folders.ModelFolderError as error:
        raise folders.ModelFolderError(f"draft: {error}") from error
    return source


def _draft_memory(config: VerifierConfig) -> DraftMemory:
    from edgespec.verifier.targets.loading import draft_memory

    return draft_memory(str(_draft_source(config).folder), config.dtype, config.device)


def pool_budget(config: VerifierConfig) -> PoolBudget | None:
    """Return the memory that ``config`` grants to the KV cache; None if it counts tokens
    instead."""
    limits = config.limits
    if not limits.kv_budget and limits.gpu_memory_utilization is None:
        return None
    from edgespec.verifier.targets.memory_sizing import DraftMemory, PoolBudget

    return PoolBudget(
        kv=parse_budget(limits.kv_budget) if limits.kv_budget else None,
        gpu_share=limits.gpu_memory_utilization,
        rows=limits.max_rows_per_pass,
        draft=_draft_memory(config) if config.draft else DraftMemory(),
    )


def _packed_drafter(
    config: VerifierConfig, target: TargetModel, apart: frozenset[int]
) -> ServerDrafter:
    from edgespec.verifier.targets.loading import device_of
    from edgespec.verifier.targets.memory_sizing import check_draft_fits
    from edgespec.verifier.targets.packed_drafter import PackedDrafter

    assert target.cache is not None, "an engine without a cache to give out has its own drafter"
    source, tokens = _draft_source(config), target.cache.tokens
    info = source.info
    check_draft_fits(_draft_memory(config), tokens, device_of(config.device))
    model = _load_torch_model(
        config,
        source.folder,
        name=info.name,
        vocabulary=info.vocabulary,
        max_cached_tokens=tokens,
        canonical=False,  # draft tokens need not be reproducible
    )
    return PackedDrafter(
        model,
        vocabulary_size=target.info.vocabulary_size,
        apart=apart,
        share_prefixes=config.limits.share_prefixes is SharePrefixes.ALL,
        window=folders.trained_length(source.folder) or None,
    )


def _load_torch_model(config: VerifierConfig, folder: Path, **options: Any) -> TorchTarget:
    """Load a model with the settings that target and draft model share, and ``options``."""
    from edgespec.verifier.targets.torch_target import TorchTarget

    try:
        return TorchTarget(
            str(folder),
            dtype=config.dtype,
            device=config.device,
            max_sessions=config.limits.max_sessions,
            quantize=config.quantize,
            **options,
        )
    except (ValueError, OSError):
        raise
    except Exception as error:  # safetensors and torch raise exceptions of their own
        hint = ""
        if "deserializing header" in str(error):  # by safetensors
            hint = "; a file of weights was cut or is damaged: fetch it again"
        raise SetupError(f"{folder}: the model cannot be loaded: {error}{hint}") from error


def _torch_target(config: VerifierConfig) -> TargetModel:
    source = resolve_source(config.model, Purpose.TARGET)
    folders.check_folder(source.folder)
    info = source.info
    _ = source.sampling  # raises for an invalid file, from which devices take their defaults
    _check_draft(config, info.vocabulary)
    # torch uses huge pages under large tensors then: products of few rows read all weights, and
    # look up fewer pages (docs/measurements/passes.md). This must precede the process's first
    # tensor.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if config.canonical is not False:
        prefer_reproducible_products()
    with require_library("torch", "edgespec[server]"):
        import edgespec.verifier.targets.torch_target  # noqa: F401
    return _load_torch_model(
        config,
        source.folder,
        name=model_name(config),
        vocabulary=info.vocabulary,
        weights=source.fingerprint,
        max_cached_tokens=config.limits.max_cached_tokens,
        context_length=config.max_model_len,
        canonical=config.canonical,
        model_threads=config.threads,
        pool_budget=pool_budget(config),
    )


def packed_texts(reference: str) -> PackedTexts | str:
    """Return the files that a verifier of this model lends, or the reason why it lends none."""
    none = "this verifier lends no tokenizer"
    if reference == TOY:
        return f"{none}: the toy model has none; give --set tokenizer=toy"
    try:
        folder = resolve_source(reference, Purpose.TARGET).folder
        names = dict.fromkeys((*TEXT_FILES, *FACT_FILES))
        paths = {name: folder / name for name in names if (folder / name).is_file()}
        total = sum(path.stat().st_size for path in paths.values())
        if total > MAX_TEXT_BYTES:
            return f"{none}: its files have {total} bytes, but at most {MAX_TEXT_BYTES} are sent"
        return PackedTexts({name: path.read_bytes() for name, path in paths.items()})
    except (OSError, ValueError) as error:
        _LOG.warning("the tokenizer is not lent: %s", error)
        return none
