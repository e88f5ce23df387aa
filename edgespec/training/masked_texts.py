"""Texts for a draft that fills several positions in one run (PARD, arXiv 2504.18583).

A parallel draft reads the tokens that are known, and behind them copies of a mask token. The row of
the last known token predicts the next one, and the row of the j-th mask the token j positions
behind that. A text is learned from in one pass: behind its tokens stand rows of masks, each with an
*anchor*, its last known token. A mask sees the tokens up to its anchor and the masks before it
behind the same anchor, and no other row sees a mask. So rows of tokens compute what they compute
without masks, and the draft still works one token at a time.

With K positions there would be K times as many rows. Masks further behind their anchor are kept
with a falling share (the paper's conditional drop of tokens, section 3.2.2). A mask is kept only
with all masks before it, because it sees them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from edgespec.sampling.tensors import gumbel_noise
from edgespec.training.kept_rows import find_rows
from edgespec.training.texts import (
    LOGITS_AT_ONCE,
    HeldBack,
    Hidden,
    Text,
    head_logits,
    row_parts,
)

KEPT_SHARE, LEAST_KEPT_SHARE = 0.7, 0.2
"""Share of the masks that are kept at each further position, and the least share of all masks at a
position: the paper's values, with which its accuracy hardly fell."""

ChooseDepth = Callable[[], int]
"""Returns the number of masks behind the next anchor."""


class MaskedTexts(NamedTuple):
    """Texts with rows of masks behind their tokens, padded at the right."""

    tokens: torch.Tensor
    """Ids [texts, rows]."""
    positions: torch.Tensor
    """Position of each row in its text [texts, rows]."""
    attention: torch.Tensor
    """Whether a row sees another one: bool [texts, 1, rows, rows]."""
    places: torch.Tensor
    """Indices, in the flat [texts * rows], of the rows that predict a token."""
    depths: torch.Tensor
    """Number of masks up to each such row, from 0 on: how far behind its anchor's next token it
    predicts."""
    wanted: torch.Tensor
    """Index of the predicted token among the predicted tokens of all texts, in order: the rows of
    ``texts.pad_texts``."""


def choose_mask_token(
    ids: Sequence[int], token_count: int, special: Collection[int], used: Collection[int | None]
) -> int:
    """Return the id that is to stand for a token that is not known yet.

    Args:
        ids: The ids that the draft has rows for, ascending.
        token_count: Number of ids up to the last one that has a text. Ids behind it are padding.
        special: Ids of special tokens.
        used: Ids that have a use: ends of text, and all that occur in the texts.

    Returns:
        An id without a text; else a special token without a use, which is reserved; else the last
        id without a use. If such a token is fed after all, the draft guesses badly behind it.

    Raises:
        ValueError: Each id has a use.
    """
    free = [one for one in ids if one not in used]
    padding = [one for one in free if one >= token_count]
    reserved = [one for one in free if one in special]
    if not free:
        raise ValueError(
            f"all of the draft's {len(ids)} ids occur in the texts: none can be a mask"
        )
    return padding[0] if padding else (reserved or free)[-1]


def draw_depths(count: int, dice: random.Random) -> ChooseDepth:
    """Return a function that draws numbers of masks for a draft of ``count`` positions.

    A j-th mask is kept with the chance max(0.7**j, 0.2). For 8 positions that is 2.4 masks per
    token on average, instead of 7."""
    shares = [max(KEPT_SHARE**depth, LEAST_KEPT_SHARE) for depth in range(count)]

    def choose() -> int:
        drawn = dice.random()
        return sum(drawn < share for share in shares[1:])

    return choose


def every_depth(count: int, stride: int) -> ChooseDepth:
    """Return a function that gives all ``count - 1`` masks to every ``stride``-th anchor and none
    to the others, for judging."""
    calls = iter(range(1 << 62))
    return lambda: 0 if next(calls) % stride else count - 1


def mean_masks(count: int) -> float:
    """Return the mean number of masks per predicted token that ``draw_depths`` chooses."""
    return sum(max(KEPT_SHARE**depth, LEAST_KEPT_SHARE) for depth in range(1, count))


def add_masks(
    texts: Sequence[Text], mask_token: int, choose: ChooseDepth, device: torch.device
) -> MaskedTexts:
    """Return ``texts`` with rows of masks behind the tokens from which others are predicted."""
    anchors, depths, places, wanted = [], [], list[tuple[int, int]](), list[int]()
    predicted = 0
    for number, (tokens, start) in enumerate(texts):
        own, behind = list(range(len(tokens))), [0] * len(tokens)
        last = len(tokens) - 2
        for anchor in range(start - 1, last + 1):
            first = predicted + anchor - (start - 1)
            places.append((number, anchor))
            wanted.append(first)
            for depth in range(1, min(choose(), last - anchor) + 1):
                places.append((number, len(own)))
                wanted.append(first + depth)
                own.append(anchor)
                behind.append(depth)
        predicted += last - start + 2
        anchors.append(own)
        depths.append(behind)
    rows = max(map(len, anchors))
    filled = torch.full((len(texts), rows), mask_token)
    for number, text in enumerate(texts):
        filled[number, : len(text.tokens)] = torch.tensor(text.tokens)
    # Padding has a depth of its own, which no row sees but itself.
    at = torch.tensor([one + [0] * (rows - len(one)) for one in anchors])
    behind_it = torch.tensor([one + [-1] * (rows - len(one)) for one in depths])
    seen, seeing = at[:, None, :], at[:, :, None]
    own_masks = (seen == seeing) & (behind_it[:, None, :] <= behind_it[:, :, None])
    attention = torch.where(behind_it[:, None, :] == 0, seen <= seeing, own_masks)
    attention &= behind_it[:, None, :] >= 0
    attention |= torch.eye(rows, dtype=torch.bool)
    flat = torch.tensor([number * rows + row for number, row in places])
    return MaskedTexts(
        filled.to(device),
        (at + behind_it.clamp(min=0)).to(device),
        attention[:, None].to(device),
        flat.to(device),
        behind_it.flatten()[flat].to(device),
        torch.tensor(wanted, device=device),
    )


def masked_rows(model: Any, texts: MaskedTexts) -> Hidden:
    """Run the decoder of ``model`` over texts with masks. Return its output, and its last hidden
    states at the rows that predict a token."""
    table, tokens = find_rows(model), texts.tokens
    output = model.base_model(
        tokens if table is None else table.of_ids[tokens],
        attention_mask=texts.attention,
        position_ids=texts.positions,
        use_cache=False,
    )
    return output, output.last_hidden_state.flatten(0, 1)[texts.places]


@dataclass(frozen=True, slots=True)
class RunsOfText:
    """Runs of a parallel draft over one text, each behind a token of it."""

    runs: int
    right: tuple[int, ...]
    """Number of runs whose first 1, 2, .. tokens are all the target's."""

    @property
    def tokens_per_run(self) -> float:
        """Mean number of first tokens of a run that are the target's."""
        return sum(self.right) / self.runs


@torch.inference_mode()
def judge_runs(
    draft: Any, held: HeldBack, mask_token: int, count: int
) -> dict[float, list[RunsOfText]]:
    """Return, by temperature, the runs of ``count`` positions over each held-back text."""
    found: dict[float, list[RunsOfText]] = {}
    for heat, texts, seeds, wanted in held.texts_by_temperature():
        for text, seed, its in zip(texts, seeds, wanted, strict=True):
            held.check()
            found.setdefault(heat, []).append(
                _judge_text(draft, text, heat, seed, its, mask_token, count, held.id_count)
            )
    return found


def _judge_text(
    draft: Any,
    text: Text,
    heat: float,
    seed: int,
    its: torch.Tensor,
    mask_token: int,
    count: int,
    size: int,
) -> RunsOfText:
    table = find_rows(draft)
    masked = add_masks([text], mask_token, every_depth(count, max(1, count // 2)), draft.device)
    output, rows = masked_rows(draft, masked)
    right = []
    for part in row_parts(len(rows), size, LOGITS_AT_ONCE):
        scores = head_logits(draft, output, rows[part]).float()
        scores = (scores if table is None else table.scatter(scores))[:, :size]
        wanted = masked.wanted[part]
        if heat:
            places = (wanted + text.start).tolist()
            scores = scores + heat * gumbel_noise([seed] * len(places), places, size, scores.device)
        right.append(scores.argmax(-1) == its.to(scores.device)[wanted])
    hits, depths = torch.cat(right).tolist(), masked.depths.tolist()
    runs, first, counts = 0, 0, [0] * count
    while first < len(hits):
        end = first + 1
        while end < len(hits) and depths[end]:
            end += 1
        if end - first == count:  # a run that the end of the text does not cut
            runs += 1
            for depth, hit in enumerate(hits[first:end]):
                if not hit:
                    break
                counts[depth] += 1
        first = end
    return RunsOfText(max(1, runs), tuple(counts))
