"""What can be configured of a device's HTTP endpoint (``edgespec serve``), section ``endpoint``."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.sampling import MAX_TOKENS

ENDPOINT_HOST = "127.0.0.1"
ENDPOINT_PORT = 7421
ANY_ORIGIN = "*"
LOGGED_CHARACTERS = 4096
"""Of one prompt or answer, where ``log_prompts`` has them logged."""


@dataclass(frozen=True, slots=True)
class EndpointSection:
    """OpenAI's API in front of a device."""

    host: str = ENDPOINT_HOST
    """Address to listen at, 0.0.0.0 for all."""
    port: int = ENDPOINT_PORT
    """Port to listen at. 0 is any free one; the ready line names it."""
    key_file: str = ""
    """File of the key that clients must show. ``EDGESPEC_ENDPOINT_KEY`` in the environment wins
    over it; empty asks for none."""
    insecure: bool = False
    """Listen beyond this machine without a key."""
    allow_origins: tuple[str, ...] = ()
    """Let web pages of this origin ask, such as https://chat.example. ``*`` lets in all."""
    allow_hosts: tuple[str, ...] = ()
    """Names that a ``Host`` header may have besides ``localhost``, such as a proxy's."""
    max_concurrent: int = 8
    """Texts that are written beside each other. A request for n texts counts n times."""
    max_queue: int = 32
    """Requests that may wait for their turn. Those beyond are answered with 429."""
    max_body_bytes: int = 4 << 20
    """Bytes of a request's body at most."""
    default_max_tokens: int | None = None
    """Tokens for a request that does not say. null: a chat may fill the context, a completion has
    ``sampling.max_tokens``."""
    model_sampling: bool = True
    """Take what neither a request nor ``sampling`` says from ``generation_config.json`` in the
    tokenizer's folder. False: greedy."""
    keep_alive_s: float = 10.0
    """Seconds between the comments that a stream sends while it has no token."""
    body_within_s: float = 30.0
    """How long a request may take to arrive."""
    write_within_s: float = 60.0
    """A client that reads nothing for so long counts as gone."""
    drain_s: float = 5.0
    """How long running requests may go on after a request to stop."""
    log_prompts: bool = False
    """Write prompts and answers to the log. At most 4,096 characters of each are written."""

    def __post_init__(self) -> None:
        if not self.host.strip():
            raise ValueError("host is empty")
        bounded("port", self.port, 0, 65_535)
        bounded("max_concurrent", self.max_concurrent, 1, 1024)
        bounded("max_queue", self.max_queue, 0, 65_536)
        bounded("max_body_bytes", self.max_body_bytes, 1024, 1 << 30)
        if self.default_max_tokens is not None:
            bounded("default_max_tokens", self.default_max_tokens, 1, MAX_TOKENS)
        bounded("keep_alive_s", self.keep_alive_s, 0.01, 3600.0)
        bounded("body_within_s", self.body_within_s, 0.1, 3600.0)
        bounded("write_within_s", self.write_within_s, 0.1, 3600.0)
        bounded("drain_s", self.drain_s, 0.0, 3600.0)
        for origin in self.allow_origins:
            if origin != ANY_ORIGIN and ("://" not in origin or origin.endswith("/")):
                raise ValueError(
                    f"allow_origins holds {origin!r}, but must be like https://chat.example or *"
                )
