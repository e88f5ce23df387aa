"""Texts of a target in the ids of a draft with another tokenizer.

Logits of two vocabularies cannot be compared, so such a draft learns from the target's texts alone:
from what the target wrote, in the draft's own words.
"""

from __future__ import annotations

from collections.abc import Callable

from edgespec.core.device.token_cache import common_prefix_length
from edgespec.models.translated_text import TranslatedText
from edgespec.models.translation import Translation
from edgespec.training.texts import Text

TranslateText = Callable[[Text], Text | None]


def translate_text(pair: Translation, text: Text, length: int) -> Text | None:
    """Return ``text`` in the ids of the draft, at most its last ``length`` ones.

    A prompt is read in the form of the draft's own chat template. At least the last id is to be
    predicted. None if there are fewer than two ids."""
    translated = TranslatedText(pair, text.start)
    translated.append(text.tokens[: text.start])
    before = list(translated.draft_ids())
    translated.append(text.tokens[text.start :])
    ids = list(translated.draft_ids())
    start = common_prefix_length(before, ids)
    cut = max(0, len(ids) - length)
    ids = ids[cut:]
    if len(ids) < 2:
        return None
    return Text(ids, min(max(1, start - cut), len(ids) - 1))
