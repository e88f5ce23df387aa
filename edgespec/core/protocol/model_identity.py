"""Whether a verifier may continue a text that another one began: only with the same model."""

from __future__ import annotations

from edgespec.core.protocol.messages import Opened
from edgespec.core.statically_frozen import statically_frozen


@statically_frozen
class ModelIdentity:
    """What a verifier tells of its model when it opens a session."""

    name: str
    fingerprint: str
    """Empty: one that does not tell it; then the name has to do."""
    context_length: int
    """Prompt plus output, in tokens; 0: not told."""

    @classmethod
    def of(cls, opened: Opened) -> ModelIdentity:
        return cls(opened.model, opened.fingerprint, opened.limits.context_length)

    def is_model_of(self, other: ModelIdentity) -> bool:
        """Whether both are one model. A verifier that tells no fingerprint is not known to serve
        the model of one that does, whatever its name."""
        if self.fingerprint or other.fingerprint:
            return self.fingerprint == other.fingerprint
        return self.name == other.name

    def __str__(self) -> str:
        return f"{self.name!r} ({self.fingerprint[:12] or 'no fingerprint'})"


def why_not(begun: ModelIdentity, here: ModelIdentity, needed_length: int) -> str | None:
    """Why a text that ``begun`` began cannot go on ``here``, or None. ``needed_length`` is prompt
    and longest output, 0: not known."""
    if not here.is_model_of(begun):
        return f"it serves the model {here}, but the text was begun by {begun}"
    if not begun.context_length:
        return None
    wanted = min(begun.context_length, needed_length or begun.context_length)
    if here.context_length < wanted:
        return (
            f"its context is {here.context_length} tokens, but the text was begun with"
            f" {begun.context_length} and may take {wanted}"
        )
    return None
