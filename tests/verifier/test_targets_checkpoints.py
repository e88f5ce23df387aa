"""The content of checkpoints: families and formats that are served, damage and all else that is
refused once, by name; and weights that are packed or rounded when they are loaded.

Oracles: the library's model with the weights that the integers stand for. Our products round their
inputs to 8 bits, so where a text differs from the library's, the two best tokens must nearly tie.
Oracle of packed weights: the products of plain ones.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from edgespec.core.ports import ModelOutputError, PassRequest, UnsupportedModelError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets import cpu_threads, linear_layers
from edgespec.verifier.targets import loading as checkpoints
from edgespec.verifier.targets import quantized_linear as quantized
from edgespec.verifier.targets.graph_passes import GRAPH_FAMILIES, GraphModel
from edgespec.verifier.targets.loading import check_family, load_model
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.kit.tiny_checkpoints import (
    VOCABULARY_SIZE,
    family_model,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)
from tests.verifier.torch_schedules import (
    GREEDY,
    Recorder,
    check_random_schedule,
    decode_alone,
    decode_beside,
    generate_greedily,
    torch_target,
)

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], list(range(20, 61))]
COUNT = 20
# The logit difference by which inputs of 8 bits, or bfloat16, may move two logits apart.
_NEAR_TIE = 0.25
_INPUT_ERROR = 0.08
"""Error of logits that inputs of 8 bits may make in two layers, as a share of their spread."""
Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    family_model("llama").save_pretrained(tmp_path)
    return tmp_path


def _load_refused(folder: Path, why: str, **options: Any) -> str:
    with pytest.raises(UnsupportedModelError, match=why) as raised:
        load_model(str(folder), device="cpu", **options)
    return str(raised.value)


# --- families -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "GPT2",
            {},
            "model type 'gpt2' is not supported; supported are gemma \\(Gemma\\), .*Qwen3-MoE",
        ),
        ("Gemma3", {}, "'gemma3' is not supported \\(a model of text and other media; serve a"),
        (
            "Qwen3",
            {"layer_types": ("full_attention", "chunked_attention")},
            "layer types chunked_attention are not supported; supported are full_attention",
        ),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            "rope type 'dynamic' depends on the length",
        ),
        (
            "Gemma3Text",
            {
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "dynamic",
                        "factor": 2.0,
                        "rope_theta": 10000.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            },
            "rope type 'dynamic' depends on the length",
        ),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "attends in both directions"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    family: str, options: dict[str, Any], message: str
) -> None:
    common = {"max_position_embeddings": 512, "num_hidden_layers": 2} if family != "Gemma3" else {}
    given = json.loads(json.dumps(common | options))  # lists, not tuples
    config = getattr(transformers, f"{family}Config")(**given)
    with pytest.raises(UnsupportedModelError, match=message):
        check_family(config)


def test_contexts_and_windows_have_bounds() -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
        "original_max_position_embeddings": 64,
    }
    phi = transformers.Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        sliding_window=None,
        pad_token_id=0,
        rope_parameters=longrope,
    )
    assert check_family(phi, 64) == 64
    with pytest.raises(UnsupportedModelError, match=r"limit it with --max-model-len 64$"):
        check_family(phi, 65)
    mistral = transformers.MistralConfig(sliding_window=64, max_position_embeddings=512)
    assert (check_family(mistral), check_family(mistral, 64)) == (512, 64)
    with pytest.raises(ValueError, match=r"context_length is 513, but must be in \[1, 512\]"):
        check_family(mistral, 513)
    qwen = transformers.Qwen3Config(layer_types=["sliding_attention"], num_hidden_layers=1)
    qwen.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="sliding_window is None; must be at least 1"):
        check_family(qwen)


# --- damage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "layers.1.mlp.up_proj",
            float("nan"),
            "the checkpoint is damaged: tensor model.layers.1.mlp.",
        ),
        (
            "layers.1.mlp.up_proj",
            float("inf"),
            "the checkpoint is damaged: tensor model.layers.1.mlp.",
        ),
        (
            "layers.1.mlp.up_proj",
            float("-inf"),
            "the checkpoint is damaged: tensor model.layers.1.mlp.",
        ),
        ("norm", 3e38, "the model's logits are NaN or infinite"),
    ],
)
def test_weights_that_are_no_numbers_or_make_none_are_refused(
    tmp_path: Path, name: str, value: float, message: str
) -> None:
    tensors = tiny_tensors(tiny_config())
    tensors[f"model.{name}.weight"].fill(value)
    write_checkpoint(tmp_path / "damaged", tiny_config(), tensors)
    for canonical in (None, False):
        with pytest.raises(UnsupportedModelError, match=f"damaged: {message}"):
            torch_target(tmp_path / "damaged", canonical=canonical)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("shards", [1, 3])
def test_weights_that_are_not_stored_as_real_numbers_are_refused_by_name(
    tmp_path: Path, dtype: torch.dtype, shards: int
) -> None:
    """Without a refusal, a quantised checkpoint whose configuration does not declare it would be
    served."""
    folder, name = write_checkpoint(tmp_path / "whole", shards=shards), "model.norm.weight"
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file(tensors | {name: (9 * tensors[name]).to(dtype)}, file, {"format": "pt"})
    _load_refused(folder, rf"whole: 1 tensor is not stored as real numbers, .*: {name} \(")


def test_every_fault_of_a_checkpoint_is_named_at_once(tmp_path: Path) -> None:
    narrow = np.zeros((96, 63), dtype=np.float32)
    settings = tiny_config(tie_word_embeddings=False)
    tensors: Tensors = tiny_tensors(settings)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = narrow
    tensors["model.layers.2.mlp.up_proj.weight"] = narrow
    tensors["model.layers.0.self_attn.q_proj.bias"] = narrow[0]
    message = _load_refused(
        write_checkpoint(tmp_path, settings, tensors), "does not fill the model"
    )
    assert "1 tensor is missing: model.layers.1.self_attn.q_proj.weight;" in message
    assert (
        "2 tensors are in the checkpoint for which the model has no place: "
        "model.layers.0.self_attn.q_proj.bias, model.layers.2.mlp.up_proj.weight;" in message
    )
    assert (
        "1 tensor is of another shape: model.layers.0.mlp.up_proj.weight is 96 x 63 in the "
        "checkpoint, 96 x 64 in the model" in message
    )
    headless = tiny_tensors(settings)
    del headless["lm_head.weight"]
    message = _load_refused(
        write_checkpoint(tmp_path, settings, headless), "does not fill the model"
    )
    assert "1 tensor is missing: lm_head.weight (config.json says tie_word_embeddings" in message


def _decode(target: TorchTarget, failing: PassRequest | None) -> list[int]:
    """Decode ten tokens of session "good"; some passes are first tried together with
    ``failing``."""
    target.open("good", 2, SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2))
    text = [5, 6]
    for step in range(10):
        cached = len(text) - 1 if step else 0
        good = PassRequest("good", cached, tuple(text[cached:]))
        if failing and 2 <= step < 5:
            with pytest.raises(ModelOutputError, match="'bad': the largest logit") as raised:
                target.forward([good, failing])
            assert raised.value.key == "bad"
        text.append(target.forward([good])[0].targets[0])
    return text[2:]


def test_a_session_whose_logits_are_no_numbers_is_named_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    """The embedding of its token is spoilt while it is already served."""
    folder = write_checkpoint(tmp_path / "good", tiny_config(tie_word_embeddings=False))
    expected = _decode(torch_target(folder), None)
    target = torch_target(folder)
    spoilt = next(token for token in range(VOCABULARY_SIZE) if token not in (5, 6, *expected))
    with torch.no_grad():
        target._model.model.embed_tokens.weight[spoilt] = torch.nan
    target.open("bad", 1, GREEDY)
    assert _decode(target, PassRequest("bad", 0, (spoilt,))) == expected


# --- weights that are rounded to integers ---------------------------------------------------


def _logits(model: Any, text: list[int], first: int) -> torch.Tensor:
    """Return float32 [tokens, vocabulary]: the rows before text[first], text[first + 1], .."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([text])).logits[0, first - 1 : -1].float()
    return logits


def _rounded_twin(folder: Path, number_format: str) -> Any:
    """Return the library's model with the weights that the integers stand for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    head = model.get_output_embeddings()
    for _, part in model.named_modules():
        if isinstance(part, torch.nn.Linear):
            bits = quantized.HEAD_BITS if part is head else quantized.FORMATS[number_format]
            # The parameter is new, because a tied embedding keeps its own numbers.
            part.weight = torch.nn.Parameter(quantized.round_weight(part.weight, bits))
    return model


@pytest.mark.parametrize("number_format", ["int8", "int4"])
@pytest.mark.parametrize("family", sorted(GRAPH_FAMILIES))
def test_logits_of_the_graph_are_those_of_the_library_up_to_rounded_inputs(
    tmp_path: Path, family: str, number_format: str
) -> None:
    """Texts are longer than a window of 12 tokens and than the shortest row of keys."""
    family_model(family).save_pretrained(tmp_path)
    recorder = Recorder(tmp_path, quantize=number_format)
    assert recorder.target._graph is not None
    text = PROMPTS[1] + PROMPTS[0] + PROMPTS[1]
    found = recorder.reference(text, 19)
    wanted = _logits(_rounded_twin(tmp_path, number_format), [*text, 0], 19)
    assert float((found - wanted).square().mean().sqrt()) <= _INPUT_ERROR * float(wanted.std())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("family", "number_format"),
    [("gemma2", "int8"), ("gemma3_text", "int4"), ("llama", "int4"), ("qwen3", "int8")],
)
def test_bits_of_the_graph_do_not_depend_on_the_schedule(
    tmp_path: Path, family: str, number_format: str, threads: int
) -> None:
    family_model(family).save_pretrained(tmp_path)
    before = torch.get_num_threads(), cpu_threads.count()
    try:
        recorder = Recorder(tmp_path, quantize=number_format, model_threads=threads)
        assert recorder.target._graph is not None
        rng = random.Random(f"{family} {threads}")
        for length in (2, 5, 63, 64, 65, 130, 300):
            check_random_schedule(rng, recorder, length)
    finally:
        torch.set_num_threads(before[0])
        cpu_threads.set_count(before[1])


def test_a_graph_whose_bits_depend_on_the_row_count_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The products are then rounded one by one, and canonical mode is tried with them."""
    right = GraphModel._run

    def wrong(model: GraphModel, rows: Any, bounds: Any, padded: int, *others: Any) -> Any:
        return right(model, rows, bounds, padded, *others) * (1 + padded * 1e-6)

    monkeypatch.setattr(GraphModel, "_run", wrong)
    with caplog.at_level(logging.WARNING):
        target = torch_target(folder, quantize="int4")
    assert target._graph is None
    assert target.canonical
    assert "layers are not computed as one graph, so slower: chunked differs by" in caplog.text
    assert len(decode_alone(target, PROMPTS[0], COUNT)) == COUNT


@pytest.mark.parametrize("number_format", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_rounded_weights_write_the_text_of_generate_up_to_near_ties(
    tmp_path: Path, family: str, number_format: str
) -> None:
    """The families have three layers for queries, keys and values (with or without biases),
    or one."""
    family_model(family).save_pretrained(tmp_path)
    target = torch_target(tmp_path, quantize=number_format, weights="w")
    assert target.canonical
    assert target.info.fingerprint == f"w-{number_format}v3-float32"
    alone = [decode_alone(target, prompt, COUNT) for prompt in PROMPTS]
    assert decode_beside(target, PROMPTS, alone) == alone
    model = _rounded_twin(tmp_path, number_format)
    compared = 0
    for prompt, text in zip(PROMPTS, alone, strict=True):
        logits = _logits(model, prompt + text, len(prompt))
        behind = logits.amax(dim=1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert float(behind.max()) <= _NEAR_TIE
        best_two = logits.topk(2).values
        clear = best_two[:, 0] - best_two[:, 1] > _NEAR_TIE
        assert torch.equal(logits.argmax(dim=1)[clear], torch.tensor(text)[clear])
        compared += int(clear.sum())
    assert compared > COUNT


def test_layers_that_read_the_same_rows_are_one_product(folder: Path) -> None:
    """Oracle: each layer's own product with its rounded weights; one call of onnxruntime."""
    model = family_model("llama")
    plain = [getattr(model.model.layers[0].mlp, name) for name in ("gate_proj", "up_proj")]
    rows = torch.randn((3, plain[0].in_features), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = [rows @ quantized.round_weight(layer.weight, 8).T for layer in plain]
        quantized.quantize_model("model", model, "int8")
        parts = [getattr(model.model.layers[0].mlp, name) for name in ("gate_proj", "up_proj")]
        whole = parts[0].whole
        assert parts[1].whole is whole
        calls: list[int] = []
        product = whole.product

        def counted(given: torch.Tensor) -> torch.Tensor:
            calls.append(len(given))
            out: torch.Tensor = product(given)
            return out

        whole.product = counted
        for count in (3, 2):
            given = rows[:count]
            found = [part(given) for part in parts]
            for one, other in zip(found, wanted, strict=True):
                error = (one - other[:count]).abs().max()
                assert float(error) <= quantized._TOLERANCE * float(other.abs().max())
    assert calls == [3, 2], "each set of rows is multiplied once, and none is kept for the next"


def test_what_a_format_cannot_hold_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, message in (
        ({"quantize": "int3"}, "quantize is 'int3', but must be int8 or int4"),
        ({"quantize": "int8", "dtype": "bfloat16"}, "in float32, but dtype is 'bfloat16'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(str(folder), device="cpu", **options)  # type: ignore[arg-type]
    family_model("qwen3_moe").save_pretrained(folder / "experts")
    message = r"quantize int8 is for dense models; model.layers.0.mlp.experts holds the weights"
    _load_refused(folder / "experts", message, quantize="int8")
    right = quantized.QuantizedLinear.product
    monkeypatch.setattr(
        quantized.QuantizedLinear, "product", lambda layer, rows: right(layer, rows) * 1.2
    )
    _load_refused(folder, "8-bit product is wrong on this machine: ", quantize="int8")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("number_format", ["", "int8"])
def test_a_checkpoints_file_is_not_mapped_for_longer_than_it_is_read(
    tmp_path: Path, small: None, number_format: str
) -> None:
    """Weights that were packed or rounded lie in memory of their own."""
    family_model("llama").save_pretrained(tmp_path)
    target = torch_target(tmp_path, quantize=number_format)
    if not number_format and not linear_layers.is_packed(target._model):
        pytest.skip("weights are not packed on this machine")
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


# --- checkpoints that come quantised --------------------------------------------------------


def _declare_quantized(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": settings}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("bitsandbytes", "quantised as 'bitsandbytes', which is not supported; supported are awq,"),
        ("gptq", "to load it transformers needs gptqmodel and optimum: pip install gptqmodel opt"),
        ("awq", "transformers needs gptqmodel and accelerate: pip install"),
        ("fp8", "transformers needs accelerate: pip install accelerate"),
        ("compressed-tensors", "pip install compressed-tensors"),
        ("torchao", "pip install torchao"),
    ],
)
def test_a_format_is_refused_with_the_packages_that_are_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, message: str
) -> None:
    _declare_quantized(folder, quant_method=method, bits=4)
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    _load_refused(folder, message)
    if method == "gptq":
        monkeypatch.setattr(checkpoints, "find_spec", lambda name: name)
        _load_refused(folder, "as 'gptq', and transformers cannot load it on this machine: ")


def _store(folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Replace each projection by the result of ``change``."""
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        projection = name.endswith(("proj", "proj.weight"))
        stored |= change(name, tensor) if projection else {name: tensor}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _assert_served_as_unpacked(folder: Path, *, canonical: bool) -> None:
    """Check that the text is that of ``generate`` with the float32 weights that the integers stand
    for."""
    target = torch_target(folder)
    assert target.canonical is canonical
    config = transformers.AutoConfig.from_pretrained(folder)
    config.quantization_config = {**config.quantization_config, "dequantize": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32
    )
    texts = [generate_greedily(model, prompt, COUNT) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 15
    assert decode_beside(target, PROMPTS, texts) == texts
    _load_refused(folder, "is quantised already", quantize="int8")


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
    plain = ["self_attn", "mlp.router", "embed_tokens", "lm_head"]
    _declare_quantized(tmp_path, quant_method="mxfp4", modules_to_not_convert=plain)
    _assert_served_as_unpacked(tmp_path, canonical=False)


def test_8_bit_floats_are_served_as_ordinary_weights(folder: Path) -> None:
    holds = torch_target(folder).canonical  # not on every machine, with these shapes

    def change(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs, inputs = tensor.shape
        blocks = tensor.view(outputs // 32, 32, inputs // 32, 32)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        stored = (blocks / scale[:, None, :, None]).view(tensor.shape).to(torch.float8_e4m3fn)
        return {name: stored, f"{name}_scale_inv": scale}

    _store(folder, change)
    block = [32, 32]
    _declare_quantized(
        folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=block
    )
    _assert_served_as_unpacked(folder, canonical=holds)


# --- packed weights -------------------------------------------------------------------------


def _layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(96, 192), torch.nn.SiLU(), torch.nn.Linear(192, 40, bias=False)
    )
    return model.requires_grad_(False).eval()


def test_unpacked_weights_are_the_weights_and_none_lie_twice(small: None) -> None:
    model = _layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = torch.randn((7, 96))
    out = model(rows)
    weights = [weakref.ref(part.weight) for part in model if isinstance(part, torch.nn.Linear)]
    assert linear_layers.pack_model(model) == 2
    gc.collect()
    assert [ref() for ref in weights] == [None, None]
    torch.testing.assert_close(model(rows), out, rtol=0, atol=1e-5)
    assert linear_layers.unpack_model(model) == 2
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model(rows), out)
    assert linear_layers.unpack_model(model) == 0


def test_what_is_small_shared_hooked_or_of_another_format_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _layers()
    assert linear_layers.pack_model(model) == 0
    monkeypatch.setattr(linear_layers, "LEAST_WEIGHTS", 10_000)
    assert linear_layers.pack_model(model) == 1
    assert isinstance(model[0], linear_layers.PackedLinear)
    monkeypatch.setattr(linear_layers, "LEAST_WEIGHTS", 1)
    assert linear_layers.pack_model(_layers().double()) == 0
    shared = _layers()
    shared.append(torch.nn.Linear(96, 192))
    shared[3].weight = shared[0].weight
    assert linear_layers.pack_model(shared) == 1
    hooked = _layers()
    hooked[2].register_forward_hook(lambda _module, _rows, out: out + 1)
    assert linear_layers.pack_model(hooked) == 1


class _Scaled(torch.nn.Embedding):
    """An embedding that also scales, like Gemma's."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 3.0


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", [torch.nn.Embedding, _Scaled])
def test_a_head_that_is_the_embedding_is_packed_beside_a_table_with_the_same_numbers(
    kind: type[torch.nn.Embedding], exact: bool, small: None
) -> None:
    torch.manual_seed(4)
    embed, head = kind(40, 96), torch.nn.Linear(96, 40)
    if exact:  # like a checkpoint in bfloat16
        embed.weight.data = embed.weight.data.bfloat16().float()
    head.weight = embed.weight
    model = torch.nn.ModuleDict({"embed": embed, "head": head}).requires_grad_(False).eval()
    weight, tokens, rows = embed.weight.clone(), torch.arange(40), torch.randn((5, 96))
    looked_up, logits = model["embed"](tokens), model["head"](rows)
    assert linear_layers.pack_model(model) == 1
    assert isinstance(model["head"], linear_layers.PackedLinear)
    assert isinstance(model["embed"], linear_layers.NarrowEmbedding) == (
        exact and kind is torch.nn.Embedding
    )
    assert torch.equal(model["embed"](tokens), looked_up)
    torch.testing.assert_close(model["head"](rows), logits, rtol=0, atol=1e-5)
    assert linear_layers.unpack_model(model) == 1
    assert model["head"].weight is model["embed"].weight
    assert torch.equal(model.get_parameter("embed.weight"), weight)
    assert torch.equal(model["embed"](tokens), looked_up)
    assert torch.equal(model["head"](rows), logits)


def _multiply_wrongly(layer: linear_layers.PackedLinear, rows: torch.Tensor) -> torch.Tensor:
    """Return products that are right for the first layer alone."""
    out = torch.nn.functional.linear(rows, layer.unpacked(), layer.bias)
    return out if layer.in_features == 96 else out * 1.001


def _fail_missing(_layer: linear_layers.PackedLinear, _rows: torch.Tensor) -> torch.Tensor:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")


@pytest.mark.parametrize(
    ("product", "why"),
    [
        (_multiply_wrongly, "the packed product of 2 differs by"),
        (_fail_missing, "'_OpNamespace' 'mkldnn' object has no"),
    ],
)
def test_products_that_are_wrong_or_missing_are_not_used(
    product: Any,
    why: str,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = _layers()
    rows = torch.randn((7, 96))
    out = model(rows)
    monkeypatch.setattr(linear_layers.PackedLinear, "product", product)
    with caplog.at_level(logging.INFO):
        assert linear_layers.pack_model(model) == 0
    assert f"weights are not packed: {why}" in caplog.text
    assert torch.equal(model(rows), out)
