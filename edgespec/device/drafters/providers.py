"""Which of onnxruntime's execution providers a draft can run on, found by running something.

Theory of operation. What an onnxruntime was built with says little about a machine: its libraries
may be missing, its driver too old, and onnxruntime then falls back to the CPU without an error. So
a provider counts as loadable when a graph of one node, given to it alone, runs on it and its sum is
right. A draft's session has the CPU behind the provider that was named, for the nodes that this one
does not know. Keys and values lie in the CPU's memory, so an accelerator may well be slower.
"""

from __future__ import annotations

import contextlib
from typing import Final

import numpy as np
import onnxruntime as ort

from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.runtime_session import CPU

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
