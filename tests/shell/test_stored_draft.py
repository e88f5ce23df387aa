"""The weights that ``benchmarks/llama_cpp_peer.py`` gives to llama.cpp are those of our draft.

Oracle: Q4_0 read by its definition, one entry at a time, against what our own layout means.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from edgespec.drafters.quantize import QuantizedMatrix, dequantize_matrix, quantize_matrix
from tests.sources import ROOT


def test_blocks_of_q4_0_mean_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    q4_0_blocks = importlib.import_module("stored_draft").q4_0_blocks
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (5, 3, 16), dtype=np.uint8)
    scales = rng.normal(size=(5, 3)).astype(np.float16).astype(np.float32)
    matrix = QuantizedMatrix(packed, scales, 4, 96)
    expected = dequantize_matrix(matrix)
    blocks = q4_0_blocks(matrix).reshape(5, 3, 18)
    for row in range(5):
        for column in range(96):
            block, entry = blocks[row, column // 32], column % 32
            byte = int(block[2 + entry % 16])
            integer = byte & 0x0F if entry < 16 else byte >> 4
            scale = np.float32(block[:2].view(np.float16)[0])
            assert np.float32(integer - 8) * scale == expected[row, column]


def test_scales_that_float16_rounds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    q4_0_blocks = importlib.import_module("stored_draft").q4_0_blocks
    weight = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    with pytest.raises(ValueError, match="float16"):
        q4_0_blocks(quantize_matrix(weight, 4))
