"""Tests of drafts that fill several positions in one run: export, masks, rollback, manifests.

Oracles: the same weights run over the tokens and masks as one text, one row at a time; a fresh
drafter, from which no history of masks may differ; and the files of an ordinary export, which a
parallel one changes by one input only.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.core.ports import ParallelDraft, count_places, draft_places
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.manifest import DraftModelError, read_manifest
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import export_draft
from edgespec.models.folders import ModelFolderError, read_parallel_draft
from tests.kit.tiny_checkpoints import (
    CONTEXT_LENGTH,
    VOCABULARY_SIZE,
    tiny_config,
    write_checkpoint,
)

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2)
MASK = VOCABULARY_SIZE - 2
TOKENS = tuple(int(one) for one in np.random.default_rng(1).integers(0, VOCABULARY_SIZE - 2, 60))


def _parallel_checkpoint(folder: Path) -> Path:
    config = tiny_config(pard_token=MASK, parallel_tokens=4)
    return write_checkpoint(folder, config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parallel")
    export_draft(_parallel_checkpoint(root / "source"), root / "draft", bits=32)
    return root / "draft"


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ordinary")
    export_draft(write_checkpoint(root / "source"), root / "draft", bits=32)
    return root / "draft"


def _logits(drafter: OnnxDrafter, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    drafter.begin(1, GREEDY)
    drafter.step(0, tokens, 1)
    return drafter.logits.copy()


def test_rows_of_masks_are_those_of_a_text_with_masks(folder: Path, ordinary: Path) -> None:
    """Oracle: an ordinary export of the same weights, which reads the masks as tokens."""
    drafter, plain = OnnxDrafter(folder), OnnxDrafter(ordinary)
    assert (count_places(drafter), count_places(plain)) == (4, 1)
    drafter.begin(1, GREEDY)
    found = drafter.step_places(0, TOKENS, 1, 4)
    for place, candidates in enumerate(found):
        logits = _logits(plain, (*TOKENS, *[MASK] * place))
        assert candidates[0].token == int(logits[: drafter.manifest.proposable_count].argmax())
        # A run of several rows rounds differently from one of one row.
        np.testing.assert_allclose(drafter._rows[place], logits, atol=2e-4)
    assert len(draft_places(plain, len(TOKENS) + 3, (3,), 2, 4)) == 1


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_a_parallel_export_drafts_one_by_one_as_an_ordinary_one(tmp_path: Path, bits: int) -> None:
    """The last row's logits are equal bit for bit."""
    export_draft(_parallel_checkpoint(tmp_path / "p"), tmp_path / "pd", bits=bits)
    export_draft(write_checkpoint(tmp_path / "o"), tmp_path / "od", bits=bits)
    parallel, plain = OnnxDrafter(tmp_path / "pd"), OnnxDrafter(tmp_path / "od")
    for count in (1, 5, 60):
        found, wanted = _logits(parallel, TOKENS[:count]), _logits(plain, TOKENS[:count])
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", [0, 24], ids=["whole", "sliding"])
def test_no_mask_stays_in_the_cache(
    folder: Path, ordinary: Path, sampling: SamplingParams, window: int
) -> None:
    """Steps of one to four places with rollbacks, and every place's candidates by the noise of its
    own position. Oracle: an ordinary drafter that is fed the same tokens and never a mask."""
    dice = random.Random(3)
    drafter, plain = OnnxDrafter(folder, window=window), OnnxDrafter(ordinary, window=window)
    for one in (drafter, plain):
        one.begin(1, sampling)
    text: list[int] = []
    for _ in range(40):
        keep = dice.randrange(max(0, len(text) - 6), len(text) + 1)
        feed = [dice.randrange(VOCABULARY_SIZE - 2) for _ in range(dice.randrange(1, 5))]
        if keep + len(feed) > CONTEXT_LENGTH:
            break
        text[keep:] = feed
        places = dice.randrange(1, 5)
        found = draft_places(drafter, keep, feed, 2, places)
        wanted = plain.step(keep, feed, 2)
        assert [one.token for one in found[0]] == [one.token for one in wanted]
        assert len(found) == (1 if places == 1 else min(places, 1 + CONTEXT_LENGTH - len(text)))
        assert drafter._cache.tokens == text
        np.testing.assert_allclose(drafter.logits, plain.logits, atol=2e-3)


def test_masks_fit_the_context(folder: Path) -> None:
    drafter = OnnxDrafter(folder)
    drafter.begin(1, GREEDY)
    full = tuple(TOKENS[at % len(TOKENS)] for at in range(CONTEXT_LENGTH - 1))
    assert len(drafter.step_places(0, full, 2, 4)) == 2
    assert len(drafter.step_places(len(full), (1,), 2, 4)) == 1
    resting = OnnxDrafter(folder)
    resting.restrict(0, 0)
    resting.begin(1, GREEDY)
    assert resting.step_places(0, (1,), 2, 4) == ()


@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
def test_long_feeds_run_in_chunks_with_masks(folder: Path, chunk: int) -> None:
    whole, parts = OnnxDrafter(folder), OnnxDrafter(folder, chunk=chunk)
    for one in (whole, parts):
        one.begin(1, GREEDY)
    found, wanted = parts.step_places(0, TOKENS, 2, 4), whole.step_places(0, TOKENS, 2, 4)
    assert len(found) == min(4, chunk)
    for place, other in zip(found, wanted, strict=False):
        assert place[0].token == other[0].token


def test_the_manifest_says_how_many_positions_a_run_fills(folder: Path, ordinary: Path) -> None:
    assert read_manifest(folder).parallel == ParallelDraft(MASK, 4)
    assert read_manifest(ordinary).parallel is None


def test_older_manifests_are_of_ordinary_drafts(ordinary: Path, tmp_path: Path) -> None:
    """A draft that was exported before drafts filled several positions has neither key."""
    for file in ordinary.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "edgespec.json"
    data = json.loads(path.read_text())
    del data["parallel_tokens"], data["mask_token"]
    path.write_text(json.dumps(data))
    assert count_places(OnnxDrafter(tmp_path)) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_tokens": 1}, "numbers of logits"),
        ({"parallel_tokens": 17}, r"parallel_tokens is 17, but must be an integer in \[1, 16\]"),
        ({"mask_token": VOCABULARY_SIZE}, f"mask_token is {VOCABULARY_SIZE}"),
    ],
    ids=["ordinary", "too-many", "no-token"],
)
def test_bad_manifests_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, int], why: str
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "edgespec.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(DraftModelError, match=why):
        OnnxDrafter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"pard_token": None}, None),
        ({"pard_token": 5}, ParallelDraft(5, 8)),
        ({"pard_token": 5, "parallel_tokens": 12}, ParallelDraft(5, 12)),
        ({"pard_token": VOCABULARY_SIZE}, f"pard_token is {VOCABULARY_SIZE}"),
        ({"pard_token": 5, "parallel_tokens": 1}, "parallel_tokens is 1"),
        ({"pard_token": "mask"}, "pard_token is 'mask'"),
    ],
    ids=["ordinary", "null", "foreign", "own", "no-id", "one", "text"],
)
def test_folders_of_parallel_drafts(
    tmp_path: Path, changes: dict[str, Any], found: ParallelDraft | str | None
) -> None:
    source = write_checkpoint(tmp_path, tiny_config(**changes))
    if isinstance(found, str):
        with pytest.raises(ModelFolderError, match=found):
            read_parallel_draft(source)
    else:
        assert read_parallel_draft(source) == found
