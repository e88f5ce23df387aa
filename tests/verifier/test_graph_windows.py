"""Lines of keys in layers with an attention window, in a decoder that is one graph: what a row sees
is all that a layer gathers, and no bit of a row depends on where its line begins.

Oracles: the same target with lines that begin with the first token; the bits of one token per pass;
transformers' model of the weights that the integers stand for.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from edgespec.core.ports import PassRequest
from edgespec.verifier.targets import graph_passes
from edgespec.verifier.targets.graph_passes import (
    LINE_KEYS,
    WINDOW_STEPS,
    GraphModel,
    Lines,
    line_length,
)
from edgespec.verifier.targets.quantized_linear import FORMATS, HEAD_BITS, round_weight
from tests.kit.tiny_checkpoints import family_model
from tests.present import require
from tests.verifier.torch_schedules import (
    GREEDY,
    Recorder,
    check_random_schedule,
    random_tree,
)

WINDOW = 40
HEAD_DIM = 128
CONTEXT = 4096
STEP = WINDOW_STEPS[0]
"""Lines begin at multiples of it in a model with heads this wide."""
INPUT_ERROR = 0.08
"""Error of logits that inputs of 8 bits may make in two layers, as a share of their spread."""
LENGTHS = (
    *(WINDOW - 1, WINDOW, WINDOW + 1),
    *(STEP + WINDOW - 1, STEP + WINDOW, STEP + WINDOW + 1),
    *(2 * STEP + WINDOW + 60, 1500, 3000),
)


def make_checkpoint(folder: Path, family: str = "gemma3_text", **changes: Any) -> Path:
    wide = {"head_dim": HEAD_DIM, "sliding_window": WINDOW, "max_position_embeddings": CONTEXT}
    family_model(family, **(wide | changes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gemma3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def gemma3(gemma3_folder: Path) -> Recorder:
    return Recorder(gemma3_folder, quantize="int8")


def graph_of(recorder: Recorder) -> GraphModel:
    return require(recorder.target._graph)


class LineSpy:
    """Notes how many keys the lines of each run have, by window."""

    def __init__(self, graph: GraphModel, patch: pytest.MonkeyPatch) -> None:
        self.keys = list[dict[int, int]]()
        right = graph_passes.RunGroups.inputs

        def inputs(groups: graph_passes.RunGroups, shape: Any, padded: int) -> Any:
            given = right(groups, shape, padded)
            self.keys.append({one: given[f"seen.{one}"].shape[-1] for one in shape.windows})
            for one in shape.windows:
                assert given[f"places.{one}"].shape[-1] == self.keys[-1][one]
            return given

        patch.setattr(graph_passes.RunGroups, "inputs", inputs)


def root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def random_text(rng: random.Random, recorder: Recorder, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(recorder.vocabulary_size) for _ in range(length))


# --- how long lines are -----------------------------------------------------------------------


@pytest.mark.parametrize("keys", [1, 64, 65, 511, 513, 1025, 4095, 4097, 16_384, 16_385, 40_001])
@pytest.mark.parametrize("least", [64, 256])
def test_a_line_has_room_and_wastes_little(keys: int, least: int) -> None:
    length = line_length(keys, least)
    assert length % LINE_KEYS == 0
    assert max(keys, least) <= length < max(keys, least) + max(LINE_KEYS, keys / 8)
    assert line_length(length, least) == length


def test_a_layer_gathers_no_more_keys_behind_a_long_text_than_behind_a_short_one(
    gemma3: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, target, rng = graph_of(gemma3), gemma3.target, random.Random(1)
    step = require(graph.counts).window_step
    assert step in WINDOW_STEPS
    spy, text = LineSpy(graph, monkeypatch), random_text(rng, gemma3, 3500)
    target.open("long", len(text), GREEDY)
    cached = 0
    while cached < len(text):
        feed = text[cached : cached + 100]
        target.forward([PassRequest("long", cached, feed, sample=False)])
        cached += len(feed)
        assert spy.keys[-1][0] >= cached
    target.close("long")
    assert max(keys[WINDOW] for keys in spy.keys) <= line_length(WINDOW + 100 + step) < 3500


def test_a_short_text_beside_a_long_one_shares_its_run(
    gemma3: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, target, rng = graph_of(gemma3), gemma3.target, random.Random(2)
    spy = LineSpy(graph, monkeypatch)
    texts = {f"{length}": random_text(rng, gemma3, length) for length in (3000, 20, 700)}
    last = {key: PassRequest(key, len(text) - 1, text[-1:]) for key, text in texts.items()}
    alone = {}
    for key, text in texts.items():
        target.open(key, len(text), GREEDY)
        target.forward([PassRequest(key, 0, text[:-1], sample=False)])
        target.forward([last[key]])
        alone[key] = gemma3.logits[0]
    target.forward(list(last.values()))
    assert spy.keys[-1][0] == line_length(3000)
    assert spy.keys[-1][WINDOW] <= line_length(WINDOW + require(graph.counts).window_step)
    for found, wanted in zip(gemma3.logits, alone.values(), strict=True):
        assert torch.equal(found, wanted)
    for key in texts:
        target.close(key)


@pytest.mark.parametrize(
    ("window", "step", "least", "firsts"),
    [
        (0, 128, [900, 5], [0, 0]),
        (40, 0, [900, 5], [0, 0]),
        (40, 128, [166, 5], [0, 0]),
        (40, 128, [167, 5], [128, 0]),
        (40, 128, [168, 300], [128, 256]),
        (40, 128, [900, 5], [768, 0]),
    ],
    ids=["no window", "no step", "before the step", "at the step", "two lines", "one of two"],
)
def test_lines_begin_at_the_last_step_before_the_first_key_that_is_seen(
    window: int, step: int, least: list[int], firsts: list[int]
) -> None:
    """Each group has three rows side by side, whose keys are fresh. Slots count up from 1."""
    positions = np.array(least)[:, None] + np.arange(3)
    last = positions.max(axis=1)
    length = line_length(int(last.max()) + 1)
    slots = np.where(np.arange(length) <= last[:, None], np.arange(length) + 1, 0)
    goals = np.array([[group, place] for group in range(2) for place in positions[group]])
    whole = Lines(np.zeros(2, dtype=np.int64), slots, np.arange(6), goals)
    cut = whole.windowed(window, step, positions, 64)
    assert cut.firsts.tolist() == firsts
    assert cut.window == window
    assert cut.fresh.tolist() == list(range(6))
    for group, first in enumerate(firsts):
        line = cut.slots[group]
        held = int(last[group]) + 1 - first
        assert line[:held].tolist() == list(range(first + 1, int(last[group]) + 2))
        assert not line[held:].any()
        places = cut.goals[cut.goals[:, 0] == group, 1]
        assert (places + first).tolist() == positions[group].tolist()


def test_fresh_keys_that_no_row_of_a_later_group_sees_are_left_out() -> None:
    """A run of 300 rows in two groups: of the second one's line the first rows are missing."""
    positions = np.array([np.arange(0, 150), np.arange(150, 300)])
    slots = np.tile(np.arange(384) + 1, (2, 1))
    goals = np.array([(0, at) for at in range(150)] + [(1, at) for at in range(300)])
    fresh = np.array([*range(150), *range(300)])
    cut = Lines(np.zeros(2, dtype=np.int64), slots, fresh, goals).windowed(10, 64, positions, 64)
    assert cut.firsts.tolist() == [0, 128]
    assert cut.fresh.tolist() == [*range(150), *range(128, 300)]
    assert cut.goals[150:].tolist() == [[1, at - 128] for at in range(128, 300)]


# --- bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_bits_do_not_depend_on_the_schedule(gemma3: Recorder, length: int) -> None:
    rng = random.Random(length)
    for _ in range(2 if length < 1000 else 1):
        check_random_schedule(rng, gemma3, length)


def test_bits_are_those_of_one_token_per_pass_from_the_first_token_on(gemma3: Recorder) -> None:
    """The reference's lines begin at every step; a prompt in one pass has rows on both sides."""
    rng, length = random.Random(4), 3 * STEP + WINDOW
    text = random_text(rng, gemma3, length)
    wanted = gemma3.reference(list(text), 1)
    target = gemma3.target
    for cut in (1, 2, STEP, 2 * STEP + 1, length - 20):
        target.open("cut", length, GREEDY)
        target.forward([PassRequest("cut", 0, text[:cut], sample=False)])
        chain = text[cut + 1 :]
        parents = tuple(range(-1, len(chain) - 1))
        target.forward([PassRequest("cut", cut, text[cut : cut + 1], chain, parents)])
        assert torch.equal(gemma3.logits, wanted[cut:])
        target.close("cut")


def play_sessions(recorder: Recorder, seed: str) -> list[torch.Tensor]:
    """Return the logits of passes that sessions with texts of many lengths share, with trees."""
    rng, target, found = random.Random(seed), recorder.target, list[torch.Tensor]()
    lengths = (30, 700, 1400, 2900)
    for length in lengths:
        target.open(f"{length}", length, GREEDY)
        text = random_text(rng, recorder, length)
        target.forward([PassRequest(f"{length}", 0, text, sample=False)])
    for _ in range(4):
        batch = [
            PassRequest(
                f"{length}",
                length,
                random_text(rng, recorder, 3),
                *random_tree(rng, 9, recorder.vocabulary_size),
            )
            for length in lengths
        ]
        target.forward(batch)
        found.append(recorder.logits)
    for length in lengths:
        target.close(f"{length}")
    return found


def keep_whole(line: Lines, window: int, step: int, positions: Any, least: int) -> Lines:
    """Take the place of ``Lines.windowed``: leave out nothing."""
    return replace(line, window=window)


@pytest.mark.parametrize("canonical", [True, False])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {}),
        ("gemma3_text", {"head_dim": 64, "sliding_window": 200}),
        ("gemma3_text", {"head_dim": 256, "num_key_value_heads": 1}),
        ("gemma2", {}),
        ("mistral", {}),
    ],
    ids=["gemma3", "narrow heads", "wide heads", "soft caps", "every layer has a window"],
)
def test_short_lines_give_the_numbers_of_whole_ones(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, Any],
    canonical: bool,
) -> None:
    """In canonical mode the bits are equal. In plain mode a last bit may move an input to another
    of its 8-bit numbers."""
    make_checkpoint(tmp_path, family, **changes)
    recorder = Recorder(tmp_path, quantize="int4", canonical=canonical)
    assert recorder.target.canonical is canonical
    spy = LineSpy(graph_of(recorder), monkeypatch)
    short = play_sessions(recorder, family)
    assert spy.keys[-1][recorder.target._model.config.sliding_window] < 2000
    monkeypatch.setattr(Lines, "windowed", keep_whole)
    whole = play_sessions(recorder, family)
    assert set(spy.keys[-1].values()) == {line_length(2900 + 3 + 9)}
    for one, other in zip(short, whole, strict=True):
        assert torch.equal(one, other) or not canonical
        assert root_mean_square(one - other) <= INPUT_ERROR / 4 * float(other.std())


def test_logits_behind_a_long_text_are_those_of_the_library(
    gemma3: Recorder, gemma3_folder: Path
) -> None:
    """Inputs of products are rounded to 8 bits, so logits are equal up to some percent."""
    model = transformers.AutoModelForCausalLM.from_pretrained(gemma3_folder, dtype=torch.float32)
    head = model.get_output_embeddings()
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            bits = HEAD_BITS if part is head else FORMATS["int8"]
            part.weight = torch.nn.Parameter(round_weight(part.weight, bits))
    text = random_text(random.Random(7), gemma3, 1200)
    found = gemma3.reference(list(text), 1150)
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0, 1149:].float()
    assert found.shape == wanted.shape
    assert root_mean_square(found - wanted) <= INPUT_ERROR * float(wanted.std())


def test_lines_are_whole_where_no_step_keeps_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe is given rows whose bits depend on where their line begins."""
    right = graph_passes._Probe._run

    def wrong(probe: Any, tokens: torch.Tensor, *, first: int = 0, **others: Any) -> torch.Tensor:
        return right(probe, tokens, first=first, **others) + first * 1e-6

    monkeypatch.setattr(graph_passes._Probe, "_run", wrong)
    recorder = Recorder(make_checkpoint(tmp_path), quantize="int8")
    assert require(graph_of(recorder).counts).window_step == 0
    spy = LineSpy(graph_of(recorder), monkeypatch)
    check_random_schedule(random.Random(8), recorder, 600)
    assert spy.keys[-1][WINDOW] == spy.keys[-1][0]
