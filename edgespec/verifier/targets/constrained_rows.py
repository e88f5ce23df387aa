"""The masks of a pass: what each constrained session may say at each of its rows.

The state of a text is kept from pass to pass, so a pass pays for the tokens that are new and for a
mask a row. It is only a cache of the text: a session whose matcher failed begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.ports import ModelInfo, ModelOutputError
from edgespec.core.protocol.constraint import ConstrainedText, ConstraintError
from edgespec.core.protocol.sampling import SamplingParams


class ConstrainedRows:
    """Of all sessions of a target whose sampling has a constraint."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._texts: dict[str, ConstrainedText] = {}

    def open(self, key: str, sampling: SamplingParams) -> None:
        """Begin a session. Raises ``ConstraintError`` for a constraint that cannot be kept here."""
        self._texts.pop(key, None)
        if sampling.constraint is not None:
            ends = self._info.eos_token_ids
            self._texts[key] = ConstrainedText(sampling.constraint, ends)

    def masks(
        self, key: str, output: Sequence[int], nodes: Sequence[int], parents: Sequence[int]
    ) -> list[bytes | None]:
        """The mask behind ``output``, the generated tokens so far, and behind each node of the tree
        on it; None where no text gets. Raises ``ModelOutputError`` where the grammar cannot go
        on, or never led there."""
        text = self._texts[key]
        try:
            if (taken := text.follow(output)) < len(output):
                why = f"the grammar takes {taken} of the {len(output)} tokens generated"
                raise ModelOutputError(key, why)
            return text.masks(nodes, parents)
        except ConstraintError as error:
            raise ModelOutputError(key, str(error), requested=True) from error

    def close(self, key: str) -> None:
        self._texts.pop(key, None)
