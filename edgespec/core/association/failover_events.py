"""Events that a ``Failover`` handles, and the actions that it returns.

``route`` is the number of a generation, which has at most one stream at a time.
"""

from __future__ import annotations

from edgespec.core.protocol.messages import FaultCode, ModelIdentity, VerifierInfo
from edgespec.core.statically_frozen import statically_frozen


@statically_frozen
class Known:
    """The verifiers that can be used, in order of preference where nothing else counts.

    Verifiers known before that are not among them are forgotten."""

    addresses: tuple[str, ...]


@statically_frozen
class Expected:
    """Generations are likely to come soon."""


@statically_frozen
class Wanted:
    route: int
    needed_length: int = 0
    """Context that the whole generation needs, in tokens; 0: not known."""
    conversation: str = ""
    model: str = ""
    """Name of the requested model; empty: the model that is served."""
    has_pictures: bool = False
    """Whether the prompt has pictures, which not every verifier takes."""


@statically_frozen
class Unwanted:
    """The generation no longer waits for a stream, and uses none."""

    route: int


@statically_frozen
class Ended:
    """The generation has ended; its number is not used again."""

    route: int


@statically_frozen
class Dialed:
    """The stream that ``Dial`` requested is open."""

    route: int
    address: str


@statically_frozen
class DialFailed:
    """The stream could not be opened. ``retryable`` False: this verifier cannot serve this
    generation."""

    route: int
    address: str
    why: str
    retryable: bool = True


@statically_frozen
class Greeted:
    """The verifier of the route's stream opened the session with this model."""

    route: int
    model: ModelIdentity


@statically_frozen
class Progressed:
    """The first token of this stream arrived."""

    route: int


@statically_frozen
class Refused:
    """The verifier ended the route's stream with a fault."""

    route: int
    code: FaultCode
    why: str
    retry_after_s: float = 0.0


@statically_frozen
class Broke:
    """The route's stream ended without a fault message."""

    route: int
    why: str
    retryable: bool = True


@statically_frozen
class Quiet:
    """No message arrived on the route's stream for a while."""

    route: int


@statically_frozen
class ProbeAnswered:
    """The answer to a ``Probe``, and its round trip."""

    address: str
    info: VerifierInfo
    rtt_s: float


@statically_frozen
class ProbeFailed:
    """The probe got no useful answer.

    ``alive`` True means that the verifier is there and refuses to be probed (so often); that is no
    reason to leave a stream."""

    address: str
    why: str
    alive: bool = False


@statically_frozen
class Tick:
    """The deadline was reached."""


RouteEvent = Unwanted | Ended | Dialed | DialFailed | Greeted | Progressed | Refused | Broke | Quiet
FailoverEvent = Known | Expected | Wanted | RouteEvent | ProbeAnswered | ProbeFailed | Tick


@statically_frozen
class Dial:
    """Open a stream to this address. The driver answers with ``Dialed`` or ``DialFailed``."""

    route: int
    address: str


@statically_frozen
class Drop:
    """Close this stream, or stop opening it."""

    route: int
    address: str


@statically_frozen
class Use:
    """Give the generation this stream."""

    route: int
    address: str


@statically_frozen
class Leave:
    """The generation has no stream, or must close its own. ``retryable`` False: no verifier will
    do."""

    route: int
    why: str
    again_s: float | None = None
    """When to try again. 0: at once, with another verifier; a positive number: not before that many
    seconds; None: after the session's usual wait."""
    retryable: bool = True


@statically_frozen
class Probe:
    """Request ``Info`` from this verifier. The driver answers with ``ProbeAnswered`` or
    ``ProbeFailed``."""

    address: str


FailoverAction = Dial | Drop | Use | Leave | Probe
