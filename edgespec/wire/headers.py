"""Headers that a device adds to its calls (gRPC metadata)."""

from __future__ import annotations

from typing import Final

KEY_HEADER: Final = "authorization"
KEY_SCHEME: Final = "Bearer"
CONVERSATION_HEADER: Final = "edgespec-conversation"
"""Header with the conversation's hash, sixteen hexadecimal digits, by which a proxy may choose a
replica (``core/association/policies.py``)."""
