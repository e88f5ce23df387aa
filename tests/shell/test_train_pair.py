"""The tools that train the bundled pair: what prompts are cut from, and a damaged draft."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("onnx")

import numpy as np
from safetensors.numpy import load_file

from edgespec.bench.prompts import read_prompts
from edgespec.models.folders import BUNDLED_FOLDER, check_checkpoint
from tools.train_pair import beginnings
from tools.train_pair.bundle import cripple
from tools.train_pair.corpus import Document


def test_beginnings_are_prompts_of_training_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"Page {n} says what there is to say of {n}.\n" * 30 for n in range(100)]
    found = [Document("pages", text) for text in texts]
    monkeypatch.setattr(beginnings, "documents", lambda: found)
    out = tmp_path / "prompts.jsonl"
    monkeypatch.setattr(sys, "argv", ["beginnings", str(out), "--count", "40"])
    beginnings.main()
    prompts = [prompt.text for prompt in read_prompts(out)]
    pages = {one.split("Page ")[1].split()[0] for one in prompts}
    held_out = {str(n) for n, one in enumerate(found) if one.held_out}
    assert len(prompts) == 40
    assert held_out
    assert len(pages) > 5
    assert not pages & held_out


def test_a_crippled_draft_is_the_bundled_one_with_so_much_noise(tmp_path: Path) -> None:
    bundled = load_file(BUNDLED_FOLDER / "draft" / "model.safetensors")
    for noise in (0.0, 0.5):
        out = tmp_path / str(noise)
        cripple(BUNDLED_FOLDER, out, noise, seed=1)
        check_checkpoint(out)
        for name, weight in load_file(out / "model.safetensors").items():
            share = float((weight - bundled[name]).std() / bundled[name].std())
            wanted = noise if weight.ndim == 2 else 0.0
            assert np.isclose(share, wanted, rtol=0.02), name
