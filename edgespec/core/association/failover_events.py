"""These events can happen to a ``Failover``; it answers with these actions.

``route`` is the number of a generation, which has at most one stream at a time.
"""

from __future__ import annotations

from edgespec.core.protocol.messages import FaultCode, ModelIdentity, VerifierInfo
from edgespec.core.statically_frozen import statically_frozen


@statically_frozen
class Known:
    """These are the verifiers that can be used, in order of preference where nothing else counts.
    Those of before that are not among them are forgotten."""

    addresses: tuple[str, ...]


@statically_frozen
class Wanted:
    route: int
    needed_length: int = 0
    """How much context its whole text takes, in tokens; 0: not known."""
    conversation: str = ""
    model: str = ""
    """The name that it asks for; empty: the model that is served."""


@statically_frozen
class Unwanted:
    """The generation waits for no stream any more, and uses none."""

    route: int


@statically_frozen
class Over:
    """The generation has ended; its number does not come back."""

    route: int


@statically_frozen
class Dialed:
    """The stream that ``Dial`` asked for stands."""

    route: int
    address: str


@statically_frozen
class DialFailed:
    """It could not be had. ``retryable`` False: nor will it be for this generation."""

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
    """The first token of this stream came."""

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
    """The route's stream ended without a word."""

    route: int
    why: str
    retryable: bool = True


@statically_frozen
class Quiet:
    """Nothing came on the route's stream for a while."""

    route: int


@statically_frozen
class ProbeAnswered:
    """What ``Probe`` brought, and how long the answer took."""

    address: str
    info: VerifierInfo
    rtt_s: float


@statically_frozen
class ProbeFailed:
    """No answer of use. ``alive``: somebody is there and does not want to be asked (so often); that
    is no reason to leave a stream."""

    address: str
    why: str
    alive: bool = False


@statically_frozen
class Tick:
    """The deadline has come."""


RouteEvent = Unwanted | Over | Dialed | DialFailed | Greeted | Progressed | Refused | Broke | Quiet
FailoverEvent = Known | Wanted | RouteEvent | ProbeAnswered | ProbeFailed | Tick


@statically_frozen
class Dial:
    """Open a stream there; answer with ``Dialed`` or ``DialFailed``."""

    route: int
    address: str


@statically_frozen
class Drop:
    """That stream is not wanted, whether it stands already or not."""

    route: int
    address: str


@statically_frozen
class Use:
    """Give the generation this stream."""

    route: int
    address: str


@statically_frozen
class Leave:
    """The generation has no stream, or has to let its own go. ``retryable`` False: none will do."""

    route: int
    why: str
    again_s: float | None = None
    """0: another verifier can be tried at once; not before so many seconds; None: it knows best."""
    retryable: bool = True


@statically_frozen
class Probe:
    """Ask this verifier for its ``Info``; answer with ``ProbeAnswered`` or ``ProbeFailed``."""

    address: str


FailoverAction = Dial | Drop | Use | Leave | Probe
