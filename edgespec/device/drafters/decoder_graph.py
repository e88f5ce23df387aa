"""What a decoder graph that others exported takes and gives, found in the graph itself.

Exporters agree on the idea and differ in the details: names and layout of keys and values, how the
cached length is said (a mask, positions, two lengths, the shape of the cache), element types, how
many rows of logits come out. ``read_graph`` assigns every input a ``Role`` and pairs every past
tensor with its present one; whatever has no role is refused by name.

Known signatures: Optimum ``text-generation-with-past`` and its merged decoders
(``use_cache_branch``), Transformers.js folders, onnxruntime-genai's model builder, and graphs with
``seqlens_k`` and ``total_sequence_length``, such as this project's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from edgespec.device.drafters.manifest import DraftModelError

_PART = re.compile(r"key(?!_values)|value(?!s[._])")
MAX_LAYERS = 1024


class Role(Enum):
    """What an input that is no key or value says."""

    IDS = "input_ids"
    MASK = "attention_mask"
    POSITIONS = "position_ids"
    CACHE_POSITIONS = "cache_position"
    CACHED = "use_cache_branch"
    ROWS = "num_logits_to_keep"
    LAST_INDEX = "seqlens_k"
    LENGTH = "total_sequence_length"


_ALIASES = {role.value: role for role in Role} | {"logits_to_keep": Role.ROWS}
_INTEGERS = ("int64", "int32")
_FLOATS = ("float32", "float16")
_CACHED = (*_FLOATS, "int8")
_BYTES = {"float32": 4, "float16": 2, "int8": 1}
_TYPES = {
    Role.IDS: (_INTEGERS, (2,)),
    Role.MASK: ((*_INTEGERS, *_FLOATS, "bool"), (2,)),
    Role.POSITIONS: (_INTEGERS, (2,)),
    Role.CACHE_POSITIONS: (_INTEGERS, (1,)),
    Role.CACHED: (("bool",), (1,)),
    Role.ROWS: (_INTEGERS, (0, 1)),
    Role.LAST_INDEX: (_INTEGERS, (1, 2)),
    Role.LENGTH: (_INTEGERS, (0, 1)),
}


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output as the runtime describes it; a dimension that is not fixed is a name."""

    name: str
    dtype: str
    """numpy's name of the element type, or the runtime's own where numpy has none."""
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """Keys or values of one layer, shaped [1, heads, tokens, head size] or
    [1, tokens, heads, head size]."""

    past: str
    present: str
    part: str
    """``key`` or ``value``."""
    dtype: str
    heads: int
    head_size: int
    tokens_first: bool
    """Is the axis of tokens before that of heads?"""

    def shape(self, length: int) -> tuple[int, int, int, int]:
        if self.tokens_first:
            return 1, length, self.heads, self.head_size
        return 1, self.heads, length, self.head_size

    @property
    def row_elements(self) -> int:
        return self.heads * self.head_size

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return self.row_elements * _BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """A decoder with a cache, ready to be bound; ``caches`` layer by layer keys, then values."""

    roles: dict[Role, Port]
    caches: tuple[CacheTensor, ...]
    logits: Port
    one_row: bool = False
    """Is it known that there are float32 logits [1, V] of the last token alone?"""


@dataclass(frozen=True, slots=True)
class HeadHint:
    """Sizes from a config, for graphs that leave them open; 0: not known."""

    heads: int = 0
    head_size: int = 0


def read_graph(
    path: Path,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    hint: HeadHint | None = None,
) -> DecoderGraph:
    """Raises ``DraftModelError`` naming the file, the input or output and what was expected."""
    roles: dict[Role, Port] = {}
    pasts: dict[tuple[int, str], Port] = {}
    for port in inputs:
        role = _ALIASES.get(port.name)
        place = None if role else _place(port.name)
        if role:
            roles[role] = _checked(path, role, port)
        elif place:
            pasts[place] = port
        else:
            raise _unknown(path, port)
    if Role.IDS not in roles:
        raise DraftModelError(
            f"{path}: input 'input_ids' is missing; the graph takes {[p.name for p in inputs]}"
        )
    caches = _caches(path, pasts, outputs, hint or HeadHint())
    return DecoderGraph(roles, caches, _logits(path, outputs))


def _place(name: str) -> tuple[int, str] | None:
    """(layer, key or value) of a cache tensor's name: the layer is its only number."""
    numbers = re.findall(r"\d+", name)
    parts = _PART.findall(name)
    foreign = not name.startswith(("past", "present")) or ".encoder." in name
    if foreign or len(numbers) != 1 or len(parts) != 1:
        return None
    return int(numbers[0]), parts[0]


def _unknown(path: Path, port: Port) -> DraftModelError:
    known = ", ".join(role.value for role in Role)
    reason = ""
    if "inputs_embeds" in port.name:
        reason = "; it is a part of a model in several files, of which another makes embeddings"
    elif any(word in port.name for word in ("conv", "recurrent", "state", "ssm")):
        reason = "; a state that is no key or value cannot be rolled back"
    elif "encoder" in port.name:
        reason = "; an encoder's output is needed, but a draft has none"
    return DraftModelError(
        f"{path}: input {port.name!r} ({port.dtype} {list(port.shape)}) is not known{reason}."
        f" Expected are {known} and past_key_values.N.key and .value of every layer N"
    )


def _checked(path: Path, role: Role, port: Port) -> Port:
    types, ranks = _TYPES[role]
    if port.dtype not in types or len(port.shape) not in ranks:
        raise DraftModelError(
            f"{path}: input {port.name!r} is {port.dtype} of rank {len(port.shape)}"
            f" {list(port.shape)}, but must be one of {types} of rank"
            f" {' or '.join(map(str, ranks))}"
        )
    return port


def _logits(path: Path, outputs: Sequence[Port]) -> Port:
    found = next((port for port in outputs if port.name == "logits"), None)
    if found is None:
        raise DraftModelError(
            f"{path}: output 'logits' is missing; the graph gives {[p.name for p in outputs]}"
        )
    if found.dtype not in _FLOATS or len(found.shape) not in (2, 3):
        raise DraftModelError(
            f"{path}: output 'logits' is {found.dtype} {list(found.shape)}, but must be one of"
            f" {_FLOATS}, [1, length, vocabulary] or [rows, vocabulary]"
        )
    return found


def _caches(
    path: Path,
    pasts: dict[tuple[int, str], Port],
    outputs: Sequence[Port],
    hint: HeadHint,
) -> tuple[CacheTensor, ...]:
    presents = {
        place: port
        for port in outputs
        if port.name.startswith("present") and (place := _place(port.name))
    }
    if not pasts:
        raise DraftModelError(
            f"{path}: there is no input past_key_values.N.key: the graph keeps nothing between"
            " steps. Export it with a cache (Optimum: --task text-generation-with-past)"
        )
    if len(pasts) > 2 * MAX_LAYERS:
        raise DraftModelError(f"{path}: {len(pasts)} cache inputs, but at most {2 * MAX_LAYERS}")
    layers = {layer for layer, _ in pasts}
    expected = {(layer, part) for layer in layers for part in ("key", "value")}
    if missing := sorted(expected - set(pasts)):
        raise DraftModelError(f"{path}: inputs are missing: past {_words(missing)}")
    if missing := sorted(expected - set(presents)):
        raise DraftModelError(f"{path}: outputs are missing: present {_words(missing)}")
    return tuple(
        _cache(path, part, pasts[layer, part], presents[layer, part], hint)
        for layer, part in sorted(expected)
    )


def _words(places: Iterable[tuple[int, str]]) -> str:
    listed = [f"{part} of layer {layer}" for layer, part in places]
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _cache(path: Path, part: str, past: Port, present: Port, hint: HeadHint) -> CacheTensor:
    what = f"{path}: input {past.name!r} is {past.dtype} {list(past.shape)}"
    if past.dtype not in _CACHED or present.dtype != past.dtype:
        raise DraftModelError(f"{what}, but must be one of {_CACHED}, as must {present.name!r}")
    if len(past.shape) != 4:
        raise DraftModelError(
            f"{what}, but must be [1, heads, length, head size] or [1, length, heads, head size]"
        )
    _, second, third, last = past.shape
    tokens_first = _is_length(second) and not _is_length(third)
    length, heads = (second, third) if tokens_first else (third, second)
    if isinstance(length, int) and length > 0:
        raise DraftModelError(f"{what}: a cache of a fixed length of {length} is not supported")
    heads = heads if isinstance(heads, int) and heads > 0 else hint.heads
    size = last if isinstance(last, int) and last > 0 else hint.head_size
    if heads < 1 or size < 1:
        raise DraftModelError(
            f"{what} and leaves {'heads' if heads < 1 else 'head size'} open; a config.json or"
            " genai_config.json beside it must say num_key_value_heads and head_dim"
        )
    return CacheTensor(past.name, present.name, part, past.dtype, heads, size, tokens_first)


def _is_length(dimension: int | str | None) -> bool:
    """Heads may be named as well, so a name counts as a length only if it sounds like one."""
    if isinstance(dimension, int):
        return False
    return dimension is None or not re.search(r"head|kv_num|dim", dimension)
