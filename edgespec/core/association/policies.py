"""Association: the choice of one of several verifiers for a device.

    listed         the first one of the list: the others are for when it is gone
    lowest-delay   the shortest round: round trip and pass together
    rendezvous     the one that a hash of (conversation, verifier) ranks first

Rendezvous, or highest-random-weight, hashing (Thaler and Ravishankar, IEEE/ACM Trans. Networking
6(1), 1998) is for replicas behind one name. It needs no memory and no agreement: every device with
the replicas' names computes the same one, so the next turn of a chat finds the cached rows of the
turns before. If a replica goes, its conversations are spread over all others and no other
conversation moves; an added one takes its share. The load is not bounded: a replica without room
refuses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import assert_never

from edgespec.core.statically_frozen import statically_frozen


class Association(Enum):
    """Rule by which a verifier is chosen."""

    LISTED = "listed"
    LOWEST_DELAY = "lowest-delay"
    RENDEZVOUS = "rendezvous"


@statically_frozen
class VerifierView:
    address: str
    round_s: float
    """The verifier's round trip plus a pass under the recent load."""
    sessions: int
    is_full: bool = False


def rank_verifiers(
    association: Association, conversation: str, verifiers: Sequence[VerifierView]
) -> list[str]:
    """Return the verifiers' addresses, the one to use first; full ones come last.

    Ties go to the verifier with the fewest sessions, and then to the first."""

    def cost(place: int) -> tuple[bool, float, int]:
        view = verifiers[place]
        match association:
            case Association.LISTED:
                preference: float = place
            case Association.LOWEST_DELAY:
                preference = view.round_s
            case Association.RENDEZVOUS:
                preference = -rendezvous_weight(conversation, view.address)
            case _:
                assert_never(association)
        return view.is_full, preference, view.sessions

    return [verifiers[place].address for place in sorted(range(len(verifiers)), key=cost)]


def rendezvous_weight(conversation: str, verifier: str) -> int:
    """Return 64 bits that rank ``verifier`` for ``conversation``; the highest comes first."""
    key = conversation.encode("utf-8", "surrogatepass")
    text = len(key).to_bytes(8, "big") + key + verifier.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


# --- the identity of a conversation ------------------------------------------------------------
#
# A conversation is identified by 64 bits of a hash that is the same at each of its turns. A client
# that can distinguish its conversations names them; for a bare prompt its beginning has to do. The
# hash does not reveal the text, but a known beginning can be recognised by it.

BEGINNING_TOKENS = 64
"""Prompts that agree in this many tokens count as one conversation. The number is small enough that
most second turns begin like the first, and larger than the opening of a chat template."""
_BYTES = 8


def hash_prompt_beginning(prompt: Sequence[int]) -> str:
    """Return the conversation of an unnamed prompt (token ids), as 16 hexadecimal digits."""
    return _digest(b"tokens", ",".join(map(str, prompt[:BEGINNING_TOKENS])).encode())


def hash_conversation_name(name: str) -> str:
    """Return the conversation of this name (or first message), as 16 hexadecimal digits."""
    return _digest(b"name", name.encode("utf-8", "surrogatepass"))


def _digest(kind: bytes, data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_BYTES, person=kind).hexdigest()
