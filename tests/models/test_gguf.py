"""Tests of GGUF files as models: weights, configuration, tokenizer, names, and files with false
headers.

Oracle: llama.cpp's own library (``gguf``) writes a random model of transformers in each family,
with the changes that llama.cpp's converter makes. The folder that is made of the file must give the
same logits in transformers. A tokenizer must give the ids of the one that it was written from.
Refusals must name the reason.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.models import folders
from edgespec.models.gguf_architecture import config_of, weights_of
from edgespec.models.gguf_file import GgufError, GgufFile, GgufTensor
from edgespec.models.gguf_folder import folder_of_gguf
from edgespec.models.gguf_references import choose_file, hub_file, ollama_file
from edgespec.models.model_source import Purpose, SourceKind, resolve_source
from edgespec.models.weight_blocks import quantize_matrix
from tests.kit.tiny_checkpoints import SENTENCES, family_model, write_tokenizer

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

Q = gguf.GGMLQuantizationType
ALPHABET = [chr(code) for code in range(33, 127)]

# The names that llama.cpp's converter uses for the parts of a checkpoint.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
}
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    "qwen2": ("qwen2", {"sliding_window": None, "use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": (
        "gemma3",
        {
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "granite": ("granite", {}),
    "gpt_oss": (
        "gpt-oss",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}
INTERLEAVED = ("llama", "granite")


def interleave(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder a query or key matrix in the way llama.cpp does."""
    rest = weight.shape[1:]
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *rest)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def split_experts(
    name: str, values: NDArray[Any], *, four_bits: bool
) -> list[tuple[str, NDArray[Any], Any]]:
    """Return the tensors that llama.cpp makes of a tensor of gpt-oss's experts: their names behind
    the layer's, their values and types. gate_up_proj is [experts, inputs, outputs], and its outputs
    are gate and up in turns."""
    if name.endswith("_bias"):
        whole, kind, raw = values, "bias", None
    else:
        whole, kind, raw = values.swapaxes(1, 2), "weight", Q.MXFP4 if four_bits else None
    parts = {"ffn_down_exps": whole}
    if name.startswith("gate_up"):
        parts = {"ffn_gate_exps": whole[:, 0::2], "ffn_up_exps": whole[:, 1::2]}
    found = []
    for part, own in parts.items():
        own = np.ascontiguousarray(own)
        written = own if raw is None else gguf.quants.quantize(own, raw)
        found.append((f"{part}.{kind}", written, raw))
    return found


def round_experts(model: Any) -> None:
    """Round the experts of a gpt-oss model to what MXFP4 can hold, as the ``gguf`` library does."""
    for name, tensor in model.state_dict().items():
        if "experts" in name and not name.endswith("_bias"):
            values = np.ascontiguousarray(tensor.numpy().swapaxes(1, 2))
            rounded = gguf.quants.dequantize(gguf.quants.quantize(values, Q.MXFP4), Q.MXFP4)
            tensor.copy_(torch.from_numpy(rounded.swapaxes(1, 2).copy()))


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    add_more: Callable[[Any], None] = lambda writer: None,
    *,
    four_bits: bool = False,
) -> Path:
    """Write a model of transformers as llama.cpp's converter would. ``add_more`` adds what only
    this model has. ``four_bits`` writes experts in MXFP4."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "gpt-oss":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    add_tokens(writer, [f"t{number}" for number in range(config.vocab_size)])
    add_more(writer)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if stem == "mlp.experts":
            for own, written, raw in split_experts(kind, values, four_bits=four_bits):
                writer.add_tensor(f"{prefix}{own}", written, raw_dtype=raw)
            continue
        if kind == "sinks":
            writer.add_tensor(f"{prefix}attn_sinks.weight", values)
            continue
        names = {**NAMES, **(FOUR_NORMS if architecture in ("gemma2", "gemma3") else {})}
        if architecture == "gpt-oss":
            names["post_attention_layernorm"] = "post_attention_norm"
        if architecture in INTERLEAVED and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_" in stem else config.num_key_value_heads
            values = interleave(values, heads)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            values = values + 1
        writer.add_tensor(f"{prefix}{names[stem]}.{kind}", values)
    return finish(writer, path)


def add_tokens(
    writer: Any, tokens: Sequence[str], merges: Sequence[str] = (), pre: str = "gpt-2"
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(tokens))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    if merges:
        writer.add_token_merges(list(merges))
    writer.add_eos_token_id(7)


def finish(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_gives_the_logits_of_transformers(tmp_path: Path, model_type: str) -> None:
    architecture, changes = FAMILIES[model_type]
    model = family_model(model_type, **changes)
    path = write_gguf(tmp_path / "tiny.gguf", model, architecture)
    folder = convert(path, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(40).reshape(1, -1) % 200
    with torch.no_grad():
        expected, found = model(ids).logits, again(ids).logits
    assert torch.equal(expected, found)
    assert folders.eos_token_ids(folder) == (7,)
    folders.check_folder(folder)


def test_experts_in_4_bit_floats_stay_in_4_bits(tmp_path: Path) -> None:
    """Oracle: the rounded experts in transformers, and the bytes of the file."""
    model = family_model("gpt_oss")
    round_experts(model)
    path = write_gguf(tmp_path / "tiny.gguf", model, "gpt-oss", four_bits=True)
    folder = convert(path, tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.quantization_config["quant_method"] == "mxfp4"
    config.quantization_config = {**config.quantization_config, "dequantize": True}
    again = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32
    ).eval()
    ids = torch.arange(40).reshape(1, -1) % 200
    with torch.no_grad():
        expected, found = model(ids).logits, again(ids).logits
    assert torch.equal(expected, found)
    experts = model.config.num_local_experts
    hidden, wide = model.config.hidden_size, model.config.intermediate_size
    blocks = read_tensor(folder, "model.layers.1.mlp.experts.gate_up_proj_blocks")
    assert blocks.shape == (experts, 2 * wide, hidden // 32, 16)
    assert blocks.dtype == np.uint8


def test_an_expert_that_lacks_its_other_half_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", family_model("gpt_oss"), "gpt-oss")
    file = GgufFile.read(path)
    for lost in ("blk.0.ffn_gate_exps.weight", "blk.1.ffn_up_exps.bias"):
        left = {name: tensor for name, tensor in file.tensors.items() if name != lost}
        cut = GgufFile(path, file.metadata, left)
        with pytest.raises(GgufError, match=f"but no '{lost}'"):
            list(weights_of(cut, config_of(cut)))


@pytest.mark.parametrize("count", [0, 4097, (1 << 31) - 1])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "smollm3", "gpt-oss"])
def test_an_impossible_number_of_layers_is_refused(
    tmp_path: Path, architecture: str, count: int
) -> None:
    """The lists with an entry a layer take no memory by an unchecked number."""
    metadata = {f"{architecture}.{key}": 2 for key in ("embedding_length", "feed_forward_length")}
    metadata |= {f"{architecture}.attention.{key}": 2 for key in ("head_count", "sliding_window")}
    metadata |= {f"{architecture}.attention.key_length": 2, f"{architecture}.context_length": 2}
    path = tmp_path / "a.gguf"
    embedding = GgufTensor("token_embd.weight", (2, 2), 0, path, 0)
    file = GgufFile(
        path,
        {"general.architecture": architecture, f"{architecture}.block_count": count, **metadata},
        {embedding.name: embedding},
    )
    with pytest.raises(GgufError, match=rf"block_count is {count}, but must be in \[1, 4096\]"):
        config_of(file)


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["all dimensions", "half of them"])
@pytest.mark.parametrize("length", [40, 100], ids=["short", "long"])
def test_phi_3_with_long_context_gives_the_logits_of_transformers(
    tmp_path: Path, share: float, length: int
) -> None:
    head, original = 16, 64
    count = int(head * share) // 2
    short, long = [1.0 + 0.1 * n for n in range(count)], [2.0 + 0.3 * n for n in range(count)]
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": share}
    model = family_model(
        "phi3",
        rope_parameters={**rope, "short_factor": short, "long_factor": long},
        max_position_embeddings=256,
        original_max_position_embeddings=original,
    )
    assert model.config.hidden_size // model.config.num_attention_heads == head

    def add_factors(writer: Any) -> None:
        writer.add_rope_dimension_count(2 * count)
        writer.add_rope_scaling_orig_ctx_len(original)
        for name, factors in (("short", short), ("long", long)):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))

    path = write_gguf(tmp_path / "tiny.gguf", model, "phi3", add_factors)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        convert(path, tmp_path), dtype=torch.float32
    ).eval()
    ids = torch.arange(length).reshape(1, -1) % 200
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, again(ids).logits, atol=1e-6)


def convert(path: Path, tmp_path: Path) -> Path:
    return folder_of_gguf(path, tmp_path / "cache")


def make_header(*values: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, tensors, keys)
    return b"".join((start, *values)).ljust(64, b"\0")


def encode_text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def describe_tensor(name: bytes, sizes: Sequence[int], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return encode_text(name) + shape + struct.pack("<IQ", kind, offset)


HUGE = 1 << 60
LIES = [
    pytest.param(b"GGML" + bytes(60), "does not begin as a GGUF file", id="other format"),
    pytest.param(b"GGUF", "has 4 bytes", id="cut"),
    pytest.param(
        make_header(version=1), "is GGUF of version 1, but 2 and 3 are read", id="version"
    ),
    pytest.param(make_header(tensors=HUGE), f"has {HUGE} tensors, but at most", id="tensors"),
    pytest.param(make_header(keys=HUGE), f"has {HUGE} metadata keys, but at most", id="keys"),
    pytest.param(
        make_header(encode_text(b"k", HUGE), keys=1), f"a text has {HUGE} bytes", id="key length"
    ),
    pytest.param(
        make_header(encode_text(b"k"), struct.pack("<I", 8), encode_text(b"", HUGE), keys=1),
        f"a text has {HUGE} bytes, but at most",
        id="text length",
    ),
    pytest.param(
        make_header(encode_text(b"k"), struct.pack("<IIQ", 9, 4, HUGE), keys=1),
        f"has {HUGE} elements in k, but at most",
        id="array length",
    ),
    pytest.param(
        make_header(encode_text(b"k"), struct.pack("<IIQ", 9, 10, 1 << 22), keys=1),
        "ends in the middle of its header",
        id="array beyond the end",
    ),
    pytest.param(
        make_header(encode_text(b"k"), struct.pack("<IIQ", 9, 9, 1), keys=1),
        "is an array of the unknown type 9",
        id="array of arrays",
    ),
    pytest.param(
        make_header(encode_text(b"k"), struct.pack("<I", 77), keys=1),
        "unknown type 77",
        id="type of a value",
    ),
    pytest.param(
        make_header(*[encode_text(b"k") + struct.pack("<II", 4, 1)] * 2, keys=2),
        "has 'k' twice",
        id="key twice",
    ),
    pytest.param(
        make_header(describe_tensor(b"a", (32,), 0, 0), tensors=1),
        "ends at byte",
        id="tensor behind the file",
    ),
    pytest.param(
        make_header(describe_tensor(b"a", (HUGE, HUGE), 0, 0), tensors=1),
        "ends at byte",
        id="sizes that lie",
    ),
    pytest.param(
        make_header(
            describe_tensor(b"a", (4,), 0, 0),
            describe_tensor(b"b", (4,), 0, 8),
            bytes(200),
            tensors=2,
        ),
        "tensors 'a' and 'b' overlap",
        id="overlap",
    ),
    pytest.param(
        make_header(
            describe_tensor(b"a", (4,), 0, 0),
            describe_tensor(b"a", (4,), 0, 16),
            bytes(200),
            tensors=2,
        ),
        "'a' is described twice",
        id="tensor twice",
    ),
    pytest.param(
        make_header(describe_tensor(b"a", (4,), 199, 0), bytes(200), tensors=1),
        "unknown type 199",
        id="no type",
    ),
    pytest.param(
        make_header(describe_tensor(b"a", (33,), 2, 0), bytes(200), tensors=1),
        "no multiple of 32",
        id="part of a block",
    ),
    pytest.param(
        make_header(describe_tensor(b"a", (), 0, 0), tensors=1),
        "has 0 dimensions",
        id="no dimension",
    ),
    pytest.param(
        make_header(describe_tensor(b"a", (0,), 0, 0), tensors=1), "has the shape", id="empty"
    ),
]


@pytest.mark.parametrize(("content", "why"), LIES)
def test_a_file_that_lies_is_refused_by_name(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "lies.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=f"lies.gguf: .*{why}"):
        GgufFile.read(path)
    with pytest.raises(folders.ModelFolderError, match=why):
        resolve_source(str(path), Purpose.TARGET)


def write_small_model(path: Path, **tensors: tuple[NDArray[Any], Any]) -> Path:
    """Write a model of the Llama family with one layer, some of whose matrices are quantised."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    add_tokens(writer, ALPHABET)
    rng = np.random.default_rng(0)
    sizes = {"token_embd.weight": (len(ALPHABET), 64), "output_norm.weight": (64,)}
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        sizes[f"blk.0.{part}.weight"] = (64, 64)
    sizes |= {"blk.0.attn_norm.weight": (64,), "blk.0.ffn_norm.weight": (64,)}
    for name, shape in sizes.items():
        key = name.replace(".", "_")
        if key in tensors:
            raw, kind = tensors[key]
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    return finish(writer, path)


@pytest.mark.parametrize(("kind", "bits"), [(Q.Q4_0, 4), (Q.Q8_0, 8)], ids=["Q4_0", "Q8_0"])
def test_blocks_are_repacked_without_loss(tmp_path: Path, kind: Any, bits: int) -> None:
    values = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, kind)
    folder = convert(
        write_small_model(tmp_path / "a.gguf", blk_0_ffn_up_weight=(raw, kind)), tmp_path
    )
    found = read_tensor(folder, "model.layers.0.mlp.up_proj.weight")
    assert np.array_equal(found, gguf.quants.dequantize(raw, kind))
    packed, scales = quantize_matrix(found, bits)
    if bits == 4:
        integers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(64, 2, 32)
    else:
        integers = packed
    again = (integers.astype(np.float32) - (1 << (bits - 1))) * scales[..., None]
    assert np.allclose(again.reshape(64, 64), found, rtol=2e-6, atol=0)


@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.F16, Q.BF16], ids=lambda one: one.name)
def test_other_types_are_decoded(tmp_path: Path, kind: Any) -> None:
    values = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, kind)
    folder = convert(
        write_small_model(tmp_path / "a.gguf", blk_0_ffn_up_weight=(raw, kind)), tmp_path
    )
    found = read_tensor(folder, "model.layers.0.mlp.up_proj.weight")
    assert np.array_equal(found, gguf.quants.dequantize(raw, kind))


def read_tensor(folder: Path, name: str) -> NDArray[Any]:
    from safetensors.numpy import load_file

    found: NDArray[Any] = load_file(folder / "model.safetensors")[name]
    return found


def test_a_split_model_is_one(tmp_path: Path) -> None:
    whole = GgufFile.read(write_small_model(tmp_path / "whole.gguf"))
    for number, names in enumerate([list(whole.tensors)[:4], list(whole.tensors)[4:]], start=1):
        writer = gguf.GGUFWriter(str(tmp_path / "part"), "llama")
        if number == 1:
            for key in ("context_length", "embedding_length", "block_count", "head_count"):
                full = f"llama.attention.{key}" if key == "head_count" else f"llama.{key}"
                writer.add_uint32(full, whole.metadata[full])
            writer.add_feed_forward_length(64)
            add_tokens(writer, ALPHABET)
        for name in names:
            from edgespec.models.gguf_file import values_of

            writer.add_tensor(name, np.array(values_of(whole.tensors[name])))
        finish(writer, tmp_path / "part")
        (tmp_path / "part").rename(tmp_path / f"m-{number:05d}-of-00002.gguf")
    first, second = sorted(tmp_path.glob("m-*.gguf"))
    assert GgufFile.read(first).tensors.keys() == whole.tensors.keys()
    assert convert(first, tmp_path).name == "m"
    second.unlink()
    with pytest.raises(GgufError, match=r"the part m-00002-of-00002\.gguf is missing"):
        GgufFile.read(first)


def test_an_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    path = finish(writer, tmp_path / "a.gguf")
    with pytest.raises(
        GgufError, match="architecture 'mamba' is not read from GGUF; read are gemma"
    ):
        convert(path, tmp_path)


TEXTS = [
    *SENTENCES,
    "  two  spaces\n\n\ttab 12345 ½",
    "naïve 日本 🎉 <|user|>hi<|end|>",
    "",
    "\0\x7f",
]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o"])
def test_a_byte_level_tokenizer_gives_the_same_ids(tmp_path: Path, pre: str) -> None:
    source = write_tokenizer(tmp_path) / "tokenizer.json"
    data = json.loads(source.read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    ids = dict(sorted((number, one) for one, number in data["model"]["vocab"].items()))
    special = {one["id"]: one["content"] for one in data["added_tokens"]}
    merges = [one if isinstance(one, str) else " ".join(one) for one in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([special.get(number, one) for number, one in ids.items()])
    types = [gguf.TokenType.CONTROL if number in special else 1 for number in ids]
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_tensor("x", np.zeros(4, np.float32))
    path = finish(writer, tmp_path / "a.gguf")
    from edgespec.models.gguf_tokenizer import tokenizer_of

    found = tokenizer_of(GgufFile.read(path))
    expected = tokenizers.Tokenizer.from_file(str(source))
    if pre != "gpt-2":
        # The pattern cuts differently, so ids may differ, but no text may be lost.
        for one in TEXTS:
            assert found.decode(found.encode(one).ids, skip_special_tokens=False) == one
        return
    for one in TEXTS:
        assert found.encode(one).ids == expected.encode(one).ids


O200K_CUTS = [
    ("It's HelloWorld's", ["It's", " Hello", "World's"]),
    ("a1234567", ["a", "123", "456", "7"]),
    ("x  = {'/a/b'}\n\n", ["x", " ", " =", " {'/", "a", "/b", "'}\n\n"]),
    ("日本語 Текст", ["日本語", " Текст"]),
]


@pytest.mark.parametrize(("text", "cuts"), O200K_CUTS, ids=["words", "digits", "code", "scripts"])
def test_the_pattern_of_o200k_cuts_as_its_makers_say(
    tmp_path: Path, text: str, cuts: list[str]
) -> None:
    """Contractions stay with their word, a change of case begins one, and digits come in threes."""
    from edgespec.models.gguf_tokenizer import tokenizer_of

    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "gpt-oss")
    add_tokens(writer, ALPHABET, pre="gpt-4o")
    writer.add_tensor("x", np.zeros(4, np.float32))
    tokenizer = tokenizer_of(GgufFile.read(finish(writer, tmp_path / "a.gguf")))
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == cuts


@pytest.mark.parametrize(
    ("special", "ends"),
    [
        (["<|end|>", "<|return|>", "<|call|>", "<|start|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|endoftext|>"], ["<|endoftext|>", "<|end|>"]),
    ],
    ids=["gpt-oss", "phi-3"],
)
def test_the_end_of_a_message_ends_no_output_of_gpt_oss(
    tmp_path: Path, special: list[str], ends: list[str]
) -> None:
    """In harmony an output has several messages: the thought ends with ``<|end|>``."""
    from edgespec.models.gguf_tokenizer import end_tokens_of

    tokens = [*ALPHABET, *special]
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "gpt-oss")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(ALPHABET) + [3] * len(special))
    writer.add_eos_token_id(tokens.index(ends[0]))
    writer.add_tensor("x", np.zeros(4, np.float32))
    file = GgufFile.read(finish(writer, tmp_path / "a.gguf"))
    assert [tokens[token] for token in end_tokens_of(file)] == ends


def write_sentence_piece(
    path: Path,
    words: Sequence[str],
    *,
    scores: Sequence[float] = (),
    architecture: str = "llama",
    defined: Sequence[str] = (),
) -> Any:
    """Write a vocabulary of SentencePiece and return the tokenizer that is made of it. Without
    ``scores`` words score higher the earlier they come. The ``defined`` tokens come first,
    with the score that llama.cpp's converter writes for tokens of users."""
    from edgespec.models.gguf_tokenizer import tokenizer_of

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{code:02X}>" for code in range(256))]
    scored = scores or [-float(rank) for rank in range(len(words))]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*pieces, *defined, *words])
    writer.add_token_scores([0.0] * len(pieces) + [-1000.0] * len(defined) + [*scored])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[4] * len(defined), *[1] * len(words)])
    writer.add_add_space_prefix(architecture == "llama")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_tensor("x", np.zeros(4, np.float32))
    return tokenizer_of(GgufFile.read(finish(writer, path)))


def test_a_sentence_piece_tokenizer_merges_by_score(tmp_path: Path) -> None:
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc"]
    found = write_sentence_piece(tmp_path / "a.gguf", words)
    # "ab" scores higher than "bc", and "▁ab" higher than "abc".
    assert found.encode("abc").tokens == ["<s>", "▁ab", "c"]
    assert found.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert found.decode(found.encode("a b cab é").ids) == "a b cab é"


@pytest.mark.parametrize(
    ("architecture", "merged"), [("llama", ["a", "bc"]), ("gemma3", ["ab", "c"])]
)
def test_gemma_merges_by_id_whatever_the_scores(
    tmp_path: Path, architecture: str, merged: list[str]
) -> None:
    words, scores = ["▁", "a", "b", "c", "ab", "bc"], [-9.0, -9.0, -9.0, -9.0, -8.0, -7.0]
    found = write_sentence_piece(
        tmp_path / "a.gguf", words, scores=scores, architecture=architecture
    )
    assert [token for token in found.encode("abc").tokens if token not in ("<s>", "▁")] == merged


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_runs_of_spaces_that_users_defined_stay_whole(tmp_path: Path, architecture: str) -> None:
    """SentencePiece matches what users have defined before it merges, so the last space of an
    indentation does not go to the word behind it. The file writes these runs with plain spaces."""
    words, runs = ["▁", "a", "b", "▁a", "▁b"], ["  ", "   ", "    "]
    found = write_sentence_piece(
        tmp_path / "a.gguf", words, architecture=architecture, defined=runs
    )
    # The llama family puts a space before each text.
    first = "▁b" if architecture == "llama" else "b"
    assert found.encode("b    a b").tokens == ["<s>", first, "▁▁▁▁", "a", "▁b"]
    assert found.encode("b  a").tokens == ["<s>", first, "▁▁", "a"]
    assert found.decode(found.encode("b    a b  b").ids) == "b    a b  b"


def write_manifest(store: Path, name: str, layers: object) -> Path:
    path = store / "manifests" / "registry.ollama.ai" / "library" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"layers": layers}), encoding="utf-8")
    return path


def test_a_model_of_ollama_is_found_in_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = "sha256:" + "a" * 64
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest}
    write_manifest(tmp_path, "tiny/latest", [layer, {"mediaType": "other", "digest": "x"}])
    (tmp_path / "blobs").mkdir()
    blob = write_small_model(tmp_path / "blobs" / digest.replace(":", "-"))
    assert ollama_file("ollama:tiny") == blob
    source = resolve_source("ollama:tiny:latest", Purpose.TARGET)
    assert (source.kind, source.name) == (SourceKind.CHECKPOINT, "tiny-latest")
    with pytest.raises(GgufError, match="is not in Ollama's store; there are tiny:latest"):
        ollama_file("ollama:big")
    with pytest.raises(GgufError, match="must be like ollama:"):
        ollama_file("ollama:../../etc/passwd")
    blob.unlink()
    with pytest.raises(GgufError, match="no such file, though"):
        ollama_file("ollama:tiny")


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([], id="no model"),
        pytest.param(
            [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../x"}], id="a path"
        ),
        pytest.param("text", id="no list"),
    ],
)
def test_a_manifest_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: object
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    write_manifest(tmp_path, "tiny/latest", layers)
    with pytest.raises(GgufError, match=r"manifest|names . models"):
        ollama_file("ollama:tiny")


FILES = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-bf16.gguf", "mmproj-f16.gguf"]
SPLIT = ["big-Q4_0-00002-of-00002.gguf", "big-Q4_0-00001-of-00002.gguf"]


@pytest.mark.parametrize(
    ("files", "wanted", "chosen"),
    [
        pytest.param(FILES, "", ["m-Q4_K_M.gguf"], id="usual"),
        pytest.param(FILES, "q8_0", ["m-Q8_0.gguf"], id="lower case"),
        pytest.param(FILES, "BF16", ["m-bf16.gguf"], id="16 bits"),
        pytest.param(SPLIT, "Q4_0", sorted(SPLIT), id="split"),
        pytest.param(["only.gguf"], "", ["only.gguf"], id="no type in the name"),
    ],
)
def test_a_type_names_the_files_of_a_repository(
    files: list[str], wanted: str, chosen: list[str]
) -> None:
    assert choose_file("hf.co/a/b", files, wanted) == chosen


def test_a_type_that_a_repository_lacks_is_named_with_those_it_has() -> None:
    with pytest.raises(GgufError, match="has no Q2_K; it has BF16, Q4_K_M, Q8_0"):
        choose_file("hf.co/a/b:Q2_K", FILES, "Q2_K")
    with pytest.raises(GgufError, match="has no GGUF file"):
        choose_file("hf.co/a/b", ["README.md"], "")


def test_a_repository_of_the_hub_is_asked_for_one_file(tmp_path: Path) -> None:
    fetched: list[tuple[str, list[str]]] = []

    def fetch(repository: str, names: Sequence[str]) -> Path:
        fetched.append((repository, list(names)))
        return tmp_path

    list_files: Callable[[str], Sequence[str]] = lambda repository: FILES  # noqa: E731
    assert hub_file("hf.co/a/b:Q8_0", list_files, fetch) == tmp_path / "m-Q8_0.gguf"
    assert fetched == [("a/b", ["m-Q8_0.gguf"])]


def test_a_folder_with_one_file_is_that_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    write_small_model(tmp_path / "models" / "a.gguf")
    assert resolve_source(str(tmp_path / "models"), Purpose.TARGET).name == "a"
    write_small_model(tmp_path / "models" / "b.gguf")
    with pytest.raises(folders.ModelFolderError, match=r"holds 2 GGUF models \(a.gguf, b.gguf\)"):
        resolve_source(str(tmp_path / "models"), Purpose.TARGET)
