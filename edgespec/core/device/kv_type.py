"""How a draft model's keys and values are stored."""

from __future__ import annotations

from enum import Enum


class KvType(Enum):
    """The type of one number of a cached key or value."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    """With a scale for each layer, head and channel, fixed when the draft was exported."""

    @property
    def bytes(self) -> int:
        """Of one number."""
        return _BYTES[self]


_BYTES = {KvType.FLOAT32: 4, KvType.FLOAT16: 2, KvType.INT8: 1}
