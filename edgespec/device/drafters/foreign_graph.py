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

import mmap
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from edgespec.device.drafters.manifest import DraftModelError

# --------------------------------------------------------------------------------------------
# The nodes of an ONNX file, read without the ``onnx`` library and without the weights.
#
# A device has onnxruntime, which tells a graph's inputs and outputs but not its operators. An ONNX
# file is a protobuf message, so the few fields wanted here are walked in the wire format (varints
# and length-delimited fields); everything else, weights above all, is stepped over in a memory map.
#
# Field numbers are those of ``onnx.proto``: ModelProto.graph 7; GraphProto.node 1; NodeProto.input
# 1, output 2, op_type 4, attribute 5; AttributeProto.name 1, i 3, g 6. Nodes inside the branches of
# an ``If`` are read as well.


_GRAPH, _NODE = 7, 1

_INPUT, _OUTPUT, _KIND, _ATTRIBUTE = 1, 2, 4, 5

_ATTRIBUTE_NAME, _ATTRIBUTE_INTEGER, _ATTRIBUTE_GRAPH = 1, 3, 6

_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class Node:
    """One operator: what it reads and writes, by name, and its integer attributes."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    integers: dict[str, int]
    nested: bool
    """Is it inside a branch of another node?"""


def read_nodes(path: Path) -> tuple[Node, ...]:
    """All nodes of the main graph and of its branches, in order of the file. Raises
    ``DraftModelError`` naming a file that is no ONNX model."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
        ):
            return tuple(_nodes_of_model(view))
    except FileNotFoundError as error:
        raise DraftModelError(f"{path}: no such file") from error
    except (OSError, ValueError, IndexError) as error:
        raise DraftModelError(f"{path}: not a readable ONNX file: {error}") from error


def node_of(message: memoryview) -> Node:
    """What a NodeProto says, without the nodes in its branches."""
    return next(_node(message, 0, len(message), 0))


def _nodes_of_model(view: memoryview) -> Iterator[Node]:
    for number, start, end in message_fields(view, 0, len(view)):
        if number == _GRAPH:
            yield from _nodes_of_graph(view, start, end, 0)


def _nodes_of_graph(view: memoryview, start: int, end: int, depth: int) -> Iterator[Node]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"branches are nested more than {_MAX_DEPTH} deep")
    for number, first, last in message_fields(view, start, end):
        if number == _NODE:
            yield from _node(view, first, last, depth)


def _node(view: memoryview, start: int, end: int, depth: int) -> Iterator[Node]:
    inputs: list[str] = []
    outputs: list[str] = []
    integers: dict[str, int] = {}
    branches: list[tuple[int, int]] = []
    kind = ""
    for number, first, last in message_fields(view, start, end):
        if number == _INPUT:
            inputs.append(_text(view, first, last))
        elif number == _OUTPUT:
            outputs.append(_text(view, first, last))
        elif number == _KIND:
            kind = _text(view, first, last)
        elif number == _ATTRIBUTE:
            branches += _attribute(view, first, last, integers)
    yield Node(kind, tuple(inputs), tuple(outputs), integers, depth > 0)
    for first, last in branches:
        yield from _nodes_of_graph(view, first, last, depth + 1)


def _attribute(
    view: memoryview, start: int, end: int, integers: dict[str, int]
) -> list[tuple[int, int]]:
    """Adds an integer to ``integers``; returns where a graph lies, if the attribute is one."""
    name, branches = "", []
    value: int | None = None
    for number, first, last in message_fields(view, start, end):
        if number == _ATTRIBUTE_NAME:
            name = _text(view, first, last)
        elif number == _ATTRIBUTE_INTEGER:
            value = _varint(view, first)[0]
        elif number == _ATTRIBUTE_GRAPH:
            branches.append((first, last))
    if value is not None:
        integers[name] = value - (1 << 64) if value >> 63 else value
    return branches


def message_fields(view: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, where its value starts, where it ends) of one protobuf message."""
    at = start
    while at < end:
        key, at = _varint(view, at)
        match key & 7:
            case 0:
                _, stop = _varint(view, at)
                first = at
            case 1:
                first, stop = at, at + 8
            case 2:
                length, first = _varint(view, at)
                stop = first + length
            case 5:
                first, stop = at, at + 4
            case other:
                raise ValueError(f"wire type {other} at byte {at}")
        if stop > end:
            raise ValueError(f"a field at byte {at} ends behind its message")
        yield key >> 3, first, stop
        at = stop


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """(the value, where the next one starts)."""
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number at byte {at} is longer than 64 bits")


def _text(view: memoryview, start: int, end: int) -> str:
    return bytes(view[start:end]).decode("utf-8", errors="replace")


_SHARING = "GroupQueryAttention"

# Its inputs 3 and 4 are past key and value, its outputs 1 and 2 the present ones.
_SHARED_PLACES = {"key": (3, 1), "value": (4, 2)}
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


@dataclass(frozen=True, slots=True)
class ForeignGraph:
    """A decoder with a cache, ready to be bound."""

    roles: dict[Role, Port]
    caches: tuple[CacheTensor, ...]
    logits: Port
    in_place: bool
    """May past and present be one buffer, so that a rollback is a smaller number?"""
    in_place_reason: str

    @property
    def layers(self) -> int:
        return len(self.caches) // 2

    @property
    def vocabulary_size(self) -> int:
        """0 where the graph does not say it."""
        size = self.logits.shape[-1]
        return size if isinstance(size, int) else 0

    @property
    def cache_bytes_per_token(self) -> int:
        return sum(one.row_elements * _size(one.dtype) for one in self.caches)


@dataclass(frozen=True, slots=True)
class HeadHint:
    """Sizes from a config, for graphs that leave them open; 0: not known."""

    heads: int = 0
    head_size: int = 0


def read_graph(
    path: Path,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    nodes: Sequence[Node],
    hint: HeadHint | None = None,
) -> ForeignGraph:
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
    in_place, reason = _shares_buffers(path, caches, nodes)
    return ForeignGraph(roles, caches, _logits(path, outputs), in_place, reason)


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
    if past.dtype not in _FLOATS or present.dtype != past.dtype:
        raise DraftModelError(f"{what}, but must be one of {_FLOATS}, as must {present.name!r}")
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


def _shares_buffers(
    path: Path, caches: Sequence[CacheTensor], nodes: Sequence[Node]
) -> tuple[bool, str]:
    """Does every past tensor go into grouped-query attention and nowhere else? That operator
    appends in place, where past and present are one buffer (onnxruntime's ContribOperators.md),
    and is told the cached length apart from the buffer's."""
    readers: dict[str, list[tuple[Node, int]]] = {}
    for node in nodes:
        for index, name in enumerate(node.inputs):
            readers.setdefault(name, []).append((node, index))
        if node.kind == _SHARING and node.integers.get("sliding_window_cache"):
            raise DraftModelError(
                f"{path}: {_SHARING} keeps a window of the keys only (sliding_window_cache), and"
                " what it forgot cannot be rolled back to; export with windowed_kv_cache=false"
            )
    for cache in caches:
        came_in, goes_out = _SHARED_PLACES[cache.part]
        if cache.tokens_first:
            return False, f"{cache.past} has its tokens before its heads"
        for node, index in readers.get(cache.past, ()):
            if node.kind != _SHARING or index != came_in or node.nested:
                return False, f"{cache.past} is read by {node.kind}"
            if node.outputs[goes_out : goes_out + 1] != (cache.present,):
                return False, f"{cache.present} does not come from the {_SHARING} of its past"
        if cache.past not in readers:
            return False, f"{cache.past} is read in a branch"
    return True, f"every key and value goes through {_SHARING} alone"


def _size(dtype: str) -> int:
    return 2 if dtype == "float16" else 4
