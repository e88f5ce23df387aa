"""What a training holds of memory, said before it begins.

The sizes of the models decide most of it: both in float32, and of the draft another five copies
(weights in full precision, gradients, two moments of the optimizer, the best weights so far). What
remains goes to the texts that are learned from or written together, which the plan counts out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from edgespec.core.device.memory import in_mib
from edgespec.training.settings import LossName, TrainingSettings
from edgespec.training.texts import LOGITS_AT_ONCE

DRAFT_COPIES: Final = 5
SELECTIVE_COPIES: Final = 2
"""The draft that came in, and the reference."""
_LOGITS_COPIES: Final = 10
"""Tensors of logits that live at once in a loss and its backward pass, as measured."""
_FULL_WIDTHS, _INNER_WIDTHS = 18, 5
"""Numbers that one layer keeps for one token until the backward pass, in widths of the layer."""
_MOST_AT_ONCE_BYTES: Final = 1 << 30
"""More of it makes no step quicker, and a machine with more memory computes the same sums."""
_FLOAT: Final = 4


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """How much fits at once, and the most that the process then holds."""

    texts_at_once: int
    """Texts of one forward and backward pass."""
    written_at_once: int
    """Texts that are written together."""
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
    """Plan a training of the loaded models ``target`` and ``draft`` in a process that holds
    ``held_bytes`` with them, and may hold ``limit_bytes``. Raises ``ValueError`` where not even one
    text fits."""
    weights = sum(weight.numel() for weight in draft.parameters()) * _FLOAT
    models = weights + sum(one.numel() * one.element_size() for one in target.parameters())
    selective = settings.loss is LossName.SELECTIVE
    copies = weights * (DRAFT_COPIES + (SELECTIVE_COPIES if selective else 0))
    largest = max(weight.numel() for weight in draft.parameters()) * _FLOAT
    logits = _LOGITS_COPIES * _FLOAT * max(LOGITS_AT_ONCE, int(draft.config.vocab_size))
    fixed = held_bytes + copies + 2 * largest + logits
    learned = settings.length * max(_learned_bytes(draft.config), _read_bytes(target.config))
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
    """Bytes that the backward pass needs of one token."""
    widths = _FULL_WIDTHS * config.hidden_size + _INNER_WIDTHS * config.intermediate_size
    return int(config.num_hidden_layers * widths * _FLOAT)


def _read_bytes(config: Any) -> int:
    """Bytes that one token takes in a pass without a backward pass: one layer's."""
    widths = _FULL_WIDTHS * config.hidden_size + _INNER_WIDTHS * config.intermediate_size
    return int(widths * _FLOAT)


def _cached_bytes(config: Any) -> int:
    """Bytes of a token's keys and values, and a layer's own numbers while a prompt is read."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # While a token is appended, the old and the new keys and values of a layer are both there.
    return int((config.num_hidden_layers + 1) * 2 * heads * head_dim * _FLOAT) + _read_bytes(config)
