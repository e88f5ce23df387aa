"""A part that cannot be built: something is not installed, not there or not readable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SetupError(RuntimeError):
    """A part cannot be built; the message says what is wrong and, if known, what to run."""


@contextmanager
def needs(library: str, install: str) -> Iterator[None]:
    """Turns a missing library into the line that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("edgespec"):
            raise
        raise SetupError(
            f"this needs {library} ({error.name} is not installed): pip install '{install}'"
        ) from error
