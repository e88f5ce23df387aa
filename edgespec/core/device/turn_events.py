"""These events can happen to ``DraftTurns``; it answers with these actions."""

from __future__ import annotations

from edgespec.core.statically_frozen import statically_frozen


@statically_frozen
class Joined:
    """A generation begins that would like drafts."""

    key: str


@statically_frozen
class Asked:
    """A session wants a step. ``accepted``: how many of its tokens were drafted and verified."""

    key: str
    accepted: int


@statically_frozen
class Left:
    """A generation is over, or does not draft any more; a step of it may still be running."""

    key: str


@statically_frozen
class Ended:
    """The step that ran is over, in whatever way; it took so many seconds."""

    key: str
    took_s: float


@statically_frozen
class CacheFailed:
    """There is no room for a cache of this number. Say so before ``Ended``."""

    cache: int


@statically_frozen
class Tick:
    """The deadline has come. The step that runs last showed a sign of life at ``heard_at``."""

    heard_at: float


TurnEvent = Joined | Asked | Left | Ended | CacheFailed | Tick


@statically_frozen
class Run:
    """Run the session's step in this cache now, and say ``Ended``. ``fills``: the cache holds
    nothing of its text, so it has to be begun."""

    key: str
    cache: int
    fills: bool


@statically_frozen
class GiveUp:
    """The session's step has hung for ``hang_s`` seconds: tell the session that it failed."""

    key: str
    hang_s: float


TurnAction = Run | GiveUp
