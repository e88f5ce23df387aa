"""Many rows of logits to one token each: ``core/sampling.choose`` in torch, float32.

Theory of operation. Rows that are greedy and nothing else share one argmax. Of the others, bias
and penalties are applied row by row (only where asked for), then all rows with the same
truncation are warped together, each with the noise of its own seed and position. Ties go to the
lowest token id, as torch.argmax does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgespec.core.sampling import SamplingParams
from edgespec.targets.noise import gumbel_noise


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits needs besides the logits."""

    params: SamplingParams
    position: int
    """Of the token to be chosen."""
    prompt: Sequence[int] = ()
    """Looked at only when ``params.penalised``; so is ``output``."""
    output: Sequence[int] = ()


def choose_tokens(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The token of every row. ``logits`` [len(rows), vocabulary], any float type, not changed."""
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    if not rows:
        return []
    special = [index for index, row in enumerate(rows) if not _plain(row.params)]
    if len(special) == len(rows):
        return _choose_special(logits, rows)
    chosen: list[int] = logits.argmax(dim=-1).tolist()
    if special:
        picked = _choose_special(logits[special], [rows[index] for index in special])
        for index, token in zip(special, picked, strict=True):
            chosen[index] = token
    return chosen


def warp_rows(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """float32 [len(rows), vocabulary]: ``core/sampling.warp`` of every row."""
    scores = logits.to(torch.float32, copy=True)
    for index, row in enumerate(rows):
        if row.params.logit_bias:
            _add_bias(scores[index], row.params)
        if row.params.penalised:
            _penalise(scores[index], row)
    groups: dict[tuple[float, int, float, float], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        p = row.params
        if not p.greedy:
            groups[p.temperature, p.top_k, p.top_p, p.min_p].append(index)
    for (temperature, top_k, top_p, min_p), members in groups.items():
        part = scores if len(members) == len(rows) else scores[members]
        part = _top_k(part / temperature, top_k)
        part = _min_p(_top_p(part, top_p), min_p)
        if len(members) == len(rows):
            return part
        scores[members] = part
    return scores


def _plain(params: SamplingParams) -> bool:
    return params.greedy and not params.penalised and not params.logit_bias


def _choose_special(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    scores = warp_rows(logits, rows)
    noisy = [index for index, row in enumerate(rows) if not row.params.greedy]
    if noisy:
        noise = gumbel_noise(
            [rows[index].params.seed for index in noisy],
            [rows[index].position for index in noisy],
            scores.shape[-1],
            scores.device,
        )
        if len(noisy) == len(rows):
            scores += noise
        else:
            scores[noisy] += noise
    chosen: list[int] = scores.argmax(dim=-1).tolist()
    return chosen


def _add_bias(score: torch.Tensor, params: SamplingParams) -> None:
    inside = {t: b for t, b in params.logit_bias.items() if 0 <= t < score.shape[0]}
    if inside:
        tokens = torch.tensor(list(inside), device=score.device)
        score[tokens] += torch.tensor(list(inside.values()), dtype=score.dtype, device=score.device)


def _penalise(score: torch.Tensor, row: SampleRow) -> None:
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt, *row.output}), dtype=torch.long)
        seen = seen.to(score.device)
        values = score[seen]
        factor = params.repetition_penalty
        score[seen] = torch.where(values > 0, values / factor, values * factor)
    if row.output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(row.output)
        tokens = torch.tensor(list(counts), device=score.device)
        penalties = [
            params.presence_penalty + params.frequency_penalty * c for c in counts.values()
        ]
        score[tokens] -= torch.tensor(penalties, dtype=score.dtype, device=score.device)


def _top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    if k == 0 or k >= scores.shape[-1]:
        return scores
    threshold = scores.topk(k, dim=-1).values[:, -1:]
    return scores.masked_fill(scores < threshold, -torch.inf)


def _top_p(scores: torch.Tensor, p: float) -> torch.Tensor:
    if p >= 1.0:
        return scores
    # A stable sort keeps equal scores in the order of their ids, as the specification does.
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    weights = (ordered - ordered[:, :1]).exp_()
    mass_before = weights.cumsum(dim=-1)
    total = mass_before[:, -1:].clone()
    mass_before -= weights
    dropped = mass_before >= p * total
    # Rounding in the difference must never drop the most likely token.
    dropped[:, 0] = False
    return scores.masked_fill(dropped.gather(-1, order.argsort(dim=-1)), -torch.inf)


def _min_p(scores: torch.Tensor, p: float) -> torch.Tensor:
    if p == 0.0:
        return scores
    limit = torch.tensor(p, dtype=scores.dtype, device=scores.device).log()
    return scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + limit, -torch.inf)
