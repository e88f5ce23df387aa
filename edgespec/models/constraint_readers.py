"""Who reads constraints: a verifier in the vocabulary of its target, a device in that of its texts.

The library is optional on either side. A verifier without it refuses constraints and names the
package; a device without it lets its drafts guess freely, which costs speed and no text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from edgespec.core.protocol.constraint import Constraint
from edgespec.models.draft_sources import resolve_texts
from edgespec.models.folders import Role, resolve_model
from edgespec.models.grammar import GrammarReader, letters_tokenizer
from edgespec.models.toy import TOY_ALPHABET, TOY_EOS

ReadConstraint = Callable[[Constraint], Constraint]
_TOY = "toy"
_IDLE_S: Final = 300.0
"""After which a device lets go of the process that tries its grammars."""
_DEVICE_BYTES: Final = 192 << 20
"""Of data that such a process may have: a service with a memory budget ends where all its processes
together go far beyond it."""


def verifier_reader(reference: str) -> GrammarReader:
    """For the target that ``reference`` names. Nothing is loaded before the first constraint, or
    before it is told to get ready."""
    return GrammarReader(partial(_vocabulary, reference, Role.TARGET))


def device_reader(reference: str) -> ReadConstraint | None:
    """For the tokenizer that ``reference`` names; None where the library is not installed."""
    vocabulary = partial(_vocabulary, reference, Role.DRAFT)
    reader = GrammarReader(vocabulary, idle_s=_IDLE_S, most_bytes=_DEVICE_BYTES)
    return reader if reader.available else None


def _vocabulary(reference: str, role: Role) -> Any:
    """What ``GrammarReader`` takes. Raises ``ValueError`` naming the file."""
    if reference == _TOY:
        return letters_tokenizer(TOY_ALPHABET, TOY_EOS)
    target = role is Role.TARGET
    folder = resolve_model(reference, role) if target else resolve_texts(reference)
    return (folder / "tokenizer.json").read_text(encoding="utf-8")
