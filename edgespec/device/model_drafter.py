"""Drafters on a model: an exported draft folder, a checkpoint that is exported now, or a foreign
graph.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgespec.config import ConfigError, DraftSection, EndpointSection, PolicySection
from edgespec.config.common import SetupError, require_library
from edgespec.core.device import memory
from edgespec.core.guarded_drafter import CacheGroup, GuardedDrafter
from edgespec.core.ports import Drafter
from edgespec.device.drafters.manifest import MODEL_FILE, read_manifest
from edgespec.device.export.checkpoint import DecoderShape, read_shape
from edgespec.device.export.export import DEFAULT_CONTEXT_LIMIT, export_to_cache
from edgespec.models.folders import (
    read_config,
    read_parallel_draft,
    read_whole_number,
    trained_length,
)
from edgespec.models.model_source import ModelSource, Purpose, SourceKind, resolve_source
from edgespec.models.text_worker import RESIDENT_BYTES
from edgespec.telemetry.process_memory import machine_memory, resident_bytes, trim_heap

if TYPE_CHECKING:
    from edgespec.device.drafters.onnx_drafter import ForeignDrafter, GraphDrafter

_log = logging.getLogger(__name__)

Say = Callable[[str], None]

CPU = "cpu"
BUNDLED: Final = "bundled"
"""Name of the draft model that comes with edgespec."""

_DEFAULT = DraftSection()


def load_model_drafter(
    draft: DraftSection,
    tokenizer: str,
    policy: PolicySection,
    say: Say,
    reserved: Sequence[memory.MemoryTerm] = (),
    *,
    endpoint: EndpointSection | None = None,
    writes: bool = False,
) -> Drafter:
    """Return a loaded drafter on the model of ``draft.model``.

    Args:
        draft: The settings of the draft.
        tokenizer: Names the tokenizer for a graph that has none of its own. Empty for the draft's.
        policy: Its width is the number of candidates per step, which a memory budget may reduce.
        say: Called with a line about slow work, and about the nodes that an accelerator runs.
        reserved: Memory that a budget keeps free for another model.
        endpoint: Settings of the endpoint, whose requests a budget counts. None: the defaults.
        writes: Whether the model also answers by itself, so that it reads whole prompts unless the
            user or a memory budget sets a window.

    Raises:
        SetupError: A setting does not apply to this draft, or a library is missing.
        ValueError: A file cannot be used; the error names it.
    """
    source = resolve_source(draft.model, Purpose.DRAFT, draft.variant)
    drafter: GraphDrafter
    if source.graphs:
        for name, value in (("memory_budget", draft.memory_budget), ("kv_type", draft.kv_type)):
            if value:
                raise SetupError(
                    f"draft.{name} is {value}, but {draft.model} is a graph that others exported:"
                    " only drafts that `edgespec export` writes can be bounded"
                )
        if tokenizer:
            source = source.with_tokenizer_of(resolve_source(tokenizer, Purpose.TEXTS))
        with require_library("onnxruntime", "edgespec[cpu]"):
            drafter = load_foreign_drafter(source, say, draft)
    elif draft.memory_budget:
        if draft.provider != CPU:
            raise SetupError(
                f"draft.provider is {draft.provider}, but a memory budget is planned for cpu only"
            )
        return load_planned_drafter(draft, source, policy.width, say, reserved, endpoint)
    else:
        folder = _prepare_draft_folder(source, draft, say)
        with require_library("onnxruntime", "edgespec[cpu]"):
            from edgespec.device.drafters.decoder_graph import EXECUTION
            from edgespec.device.drafters.onnx_drafter import OnnxDrafter
        drafter = OnnxDrafter(
            folder,
            threads=draft.threads,
            context_length=draft.context_length,
            window=0 if draft.window is None and writes else draft.window,
            providers=EXECUTION[draft.provider],
        )
    if draft.provider == CPU:
        return drafter
    if (placement := drafter.placement) is not None and not placement.accelerated:
        drafter.close()
        raise SetupError(f"provider {draft.provider} runs no node of this draft's graph")
    say(f"the draft runs on {draft.provider}" + (f": {placement}" if placement else ""))
    return drafter


def load_foreign_drafter(
    source: ModelSource, say: Say, draft: DraftSection = _DEFAULT
) -> ForeignDrafter:
    """Return a drafter on the first usable graph of ``source``.

    ``say`` is called with the reason why another graph was left out. Raises ``ValueError`` naming
    the first file if no graph can be used."""
    from edgespec.device.drafters.decoder_graph import EXECUTION
    from edgespec.device.drafters.onnx_drafter import ForeignDrafter

    info = source.graph_info
    first_error: ValueError | None = None
    for variant, path in source.graphs.items():
        try:
            return ForeignDrafter(
                path,
                info.model,
                hint=(info.kv_heads, info.head_size),
                threads=draft.threads,
                context_length=draft.context_length,
                window=draft.window or 0,
                token_count=info.token_count,
                providers=EXECUTION[draft.provider],
            )
        except ValueError as error:
            if len(source.graphs) > 1:
                say(f"{variant} is left out: {error}")
            first_error = first_error or error
    raise first_error or ValueError(f"{source.folder}: no graph")


def describe_graph(source: ModelSource, variant: str) -> str:
    """Load and try one graph of ``source`` and return a description of it in lines for people.

    Raises ``ValueError`` naming the file."""
    path = source.graphs[variant]
    drafter = load_foreign_drafter(replace(source, graphs={variant: path}), lambda text: None)
    try:
        graph, behaviour, info = drafter.graph, drafter.behaviour, drafter.info
        size_mb = drafter.weights_bytes / 1e6
    finally:
        drafter.close()
    cache = graph.caches[0]
    layout = "tokens, heads" if cache.tokens_first else "heads, tokens"
    rollback = (
        "sets a length, copies nothing"
        if behaviour.in_place
        else f"copies what is kept, {sum(one.row_bytes for one in graph.caches)} bytes a token"
    )
    feeds = "several tokens" if behaviour.chunks else "one token at a time behind the first feed"
    inputs = ", ".join(f"{port.name} {port.dtype}" for port in graph.roles.values())
    rows = "every token fed" if behaviour.all_rows else "the last token"
    return "\n".join(
        (
            f"{variant}: {path} ({size_mb:.1f} MB)",
            f"  vocabulary   {info.vocabulary} ({info.vocabulary_size} ids)",
            f"  context      {info.context_length} tokens, end {list(info.eos_token_ids)}",
            f"  inputs       {inputs}",
            f"  cache        {len(graph.caches) // 2} layers of {cache.heads} heads of"
            f" {cache.head_size}, {cache.dtype}, [1, {layout}, head size], {cache.past} ...",
            f"  logits       {graph.logits.dtype}, of {rows}",
            f"  rollback     {rollback}",
            f"  feeds        {feeds}",
        )
    )


def _prepare_draft_folder(source: ModelSource, draft: DraftSection, say: Say) -> Path:
    if source.kind is SourceKind.EXPORT:
        _ = source.info  # This raises if the folder's tokenizer has changed since the export.
        return source.folder
    with require_library("onnx", "edgespec[export]"):
        return export_to_cache(
            source.folder,
            draft.bits or source.export_bits,
            say,
            draft.kv_type or memory.KvType.FLOAT32,
        )


# The first onnxruntime whose CPU attention accepted int8 keys and values in our tests.
_INT8_FROM_VERSION: Final = (1, 31)

_BYTES_PER_WEIGHT: Final = {4: 0.625, 8: 1.125, 32: 4.0}
"""Bytes per weight, by its bits, with the scales of the blocks."""
_SIZES = ("vocabulary_size", "layers", "heads", "kv_heads", "head_dim", "hidden", "feed_forward")
_ENDPOINT_BYTES: Final = 10 << 20
"""Bytes that ``edgespec serve`` loads beyond the other commands, measured as 6 to 12 MiB."""


def list_variants(draft: DraftSection, source: ModelSource) -> tuple[memory.DraftVariant, ...]:
    """Return the variants of the draft in ``source``, with the settings of ``draft``.

    An exported folder has one. A Hugging Face folder has one for each type of keys and values that
    it can be exported with. Raises ``ValueError`` naming the file."""
    folder = source.folder
    if source.kind is SourceKind.EXPORT:
        return (read_exported_variant(folder),)
    bits = draft.bits or source.export_bits
    if (kv_type := draft.kv_type) is not None:
        return (predict_variant(folder, bits, kv_type),)
    with require_library("onnxruntime", "edgespec[cpu]"):
        from edgespec.models.onnx_runtime import ort
    version = tuple(map(int, ort.__version__.split(".")[:2]))
    types = [
        one
        for one in memory.KvType
        if one is not memory.KvType.INT8 or version >= _INT8_FROM_VERSION
    ]
    return tuple(predict_variant(folder, bits, kv_type) for kv_type in types)


def read_exported_variant(folder: Path) -> memory.DraftVariant:
    """Return the variant in a draft folder, from its manifest, its files and its config.json."""
    manifest, shape = read_manifest(folder), read_shape(folder)
    parts = [part for part in folder.glob(f"{MODEL_FILE}*") if part.is_file()]
    shape = replace(  # The graph is checked against the manifest, not against config.json.
        shape,
        layers=manifest.layers,
        kv_heads=manifest.kv_heads,
        head_dim=manifest.head_dim,
        vocabulary_size=(shape.vocabulary_size if shape.kept else manifest.model.vocabulary_size),
    )
    table = shape.vocabulary_size * shape.hidden
    return memory.DraftVariant(
        name=manifest.model.name,
        bits=manifest.bits,
        kv_type=memory.KvType(manifest.kv_type),
        stored_bytes=sum(part.stat().st_size for part in parts),
        table_bytes=int(table * _BYTES_PER_WEIGHT[manifest.table_bits]),
        inline=len(parts) == 1,
        context_length=manifest.window or manifest.model.context_length,
        places=manifest.parallel_tokens,
        **_shape_sizes(shape),
    )


def predict_variant(folder: Path, bits: int, kv_type: memory.KvType) -> memory.DraftVariant:
    """Return the variant that an export of a Hugging Face folder would make, from its config.json.

    Bytes stored: (layers * (hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 *
    hidden * feed_forward) + tables * vocabulary * hidden) * bytes + rotary tables."""
    config, shape = read_config(folder), read_shape(folder)
    hidden, dim, vocabulary = shape.hidden, shape.head_dim, shape.vocabulary_size
    longest = read_whole_number(folder / "config.json", config, "max_position_embeddings")
    positions = min(longest, DEFAULT_CONTEXT_LIMIT)
    context = min(trained_length(folder) or positions, positions)
    parallel = read_parallel_draft(folder)
    layer = hidden * dim * 2 * (shape.heads + shape.kv_heads) + 3 * hidden * shape.feed_forward
    tables = 1 if shape.tied else 2
    per_weight = _BYTES_PER_WEIGHT[bits]
    table = int(vocabulary * hidden * per_weight)
    return memory.DraftVariant(
        name=folder.name,
        bits=bits,
        kv_type=kv_type,
        stored_bytes=int(shape.layers * layer * per_weight) + tables * table + 4 * positions * dim,
        table_bytes=table,
        inline=False,
        context_length=context,
        places=1 if parallel is None else parallel.tokens,
        **_shape_sizes(shape),
    )


def _shape_sizes(shape: DecoderShape) -> dict[str, int]:
    """Return the sizes in a draft's shape, under the names that its variant uses."""
    return {name: getattr(shape, name) for name in _SIZES}


def measure_memory_question(
    draft: DraftSection, max_width: int, endpoint: EndpointSection | None = None
) -> memory.MemoryPlanInputs:
    """Return the input of a memory plan, measured now. Load the tokenizer before.

    ``endpoint`` are the settings of ``edgespec serve``; None: the defaults. Raises ``ValueError``
    for a budget that cannot be read."""
    with require_library("onnxruntime", "edgespec[cpu]"):
        # The memory of the libraries that these imports load has to be counted.
        import edgespec.device.drafters.onnx_drafter
    with require_library("grpc", "edgespec"):
        import edgespec.wire.grpc_client  # noqa: F401
    gc.collect()
    trim_heap()
    runtime = resident_bytes()
    return memory.MemoryPlanInputs(
        budget_bytes=memory.parse_budget(draft.memory_budget or "auto").resolve(machine_memory()),
        runtime_bytes=runtime,
        max_width=max_width,
        max_window=draft.window or draft.context_length,
        threads=draft.threads,
        max_caches=draft.caches,
        cores=os.cpu_count() or 1,
        additions=_list_additions(draft, endpoint or EndpointSection()),
    )


def corpus_bytes(draft: DraftSection) -> int:
    """Return the bytes of text that ``draft.corpus`` has now, as far as the budget allows. Raises
    ``ConfigError`` for a path that is not there."""
    from edgespec.device.corpus_files import CorpusFolders

    folders = CorpusFolders(draft.corpus, max_corpus_bytes(draft))
    try:
        stamps = folders.find_files(all_named=True).stamps
    except OSError as error:
        raise ConfigError(f"draft.corpus: {error.filename}: {error.strerror or error}") from None
    return sum(one.size_bytes for one in stamps.values())


def max_corpus_bytes(draft: DraftSection) -> int:
    """Return the most bytes of text that ``draft.corpus`` may have: what is left of a memory
    budget, if there is one. Raises ``ValueError`` for a budget that cannot be read."""
    from edgespec.device.corpus_files import MAX_CORPUS_BYTES

    if not draft.memory_budget:
        return MAX_CORPUS_BYTES
    budget = memory.parse_budget(draft.memory_budget).resolve(machine_memory())
    return min(MAX_CORPUS_BYTES, memory.corpus_text_bytes(budget))


def _list_additions(
    draft: DraftSection, endpoint: EndpointSection
) -> tuple[memory.MemoryTerm, ...]:
    """Return what ``edgespec serve`` holds beyond other commands."""
    additions = [
        memory.MemoryTerm(
            "requests",
            endpoint.most_bodies_bytes(has_budget=True),
            "bodies of large requests in serve, at most",
            memory.Held.RESERVED,
        )
    ]
    if "edgespec.endpoint.app" not in sys.modules:
        why = "libraries of serve"
        additions.append(memory.MemoryTerm("endpoint", _ENDPOINT_BYTES, why, memory.Held.SERVING))
    if draft.corpus:
        additions += memory.corpus_terms(corpus_bytes(draft))
    if draft.model != BUNDLED:
        why = "the process that renders them in serve and chat"
        additions.append(
            memory.MemoryTerm("chat templates", RESIDENT_BYTES, why, memory.Held.SERVING)
        )
    return tuple(additions)


def load_planned_drafter(
    draft: DraftSection,
    source: ModelSource,
    max_width: int,
    say: Say,
    reserved: Sequence[memory.MemoryTerm] = (),
    endpoint: EndpointSection | None = None,
) -> Drafter:
    """Return a guarded drafter that fits in ``draft.memory_budget`` beside what is ``reserved`` and
    the requests that ``endpoint`` admits (None: the defaults).

    Raises ``SetupError`` naming the smallest budget, and ``ValueError`` naming the file."""
    with require_library("onnxruntime", "edgespec[cpu]"):
        from edgespec.device.drafters.onnx_drafter import OnnxDrafter
    variants = list_variants(draft, source)
    folder = source.folder
    question = measure_memory_question(draft, max_width, endpoint)
    question = replace(question, additions=(*question.additions, *reserved))
    plan = memory.plan_memory(variants, question)
    if source.kind is not SourceKind.EXPORT:
        with require_library("onnx", "edgespec[export]"):
            bits = draft.bits or source.export_bits
            folder = export_to_cache(folder, bits, say, plan.variant.kv_type)
        plan = memory.plan_memory((read_exported_variant(folder),), question)
    say(summarise_plan(plan, memory.plan_without_limit(variants, question)))
    settings = plan.settings
    try:
        drafter = OnnxDrafter(
            folder, threads=settings.threads, window=settings.window, chunk=settings.chunk
        )
    except MemoryError as error:
        raise SetupError(f"{folder}: {error}") from error
    trim_heap()
    full = memory.DraftAllowance(settings.window, settings.width)
    drafter.restrict(full.window, full.width)
    row_bytes = settings.caches * plan.variant.kv_bytes_per_token
    guard = memory.MemoryGuard(plan.budget_bytes, plan.margin_bytes // 2, full, row_bytes)
    caches = CacheGroup(
        guard,
        resident_bytes,
        time.monotonic,
        max_caches=settings.caches,
        budget_bytes=plan.budget_bytes,
        on_restricted=log_restriction,
        on_measure_failed=log_measure_failure,
    )
    return GuardedDrafter(drafter, caches)


def log_restriction(resident_bytes: int, allowance: memory.DraftAllowance) -> None:
    """Log what the memory guard leaves to the draft from now on."""
    text = "%d MiB resident: the draft may hold %d tokens and propose %d candidates a step"
    _log.info(text, resident_bytes >> 20, allowance.window, allowance.width)


def log_measure_failure(error: Exception) -> None:
    """Log that the memory of this process cannot be measured any more."""
    _log.warning("this process's memory cannot be measured any more: %s", error)


def summarise_plan(plan: memory.MemoryPlan, best: memory.MemoryPlan) -> str:
    """Return one line for the user: the plan, and what it gave up to fit."""
    settings = plan.settings
    line = (
        f"memory: {memory.in_mib(plan.predicted_bytes)} of {memory.in_mib(plan.budget_bytes)}:"
        f" window {settings.window}, {plan.variant.kv_type.value} keys and values,"
        f" width {settings.width}" + (f", caches {settings.caches}" if settings.caches > 1 else "")
    )
    reductions = plan.list_reductions(best)
    return f"{line} ({'; '.join(reductions)})" if reductions else line
