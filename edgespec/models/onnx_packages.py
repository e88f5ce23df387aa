"""Distributions of onnxruntime: the one for each execution provider, and advice for installations
that do not work.

All distributions write the same files, so an environment may have one only.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Final

from edgespec.config.common import installed_version

EXTRAS: Final[Mapping[str, str]] = {
    "onnxruntime": "cpu",
    "onnxruntime-gpu": "gpu",
    "onnxruntime-openvino": "openvino",
    "onnxruntime-directml": "directml",
}
"""Extra of edgespec that brings a distribution, by the name of the distribution."""
_PROVIDERS: Final[Mapping[str, tuple[str, str]]] = {
    "CUDAExecutionProvider": ("onnxruntime-gpu", "Linux and Windows with an NVIDIA GPU"),
    "TensorrtExecutionProvider": ("onnxruntime-gpu", "Linux and Windows with an NVIDIA GPU"),
    "DmlExecutionProvider": ("onnxruntime-directml", "Windows"),
    "OpenVINOExecutionProvider": ("onnxruntime-openvino", "Linux and Windows on x86-64"),
    "CoreMLExecutionProvider": ("onnxruntime", "macOS"),
}
"""Distribution that has a provider, and the systems for which there is such a distribution."""


def find_installed() -> list[str]:
    """Return the distributions of onnxruntime that are installed."""
    return [name for name in EXTRAS if installed_version(name) is not None]


def describe_conflict(found: list[str]) -> str:
    """Return an error message, with the command that mends it, if more than one distribution was
    ``found``, else an empty text."""
    if len(found) < 2:
        return ""
    return (
        f"{' and '.join(found)} are installed together and overwrite each other; run:"
        f" {mend(found, found[-1])}"
    )


def mend(found: list[str], wanted: str) -> str:
    """Return the command that leaves the distribution ``wanted`` alone in the environment."""
    if not found:
        return f"pip install 'edgespec[{EXTRAS[wanted]}]'"
    fresh = f"pip install --no-cache-dir 'edgespec[{EXTRAS[wanted]}]'"
    return f"pip uninstall -y {' '.join(found)} && {fresh}"


def advise_provider(provider: str) -> str:
    """Return what has the execution ``provider``, and the command that installs it. Empty for a
    provider that every distribution has."""
    if provider not in _PROVIDERS:
        return ""
    distribution, systems = _PROVIDERS[provider]
    return f"it comes with {distribution} on {systems}; run: {mend(find_installed(), distribution)}"


def describe_failed_import(error: ImportError) -> str:
    """Return an error message for an onnxruntime that is installed but cannot be loaded."""
    found = find_installed()
    if conflict := describe_conflict(found):
        return conflict
    why = " ".join(str(error).split())
    here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    reason = f"it was built for another processor or another Python than {here}"
    if sys.platform == "win32":
        reason += ", or Microsoft's Visual C++ Redistributable is missing"
    wanted = found[0] if found else "onnxruntime"
    return f"onnxruntime cannot be loaded ({why}): {reason}; run: {mend(found, wanted)}"
