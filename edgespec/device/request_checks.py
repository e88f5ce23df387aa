"""What a caller asks of an agent is checked here before anything of it leaves the device."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final

from edgespec.core.device.commit_bounds import largest_id
from edgespec.core.protocol.messages import MAX_NAME_BYTES
from edgespec.core.protocol.sampling import SamplingParams

# Token ids travel as 32-bit numbers; a sane vocabulary is far smaller.
MAX_TOKEN_ID: Final = (1 << 31) - 1


def checked_sampling(sampling: SamplingParams | None) -> SamplingParams:
    """``sampling``, or the defaults. Raises ``TypeError``."""
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling is {type(sampling).__name__}, but must be SamplingParams")
    return sampling or SamplingParams()


def checked_model(name: str) -> str:
    """A name that fits on the wire. Raises ``TypeError``, ``ValueError``."""
    if not isinstance(name, str):
        raise TypeError(f"model is {type(name).__name__}, but must be text")
    if not fits_on_wire(name):
        shown = repr(name[:40])
        raise ValueError(f"model is {shown}, but must be at most {MAX_NAME_BYTES} bytes of UTF-8")
    return name


def fits_on_wire(name: str) -> bool:
    """Whether a model can have this name."""
    try:
        return len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def checked_prompt(prompt: Sequence[int], vocabulary_size: int) -> tuple[int, ...]:
    """The ids of ``prompt``; ``vocabulary_size`` 0: not known. Raises ``TypeError`` or
    ``ValueError`` naming the first that is none."""
    if isinstance(prompt, bytes | bytearray):
        raise TypeError(f"the prompt is {type(prompt).__name__}, but must be text or token ids")
    tokens: list[int] = []
    for index, token in enumerate(prompt):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise TypeError(f"prompt[{index}] is {token!r}, but must be a token id, an integer")
        tokens.append(operator.index(token))
    if not tokens:
        raise ValueError("the prompt is empty, but must hold at least one token")
    largest = largest_id(vocabulary_size) if vocabulary_size else MAX_TOKEN_ID
    for index, token in enumerate(tokens):
        if not 0 <= token <= largest:
            raise ValueError(
                f"prompt[{index}] is the token id {token}, but must be in [0, {largest}]"
            )
    return tuple(tokens)
