"""The pair of a draft and a target whose tokenizers differ.

Words go through their bytes (``byte_vocabulary``). Special tokens have none, so they are paired by
their role: tokens of one name, ends of a text, ends of a turn. A prompt was written by the target's
chat template; its marks are found by rendering a conversation with both templates, so that the
draft reads the conversation in its own form.

The noise of sampling belongs to a place and a token id of the target (``sampling/arrays.py``). A
word of the draft gets the noise of the target's id with which its bytes begin: its own id if its
bytes are exactly one word of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgespec.models.byte_vocabulary import ByteVocabulary
from edgespec.models.tokenizer import TokenizerError

_SYSTEM, _USER, _ANSWER, _AGAIN = (
    f"edgespec{word}" for word in ("system", "question", "answer", "again")
)
"""Contents of a probed conversation. Each is a plain word, which no template changes."""
_ENDS: Final = ("<|endoftext|>", "<eos>", "</s>", "<|end_of_text|>", "<|return|>")
"""Usual names of the token that ends a text."""
_END_OF_TURN, _END_OF_TEXT = "end of turn", "end of text"
_BEGINNINGS: Final = ("first", "system")
"""Parts of a prompt that stand at its beginning."""
_NO_ID: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Marker:
    """A part of a chat prompt between the messages' contents, in both forms."""

    target_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    begins: bool
    """Whether the part is the beginning of a prompt, so that it includes the draft's own prefix."""


class Translation:
    """The pair of a target's and a draft's vocabulary.

    Args:
        target: The vocabulary in which a text is committed.
        draft: The vocabulary of the draft model.
        target_ends: Ids that end an output of the target.
        draft_ends: Ids that end an output of the draft.
    """

    def __init__(
        self,
        target: ByteVocabulary,
        draft: ByteVocabulary,
        *,
        target_ends: Sequence[int] = (),
        draft_ends: Sequence[int] = (),
    ) -> None:
        self.target, self.draft = target, draft
        parts = [_find_parts(one) for one in (target, draft)]
        self.markers = _pair_markers(target, draft, *parts)
        """Parts of chat prompts, the longest one first."""
        theirs = _find_roles(target, parts[0], target_ends)
        own_roles = _find_roles(draft, parts[1], draft_ends)
        self.special_to_draft = _pair_special(target, draft, theirs, own_roles, target_ends)
        """Special ids of the target that the draft has too, by the target's id."""
        self.special_to_target = _pair_special(draft, target, own_roles, theirs, draft_ends)
        """Special ids of the draft that the target has too, by the draft's id."""
        self.target_ends = tuple(dict.fromkeys((*target_ends, *theirs.values())))
        """Ids that end an output of the target."""
        own = {word for _, word in draft.words()}
        counts = [(word in own) for _, word in target.words()]
        self.shared_count, self.word_count = sum(counts), len(counts)
        """Words of the target that are one word of the draft, and all its words."""
        self._noise_ids = self._find_noise_ids()

    @property
    def shared_share(self) -> float:
        """Share of the target's words that are one word of the draft."""
        return self.shared_count / max(1, self.word_count)

    def noise_ids(self, size: int) -> NDArray[np.uint32]:
        """Return the id of the target whose noise each of the ``size`` logits of the draft gets."""
        found = np.full(size, _NO_ID, dtype=np.uint32)
        count = min(size, len(self._noise_ids))
        found[:count] = self._noise_ids[:count]
        return found

    def _find_noise_ids(self) -> NDArray[np.uint32]:
        ids = dict[bytes, int]()
        for token, word in self.target.words():
            ids.setdefault(word, token)
        longest = max(map(len, ids), default=0)
        found = np.full(self.draft.size, _NO_ID, dtype=np.uint32)
        for token, word in self.draft.words():
            for length in range(min(len(word), longest), 0, -1):
                if (twin := ids.get(word[:length])) is not None:
                    found[token] = twin
                    break
        for token, twin in self.special_to_target.items():
            found[token] = twin
        return found


TRANSLATED: Final = "draft translated"
"""The beginning of the line about a translated draft."""


def describe_translation(translation: Translation) -> str:
    """Return one line for users about a draft whose ids are not the target's."""
    share = translation.shared_share
    return (
        f"{TRANSLATED}: {share:.0%} of the {translation.word_count:,} words of"
        f" {translation.target.name} are one word of {translation.draft.name}; a draft that was"
        " trained with `edgespec distill` on this target guesses better"
    )


# --- chat templates -------------------------------------------------------------------------------


def _find_parts(vocabulary: ByteVocabulary) -> dict[str, str]:
    """Return the parts of a chat prompt between contents, by their place. There are none if the
    model has no template, or if it refuses the probe."""
    try:
        template = vocabulary.tokenizer.chat_template()
        if template is None:
            return {}
        talk = _split_prompt(template.render, (("user", _USER),), ("first", "asked"))
        talk |= _split_prompt(
            template.render,
            (("user", _USER), ("assistant", _ANSWER), ("user", _AGAIN)),
            ("first", "answered", "again", "asked"),
        )
    except TokenizerError:
        return {}
    try:  # many templates know no system message
        contents = (("system", _SYSTEM), ("user", _USER))
        return talk | _split_prompt(template.render, contents, ("system", "question", "asked"))
    except TokenizerError:
        return talk


def _split_prompt(
    render: Callable[[list[dict[str, Any]]], str],
    contents: Sequence[tuple[str, str]],
    names: Sequence[str],
) -> dict[str, str]:
    """Return the parts around the contents of a rendered conversation. Raises ``TokenizerError`` if
    a content is not where it should be."""
    text = render([{"role": role, "content": content} for role, content in contents])
    parts, rest = list[str](), text
    for _, content in contents:
        before, found, rest = rest.partition(content)
        if not found:
            raise TokenizerError(f"the chat template does not write {content!r}")
        parts.append(before)
    return dict(zip(names, (*parts, rest), strict=True))


def _encode_part(vocabulary: ByteVocabulary, text: str) -> tuple[int, ...]:
    """Return the ids of a part of a prompt, in which special tokens are recognised; none if they
    depend on what stands before."""
    encode = vocabulary.tokenizer.encode
    ids = tuple(encode(text, add_special_tokens=False))
    if not vocabulary.spaces_first_word or (ids and ids[0] in vocabulary.special_ids):
        return ids
    plain = vocabulary.encode(text.encode())
    return plain if not set(ids) & vocabulary.special_ids else ()


def _pair_markers(
    target: ByteVocabulary,
    draft: ByteVocabulary,
    targets: Mapping[str, str],
    drafts: Mapping[str, str],
) -> tuple[Marker, ...]:
    """Return the parts that both prompts have, the longest one first. A space at the end of the
    target's part would belong to the content behind it."""
    found = dict[tuple[int, ...], Marker]()
    for name, text in targets.items():
        ids = _encode_part(target, text.rstrip(" "))
        if ids and name in drafts:
            own = _encode_part(draft, drafts[name])
            if own or not drafts[name]:
                found.setdefault(ids, Marker(ids, own, name in _BEGINNINGS))
    return tuple(sorted(found.values(), key=lambda one: -len(one.target_ids)))


# --- special tokens -------------------------------------------------------------------------------


def _find_roles(
    vocabulary: ByteVocabulary, parts: Mapping[str, str], ends: Sequence[int]
) -> dict[str, int]:
    """Return the special tokens that have a role, by its name."""
    tokenizer, special = vocabulary.tokenizer, vocabulary.special_ids
    roles = dict[str, int]()
    after_answer = [
        token for token in _encode_part(vocabulary, parts.get("again", "")) if token in special
    ]
    if after_answer:
        roles[_END_OF_TURN] = after_answer[0]
    named = [tokenizer.special_texts.get("eos_token", ""), *_ENDS]
    known = [tokenizer.added[name] for name in named if tokenizer.added.get(name) in special]
    for token in (*known, *ends):
        if token != roles.get(_END_OF_TURN):
            roles[_END_OF_TEXT] = token
            break
    return roles


def _pair_special(
    vocabulary: ByteVocabulary,
    other: ByteVocabulary,
    roles: Mapping[str, int],
    others: Mapping[str, int],
    ends: Sequence[int],
) -> dict[int, int]:
    """Return the special tokens of ``vocabulary`` that have a twin in ``other``, by id: tokens of
    the same role, then tokens of the same name. Each end of an output becomes an end."""
    found = {token: others[role] for role, token in roles.items() if role in others}
    added = other.tokenizer.added
    for name, token in vocabulary.tokenizer.added.items():
        twin = added.get(name)
        if token in vocabulary.special_ids and twin is not None and twin in other.special_ids:
            found.setdefault(token, twin)
    end = others.get(_END_OF_TURN, others.get(_END_OF_TEXT))
    for token in (*roles.values(), *ends):
        if end is not None:
            found.setdefault(token, end)
    return found
