"""Replicas behind one name: each conversation has an order of its own among them.

Theory of operation. The hash of (conversation, replica) ranks the replicas, a different way for
each conversation, and the first of them serves it: rendezvous or highest-random-weight hashing
(Thaler and Ravishankar, IEEE/ACM Trans. Networking 6(1), 1998). Nobody has to remember or agree on
anything: all who know the replicas' names find the same one. The next turn of a chat meets the rows
of the turns before. When a replica goes, its conversations go each to the next in its own order, so
spread over all others, and no other conversation moves; when one is added it takes its share, and
nothing else moves.

Hashing spreads conversations, not sessions. Who knows the loads of the moment can bound them: a
replica that has more sessions than ``balance`` times the mean, this one included, is passed over
for the next in order (consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam, SODA
2018). Below ``CALM_SESSIONS`` none counts as crowded: a pass over a handful of sessions takes
hardly longer than over one. A device knows loads of seconds ago at best, and those drove
conversations from warm caches without sparing anybody time (docs/measurements.md); so by default
nothing is bounded, and a replica that has no room says so itself.

Invariants: a pure function of names, conversation and sessions told; where the loads are not told
(all 0) the order alone decides; a full replica is named only when all are.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from edgespec.core.association.views import DeviceView, Links, VerifierView, one_by_one

CALM_SESSIONS = 8


class RendezvousHash:
    """An ``AssociationPolicy``. A device's conversation is the one it tells, else its name.
    ``balance`` is above 1, such as 1.25; infinite bounds no load."""

    name = "rendezvous"

    def __init__(self, balance: float = math.inf, calm_sessions: int = CALM_SESSIONS) -> None:
        if not balance > 1.0:
            raise ValueError(f"balance is {balance}, but must be above 1")
        self._balance, self._calm_sessions = balance, calm_sessions

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        there = sum(verifier.sessions for verifier in verifiers)

        def score(device: int, verifier: int, placed: int) -> tuple[float, float]:
            most = self.most_sessions(there + device + 1, len(verifiers))
            view, view_of = verifiers[verifier], devices[device]
            crowded = view.sessions + placed >= most
            return (crowded, -weight(view_of.conversation or view_of.name, view.name))

        return one_by_one(devices, verifiers, score)

    def most_sessions(self, sessions: int, replicas: int) -> float:
        """How many of so many sessions one replica may have before it counts as crowded."""
        fair = self._balance * sessions / replicas
        return fair if math.isinf(fair) else max(math.ceil(fair), self._calm_sessions)


def weight(conversation: str, replica: str) -> int:
    """64 bits that rank ``replica`` for ``conversation``; the highest comes first."""
    key = conversation.encode("utf-8", "surrogatepass")
    text = len(key).to_bytes(8, "big") + key + replica.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
