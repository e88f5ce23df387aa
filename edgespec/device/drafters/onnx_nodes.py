"""The nodes of an ONNX file, read without the ``onnx`` library and without the weights.

A device has onnxruntime, which tells a graph's inputs and outputs but not its operators. An ONNX
file is a protobuf message, so the few fields wanted here are walked in the wire format (varints and
length-delimited fields); everything else, weights above all, is stepped over in a memory map.

Field numbers are those of ``onnx.proto``: ModelProto.graph 7; GraphProto.node 1; NodeProto.input 1,
output 2, op_type 4, attribute 5; AttributeProto.name 1, i 3, g 6. Nodes inside the branches of an
``If`` are read as well.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgespec.device.drafters.manifest import DraftModelError

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
