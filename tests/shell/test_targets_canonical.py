"""Canonical mode: the logits of a position have the same bits under every schedule.

The reference of a text is one token a pass after a prefill in one piece. Everything else (cuts,
chunks, trees, other sessions in the pass, before and behind) is random, and compared bit for bit,
right and wrong branches alike. Products that are made to depend on the row count, on a row's place,
or on the order of their sum must be found out.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.nn import functional

from edgespec.core.ports import PassRequest, PassResult
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets import canonical_mode, linear_layers, row_tiles
from edgespec.verifier.targets.canonical_mode import CanonicalModeError
from edgespec.verifier.targets.linear_layers import PackedLinear
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell import torch_schedules as schedules
from tests.shell.family_models import family_model
from tests.shell.live_verifier import python
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "gemma2": {},  # its window is shorter than the distance of two tiles of keys
}


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    model = family_model(request.param, max_position_embeddings=1024, **SHAPES[request.param])
    model.save_pretrained(path)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, tiny_config("qwen2"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_tree_packing_and_prefill_cut_gives_the_same_bits(
    folder: Path, dtype: str, device: str
) -> None:
    recorder, rng = schedules.Recorder(folder, dtype, device=device), random.Random(dtype)
    for length in (5, 20, 251, 300, 509):
        schedules.check_random_schedule(rng, recorder, length)


def test_plain_mode_differs_only_in_the_last_bits(folder: Path) -> None:
    target = schedules.torch_target(folder, canonical=False, model_threads=1)
    assert not target.canonical
    differences = re.findall(r"differs by (\S+?)(?:;|$)", target.self_test())
    assert all(float(one) < 1e-4 for one in differences)


def _disagree(monkeypatch: pytest.MonkeyPatch, *, least_base: int) -> None:
    """Let no matrix product have a size that holds, from ``least_base`` rows on."""
    true = row_tiles.agreeing_linear_sizes
    monkeypatch.setattr(
        canonical_mode,
        "agreeing_linear_sizes",
        lambda weight, bias, base: () if base >= least_base else true(weight, bias, base),
    )


def test_where_nothing_holds_the_default_is_plain_mode_that_says_so(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    _disagree(monkeypatch, least_base=1)
    with caplog.at_level(logging.WARNING):
        target = schedules.torch_target(tiny)
    assert not target.canonical
    assert target.mode == "plain (texts may differ where two tokens nearly tie)"
    assert torch.get_num_threads() == threads
    assert "texts may differ where two tokens nearly tie: row tiles of 8: a 64 x " in caplog.text
    assert not any("forward" in vars(part) for part in target._model.modules())
    with pytest.raises(CanonicalModeError, match=r"row tiles of 32: a 64 x .* row by row: a 64 x"):
        schedules.torch_target(tiny, canonical=True)


def test_row_by_row_is_only_for_those_who_ask(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _disagree(monkeypatch, least_base=2)
    assert not schedules.torch_target(tiny).canonical
    recorder = schedules.Recorder(tiny)
    assert recorder.target.mode == "canonical (row by row)"
    schedules.check_random_schedule(random.Random(4), recorder, 60)


def test_a_product_that_depends_on_the_place_or_is_no_number_is_found_out() -> None:
    def product(rows: torch.Tensor) -> torch.Tensor:
        out = rows.clone()
        if len(rows) in (8, 64):
            out[5] *= 1.0000001
        return out

    probes = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25], [-2.0, 7.0]])
    assert row_tiles.agreeing_sizes(product, probes, 8) == ()
    assert row_tiles.agreeing_sizes(product, probes, 16) == (16, 32, 48, 128)
    assert row_tiles.agreeing_sizes(lambda rows: rows * torch.nan, probes, 8) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 512])
def test_another_order_of_the_sum_is_found_out_though_rounding_hides_it(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(rows: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        terms = rows.float()[:, None] * weight.float()
        order = reversed(range(width)) if len(rows) >= 64 else range(width)
        total = torch.zeros(terms.shape[:2])
        for k in order:
            total += terms[:, :, k]
        return total.to(dtype)

    torch.manual_seed(width)
    weight = torch.randn((16, width)).to(dtype)
    rows = torch.randn((64, width)).to(dtype)
    if dtype == torch.bfloat16:
        assert torch.equal(product(rows, weight, None)[:8], product(rows[:8], weight, None))
    monkeypatch.setattr(functional, "linear", product)
    assert row_tiles.agreeing_linear_sizes(weight, None, 8) == (8, 16, 32)


def test_a_packed_product_that_depends_on_the_row_count_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true = PackedLinear.product
    layer = PackedLinear(torch.randn((48, 64)), None)
    assert row_tiles.agreeing_packed_sizes(layer, 8)

    def product(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        return true(layer, rows) * (1.0 if len(rows) < 32 else 1.0000001)

    monkeypatch.setattr(PackedLinear, "product", product)
    assert set(row_tiles.agreeing_packed_sizes(layer, 8)) <= {8, 16}


def _packed(recorder: schedules.Recorder) -> int:
    return sum(isinstance(part, PackedLinear) for part in recorder.target._model.modules())


def test_packed_weights_have_the_same_bits_under_every_schedule(tiny: Path, small: None) -> None:
    recorder, rng = schedules.Recorder(tiny), random.Random(5)
    # Which base holds, and whether with packed weights, is for this processor to say.
    assert recorder.target.mode.startswith("canonical (row tiles of ")
    assert _packed(recorder) == (15 if recorder.target.mode.endswith(", packed weights") else 0)
    for length in (5, 130):
        schedules.check_random_schedule(rng, recorder, length)


def test_where_packed_products_do_not_hold_canonical_mode_keeps_the_bits_of_plain_ones(
    tiny: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: set[int] = set()

    def fails(_layer: PackedLinear, base: int) -> tuple[int, ...]:
        tried.add(base)
        return ()

    text = [(7 * index) % 320 for index in range(40)]
    plain = schedules.Recorder(tiny, packed=False)
    expected = plain.reference(text, 20)
    monkeypatch.setattr(canonical_mode, "agreeing_packed_sizes", fails)
    recorder = schedules.Recorder(tiny)
    # Which of the larger tiles are tried hangs on the machine: where attention does not hold, none.
    assert min(tried) == max(2, linear_layers.quick_rows())
    assert 8 in tried
    assert tried <= set(row_tiles.SIZES)
    assert _packed(recorder) == 0
    assert recorder.target.mode == plain.target.mode
    assert torch.equal(recorder.reference(text, 20), expected)


class Unshared:
    """``TargetModel`` that takes nothing from another session's blocks: what a request says is
    cached and this session has not computed itself is computed in front of it."""

    def __init__(self, target: TorchTarget) -> None:
        self._target, self.info, self.cache = target, target.info, target.cache
        self._texts: dict[str, tuple[int, ...]] = {}
        self._nodes: dict[str, tuple[int, ...]] = {}
        self._computed: dict[str, int] = {}

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._texts[key], self._computed[key] = tuple(text), 0
        self._target.open(key, prompt_length, sampling)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        return self._target.forward([self._whole(request) for request in batch])

    def _whole(self, request: PassRequest) -> PassRequest:
        key, cached = request.key, min(self._computed[request.key], request.cache_length)
        self._texts[key] = (*self._texts[key][: request.cache_length], *request.feed)
        self._nodes[key], self._computed[key] = request.tokens, len(self._texts[key])
        feed = self._texts[key][cached:]
        return replace(request, cache_length=cached, feed=feed, blocks=())

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._texts[key] += tuple(self._nodes[key][node] for node in nodes)
        self._computed[key] += len(nodes)
        self._target.keep(key, nodes)

    def close(self, key: str) -> None:
        self._target.close(key)


def test_shared_and_private_prefixes_give_the_same_bits(tmp_path: Path) -> None:
    """In random passes with prefix hits, evictions and kept nodes, of all kinds of sampling."""
    folder = write_checkpoint(tmp_path)
    shared, private = schedules.Recorder(folder), schedules.Recorder(folder)

    def same_bits() -> None:
        assert torch.equal(shared.logits, private.logits)

    targets = shared.target, Unshared(private.target)
    serving = schedules.Serving(*targets, same_bits, seed=3, samplings=schedules.SAMPLINGS)
    serving.run(500)
    assert serving.hits > 3


FORCED = [
    {},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    {"MKL_CBWR": "AUTO,STRICT"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums of 24 to 4096 terms, and a vocabulary of an odd size."""
    config = tiny_config(
        "qwen2",
        hidden_size=512,
        intermediate_size=4096,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        num_hidden_layers=1,
        vocab_size=331,
        max_position_embeddings=512,
    )
    return write_checkpoint(tmp_path_factory.mktemp("wide"), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "forced", FORCED, ids=lambda f: ",".join(f"{k}={f[k]}" for k in f) or "as is"
)
def test_canonical_mode_holds_under_every_forced_instruction_set(
    wide: Path, forced: dict[str, str]
) -> None:
    models = f"{wide}:float32", f"{wide}:bfloat16"
    done = python("-m", "tests.shell.torch_schedules", *models, env=forced)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("canonical (row tiles of ") == 2, done.stdout
    if (
        "MKL_CBWR" in forced and torch.backends.mkl.is_available()
    ):  # the library's promise: every row count agrees; packed weights it never sees
        sizes = r"(8 to 128\)|\d+( to \d+)?\), packed)"
        assert re.search(rf"float32 canonical \(row tiles of {sizes}", done.stdout)
