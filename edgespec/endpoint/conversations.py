"""Which conversation a request belongs to, for the choice among replicas of the verifier.

A client that knows says it (``prompt_cache_key``). Else a chat is known by how it begins: every
later turn sends the same messages up to the user's first one again. What a completion belongs to
the agent tells by its first tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.core.association.conversation import conversation_named
from edgespec.endpoint.fields import Fields


def named_conversation(fields: Fields) -> str:
    """The hash of the one that the request names; empty: it names none. Raises ``ApiError``."""
    name = fields.text("prompt_cache_key")
    return conversation_named(json.dumps(["key", name])) if name else ""


def chat_conversation(messages: Sequence[Mapping[str, Any]]) -> str:
    """The hash of a chat that begins so: with all up to the first message of a user."""
    roles = [message["role"] for message in messages]
    first = roles.index("user") + 1 if "user" in roles else len(messages)
    begins = [[message["role"], message["content"]] for message in messages[:first]]
    return conversation_named(json.dumps(["chat", begins]))
