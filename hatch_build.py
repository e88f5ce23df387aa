"""Writes the commit into wheels and source archives, for ``edgespec --version``.

A wheel that is built from a source archive keeps the commit of that archive. Without git and
without such a file, as in a container's build, there is none.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

TARGET = "edgespec/commit.txt"


class CommitHook(BuildHookInterface[Any]):
    """Adds ``edgespec/commit.txt`` to what is built from a checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file to a temporary folder, and include it."""
        root = Path(self.root)
        if version == "editable" or not (root / ".git").exists():
            return
        command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty"]
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return
        self._folder = tempfile.TemporaryDirectory()
        written = Path(self._folder.name) / "commit.txt"
        written.write_bytes(done.stdout)
        build_data["force_include"][str(written)] = TARGET
