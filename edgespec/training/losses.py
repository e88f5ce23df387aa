"""Losses of a draft's next-token distribution q against the target's p.

Each takes log-probabilities [rows, vocabulary] of the draft and of the target, one row for each
token to be guessed, and returns one loss a row. Gradients go into the draft alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from edgespec.training.settings import LossName

FIRST_CHOICE_WEIGHT: Final = 0.5
SELECTED_SHARE: Final = 0.4
"""Of the tokens of a step, as in AdaSPEC."""


def forward_kl(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(p || q): the draft covers all that the target may say (FastDraft, 2411.11055)."""
    return (target.exp() * (target - draft)).sum(-1)


def reverse_kl(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(q || p): the draft says nothing that the target would not (DistillSpec, 2310.08461)."""
    return (draft.exp() * (draft - target)).sum(-1)


def total_variation(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """TV(p, q), the share that even the best coupling rejects (DistillSpec, 2310.08461)."""
    return 0.5 * (draft.exp() - target.exp()).abs().sum(-1)


def first_choice(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(p || q) plus half the cross-entropy on the target's first choice, which is what greedy
    acceptance counts; the bundled pair was trained by it."""
    best = target.argmax(-1, keepdim=True)
    likelihood = draft.gather(-1, best).squeeze(-1)
    return forward_kl(draft, target) - FIRST_CHOICE_WEIGHT * likelihood


def most_to_gain(
    draft: torch.Tensor, target: torch.Tensor, reference: torch.Tensor, share: float
) -> torch.Tensor:
    """bool [rows]: the ``share`` of rows, at least one, at which the draft is furthest behind
    ``reference``, a trained draft of its size. What no draft of this size learns is left out
    (AdaSPEC, 2510.19779). Ties go to the first rows."""
    behind = (forward_kl(draft, target) - forward_kl(reference, target)).detach()
    order = behind.argsort(descending=True, stable=True)
    chosen = torch.zeros(len(behind), dtype=torch.bool, device=behind.device)
    chosen[order[: max(1, round(share * len(behind)))]] = True
    return chosen


LOSSES: Final[Mapping[LossName, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    LossName.FIRST_CHOICE: first_choice,
    LossName.FORWARD_KL: forward_kl,
    LossName.REVERSE_KL: reverse_kl,
    LossName.TOTAL_VARIATION: total_variation,
    LossName.SELECTIVE: forward_kl,
}
"""``selective`` takes the rows of ``most_to_gain`` alone."""
