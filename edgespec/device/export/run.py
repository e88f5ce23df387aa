"""An export by one of others, from a checkpoint to a folder that ``--draft`` takes.

The exporter runs in a process of its own. What it wrote is decoded in one pass, in chunks and after
rollbacks, and compared with what transformers computes in that same environment; then, if fewer
bits are asked for than it writes, its matrices are rounded here and it is compared again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.config.setup_error import needs
from edgespec.device.export.child import Hear, run_child
from edgespec.device.export.environment import exporter_python
from edgespec.device.export.kinds import REFERENCE, ExporterKind, script
from edgespec.device.export.older_config import readable_by_transformers_4
from edgespec.models.draft_sources import find_draft
from edgespec.models.folders import ModelFolderError

Say = Callable[[str], None]
LARGEST_DIFFERENCE = {4: 1.0, 8: 0.2, 32: 0.005}
"""Root mean square of a difference of logits over their standard deviation, by bits: those of two
models that have nothing to do with each other differ by 1.4. Random weights, which are rounded
worse than trained ones, lost 0.6 with 4 bits."""


@dataclass(frozen=True, slots=True)
class ForeignExport:
    """What was written."""

    path: Path
    layers: int
    vocabulary: str
    difference: float | None
    """The largest to the source; None: not compared."""


async def export_by(
    kind: ExporterKind,
    source: Path,
    target: Path,
    bits: int,
    *,
    python: Path | None,
    check: bool,
    say: Say,
    hear: Hear,
) -> ForeignExport:
    """Write the draft of ``source`` into ``target``, an empty folder. ``python`` is the exporter's
    interpreter, None makes an environment; ``hear`` gets its words line by line. Raises
    ``SetupError``, ``DraftModelError`` where the graph is not the model, ``ValueError``."""
    if bits not in kind.bits:
        raise ValueError(f"bits is {bits}, but {kind.name} writes one of {kind.bits}")
    source, target = _absolute(source), _absolute(target)
    reference: tuple[list[int], NDArray[np.float32]] | None = None
    difference: float | None = None
    wanted = needs("onnx and onnxruntime", "edgespec[export,cpu]")
    with wanted, _readable(kind, source) as readable:
        python = await exporter_python(kind, python, say, hear)
        command = (str(python), *kind.arguments(readable, target, bits))
        await run_child(f"the exporter {kind.name}", command, hear)
        path = _written(kind, source, target)
        if check:
            hear("comparing with the checkpoint")
            reference = await _reference(python, readable, source.name, target, hear)
    with needs("onnx and onnxruntime", "edgespec[export,cpu]"):
        if reference is not None:
            written = 32 if kind.rounds else bits
            difference = await asyncio.to_thread(_compare, target, source, written, *reference)
        if kind.rounds and bits != 32:
            from edgespec.device.export.round_graph import round_graph

            hear(f"rounding to {bits} bits")
            await asyncio.to_thread(round_graph, path, bits)
            if reference is not None:
                difference = await asyncio.to_thread(_compare, target, source, bits, *reference)
        return await asyncio.to_thread(_described, target, path, difference)


@contextmanager
def _readable(kind: ExporterKind, source: Path) -> Iterator[Path]:
    """The source as the exporter's own transformers reads it. Raises ``ModelFolderError``."""
    if kind.name != "optimum":
        yield source
        return
    with readable_by_transformers_4(source) as folder:
        yield folder


def _absolute(path: Path) -> Path:
    return path.resolve()


def _written(kind: ExporterKind, source: Path, target: Path) -> Path:
    """The one graph in ``target``, with the texts that a device needs beside it."""
    from edgespec.device.export.export import COPIED_FILES

    for name in COPIED_FILES:
        # Exporters write the tokenizer as their library knows it, which may add tokens to it.
        ours = "config" not in name or name == "tokenizer_config.json"
        if (source / name).is_file() and (ours or not (target / name).exists()):
            shutil.copyfile(source / name, target / name)
    graphs = find_draft(str(target)).graphs
    if len(graphs) != 1:
        found = ", ".join(sorted(file.name for file in target.iterdir())) or "nothing"
        raise ModelFolderError(
            f"the exporter {kind.name} wrote no single decoder graph, but: {found}"
        )
    return next(iter(graphs.values()))


async def _reference(
    python: Path, source: Path, name: str, target: Path, hear: Hear
) -> tuple[list[int], NDArray[np.float32]]:
    """(tokens, logits [T, V] behind each) of the checkpoint."""
    from edgespec.device.export.parity import CHECKED_TOKENS
    from edgespec.models.foreign_info import read_foreign_info

    info = await asyncio.to_thread(read_foreign_info, target, name)
    length = min(CHECKED_TOKENS, info.model.context_length)
    tokens = np.random.default_rng(0).integers(0, info.token_count, length).tolist()
    with tempfile.TemporaryDirectory(prefix="edgespec-reference-") as folder:
        out = Path(folder) / "logits.npy"
        words = ",".join(map(str, tokens))
        command = (str(python), script(REFERENCE), str(source), str(out), words)
        await run_child("the checkpoint itself", command, hear)
        logits: NDArray[np.float32] = np.load(out, allow_pickle=False)
    return tokens, logits


def _compare(
    target: Path, source: Path, bits: int, tokens: list[int], expected: NDArray[np.float32]
) -> float:
    """The largest difference. Raises ``DraftModelError`` for more than rounding."""
    from edgespec.device.export.foreign_parity import check_foreign_parity
    from edgespec.device.foreign_drafts import foreign_drafter

    drafter = foreign_drafter(find_draft(str(target)), lambda text: None)
    try:
        bound = LARGEST_DIFFERENCE[bits]
        return check_foreign_parity(drafter, tokens, expected, bound, str(source))
    finally:
        drafter.close()


def _described(target: Path, path: Path, difference: float | None) -> ForeignExport:
    """It is loaded once more, which tries its cache. Raises ``DraftModelError``."""
    from edgespec.device.foreign_drafts import foreign_drafter

    drafter = foreign_drafter(find_draft(str(target)), lambda text: None)
    try:
        return ForeignExport(path, drafter.graph.layers, drafter.info.vocabulary, difference)
    finally:
        drafter.close()
