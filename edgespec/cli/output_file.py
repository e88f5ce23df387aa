"""A file that a long run will write is tried before the run, not after it."""

from __future__ import annotations

from pathlib import Path


def check_output(option: str, path: Path | None) -> None:
    """Raises ``ValueError`` for a path that cannot be written, before the long run."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, which is a folder, but must be a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: {path.parent} cannot be made: {error}") from None
