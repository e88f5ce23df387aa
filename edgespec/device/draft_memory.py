"""A draft within a memory budget, from folders and measurements to a guarded drafter.

The plan is the core's (``core/device/memory.py``); here is what it needs to know and what
becomes of it: which variants there are, what the process holds already, the export of the one that
was chosen, and a guard that measures while it drafts.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from edgespec.config import DraftSection
from edgespec.config.common import SetupError, needs
from edgespec.core.device.memory import (
    DraftVariant,
    KvType,
    MemoryGuard,
    MemoryPlan,
    MemoryQuestion,
    Restriction,
    in_mib,
    parse_budget,
    plan_memory,
    traded,
    unbounded,
)
from edgespec.core.ports import Drafter
from edgespec.device.drafters.manifest import MODEL_FILE, read_manifest
from edgespec.device.export.export import exported
from edgespec.models.folders import DRAFT_MANIFEST, Role, read_config, resolve_model
from edgespec.telemetry.process_memory import machine_memory, resident_bytes, trim_heap

Say = Callable[[str], None]

# The first onnxruntime whose attention on the CPU was seen to take int8 keys and values.
_INT8_FROM: Final = (1, 31)
_STORED_PER_WEIGHT: Final = {4: 0.625, 8: 1.125, 32: 4.0}
"""Bytes, with the blocks' scales."""
_LONGEST_EXPORTED: Final = 16_384
_ENDPOINT_BYTES: Final = 8 << 20
"""What ``edgespec serve`` loads beyond the other commands, 6 to 9 MiB."""


def variants_of(draft: DraftSection, reference: str = "") -> tuple[DraftVariant, ...]:
    """The variants of a draft: the one in an exported folder, or what a Hugging Face folder can be
    exported to. Raises ``ValueError`` naming the file."""
    folder = resolve_model(reference or draft.model, Role.DRAFT)
    config = read_config(folder)
    if (folder / DRAFT_MANIFEST).is_file():
        return (exported_variant(folder, config),)
    types = (draft.kv_type,) if draft.kv_type else _exportable_types()
    return tuple(source_variant(folder.name, config, draft.bits, kv_type) for kv_type in types)


def exported_variant(folder: Path, config: dict[str, Any]) -> DraftVariant:
    """What the manifest and the files of a draft folder say; ``config`` is its config.json."""
    manifest = read_manifest(folder)
    whole = _shape(config)
    parts = [part for part in folder.glob(f"{MODEL_FILE}*") if part.is_file()]
    table = manifest.model.vocabulary_size * whole["hidden"]
    return DraftVariant(
        name=manifest.model.name,
        bits=manifest.bits,
        kv_type=KvType(manifest.kv_type),
        stored_bytes=sum(part.stat().st_size for part in parts),
        table_bytes=int(table * _STORED_PER_WEIGHT[manifest.table_bits]),
        inline=len(parts) == 1,
        layers=manifest.layers,
        heads=whole["heads"],
        kv_heads=manifest.kv_heads,
        head_dim=manifest.head_dim,
        hidden=whole["hidden"],
        feed_forward=whole["feed_forward"],
        vocabulary_size=manifest.model.vocabulary_size,
        context_length=manifest.window or manifest.model.context_length,
    )


def source_variant(name: str, config: dict[str, Any], bits: int, kv_type: KvType) -> DraftVariant:
    """What an export of a Hugging Face folder would be, from its config.json alone.

    Formula of what is stored: (layers * (hidden * (heads + 2 * kv_heads) * dim + heads * dim *
    hidden + 3 * hidden * feed_forward) + tables * vocabulary * hidden) * bytes + rotary tables.
    """
    shape = _shape(config)
    hidden, dim, layers = shape["hidden"], shape["head_dim"], int(config["num_hidden_layers"])
    heads, kv_heads = shape["heads"], shape["kv_heads"]
    vocabulary = int(config["vocab_size"])
    positions = min(int(config["max_position_embeddings"]), _LONGEST_EXPORTED)
    context = min(int(config.get("trained_length") or positions), positions)
    layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * shape["feed_forward"]
    tables = 1 if config.get("tie_word_embeddings", True) else 2
    per_weight = _STORED_PER_WEIGHT[bits]
    table = int(vocabulary * hidden * per_weight)
    return DraftVariant(
        name=name,
        bits=bits,
        kv_type=kv_type,
        stored_bytes=int(layers * layer * per_weight) + tables * table + 4 * positions * dim,
        table_bytes=table,
        inline=False,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        hidden=hidden,
        feed_forward=shape["feed_forward"],
        vocabulary_size=vocabulary,
        context_length=context,
    )


def question_of(draft: DraftSection, most_width: int) -> MemoryQuestion:
    """What the plan has to go by, measured now: load the tokenizer first. Raises ``ValueError``
    for a budget that cannot be read."""
    with needs("onnxruntime", "edgespec[cpu]"):
        import edgespec.device.drafters.onnx_drafter  # what it loads counts
    with needs("grpc", "edgespec"):
        import edgespec.wire.grpc_client  # noqa: F401
    gc.collect()
    trim_heap()
    runtime = resident_bytes()
    # So a budget that one command takes is enough for every other one.
    runtime += 0 if "edgespec.endpoint.app" in sys.modules else _ENDPOINT_BYTES
    return MemoryQuestion(
        budget_bytes=parse_budget(draft.memory_budget or "auto").resolve(machine_memory()),
        runtime_bytes=runtime,
        most_width=most_width,
        most_window=draft.window or draft.context_length,
        threads=draft.threads,
        most_caches=draft.caches,
        cores=os.cpu_count() or 1,
    )


def planned_drafter(draft: DraftSection, most_width: int, say: Say) -> Drafter:
    """The drafter that ``draft.memory_budget`` leaves room for, with a guard on it.

    Raises ``SetupError`` naming the smallest budget, ``ValueError`` naming the file.
    """
    with needs("onnxruntime", "edgespec[cpu]"):
        from edgespec.device.drafters.guarded import CacheGroup, GuardedDrafter
        from edgespec.device.drafters.onnx_drafter import OnnxDrafter
    variants = variants_of(draft)
    folder = resolve_model(draft.model, Role.DRAFT)
    question = question_of(draft, most_width)
    plan = plan_memory(variants, question)
    if not (folder / DRAFT_MANIFEST).is_file():
        with needs("onnx", "edgespec[export]"):
            folder = exported(folder, draft.bits, say, plan.variant.kv_type)
        real = exported_variant(folder, read_config(folder))
        plan = plan_memory((real,), question)
    say(summary(plan, unbounded(variants, question)))
    settings = plan.settings
    try:
        drafter = OnnxDrafter(
            folder, threads=settings.threads, window=settings.window, chunk=settings.chunk
        )
    except MemoryError as error:
        raise SetupError(f"{folder}: {error}") from error
    trim_heap()
    full = Restriction(settings.window, settings.width)
    drafter.restrict(full.window, full.width)
    row_bytes = settings.caches * plan.variant.kv_bytes_per_token
    guard = MemoryGuard(plan.budget_bytes, plan.margin_bytes // 2, full, row_bytes)
    caches = CacheGroup(drafter, settings.caches, plan.budget_bytes)
    caches.restriction = full
    return GuardedDrafter(drafter, drafter, guard, resident_bytes, time.monotonic, caches)


def summary(plan: MemoryPlan, best: MemoryPlan) -> str:
    """One line for the user: what was planned, and what was traded."""
    settings = plan.settings
    line = (
        f"memory: {in_mib(plan.predicted_bytes)} of {in_mib(plan.budget_bytes)}:"
        f" window {settings.window}, {plan.variant.kv_type.value} keys and values,"
        f" width {settings.width}" + (f", caches {settings.caches}" if settings.caches > 1 else "")
    )
    found = traded(plan, best)
    return f"{line} ({'; '.join(found)})" if found else line


def _exportable_types() -> tuple[KvType, ...]:
    with needs("onnxruntime", "edgespec[cpu]"):
        from edgespec.device.drafters.onnx_drafter import runtime_version
    if runtime_version() >= _INT8_FROM:
        return tuple(KvType)
    return KvType.FLOAT32, KvType.FLOAT16


def _shape(config: dict[str, Any]) -> dict[str, int]:
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return {
            "heads": heads,
            "hidden": hidden,
            "kv_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": int(config.get("head_dim") or hidden // heads),
            "feed_forward": int(config["intermediate_size"]),
        }
    except KeyError as error:
        raise ValueError(f"config.json of the draft lacks the field {error}") from None
