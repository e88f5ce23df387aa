"""A checkpoint as transformers 4 reads it: the same files, rotations named as they were then.

transformers 5 writes ``rope_parameters``. transformers 4 passes over it, and its rotations are then
those of base 10,000, without a word; so such a checkpoint is handed to it with ``rope_theta`` and
``rope_scaling`` beside.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from edgespec.models.folders import ModelFolderError, read_json

_CONFIG: Final = "config.json"


@contextmanager
def readable_by_transformers_4(source: Path) -> Iterator[Path]:
    """``source`` itself where it says nothing newer, else a folder of links to its files, with a
    config of its own, that is there meanwhile. Raises ``ModelFolderError`` for rotations that
    cannot be said in the older words."""
    config = read_json(source / _CONFIG)
    if "rope_parameters" not in config or "rope_theta" in config:
        yield source
        return
    older = {**config, **_older_rotations(config["rope_parameters"], source / _CONFIG)}
    with tempfile.TemporaryDirectory(prefix="edgespec-source-") as name:
        folder = Path(name)
        for file in source.iterdir():
            if file.name != _CONFIG:
                os.symlink(file.resolve(), folder / file.name)
        (folder / _CONFIG).write_text(json.dumps(older), encoding="utf-8")
        yield folder


def _older_rotations(found: Any, path: Path) -> dict[str, Any]:
    """``rope_theta``, and ``rope_scaling`` unless the rotations are the plain ones."""
    if not isinstance(found, dict) or not isinstance(found.get("rope_theta"), int | float):
        raise ModelFolderError(
            f"{path}: has rope_parameters without one rope_theta for all layers, which transformers"
            " 4 has other words for in each family; write them there, too, or use --exporter genai"
            " or torch"
        )
    scaling = {name: value for name, value in found.items() if name != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": found["rope_theta"], "rope_scaling": None if plain else scaling}
