"""Memory plan of a training, which is printed before it begins.

Most of the memory depends on the sizes of the models: both in float32, and five more copies of the
draft (weights in full precision, gradients, two moments of the optimizer, the best weights so far).
The rest is for texts that are learned from or written together; the plan decides how many fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from edgespec.core.device.memory import in_mib
from edgespec.training.masked_texts import mean_masks
from edgespec.training.settings import LossName, TrainingSettings
from edgespec.training.texts import LOGITS_AT_ONCE

DRAFT_COPIES: Final = 5
SELECTIVE_COPIES: Final = 2
"""Further copies for ``selective``: the initial draft and the reference."""
_LOGITS_COPIES: Final = 10
"""Tensors of logits that live at once in a loss and its backward pass, as measured."""
_FULL_WIDTHS, _INNER_WIDTHS = 18, 5
"""Numbers that one layer keeps per token until the backward pass, in units of its widths."""
_MOST_AT_ONCE_BYTES: Final = 1 << 30
"""Most memory for texts at once. More makes no step quicker, and with a fixed limit a machine with
more memory computes the same sums."""
_FLOAT: Final = 4


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Numbers of texts that fit at once, and the most memory that the process then holds."""

    texts_at_once: int
    """Texts of one forward and backward pass."""
    written_at_once: int
    """Texts that a model writes together."""
    models_bytes: int
    copies_bytes: int
    step_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        parts = (
            f"models {in_mib(self.models_bytes)}, copies of the draft {in_mib(self.copies_bytes)},"
            f" texts {in_mib(self.step_bytes)}"
        )
        return f"at most about {in_mib(self.peak_bytes)} ({parts})"


def plan_memory(
    target: Any,
    draft: Any,
    settings: TrainingSettings,
    written_together: int,
    held_bytes: int,
    limit_bytes: int,
) -> TrainingMemory:
    """Plan the memory of a training.

    ``target``, ``draft``: the loaded models.
    ``written_together``: texts that would be written together if memory allowed.
    ``held_bytes``: memory that the process holds now, with both models.
    ``limit_bytes``: memory that it may hold.

    Raises ``ValueError`` if not even one text fits."""
    weights = sum(weight.numel() for weight in draft.parameters()) * _FLOAT
    models = weights + sum(one.numel() * one.element_size() for one in target.parameters())
    selective = settings.loss is LossName.SELECTIVE
    copies = weights * (DRAFT_COPIES + (SELECTIVE_COPIES if selective else 0))
    largest = max(weight.numel() for weight in draft.parameters()) * _FLOAT
    logits = _LOGITS_COPIES * _FLOAT * max(LOGITS_AT_ONCE, int(draft.config.vocab_size))
    fixed = held_bytes + copies + 2 * largest + logits
    rows = math.ceil(settings.length * (1.0 + mean_masks(settings.parallel)))
    # Which rows see which: a flag each, and a number each while it is applied.
    seen = rows * rows * (1 + _FLOAT) if settings.parallel > 1 else 0
    learned = max(
        rows * _learned_bytes(draft.config) + seen, settings.length * _read_bytes(target.config)
    )
    kept = settings.length * max(_cached_bytes(target.config), _cached_bytes(draft.config))
    room = limit_bytes - fixed
    if room < max(learned, kept):
        raise ValueError(
            f"this training needs {in_mib(fixed + max(learned, kept))} ({in_mib(models)} for"
            f" the models, {in_mib(copies)} for copies of the draft), but the limit is"
            f" {in_mib(limit_bytes)}: give a smaller draft, a smaller --length, or a larger"
            " --memory-budget"
        )
    room = min(room, _MOST_AT_ONCE_BYTES)
    texts = max(1, min(settings.rows, room // learned))
    written = max(1, min(written_together, room // kept))
    step = max(texts * learned, written * kept) + logits
    return TrainingMemory(texts, written, models, copies, step, fixed - logits + step)


def _learned_bytes(config: Any) -> int:
    """Return the bytes per token that the backward pass needs."""
    widths = _FULL_WIDTHS * config.hidden_size + _INNER_WIDTHS * config.intermediate_size
    return int(config.num_hidden_layers * widths * _FLOAT)


def _read_bytes(config: Any) -> int:
    """Return the bytes per token of a pass without a backward pass: the bytes of one layer."""
    widths = _FULL_WIDTHS * config.hidden_size + _INNER_WIDTHS * config.intermediate_size
    return int(widths * _FLOAT)


def _cached_bytes(config: Any) -> int:
    """Return the bytes per token of keys and values, and of one layer while a prompt is read."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # While a token is appended, the old and the new keys and values of a layer are both there.
    return int((config.num_hidden_layers + 1) * 2 * heads * head_dim * _FLOAT) + _read_bytes(config)
