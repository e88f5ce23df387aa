"""Many rows of logits to one token each: ``core/protocol/sampling.choose`` in torch, float32.

Theory of operation. Rows that are greedy and nothing else share one maximum. All others are warped
together: parameters are tensors over the rows, bias and penalties are lists of (row, token, value)
for all rows at once. So the number of torch operations of a pass does not depend on its rows or
texts. Ties go to the lowest token id. On a CPU, rows over a large vocabulary are then looked at one
by one (``large_rows.py``): few tokens of such a row can win at all.

What a row becomes never depends on the rows beside it, not even in the last bit: rows are padded to
whole vectors (the scalar function for what is left over at the end of a tensor differs in the last
bit), and the sums of top-p run along a row, in float64, from left to right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgespec.core.ports import ModelOutputError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling.torch_device_copies import to_device
from edgespec.sampling.torch_forbid import forbid
from edgespec.sampling.torch_large_rows import choose_in_row
from edgespec.sampling.torch_noise import gumbel_noise
from edgespec.sampling.torch_token_counts import Occurrences

_VECTOR_ELEMENTS = 64
# From here on looking at each row by itself costs a CPU less than all tokens of all rows.
_LARGE_VOCABULARY = 16_384


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """One session's rows: what they need besides their logits."""

    key: str
    """The session, for messages."""
    params: SamplingParams
    positions: Sequence[int]
    """Of the token to be chosen, for each row."""
    occurrences: Occurrences | None = None
    """Of the tokens before each row; needed when ``params.penalised``."""
    masks: Sequence[bytes | None] = ()
    """Of each row, or none at all: the tokens that the constraint allows there."""


def choose_tokens(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> list[int]:
    """The token of every row of every block, in order.

    ``logits`` is [rows of all blocks, vocabulary], of any float type, and is not changed. Raises
    ``ModelOutputError`` naming the first session that has a row without a finite maximum.
    """
    rows = [(block, row) for block in blocks for row in range(len(block.positions))]
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    if not rows:
        return []
    logits = forbid(logits, [mask for block in blocks for mask in _masks(block)])
    largest, best = _largest(logits)
    largest = largest.cpu()
    if not torch.isfinite(largest).all():
        row = int(torch.isfinite(largest).logical_not().nonzero()[0])
        raise ModelOutputError(
            rows[row][0].key,
            f"the largest logit at position {rows[row][0].positions[rows[row][1]]} is"
            f" {float(largest[row])}, but must be finite",
        )
    chosen: list[int] = best.tolist()
    special = [index for index, (block, _) in enumerate(rows) if not _plain(block.params)]
    if not special:
        return chosen
    special_blocks = [block for block in blocks if not _plain(block.params)]
    picked = _choose_special(_only(logits, special), special_blocks)
    for index, token in zip(special, picked, strict=True):
        chosen[index] = token
    return chosen


def best_tokens(logits: torch.Tensor) -> list[int] | None:
    """``choose_tokens`` where all rows are plain and unconstrained; None where it would raise."""
    if not logits.shape[0]:
        return []
    largest, best = _largest(logits)
    if not math.isfinite(float(largest.cpu().abs().max())):
        return None
    chosen: list[int] = best.tolist()
    return chosen


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest value, NaN wherever the row holds one, and its first place. On the CPU
    numpy finds it ten times faster than torch."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    best = torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    return logits.gather(-1, best[:, None])[:, 0], best


def warp_rows(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> torch.Tensor:
    """float32 [rows, vocabulary]: ``core/protocol/sampling.warp`` of every row."""
    return _warp(logits, blocks)[:, : logits.shape[-1]]


def _masks(block: SampleBlock) -> Sequence[bytes | None]:
    return block.masks or (None,) * len(block.positions)


def is_plain(params: SamplingParams) -> bool:
    """Whether the token is the largest logit, and nothing else is asked."""
    return _plain(params) and params.constraint is None


def _plain(params: SamplingParams) -> bool:
    return params.greedy and not params.penalised and not params.logit_bias


def _only(rows: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """``rows[indices]`` without a copy when that is all of them; ``indices`` ascend."""
    return rows if len(indices) == rows.shape[0] else rows[_at(indices, rows.device)]


def _at(indices: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 on ``device``. A list as an index would make the host wait for a GPU."""
    return to_device(np.array(indices, dtype=np.int64), device)


def _choose_special(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> list[int]:
    params = [block.params for block in blocks for _ in block.positions]
    positions = [position for block in blocks for position in block.positions]
    if logits.device.type == "cpu" and logits.shape[-1] >= _LARGE_VOCABULARY:
        return _choose_row_by_row(logits, blocks, params, positions)
    return _draw(_adjusted(logits, blocks), params, positions)


def _choose_row_by_row(
    logits: torch.Tensor,
    blocks: Sequence[SampleBlock],
    params: Sequence[SamplingParams],
    positions: Sequence[int],
) -> list[int]:
    """The same tokens by ``large_rows.py``, which looks at few of them closely."""
    scores = logits.float()
    if any(block.params.penalised or block.params.logit_bias for block in blocks):
        scores = scores.clone() if scores is logits else scores
        _add_bias(scores, blocks, logits.shape[-1])
        _penalise(scores, blocks)
    chosen = []
    for row, (one, position) in enumerate(zip(params, positions, strict=True)):
        token = choose_in_row(scores[row].numpy(), one, position)
        if token is None:
            [token] = _draw(_padded(scores[row : row + 1]), [one], [position])
        chosen.append(token)
    return chosen


def _draw(
    scores: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """Of each row of adjusted scores the token, by its sampling alone; ``scores`` may change."""
    scores = _truncated(scores, params)
    noisy = [row for row, one in enumerate(params) if not one.greedy]
    if noisy:
        noise = gumbel_noise(
            [params[row].seed for row in noisy],
            [positions[row] for row in noisy],
            scores.shape[-1],
            scores.device,
        )
        if len(noisy) == len(params):
            scores += noise
        else:
            scores[_at(noisy, scores.device)] += noise
    chosen: list[int] = scores.argmax(dim=-1).tolist()
    return chosen


def _warp(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> torch.Tensor:
    """As ``warp_rows``, with columns of -inf up to whole vectors."""
    params = [block.params for block in blocks for _ in block.positions]
    return _truncated(_adjusted(logits, blocks), params)


def _padded(logits: torch.Tensor) -> torch.Tensor:
    """A float32 copy with columns of -inf up to whole vectors."""
    rows, vocabulary_size = logits.shape
    padded = -(-vocabulary_size // _VECTOR_ELEMENTS) * _VECTOR_ELEMENTS
    scores = torch.full((rows, padded), -torch.inf, dtype=torch.float32, device=logits.device)
    scores[:, :vocabulary_size] = logits
    return scores


def _adjusted(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> torch.Tensor:
    """``_padded``, with bias and penalties."""
    scores = _padded(logits)
    _add_bias(scores, blocks, logits.shape[-1])
    _penalise(scores, blocks)
    return scores


def _truncated(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Of the rows that are not greedy ``_truncate``; may change ``scores``."""
    noisy = [row for row, one in enumerate(params) if not one.greedy]
    if not noisy:
        return scores
    truncated = _truncate(_only(scores, noisy), [params[row] for row in noisy])
    if len(noisy) == len(params):
        return truncated
    scores[_at(noisy, scores.device)] = truncated
    return scores


def _first_rows(blocks: Sequence[SampleBlock]) -> list[int]:
    first, rows = 0, []
    for block in blocks:
        rows.append(first)
        first += len(block.positions)
    return rows


def _add_bias(scores: torch.Tensor, blocks: Sequence[SampleBlock], vocabulary_size: int) -> None:
    rows: list[int] = []
    tokens: list[int] = []
    biases: list[float] = []
    for first, block in zip(_first_rows(blocks), blocks, strict=True):
        inside = {t: b for t, b in block.params.logit_bias.items() if 0 <= t < vocabulary_size}
        for row in range(first, first + len(block.positions)) if inside else ():
            rows += [row] * len(inside)
            tokens += inside
            biases += inside.values()
    if rows:
        where = tuple(_at(places, scores.device) for places in (rows, tokens))
        scores[where] += to_device(np.array(biases), scores.device).to(scores.dtype)


def _penalise(scores: torch.Tensor, blocks: Sequence[SampleBlock]) -> None:
    """Repetition counts prompt and output, presence and frequency count output only."""
    entries = [
        _penalties(first, block)
        for first, block in zip(_first_rows(blocks), blocks, strict=True)
        if block.params.penalised
    ]
    if not entries:
        return
    rows, tokens, factors, amounts = (
        to_device(np.concatenate(column), scores.device) for column in zip(*entries, strict=True)
    )
    values = scores[rows, tokens]
    values = torch.where(values > 0, values / factors, values * factors)
    scores[rows, tokens] = values - amounts


def _penalties(first_row: int, block: SampleBlock) -> tuple[np.ndarray, ...]:
    """Rows, tokens, repetition factors and amounts to subtract, [entries] each."""
    params, found = block.params, block.occurrences
    assert found is not None, f"{block.key}: penalties need the tokens before the rows"
    counts = found.output_counts
    assert counts.shape[0] == len(block.positions), (counts.shape, block.positions)
    factors = np.where(found.in_prompt | (counts > 0), params.repetition_penalty, 1.0)
    amounts = np.where(counts > 0, params.presence_penalty + params.frequency_penalty * counts, 0.0)
    rows = np.repeat(np.arange(first_row, first_row + counts.shape[0]), counts.shape[1])
    tokens = np.tile(found.tokens, counts.shape[0])
    return rows, tokens, factors.astype(np.float32).ravel(), amounts.astype(np.float32).ravel()


def _truncate(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k, top-p and min-p of every row, none of them greedy."""

    def column(
        value: Callable[[SamplingParams], float], of: Sequence[SamplingParams] = params
    ) -> torch.Tensor:
        values = np.array([value(one) for one in of], dtype=np.float64)
        return to_device(values, scores.device)[:, None]

    scores = scores / column(lambda p: p.temperature).float()
    limited = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    if limited:
        kept = _top_k_top_p(
            _only(scores, limited),
            [params[row].top_k for row in limited],
            column(lambda p: p.top_p, [params[row] for row in limited]),
        )
        if len(limited) == len(params):
            scores = kept
        else:
            scores[_at(limited, scores.device)] = kept
    if any(p.min_p > 0.0 for p in params):
        limits = column(lambda p: math.log(p.min_p) if p.min_p else -math.inf).float()
        least = scores.amax(dim=-1, keepdim=True) + limits
        scores = scores.masked_fill(scores < least, -torch.inf)
    return scores


def _top_k_top_p(scores: torch.Tensor, k: Sequence[int], p: torch.Tensor) -> torch.Tensor:
    """Scores that top-k (0 keeps all) or top-p (float64 [rows, 1]) take out become -inf.

    Both cut by value. Of the scores equal to the last one of a nucleus as many are kept as belong
    to it, lowest ids first.
    """
    size = scores.shape[-1]
    ordered = _descending(scores)
    places = _at([min(one or size, size) - 1 for one in k], scores.device)
    out = ordered < ordered.gather(-1, places[:, None])
    ordered = ordered.masked_fill(out, -torch.inf)
    mass = (ordered - ordered[:, :1]).exp_().cumsum(dim=-1, dtype=torch.float64)
    # A token is in the nucleus while the mass before it is too small; the first always is.
    inside = mass[:, :-1] < p * mass[:, -1:]
    count = 1 + inside.sum(dim=-1, keepdim=True)
    everything = p >= 1.0
    count = torch.where(everything, (ordered > -torch.inf).sum(dim=-1, keepdim=True), count)
    last = ordered.gather(-1, count - 1)
    equal = scores == last
    room = count - (ordered > last).sum(dim=-1, keepdim=True)
    # Elsewhere than on a CPU asking would take longer than doing it.
    if scores.device.type != "cpu" or bool((equal.sum(dim=-1, keepdim=True) > room).any()):
        equal &= equal.cumsum(dim=-1) <= room
    return scores.masked_fill(~(equal | (scores > last)), -torch.inf)


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """Each row's scores, largest first. numpy sorts on the CPU, many times faster than torch."""
    if scores.device.type != "cpu":
        return scores.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
