"""The token ids that a draft shares with its target, if their vocabularies are not quite the same.

Vocabularies of one family differ by padding (Qwen2.5 has 151,936 rows at 0.5B and 152,064 at 7B),
by a few added tokens or by a renamed one. A draft node is an id of the target's that is judged by
equality, so the output is exact in any case: an id that the draft lacks is fed to it as a stand-in,
and an id that the target lacks, or that means another text there, is never proposed. Vocabularies
of two families share next to nothing id by id; then a draft is translated (``translation.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from edgespec.config.common import SetupError
from edgespec.core.ports import Candidate

_MIN_DIFFERING_LIMIT: Final = 16
_DIFFERING_SHARE: Final = 20
"""Limits on the ids that may differ: a twentieth of the ids, or 16. Families add that many tokens
to a vocabulary (Llama 3 reserves 256 of 128,256). Vocabularies of two families share fewer."""
_SAMPLE: Final = 2048
"""Ids of a large vocabulary that are compared first, evenly spread."""
_MAX_SAMPLED_SHARE: Final = 0.5
"""Share of the sampled ids that must differ to show that two vocabularies are of two families."""
_MAX_SHOWN: Final = 40
"""Characters or bytes of a token in a message. A vocabulary may hold a token of any length."""

TextOf = Callable[[int], str | bytes]


class OtherVocabularyError(SetupError):
    """The vocabularies of draft and target are of two families. The message names the first id that
    differs."""


@dataclass(frozen=True, slots=True)
class SharedIds:
    """The ids that a draft of ``draft_size`` ids may be fed and may propose."""

    draft_size: int
    target_size: int = 0
    """Number of the target's ids, with its padding; 0: not known."""
    differing: frozenset[int] = frozenset()
    """Ids whose text in the draft is not the target's."""
    stand_in: int = 0
    """The id that is fed in place of one that the draft lacks: an end of text."""

    def to_draft_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return ``tokens`` with a stand-in for each one that the draft lacks."""
        if max(tokens, default=0) < self.draft_size:
            return tokens
        return tuple(one if one < self.draft_size else self.stand_in for one in tokens)

    def keep_shared(self, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Return the candidates that are ids of the target with the same text."""
        size = self.target_size or self.draft_size
        return tuple(
            [one for one in candidates if one.token < size and one.token not in self.differing]
        )


def find_differing_ids(
    draft_text: TextOf, target_text: TextOf, ids: Collection[int], *, draft: str, target: str
) -> frozenset[int]:
    """Return the ids of a draft that have another text, or none, in the target's vocabulary.

    ``own`` and ``target_text`` return the text of one of ``ids`` in the draft's and in the target's
    vocabulary, in the same form, or an empty one for an id without a token. They are functions, so
    that no vocabulary has to be copied. The names are for messages. Raises
    ``OtherVocabularyError`` with the number of ids that differ and the first of them, if they are
    too many for vocabularies of one family. Of large vocabularies a sample is enough to see
    that."""
    if len(ids) > 4 * _SAMPLE:
        sample = sorted(ids)[:: len(ids) // _SAMPLE]
        if sum(draft_text(one) != target_text(one) for one in sample) > (
            _MAX_SAMPLED_SHARE * len(sample)
        ):
            ids = sample
    count = sum(draft_text(token) != target_text(token) for token in ids)
    sizes = [sum(bool(one(token)) for token in ids) for one in (draft_text, target_text)]
    limit = max(_MIN_DIFFERING_LIMIT, sizes[1] // _DIFFERING_SHARE)
    if count > limit:
        first = min(token for token in ids if draft_text(token) != target_text(token))
        texts = [_show_token(one(first)) for one in (draft_text, target_text)]
        raise OtherVocabularyError(
            f"draft {draft!r} has another tokenizer than {target!r}: {count} of {max(sizes)} ids"
            f" differ, but at most {limit} may; the first is id {first}, which is {texts[0]} in the"
            f" draft and {texts[1]} in the target; give --draft a model of the same family, or"
            " lookup"
        )
    return frozenset(
        token for token in ids if draft_text(token) and draft_text(token) != target_text(token)
    )


def _show_token(text: str | bytes) -> str:
    """Return the beginning of a token's text for a message."""
    if not text:
        return "nothing"
    text = text[:_MAX_SHOWN]
    return repr(text if isinstance(text, str) else text.decode(errors="replace"))
