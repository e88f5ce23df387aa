"""One generation's way to its verifiers, and how a device finds a way round those that fail."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.core.association.circuit_breaker import BreakerPolicy
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.messages import ModelIdentity

_LEAST_S = 1e-3
_LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class FailoverPolicy:
    """How a device that knows several verifiers gets from one to another; seconds. Raises
    ``ValueError`` naming field, value and range."""

    hedge_s: float = 0.25
    """When the verifier that was dialed has not answered for so long (or four of its round trips,
    where that is more), the next one is dialed too."""
    ask_s: float = 2.0
    """Before the first stream all are asked who they are, and waited for so long at most."""
    settle_s: float = 0.1
    """Once one of them has answered, the others have so long."""
    quiet_s: float = 1.5
    """A stream on which nothing came for so long has its verifier probed."""
    probe_s: float = 1.5
    """A probe that is not answered for so long has failed."""
    full_s: float = 1.0
    """A verifier that is full and does not say for how long is left alone for so long."""
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)

    def __post_init__(self) -> None:
        for name in ("hedge_s", "ask_s", "settle_s", "quiet_s", "probe_s", "full_s"):
            bounded(name, getattr(self, name), _LEAST_S, _LONGEST_S)


@dataclass(slots=True)
class Route:
    """What one generation has tried, uses and has been given."""

    needed_length: int = 0
    conversation: str = ""
    model: str = ""
    """The name that it asks for; empty: the model that is served."""
    wanted: bool = False
    """A stream is asked for."""
    asking_until: float | None = None
    dialing: list[str] = field(default_factory=list)
    hedge_at: float | None = None
    tried: set[str] = field(default_factory=set)
    """In vain, since the last token or the last pause."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Of no use to this generation, and why."""
    using: str | None = None
    progressed: bool = False
    """The stream in use has brought a token."""
    suspects: bool = False
    """The stream in use is quiet, and its verifier is being asked."""
    last: str | None = None
    """Whose cache may hold the text."""
    moved_at: float | None = None
    """When it was last told to try another stream at once."""
    greeted: ModelIdentity | None = None
    began: ModelIdentity | None = None
    """The model that the text was begun with."""
    served: list[str] = field(default_factory=list)
    """The addresses that brought tokens, each once."""
    failovers: int = 0
    """How often a token came from another address than the one before."""

    def brought_token(self) -> None:
        """The first token of the stream in use is there."""
        address = self.using
        if address is None or self.progressed:
            return
        self.progressed = True
        self.tried.clear()
        self.began = self.began or self.greeted
        self.failovers += self.last is not None and self.last != address
        if address not in self.served:
            self.served.append(address)
        self.last = address
