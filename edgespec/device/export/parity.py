"""Is an exported draft the model that it was made from? Asked before anybody uses it.

Two questions, so that rounding does not hide a mistake. Every matrix as it lies in the graph is
compared with the checkpoint's, within what its bits allow. Then the graph is run, in one pass, in
chunks and after rollbacks, against ``reference_model`` on the *stored* weights, so that what is
left is rounding of activations. An answer of no names the largest difference and where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.manifest import MODEL_FILE, DraftManifest, DraftModelError
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.checkpoint import Checkpoint, DecoderShape, read_shape
from edgespec.device.export.export import first_layers, kept_ids
from edgespec.device.export.family_weights import FamilyWeights
from edgespec.device.export.head_padding import padded_head_dim, unpad_inputs, unpad_outputs
from edgespec.device.export.quantize import QuantizedMatrix, dequantize_matrix
from edgespec.device.export.reference_model import reference_logits

if TYPE_CHECKING:
    import onnx

Array = NDArray[np.float32]

CHECKED_TOKENS = 48
LARGEST_WEIGHT_ERROR = {4: 0.25, 8: 0.02, 32: 0.0}
"""Root mean square of what rounding a matrix changes, over that of the matrix, by bits. Four bits
on normal weights in blocks of 32 lose about 0.1."""
LARGEST_DIFFERENCE = {4: 0.2, 8: 0.2, 32: 0.005}
"""Root mean square of a difference of logits over their standard deviation, by bits: activations of
quantised products are rounded to 8 bits."""
LARGEST_CACHE_DIFFERENCE = {"float32": 0.0, "float16": 0.02, "int8": 0.2}
"""Likewise, of rounding keys and values. The bundled target gave 0.0004 and 0.014."""
WAYS = {
    "in one pass": ((0, CHECKED_TOKENS),),
    "in chunks": ((0, 17), (17, 18), (18, 41), (41, CHECKED_TOKENS)),
    "after rollbacks": ((0, 33), (29, 30), (12, 44), (12, 13), (13, CHECKED_TOKENS)),
}
"""(tokens kept, tokens then fed up to), one after the other."""


def check_parity(
    source: Path, target: Path, manifest: DraftManifest, kept: Sequence[int] = ()
) -> float:
    """The largest relative difference found. ``kept`` is what ``export_draft`` was given. Raises
    ``DraftModelError`` naming the file, the difference and its place when it is too large;
    ``CheckpointError`` as ``export_draft`` does."""
    import onnx

    shape = first_layers(read_shape(source), manifest.layers)
    known = np.array(kept_ids(kept, manifest.model) or range(manifest.model.vocabulary_size))
    dropped = np.setdiff1d(np.arange(manifest.model.vocabulary_size), known)
    known = known[known < manifest.proposable]  # the drafter hides the padding
    model = onnx.load(target / MODEL_FILE)
    weights = _StoredWeights(
        target / MODEL_FILE, model, FamilyWeights(Checkpoint(source), shape), shape, dropped
    )
    length = min(CHECKED_TOKENS, manifest.model.context_length)
    tokens = np.random.default_rng(0).integers(0, manifest.proposable, length).tolist()
    expected = reference_logits(shape, weights, tokens)
    del model, weights
    drafter = OnnxDrafter(target)
    largest = 0.0
    bound = max(
        LARGEST_DIFFERENCE[manifest.bits],
        LARGEST_DIFFERENCE[manifest.table_bits],
        LARGEST_CACHE_DIFFERENCE[manifest.kv_type],
    )
    try:
        for way, steps in WAYS.items():
            drafter.begin(1, SamplingParams())
            for keep, end in steps:
                if end > length:
                    break
                drafter.step(keep, tokens[keep:end], 1)
                got, wanted = drafter.logits[known], expected[end - 1, known]
                difference = relative(got, wanted)
                if not difference <= bound:
                    at = int(np.argmax(np.abs(got - wanted)))
                    raise DraftModelError(
                        f"{target / MODEL_FILE}: decoded {way}, the logits behind token {end} of"
                        f" {length} differ from those of {source} by {difference:.3g} standard"
                        f" deviations, at most {bound} is rounding; most at token id {known[at]}:"
                        f" {got[at]:.4g} instead of {wanted[at]:.4g}"
                    )
                if not np.isneginf(drafter.logits[dropped]).all():
                    raise DraftModelError(
                        f"{target / MODEL_FILE}: has logits for ids that were not to be kept"
                    )
                largest = max(largest, difference)
    finally:
        drafter.close()
    return largest


class _StoredWeights:
    """Matrices from the graph, checked against the checkpoint's as they are read; everything else
    from the checkpoint."""

    def __init__(
        self,
        path: Path,
        model: onnx.ModelProto,
        checkpoint: FamilyWeights,
        shape: DecoderShape,
        dropped: NDArray[np.int64],
    ) -> None:
        self._path, self._checkpoint, self._shape = path, checkpoint, shape
        self._dropped = dropped
        self._stored = {tensor.name: tensor for tensor in model.graph.initializer}

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        original = self._checkpoint.read(name, shape)
        if len(shape) == 1:
            return original
        stored, bits = self._matrix(name.removesuffix(".weight"), shape)
        if name == "lm_head.weight" and len(self._dropped):  # rows that nobody reads
            original[self._dropped] = 0.0
            whole = np.zeros_like(original)
            whole[np.delete(np.arange(len(whole)), self._dropped)] = stored
            stored = whole
        if stored.shape != original.shape:
            raise DraftModelError(
                f"{self._path}: matrix {name} has shape {stored.shape}, not {original.shape}"
            )
        scale = max(float(np.sqrt(np.mean(original**2))), 1e-12)
        error = float(np.sqrt(np.mean((stored - original) ** 2))) / scale
        if not error <= LARGEST_WEIGHT_ERROR[bits]:
            row, column = np.unravel_index(np.argmax(np.abs(stored - original)), original.shape)
            raise DraftModelError(
                f"{self._path}: matrix {name} differs from the checkpoint's by {error:.3g} of its"
                f" size, at most {LARGEST_WEIGHT_ERROR[bits]} is rounding to {bits} bits; most at"
                f" [{row}, {column}]: {stored[row, column]:.4g} instead of"
                f" {original[row, column]:.4g}"
            )
        return stored

    def _matrix(self, name: str, shape: tuple[int, ...]) -> tuple[Array, int]:
        """(float32 [N, K], bits); queries, keys and values lie in one matrix of the graph."""
        dim, rows = self._shape.head_dim, shape[0]
        if name.endswith(".o_proj"):
            stored, bits = self._plain(name, self._shape.heads * padded_head_dim(dim))
            return unpad_inputs(stored, dim), bits
        joint, first, _ = self._checkpoint.joint_matrix(f"{name}.weight")
        if not joint.endswith(".qkv_proj.weight"):
            return self._plain(name, shape[1])
        size = padded_head_dim(dim)
        heads = slice(first // dim * size, (first + rows) // dim * size)
        stored, bits = self._plain(joint.removesuffix(".weight"), shape[1], heads)
        return unpad_outputs(stored, dim), bits

    def _plain(self, name: str, columns: int, rows: slice = slice(None)) -> tuple[Array, int]:
        """(``rows`` of float32 [N, K], bits)."""
        from onnx import numpy_helper

        if f"{name}.packed" in self._stored:
            packed = numpy_helper.to_array(self._stored[f"{name}.packed"])[rows]
            scales = numpy_helper.to_array(self._stored[f"{name}.scales"])[rows]
            bits = packed.shape[2] * 8 // 32
            return dequantize_matrix(QuantizedMatrix(packed, scales, bits, columns)), bits
        if f"{name}.weight" not in self._stored:
            raise DraftModelError(f"{self._path}: matrix {name} is missing")
        weight = numpy_helper.to_array(self._stored[f"{name}.weight"])
        return (weight if name == "model.embed_tokens" else weight.T)[rows], 32


def relative(got: Array, wanted: Array) -> float:
    """Root mean square of the difference over the standard deviation of ``wanted``."""
    return float(np.sqrt(np.mean((got - wanted) ** 2))) / max(float(wanted.std()), 1e-12)
