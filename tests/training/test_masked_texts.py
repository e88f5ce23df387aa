"""Tests of training a draft that fills several positions in one run.

Oracles: the same model run over each anchor's tokens and masks as a text of its own; the chances
of the paper's drop of tokens; and a text that can be foretold, which a draft has to learn to fill.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from edgespec.core.ports import MAX_PLACES, ParallelDraft
from edgespec.models.folders import read_parallel_draft
from edgespec.training.distill import Distillation, Progress, write_checkpoint
from edgespec.training.masked_texts import (
    add_masks,
    choose_mask_token,
    draw_depths,
    every_depth,
    judge_runs,
    masked_rows,
    mean_masks,
)
from edgespec.training.settings import Budget, LossName, TrainingSettings
from edgespec.training.texts import HeldBack, Text, pad_texts
from tests.kit.tiny_checkpoints import write_checkpoint as write_folder

SIZE, MASK, CPU = 24, 23, torch.device("cpu")
PERIOD = 20


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"head_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "eos_token_id": 0, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes)
    return LlamaForCausalLM(config).eval()


def cycle(start: int, length: int = 24, first: int = 1) -> Text:
    """Return a text in which each token follows from the one before it."""
    return Text([1 + (start + at) % PERIOD for at in range(length)], first)


def test_masks_see_what_a_run_of_their_own_would_show_them() -> None:
    model, texts = make_model(1), [cycle(3, 9, 2), cycle(8, 6, 1)]
    masked = add_masks(texts, MASK, every_depth(4, 1), CPU)
    with torch.inference_mode():
        _, found = masked_rows(model, masked)
        places, row = pad_texts(texts, CPU)[1], 0
        for tokens, start in texts:
            for anchor in range(start - 1, len(tokens) - 1):
                depths = min(3, len(tokens) - 2 - anchor)
                alone = [*tokens[: anchor + 1], *[MASK] * depths]
                wanted = model.base_model(torch.tensor([alone])).last_hidden_state[0]
                for depth in range(depths + 1):
                    assert int(masked.depths[row]) == depth
                    torch.testing.assert_close(
                        found[row], wanted[anchor + depth], atol=1e-5, rtol=1e-4
                    )
                    row += 1
    assert row == len(found)
    assert int(masked.wanted.max()) == len(places) - 1


def test_each_row_predicts_the_token_behind_its_masks() -> None:
    texts = [cycle(3, 9, 2), cycle(8, 6, 1)]
    tokens, places = pad_texts(texts, CPU)
    after = tokens.flatten()[places + 1]
    masked = add_masks(texts, MASK, draw_depths(5, random.Random(1)), CPU)
    last = masked.tokens.flatten()[masked.places]
    positions = masked.positions.flatten()[masked.places]
    found = zip(after[masked.wanted], last, positions, masked.depths, strict=True)
    for token, own, position, depth in found:
        assert int(token) == 1 + (int(token) - 1) % PERIOD
        assert (int(own) == MASK) == bool(depth)
        if not depth:
            assert int(token) == 1 + int(own) % PERIOD
        assert int(position) < 9


def test_fewer_masks_are_kept_further_behind() -> None:
    """Shares of 0.7, 0.49, 0.343, 0.24 and then 0.2, so 2.37 masks a token for eight positions."""
    choose = draw_depths(8, random.Random(5))
    drawn = [choose() for _ in range(20_000)]
    shares = [sum(one >= depth for one in drawn) / len(drawn) for depth in range(1, 8)]
    assert shares == pytest.approx([0.7, 0.49, 0.343, 0.24, 0.2, 0.2, 0.2], abs=0.015)
    assert mean_masks(8) == pytest.approx(2.373, abs=0.001)
    assert mean_masks(1) == 0.0


@pytest.mark.parametrize(
    ("ids", "count", "special", "used", "found"),
    [
        (range(12), 10, {8}, {3}, 10),
        (range(12), 12, {0, 8, 9}, {0, 9}, 8),
        (range(12), 12, {0}, {0, 11}, 10),
        ([2, 5, 7], 12, {5, 6}, {2}, 5),
    ],
    ids=["padding", "reserved", "last-unused", "kept-ids"],
)
def test_the_mask_token_has_no_other_use(
    ids: Sequence[int], count: int, special: set[int], used: set[int], found: int
) -> None:
    assert choose_mask_token(ids, count, special, used) == found


def test_a_draft_without_a_free_id_cannot_have_a_mask_token() -> None:
    with pytest.raises(ValueError, match="all of the draft's 3 ids occur in the texts"):
        choose_mask_token(range(3), 3, set(), {0, 1, 2})


class Cycles(HeldBack):
    """Held-back texts whose choices are their own tokens."""

    def __init__(self) -> None:
        self.id_count, self._is_translated = SIZE, False

    def check(self) -> None:
        """Go on."""

    def texts_by_temperature(
        self,
    ) -> Iterator[tuple[float, list[Text], Sequence[int], Sequence[torch.Tensor]]]:
        texts = [cycle(start) for start in (2, 9, 15)]
        yield 0.0, texts, range(3), [torch.tensor(text.tokens[1:]) for text in texts]


def _train(draft: Any, steps: int) -> Distillation:
    settings = TrainingSettings(
        loss=LossName.NEXT_TOKEN, length=24, bits=32, rows=8, parallel=4, learning_rate=0.01
    )
    texts = [cycle(start) for start in range(PERIOD)]
    job = Distillation(draft, draft, texts, Cycles(), settings, lambda: None, mask_token=MASK)
    seen: list[Progress] = []
    job.run(Budget(steps=steps), seen.append, lambda: None)
    assert len(seen) == steps
    return job


def test_a_draft_learns_to_fill_masks(tmp_path: Path) -> None:
    """Before, it guesses at chance. After, most runs are right at all four places, the draft is as
    good one by one, and the same seed gives the same weights."""
    draft = make_model(2)
    before = judge_runs(draft, Cycles(), MASK, 4)[0.0]
    assert sum(one.tokens_per_run for one in before) / 3 < 0.5
    job = _train(draft, 60)
    after = judge_runs(draft, Cycles(), MASK, 4)[0.0]
    assert sum(one.tokens_per_run for one in after) / 3 > 3.0
    assert job.improved
    for one in after:
        assert all(first >= second for first, second in pairwise((one.runs, *one.right)))
    assert Cycles().acceptance(draft)[0.0] == pytest.approx([1.0] * 3, abs=0.1)
    again = make_model(2)
    _train(again, 60)
    for name, value in draft.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    source = write_folder(tmp_path / "source")
    (tmp_path / "out").mkdir()
    write_checkpoint(draft, source, tmp_path / "out", 23, parallel=ParallelDraft(MASK, 4))
    assert read_parallel_draft(tmp_path / "out") == ParallelDraft(MASK, 4)
    write_checkpoint(draft, source, tmp_path / "out", 23)
    assert read_parallel_draft(tmp_path / "out") is None


def test_as_many_positions_are_learned_as_a_step_may_have() -> None:
    assert TrainingSettings(parallel=MAX_PLACES).parallel == MAX_PLACES
    with pytest.raises(ValueError, match=f"parallel is {MAX_PLACES + 1}"):
        TrainingSettings(parallel=MAX_PLACES + 1)
