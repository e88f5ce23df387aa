"""Tests of drafts that begin as a part of a larger model: layers, and rows for frequent ids.

Oracles: the larger model with its other layers replaced by nothing, its logits at the kept ids, and
counts of ids that can be done by hand.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import export_draft
from edgespec.models.folders import (
    KeptIds,
    ModelFolderError,
    model_info,
    read_kept_ids,
    trained_length,
)
from edgespec.telemetry.recording import read_recording
from edgespec.training.cut import cut_model, select_frequent_ids, soften
from edgespec.training.distill import Distillation, load_model, next_token, write_checkpoint
from edgespec.training.kept_rows import find_rows, id_count
from edgespec.training.settings import Budget, LossName, TrainingSettings
from edgespec.training.texts import HeldBack, draw_choices, write
from tests.kit import tiny_checkpoints as kit
from tests.kit.live_verifier import run_command

SIZE = 211
DICE = random.Random(3)
KEPT = KeptIds(SIZE, (0, 7, *sorted(DICE.sample(range(8, SIZE), 98))))
TOKENS = [DICE.randrange(SIZE) for _ in range(24)]


def never_stop() -> None:
    """Never request a stop."""


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_part_computes_what_its_layers_do(family: str, tied: bool) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    more = {"layer_types": kinds} if family.startswith("gemma") else {}
    model = kit.family_model(family, num_hidden_layers=4, tie_word_embeddings=tied, **more)
    small = cut_model(model, [3, 1], KEPT)
    for layer in (0, 2):  # a layer whose branches are zero changes nothing
        for name, weight in model.base_model.layers[layer].named_parameters():
            if weight.ndim == 2 and ("o_proj" in name or "down_proj" in name):
                weight.data.zero_()
    order = model.base_model.layers
    order[1], order[3] = order[3], order[1]
    if more:  # a layer's kind is read from the configuration, by its place
        kinds[1], kinds[3] = kinds[3], kinds[1]
    known = [token if token in KEPT.ids else 0 for token in TOKENS]
    rows = torch.tensor([KEPT.ids.index(token) for token in known])
    expected = logits_of(model, known)[:, list(KEPT.ids)]
    assert torch.allclose(logits_of(small, rows.tolist()), expected, atol=1e-4)
    assert id_count(small) == SIZE
    assert small.config.num_hidden_layers == 2


def test_a_part_without_a_choice_is_the_whole() -> None:
    model = kit.family_model("llama")
    whole = cut_model(model, [], None)
    assert torch.equal(logits_of(whole, TOKENS), logits_of(model, TOKENS))
    assert find_rows(whole) is None
    assert id_count(whole) == SIZE
    half = cut_model(model, [0], None)
    assert half.config.vocab_size == SIZE


@pytest.mark.parametrize("layers", [[2], [-1], [0, 0]])
def test_layers_that_are_not_there_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must be different numbers in \[0, 1\]"):
        cut_model(kit.family_model("llama"), layers, None)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_part_that_is_too_certain_is_softened(family: str) -> None:
    """A quarter of the logits must be restored if they were made four times as large."""
    model = kit.family_model(family, final_logit_softcapping=None)
    texts = write(model, [[5, 9], [8, 3]], [1.0, 1.0], [1, 2], 20, never_stop)
    before = logits_of(model, TOKENS)
    assert soften(model, texts) == 1.0
    assert torch.equal(logits_of(model, TOKENS), before)
    with torch.inference_mode():
        norm, offset = model.base_model.norm.weight, float(family == "gemma2")
        norm.copy_((norm + offset) * 4 - offset)
    assert soften(model, texts) == 0.25
    assert torch.allclose(logits_of(model, TOKENS), before, atol=1e-4)


def test_frequent_ids_are_counted_and_filled_up_from_the_lowest() -> None:
    # Counts: 9 once as a prompt; 8 once, to be predicted; 5 twice in prompts; 3 twice, predicted.
    texts = [([5, 9, 3], 2), ([5, 3, 8], 1)]
    assert select_frequent_ids(texts, 10, 3, ()) == KeptIds(10, (0, 3, 5))
    assert select_frequent_ids(texts, 10, 4, ()) == KeptIds(10, (0, 3, 5, 8))
    assert select_frequent_ids(texts, 10, 6, ()) == KeptIds(10, (0, 1, 3, 5, 8, 9))
    assert select_frequent_ids(texts, 10, 3, (7,)) == KeptIds(10, (0, 3, 7))
    for count in (1, 11):
        with pytest.raises(ValueError, match=rf"vocabulary is {count}, but must be in \[2, 10\]"):
            select_frequent_ids(texts, 10, count, (7,))


def test_a_token_without_a_row_costs_nothing() -> None:
    draft = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    losses = next_token(draft, torch.tensor([2, -1, 5, 0]))
    expected = [-draft[0, 2], 0.0, -draft[2, 5], -draft[3, 0]]
    assert losses.tolist() == pytest.approx(torch.tensor(expected).tolist())


def test_choices_and_texts_of_a_part_are_ids_of_the_target() -> None:
    small = cut_model(kit.family_model("llama"), [], KEPT)
    (text,) = write(small, [TOKENS[:5]], [0.0], [0], 6, never_stop)
    (chosen,) = draw_choices(small, [text], 0.0, [0], SIZE, never_stop)
    assert chosen.tolist() == text.tokens[5:]
    assert set(text.tokens[5:]) <= set(KEPT.ids)
    (sampled,) = draw_choices(small, [text], 0.7, [4], SIZE, never_stop)
    assert set(sampled.tolist()) <= set(KEPT.ids)


@pytest.mark.parametrize("loss", LossName, ids=lambda loss: loss.value)
def test_a_part_of_the_target_learns_its_texts(loss: LossName) -> None:
    """The target, but for its rare ids, with damaged weights: every loss must improve it."""
    target = kit.family_model("llama", initializer_range=0.3)
    words = random.Random(4)  # any machine learns at least 0.1 from these texts in 60 steps
    prompts = [[words.randrange(1, SIZE) for _ in range(4)] for _ in range(24)]
    texts = write(target, prompts, [0.0] * 24, range(24), 12, never_stop)
    kept = select_frequent_ids(texts, SIZE, 160, (7,))
    draft = cut_model(target, [], kept)
    dice = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.25 * weight.std() * torch.randn(weight.shape, generator=dice)
    held = HeldBack(target, texts[16:], 12, SIZE, never_stop)
    settings = TrainingSettings(loss, length=16, rows=8, bits=32, learning_rate=0.003)
    job = Distillation(target, draft, texts, held, settings, never_stop)
    before = job.best_score
    job.run(Budget(steps=60), lambda now: None, never_stop)
    assert job.best_score > before + 0.02


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_an_exported_part_drafts_ids_of_the_target(tmp_path: Path, bits: int) -> None:
    source, folder = kit.write_checkpoint(tmp_path / "source"), tmp_path / "part"
    model = load_model(source, exact=True)
    size = model.config.vocab_size
    tokens = [DICE.randrange(size) for _ in range(20)]
    kept = select_frequent_ids([(tokens[:10], 5)], size, 200, (1,))
    small = cut_model(model, [0], kept)
    folder.mkdir()
    write_checkpoint(small, source, folder, 23, is_new=True)
    again = load_model(folder, exact=True)
    info = model_info(folder)
    assert (info.vocabulary_size, trained_length(folder)) == (size, 23)
    assert info.vocabulary == model_info(source).vocabulary
    table = find_rows(again)
    assert table is not None
    expected = table.scatter(logits_of(again, table.of_ids[torch.tensor(tokens)].tolist()))[-1]
    manifest = export_draft(folder, tmp_path / "draft", bits=bits)
    assert manifest.model.vocabulary_size == size
    drafter = OnnxDrafter(tmp_path / "draft")
    drafter.begin(len(tokens), SamplingParams())
    first = drafter.step(0, tokens, 3)
    logits, wanted = drafter.logits.copy(), expected.numpy()
    drafter.close()
    assert {one.token for one in first} <= set(kept.ids)
    proposable = range(manifest.proposable_count)  # the vocabulary is padded behind these
    ids = [token for token in kept.ids if token in proposable]
    rest = [token for token in range(size) if token not in ids]
    assert len(ids) > 150
    assert (logits[rest] == -np.inf).all()
    difference = np.sqrt(np.mean((logits[ids] - wanted[ids]) ** 2)) / wanted[ids].std()
    assert difference < {32: 1e-4, 8: 0.15, 4: 0.9}[bits]


@pytest.mark.parametrize(
    "section",
    [
        [1],
        {"ids": [0, 1]},
        {"size": 4, "ids": [1, 0]},
        {"size": 4, "ids": [0, 0]},
        {"size": 4, "ids": [0, 4]},
        {"size": 4, "ids": [0, True]},
        {"size": 4, "ids": [0, 1, 2]},
        {"size": 4, "ids": "01"},
        {"size": 4},
    ],
)
def test_kept_ids_that_do_not_fit_are_refused(section: object) -> None:
    config = {"vocab_size": 2, "kept_ids": section}
    with pytest.raises(ModelFolderError, match=r"config\.json: .*(kept_ids|size)"):
        read_kept_ids(Path("config.json"), config)


def test_kept_ids_are_read() -> None:
    config = {"vocab_size": 2, "kept_ids": {"size": 4, "ids": [0, 3]}}
    assert read_kept_ids(Path("config.json"), config) == KeptIds(4, (0, 3))
    assert read_kept_ids(Path("config.json"), {"vocab_size": 2}) is None


def test_the_command_records_texts_and_trains_a_part_on_them(tmp_path: Path) -> None:
    target = kit.write_checkpoint(tmp_path / "target", kit.tiny_config(num_hidden_layers=3))
    words = " ".join(kit.SENTENCES).split()
    rows = [{"prompt": " ".join(random.Random(n).choices(words, k=6))} for n in range(30)]
    prompts, texts = tmp_path / "prompts.jsonl", tmp_path / "texts"

    def record(count: int, *more: object) -> Any:
        prompts.write_text("\n".join(map(json.dumps, rows[:count])))
        how = ("--prompts", prompts, "--record", "--out", texts, "--length", 24, "-t", 0, *more)
        return run_command("distill", "--target", target, *how)

    assert "4 of 4 texts were added" in record(4).stdout
    assert "26 of 26 texts were added" in record(30).stdout
    assert "0 of 0 texts were added" in record(30).stdout
    found = read_recording(texts, model_info(target).vocabulary)
    model = load_model(target, exact=True)
    for text in found[:3]:
        tokens = text.tokens.tolist()
        (again,) = write(model, [tokens[: text.start]], [0.0], [0], 12, never_stop)
        assert tokens[text.start] == again.tokens[text.start]
    out = tmp_path / "out"
    how = ("--texts", texts, "--length", 24, "--loss", "next-token", "--force", "--steps", 3)
    part = ("--layers", "0,2", "--vocabulary", 100, "--out", out)
    done = run_command("distill", "--target", target, *how, *part)
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (2, 100)
    assert config["kept_ids"]["size"] == kit.VOCABULARY_SIZE
    assert run_command("export", out, tmp_path / "draft").exit_code == 0
    refused = run_command("distill", "--target", out, *how, "--out", tmp_path / "more")
    assert refused.exit_code == 1, refused.output
    assert "a draft with a part of its target's ids" in " ".join(refused.stderr.split())
    for more, words_found in (
        (("--layers", "0,x"), "layers is '0,x', but must be numbers such as 0,1,29"),
        (("--layers", "0,3"), "must be different numbers in [0, 2]"),
        (("--vocabulary", 9999), "vocabulary is 9999, but must be in"),
        (("--record",), "it continues --prompts only"),
    ):
        refused = run_command(
            "distill", "--target", target, *how, *more, "--out", tmp_path / "more"
        )
        assert refused.exit_code == 2, refused.output
        assert words_found in " ".join(refused.stderr.split())
    untold = record(4, "--layers", "0")
    assert untold.exit_code == 2, untold.output
    assert "--record trains nothing, so leave out --layers" in " ".join(untold.stderr.split())
