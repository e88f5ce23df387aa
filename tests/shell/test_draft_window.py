"""A draft that holds the first and the last tokens of a text.

Oracles: lists of the rows that a cache would hold; a decoder in plain numpy, which keeps its keys
unturned and turns them by the rows that they lie in when it looks at them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.kv_buffers import PROBED_ROWS, frequencies_of
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.token_cache import SINKS, DraftWindow
from edgespec.device.export.checkpoint import read_shape
from edgespec.device.export.export import export_draft
from edgespec.device.export.export_graph import rope_tables
from edgespec.models.folders import model_info
from tests.shell.test_export import VARIANTS
from tests.shell.tiny_checkpoints import (
    VOCABULARY_SIZE,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)

CONTEXT = 250


def steps(seed: int, count: int, longest: int) -> Iterator[tuple[int, list[int]]]:
    """(tokens kept, tokens fed): commits, rollbacks, corrections of long ago, long feeds."""
    dice, length = random.Random(seed), 0
    for _ in range(count):
        back = 0
        if dice.random() < 0.3:
            back = dice.randint(0, length if dice.random() < 0.1 else min(length, 12))
        most = longest if dice.random() < 0.1 else 5
        feed = [dice.randrange(VOCABULARY_SIZE) for _ in range(dice.randint(1, most))]
        yield length - back, feed
        length += len(feed) - back


class Rows:
    """What lies in the cache, as (position, token): it is changed as a drafter changes it."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int]] = []

    def follow(self, window: DraftWindow, keep_length: int, text: Sequence[int]) -> int:
        """How many tokens were fed."""
        leaving = window.place(keep_length, len(text))
        del self.held[window.held + leaving :]
        del self.held[window.sinks : window.sinks + leaving]
        assert len(self.held) == window.held
        end = len(text) - window.skipped
        fed = window.tokens(text, window.held, end)
        for row, token in enumerate(fed, window.held):
            self.held.append((row + (window.skipped if row >= window.sinks else 0), token))
        window.held = end
        return len(fed)


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 40, 64])
def test_the_rows_are_the_first_tokens_and_the_last(size: int, moving: bool) -> None:
    """Whatever is taken back and fed, and while the window is made shorter and longer."""
    for seed in range(16):
        window, rows, text = DraftWindow(size, moving=moving), Rows(), list[int]()
        for number, (keep, feed) in enumerate(steps(seed, 60, 3 * size)):
            text[keep:] = feed
            if seed % 4 == 0 and number % 9 == 8:
                window.resize(max(1, size // (1 + number % 4)))
                del rows.held[window.size if window.held else 0 :]
            rows.follow(window, keep, text)
            positions = [position for position, _ in rows.held]
            assert [token for _, token in rows.held] == [text[position] for position in positions]
            assert len(positions) <= window.size
            last = len(positions) - window.sinks
            assert positions[: window.sinks] == list(range(len(text)))[: window.sinks]
            assert positions[window.sinks :] == list(range(len(text)))[-last:] if last > 0 else True


@pytest.mark.parametrize("size", [8, 64, 1000])
def test_a_text_that_grows_computes_each_token_once(size: int) -> None:
    window, rows, text = DraftWindow(size, moving=True), Rows(), list[int]()
    for token in range(5 * size):
        text.append(token)
        assert rows.follow(window, token, text) == 1
        assert len(rows.held) > min(token, size - window.block)
    assert window.sinks == min(SINKS, size // 8)


def test_of_a_long_prompt_the_ends_are_fed_and_an_old_correction_feeds_them_again() -> None:
    window, rows, text = DraftWindow(64, moving=True), Rows(), list(range(5000))
    assert rows.follow(window, 0, text) == 64 - window.block
    assert [position for position, _ in rows.held[:5]] == [0, 1, 2, 3, 4948]
    text[4960:] = [1] * 3  # within the window
    assert rows.follow(window, 4960, text) == 3
    text[4000:] = [2] * 2
    assert rows.follow(window, 4000, text) == 64 - window.block - SINKS
    text[30:] = [3]  # the whole text fits again
    assert rows.follow(window, 30, text) == 31 - SINKS


class PlainDecoder:
    """A Llama of ``tiny_tensors`` in float64, token by token."""

    def __init__(self) -> None:
        self.config = tiny_config(max_position_embeddings=CONTEXT)
        self.weights = {k: v.astype(np.float64) for k, v in tiny_tensors(self.config).items()}
        self.rows: list[list[tuple[NDArray[np.float64], NDArray[np.float64]]]] = []
        steps = np.arange(0, 16, 2) / 16
        self.frequencies = 1.0 / self.config["rope_parameters"]["rope_theta"] ** steps

    def turned(self, heads: NDArray[np.float64], row: int) -> NDArray[np.float64]:
        points = (heads[..., :8] + 1j * heads[..., 8:]) * np.exp(1j * row * self.frequencies)
        return np.concatenate([points.real, points.imag], axis=-1)

    def norm(self, name: str, value: NDArray[np.float64]) -> NDArray[np.float64]:
        scale = math.sqrt(np.mean(value**2) + self.config["rms_norm_eps"])
        normed: NDArray[np.float64] = value / scale * self.weights[f"{name}.weight"]
        return normed

    def feed(self, token: int) -> NDArray[np.float64]:
        """Behind all rows that there are; the logits."""
        stream = self.weights["model.embed_tokens.weight"][token]
        self.rows.append([])
        for layer in range(2):
            name = f"model.layers.{layer}"
            normed = self.norm(f"{name}.input_layernorm", stream)
            query, key, value = (
                (self.weights[f"{name}.self_attn.{part}_proj.weight"] @ normed).reshape(-1, 16)
                for part in "qkv"
            )
            self.rows[-1].append((key, value))
            heads = self.turned(query, len(self.rows) - 1).reshape(2, 2, 16)
            keys = np.stack([self.turned(row[layer][0], r) for r, row in enumerate(self.rows)])
            values = np.stack([row[layer][1] for row in self.rows])
            scores = np.exp(np.einsum("ghd,rgd->ghr", heads, keys) / 4.0)
            shares = scores / scores.sum(-1, keepdims=True)
            attended = np.einsum("ghr,rgd->ghd", shares, values).reshape(-1)
            stream = stream + self.weights[f"{name}.self_attn.o_proj.weight"] @ attended
            normed = self.norm(f"{name}.post_attention_layernorm", stream)
            gate, up = (
                self.weights[f"{name}.mlp.{part}_proj.weight"] @ normed for part in ("gate", "up")
            )
            active = gate / (1.0 + np.exp(-gate)) * up
            stream = stream + self.weights[f"{name}.mlp.down_proj.weight"] @ active
        return self.weights["model.embed_tokens.weight"] @ self.norm("model.norm", stream)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("window")
    source = write_checkpoint(root / "source", tiny_config(max_position_embeddings=CONTEXT))
    export_draft(source, root / "draft", model_info(source), bits=32)
    return root / "draft"


def test_logits_are_those_of_a_decoder_that_sees_the_first_and_the_last_tokens(
    folder: Path,
) -> None:
    drafter, oracle, text = OnnxDrafter(folder, window=48), PlainDecoder(), list[int]()
    drafter.begin(10, SamplingParams())
    window, moved = DraftWindow(48, moving=True), 0
    for keep, feed in steps(2, 150, 60):
        text[keep:] = feed
        drafter.step(keep, feed, 1)
        leaving = window.place(keep, len(text))
        moved += leaving
        del oracle.rows[window.held + leaving :]
        del oracle.rows[window.sinks : window.sinks + leaving]
        end = len(text) - window.skipped
        logits = [oracle.feed(token) for token in window.tokens(text, window.held, end)]
        window.held = end
        np.testing.assert_allclose(drafter.logits, logits[-1], atol=2e-3)
    assert moved > 100
    drafter.close()


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "yarn-rope", "heads-of-24", "qwen3"])
@pytest.mark.parametrize("bits", [4, 32])
def test_frequencies_are_found_as_the_model_was_made(name: str, bits: int, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", VARIANTS[name])
    export_draft(source, tmp_path / "draft", model_info(source), bits=bits)
    shape, drafter = read_shape(source), OnnxDrafter(tmp_path / "draft")
    drafter.begin(1, SamplingParams())
    drafter.step(0, [7] * PROBED_ROWS, 1)
    cos, sin = rope_tables(shape.rope, shape.head_dim, 250)
    turns = (cos + 1j * sin) / np.hypot(cos[0], sin[0])
    for cache, rows in drafter.cached_rows(PROBED_ROWS):
        if cache.part == "key":
            found = frequencies_of(rows, cache.past)[: shape.head_dim // 2]
            angles = np.outer(np.arange(250), found)
            np.testing.assert_allclose(np.exp(1j * angles), turns, atol=2e-3)
    drafter.close()


def test_keys_that_are_turned_otherwise_are_refused_by_name() -> None:
    angles = np.outer(np.arange(PROBED_ROWS), [1.0, 0.1])
    pairs = np.stack([np.cos(angles), np.sin(angles)], axis=-1)[None]  # neighbours are turned
    learned = np.random.default_rng(0).normal(size=(2, PROBED_ROWS, 8))
    for keys in (pairs.reshape(1, PROBED_ROWS, 4), learned, np.zeros((1, PROBED_ROWS, 4))):
        with pytest.raises(DraftModelError, match=r"past\.1\.key: cached keys are not turned"):
            frequencies_of(keys, "past.1.key")
