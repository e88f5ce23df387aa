"""Models with integer weights: rounded when they are loaded, or stored so.

Oracles: bits that do not depend on the schedule, and ``generate`` of the same model with the same
integers. In bfloat16 the library's attention rounds elsewhere than ours, so where a text leaves
that of ``generate``, the two best tokens must nearly tie; in float32 texts are equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file

from edgespec.verifier.targets import checkpoints
from edgespec.verifier.targets.checkpoints import UnsupportedModelError
from edgespec.verifier.targets.linear_layers import QuantizedLinear, quantize_model
from edgespec.verifier.targets.loading import load_model
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.family_models import family_model
from tests.shell.ragged_decoding import decode_beside, generated

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], list(range(20, 61))]
COUNT = 20
# Of a logit, by how much bfloat16 may move the difference of two: 8 bits of values below 32.
_NEAR_TIE = 0.25


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    family_model("llama").save_pretrained(tmp_path)
    return tmp_path


def _target(folder: Path, **options: Any) -> TorchTarget:
    settings: dict[str, Any] = {"device": "cpu", "max_cached_tokens": 1024, **options}
    return TorchTarget(str(folder), name="tiny", vocabulary="v", weights="w", **settings)


def _logits(model: Any, text: list[int], first: int) -> torch.Tensor:
    """float32 [tokens, vocabulary]: those behind which stand text[first], text[first + 1], .."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([text])).logits[0, first - 1 : -1].float()
    return logits


@pytest.mark.parametrize("number_format", ["int8", "int4"])
def test_rounded_weights_write_the_text_of_generate_up_to_near_ties(
    folder: Path, number_format: str
) -> None:
    target = _target(folder, quantize=number_format)
    assert target.canonical
    assert target.info.fingerprint == f"w-{number_format}-bfloat16"
    alone = [decode_beside(target, [prompt], [[0] * COUNT])[0] for prompt in PROMPTS]
    assert decode_beside(target, PROMPTS, alone, seed=1) == alone
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantize_model("model", model, number_format)
    assert any(isinstance(part, QuantizedLinear) for part in model.modules())
    compared = 0
    for prompt, text in zip(PROMPTS, alone, strict=True):
        logits = _logits(model, prompt + text, len(prompt))
        behind = logits.amax(dim=1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert float(behind.max()) <= _NEAR_TIE
        best_two = logits.topk(2).values
        clear = best_two[:, 0] - best_two[:, 1] > _NEAR_TIE
        assert torch.equal(logits.argmax(dim=1)[clear], torch.tensor(text)[clear])
        compared += int(clear.sum())
        free = generated(model, prompt, COUNT)
        apart = next((i for i in range(COUNT) if free[i] != text[i]), None)
        assert apart is None or not clear[apart]
    assert compared > COUNT


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int3"}, "quantize is 'int3', but must be int8 or int4"),
        ({"quantize": "int8", "dtype": "float32"}, "computes in bfloat16, but dtype is 'float32'"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(str(folder), device="cpu", **options)


def test_models_that_a_format_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    family_model("qwen3_moe").save_pretrained(tmp_path / "experts")
    message = r"quantize int8 is for dense models; model.layers.0.mlp.experts holds the weights"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path / "experts"), device="cpu", quantize="int8")
    family_model("qwen3", intermediate_size=88).save_pretrained(tmp_path / "odd")
    message = r"but model.layers.0.mlp.gate_proj is 64 x 88; int8 has no such limit"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path / "odd"), device="cpu", quantize="int4")


def test_a_product_that_is_wrong_on_this_machine_is_not_trusted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = QuantizedLinear.product
    monkeypatch.setattr(QuantizedLinear, "product", lambda layer, rows: right(layer, rows) * 1.2)
    with pytest.raises(UnsupportedModelError, match="int8 product is wrong on this machine: model"):
        load_model(str(folder), device="cpu", quantize="int8")


# --- checkpoints that come quantised --------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("bitsandbytes", "quantised as 'bitsandbytes', which is not supported; supported are awq,"),
        ("gptq", r"to load it transformers needs gptqmodel and optimum: pip install gptqmodel opt"),
        ("awq", "transformers needs gptqmodel and accelerate: pip install"),
        ("fp8", "transformers needs accelerate: pip install accelerate"),
        ("compressed-tensors", "pip install compressed-tensors"),
        ("torchao", "pip install torchao"),
    ],
)
def test_a_format_is_refused_with_the_packages_that_are_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, message: str
) -> None:
    _change_config(folder, quantization_config={"quant_method": method})
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(folder), device="cpu")


def test_what_transformers_cannot_load_is_refused_with_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: name)
    message = "quantised as 'gptq', and transformers cannot load it on this machine: "
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(folder), device="cpu")


def _store(folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Put what ``change`` makes of each projection in its place."""
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        projection = name.endswith(("proj", "proj.weight"))
        stored |= change(name, tensor) if projection else {name: tensor}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _assert_served_as_unpacked(folder: Path, *, canonical: bool) -> None:
    """The text is that of ``generate`` of the float32 weights that the integers stand for."""
    target = _target(folder)
    assert target.canonical is canonical
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = {**config.quantization_config, "dequantize": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32
    )
    texts = [generated(model, prompt, COUNT) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 15
    assert decode_beside(target, PROMPTS, texts) == texts
    with pytest.raises(UnsupportedModelError, match="is quantised already"):
        load_model(str(folder), device="cpu", quantize="int8")


def test_gpt_oss_with_4_bit_floats_is_served_as_ordinary_weights(tmp_path: Path) -> None:
    family_model("gpt_oss").save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if "experts" not in name:
            return {name: tensor}
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    _store(tmp_path, change)
    _change_config(
        tmp_path,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["self_attn", "mlp.router", "embed_tokens", "lm_head"],
        },
    )
    _assert_served_as_unpacked(tmp_path, canonical=False)


def test_8_bit_floats_are_served_as_ordinary_weights(folder: Path) -> None:
    pytest.importorskip("accelerate")

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, inputs = tensor.shape
        blocks = tensor.view(outputs // 32, 32, inputs // 32, 32)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        stored = (blocks / scale[:, None, :, None]).view(tensor.shape).to(torch.float8_e4m3fn)
        return {name: stored, f"{name}_scale_inv": scale}

    _store(folder, change)
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
    }
    _change_config(folder, quantization_config=settings)
    _assert_served_as_unpacked(folder, canonical=True)
