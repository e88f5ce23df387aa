"""The ids that a draft shares with its target, where their tables are not quite the same.

Tables of one family differ by padding (Qwen2.5 has 151,936 rows at 0.5B and 152,064 at 7B), by a
few added tokens or by a renamed one. A guess is an id of the target's that is judged by equality,
so all of this is exact: what the draft does not have is fed to it as a stand-in, and what the
target does not have, or means otherwise, is never proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from edgespec.config.common import SetupError
from edgespec.core.ports import Candidate

_LEAST_APART: Final = 16
_SHARE_APART: Final = 20
"""A twentieth of the ids, or 16, may be other than the draft's: so many tokens are added to a
family's table (Llama 3 keeps 256 of 128,256 for that). Tables of two families share less."""


@dataclass(frozen=True, slots=True)
class SharedIds:
    """What a draft of ``draft_size`` ids may be fed and may propose."""

    draft_size: int
    target_size: int = 0
    """Ids of the target, with its padding; 0: not known."""
    apart: frozenset[int] = frozenset()
    """Ids of the draft whose text is not the target's."""
    stand_in: int = 0
    """The id that is fed in place of one that the draft does not have: an end of text."""

    def fed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return ``tokens`` with a stand-in for each one that the draft does not have."""
        if max(tokens, default=0) < self.draft_size:
            return tokens
        return tuple(one if one < self.draft_size else self.stand_in for one in tokens)

    def proposed(self, guesses: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Return the guesses that are ids of the target with the same text."""
        size = self.target_size or self.draft_size
        return tuple([one for one in guesses if one.token < size and one.token not in self.apart])


def ids_apart(
    own: Mapping[int, str], others: Mapping[int, str], *, draft: str, target: str
) -> frozenset[int]:
    """Return the ids of a draft's table ``own`` whose text is another or none in the target's.

    Both are token strings by id; the names are for messages. Raises ``SetupError``, saying how many
    ids differ and which is the first, where these are too many for two tables of one family."""
    differ = [token for token, text in own.items() if others.get(token) != text]
    missing = others.keys() - own.keys()
    most = max(_LEAST_APART, len(others) // _SHARE_APART)
    if (count := len(differ) + len(missing)) > most:
        first = min([*differ, *missing])
        texts = [repr(one[first]) if first in one else "nothing" for one in (own, others)]
        raise SetupError(
            f"draft {draft!r} has another tokenizer than {target!r}: {count} of"
            f" {max(len(own), len(others))} ids differ, but at most {most} may; the first is id"
            f" {first}, which is {texts[0]} in the draft and {texts[1]} in the target; give --draft"
            " a model of the same family, or lookup"
        )
    return frozenset(differ)
