"""Is a graph that another exporter wrote the model that it was made from?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.foreign_drafter import ForeignDrafter
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.export.parity import WAYS, relative


def check_foreign_parity(
    drafter: ForeignDrafter,
    tokens: Sequence[int],
    expected: NDArray[np.float32],
    bound: float,
    source: str,
) -> float:
    """The largest difference between the drafter's logits behind ``tokens``, decoded in one pass,
    in chunks and after rollbacks, and ``expected`` [T, V], in standard deviations of these. Raises
    ``DraftModelError`` naming ``source``, the difference and its place where one is over
    ``bound``."""
    if expected.shape[0] != len(tokens) or expected.shape[1] < drafter.info.vocabulary_size:
        raise DraftModelError(
            f"{source} gives logits of shape {expected.shape}, but the graph's vocabulary has"
            f" {drafter.info.vocabulary_size} ids"
        )
    largest = 0.0
    for way, steps in WAYS.items():
        drafter.begin(1, SamplingParams())
        for keep, end in steps:
            if end > len(tokens):
                break
            drafter.step(keep, tokens[keep:end], 1)
            known = np.isfinite(drafter.logits)  # the padding of a vocabulary is hidden
            got = drafter.logits[known]
            wanted = expected[end - 1, : drafter.info.vocabulary_size][known]
            difference = relative(got, wanted)
            if not difference <= bound:
                at = int(np.argmax(np.abs(got - wanted)))
                raise DraftModelError(
                    f"decoded {way}, the graph's logits behind token {end} of {len(tokens)} differ"
                    f" from those of {source} by {difference:.3g} standard deviations, at most"
                    f" {bound} is rounding; most at token id {np.flatnonzero(known)[at]}:"
                    f" {got[at]:.4g} instead of {wanted[at]:.4g}"
                )
            largest = max(largest, difference)
    return largest
