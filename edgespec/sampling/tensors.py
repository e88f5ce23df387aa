"""The sampling law on tensors: from many rows of logits to one token each, float32.

Theory of operation. Rows that are greedy and nothing else share one maximum. All others are warped
together, as in ``core/protocol/sampling.choose``: parameters are tensors over the rows, bias and
penalties are lists of (row, token, value) for all rows at once. So the number of torch operations
of a pass does not depend on its rows or texts. Ties go to the lowest token id. On a CPU, rows over
a large vocabulary are processed one by one instead (``arrays.py``), because few tokens of such a
row can win at all.

The result of a row never depends on the rows beside it, not even in the last bit. Rows are padded
to whole vectors, because the scalar function for the remainder of a tensor differs in the last bit,
and the sums of top-p run along a row, in float64, from left to right.

The integers of the noise are those of the scalar specification bit for bit: 32-bit arithmetic done
in int64, with a mask after every product and sum.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, starmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from edgespec.core.ports import ModelOutputError, PassRequest
from edgespec.core.protocol.sampling import (
    GOLDEN,
    MASK_32,
    MIX_A,
    MIX_B,
    SamplingParams,
    position_keys,
)
from edgespec.core.protocol.work import MIN_LOGPROB, Candidate, NodeScore, TokenScore
from edgespec.sampling.arrays import Workspace, best_of_scores, best_token


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.work = Workspace()


_SCRATCH = _Scratch()


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return ``array`` on ``device``, ready for later operations there. On a CPU it is the same
    memory. Unlike ``Tensor.to`` this does not make the host wait for a GPU."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def noise_bits(
    seeds: Sequence[int], positions: Sequence[int], vocabulary_size: int, device: torch.device
) -> torch.Tensor:
    """Return int64 [rows, vocabulary_size]: ``core.protocol.sampling.noise_bits`` of every token
    id.

    Row r belongs to ``seeds[r]`` and ``positions[r]``."""
    keys = [position_keys(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    first, second = to_device(np.array(keys, dtype=np.int64), device).view(-1, 2, 1).unbind(1)
    bits = _token_base(vocabulary_size, device) + first
    _mix_in_place(bits)
    bits ^= second
    _mix_in_place(bits)
    return bits


def gumbel_noise(
    seeds: Sequence[int], positions: Sequence[int], vocabulary_size: int, device: torch.device
) -> torch.Tensor:
    """Return float32 [rows, vocabulary_size]: one standard Gumbel variate for each row and token
    id."""
    bits = noise_bits(seeds, positions, vocabulary_size, device)
    # Exact in float32: 23 bits and a half.
    uniform = (bits >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


@lru_cache(maxsize=4)
def _token_base(vocabulary_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(vocabulary_size, dtype=torch.int64, device=device) * GOLDEN & MASK_32


def _mix_in_place(value: torch.Tensor) -> None:
    """Apply ``core.protocol.sampling.mix`` to every element in place; bits above 32 are ignored."""
    value &= MASK_32
    value ^= value >> 16
    value *= MIX_A
    value &= MASK_32
    value ^= value >> 13
    value *= MIX_B
    value &= MASK_32
    value ^= value >> 16


def forbid(logits: torch.Tensor, masks: Sequence[bytes | None]) -> torch.Tensor:
    """Return ``logits`` [rows, vocabulary] with -inf for each token that its row's mask forbids.

    A mask of None forbids nothing. ``logits`` itself is not changed; it is returned if nothing is
    forbidden."""
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    if not rows:
        return logits
    size = logits.shape[-1]
    bits = np.zeros((len(rows), -(-size // 8)), dtype=np.uint8)
    for place, row in enumerate(rows):
        mask = np.frombuffer(masks[row] or b"", dtype=np.uint8)[: bits.shape[1]]
        bits[place, : mask.size] = mask
    allowed = np.unpackbits(bits, axis=1, count=size, bitorder="little").view(np.bool_)
    forbidden = to_device(~allowed, logits.device)
    if len(rows) == len(masks):
        return logits.masked_fill(forbidden, -torch.inf)
    changed, places = logits.clone(), _index_tensor(rows, logits.device)
    changed[places] = logits[places].masked_fill(forbidden, -torch.inf)
    return changed


_FIRST_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The tokens before each of one session's sampled rows, with their counts."""

    tokens: npt.NDArray[np.int64]
    """[distinct tokens]: the ids, each once."""
    in_prompt: npt.NDArray[np.bool_]
    """[distinct tokens]: whether the prompt holds the token."""
    output_counts: npt.NDArray[np.int32]
    """[rows, distinct tokens]: occurrences of the token in the output before this row's
    position."""


class TextOccurrences:
    """Occurrences of each token in one text, whose first ``prompt_length`` tokens are the prompt.

    A text grows by a few tokens a pass and is sometimes cut back. The counts subtract the tokens
    behind the last unchanged one and add the new ones, so the cost is that of the changes."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._counted: list[int] = []
        self._place: dict[int, int] = {}
        self._tokens = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.zeros((2, _FIRST_CAPACITY), dtype=np.int32)
        """Counts in the prompt (row 0) and in the output (row 1), by the token's index."""

    def update(self, text: Sequence[int], unchanged_length: int) -> None:
        """Update the counts to ``text``, whose first ``unchanged_length`` tokens are the same as at
        the last call."""
        kept = min(unchanged_length, len(self._counted), len(text))
        for position in range(len(self._counted) - 1, kept - 1, -1):
            self._add(self._counted[position], position, -1)
        del self._counted[kept:]
        for position in range(kept, len(text)):
            self._add(text[position], position, 1)
        self._counted += text[kept:]

    def occurrences_before(self, nodes: Sequence[int], parents: Sequence[int]) -> Occurrences:
        """Return the occurrences before the token behind the text, and before the one behind each
        of ``nodes``.

        ``nodes`` form a tree behind the text, in which parents (-1: the text) come before their
        children."""
        known = len(self._place)
        fresh = {token: known + i for i, token in enumerate(set(nodes) - self._place.keys())}
        size = known + len(fresh)
        tokens = np.concatenate([self._tokens[:known], np.array(list(fresh), dtype=np.int64)])
        in_prompt = np.zeros(size, dtype=np.bool_)
        in_prompt[:known] = self._counts[0, :known] > 0
        outputs = np.zeros((1 + len(nodes), size), dtype=np.int32)
        outputs[0, :known] = self._counts[1, :known]
        for row, (token, parent) in enumerate(zip(nodes, parents, strict=True), start=1):
            outputs[row] = outputs[1 + parent]
            place = self._place.get(token)
            outputs[row, fresh[token] if place is None else place] += 1
        return Occurrences(tokens, in_prompt, outputs)

    def _add(self, token: int, position: int, change: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
            self._tokens[place] = token
        self._counts[0 if position < self._prompt_length else 1, place] += change


def score_passes(
    logits: torch.Tensor, batch: Sequence[PassRequest], chosen: Sequence[int]
) -> dict[str, tuple[TokenScore, ...]]:
    """Return the scores of every sampled row of the sessions that asked, by key; empty if none did.

    ``logits`` is [sampled rows of all requests, vocabulary] and is not changed; ``chosen`` are the
    rows' tokens."""
    if not any([request.logprobs for request in batch]):
        return {}
    scored = [(one, rows) for one, rows in _requests_with_rows(batch) if one.logprobs]
    if not scored:
        return {}
    rows = [row for _, own_rows in scored for row in own_rows]
    counts = [request.logprobs for request, own_rows in scored for _ in own_rows]
    logits = _select_rows(logits, rows).float()
    norms = logits.logsumexp(dim=-1, keepdim=True)
    best, ids = logits.topk(min(max(*counts, 2), logits.shape[-1]), dim=-1)
    best = (best - norms).clamp_(min=MIN_LOGPROB)
    index = _index_tensor([chosen[row] for row in rows], logits.device)[:, None]
    own: list[float] = (logits.gather(-1, index) - norms).clamp_(min=MIN_LOGPROB)[:, 0].tolist()
    scores = (
        TokenScore(
            logprob,
            values[0] - values[1] if len(values) > 1 else -MIN_LOGPROB,
            tuple(zip(row[:count], values[:count], strict=True)),
        )
        for logprob, row, values, count in zip(
            own, ids.tolist(), best.tolist(), counts, strict=True
        )
    )
    return {request.key: tuple(islice(scores, len(own_rows))) for request, own_rows in scored}


def _requests_with_rows(batch: Iterable[PassRequest]) -> Iterator[tuple[PassRequest, range]]:
    """Yield each request that samples, with its rows of the logits."""
    first = 0
    for request in batch:
        if request.sample:
            rows = range(first, first + 1 + len(request.tokens))
            yield request, rows
            first = rows.stop


def score_nodes(
    logits: torch.Tensor, batch: Sequence[PassRequest], blocks: Sequence[SampleBlock]
) -> dict[str, tuple[NodeScore, ...]]:
    """Return ``core/protocol/work.score_node`` of every node of the sessions that asked, by key.

    ``logits`` is [rows of all blocks, vocabulary] and is not changed; ``blocks`` belong to the
    requests that sample, in order."""
    pairs = zip(_requests_with_rows(batch), blocks, strict=True)
    scored = [(*one, block) for one, block in pairs if one[0].node_scores and one[0].tokens]
    if not scored:
        return {}
    rows: list[int] = []
    behind: list[int] = []
    tokens: list[int] = []
    for request, own_rows, _ in scored:
        behind += [len(rows) + 1 + parent for parent in request.parents]
        tokens += request.tokens
        rows += own_rows
    scored_blocks = [block for *_, block in scored]
    logits = _select_rows(logits, rows).float()
    laws = warp_rows(_apply_masks(logits, scored_blocks), scored_blocks).log_softmax(dim=-1)
    raw = logits.log_softmax(dim=-1)
    places = _index_tensor(behind, logits.device)
    index = _index_tensor(tokens, logits.device)[:, None]
    own = laws[places].gather(-1, index)
    columns = (
        own[:, 0],
        laws.amax(dim=-1)[places],
        (laws[places] > own).sum(dim=-1),
        torch.special.entr(laws.exp()).sum(dim=-1)[places],
        raw[places].gather(-1, index)[:, 0].clamp_(min=MIN_LOGPROB),
    )
    found = starmap(NodeScore, zip(*[one.tolist() for one in columns], strict=True))
    return {one.key: tuple(islice(found, len(one.tokens))) for one, *_ in scored}


_VECTOR_ELEMENTS = 64

# Vocabulary from which on a CPU processes each row by itself faster than all rows together.
_LARGE_VOCABULARY = 16_384


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """Parameters of one session's rows, beside their logits."""

    key: str
    """Session id, for messages."""
    params: SamplingParams
    positions: Sequence[int]
    """Position of the token to choose, for each row."""
    occurrences: Occurrences | None = None
    """Occurrences of the tokens before each row; required if ``params.is_penalised``."""
    masks: Sequence[bytes | None] = ()
    """Mask of the allowed tokens for each row, or empty if there are no constraints."""


def choose_tokens(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> list[int]:
    """Return the token of every row of every block, in order.

    ``logits`` is [rows of all blocks, vocabulary], of any float type, and is not changed. Raises
    ``ModelOutputError`` for the first session that has a row without a finite maximum."""
    if not logits.shape[0]:
        return []
    logits, best = _allowed_and_best(logits, blocks)
    chosen: list[int] = best.tolist()
    rows = (block for block in blocks for _ in block.positions)
    special = [index for index, block in enumerate(rows) if not _is_argmax(block.params)]
    if not special:
        return chosen
    special_blocks = [block for block in blocks if not _is_argmax(block.params)]
    picked = _choose_special(_select_rows(logits, special), special_blocks)
    for index, token in zip(special, picked, strict=True):
        chosen[index] = token
    return chosen


def _allowed_and_best(
    logits: torch.Tensor, blocks: Sequence[SampleBlock]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``logits`` without the forbidden tokens, and each row's best token; raises as
    ``choose_tokens`` does."""
    rows = [(block, position) for block in blocks for position in block.positions]
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    logits = _apply_masks(logits, blocks)
    largest, best = _row_maxima(logits)
    largest = largest.cpu()
    if not torch.isfinite(largest).all():
        row = int(torch.isfinite(largest).logical_not().nonzero()[0])
        block, position = rows[row]
        raise ModelOutputError(
            block.key,
            f"the largest logit at position {position} is {float(largest[row])},"
            " but must be finite",
        )
    return logits, best


def _apply_masks(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> torch.Tensor:
    masks = [mask for one in blocks for mask in one.masks or (None,) * len(one.positions)]
    return forbid(logits, masks)


def best_candidates_of_rows(
    logits: torch.Tensor, blocks: Sequence[SampleBlock], width: int
) -> list[tuple[Candidate, ...]]:
    """Return at most ``width`` candidates for every row.

    The token of ``choose_tokens`` comes first, then siblings drawn without replacement, with
    log-probabilities under the row's law (for greedy rows, that of temperature 1). ``logits`` and
    errors are as in ``choose_tokens``."""
    if not logits.shape[0]:
        return []
    logits, _ = _allowed_and_best(logits, blocks)
    params, positions = _expand_to_rows(blocks)
    scores = _adjusted_copy(logits, blocks)
    if _processes_single_rows(logits):
        rows = zip(scores.numpy(), params, positions, strict=True)
        return [best_of_scores(row, one, at, width, _SCRATCH.work) for row, one, at in rows]
    laws = _truncate_sampled_rows(scores, params)
    noisy = _add_noise(laws.clone(), params, positions)
    best, ids = noisy.topk(min(width, logits.shape[-1]), dim=-1)
    logprobs = laws.gather(-1, ids) - laws.logsumexp(dim=-1, keepdim=True)
    logprobs = logprobs.masked_fill(best == -torch.inf, -torch.inf)
    return [
        tuple([Candidate(*one) for one in zip(*row, strict=True) if one[1] > -math.inf])
        for row in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


def best_tokens(logits: torch.Tensor) -> list[int] | None:
    """Return ``choose_tokens`` for rows that are all plain and unconstrained; None where that would
    raise."""
    if not logits.shape[0]:
        return []
    largest, best = _row_maxima(logits)
    if not math.isfinite(float(largest.cpu().abs().max())):
        return None
    chosen: list[int] = best.tolist()
    return chosen


def _row_maxima(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest value and its first index; NaN if the row holds one. On the CPU
    numpy finds it ten times faster than torch."""
    if logits.device.type != "cpu":
        return logits.max(dim=-1)
    best = torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    return logits.gather(-1, best[:, None])[:, 0], best


def warp_rows(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> torch.Tensor:
    """Return float32 [rows, vocabulary]: ``core/protocol/sampling.warp`` of every row."""
    params, _ = _expand_to_rows(blocks)
    scores = _truncate_sampled_rows(_adjusted_copy(logits, blocks), params)
    return scores[:, : logits.shape[-1]]


def is_plain(params: SamplingParams) -> bool:
    """Return whether the token is simply the one with the largest logit."""
    return _is_argmax(params) and params.constraint is None and not params.min_tokens


def _is_argmax(params: SamplingParams) -> bool:
    return params.is_greedy and not params.is_penalised and not params.logit_bias


def _select_rows(rows: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Return ``rows[indices]``, without a copy if that is all rows; ``indices`` ascend."""
    return rows if len(indices) == rows.shape[0] else rows[_index_tensor(indices, rows.device)]


def _replace_rows(rows: torch.Tensor, indices: Sequence[int], new: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` with ``new`` at ``indices``: changed in place, or ``new`` itself if that is
    all."""
    if len(indices) == rows.shape[0]:
        return new
    rows[_index_tensor(indices, rows.device)] = new
    return rows


def _index_tensor(indices: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the indices as int64 on ``device``. Indexing with a list would make the host wait for
    a GPU."""
    return to_device(np.array(indices, dtype=np.int64), device)


def _expand_to_rows(blocks: Sequence[SampleBlock]) -> tuple[list[SamplingParams], list[int]]:
    """Return the parameters of every row, and the position of its token."""
    rows = [(block.params, position) for block in blocks for position in block.positions]
    return [params for params, _ in rows], [position for _, position in rows]


def _choose_special(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> list[int]:
    params, positions = _expand_to_rows(blocks)
    if not _processes_single_rows(logits):
        scores = _truncate_sampled_rows(_adjusted_copy(logits, blocks), params)
        chosen: list[int] = _add_noise(scores, params, positions).argmax(-1).tolist()
        return chosen
    scores = logits.float()
    if any(block.params.is_penalised or block.params.logit_bias for block in blocks):
        scores = scores.clone() if scores is logits else scores
        _adjust(scores, blocks, logits.shape[-1])
    rows = zip(scores.numpy(), params, positions, strict=True)
    return [best_token(row, one, at, _SCRATCH.work) for row, one, at in rows]


def _processes_single_rows(logits: torch.Tensor) -> bool:
    """Return whether to process each row by itself with ``arrays.py``."""
    return logits.device.type == "cpu" and logits.shape[-1] >= _LARGE_VOCABULARY


def _add_noise(
    scores: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """Return truncated ``scores``, which may be changed, plus the noise of the rows that are not
    greedy."""
    noisy = [row for row, one in enumerate(params) if not one.is_greedy]
    if noisy:
        seeds, places = [params[row].seed for row in noisy], [positions[row] for row in noisy]
        noise = gumbel_noise(seeds, places, scores.shape[-1], scores.device)
        return _replace_rows(scores, noisy, noise.add_(_select_rows(scores, noisy)))
    return scores


def _adjusted_copy(logits: torch.Tensor, blocks: Sequence[SampleBlock]) -> torch.Tensor:
    """Return a float32 copy with bias and penalties, padded with columns of -inf to whole
    vectors."""
    rows, vocabulary_size = logits.shape
    padded = -(-vocabulary_size // _VECTOR_ELEMENTS) * _VECTOR_ELEMENTS
    scores = torch.full((rows, padded), -torch.inf, dtype=torch.float32, device=logits.device)
    scores[:, :vocabulary_size] = logits
    _adjust(scores, blocks, vocabulary_size)
    return scores


def _truncate_sampled_rows(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return ``scores`` with ``_truncate`` applied to the rows that are not greedy; may change
    ``scores``."""
    noisy = [row for row, one in enumerate(params) if not one.is_greedy]
    if not noisy:
        return scores
    truncated = _truncate(_select_rows(scores, noisy), [params[row] for row in noisy])
    return _replace_rows(scores, noisy, truncated)


def _adjust(scores: torch.Tensor, blocks: Sequence[SampleBlock], vocabulary_size: int) -> None:
    """Apply bias, then penalties, in place. Repetition counts prompt and output, presence and
    frequency the output only."""
    biases, penalties, first = [], [], 0
    for block in blocks:
        count = len(block.positions)
        bias = {t: b for t, b in block.params.logit_bias.items() if 0 <= t < vocabulary_size}
        if bias and count:
            amounts = np.tile([*bias.values()], count)
            biases.append((*_repeat_for_rows(first, count, np.array([*bias])), amounts))
        if block.params.is_penalised:
            penalties.append(_penalty_entries(first, block))
        first += count
    if biases:
        rows, tokens, values = _make_columns(biases, scores.device)
        scores[rows, tokens] += values.to(scores.dtype)
    if penalties:
        rows, tokens, factors, taken = _make_columns(penalties, scores.device)
        values = scores[rows, tokens]
        values = torch.where(values > 0, values / factors, values * factors)
        scores[rows, tokens] = values - taken


def _make_columns(
    entries: Sequence[tuple[np.ndarray, ...]], device: torch.device
) -> list[torch.Tensor]:
    return [to_device(np.concatenate(column), device) for column in zip(*entries, strict=True)]


def _repeat_for_rows(first: int, count: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return row and token of each entry, for ``count`` rows from ``first`` on that have all
    ``tokens``."""
    return np.repeat(np.arange(first, first + count), len(tokens)), np.tile(tokens, count)


def _penalty_entries(first_row: int, block: SampleBlock) -> tuple[np.ndarray, ...]:
    """Return rows, tokens, repetition factors and amounts to subtract, [entries] each."""
    params, before = block.params, block.occurrences
    assert before is not None, f"{block.key}: penalties need the tokens before the rows"
    counts = before.output_counts
    assert counts.shape[0] == len(block.positions), (counts.shape, block.positions)
    factors = np.where(before.in_prompt | (counts > 0), params.repetition_penalty, 1.0)
    amounts = np.where(counts > 0, params.presence_penalty + params.frequency_penalty * counts, 0.0)
    both = (one.astype(np.float32).ravel() for one in (factors, amounts))
    return *_repeat_for_rows(first_row, counts.shape[0], before.tokens), *both


def _truncate(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p to every row; no row is greedy."""

    def column(
        value: Callable[[SamplingParams], float], of: Sequence[SamplingParams] = params
    ) -> torch.Tensor:
        values = np.array([value(one) for one in of], dtype=np.float64)
        return to_device(values, scores.device)[:, None]

    scores = scores / column(lambda p: p.temperature).float()
    limited = [row for row, p in enumerate(params) if p.top_k or p.top_p < 1.0]
    if limited:
        kept = _top_k_top_p(
            _select_rows(scores, limited),
            [params[row].top_k for row in limited],
            column(lambda p: p.top_p, [params[row] for row in limited]),
        )
        scores = _replace_rows(scores, limited, kept)
    if any(p.min_p > 0.0 for p in params):
        limits = column(lambda p: math.log(p.min_p) if p.min_p else -math.inf).float()
        least = scores.amax(dim=-1, keepdim=True) + limits
        scores = scores.masked_fill(scores < least, -torch.inf)
    return scores


def _top_k_top_p(scores: torch.Tensor, k: Sequence[int], p: torch.Tensor) -> torch.Tensor:
    """Return ``scores`` with -inf for what top-k (0 keeps all) or top-p (float64 [rows, 1])
    removes.

    Both cut by value. Of the scores equal to the last one of a nucleus as many are kept as belong
    to it, lowest ids first."""
    size, on_cpu = scores.shape[-1], scores.device.type == "cpu"
    if on_cpu:  # numpy sorts many times faster than torch
        ordered = torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    else:
        ordered = scores.sort(dim=-1, descending=True).values
    places = _index_tensor([min(one or size, size) - 1 for one in k], scores.device)
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
    # Except on a CPU the test would take longer than the operation.
    if not on_cpu or bool((equal.sum(dim=-1, keepdim=True) > room).any()):
        equal &= equal.cumsum(dim=-1) <= room
    return scores.masked_fill(~(equal | (scores > last)), -torch.inf)
