"""The exporter and the ONNX drafter. Oracles: transformers' own logits for the same checkpoint
(float32 graphs), the float32 graph of the dequantised weights (quantised graphs).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.manifest import DraftModelError, read_manifest
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.checkpoint import CheckpointError
from edgespec.device.export.export import export_draft
from edgespec.models.folders import model_info, token_count
from tests.shell.tiny_checkpoints import (
    CONTEXT_LENGTH,
    VOCABULARY_SIZE,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)

TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, VOCABULARY_SIZE, 80)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "llama": tiny_config(),
    "llama-untied": tiny_config(tie_word_embeddings=False),
    "llama-biased": tiny_config(attention_bias=True),
    "llama-one-layer": tiny_config(num_hidden_layers=1),
    "llama3-rope": tiny_config(rope_parameters=LLAMA3),
    "linear-rope": tiny_config(
        rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    ),
    "yarn-rope": tiny_config(rope_parameters=YARN),
    "yarn-mscale": tiny_config(rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}),
    "gelu": tiny_config(hidden_act="gelu"),
    "gelu-tanh": tiny_config(hidden_act="gelu_pytorch_tanh"),
    "heads-of-8": tiny_config(head_dim=8),
    "heads-of-24": tiny_config(head_dim=24, attention_bias=True),
    "odd-widths": tiny_config(hidden_size=172, intermediate_size=100),
    "qwen3-heads-of-8": tiny_config("qwen3", head_dim=8),
    "mistral": tiny_config("mistral", sliding_window=None),
    "mistral-window": tiny_config("mistral", sliding_window=20),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3", head_dim=32),
}


def export(source: Path, bits: int, **options: Any) -> Path:
    target = source.parent / f"{source.name}-{bits}-{'-'.join(map(str, options.values()))}"
    export_draft(source, target, model_info(source), bits=bits, **options)
    return target


def draft_logits(folder: Path, splits: tuple[int, ...] = (30, 31, 32, 80)) -> NDArray[np.float32]:
    """Logits after the first ``splits[i]`` tokens, one feed for each, [len(splits), V]."""
    drafter = OnnxDrafter(folder)
    drafter.begin(len(TOKENS), SamplingParams())
    rows, done = [], 0
    for end in splits:
        drafter.step(done, TOKENS[done:end], 1)
        rows.append(drafter.logits.copy())
        done = end
    drafter.close()
    return np.stack(rows)


def test_bfloat16_shards_are_read(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = {
        name: (value.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        for name, value in tiny_tensors(config).items()
    }
    whole = write_checkpoint(tmp_path / "whole", config, tensors)
    shards = write_checkpoint(tmp_path / "shards", config, tensors, bfloat16=True, shards=3)
    np.testing.assert_array_equal(draft_logits(export(whole, 32)), draft_logits(export(shards, 32)))


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    for bits in (4, 32):
        first, again = tmp_path / "first", tmp_path / "again"
        for folder in (first, again):
            export_draft(source, folder, model_info(source), bits=bits)
        names = sorted(path.name for path in first.iterdir())
        assert names == [
            "config.json",
            "edgespec.json",
            "model.onnx",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        for name in names:
            assert (first / name).read_bytes() == (again / name).read_bytes(), name


def test_the_manifest_tells_the_model(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    folder = export(source, 4, context_length=64)
    manifest = read_manifest(folder)
    assert manifest.model.context_length == 64
    assert manifest.model.vocabulary == model_info(source).vocabulary
    assert manifest.model.eos_token_ids == (0,)
    assert (manifest.bits, manifest.layers, manifest.kv_heads, manifest.head_dim) == (4, 2, 2, 16)
    assert manifest.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert model_info(folder) == manifest.model
    assert str(tmp_path) not in (folder / "edgespec.json").read_text()


def test_ids_that_pad_the_vocabulary_are_never_proposed(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    known = token_count(source)
    assert known <= VOCABULARY_SIZE
    tensors = tiny_tensors(tiny_config(tie_word_embeddings=False))
    padded = VOCABULARY_SIZE + 24
    config = tiny_config(vocab_size=padded, tie_word_embeddings=False)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.pad(tensors[name], ((0, 24), (0, 0)))
    tensors["lm_head.weight"][VOCABULARY_SIZE:] = tensors["lm_head.weight"][5] * 9.0  # likeliest
    source = write_checkpoint(tmp_path / "padded", config, tensors)
    folder = tmp_path / "draft"
    export_draft(source, folder, model_info(source), bits=4, token_count=known)
    for sampling in (SamplingParams(), SamplingParams(temperature=1.5, repetition_penalty=1.3)):
        drafter = OnnxDrafter(folder)
        assert drafter.info.vocabulary_size == padded
        drafter.begin(10, sampling)
        for position in range(40):  # also behind a padding id that the target has chosen
            feed = TOKENS[:10] if position == 0 else [padded - 1]
            keep = 0 if position == 0 else 9 + position
            guesses = drafter.step(keep, feed, 8)
            assert len(guesses) == 8
            assert all(guess.token < known for guess in guesses)
        drafter.close()


def test_large_weights_go_to_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_checkpoint(tmp_path / "source")
    single = draft_logits(export(source, 4))
    monkeypatch.setattr("edgespec.device.export.export.MAX_SINGLE_FILE_BYTES", 1000)
    folder, size = tmp_path / "split", 0
    for _ in range(2):  # the second export replaces the first
        export_draft(source, folder, model_info(source), bits=4)
        size = (folder / "model.onnx.data").stat().st_size
        assert size > (folder / "model.onnx").stat().st_size  # small tensors stay inside
        np.testing.assert_array_equal(draft_logits(folder), single)
    assert OnnxDrafter(folder).memory_bytes() > size


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ({"head_dim": 15}, "head size 15 is odd"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' needs factor, which is None"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "rope_type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    config = tiny_config() | changes
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        export_draft(source, tmp_path / "out", model_info(source))
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    info, out = model_info(source), tmp_path / "out"
    tensors = tiny_tensors(tiny_config())
    missing = {k: v for k, v in tensors.items() if k != "model.norm.weight"}
    write_checkpoint(source, tensors=missing)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in no"):
        export_draft(source, out, info)
    write_checkpoint(source, tensors=tensors | {"model.norm.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"shape \(3,\), not \(64,\)"):
        export_draft(source, out, info)
    (source / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable"):
        export_draft(source, out, info)
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        export_draft(source, out, info)


def test_export_limits_are_named(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    info = model_info(source)
    with pytest.raises(ValueError, match="bits is 16"):
        export_draft(source, tmp_path / "out", info, bits=16)
    with pytest.raises(ValueError, match=f"context_length is 257.*{CONTEXT_LENGTH}"):
        export_draft(source, tmp_path / "out", info, context_length=257)


@pytest.fixture(scope="module")
def good_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(write_checkpoint(tmp_path_factory.mktemp("good") / "source"), 4)


@pytest.fixture
def draft(good_draft: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    folder = tmp_path / "draft"
    folder.mkdir()
    for path in good_draft.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("name", ["model.onnx", "edgespec.json"])
def test_a_missing_or_corrupt_file_is_named(draft: Path, name: str) -> None:
    for content in (b"", b"\x00nonsense", (draft / name).read_bytes()[:200]):
        (draft / name).write_bytes(content)
        with pytest.raises(DraftModelError, match=name):
            OnnxDrafter(draft)
    (draft / name).unlink()
    with pytest.raises(DraftModelError, match=f"{name}: no such file"):
        OnnxDrafter(draft)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("layers", 3, "of 3 layers: inputs missing"),
        ("layers", 1, "of 1 layers: inputs missing"),
        ("layers", 0, "layers is 0"),
        ("kv_heads", 1, "keys have 2 heads of 16, but the manifest says 1"),
        ("head_dim", "x", "head_dim is 'x'"),
        ("format", 2, "format must be 1"),
        ("surprise", 2, "surprise"),
    ],
)
def test_a_manifest_that_does_not_fit_the_graph_is_refused(
    draft: Path, field: str, value: object, message: str
) -> None:
    data = json.loads((draft / "edgespec.json").read_text())
    (draft / "edgespec.json").write_text(json.dumps(data | {field: value}))
    with pytest.raises(DraftModelError, match=message):
        OnnxDrafter(draft)


def test_another_vocabulary_size_is_refused(draft: Path) -> None:
    data = json.loads((draft / "edgespec.json").read_text())
    data["model"]["vocabulary_size"] = 300
    (draft / "edgespec.json").write_text(json.dumps(data))
    with pytest.raises(DraftModelError, match="300 ids"):
        OnnxDrafter(draft)


def test_options_out_of_bounds_are_refused(good_draft: Path) -> None:
    with pytest.raises(ValueError, match="threads is 65"):
        OnnxDrafter(good_draft, threads=65)
    with pytest.raises(ValueError, match=f"context_length is 300.*{CONTEXT_LENGTH}"):
        OnnxDrafter(good_draft, context_length=300)
    with pytest.raises(DraftModelError, match="NoSuchProvider"):
        OnnxDrafter(good_draft, providers=["NoSuchProvider"])


def test_memory_grows_with_what_is_cached_and_a_shorter_context_bounds_it(
    good_draft: Path,
) -> None:
    drafter = OnnxDrafter(good_draft, context_length=50)
    empty = drafter.memory_bytes()
    drafter.begin(50, SamplingParams())
    drafter.step(0, TOKENS[:50], 1)
    per_token = read_manifest(good_draft).kv_bytes_per_token
    assert drafter.memory_bytes() - empty == 50 * per_token
    assert drafter.memory_bytes(0) == empty
    assert drafter.memory_bytes(50) == drafter.memory_bytes()
    assert drafter.info.context_length == 50
    with pytest.raises(ValueError, match="context length of 50"):
        drafter.step(50, [1], 1)


def test_a_closed_drafter_refuses_to_step(good_draft: Path) -> None:
    drafter = OnnxDrafter(good_draft)
    drafter.begin(2, SamplingParams())
    drafter.close()
    drafter.close()
    with pytest.raises(ValueError, match="closed"):
        drafter.step(0, [1], 1)
