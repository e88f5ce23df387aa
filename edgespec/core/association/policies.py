"""Association: which of several verifiers does a device use?

    listed         the first one of the list: the others are for when it is gone
    lowest-delay   the shortest round: round trip and pass together
    rendezvous     the one that a hash of (conversation, verifier) ranks first

Rendezvous, or highest-random-weight, hashing (Thaler and Ravishankar, IEEE/ACM Trans. Networking
6(1), 1998) is for replicas behind one name. Nobody has to remember or agree on anything: all who
know the replicas' names find the same one, so the next turn of a chat meets the rows of the turns
before. When a replica goes, its conversations are spread over all others and no other conversation
moves; one that is added takes its share. No load is bounded: a replica that has no room says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import assert_never

from edgespec.core.statically_frozen import statically_frozen


class Association(Enum):
    """By what a verifier is chosen."""

    LISTED = "listed"
    LOWEST_DELAY = "lowest-delay"
    RENDEZVOUS = "rendezvous"


@statically_frozen
class VerifierView:
    address: str
    round_s: float
    """Its round trip and a pass under the load of late."""
    sessions: int
    is_full: bool = False


def ranked(
    association: Association, conversation: str, verifiers: Sequence[VerifierView]
) -> list[str]:
    """Their addresses, the one to use first; full ones come last. Ties go to the one with fewest
    sessions, and then to the first."""

    def cost(place: int) -> tuple[bool, float, int]:
        view = verifiers[place]
        match association:
            case Association.LISTED:
                preference: float = place
            case Association.LOWEST_DELAY:
                preference = view.round_s
            case Association.RENDEZVOUS:
                preference = -weight(conversation, view.address)
            case _:
                assert_never(association)
        return view.is_full, preference, view.sessions

    return [verifiers[place].address for place in sorted(range(len(verifiers)), key=cost)]


def weight(conversation: str, verifier: str) -> int:
    """64 bits that rank ``verifier`` for ``conversation``; the highest comes first."""
    key = conversation.encode("utf-8", "surrogatepass")
    text = len(key).to_bytes(8, "big") + key + verifier.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


# --- what a conversation is known by -----------------------------------------------------------
#
# 64 bits of a hash, the same at each of its turns. Whoever knows its conversations apart names
# them; of a bare prompt the beginning has to do. No text can be read from the hash; but who knows a
# beginning can tell that it is this one.

BEGINNING_TOKENS = 64
"""Prompts that agree in so many tokens count as one conversation. Few enough that most second turns
begin like the first; more than the opening of a chat template takes."""
_BYTES = 8


def conversation_of(prompt: Sequence[int]) -> str:
    """The conversation of a prompt (token ids) that nobody has named, as 16 hexadecimal digits."""
    return _digest(b"tokens", ",".join(map(str, prompt[:BEGINNING_TOKENS])).encode())


def conversation_named(name: str) -> str:
    """The conversation of that name (or of that first message), as 16 hexadecimal digits."""
    return _digest(b"name", name.encode("utf-8", "surrogatepass"))


def _digest(kind: bytes, data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_BYTES, person=kind).hexdigest()
