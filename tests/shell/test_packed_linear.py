"""Packed weights: the same products up to rounding, the same bits under every schedule.

Oracles: products in float64; the same checkpoint served with its weights as they are; and in
canonical mode one token a pass, compared bit for bit. The tiny models' layers are far below the
size from which weights are packed, so most tests lower it.
"""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from edgespec.verifier.targets import canonical_mode
from edgespec.verifier.targets import linear_layers as packed_linear
from edgespec.verifier.targets.linear_layers import (
    NarrowEmbedding,
    PackedLinear,
    pack_model,
    unpack_model,
)
from edgespec.verifier.targets.row_tiles import agreeing_packed_sizes
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.backend_schedules import Serving
from tests.shell.random_schedules import Recorder, check_random_schedule
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any size are packed."""
    monkeypatch.setattr(packed_linear, "LEAST_WEIGHTS", 1)


def _layers(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(96, 192), torch.nn.SiLU(), torch.nn.Linear(192, 40, bias=False)
    )
    return model.requires_grad_(False).eval()


def _packed(target: TorchTarget) -> int:
    return sum(isinstance(part, PackedLinear) for part in target._model.modules())


def test_unpacked_weights_are_the_weights_and_none_lie_twice(small: None) -> None:
    model = _layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = torch.randn((7, 96))
    out = model(rows)
    weights = [weakref.ref(part.weight) for part in model if isinstance(part, torch.nn.Linear)]
    assert pack_model(model) == 2
    gc.collect()
    assert [ref() for ref in weights] == [None, None]
    torch.testing.assert_close(model(rows), out, rtol=0, atol=1e-5)
    assert unpack_model(model) == 2
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }
    assert torch.equal(model(rows), out)
    assert unpack_model(model) == 0


def test_what_is_small_shared_hooked_or_of_another_format_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _layers()
    assert pack_model(model) == 0
    monkeypatch.setattr(packed_linear, "LEAST_WEIGHTS", 10_000)
    assert pack_model(model) == 1
    assert isinstance(model[0], PackedLinear)
    monkeypatch.setattr(packed_linear, "LEAST_WEIGHTS", 1)
    assert pack_model(_layers().double()) == 0
    shared = _layers()
    shared.append(torch.nn.Linear(96, 192))
    shared[3].weight = shared[0].weight
    assert pack_model(shared) == 1
    hooked = _layers()
    hooked[2].register_forward_hook(lambda _module, _rows, out: out + 1)
    assert pack_model(hooked) == 1


class _Scaled(torch.nn.Embedding):
    """More than a table, as Gemma's."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 3.0


def _tied(embed: torch.nn.Embedding) -> torch.nn.ModuleDict:
    head = torch.nn.Linear(96, 40)
    head.weight = embed.weight
    return torch.nn.ModuleDict({"embed": embed, "head": head}).requires_grad_(False).eval()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.Embedding, _Scaled])
def test_a_head_that_is_the_embedding_is_packed_beside_a_table_with_the_same_numbers(
    kind: type[torch.nn.Embedding], exact: bool, small: None
) -> None:
    torch.manual_seed(4)
    embed = kind(40, 96)
    if exact:  # as of a checkpoint in bfloat16
        embed.weight.data = embed.weight.data.bfloat16().float()
    model = _tied(embed)
    weight, tokens, rows = embed.weight.clone(), torch.arange(40), torch.randn((5, 96))
    looked_up, logits = model["embed"](tokens), model["head"](rows)
    assert pack_model(model) == 1
    assert isinstance(model["head"], PackedLinear)
    assert isinstance(model["embed"], NarrowEmbedding) == (exact and kind is torch.nn.Embedding)
    assert torch.equal(model["embed"](tokens), looked_up)
    torch.testing.assert_close(model["head"](rows), logits, rtol=0, atol=1e-5)
    assert unpack_model(model) == 1
    assert model["head"].weight is model["embed"].weight
    assert torch.equal(model.get_parameter("embed.weight"), weight)
    assert torch.equal(model["embed"](tokens), looked_up)
    assert torch.equal(model["head"](rows), logits)


def _wrong(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
    """Right for the first layer alone."""
    out = torch.nn.functional.linear(rows, layer.unpacked(), layer.bias)
    return out if layer.in_features == 96 else out * 1.001


def _missing(_layer: PackedLinear, _rows: torch.Tensor) -> torch.Tensor:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")


@pytest.mark.parametrize(
    ("product", "why"),
    [
        (_wrong, "the packed product of 2 differs by"),
        (_missing, "'_OpNamespace' 'mkldnn' object has no"),
    ],
)
def test_products_that_are_wrong_or_missing_are_not_used(
    product: Any,
    why: str,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = _layers()
    rows = torch.randn((7, 96))
    out = model(rows)
    monkeypatch.setattr(PackedLinear, "product", product)
    with caplog.at_level(logging.INFO):
        assert pack_model(model) == 0
    assert f"weights are not packed: {why}" in caplog.text
    assert torch.equal(model(rows), out)


def test_random_serving_has_the_logits_of_plain_weights(tmp_path: Path, small: None) -> None:
    """Ragged passes, trees, rollbacks, prefix hits, evictions: argmax equal, 1e-5 apart at most."""
    config = tiny_config(tie_word_embeddings=False)
    serving = Serving(write_checkpoint(tmp_path, config), seed=2, packed=True)
    assert [_packed(target) for target in serving.targets] == [15, 0]
    assert serving.targets[0].mode.endswith(", packed weights")
    while serving.rows < 300:
        serving.step()


def test_canonical_mode_has_the_same_bits_under_every_schedule(tmp_path: Path, small: None) -> None:
    recorder = Recorder(write_checkpoint(tmp_path, tiny_config("qwen2")), "float32")
    assert recorder.target.canonical
    # Which base holds, and whether with packed weights, is for this processor to say.
    assert recorder.target.mode.startswith("canonical (row tiles of ")
    packed = recorder.target.mode.endswith(", packed weights")
    assert _packed(recorder.target) == (15 if packed else 0)
    plain = TorchTarget(str(tmp_path), name="t", vocabulary="v", device="cpu", canonical=False)
    assert _packed(plain) == 15
    rng = random.Random(5)
    for length in (5, 130):
        check_random_schedule(rng, recorder, length)


def test_where_packed_products_do_not_hold_canonical_mode_keeps_the_bits_of_plain_ones(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path, tiny_config())
    tried: list[int] = []

    def fails(_layer: PackedLinear, base: int) -> tuple[int, ...]:
        tried.append(base)
        return ()

    text = [(7 * index) % 320 for index in range(40)]
    plain = Recorder(folder, "float32", packed=False)
    expected = plain.reference(text, 20)
    monkeypatch.setattr(canonical_mode, "agreeing_packed_sizes", fails)
    recorder = Recorder(folder, "float32")
    assert sorted(set(tried)) == [max(2, packed_linear.quick_rows()), 8, 16, 32]
    assert _packed(recorder.target) == 0
    assert recorder.target.mode == plain.target.mode
    assert torch.equal(recorder.reference(text, 20), expected)


def test_a_packed_product_that_depends_on_the_row_count_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true = PackedLinear.product
    layer = PackedLinear(torch.randn((48, 64)), None)
    assert agreeing_packed_sizes(layer, 8)

    def product(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        return true(layer, rows) * (1.0 if len(rows) < 32 else 1.0000001)

    monkeypatch.setattr(PackedLinear, "product", product)
    assert set(agreeing_packed_sizes(layer, 8)) <= {8, 16}
