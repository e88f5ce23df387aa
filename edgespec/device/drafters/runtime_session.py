"""A session of onnxruntime for a draft, and what it says of inputs, outputs and accelerators."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnxruntime as ort

import edgespec.device.drafters as drafters
from edgespec.device.drafters.decoder_graph import Port
from edgespec.device.drafters.manifest import DraftModelError

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
"""What ``draft.provider`` may name. The CPU behind it has what it does not know; keys and values
lie in the CPU's memory, so an accelerator may well be slower."""
_NVIDIA = ("CUDAExecutionProvider", "TensorrtExecutionProvider")
_OPENVINO = "OpenVINOExecutionProvider"
_PLACES = "session.record_ep_graph_assignment_info"
_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int8)": "int8",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
}

# A second thread costs more than it brings below about so many bytes of weights.
_TWO_THREADS_FROM_BYTES = 8_000_000


def usual_threads(weights_bytes: int, two_from_bytes: int = _TWO_THREADS_FROM_BYTES) -> int:
    """Threads of a draft step unless they are asked for: one for a small draft, whose step is
    shorter than a thread's waking up, else two, which nearly halve it where there are two cores."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return 1 if weights_bytes < two_from_bytes else min(2, cores)


def load_session(path: Path, threads: int, providers: Sequence[str]) -> ort.InferenceSession:
    """A session for one drafter: few threads, which sleep when they wait. It runs on the first of
    ``providers``, and on those behind it what that one does not know.

    Raises ``DraftModelError`` naming the file, or the providers that are not there; ``ValueError``
    for threads outside 1..64."""
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads is {threads}, but must be in [1, {MAX_THREADS}]")
    missing = sorted(set(providers) - set(ort.get_available_providers()))
    if missing or not providers:
        raise DraftModelError(
            f"execution providers {missing} are not in this onnxruntime {ort.__version__}, which"
            f" has {ort.get_available_providers()}"
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
    if providers[0] not in CPU:
        options.add_session_config_entry(_PLACES, "1")
    if providers[0] in _NVIDIA:
        # Libraries of CUDA that came with pip are found in their packages; others by the system.
        with suppress(Exception):
            ort.preload_dlls()
    try:
        with drafters.around_deaf_calls():
            session = ort.InferenceSession(
                str(path),
                options,
                providers=list(providers),
                provider_options=[_options_of(name, threads) for name in providers],
                enable_fallback=0,  # or one that fails is replaced, which is told on stdout
            )
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        hint = (
            "; onnxruntime 1.24.0 and 1.24.1 refuse the links of the Hub's cache: take another"
            if "escapes model directory" in str(error)
            else ""
        )
        raise DraftModelError(f"{path}: onnxruntime cannot load it: {error}{hint}") from error
    if (first := session.get_providers()[0]) != providers[0]:
        raise DraftModelError(f"{path}: onnxruntime took {first} in place of {providers[0]}")
    return session


def _options_of(provider: str, threads: int) -> dict[str, str]:
    """OpenVINO has threads of its own, by default one a core that all spin: beside other work a
    step then took ten times as long."""
    return {"num_of_threads": str(threads)} if provider == _OPENVINO else {}


@dataclass(frozen=True, slots=True)
class Placement:
    """How many nodes of a graph the first provider of its session took, and the others by kind."""

    taken: int
    others: Mapping[str, int]

    def __str__(self) -> str:
        total = self.taken + sum(self.others.values())
        kinds = ", ".join(f"{kind} ({count})" for kind, count in self.others.items())
        return f"{self.taken} of {total} nodes" + (f", on the CPU {kinds}" if kinds else "")


def placement(session: ort.InferenceSession) -> Placement | None:
    """Of a session that has an accelerator; None: it has none, or an onnxruntime before 1.24, which
    does not tell."""
    first, look = session.get_providers()[0], "get_provider_graph_assignment_info"
    if first in CPU or not hasattr(session, look):
        return None
    taken, others = 0, Counter[str]()
    for part in getattr(session, look)():
        nodes = part.get_nodes()
        if part.ep_name == first:
            taken += len(nodes)
        else:
            others.update(node.op_type for node in nodes)
    return Placement(taken, dict(others))


def ports(nodes: Sequence[ort.NodeArg]) -> tuple[Port, ...]:
    """Inputs or outputs as a ``DecoderGraph`` is read from them."""
    return tuple(
        Port(node.name, _TYPES.get(node.type, node.type), tuple(node.shape)) for node in nodes
    )


def weights_bytes(path: Path) -> int:
    """Of the file and of the external data beside it (``model.onnx_data``, ``model.onnx.data``)."""
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*") if part.is_file())
