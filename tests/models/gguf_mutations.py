"""Small valid GGUF files, their mutations, and a judge of what is made of a mutated file.

The seeded test (``test_gguf_mutations.py``) and ``benchmarks/fuzz_gguf.py`` use it. A file may be
converted, or refused by an error that names it. Everything else is a finding.
"""

from __future__ import annotations

import contextlib
import random
import re
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgespec.models.gguf_file import GgufError
from edgespec.models.gguf_folder import folder_of_gguf

MEMORY_BYTES: Final = 512 << 20
"""Memory that one conversion of a small file may take beyond what the process has."""
_EDGES: Final = (0, 1, 2, 31, 32, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_VALUE: Final = re.compile(rb"[a-z0-9_.]{5,80}[\x04-\x06]\0\0\0")
"""A key of the metadata with the type of its value: an integer or a float of 4 bytes."""
_TENSOR: Final = re.compile(rb"[a-z0-9_.]{5,80}\.weight")
_LARGE_EDGES: Final = (1 << 40, (1 << 60) - 1, 1 << 60, 1 << 63, (1 << 64) - 1)


def write_models(folder: Path) -> list[Path]:
    """Write one small valid model for each kind of content: a byte-level tokenizer with several
    types of blocks, a tokenizer of SentencePiece, and experts. Return their files."""
    return [
        _write(folder / "bytes.gguf", "llama", _add_byte_level, "Q4_0 Q8_0 Q5_1 F16 BF16".split()),
        _write(folder / "pieces.gguf", "gemma3", _add_sentence_piece, ["Q4_1", "F32"]),
        _write(folder / "experts.gguf", "qwen3moe", _add_byte_level, ["Q8_0", "MXFP4"]),
    ]


def _add_byte_level(writer: Any, tokens: list[str]) -> None:
    import gguf

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(3)
    writer.add_chat_template("{{ messages[0].content }}")


def _add_sentence_piece(writer: Any, tokens: list[str]) -> None:
    import gguf

    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds[:2] = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(0)


def _write(
    path: Path,
    architecture: str,
    add_tokenizer: Callable[[Any, list[str]], None],
    types: list[str],
) -> Path:
    import gguf

    hidden, words = 64, ["a", "b", "c", "ab", "abc", "▁", *(f"t{n}" for n in range(26))]
    writer = gguf.GGUFWriter(str(path), architecture)
    for add, number in (
        (writer.add_context_length, 128),
        (writer.add_embedding_length, hidden),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, hidden),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 2),
        (writer.add_key_length, 32),
        (writer.add_sliding_window, 64),
    ):
        add(number)
    writer.add_layer_norm_rms_eps(1e-5)
    matrices = {"token_embd": (len(words), hidden), "blk.0.ffn_gate": (hidden, hidden)}
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        matrices[f"blk.0.{part}"] = (hidden, hidden)
    experts = {}
    if architecture == "qwen3moe":
        writer.add_expert_count(2)
        writer.add_expert_used_count(1)
        writer.add_expert_feed_forward_length(hidden)
        del matrices["blk.0.ffn_gate"]
        experts = {f"blk.0.ffn_{part}_exps": (2, hidden, hidden) for part in ("up", "down")}
    add_tokenizer(writer, words)
    dice = np.random.default_rng(1)
    for number, (name, shape) in enumerate((matrices | experts).items()):
        kind = gguf.GGMLQuantizationType[types[number % len(types)]]
        values = dice.standard_normal(shape).astype(np.float32)
        if kind.name in ("F32", "F16"):
            writer.add_tensor(
                f"{name}.weight", values.astype(np.float32 if kind.name == "F32" else np.float16)
            )
        elif kind.name == "MXFP4":
            block, size = gguf.GGML_QUANT_SIZES[kind]
            raw = dice.integers(0, 120, (*shape[:-1], shape[-1] // block * size)).astype(np.uint8)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mutate(content: bytes, dice: random.Random) -> bytes:
    """Return ``content`` with one to four damages: bytes, numbers of 4 and 8 bytes at the bounds of
    their fields, pieces that are cut, doubled or exchanged. Most hit the header."""
    damaged = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        # The header takes the first part of such a file.
        most = len(damaged) if dice.random() < 0.15 else min(len(damaged), 3 << 10)
        at = dice.randrange(max(1, most))
        match dice.randrange(12):
            case 0:
                damaged[at : at + 1] = dice.randbytes(1)
            case 1:
                damaged[at : at + 4] = struct.pack("<I", dice.choice(_EDGES))
            case 2:
                damaged[at : at + 8] = struct.pack("<Q", dice.choice((*_EDGES, *_LARGE_EDGES)))
            case 3:
                del damaged[at : at + dice.choice((1, 4, 8, 64))]
            case 4:
                damaged[at:at] = damaged[at : at + dice.choice((1, 4, 8, 64))]
            case 5:
                del damaged[dice.randrange(len(damaged) + 1) :]
            case 6:
                _change_length(damaged, dice)
            case _:
                _change_value(damaged, dice)
        if not damaged:
            break
    return bytes(damaged)


def _change_length(damaged: bytearray, dice: random.Random) -> None:
    """Replace a number of 8 bytes that is below 256, such as the length of a text or a size."""
    found = [
        at for at in range(24, min(len(damaged) - 8, 3 << 10)) if not any(damaged[at + 1 : at + 8])
    ]
    if found:
        at = dice.choice(found)
        damaged[at : at + 8] = struct.pack("<Q", dice.choice((*_EDGES, *_LARGE_EDGES)))


def _change_value(damaged: bytearray, dice: random.Random) -> None:
    """Replace a whole number or a float among the metadata, or a size, the type or the offset of a
    tensor. The structure of the file stays."""
    values = [match.end() for match in _VALUE.finditer(damaged)]
    tensors = [match.end() for match in _TENSOR.finditer(damaged)]
    if values and (dice.random() < 0.6 or not tensors):
        at = dice.choice(values)
        damaged[at : at + 4] = struct.pack("<I", dice.choice(_EDGES) if dice.random() < 0.7 else 33)
    elif tensors:
        at = dice.choice(tensors) + dice.choice((4, 12, 20))
        few = dice.choice((dice.choice(_EDGES), dice.randrange(100), dice.choice(_LARGE_EDGES)))
        damaged[at : at + 8] = struct.pack("<Q", few)


@contextlib.contextmanager
def limited_memory(extra_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """Let this process allocate ``extra_bytes`` more than it has, within this block."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + extra_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(content: bytes, folder: Path) -> tuple[str, str]:
    """Convert a file with this content in ``folder``. Return its kind, ``read``, ``refused`` or
    ``finding``, and the error."""
    path, cache = folder / "m.gguf", folder / "cache"
    path.write_bytes(content)
    shutil.rmtree(cache, ignore_errors=True)
    try:
        folder_of_gguf(path, cache)
    except (GgufError, OSError) as error:
        if str(path) not in str(error):
            return "finding", f"the error does not name the file: {error!r}"
        kind = "refused", str(error)
    except BaseException as error:  # a panic of a library is no ``Exception``
        if isinstance(error, KeyboardInterrupt):
            raise
        return "finding", f"{type(error).__name__}: {error}"
    else:
        return "read", ""
    if any(cache.rglob("*.safetensors")):
        return "finding", f"half a folder is left behind: {kind[1]}"
    return kind
