"""Row tiles: which row counts give the same bits, and products that keep to them.

Oracles: products that are made to depend on the row count, on a row's place, or on the order of
their sum must be found out; and under every instruction set that can be forced on this machine,
random schedules of a model with sums of up to 4096 terms agree to the bit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.nn import functional

from edgespec.verifier.targets.row_tiles import (
    SIZES,
    agreeing_linear_sizes,
    agreeing_sizes,
    cut,
)
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint
from tests.sources import ROOT

PROBES = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25], [-2.0, 7.0]])


@pytest.mark.parametrize("base", [1, 2, 4, 8, 16, 32])
def test_pieces_cover_the_rows_and_are_all_on_the_list(base: int) -> None:
    sizes = SIZES[base]
    for count in range(1, 400):
        pieces = cut(count, sizes)
        assert set(pieces) <= set(sizes)
        assert sum(pieces[:-1]) < count <= sum(pieces)
        assert list(pieces) == sorted(pieces, reverse=True)


def test_a_product_that_depends_on_the_place_is_found_out() -> None:
    def product(rows: torch.Tensor) -> torch.Tensor:
        out = rows.clone()
        if len(rows) in (8, 64):
            out[5] *= 1.0000001
        return out

    assert agreeing_sizes(product, PROBES, 8) == ()
    assert agreeing_sizes(product, PROBES, 16) == (16, 32, 48, 128)


def test_what_is_no_number_does_not_agree() -> None:
    assert agreeing_sizes(lambda rows: rows * torch.nan, PROBES, 8) == ()


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
    assert agreeing_linear_sizes(weight, None, 8) == (8, 16, 32)


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
    ours = ("MKL_", "ATEN_CPU_", "ONEDNN_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, "-m", "tests.shell.random_schedules", str(wide)]
    done = subprocess.run(
        [*command, "float32", "bfloat16"],
        cwd=ROOT,
        env=plain | forced,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("canonical (row tiles of ") == 2, done.stdout
    if (
        "MKL_CBWR" in forced and torch.backends.mkl.is_available()
    ):  # the library's promise: every row count agrees; packed weights it never sees
        sizes = r"(8 to 128\)|\d+( to \d+)?\), packed)"
        assert re.search(rf"float32 canonical \(row tiles of {sizes}", done.stdout)
