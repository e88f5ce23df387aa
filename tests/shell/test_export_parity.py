"""The check of an export against its checkpoint. Oracles: transformers for the reference model;
good exports pass, and each planted mistake is found and its place named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.device.drafters.manifest import DraftManifest, DraftModelError
from edgespec.device.export import export as exporting
from edgespec.device.export.checkpoint import Checkpoint, read_shape
from edgespec.device.export.export import WORK_PREFIX, export_draft
from edgespec.device.export.export_graph import (
    pad_inputs,
    pad_outputs,
    unpad_inputs,
    unpad_outputs,
)
from edgespec.device.export.parity import check_parity, reference_logits
from edgespec.models.folders import model_info
from tests.shell.test_drafters_export import TOKENS, VARIANTS
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint


def exported(source: Path, bits: int) -> tuple[Path, DraftManifest]:
    target = source.parent / f"draft-{bits}"
    return target, export_draft(source, target, model_info(source), bits=bits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_is_the_model_and_a_good_export_passes(variant: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = write_checkpoint(tmp_path / "source", VARIANTS[variant])
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    got = reference_logits(read_shape(source), Checkpoint(source), TOKENS)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    for bits, bound in ((32, 1e-4), (4, 0.1)):
        target, manifest = exported(source, bits)
        assert check_parity(source, target, manifest) < bound


def test_short_contexts_are_checked_too(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    info, out = model_info(source), tmp_path / "out"
    for length in (20, 1):
        manifest = export_draft(source, out, info, bits=4, context_length=length)
        assert check_parity(source, out, manifest) < 0.1


def nodes(model: onnx.ModelProto, kind: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == kind]


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(one for one in node.attribute if one.name == name)


def wrong_scale(model: onnx.ModelProto) -> None:
    attribute(nodes(model, "GroupQueryAttention")[1], "scale").f *= 1.5


def window(model: onnx.ModelProto) -> None:
    attribute(nodes(model, "GroupQueryAttention")[0], "local_window_size").i = 4


def unrotated(model: onnx.ModelProto) -> None:
    attribute(nodes(model, "GroupQueryAttention")[1], "do_rotary").i = 0


def swapped(model: onnx.ModelProto) -> None:
    up = next(n for n in model.graph.node if n.name.endswith("0.mlp.up_proj"))
    gate = next(n for n in model.graph.node if n.name.endswith("0.mlp.gate_proj"))
    up.input[1], gate.input[1] = gate.input[1], up.input[1]


def damaged_matrix(model: onnx.ModelProto) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensor = next(one for one in model.graph.initializer if one.name == name)
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[3, 5] = 9.0
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (wrong_scale, r"decoded in one pass, the logits behind token 48 of 48 differ .* token id"),
        (window, "decoded in one pass"),
        (unrotated, "decoded in one pass"),
        (swapped, "decoded in one pass"),
        (damaged_matrix, r"layers\.1\.mlp\.down_proj\.weight differs .* \[5, 3\]: 9 instead of"),
    ],
)
def test_a_mistake_is_found_and_its_place_named(
    damage: Callable[[onnx.ModelProto], None], message: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    target, manifest = exported(source, 32)
    model = onnx.load(target / "model.onnx")
    damage(model)
    onnx.save_model(model, target / "model.onnx")
    with pytest.raises(DraftModelError, match=message):
        check_parity(source, target, manifest)


def test_weights_of_another_checkpoint_are_found_at_any_bits(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    rope = {"rope_theta": 30.0, "rope_type": "default"}
    other = write_checkpoint(tmp_path / "other", tiny_config(rope_parameters=rope))
    for bits in (4, 8):
        target, manifest = exported(source, bits)
        with pytest.raises(DraftModelError, match="decoded in one pass"):  # the same matrices
            check_parity(other, target, manifest)
        eight = replace(manifest, bits=32)
        with pytest.raises(DraftModelError, match="decoded"):  # rounding is told from none
            check_parity(source, target, eight)


def test_padding_of_heads_is_undone() -> None:
    weight = np.random.default_rng(0).standard_normal((5 * 24, 7)).astype(np.float32)
    np.testing.assert_array_equal(unpad_outputs(pad_outputs(weight, 24), 24), weight)
    turned = np.ascontiguousarray(weight.T)
    np.testing.assert_array_equal(unpad_inputs(pad_inputs(turned, 24), 24), turned)


def test_the_command_leaves_nothing_of_a_wrong_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_checkpoint(tmp_path / "source"), tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(source), str(out)])
    assert result.exit_code == 0, result.output
    assert "checked against the checkpoint" in result.stderr
    assert (out / "model.onnx").is_file()
    real = exporting._save

    def wrong(model: onnx.ModelProto, target: Path) -> None:
        wrong_scale(model)
        real(model, target)

    monkeypatch.setattr(exporting, "_save", wrong)
    bad = tmp_path / "bad"
    result = CliRunner().invoke(app, ["export", str(source), str(bad), "--bits", "32"])
    assert result.exit_code == 1
    assert "decoded in one pass" in result.stderr
    assert not bad.exists()
    assert not list(tmp_path.glob(f"{WORK_PREFIX}*"))
    unchecked = ["export", str(source), str(bad), "--bits", "32", "--no-check"]
    assert CliRunner().invoke(app, unchecked).exit_code == 0
    assert bad.is_dir()
