"""A session of onnxruntime for a draft, and what it says of inputs and outputs."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

import edgespec.device.drafters as drafters
from edgespec.core.ports import Candidate
from edgespec.device.drafters.foreign_graph import Port
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.token_cache import TokenCache
from edgespec.sampling.arrays import Workspace, best_candidates

MAX_THREADS = 64
CPU = ("CPUExecutionProvider",)
_OPENVINO = "OpenVINOExecutionProvider"
_PLACES = "session.record_ep_graph_assignment_info"
_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
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
            f"execution providers {missing} are not in this onnxruntime, which has"
            f" {ort.get_available_providers()}"
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
    """Inputs or outputs as a ``ForeignGraph`` is read from them."""
    return tuple(
        Port(node.name, _TYPES.get(node.type, node.type), tuple(node.shape)) for node in nodes
    )


def weights_bytes(path: Path) -> int:
    """Of the file and of the external data beside it (``model.onnx_data``, ``model.onnx.data``)."""
    return sum(part.stat().st_size for part in path.parent.glob(f"{path.name}*") if part.is_file())


# --------------------------------------------------------------------------------------------
# Which of onnxruntime's execution providers a draft can run on, found by running something.
#
# Theory of operation. What an onnxruntime was built with says little about a machine: its libraries
# may be missing, its driver too old, and onnxruntime then falls back to the CPU without an error.
# So a provider counts as loadable when a graph of one node, given to it alone, runs on it and its
# sum is right. A draft's session has the CPU behind the provider that was named, for the nodes that
# this one does not know. Keys and values lie in the CPU's memory, so an accelerator may well be
# slower.


EXECUTION: Final = {
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
_PACKAGES: Final = {
    "cuda": "onnxruntime-gpu",
    "tensorrt": "onnxruntime-gpu",
    "dml": "onnxruntime-directml",
    "coreml": "onnxruntime on macOS",
    "openvino": "onnxruntime-openvino",
}
_SIZE: Final = 4
_LONGEST_WHY: Final = 300


def execution_providers(name: str) -> tuple[str, ...]:
    """The providers of a session that runs on ``name``, a key of ``EXECUTION``; behind it the CPU
    has what it does not know. Raises ``DraftModelError`` saying why it does not load and which
    others do, ``ValueError`` for a name that is none."""
    if name == "cpu":
        return CPU
    if name not in EXECUTION:
        raise ValueError(f"provider is {name!r}, but must be one of {', '.join(EXECUTION)}")
    why = why_not_loadable(name)
    if why is not None:
        others = ", ".join(one for one in EXECUTION if why_not_loadable(one) is None)
        raise DraftModelError(f"provider {name} cannot be used: {why}; here there are: {others}")
    return EXECUTION[name], *CPU


def why_not_loadable(name: str) -> str | None:
    """What keeps a provider from running one node; None: nothing does."""
    provider = EXECUTION[name]
    if provider not in ort.get_available_providers():
        package = _PACKAGES.get(name)
        hint = f" ({package} has it)" if package else ""
        return f"this onnxruntime {ort.__version__} was built without {provider}{hint}"
    if name in ("cuda", "tensorrt"):
        # Libraries of CUDA that came with pip are found in their packages; others by the system.
        with contextlib.suppress(Exception):
            ort.preload_dlls()
    try:
        return _run_one_node(provider)
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        why = " ".join(str(error).split())
        return f"{provider} does not run one node: {why[:_LONGEST_WHY]}"


def _run_one_node(provider: str) -> str | None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if provider not in CPU:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = ort.InferenceSession(_one_node(), options, providers=[provider], enable_fallback=0)
    if session.get_providers()[0] != provider:
        return f"{provider} fell back to {session.get_providers()[0]}"
    numbers = np.arange(_SIZE, dtype=np.float32)
    (doubled,) = session.run(None, {"x": numbers})
    if not np.array_equal(doubled, numbers + numbers):
        return f"{provider} computes {doubled.tolist()} for {(numbers + numbers).tolist()}"
    return None


def _one_node() -> bytes:
    """y = x + x as an ONNX model: message fields by their numbers in ``onnx.proto``, since a device
    has no package for them."""
    shape = _field(1, _number(1, _SIZE))
    of_type = _field(2, _field(1, _number(1, 1) + _field(2, shape)))
    node = _field(1, b"x") + _field(1, b"x") + _field(2, b"y") + _field(4, b"Add")
    ports = _field(11, _field(1, b"x") + of_type) + _field(12, _field(1, b"y") + of_type)
    graph = _field(1, node) + _field(2, b"probe") + ports
    return _number(1, 8) + _field(7, graph) + _field(8, _number(2, 17))


def _field(number: int, value: bytes) -> bytes:
    assert len(value) < 128
    return bytes((number << 3 | 2, len(value))) + value


def _number(number: int, value: int) -> bytes:
    assert 0 <= value < 128
    return bytes((number << 3, value))


def guesses(
    logits: NDArray[np.float32], cache: TokenCache, position: int, width: int, work: Workspace
) -> tuple[Candidate, ...]:
    """``best_candidates`` behind the text in ``cache``. ``logits`` [V] lose what the constraint
    forbids; without a token that it allows there are no guesses."""
    mask = cache.mask()
    if mask is not None:
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        count = min(bits.size, logits.size)
        logits[count:] = -np.inf
        logits[:count][bits[:count] == 0] = -np.inf
        if logits.max() == -np.inf:
            return ()
    return best_candidates(logits, cache.sampling, position, width, cache.counts, work)
