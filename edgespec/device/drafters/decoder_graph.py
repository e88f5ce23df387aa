"""A session of onnxruntime for a draft, and the inputs and outputs of its graph.

Exporters agree on the idea and differ in the details: names and layout of keys and values, how the
cached length is given (a mask, positions, two lengths, the shape of the cache), element types, and
the number of rows of logits. ``read_graph`` assigns every input a ``Role`` and pairs every past
tensor with its present one. An input without a role is refused by name.

Known signatures: Optimum ``text-generation-with-past`` and its merged decoders
(``use_cache_branch``), Transformers.js folders, onnxruntime-genai's model builder, and graphs with
``seqlens_k`` and ``total_sequence_length``, such as this project's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from edgespec.core.protocol.checks import check_range
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.models.onnx_packages import advise_provider
from edgespec.models.onnx_runtime import ort
from edgespec.operating_system import usable_cores

_PART = re.compile(r"key(?!_values)|value(?!s[._])")
MAX_LAYERS = 1024


class Role(Enum):
    """The meaning of an input that is no key or value."""

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
    """An input or output as the runtime describes it. A dimension that is not fixed is a name."""

    name: str
    dtype: str
    """Element type by its numpy name, or by the runtime's own name if numpy has none."""
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """Keys or values of one layer.

    The shape is [1, heads, tokens, head size] or [1, tokens, heads, head size]."""

    past: str
    present: str
    part: str
    """``key`` or ``value``."""
    dtype: str
    heads: int
    head_size: int
    tokens_first: bool
    """Whether the axis of tokens is before that of heads."""

    def shape(self, length: int) -> tuple[int, int, int, int]:
        if self.tokens_first:
            return 1, length, self.heads, self.head_size
        return 1, self.heads, length, self.head_size

    @property
    def row_elements(self) -> int:
        return self.heads * self.head_size

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.row_elements * _BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """A decoder with a cache, ready to be bound.

    ``caches`` has the keys of the first layer, then its values, then the next layer."""

    roles: dict[Role, Port]
    caches: tuple[CacheTensor, ...]
    logits: Port
    one_row: bool = False
    """Whether the only logits are known to be float32 [1, V], of the last token."""


HeadHint = tuple[int, int]
"""Key-value heads and head size of a config, for graphs that leave them open. 0 if not known."""


def read_graph(path: Path, session: ort.InferenceSession, hint: HeadHint = (0, 0)) -> DecoderGraph:
    """Return the inputs and outputs of a session's graph.

    Raises ``DraftModelError`` naming the file, the input or output and what was expected."""
    inputs, outputs = _read_ports(session.get_inputs()), _read_ports(session.get_outputs())
    roles: dict[Role, Port] = {}
    pasts: dict[tuple[int, str], Port] = {}
    for port in inputs:
        role = _ALIASES.get(port.name)
        place = None if role else _cache_slot(port.name)
        if role:
            roles[role] = _check_input(path, role, port)
        elif place:
            pasts[place] = port
        else:
            raise _unknown_input(path, port)
    if Role.IDS not in roles:
        raise DraftModelError(
            f"{path}: input 'input_ids' is missing; the graph takes {[p.name for p in inputs]}"
        )
    caches = _pair_caches(path, pasts, outputs, hint)
    return DecoderGraph(roles, caches, _find_logits(path, outputs))


def _cache_slot(name: str) -> tuple[int, str] | None:
    """Return (layer, "key" or "value") of a cache tensor's name. The layer is its only number."""
    numbers = re.findall(r"\d+", name)
    parts = _PART.findall(name)
    foreign = not name.startswith(("past", "present")) or ".encoder." in name
    if foreign or len(numbers) != 1 or len(parts) != 1:
        return None
    return int(numbers[0]), parts[0]


def _unknown_input(path: Path, port: Port) -> DraftModelError:
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


def _check_input(path: Path, role: Role, port: Port) -> Port:
    types, ranks = _TYPES[role]
    if port.dtype not in types or len(port.shape) not in ranks:
        raise DraftModelError(
            f"{path}: input {port.name!r} is {port.dtype} of rank {len(port.shape)}"
            f" {list(port.shape)}, but must be one of {types} of rank"
            f" {' or '.join(map(str, ranks))}"
        )
    return port


def _find_logits(path: Path, outputs: Sequence[Port]) -> Port:
    logits = next((port for port in outputs if port.name == "logits"), None)
    if logits is None:
        raise DraftModelError(
            f"{path}: output 'logits' is missing; the graph gives {[p.name for p in outputs]}"
        )
    if logits.dtype not in _FLOATS or len(logits.shape) not in (2, 3):
        raise DraftModelError(
            f"{path}: output 'logits' is {logits.dtype} {list(logits.shape)}, but must be one of"
            f" {_FLOATS}, [1, length, vocabulary] or [rows, vocabulary]"
        )
    return logits


def _pair_caches(
    path: Path, pasts: dict[tuple[int, str], Port], outputs: Sequence[Port], hint: HeadHint
) -> tuple[CacheTensor, ...]:
    presents = {
        place: port
        for port in outputs
        if port.name.startswith("present") and (place := _cache_slot(port.name))
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
        raise DraftModelError(f"{path}: inputs are missing: past {_list_slots(missing)}")
    if missing := sorted(expected - set(presents)):
        raise DraftModelError(f"{path}: outputs are missing: present {_list_slots(missing)}")
    return tuple(
        _read_cache(path, part, pasts[layer, part], presents[layer, part], hint)
        for layer, part in sorted(expected)
    )


def _list_slots(places: Iterable[tuple[int, str]]) -> str:
    listed = [f"{part} of layer {layer}" for layer, part in places]
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _read_cache(path: Path, part: str, past: Port, present: Port, hint: HeadHint) -> CacheTensor:
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
    heads = heads if isinstance(heads, int) and heads > 0 else hint[0]
    size = last if isinstance(last, int) and last > 0 else hint[1]
    if heads < 1 or size < 1:
        raise DraftModelError(
            f"{what} and leaves {'heads' if heads < 1 else 'head size'} open; a config.json or"
            " genai_config.json beside it must set num_key_value_heads and head_dim"
        )
    return CacheTensor(
        past=past.name,
        present=present.name,
        part=part,
        dtype=past.dtype,
        heads=heads,
        head_size=size,
        tokens_first=tokens_first,
    )


def _is_length(dimension: int | str | None) -> bool:
    """Return whether an axis counts tokens.

    The axis of heads may have a name too, so a name counts only if it does not sound like heads."""
    if isinstance(dimension, int):
        return False
    return dimension is None or not re.search(r"head|kv_num|dim", dimension)


# --- the runtime ----------------------------------------------------------------------------

MAX_THREADS = 64
CPU = ("CPUExecutionProvider",)
EXECUTION: Final = {
    "cuda": ("CUDAExecutionProvider", *CPU),
    "tensorrt": ("TensorrtExecutionProvider", *CPU),
    "dml": ("DmlExecutionProvider", *CPU),
    "coreml": ("CoreMLExecutionProvider", *CPU),
    "openvino": ("OpenVINOExecutionProvider", *CPU),
    "cpu": CPU,
}
"""Execution providers for the values of ``draft.provider``. Each but the CPU's comes with one
distribution of onnxruntime (``models/onnx_packages.py``).

The CPU runs what the first one does not support. Keys and values lie in the CPU's memory, so an
accelerator may well be slower."""
_NVIDIA = ("CUDAExecutionProvider", "TensorrtExecutionProvider")
_OPENVINO = "OpenVINOExecutionProvider"
_DIRECTML = "DmlExecutionProvider"
_INCOMPLETE = re.compile("out of bounds|read in full|parsing failed|does not exist", re.IGNORECASE)
"""Messages of onnxruntime for a graph or its weights that are cut or missing."""
_RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"
_RUNTIME_TYPES = {"tensor(float)": "float32"}
_RUNTIME_TYPES |= {f"tensor({one})": one for one in ("float16", "int8", "int32", "int64", "bool")}

# Bytes of weights below which a second thread costs more than it saves.
_TWO_THREADS_FROM_BYTES = 8_000_000


def default_threads(weights_bytes: int, two_from_bytes: int = _TWO_THREADS_FROM_BYTES) -> int:
    """Return the threads of a draft step unless the user sets them.

    A small draft has one, since its step is shorter than waking a thread. Others have two, which
    nearly halve the time where there are two cores."""
    return 1 if weights_bytes < two_from_bytes else min(2, usable_cores())


def load_session(path: Path, threads: int, providers: Sequence[str]) -> ort.InferenceSession:
    """Load a session for one drafter, with few threads that sleep while they wait.

    The graph runs on the first of ``providers``; the others run what that one does not support.
    Raises ``DraftModelError`` naming the file, or the providers that are missing, and
    ``ValueError`` for threads outside 1..64."""
    check_range("threads", threads, 1, MAX_THREADS)
    missing = sorted(set(providers) - set(ort.get_available_providers()))
    if missing or not providers:
        raise DraftModelError(
            f"execution providers {missing} are not in this onnxruntime {ort.__version__}, which"
            f" has {ort.get_available_providers()}"
            + "".join(f"; {advice}" for name in missing if (advice := advise_provider(name)))
        )
    if not path.is_file():
        raise DraftModelError(f"{path}: no such file")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    # A spinning pool starves everything else on a small device and is slower when it is busy.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if providers[0] == _DIRECTML:  # its memory cannot be addressed in bytes
        options.enable_mem_pattern = False
    if providers[0] not in CPU:
        options.add_session_config_entry(_RECORD_PLACEMENT, "1")
    if providers[0] in _NVIDIA:
        # CUDA libraries that pip installed are found in their packages, others by the system.
        with suppress(Exception):
            ort.preload_dlls()
    try:
        session = ort.InferenceSession(
            str(path),
            options,
            providers=list(providers),
            # OpenVINO has its own threads, by default one for each core, and all of them spin.
            # With other work running, a step then took ten times as long.
            provider_options=[
                {"num_of_threads": str(threads)} if name == _OPENVINO else {} for name in providers
            ],
            # The fallback would replace a failing provider and print that on stdout.
            enable_fallback=0,
        )
    except Exception as error:  # The exceptions of onnxruntime share no base class of their own.
        hint = ""
        if "escapes model directory" in str(error):
            hint = "; 1.24.0 and 1.24.1 refuse the links of the Hub's cache: take another version"
        elif _INCOMPLETE.search(str(error)):
            hint = "; a file was cut or is missing: export the draft again, or fetch it again"
        raise DraftModelError(f"{path}: onnxruntime cannot load it: {error}{hint}") from error
    if (first := session.get_providers()[0]) != providers[0]:
        raise DraftModelError(f"{path}: onnxruntime took {first} in place of {providers[0]}")
    return session


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Number of nodes that the first provider of a session took, and the other nodes by kind."""

    accelerated: int
    others: Mapping[str, int]

    def __str__(self) -> str:
        total = self.accelerated + sum(self.others.values())
        kinds = ", ".join(f"{kind} ({count})" for kind, count in self.others.items())
        return f"{self.accelerated} of {total} nodes" + (f", on the CPU {kinds}" if kinds else "")


def read_placement(session: ort.InferenceSession) -> NodePlacement | None:
    """Return where the nodes of a session run.

    None without an accelerator, or with an onnxruntime before 1.24."""
    first, getter = session.get_providers()[0], "get_provider_graph_assignment_info"
    if first in CPU or not hasattr(session, getter):
        return None
    accelerated, others = 0, Counter[str]()
    for part in getattr(session, getter)():
        nodes = part.get_nodes()
        if part.ep_name == first:
            accelerated += len(nodes)
        else:
            others.update(node.op_type for node in nodes)
    return NodePlacement(accelerated, dict(others))


def _read_ports(nodes: Sequence[ort.NodeArg]) -> tuple[Port, ...]:
    return tuple(
        Port(node.name, _RUNTIME_TYPES.get(node.type, node.type), tuple(node.shape))
        for node in nodes
    )


def weights_bytes(path: Path) -> int:
    """Return the size of the file and its external data (``model.onnx_data``,
    ``model.onnx.data``)."""
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*") if part.is_file())
