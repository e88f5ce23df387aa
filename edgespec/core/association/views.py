"""What association policies are told, and the loop that most of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Score = Callable[[int, int, int], float | tuple[float, ...]]
"""Of (device, verifier, devices placed there so far); the lowest wins."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    name: str
    step_s: float
    """One draft step."""
    acceptance: float = 0.7
    """Share of positions at which its first guess is the target's token."""
    battery_share: float = 1.0
    """Charge left, 0 to 1; 1 on mains."""
    conversation: str = ""
    """Which conversation the text belongs to (``conversation.py``); empty: the device has one, and
    ``name`` says which."""


@dataclass(frozen=True, slots=True)
class VerifierView:
    name: str
    pass_s: float
    """One pass of a lone session."""
    sessions: int
    max_sessions: int
    session_s: float = 0.0
    """How much longer a pass takes with every further session in it."""


@dataclass(frozen=True, slots=True)
class LinkView:
    """Between one device and one verifier."""

    rtt_s: float
    up_bits_per_s: float = math.inf
    down_bits_per_s: float = math.inf
    snr_db: float | None = None
    """Signal to interference and noise; None on links that are not radio."""


Links = Sequence[Sequence[LinkView]]
"""``links[device][verifier]``."""


def one_by_one(
    devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], score: Score
) -> tuple[int, ...]:
    """Each device in turn to the lowest score among the verifiers with room, all if none has any.
    Ties go to the one with fewest sessions, those placed here included, and then to the first, so
    that equal verifiers share the devices."""
    placed = [0] * len(verifiers)
    chosen: list[int] = []
    for device in range(len(devices)):
        free = [v for v, view in enumerate(verifiers) if has_room(view, placed[v])]
        candidates = free or range(len(verifiers))
        best = min(
            candidates,
            key=lambda v: (score(device, v, placed[v]), verifiers[v].sessions + placed[v]),
        )
        placed[best] += 1
        chosen.append(best)
    return tuple(chosen)


def has_room(verifier: VerifierView, placed: int) -> bool:
    return verifier.sessions + placed < verifier.max_sessions
