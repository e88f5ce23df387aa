"""Arrays that a sampler writes anew for each row, kept between rows.

Most of the time of a row of 151,936 scores went into pages: an array that large is given back to
the system when it is freed, and each page is filled with zeros again when it is next written.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Workspace:
    """Scratch arrays of one thread, by name; each as large as the largest row so far."""

    def __init__(self) -> None:
        self._floats: dict[str, NDArray[np.float32]] = {}
        self._words: dict[str, NDArray[np.uint32]] = {}
        self._keys = np.empty(0, dtype=np.intp)
        self._weights = np.empty(0, dtype=np.float64)
        self._flags = np.empty(0, dtype=np.bool_)

    def floats(self, name: str, size: int) -> NDArray[np.float32]:
        """float32 [size], whatever it holds; the same memory for the same name."""
        if name not in self._floats or self._floats[name].size < size:
            self._floats[name] = np.empty(size, dtype=np.float32)
        return self._floats[name][:size]

    def words(self, name: str, size: int) -> NDArray[np.uint32]:
        """uint32 [size], likewise."""
        if name not in self._words or self._words[name].size < size:
            self._words[name] = np.empty(size, dtype=np.uint32)
        return self._words[name][:size]

    def keys(self, size: int) -> NDArray[np.intp]:
        if self._keys.size < size:
            self._keys = np.empty(size, dtype=np.intp)
        return self._keys[:size]

    def weights(self, size: int) -> NDArray[np.float64]:
        if self._weights.size < size:
            self._weights = np.empty(size, dtype=np.float64)
        return self._weights[:size]

    def flags(self, size: int) -> NDArray[np.bool_]:
        if self._flags.size < size:
            self._flags = np.empty(size, dtype=np.bool_)
        return self._flags[:size]

    def nbytes(self) -> int:
        held = sum(a.nbytes for a in self._floats.values())
        held += sum(a.nbytes for a in self._words.values())
        return held + self._keys.nbytes + self._weights.nbytes + self._flags.nbytes
