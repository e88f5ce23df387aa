"""Folders of the tokenizers that verifiers lend to this device.

A lent tokenizer is a stranger's file. It is read in a child process with limits only
(``remote_tokenizer``).
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

from edgespec.config.files import temporary_folder
from edgespec.models.folders import cache_folder


def lent_folders() -> tuple[Path, ...]:
    """Return the folders that hold lent tokenizers, each in a folder of its own.

    They are the one in the user's cache, if there is a cache, and the one of this process, if
    ``make_process_folder`` has made it."""
    try:
        kept: tuple[Path, ...] = (cache_folder() / "tokenizers",)
    except OSError:  # A user without a home has no cache.
        kept = ()
    return (*kept, make_process_folder()) if make_process_folder.cache_info().currsize else kept


def has_lent_texts() -> bool:
    """Return whether a verifier lent a tokenizer to this device before."""
    folders = [one for one in lent_folders() if one.is_dir()]
    return any(not one.name.startswith(".") for folder in folders for one in folder.iterdir())


@lru_cache(maxsize=1)
def make_process_folder() -> Path:
    """Make and return a folder for files that the cache cannot hold, as with a read-only home.

    It is deleted when this process ends. Raises ``OSError``."""
    until_the_end = ExitStack()
    folder = until_the_end.enter_context(temporary_folder(prefix="edgespec-lent-"))
    atexit.register(until_the_end.close)
    return folder


def is_lent(folder: Path) -> bool:
    """Return whether a verifier lent the tokenizer in this folder."""
    return folder.resolve().parent in [one.resolve() for one in lent_folders()]
