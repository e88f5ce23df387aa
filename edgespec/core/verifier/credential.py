"""Who a session belongs to: the key that a device showed, and what its owner may use.

The operator gives keys to devices or to groups of them. Shares of the target are fair between
credentials first and between the sessions of one credential second; limits hold for a credential
as a whole. A verifier without keys knows one credential, ``ANYBODY``.
"""

from __future__ import annotations

from edgespec.core.statically_frozen import statically_frozen


@statically_frozen
class Credential:
    """Limits of 0 mean: no limit but the verifier's own."""

    name: str = ""
    """For logs and metrics; not secret. Empty: the device showed no key."""
    max_sessions: int = 0
    context_length: int = 0
    """Prompt plus output of one session, in tokens."""
    tokens_per_s: float = 0.0
    """Committed tokens of all its sessions together, in the long run."""
    priority: int = 0
    """Sessions of a higher priority get room in a pass first."""
    models: tuple[str, ...] = ()
    """Names of models it may use; empty: all."""


ANYBODY = Credential()
