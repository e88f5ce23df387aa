"""Credentials: what the owner of an API key may use.

The operator gives API keys to devices or to groups of devices. Shares of the target are fair
between credentials first, and between the sessions of one credential second. Limits hold for a
credential as a whole. A verifier without API keys has one credential, ``ANYBODY``.
"""

from __future__ import annotations

from edgespec.core.statically_frozen import statically_frozen


@statically_frozen
class Credential:
    """One owner of sessions and its limits; a limit of 0 means that only the verifier's own
    holds."""

    name: str = ""
    """Name for logs and metrics; not secret. Empty if the device showed no API key."""
    max_sessions: int = 0
    context_length: int = 0
    tokens_per_s: float = 0.0
    """Committed tokens per second of all sessions together, in the long run."""
    priority: int = 0
    """Sessions of a higher priority get room in a pass first."""
    models: tuple[str, ...] = ()


ANYBODY = Credential()
