"""Tests of training a draft: losses, the texts that are written, an interrupted run that goes on,
the command, and the tools that train the bundled pair.

Oracles: sums over plain numbers, the scalar sampling law over whole prefixes without a cache, the
exporter's own rounding, and an uninterrupted run.
"""

from __future__ import annotations

import copy
import json
import math
import random
import re
import resource
import shutil
import signal
import sys
import time
from contextlib import chdir, nullcontext
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from edgespec.bench.prompts import read_prompts
from edgespec.cli.running import Interrupted
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.models.folders import BUNDLED_FOLDER, check_checkpoint, model_info, trained_length
from edgespec.models.translation import Translation
from edgespec.models.weight_blocks import quantize_matrix
from edgespec.telemetry.recording import Recording
from edgespec.training import distill as training
from edgespec.training import texts as texts_module
from edgespec.training.distill import LOSSES, Distillation, Progress, Verdict
from edgespec.training.memory_plan import plan_memory
from edgespec.training.settings import Budget, LossName, TrainingSettings
from edgespec.training.texts import (
    SHORTEST,
    HeldBack,
    Text,
    head_logits,
    hidden_rows,
    pad_texts,
    read_pieces,
    row_parts,
    split,
    write,
)
from edgespec.training.translated_texts import translate_text
from tests.kit.live_verifier import run_command
from tests.kit.tiny_checkpoints import SENTENCES, tiny_config, tiny_tensors, write_checkpoint
from tests.kit.tokenizer_families import load_family, write_tokenizer
from tests.present import require
from tools.train_pair import beginnings
from tools.train_pair.bundle import cripple
from tools.train_pair.corpus import Document

SIZE, LENGTH, END = 64, 16, 0
DICE = random.Random(7)
PROMPTS = [[DICE.randrange(1, SIZE) for _ in range(2 + n % 5)] for n in range(30)]
PIECES, RECORDED = [Text(ids, len(ids)) for ids in PROMPTS], [Text(ids, 1) for ids in PROMPTS]


def never_stop() -> None:
    """Never request a stop."""


def make_tiny_model(seed: int) -> Any:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"initializer_range": 0.3, "tie_word_embeddings": True, "eos_token_id": END}
    return LlamaForCausalLM(LlamaConfig(vocab_size=SIZE, **shape | heads | more)).eval()


TARGET = make_tiny_model(1)
each_loss = pytest.mark.parametrize("name", LossName, ids=lambda name: name.value)


def scalar_loss(name: LossName, q: list[float], p: list[float]) -> float:
    divergence = sum(b * math.log(b / a) for a, b in zip(q, p, strict=True))
    match name:
        case LossName.FIRST_CHOICE:
            return divergence - 0.5 * math.log(q[p.index(max(p))])
        case LossName.REVERSE_KL:
            return scalar_loss(LossName.FORWARD_KL, p, q)
        case LossName.TOTAL_VARIATION:
            return 1 - sum(map(min, q, p))
    return divergence


def distributions(seed: int, rows: int = 6) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, 5, generator=drawn, dtype=torch.float64)).log_softmax(-1)


@pytest.mark.parametrize("name", LOSSES, ids=lambda name: name.value)
def test_a_loss_is_the_sum_of_its_paper(name: LossName) -> None:
    draft, target = distributions(1).requires_grad_(), distributions(2)
    found = LOSSES[name](draft, target)
    rows = zip(draft.exp().tolist(), target.exp().tolist(), strict=True)
    assert found.tolist() == pytest.approx([scalar_loss(name, q, p) for q, p in rows])
    found.sum().backward()
    assert require(draft.grad).abs().max() > 0
    assert (LOSSES[name](target, target) < found).all()


def test_the_rows_with_most_to_gain_are_selected() -> None:
    draft, target, reference = (distributions(seed) for seed in (1, 2, 3))
    rows = zip(*(one.exp().tolist() for one in (draft, target, reference)), strict=True)
    kl = LossName.FORWARD_KL
    behind = [scalar_loss(kl, q, p) - scalar_loss(kl, r, p) for q, p, r in rows]
    for share, best in ((0.4, 2), (0.5, 3), (0.0, 1), (1.0, 6)):
        chosen = sorted(range(6), key=lambda row: -behind[row])[:best]
        found = training.mark_furthest(training.measure_lag(draft, target, reference), share)
        assert found.tolist() == [row in chosen for row in range(6)]


@pytest.mark.parametrize("columns", [64, 40])
def test_the_exporter_reproduces_rounded_weights(columns: int) -> None:
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    coarse = training.round_weight(weight)
    assert coarse.shape == weight.shape
    packed, scales = quantize_matrix(coarse.numpy(), 4)
    low, high = packed & 15, packed >> 4
    integers = np.stack([low, high], -1).reshape(7, -1, 32).astype(np.float32) - 8
    again = (integers * scales[..., None]).reshape(7, -1)[:, :columns]
    assert np.allclose(again, coarse.numpy(), atol=1e-6)
    assert (coarse - weight).abs().max() <= weight.abs().max() / 8


def scalar_choice(model: Any, tokens: list[int], temperature: float, seed: int) -> int:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].tolist()
    return choose(logits, SamplingParams(temperature=temperature, seed=seed), len(tokens), tokens)


def test_what_is_written_is_the_scalar_law_behind_each_prefix() -> None:
    prompts, heat, seeds = PROMPTS[:6], [0.0, 0.7] * 3, list(range(10, 16))
    texts = write(TARGET, prompts, heat, seeds, 9, never_stop)
    for prompt, text, temperature, seed in zip(prompts, texts, heat, seeds, strict=True):
        assert (text.tokens[: text.start], text.start) == (prompt, len(prompt))
        for at in range(text.start, len(text.tokens)):
            assert text.tokens[at] == scalar_choice(TARGET, text.tokens[:at], temperature, seed)
        assert END not in text.tokens[text.start : -1]
        assert text.tokens[-1] == END or len(text.tokens) == len(prompt) + 9
    assert len({tuple(text.tokens) for text in texts}) == 6


@pytest.mark.parametrize("recorded", [False, True])
def test_acceptance_is_the_share_of_equal_choices(recorded: bool) -> None:
    draft = make_tiny_model(2)
    held = HeldBack(TARGET, (RECORDED if recorded else PIECES)[:4], 6, SIZE, never_stop)
    same = held.acceptance(TARGET)
    assert all(share == 1.0 for shares in same.values() for share in shares)
    for temperature, shares in held.acceptance(draft).items():
        written = write(TARGET, PROMPTS[:4], [temperature] * 4, range(4), 6, never_stop)
        texts = RECORDED[:4] if recorded else written
        for seed, (text, share) in enumerate(zip(texts, shares, strict=True)):
            prefixes = [text.tokens[:at] for at in range(text.start, len(text.tokens))]
            own, wanted = (
                [scalar_choice(model, ids, temperature, seed) for ids in prefixes]
                for model in (draft, TARGET)
            )
            assert share == pytest.approx(np.mean(np.equal(own, wanted)))


def test_files_are_cut_into_pieces(tmp_path: Path) -> None:
    lines, whole = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text('{"prompt": "' + "x" * 40 + '"}\n{"text": "yz"}\n')
    whole.write_text("w" * 70)

    letters = (lambda text: [*map(ord, text)], 32, "")
    for as_prompts, sizes in ((True, [16, 2] + [8] * 8), (False, [32, 8, 32, 32])):
        found = [piece for (piece,) in read_pieces([lines, whole], *letters, as_prompts=as_prompts)]
        assert [len(piece.tokens) for piece in found] == sizes
        assert all(piece.start == (len(piece.tokens) if as_prompts else 1) for piece in found)


def test_each_committed_token_of_a_recording_is_guessed_once(tmp_path: Path) -> None:
    path, dice, size = tmp_path / "r", random.Random(3), 16
    recording, wanted = Recording(path, 1 << 20), list[list[int]]()
    for prompt, said in ((1, 8), (40, 16), (5, 55), (300, 20), (3, 7)):
        tokens = [dice.randrange(1000) for _ in range(prompt + said)]
        recording.add("v", tokens[:prompt], tokens[prompt:])
        wanted.append(tokens[prompt:])
    recording.add("w", [1], [2] * 20)
    pieces = read_pieces([path], lambda text: [], 2 * size, "v", as_prompts=False)
    for text, said_tokens in zip(pieces, wanted, strict=True):
        guessed = [token for piece in text for token in piece.tokens[piece.start :]]
        assert guessed == said_tokens[: len(guessed)]
        assert len(said_tokens) - len(guessed) < SHORTEST
        assert all(len(piece.tokens) <= 2 * size for piece in text)
        for before, piece in pairwise(text):
            assert (piece.tokens[:size], piece.start) == (before.tokens[-size:], size)
    assert [len(text) for text in pieces] == [1, 1, 3, 1, 0]


def test_what_is_held_back_is_not_learned_from() -> None:
    for total, held in ((24, 12), (100, 20), (2000, 96)):
        pieces = [Text([number], 1) for number in range(total)]
        parts = split([[piece] for piece in pieces * 2], seed=3)
        assert len(parts.choosing) + len(parts.judging) == held
        assert sorted([*parts.training, *parts.choosing, *parts.judging]) == pieces
        assert parts != split([[piece] for piece in pieces], seed=4)
    with pytest.raises(ValueError, match="there are 23 different texts, but at least 24"):
        split([[Text([number], 1)] for number in range(23)], seed=3)


def test_the_pieces_of_a_text_stay_together() -> None:
    """Only texts at the borders between the three parts may be split."""
    parts = split([[Text([text, at], 1) for at in range(3)] for text in range(60)], seed=3)
    texts = [{piece.tokens[0] for piece in part} for part in parts]
    assert sum(map(len, texts)) <= 60 + 2


@pytest.fixture(autouse=True)
def _few_texts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "ROUND", 4)


def begin_distillation(
    draft: Any, pieces: list[Text], check: Any = never_stop, **settings: Any
) -> Distillation:
    held = HeldBack(TARGET, pieces[20:], LENGTH // 2, SIZE, never_stop)
    chosen = TrainingSettings(length=LENGTH, **{"rows": 4} | settings)
    return Distillation(TARGET, draft, pieces[:20], held, chosen, check)


def run(folder: Path, stop_at: int = 0, pieces: list[Text] = PIECES, **how: Any) -> tuple[int, Any]:
    """Return the number of checks for a stop in a small training, and its weights. Check number
    ``stop_at`` stops the first run, and another run goes on."""
    looks, draft = count(1), make_tiny_model(2)

    def check() -> None:
        if next(looks) == stop_at:
            raise Interrupted(signal.SIGINT)

    def report(now: Progress) -> None:
        assert now.share == pytest.approx(now.step / 8)

    found = begin_distillation(draft, pieces, check, **how)
    try:
        found.run(Budget(steps=8), report, never_stop)
    except Interrupted:
        training.save_state(folder / "state", found.state())
        draft = make_tiny_model(2)
        found = begin_distillation(draft, pieces, check, **how)
        found.restore(training.read_state(folder / "state"))
        found.run(Budget(steps=8), report, never_stop)
    return next(looks) - 1, draft.state_dict()


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


@each_loss
def test_a_stopped_run_ends_with_the_weights_of_a_whole_one(tmp_path: Path, name: LossName) -> None:
    looks, whole = run(tmp_path, loss=name)
    for stop_at in (looks // 3, looks - 1):
        assert are_equal(run(tmp_path, stop_at, loss=name)[1], whole), stop_at
    assert (tmp_path / "state").exists()


def test_a_draft_writes_its_own_texts_where_the_loss_asks_for_them() -> None:
    draft, heat = make_tiny_model(2), [0.0, 0.7] * 2
    found = begin_distillation(draft, PIECES, loss=LossName.TOTAL_VARIATION)
    written = write(draft, PROMPTS[:4], heat, range(4), LENGTH // 2, never_stop)
    found.run(Budget(steps=1), lambda now: None, never_stop)
    assert found.state()["texts"] == written
    found.run(Budget(steps=9), lambda now: None, never_stop)
    assert len(found.state()["texts"]) == 16


def test_selective_trains_a_reference_then_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(count: int, loss: LossName) -> list[dict[str, torch.Tensor]]:
        """Return the weights before a training and after each step; the first step's rate is 0."""
        draft = make_tiny_model(2)
        found, seen = begin_distillation(draft, PIECES, loss=loss), [copy.deepcopy(draft)]
        found.run(Budget(steps=count), lambda now: seen.append(copy.deepcopy(draft)), never_stop)
        return [one.state_dict() for one in seen]

    whole, both = steps(4, LossName.FORWARD_KL), steps(8, LossName.SELECTIVE)
    assert all(map(are_equal, both[:6], [*whole, whole[0]]))
    monkeypatch.setattr(training, "SELECTED_SHARE", 1.0)
    every = steps(8, LossName.SELECTIVE)
    assert [*map(are_equal, both, every)] == [True] * 6 + [False] * 3


def test_the_seed_and_nothing_else_decides(tmp_path: Path) -> None:
    _, first = run(tmp_path, 0, RECORDED)
    assert are_equal(run(tmp_path, 0, RECORDED)[1], first)
    assert not are_equal(run(tmp_path, 0, RECORDED, seed=1)[1], first)
    slow = run(tmp_path, 0, RECORDED, rate_share=0.2)[1]
    assert are_equal(run(tmp_path, 0, RECORDED, learning_rate=2e-4)[1], slow)
    assert not are_equal(slow, first)


@each_loss
def test_a_damaged_copy_of_the_target_gets_better(name: LossName) -> None:
    draft = make_tiny_model(1)
    dice = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.15 * torch.randn(weight.shape, generator=dice)
    held = HeldBack(TARGET, PIECES[20:], LENGTH // 2, SIZE, never_stop)
    found = begin_distillation(draft, PIECES, rows=8, loss=name, learning_rate=0.01)
    before = found.best_score
    found.run(Budget(steps=24), lambda now: None, never_stop)
    assert found.improved
    after = np.mean([*held.acceptance(draft).values()])
    assert after == pytest.approx(found.best_score)
    assert after > before + 0.02


# --- memory ---------------------------------------------------------------------------------------

WIDTHS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
WIDTHS |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
WIDTHS |= {"vocab_size": SIZE, "pad_token_id": 0, "initializer_range": 0.5}
HEADS = {
    "plain": LlamaConfig(**WIDTHS),
    "capped": Gemma2Config(**WIDTHS, final_logit_softcapping=2.0, query_pre_attn_scalar=16),
    "scaled": GraniteConfig(**WIDTHS, logits_scaling=7.0),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_alone_gives_the_models_own_logits(name: str) -> None:
    """Oracle: the model's forward over all tokens, before and after."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(HEADS[name]).eval()
    texts = [Text(PROMPTS[4] * 2, 3), Text(PROMPTS[1], 1)]
    tokens, places = pad_texts(texts, torch.device("cpu"))
    with torch.no_grad():
        whole = model(tokens).logits.flatten(0, 1)[places]
        output, rows = hidden_rows(model, tokens, places)
        for part in row_parts(len(rows), SIZE, 2 * SIZE):
            assert torch.allclose(head_logits(model, output, rows[part]), whole[part], atol=1e-5)
        assert torch.equal(model(tokens).logits.flatten(0, 1)[places], whole)


@each_loss
@pytest.mark.parametrize("numbers", [1, 5 * SIZE])
def test_gradients_in_parts_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: LossName, numbers: int
) -> None:
    """Oracle: autograd over one tensor of all logits."""
    largest: list[int] = []

    def seen(model: Any, output: Any, rows: torch.Tensor) -> torch.Tensor:
        found = head_logits(model, output, rows)
        largest.append(found.numel())
        return found

    monkeypatch.setattr(training, "LOGITS_AT_ONCE", numbers)
    monkeypatch.setattr(training, "head_logits", seen)
    # bfloat16 is off, because its rounding is larger than the tolerance here.
    monkeypatch.setattr(Distillation, "_autocast", lambda *_: nullcontext())
    draft, texts = make_tiny_model(2), [Text(ids, 1) for ids in PROMPTS[:5]]
    found = begin_distillation(draft, RECORDED, loss=name, bits=32)
    found._reference = reference = make_tiny_model(4) if name is LossName.SELECTIVE else None
    whole = copy.deepcopy(draft)
    total = sum(len(text.tokens) - 1 for text in texts)
    loss = found._add_gradients(texts, total, random.Random(0))
    assert max(largest) <= max(numbers, SIZE)

    tokens, places = pad_texts(texts, torch.device("cpu"))

    def law(model: Any) -> torch.Tensor:
        found: torch.Tensor = model(tokens).logits.flatten(0, 1)[places].log_softmax(-1)
        return found

    own, wanted = law(whole), law(TARGET).detach()
    if name is LossName.NEXT_TOKEN:
        values = -own.gather(-1, tokens.flatten()[places + 1][:, None])[:, 0]
    else:
        values = LOSSES[name](own, wanted)
    if reference is not None:
        values = (
            values
            * training.mark_furthest(training.measure_lag(own, wanted, law(reference)), 0.4)
            / 0.4
        )
    (values.sum() / total).backward()
    assert loss == pytest.approx(float(values.detach().sum()) / total, rel=1e-4)
    for mine, its in zip(draft.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(require(mine.grad), require(its.grad), rtol=1e-3, atol=1e-5)


def test_the_plan_counts_what_fits() -> None:
    """Oracle: more room never means fewer texts, and the peak stays below the limit."""
    settings, model, before = TrainingSettings(length=LENGTH), make_tiny_model(2), 0
    with pytest.raises(ValueError, match=r"but the limit is 256\.0 MiB: give a smaller draft"):
        plan_memory(TARGET, model, settings, 32, 1 << 20, 1 << 28)
    least = plan_memory(TARGET, model, settings, 32, 1 << 20, 1 << 30).peak_bytes
    limits = [least + (extra << 10) for extra in (-400, -300, 0, 10_000)]
    plans = [(one, plan_memory(TARGET, model, settings, 32, 1 << 20, one)) for one in limits]
    for limit, plan in plans:
        assert before <= plan.texts_at_once <= settings.rows
        assert plan.peak_bytes <= limit << 27
        before = plan.texts_at_once
    selective = TrainingSettings(length=LENGTH, loss=LossName.SELECTIVE)
    more = plan_memory(TARGET, model, selective, 32, 1 << 20, 1 << 34)
    assert more.copies_bytes == plans[-1][1].copies_bytes / 5 * 7


# --- time -----------------------------------------------------------------------------------------


class Time:
    """A clock that moves only with training steps and written tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float, token_s: float) -> None:
        self.now_s = 0.0
        learn = Distillation._learn

        def slowly(distillation: Distillation, share: float) -> float:
            self.now_s += step_s
            return learn(distillation, share)

        monkeypatch.setattr("edgespec.training.distill.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr(Distillation, "_learn", slowly)
        self._token_s = token_s

    def passes(self, *_: object) -> None:
        """Advance the clock by the time in which each text gets one more token."""
        self.now_s += self._token_s


@pytest.mark.parametrize(("step_s", "steps"), [(1.0, 60), (7.0, 8), (40.0, 1), (61.0, 1)])
def test_no_step_begins_that_would_not_end_in_time(
    monkeypatch: pytest.MonkeyPatch, step_s: float, steps: int
) -> None:
    """The first step is exempt, because its duration is still unknown."""
    time, shares = Time(monkeypatch, step_s, 0.0), list[float]()
    found = begin_distillation(make_tiny_model(2), RECORDED)
    found.run(Budget(minutes=1), lambda now: shares.append(now.share), never_stop)
    assert len(shares) == steps
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert time.now_s <= max(60.0, step_s)


def test_texts_are_written_as_long_as_they_are_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A round of 4 texts takes 8 s. A minute has room for a few rounds and for steps."""
    time = Time(monkeypatch, 1.0, 1.0)
    found = begin_distillation(make_tiny_model(2), PIECES)
    steps: list[Progress] = []
    found.run(Budget(minutes=1), steps.append, never_stop, wrote=time.passes)
    assert 8 <= len(found.state()["texts"]) < 4 * 60 / 8
    assert len(steps) >= 16
    assert time.now_s <= 60.0
    assert 0 < steps[-1].tokens_per_s < 100


@pytest.mark.parametrize(("all_s", "one_s", "chosen"), [(2.0, 1.0, 1), (1.0, 2.0, 3)])
def test_the_quicker_number_of_threads_is_taken(
    monkeypatch: pytest.MonkeyPatch, all_s: float, one_s: float, chosen: int
) -> None:
    """Oracle: a model that takes ``all_s`` with three threads and ``one_s`` with one."""
    torch.set_num_threads(3)
    now_s = 0.0

    class Slow:
        device = "cpu"

        def __call__(self, *_: object, **__: object) -> None:
            nonlocal now_s
            now_s += one_s if torch.get_num_threads() == 1 else all_s

    monkeypatch.setattr("edgespec.training.distill.time.monotonic", lambda: now_s)
    assert training.choose_threads(Slow()) == torch.get_num_threads() == chosen


def test_a_time_that_is_over_before_the_first_text_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Time(monkeypatch, 1.0, 10.0)
    with pytest.raises(training.TimeUpError):
        begin_distillation(make_tiny_model(2), PIECES).run(
            Budget(minutes=1), lambda now: None, never_stop, wrote=time.passes
        )
    assert time.now_s <= 70.0


def test_what_is_held_back_is_prepared_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-back texts are written in rounds while there is time, at least one round. Texts from an
    earlier run are not written again. Oracle: all texts written at once."""
    monkeypatch.setattr(texts_module, "HELD_BACK_ROUND", 4)
    how, draft = (LENGTH // 2, SIZE, never_stop), make_tiny_model(2)
    whole = HeldBack(TARGET, PIECES[:10], *how)
    kept: list[Any] = []
    first = HeldBack(TARGET, PIECES[:10], *how, kept=kept, is_enough=lambda: len(kept) == 2)
    assert (len(whole), len(first), len(kept)) == (10, 8, 2)
    counted: list[int] = []
    again = HeldBack(TARGET, PIECES[:10], *how, kept=kept, wrote=counted.append)
    assert again.acceptance(draft) == whole.acceptance(draft)
    assert 0 < sum(counted) <= 2 * 2 * LENGTH // 2  # two pieces at two temperatures


def test_a_loss_that_is_no_number_ends_the_run_by_name() -> None:
    draft = make_tiny_model(2)
    found = begin_distillation(draft, RECORDED)
    torch.nn.init.constant_(draft.model.norm.weight, math.inf)
    with pytest.raises(ValueError, match=r"the loss is nan at step 0: give a --learning-rate"):
        found.run(Budget(steps=1), lambda now: None, never_stop)


def test_a_gain_is_taken_text_by_text() -> None:
    before, after = {0.0: [0.1, 0.5], 0.7: [0.2, 0.2]}, {0.0: [0.2, 0.6], 0.7: [0.2, 0.4]}
    verdict = Verdict.of(before, after)
    for gain, low, high in ((verdict.by_temperature[0.0][2], 0.1, 0.1), (verdict.gain, 0.05, 0.15)):
        assert (gain.mean, *gain.interval) == pytest.approx((0.1, low, high))
    assert [one.mean for one in verdict.by_temperature[0.7]] == pytest.approx([0.2, 0.3, 0.1])


def test_a_full_disk_leaves_the_state_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "state"
    training.save_state(path, {"steps": 3})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"state cannot be written: .*File too large"):
            training.save_state(path, {"steps": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert training.read_state(path) == {"steps": 3}
    assert list(tmp_path.iterdir()) == [path]
    path.write_bytes(b"no state")
    with pytest.raises(ValueError, match="state holds no state of a training"):
        training.read_state(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distill")
    small = tiny_config(trained_length=8)
    write_checkpoint(root / "target")
    noisy = {name: w + 0.3 * w.std() for name, w in tiny_tensors(small).items()}
    write_checkpoint(root / "draft", small, noisy)
    for name, family in (("poor", "no bytes"), ("other", "smollm")):
        wide = tiny_config(vocab_size=704)
        write_checkpoint(root / name, wide, tiny_tensors(wide))
        write_tokenizer(family, root / name)
    exported = write_checkpoint(root / "exported")
    (exported / "model.safetensors").rename(exported / "model.onnx")
    (exported / "edgespec.json").write_text("{}")
    words = " ".join(SENTENCES).split()
    rows = [{"prompt": " ".join(random.Random(n).choices(words, k=4))} for n in range(30)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recording, dice = Recording(root / "recording", 1 << 20), random.Random(1)
    for _ in range(40):
        tokens = [dice.randrange(1, 300) for _ in range(20)]
        recording.add(model_info(root / "target").vocabulary, tokens[:4], tokens[4:])
    return root


def stopped_at_step_three(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of steps done from now on; a Ctrl-C interrupts the third."""
    learn, steps = Distillation._learn, list[float]()

    def interrupted(self: Distillation, share: float) -> float:
        steps.append(share)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return learn(self, share)

    monkeypatch.setattr(Distillation, "_learn", interrupted)
    return steps


def learn(option: str, file: str, steps: int, folder: Path, out: Path, *more: object) -> Any:
    models = ("--target", folder / "target", "--draft", folder / "draft", "--length", 24)
    how = ("--steps", steps, "--learning-rate", 0.01, "--out", out)
    return run_command("distill", *models, option, folder / file, *how, *more)


distill = partial(learn, "--prompts", "prompts.jsonl", 6)
online = partial(learn, "--online", "recording", 30)


def test_ctrl_c_keeps_what_was_learned_and_the_folder_can_be_exported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = distill(folder, tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    assert "acceptance, texts held back: 8" in whole.stdout
    export = f"edgespec export {tmp_path / 'whole'} {tmp_path / 'whole-draft'}"
    assert whole.stdout.splitlines()[-1] == export
    check_checkpoint(tmp_path / "whole")
    assert trained_length(tmp_path / "whole") == 23
    steps = stopped_at_step_three(monkeypatch)
    stopped = distill(folder, tmp_path / "out")
    assert (stopped.exit_code, len(steps)) == (130, 3)
    assert "--resume continues" in stopped.stderr
    assert [path.name for path in tmp_path.glob("out*")] == ["out.training"]
    assert "give --resume, or remove it" in distill(folder, tmp_path / "out").stderr
    other = distill(folder, tmp_path / "out", "--resume", "--seed", 1)
    assert "texts was" in other.stderr or "seed was 0, but is 1" in other.stderr
    assert distill(folder, tmp_path / "out", "--resume").exit_code == 0
    assert len(steps) == 7  # the interrupted third step is made again
    assert weights(tmp_path / "whole") == weights(tmp_path / "out")
    assert not (tmp_path / "out.training").exists()


def test_texts_that_were_written_are_kept_for_the_next_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped while it writes held-back texts goes on with the texts it has, and ends
    with the weights of an uninterrupted run."""
    monkeypatch.setattr(texts_module, "HELD_BACK_ROUND", 4)
    assert distill(folder, tmp_path / "whole").exit_code == 0
    rounds, judged = list[int](), texts_module.draw_choices

    def stopped(*given: Any) -> Any:
        rounds.append(1)
        if len(rounds) == 4:  # the second round, as each has two temperatures
            signal.raise_signal(signal.SIGINT)
        return judged(*given)

    monkeypatch.setattr(texts_module, "draw_choices", stopped)
    assert distill(folder, tmp_path / "out").exit_code == 130
    (chosen, judging) = training.read_state(tmp_path / "out.training")["held"]
    assert (len(chosen), len(judging)) == (1, 0)
    resumed = distill(folder, tmp_path / "out", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_minutes_are_those_of_the_whole_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the messages, and no written text lost. The second run has more time."""
    models = ("--target", folder / "target", "--draft", folder / "draft", "--length", 24)
    given = (*models, "--prompts", folder / "prompts.jsonl", "--out", tmp_path / "out")
    over = run_command("distill", *given, "--minutes", 1e-4)
    assert over.exit_code == 1
    said = " ".join(over.stderr.split())
    assert "minutes are over before the first step" in said
    assert "--resume with more --minutes continues" in said
    assert (tmp_path / "out.training").exists()
    resumed = run_command("distill", *given, "--resume", "--steps", 1, "--force")
    assert resumed.exit_code == 0, resumed.output
    assert "writing texts held back: " in resumed.stderr
    assert "tokens/s" in resumed.stderr
    assert "memory: at most about" in resumed.stderr


def test_a_limit_of_memory_is_kept_or_refused(folder: Path, tmp_path: Path) -> None:
    refused = distill(folder, tmp_path / "out", "--memory-budget", "64MiB")
    assert refused.exit_code == 1
    said = " ".join(refused.stderr.split())
    assert "but the limit is 64.0 MiB: give a smaller draft" in said
    unknown = distill(folder, tmp_path / "out", "--memory-budget", "much")
    assert unknown.exit_code == 2
    assert "--memory-budget is 'much'" in " ".join(unknown.stderr.split())


@pytest.mark.parametrize("file", ["prompts.jsonl", "lines.txt"])
def test_a_draft_with_another_tokenizer_learns_the_targets_texts(
    folder: Path, tmp_path: Path, file: str
) -> None:
    (folder / "lines.txt").write_text("the lazy dog jumps over the quick brown fox\n" * 120)
    option = "--prompts" if file.endswith(".jsonl") else "--texts"
    models = ("--target", folder / "target", "--draft", folder / "other", "--length", 48)
    how = ("--steps", 25, "--learning-rate", 0.01, "--out", tmp_path / "out")
    result = run_command("distill", *models, option, folder / file, *how, "--temperature", 0)
    assert result.exit_code == 0, result.output
    assert "draft translated: " in result.stderr
    greedy = next(line for line in result.stdout.splitlines() if line.startswith("greedy"))
    before, after = (float(part) for part in re.findall(r"(\d\.\d+) \[", greedy)[:2])
    assert after > before + 0.1
    assert model_info(tmp_path / "out").vocabulary == model_info(folder / "other").vocabulary


@pytest.mark.parametrize(("target", "draft"), [("gemma", "smollm"), ("smollm", "gemma")])
def test_a_text_to_learn_from_is_the_drafts_own_spelling(
    tmp_path: Path, target: str, draft: str
) -> None:
    pair = Translation(load_family(target, tmp_path), load_family(draft, tmp_path))
    asked, answered = "What is it?", " It is a fox, I believe."
    ids = pair.target.tokenizer.encode(asked)
    more = pair.target.encode(answered.encode())
    text = translate_text(pair, Text([*ids, *more], len(ids)), 256)
    assert text is not None
    assert text.tokens == pair.draft.tokenizer.encode(asked + answered)
    assert pair.draft.text_bytes(text.tokens[text.start :]) == answered.encode()
    cut = translate_text(pair, Text([*ids, *more], len(ids)), 5)
    assert cut == Text(text.tokens[-5:], 1)
    alone = translate_text(pair, Text([ids[0]], 1), 256)
    assert (alone is None) is not bool(pair.draft.prefix_ids)


def test_a_draft_that_is_not_better_is_not_written(folder: Path, tmp_path: Path) -> None:
    out, perfect = tmp_path / "out", ("--draft", folder / "target")
    refused = distill(folder, out, *perfect)
    assert refused.exit_code == 1
    assert "guesses no better on texts that it did not learn from" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.training"]
    forced = distill(folder, out, *perfect, "--resume", "--force")
    assert forced.exit_code == 0, forced.output
    assert "warning: not better beyond its interval" in forced.stderr
    check_checkpoint(out)


# --- from a recording -----------------------------------------------------------------------------


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_draft_in_use_is_replaced_by_a_better_one_alone(folder: Path, tmp_path: Path) -> None:
    out, before = tmp_path / "out", tmp_path / "out.before"
    # It depends on a machine's last bits whether so short a training helps, so it is not tested
    # here.
    first = online(folder, out, "--force")
    assert f"{out} is written" in first.stdout, first.output
    assert not before.exists()
    old = weights(out)
    assert online(folder, out, "--draft", "missing", "--force").exit_code == 0
    assert weights(before) == old
    assert weights(out) != old
    third = weights(out)
    assert online(folder, out, "--force", "--seed", 1).exit_code == 0
    assert weights(before) == third
    shutil.rmtree(out)
    shutil.copytree(folder / "target", out)
    refused = online(folder, out)
    assert refused.exit_code == 0, refused.output
    assert "not better beyond its interval, so no draft is written or replaced" in refused.stdout
    assert weights(out) == weights(folder / "target")
    assert weights(before) == third
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.before"]


def test_an_online_run_goes_on_with_the_texts_that_it_began_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert online(folder, tmp_path / "whole", "--force").exit_code == 0
    stopped_at_step_three(monkeypatch)
    assert online(folder, tmp_path / "out", "--force").exit_code == 130
    more = tmp_path / "more"
    Recording(more, 1 << 20).add(model_info(folder / "target").vocabulary, [1], [2] * 9)
    resumed = online(folder, tmp_path / "out", "--force", "--online", more)
    assert resumed.exit_code == 0, resumed.output
    assert "continuing it, with the texts it had" in " ".join(resumed.stderr.split())
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_a_kill_between_two_renames_loses_no_draft(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "target", tmp_path / "out.before")
    assert online(folder, tmp_path / "out").exit_code == 0
    assert weights(tmp_path / "out") == weights(folder / "target")
    assert not (tmp_path / "out.before").exists()


@pytest.mark.parametrize("name", ["out", "out.before"])
def test_what_is_no_draft_is_not_replaced(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "diary").write_text("mine")
    refused = online(folder, tmp_path / "out")
    assert refused.exit_code == 1
    assert f"{name}/config.json: no such file" in refused.stderr.replace("\n", "")
    assert [*(tmp_path / name).iterdir()] == [tmp_path / name / "diary"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--texts", "x.txt"), 2, "exactly one of --prompts, --texts and --online"),
        (("--online", "x"), 2, "exactly one of --prompts, --texts and --online"),
        (("--minutes", 1), 2, "steps is 6 and minutes 1, but one must be above 0"),
        (("--length", 512), 2, "length is 512, but the context is 256 tokens"),
        (("--length", 8), 2, "length is 8, but must be in [16, 8192]"),
        (("--bits", 5), 2, "bits is 5, but must be one of 4, 8, 32"),
        (("--temperature", -1), 2, "temperatures is -1.0, but must be in [0.0, 10.0]"),
        (("--prompts", "missing.jsonl"), 1, "missing.jsonl: no such file"),
        (("--resume",), 1, "to continue"),
        (("--draft", "poor"), 1, "has no tokens for single bytes, or changes texts"),
        (("--draft", "other", "--layers", "0"), 2, "cut a draft with the target's tokenizer only"),
        (("--draft", "other", "--loss", "reverse-kl"), 2, "learns from the target's texts only"),
        (("--draft", "other", "--parallel", 4), 2, "parallel is 4, but a draft with another"),
        (("--draft", "missing"), 1, "model 'missing' is neither"),
        (("--draft", "exported"), 1, "give the checkpoint that it was made from"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    folder: Path, tmp_path: Path, arguments: tuple[object, ...], code: int, words: str
) -> None:
    with chdir(folder):
        result = distill(folder, tmp_path / "out", *arguments)
    assert result.exit_code == code, result.output
    assert words in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_beginnings_are_prompts_of_training_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"Page {n} says what there is to say of {n}.\n" * 30 for n in range(100)]
    found = [Document("pages", text) for text in texts]
    monkeypatch.setattr(beginnings, "documents", lambda: found)
    out = tmp_path / "prompts.jsonl"
    monkeypatch.setattr(sys, "argv", ["beginnings", str(out), "--count", "40"])
    beginnings.main()
    prompts = [prompt.text for prompt in read_prompts(out)]
    pages = {one.split("Page ")[1].split()[0] for one in prompts}
    held_out = {str(n) for n, one in enumerate(found) if one.held_out}
    assert len(prompts) == 40
    assert held_out
    assert len(pages) > 5
    assert not pages & held_out


def test_a_crippled_draft_is_the_bundled_one_with_so_much_noise(tmp_path: Path) -> None:
    bundled = load_file(BUNDLED_FOLDER / "draft" / "model.safetensors")
    for noise in (0.0, 0.5):
        out = tmp_path / str(noise)
        cripple(BUNDLED_FOLDER, out, noise, seed=1)
        check_checkpoint(out)
        for name, weight in load_file(out / "model.safetensors").items():
            share = float((weight - bundled[name]).std() / bundled[name].std())
            assert np.isclose(share, noise if weight.ndim == 2 else 0.0, rtol=0.02), name


def test_a_draft_that_has_trained_is_judged_after_the_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is set aside for the verdict. On a busy machine it takes longer than that, and what was
    learned must not be lost."""
    late_s, run, clock = [0.0], training.Distillation.run, time.monotonic

    def run_and_be_late(self: training.Distillation, budget: Any, *given: Any) -> None:
        run(self, Budget(steps=2), *given[:2])
        late_s[0] = 1e6

    monkeypatch.setattr(training.Distillation, "run", run_and_be_late)
    late_clock = SimpleNamespace(monotonic=lambda: clock() + late_s[0])
    monkeypatch.setattr("edgespec.cli.distill.time", late_clock)
    models = ("--target", folder / "target", "--draft", folder / "draft", "--length", 24)
    given = (*models, "--prompts", folder / "prompts.jsonl", "--out", tmp_path / "out")
    done = run_command("distill", *given, "--minutes", 60, "--force")
    assert done.exit_code == 0, done.stderr
    assert late_s[0]
    assert (tmp_path / "out" / "model.safetensors").is_file()
