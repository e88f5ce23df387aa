"""Drafts on graphs that others exported. Oracles: our own exporter's graph of the same weights,
whose greedy tokens must come out; a cache filled anew, from which no history of rollbacks may
differ.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.config import DraftSection
from edgespec.core.ports import Drafter, StepCancelledError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.foreign_drafter import ForeignDrafter, ReslicedCache
from edgespec.device.drafters.foreign_graph import CacheTensor
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import export_draft
from edgespec.device.model_drafter import foreign_drafter
from edgespec.models.draft_sources import find_draft
from edgespec.models.folders import model_info
from tests.shell.foreign_graphs import (
    Style,
    attending_graph,
    concatenating_graph,
    write_folder,
)
from tests.shell.tiny_checkpoints import CONTEXT_LENGTH, VOCABULARY_SIZE, write_checkpoint

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, VOCABULARY_SIZE, CONTEXT_LENGTH)]
STYLES = {
    "optimum": Style(),
    "float16": Style(half=True),
    "merged": Style(merged=True),
    "merged-early": Style(merged=True, causal_behind_cache=False),
    "last-row": Style(last_row=True),
    "tokens-first": Style(
        tokens_first=True, past="past_{part}_{layer}", present="present_{part}_{layer}"
    ),
    "no-positions": Style(positions=False),
}
ATTENDING = ("genai", "genai-open", "genai-float16", "own")
KINDS = (*STYLES, *ATTENDING)


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own")
    source = write_checkpoint(root / "source")
    export_draft(source, root / "draft", model_info(source), bits=32)
    return root / "draft"


@pytest.fixture(scope="module")
def folder_of(own_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("foreign")

    def make(kind: str) -> Path:
        folder: Path = root / kind
        if folder.exists():
            return folder
        if kind in STYLES:
            graph = concatenating_graph(style=STYLES[kind])
        else:
            graph = onnx.load(own_folder / "model.onnx")
            if kind == "genai-float16":
                half_cache(graph)
            if kind != "own":
                graph = attending_graph(graph, open_head_size=kind == "genai-open")
        path = "onnx/model.onnx" if kind in STYLES else "model.onnx"
        external = [path] if kind in ("optimum", "genai") else []
        return write_folder(folder, {path: graph}, external=external)

    return make


def half_cache(model: onnx.ModelProto) -> None:
    """Make keys and values float16, and with them the attention that reads and writes them."""
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for node in nodes:
        if node.op_type != "GroupQueryAttention":
            model.graph.node.append(node)
            continue
        for index in (0, 7, 8):  # packed query, cosines, sines
            wide, half = node.input[index], f"{node.name}.half{index}"
            model.graph.node.append(
                helper.make_node("Cast", [wide], [half], to=TensorProto.FLOAT16)
            )
            node.input[index] = half
        wide, node.output[0] = node.output[0], f"{node.name}.half"
        cast = helper.make_node("Cast", [node.output[0]], [wide], to=TensorProto.FLOAT)
        model.graph.node.extend([node, cast])


def load(folder: Path, context_length: int = 0) -> ForeignDrafter:
    source = find_draft(str(folder))
    return foreign_drafter(source, print, DraftSection(context_length=context_length))


def greedy(drafter: Drafter, count: int = 80) -> list[int]:
    drafter.begin(5, SamplingParams())
    feed, keep, drafted = TOKENS[:5], 0, []
    for _ in range(count):
        token = drafter.step(keep, feed, 3)[0].token
        keep, feed = keep + len(feed), [token]
        drafted.append(token)
    return drafted


def row(drafter: ForeignDrafter) -> NDArray[np.float32]:
    return drafter.logits.copy()


# --- it drafts ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_draft_the_same_tokens(
    kind: str, folder_of: Callable[[str], Path], own_folder: Path
) -> None:
    drafter = load(folder_of(kind))
    assert greedy(drafter) == greedy(OnnxDrafter(own_folder))
    assert drafter.behaviour.in_place == (kind in ATTENDING)
    assert drafter.behaviour.chunks == (kind != "merged-early")
    assert drafter.graph.layers == 2
    halved = "float16" in kind
    assert drafter.graph.cache_bytes_per_token == 2 * 2 * 2 * 16 * (2 if halved else 4)
    drafter.close()
    drafter.close()
    with pytest.raises(ValueError, match="closed"):
        drafter.step(0, [1], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_no_history_of_rollbacks_shows(kind: str, folder_of: Callable[[str], Path]) -> None:
    """Random commits and rollbacks against a second drafter that only ever holds the right tokens,
    fed in the same pieces: equal to the bit. A rollback that has to copy says how much."""
    dice = np.random.default_rng(11)
    drafter, fresh = load(folder_of(kind)), load(folder_of(kind))
    drafter.begin(10, SamplingParams())
    cached: list[int] = []
    pieces: list[int] = []  # the lengths at which the tokens held now were fed
    rolled_back_bytes = 0
    for _ in range(40):
        keep = int(dice.integers(max(0, len(cached) - 9), len(cached) + 1))
        keep = max((end for end in [0, *pieces] if end <= keep), default=0)
        feed = [int(t) for t in dice.integers(0, VOCABULARY_SIZE, int(dice.integers(1, 6)))]
        if keep < len(cached):
            rolled_back_bytes += keep * drafter.graph.cache_bytes_per_token
        drafter.step(keep, feed, 1)
        cached = [*cached[:keep], *feed]
        pieces = [*(end for end in pieces if end <= keep), len(cached)]
    fresh.begin(10, SamplingParams())
    for start, end in itertools.pairwise([0, *pieces]):
        fresh.step(start, cached[start:end], 1)
    np.testing.assert_array_equal(row(drafter), row(fresh))
    copies = not drafter.behaviour.in_place and kind != "tokens-first"
    assert drafter.copied_bytes == (rolled_back_bytes if copies else 0)
    assert fresh.copied_bytes == 0


@pytest.mark.parametrize("kind", ["optimum", "merged-early", "genai", "last-row"])
def test_long_feeds_come_in_pieces_that_can_be_cancelled(
    kind: str, folder_of: Callable[[str], Path]
) -> None:
    drafter = load(folder_of(kind))
    drafter.begin(200, SamplingParams())
    drafter.step(0, TOKENS[:200], 1)
    whole = row(drafter)
    asked = itertools.count()
    with pytest.raises(StepCancelledError, match="64 of 150 tokens fed"):
        drafter.step(50, TOKENS[50:200], 1, lambda: next(asked) >= (64 if "merged" in kind else 1))
    drafter.step(50, TOKENS[50:200], 1)  # what was cached behind 50 tokens is lost, no more
    np.testing.assert_allclose(row(drafter), whole, atol=1e-4)


@pytest.mark.parametrize("kind", ["optimum", "genai", "no-positions"])
def test_the_context_ends_where_the_config_says(
    kind: str, folder_of: Callable[[str], Path]
) -> None:
    drafter = load(folder_of(kind))
    assert drafter.info.context_length == CONTEXT_LENGTH
    drafter.begin(CONTEXT_LENGTH, SamplingParams())
    assert drafter.step(0, TOKENS, 4)
    with pytest.raises(ValueError, match=f"context length of {CONTEXT_LENGTH}"):
        drafter.step(CONTEXT_LENGTH, [1], 1)
    assert drafter.step(CONTEXT_LENGTH - 1, [1], 1)
    for length in (1, 3, 20):
        short = load(folder_of(kind), context_length=length)
        short.begin(1, SamplingParams())
        short.step(0, TOKENS[:length], 1)
        with pytest.raises(ValueError, match=f"context length of {length}"):
            short.step(length, [1], 1)
    with pytest.raises(ValueError, match=f"context_length is 257.*{CONTEXT_LENGTH}"):
        load(folder_of(kind), context_length=257)


def test_siblings_are_the_best_of_one_row_and_padding_is_never_one(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    drafter = load(folder_of("optimum"))
    drafter.begin(5, SamplingParams())
    guesses = drafter.step(0, TOKENS[:5], 4)
    best = np.argsort(-row(drafter), kind="stable")[:4]
    assert [guess.token for guess in guesses] == best.tolist()
    folder = shutil.copytree(folder_of("optimum"), tmp_path / "few")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"] = {t: i for t, i in data["model"]["vocab"].items() if i < 100}
    data["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(data))
    known = load(folder)
    known.begin(5, SamplingParams())
    assert all(guess.token < 100 for guess in known.step(0, TOKENS[:5], 64))


def test_memory_is_what_is_cached(folder_of: Callable[[str], Path]) -> None:
    for kind, buffers in (("optimum", 2), ("genai", 1)):
        drafter = load(folder_of(kind))
        empty = drafter.memory_bytes()
        drafter.begin(50, SamplingParams())
        drafter.step(0, TOKENS[:50], 1)
        rows = 50 * drafter.graph.cache_bytes_per_token
        assert drafter.memory_bytes() - empty == buffers * rows
        assert drafter.memory_bytes(0) == empty


def test_the_links_of_the_hub_s_cache_are_followed(
    folder_of: Callable[[str], Path], own_folder: Path, tmp_path: Path
) -> None:
    """A snapshot holds links to blobs, external data among them."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    blobs.mkdir()
    source = folder_of("optimum")
    for number, path in enumerate(path for path in source.rglob("*") if path.is_file()):
        shutil.copy(path, blobs / str(number))
        link = snapshot / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(number))
    assert greedy(load(snapshot), 10) == greedy(OnnxDrafter(own_folder), 10)


class NoMoreMemory(ReslicedCache):
    """Fails to grow past 40 tokens."""

    def _with_room(
        self, tensor: CacheTensor, buffer: NDArray[np.generic], needed: int
    ) -> NDArray[np.generic]:
        if needed > 40:
            raise MemoryError("no more")
        return super()._with_room(tensor, buffer, needed)


def test_without_memory_a_step_fails_and_what_is_kept_stays(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.device.drafters.foreign_drafter.ReslicedCache", NoMoreMemory)
    drafter = load(folder_of("optimum"))
    drafter.begin(30, SamplingParams())
    drafter.step(0, TOKENS[:30], 1)
    before = row(drafter)
    with pytest.raises(MemoryError):
        drafter.step(30, TOKENS[30:60], 1)
    drafter.step(25, TOKENS[25:30], 1)
    np.testing.assert_allclose(row(drafter), before, atol=1e-4)
