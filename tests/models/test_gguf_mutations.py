"""Tests of mutated GGUF files. Oracle: a file is read, or refused by an error that names it; no
other error, no large allocation, and no half-written folder."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.models.gguf_mutations import judge, limited_memory, mutate, write_models

pytest.importorskip("gguf")


def test_the_models_that_are_mutated_are_read(tmp_path: Path) -> None:
    for path in write_models(tmp_path):
        assert judge(path.read_bytes(), tmp_path) == ("read", ""), path.name


def test_a_mutated_file_is_read_or_refused_by_name(tmp_path: Path) -> None:
    """``benchmarks/fuzz_gguf.py`` runs thousands."""
    models = [path.read_bytes() for path in write_models(tmp_path)]
    kinds = Counter[str]()
    with limited_memory():
        for number in range(150):
            dice = random.Random(f"test {number}")
            kind, why = judge(mutate(dice.choice(models), dice), tmp_path)
            assert kind != "finding", f"case {number}: {why}"
            kinds[kind] += 1
    assert min(kinds["read"], kinds["refused"]) >= 15
