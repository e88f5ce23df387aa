"""Tests of exports, our own and Optimum's in a separate process. Oracles: transformers' logits for
the same checkpoint; our own draft for a graph with Optimum's signature; the process table.

Optimum is replaced by a stand-in that writes a graph with its signature. The real one is tested if
``OPTIMUM_PYTHON`` names an interpreter that has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from numpy.typing import NDArray

from edgespec.core.device.memory import KvType
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.manifest import DraftModelError, read_manifest
from edgespec.device.drafters.onnx_drafter import ForeignDrafter, OnnxDrafter
from edgespec.device.export.checkpoint import read_shape
from edgespec.device.export.export import WORK_PREFIX, export_draft, export_to_cache, work_folder
from edgespec.device.model_drafter import load_foreign_drafter
from edgespec.models import file_digests
from edgespec.models.folders import ModelFolderError, token_count
from edgespec.models.model_source import Purpose, resolve_source
from tests.device.foreign_graphs import concatenating_graph
from tests.kit.live_verifier import run_command, start
from tests.kit.tiny_checkpoints import (
    VOCABULARY_SIZE,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
    write_tokenizer,
)
from tests.models.test_grammar import is_running, wait_until

TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, VOCABULARY_SIZE, 80)]
EXPORTS = yaml.safe_load(Path(__file__).with_name("exports.yaml").read_text(encoding="utf-8"))
VARIANTS = {name: tiny_config(**changes) for name, changes in EXPORTS["written"].items()}
FAMILIES: dict[str, dict[str, Any]] = EXPORTS["made"]


def export(source: Path, bits: int, **options: Any) -> Path:
    target = source.parent / f"{source.name}-{bits}-{'-'.join(map(str, options.values()))}"
    export_draft(source, target, bits=bits, **options)
    return target


def draft_logits(folder: Path, splits: tuple[int, ...] = (30, 31, 32, 80)) -> NDArray[np.float32]:
    """Return logits after the first ``splits[i]`` tokens, one feed for each, [len(splits), V]."""
    drafter = OnnxDrafter(folder)
    drafter.begin(len(TOKENS), SamplingParams())
    rows, done = [], 0
    for end in splits:
        drafter.step(done, TOKENS[done:end], 1)
        rows.append(drafter.logits.copy())
        done = end
    drafter.close()
    return np.stack(rows)


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"]
SIZES += ["num_key_value_heads", "max_position_embeddings", "num_hidden_layers"]
SMALL = {name: tiny_config(num_hidden_layers=4)[name] for name in SIZES}


def family_checkpoint(folder: Path, changes: dict[str, Any]) -> None:
    """Write a checkpoint with random weights so large that every part affects the logits."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    rope = tiny_config()["rope_parameters"]
    values = {**SMALL, **tokens, "rope_parameters": rope, **changes}
    config = transformers.AutoConfig.for_model(**values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.15)
            if "norm" in name and "gemma" not in values["model_type"]:
                weight.add_(1.0)
            if "embed_tokens" in name or "lm_head" in name:
                weight.mul_(3.0)
    model.save_pretrained(folder)
    write_tokenizer(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")

    def make(name: str) -> Path:
        if name in FAMILIES:
            family_checkpoint(root / name, FAMILIES[name])
            return root / name
        return write_checkpoint(root / name, VARIANTS[name])

    return make


@pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES])
def test_a_graph_is_the_model(name: str, checkpoints: Callable[[str], Path]) -> None:
    """The logits must be the model's in one feed, in several and behind rollbacks; rounded weights
    may change them a little."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    source = checkpoints(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    deviation = float(expected.std())
    assert deviation > 0.5  # smaller weights would let anything pass
    half: dict[str, Any] = {"kv_type": KvType.FLOAT16}
    for bits, bound, options in ((32, 1e-4, {}), (8, 0.15, {}), (4, 0.9, {}), (32, 0.01, half)):
        got = draft_logits(export(source, bits, **options))
        difference = np.sqrt(np.mean((got - expected[[29, 30, 31, 79]]) ** 2)) / deviation
        assert difference < bound, bits


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    for bits in (4, 32):
        first, again = tmp_path / "first", tmp_path / "again"
        for folder in (first, again):
            export_draft(source, folder, bits=bits)
        names = sorted(path.name for path in first.iterdir())
        texts = ["tokenizer.json", "tokenizer_config.json"]
        assert names == ["config.json", "edgespec.json", "model.onnx", *texts]
        for name in names:
            assert (first / name).read_bytes() == (again / name).read_bytes(), name


def test_ids_that_pad_the_vocabulary_are_never_proposed(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    known = token_count(source)
    assert known <= VOCABULARY_SIZE
    tensors = tiny_tensors(tiny_config(tie_word_embeddings=False))
    padded = VOCABULARY_SIZE + 24
    config = tiny_config(vocab_size=padded, tie_word_embeddings=False)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.pad(tensors[name], ((0, 24), (0, 0)))
    # the padding ids get the highest logits
    tensors["lm_head.weight"][VOCABULARY_SIZE:] = tensors["lm_head.weight"][5] * 9.0
    source = write_checkpoint(tmp_path / "padded", config, tensors)
    folder = tmp_path / "draft"
    export_draft(source, folder, bits=4)
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


def test_an_export_on_the_fly_is_kept_under_a_key_of_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, said = write_checkpoint(tmp_path / "source"), list[str]()
    first = export_to_cache(source, 4, said.append)
    assert export_to_cache(source, 4, said.append) == first
    assert export_to_cache(source, 8, said.append) != first
    half = export_to_cache(source, 4, said.append, KvType.FLOAT16)
    assert read_manifest(half).kv_type == "float16"
    lines = [line for line in said if line.startswith("exporting")]
    losses = [line for line in said if line.startswith("rounding changed the weights by")]
    assert (len(lines), len(losses), len(said)) == (3, 3, 6)
    (source / "generation_config.json").write_text("{}")
    second = export_to_cache(source, 4, said.append)
    weights = source / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    third = export_to_cache(source, 4, said.append)
    assert len({first, half, second, third}) == 4
    assert not list(first.parent.glob(f"{WORK_PREFIX}*"))


def test_large_weights_are_read_once_while_they_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the digest of the content."""
    monkeypatch.setattr(file_digests, "_KEPT_FROM_BYTES", 1)
    read, usual = list[Path](), file_digests._read_digest

    def count(path: Path) -> bytes:
        read.append(path)
        return usual(path)

    monkeypatch.setattr(file_digests, "_read_digest", count)
    (path := tmp_path / "weights").write_bytes(b"first")
    expected = [hashlib.blake2b(one, digest_size=32).digest() for one in (b"first", b"other")]
    clock = [path.stat().st_mtime]
    monkeypatch.setattr(time, "time", lambda: clock[0])

    def digest() -> bytes:
        return file_digests.compute_file_digest(path, tmp_path / "cache")

    assert [digest(), digest()] == [expected[0]] * 2
    assert len(read) == 2, "it was written just now"
    clock[0] += 3600.0
    assert [digest(), digest(), digest()] == [expected[0]] * 3
    assert len(read) == 3
    path.write_bytes(b"other")
    os.utime(path, (clock[0] - 1800.0, clock[0] - 1800.0))
    assert [digest(), digest()] == [expected[1]] * 2
    for kept in (tmp_path / "cache" / "digests").iterdir():
        kept.write_bytes(b"cut")
    assert digest() == expected[1]
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    assert digest() == expected[1]


def test_kept_digests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "_KEPT_FROM_BYTES", 1)
    monkeypatch.setattr(file_digests, "_MAX_KEPT", 3)
    monkeypatch.setattr(file_digests, "_SETTLED_AFTER_S", -1.0)
    for number in range(8):
        path = tmp_path / f"weights-{number}"
        path.write_bytes(b"x")
        file_digests.compute_file_digest(path, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "digests").iterdir())) == 3


def test_work_folders_that_were_left_behind_are_taken_away_after_a_day(tmp_path: Path) -> None:
    old, new = tmp_path / f"{WORK_PREFIX}abcdefgh", tmp_path / f"{WORK_PREFIX}abcdefgi"
    mine, link = tmp_path / f"{WORK_PREFIX}mine", tmp_path / f"{WORK_PREFIX}a_link_1"
    for folder in (old, new, mine):
        (folder / "inside").mkdir(parents=True)
    link.symlink_to(mine)
    for folder in (old, mine):
        os.utime(folder, (0, 0))
    with suppress(ZeroDivisionError), work_folder(tmp_path) as folder:
        (folder / "weights").write_text("half")
        raise ZeroDivisionError
    assert sorted(tmp_path.iterdir()) == sorted([link, mine, new])


def test_what_a_config_leaves_out_is_the_family_s_default(tmp_path: Path) -> None:
    """Oracle: the configurations of transformers, for every value that determines a shape."""
    transformers = pytest.importorskip("transformers")
    source = write_checkpoint(tmp_path / "source")
    for kind in ("gemma2", "gemma3_text"):
        sparse = {**SMALL, "model_type": kind, "num_hidden_layers": 12}
        (source / "config.json").write_text(json.dumps(sparse))
        shape, known = read_shape(source), transformers.AutoConfig.for_model(**sparse)
        assert shape.head_dim == known.head_dim == 256
        assert shape.window == known.sliding_window
        assert shape.attention_scale == known.query_pre_attn_scalar**-0.5
        assert shape.attention_cap == (known.attn_logit_softcapping or 0.0)
        assert shape.logits_cap == (known.final_logit_softcapping or 0.0)
        assert shape.activation == "gelu_tanh"
        kinds = ["sliding_attention" if shape.slides(i) else "full_attention" for i in range(12)]
        assert kinds == known.layer_types
        rope = known.rope_parameters
        full = rope.get("full_attention", rope)
        assert (shape.rope_of(5) or {})["rope_theta"] == full["rope_theta"]
        local = rope.get("sliding_attention", rope)
        assert (shape.rope_of(0) or {})["rope_theta"] == local["rope_theta"]


# --- checkpoints and drafts that are refused ------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ({"head_dim": 15}, "head size 15 is odd"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' needs factor, which is None"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma"}, "model_type 'gemma' is not one of"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "partial_rotary_factor 0.75"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    config = tiny_config() | changes
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=message):
        export_draft(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    out = tmp_path / "out"
    tensors = tiny_tensors(tiny_config())
    missing = {k: v for k, v in tensors.items() if k != "model.norm.weight"}
    write_checkpoint(source, tensors=missing)
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight is in no"):
        export_draft(source, out)
    write_checkpoint(source, tensors=tensors | {"model.norm.weight": np.ones(3, np.float32)})
    with pytest.raises(ModelFolderError, match=r"shape \(3,\), not \(64,\)"):
        export_draft(source, out)
    (source / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelFolderError, match=r"model\.safetensors: not a readable"):
        export_draft(source, out)
    (source / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"no \*\.safetensors"):
        export_draft(source, out)


@pytest.fixture(scope="module")
def good_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(write_checkpoint(tmp_path_factory.mktemp("good") / "source"), 4)


@pytest.fixture
def draft(good_draft: Path, tmp_path: Path) -> Path:
    """Return a copy that the test may damage."""
    return Path(shutil.copytree(good_draft, tmp_path / "draft"))


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
        ("layers", 3, "has 2 layers, but the manifest says 3"),
        ("layers", 1, "has 2 layers, but the manifest says 1"),
        ("layers", 0, "layers is 0"),
        ("kv_heads", 1, "has 2 kv_heads, but the manifest says 1"),
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


# --- Optimum --------------------------------------------------------------------------------------


WITHIN_S = 150.0
STAND_IN = """
import os, pathlib, shutil, signal, subprocess, sys
mode, graph, _, *module = sys.argv[1:6]
*_, option, source, out = sys.argv
assert (*module, option) == ("-m", "optimum.exporters.onnx", "--model"), sys.argv
if mode == "fails":
    sys.exit(3)
if mode == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    pids = pathlib.Path(graph).with_name("pids")
    pids.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    pids.with_suffix(".new").rename(pids)
    signal.pause()
if mode != "empty":
    shutil.copyfile(graph, f"{out}/model.onnx")
    shutil.copyfile(f"{source}/config.json", f"{out}/config.json")
    pathlib.Path(out, "tokenizer.json").write_text("{}")  # as the exporter's library has it
"""


@pytest.fixture(scope="module")
def plain_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exporters") / "source"
    config = tiny_config(rope_theta=1000.0)  # the layout of transformers 4
    write_checkpoint(folder, config, tiny_tensors(config, 0))
    # transformers 5 requires special tokens as texts here
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|end|>"}))
    return folder


def write_interpreter(mode: str, folder: Path) -> Path:
    """Write an executable that passes for a Python with Optimum."""
    graph, path, program = folder / "graph.onnx", folder / "python", folder / "stand_in.py"
    onnx.save_model(concatenating_graph(), graph)
    program.write_text(STAND_IN)
    words = " ".join(f"'{one}'" for one in (sys.executable, program, mode, graph))
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)
    return path


def generate_with_rollbacks(drafter: OnnxDrafter | ForeignDrafter) -> list[int]:
    """Return the draft's own greedy text, computed with a rollback at each step."""
    text, done = [5, 6, 7], 0
    drafter.begin(3, SamplingParams())
    while len(text) < 24:
        step = drafter.step(done, text[done:], 1)
        drafter.step(len(text), [9], 1)  # a wrong guess
        done = len(text)
        text.append(step[0].token)
    drafter.close()
    return text


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_optimum_s_graph_drafts_as_ours(
    real: bool, bits: int, plain_source: Path, tmp_path: Path
) -> None:
    """A head that is tied to the embedding must share its bytes."""
    out, python = tmp_path / "out", os.environ.get("OPTIMUM_PYTHON")
    if real and python is None:
        pytest.skip("OPTIMUM_PYTHON names no interpreter that has Optimum")
    python = python if real else str(write_interpreter("good", tmp_path))
    result = run_command("export", plain_source, out, "--optimum", python, "--bits", bits)
    assert result.exit_code == 0, result.output
    assert f"by Optimum, {bits} bits" in result.stdout
    foreign = load_foreign_drafter(resolve_source(str(out), Purpose.DRAFT), lambda text: None)
    assert generate_with_rollbacks(foreign) == generate_with_rollbacks(
        OnnxDrafter(export(plain_source, bits))
    )
    if bits != 32:
        graph = onnx.load(out / "model.onnx").graph
        kinds = [node.op_type for node in graph.node]
        assert kinds.count("MatMulNBits") == 2 * 7 + 1
        assert kinds.count("GatherBlockQuantized") == 1
        large = [one.data_type for one in graph.initializer if one.dims[:1] == [VOCABULARY_SIZE]]
        assert sorted(large) == [1, 2]  # scales and integers


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        (
            "fails",
            (),
            (
                "Optimum wrote no model.onnx (exit code 3); its messages are above. "
                "If it is not installed,"
            ),
        ),
        ("fails", (), "\n  run: python -m venv optimum-env && optimum-env/bin/pip install optimum"),
        ("empty", (), "Optimum wrote no model.onnx (exit code 0)"),
        ("newer", (), "config.json: has rope_parameters without rope_theta"),
        ("good", ("--kv-type", "int8"), "--optimum is given with --context-length or --kv-type"),
        ("good", ("--bits", "5"), "bits is 5, but must be one of (4, 8, 32)"),
        ("good", ("--optimum", "nowhere/python"), "nowhere/python: No such file"),
    ],
)
def test_what_goes_wrong_with_optimum_is_told_and_leaves_nothing(
    mode: str, options: tuple[str, ...], message: str, plain_source: Path, tmp_path: Path
) -> None:
    out, python = tmp_path / "out", write_interpreter(mode, tmp_path)
    source = write_checkpoint(tmp_path / "source") if mode == "newer" else plain_source
    result = run_command("export", source, out, "--optimum", python, *options)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert not out.exists()
    assert not list(tmp_path.glob(f"{WORK_PREFIX}*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_optimum_and_all_it_started(
    number: signal.Signals, plain_source: Path, tmp_path: Path
) -> None:
    python, pids = write_interpreter("hangs", tmp_path), tmp_path / "pids"
    words = (str(plain_source), str(tmp_path / "out"), "--optimum", str(python))
    with start("export", *words) as process:
        try:
            wait_until(pids.exists)
            process.send_signal(number)
            assert process.wait(WITHIN_S) == 128 + number
        finally:
            process.kill()
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))
    assert not list(tmp_path.glob(f"{WORK_PREFIX}*"))
