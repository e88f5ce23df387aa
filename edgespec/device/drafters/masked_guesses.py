"""A draft's guesses under the constraint of its text, as the target will choose."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.core.ports import Candidate
from edgespec.device.drafters.token_cache import TokenCache
from edgespec.sampling.arrays import Workspace, best_candidates


def guesses(
    logits: NDArray[np.float32], cache: TokenCache, position: int, width: int, work: Workspace
) -> tuple[Candidate, ...]:
    """``best_candidates`` behind the text in ``cache``. ``logits`` [V] lose what the constraint
    forbids; without a token that it allows there are no guesses."""
    mask = cache.mask()
    if mask is not None:
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        count = min(bits.size, logits.size)
        logits[count:] = -np.inf
        logits[:count][bits[:count] == 0] = -np.inf
        if logits.max() == -np.inf:
            return ()
    return best_candidates(logits, cache.sampling, position, width, cache.counts, work)
