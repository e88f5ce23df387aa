"""The tool that trains the bundled pair: what the target writes, from where, and how it is kept.

Oracle: transformers' own forward pass over the whole text.
"""

from __future__ import annotations

from itertools import repeat
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from edgespec.models.folders import BUNDLED_FOLDER
from tools.train_pair.bundle import unpack
from tools.train_pair.writing import END_ID, Texts, write

LENGTH = 90
BEGINNING = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


@pytest.fixture(scope="module")
def texts(tiny: LlamaForCausalLM) -> Texts:
    heat = torch.tensor([0.0, 0.0, 1.0])
    return write(tiny, repeat(BEGINNING), heat, LENGTH, 1)


def test_what_is_written_is_the_targets_and_the_rest_is_given(
    tiny: LlamaForCausalLM, texts: Texts
) -> None:
    with torch.inference_mode():
        logits = tiny(texts.tokens[:, :-1].long(), use_cache=False).logits
    written = texts.written[:, 1:]
    assert torch.equal(logits.argmax(-1)[:2][written[:2]], texts.tokens[:2, 1:].long()[written[:2]])
    assert (logits.argmax(-1)[2] != texts.tokens[2, 1:])[written[2]].any()
    for tokens, own in zip(texts.tokens.tolist(), texts.written.tolist(), strict=True):
        assert tokens[: len(BEGINNING)] == BEGINNING
        given = [token for token, mine in zip(tokens, own, strict=True) if not mine]
        chats = [t for t in given if t != END_ID]
        assert chats == (BEGINNING * LENGTH)[: len(chats)]
        assert len(given) < len(tokens)
        starts = [at for at in range(1, len(own)) if own[at - 1] and not own[at]]
        assert all(tokens[at] == END_ID or tokens[at - 1] == END_ID for at in starts)


def test_the_bundled_pair_is_unpacked_bit_for_bit_and_never_over_a_draft(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    unpack(BUNDLED_FOLDER, folder)
    for role in ("target", "draft"):
        bundled = (BUNDLED_FOLDER / role / "model.safetensors").read_bytes()
        assert (folder / role / "model.safetensors").read_bytes() == bundled
    assert (folder / "tokenizer" / "tokenizer_config.json").is_file()
    with pytest.raises(FileExistsError, match="distill on, or remove it"):
        unpack(BUNDLED_FOLDER, folder)
