"""A draft graph for one token after another becomes one for the rows of a tree.

The attention operator takes a position for each row and a bias on each pair of rows, so a tree
needs no other weights and no other graph: what changes is two more inputs of each attention, and
which rows of the last layer go on to the head. A graph is rewritten when it is loaded, in the wire
format of its protobuf message (a device need not have ``onnx``), so drafts exported by any version
will do.

New inputs: ``position_ids`` int64 [1, T]; ``attention_bias`` [1, 1, T, total], 0 or minus infinity,
of the type the attention computes in; ``leaves`` int64 [L], the rows that ``logits`` [L, V] are of.

Field numbers are those of ``onnx.proto``: ModelProto.graph 7; GraphProto.node 1, initializer 5,
input 11, output 12; NodeProto.input 1, output 2, name 3, op_type 4, attribute 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.core.device.memory import KvType
from edgespec.device.drafters.onnx_nodes import Node, message_fields, node_of

_GRAPH = 7
_NODE, _INITIALIZER, _INPUT, _OUTPUT = 1, 5, 11, 12
_FLOAT, _INT64, _FLOAT16 = 1, 7, 10
_ATTENTION = "GroupQueryAttention"
# Places of an attention's inputs: tables of rotation, positions, bias.
_ROTATION_AT, _POSITIONS_AT, _BIAS_AT = 7, 9, 10
_POSITIONS, _BIAS, _LEAVES, _AXIS = "position_ids", "attention_bias", "leaves", "leaves.axis"


class TreeGraphError(ValueError):
    """This graph cannot take the rows of a tree; the message says why."""


def with_tree_inputs(model: bytes, vocabulary_size: int, kv_type: KvType) -> bytes:
    """``model``, a draft graph of ours, rewritten. Raises ``TreeGraphError``."""
    return b"".join(_model(memoryview(model), vocabulary_size, kv_type))


def _model(view: memoryview, vocabulary_size: int, kv_type: KvType) -> Iterator[bytes]:
    for number, raw, value in _raw_fields(view):
        if number == _GRAPH:
            yield _message(_GRAPH, b"".join(_graph(value, vocabulary_size, kv_type)))
        else:
            yield bytes(raw)


def _graph(view: memoryview, vocabulary_size: int, kv_type: KvType) -> Iterator[bytes]:
    gathers = 0
    for number, raw, value in _raw_fields(view):
        node = node_of(value) if number == _NODE else None
        if node is not None and node.kind == _ATTENTION:
            yield _message(_NODE, _attention(node, value))
        elif node is not None and node.kind == "Gather" and node.inputs[1] == "last":
            gathers += 1
            yield from _gather_leaves(node)
        elif number == _OUTPUT and _name(value) == "logits":
            yield _port(_OUTPUT, "logits", _FLOAT, (_LEAVES, vocabulary_size))
        else:
            yield bytes(raw)
    if not gathers:
        raise TreeGraphError("the graph computes no row of its own for the last token")
    bias = _FLOAT16 if kv_type is KvType.FLOAT16 else _FLOAT
    yield _port(_INPUT, _POSITIONS, _INT64, (1, "length"))
    yield _port(_INPUT, _BIAS, bias, (1, 1, "length", "total"))
    yield _port(_INPUT, _LEAVES, _INT64, (_LEAVES,))
    # TensorProto: dims 1, data_type 2, int64_data 7, name 8
    axis = _integer(1, 1) + _integer(2, _INT64) + _integer(7, 0) + _string(8, _AXIS)
    yield _message(_INITIALIZER, axis)


def _attention(node: Node, value: memoryview) -> bytes:
    if node.integers.get("local_window_size", -1) > 0:
        raise TreeGraphError("its attention slides over the rows, whichever branch they are of")
    inputs = list(node.inputs) + [""] * (_BIAS_AT + 1 - len(node.inputs))
    if inputs[_POSITIONS_AT] or inputs[_BIAS_AT]:
        raise TreeGraphError("its attention has positions or a bias already")
    if inputs[_ROTATION_AT]:
        inputs[_POSITIONS_AT] = _POSITIONS
    inputs[_BIAS_AT] = _BIAS
    rest = b"".join(bytes(raw) for number, raw, _ in _raw_fields(value) if number != 1)
    return b"".join(_string(1, name) for name in inputs) + rest


def _gather_leaves(node: Node) -> Iterator[bytes]:
    """[1, T, H] -> [T, H] -> [L, H]: with one leaf the shape that it had before."""
    flat = f"{node.outputs[0]}.rows"
    yield _message(_NODE, _node("Squeeze", (node.inputs[0], _AXIS), flat))
    yield _message(_NODE, _node("Gather", (flat, _LEAVES), node.outputs[0]))


def _node(kind: str, inputs: Sequence[str], output: str) -> bytes:
    names = b"".join(_string(1, name) for name in inputs)
    return names + _string(2, output) + _string(3, output) + _string(4, kind)


def _port(number: int, name: str, kind: int, shape: Sequence[int | str]) -> bytes:
    """ValueInfoProto: name 1, type 2 / tensor_type 1 / elem_type 1, shape 2 / dim 1 / dim_value 1,
    dim_param 2."""
    dims = b"".join(
        _message(1, _string(2, size) if isinstance(size, str) else _integer(1, size))
        for size in shape
    )
    tensor = _integer(1, kind) + _message(2, dims)
    return _message(number, _string(1, name) + _message(2, _message(1, tensor)))


def _name(value: memoryview) -> str:
    """Of a ValueInfoProto."""
    for number, _, part in _raw_fields(value):
        if number == 1:
            return bytes(part).decode("utf-8", errors="replace")
    return ""


def _raw_fields(view: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
    """(field number, the field as it stands, its value)."""
    at = 0
    for number, start, stop in message_fields(view, 0, len(view)):
        yield number, view[at:stop], view[start:stop]
        at = stop


def _message(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _string(number: int, text: str) -> bytes:
    return _message(number, text.encode())


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
