"""Tests that numbers in a model folder's files are checked when they are read, whatever the files
hold.

Oracle: the error names the file, the key and the value. If a folder is accepted, transformers
computes the same logits from it.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from edgespec.config import AgentConfig, DraftSection
from edgespec.config.verifier import VerifierConfig
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import load_drafter
from edgespec.device.drafters.manifest import read_manifest
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.checkpoint import read_shape
from edgespec.device.export.export import export_draft, export_to_cache
from edgespec.device.model_drafter import list_variants, read_exported_variant
from edgespec.models.folders import DRAFT_MODEL_TYPES, ModelFolderError, model_info
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.verifier.build import load_target
from tests.kit.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint

BAD: list[object] = [0, -1, "x", "64", 1.5, 64.0, True, [], {}, [1], 10**30]
SIZES = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
]
ROPE = "rope_parameters"
LAYER_TYPES: list[Any] = ["full_attention", ["full_attention"], [1, 2], {}]
OTHERS: list[tuple[str, Any]] = [
    *(("rms_norm_eps", bad) for bad in ("x", -1.0, [1], True, float("inf"), float("nan"))),
    *(("tie_word_embeddings", bad) for bad in ("false", 1)),
    *(("attention_bias", bad) for bad in ("no", 0)),
    *(("layer_types", bad) for bad in LAYER_TYPES),
    *((ROPE, bad) for bad in ("x", [1], 7)),
    *(("rope_scaling", bad) for bad in ("x", [1])),
    ("num_key_value_heads", 3),
    ("hidden_act", ["silu"]),
]
ROPES: list[Any] = [
    *({"rope_theta": bad} for bad in ("x", 0, -1.0, True, [1])),
    *({"rope_type": "linear", "factor": bad} for bad in ("x", 0, -1, [1])),
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("numbers") / "source")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load_as_draft(folder: Path) -> None:
    present = load_drafter(AgentConfig(draft=DraftSection(str(folder))))
    assert present is not None
    present.close()


def plan_variants(folder: Path) -> None:
    list_variants(DraftSection(str(folder)), resolve_source(str(folder), Purpose.DRAFT))


def load_as_target(folder: Path) -> None:
    load_target(VerifierConfig(model=str(folder)))


READERS: list[Callable[[Path], object]] = [load_as_draft, plan_variants, load_as_target]


@pytest.mark.parametrize("reader", READERS)
def test_a_number_of_config_json_is_named(reader: Any, source: Path, cache: Path) -> None:
    path = source / "config.json"
    before = path.read_text()
    rest = (("vocab_size", None), ("hidden_size", None), ("num_attention_heads", None))
    cases = [*itertools.product(SIZES, BAD), *(rest if reader is load_as_draft else ())]
    cases += [*OTHERS, *((ROPE, bad) for bad in ROPES)] if reader is load_as_draft else []
    try:
        for name, value in cases:
            config = tiny_config() | {name: value}
            path.write_text(json.dumps(config))
            key, shown = name, value
            if isinstance(value, dict) and value and name == ROPE:
                key, shown = [*value.items()][-1]
            with pytest.raises(ValueError) as refused:  # noqa: PT011 # the message is looked at
                reader(source)
            said = str(refused.value)
            assert str(path) in said, (name, value)
            assert key in said, (name, value)
            assert repr(shown) in said or str(shown) in said, (name, value)
    finally:
        path.write_text(before)


@pytest.mark.parametrize("kind", DRAFT_MODEL_TYPES)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind: str, tmp_path: Path) -> None:
    sparse = {
        "model_type": kind,
        "vocab_size": 320,
        "hidden_size": 256,
        "intermediate_size": 64,
        "num_hidden_layers": 12,
        "num_attention_heads": 32,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    shape, known = read_shape(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert shape.tied == known.tie_word_embeddings
    assert shape.kv_heads == (known.num_key_value_heads or known.num_attention_heads)
    assert shape.norm_epsilon == known.rms_norm_eps
    if kind in ("mistral", "phi3", "gemma2", "gemma3_text"):
        assert shape.window == (known.sliding_window or 0)


def logits_of(folder: Path, tokens: list[int]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].numpy()


TOKENS = [5, 60, 7, 200, 9]


@pytest.mark.parametrize(
    ("changes", "add"),
    [
        ({"tie_word_embeddings": True}, ["lm_head.weight"]),
        ({"tie_word_embeddings": True}, []),
        ({"tie_word_embeddings": False}, []),
        ({"attention_bias": True}, []),
        ({"attention_bias": False}, ["model.layers.0.self_attn.q_proj.bias"]),
    ],
)
def test_a_draft_has_the_head_and_the_biases_that_transformers_has(
    changes: dict[str, Any], add: list[str], tmp_path: Path
) -> None:
    config = tiny_config(**changes)
    tensors, more = tiny_tensors(config), np.random.default_rng(5)
    shapes = {"lm_head.weight": (320, 64), "model.layers.0.self_attn.q_proj.bias": (64,)}
    tensors |= {name: more.normal(size=shapes[name]).astype(np.float32) for name in add}
    source = write_checkpoint(tmp_path / "source", config, tensors)
    export_draft(source, tmp_path / "draft", bits=32)
    drafter = OnnxDrafter(tmp_path / "draft")
    try:
        drafter.begin(1, SamplingParams())
        drafter.step(0, TOKENS, 1)
        expected = logits_of(source, TOKENS)
        np.testing.assert_allclose(drafter.logits[:300], expected[:300], atol=2e-3)
    finally:
        drafter.close()


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"tie_word_embeddings": False}, "lm_head.weight"),
        ({"attention_bias": True}, "model.layers.1.self_attn.k_proj.bias"),
        ({"model_type": "qwen2"}, "model.layers.0.self_attn.v_proj.bias"),
    ],
)
def test_a_missing_tensor_is_named_by_both_ends(
    changes: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    config = tiny_config(**changes)
    tensors = tiny_tensors(config)
    del tensors[missing]
    source = write_checkpoint(tmp_path / "source", config, tensors)
    with pytest.raises(ModelFolderError, match=missing):
        export_draft(source, tmp_path / "draft")
    with pytest.raises(ValueError, match=missing):
        load_as_target(source)


# --- the manifest of an export --------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft(source: Path) -> Path:
    export_draft(source, source.parent / "draft")
    return source.parent / "draft"


MANIFEST = ["bits", "table_bits", "block_size", "layers", "kv_heads", "head_dim"]
OPTIONAL = ["token_count", "trained_length", "kv_type", "source", "file_bytes"]
MODEL = ["vocabulary_size", "context_length", "eos_token_ids", "name", "vocabulary"]


@pytest.mark.parametrize("reader", [OnnxDrafter, read_exported_variant, model_info, read_manifest])
def test_a_value_of_a_manifest_is_named(reader: Any, draft: Path) -> None:
    path = draft / "edgespec.json"
    before = path.read_text()
    data = json.loads(before)
    fine: dict[str, list[object]] = {
        "token_count": [0],
        "trained_length": [0],
        "eos_token_ids": [[], [1]],
    }
    fine |= {"name": ["x", "64"], "vocabulary": ["x", "64"], "source": ["x", "64"]}
    fine |= {"file_bytes": [{}]}
    try:
        for name, value in itertools.product([*MANIFEST, *OPTIONAL, *MODEL], [*BAD, None]):
            if value in fine.get(name, []) or (name in OPTIONAL and value is None):
                continue
            if reader is model_info and name not in MODEL:
                continue
            changed = json.loads(before)
            (changed["model"] if name in MODEL else changed)[name] = value
            path.write_text(json.dumps(changed))
            if reader is model_info and name == "eos_token_ids" and value in (0, None, {}):
                continue
            with pytest.raises(ValueError) as refused:  # noqa: PT011 # the message is looked at
                reader(draft)
            said = str(refused.value)
            assert name in said, (name, value)
            assert str(path) in said or "model.onnx" in said, (name, value)
        broken: object
        for broken in ([], "x", None):
            path.write_text(json.dumps(data | {"model": broken}))
            with pytest.raises(ValueError, match=r"edgespec\.json: "):
                reader(draft)
    finally:
        path.write_text(before)


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json", "edgespec.json"])
@pytest.mark.parametrize("left", [0, 0.5, None])
def test_a_cached_export_that_was_cut_is_made_again(
    name: str, left: float | None, source: Path, cache: Path
) -> None:
    said: list[str] = []
    folder = export_to_cache(source, 4, said.append)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = folder / name
    if left is None:
        path.unlink()
    else:
        path.write_bytes(whole[name][: int(left * len(whole[name]))])
    said.clear()
    assert export_to_cache(source, 4, said.append) == folder
    assert str(path) in said[0]
    assert "made again" in said[0]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    said.clear()
    assert export_to_cache(source, 4, said.append) == folder
    assert not said


def test_a_draft_folder_that_was_cut_says_what_to_do(draft: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(draft, tmp_path / "copy"))
    path = folder / "model.onnx"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    message = rf"model\.onnx: has {size - 1} bytes, but was written with {size}; export or copy"
    with pytest.raises(ValueError, match=message):
        OnnxDrafter(folder)
