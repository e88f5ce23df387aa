"""One drafter, its thread and its caches, for all generations of an agent.

``core/device/draft_turns.py`` decides whose step runs next; this file runs it. The first cache is
the drafter itself, further ones are its twins (``ports.Twinned``), made when they are first needed;
a drafter without twins has one cache. Steps run one at a time, in a thread of their own.

A generation has a ``Seat``. What goes wrong in a step is that generation's alone: it goes on
without drafts, and the cache is begun anew for the next one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, assert_never

from edgespec.core.device import turn_events as turn
from edgespec.core.device.draft_turns import DraftTurns
from edgespec.core.device.events import (
    DraftEvent,
    StartStep,
    StepDone,
    StepFailed,
    StepWaits,
    StepWithdrawn,
)
from edgespec.core.device.turn_policy import DEFAULT_CACHES, MAX_CACHES, TurnPolicy
from edgespec.core.ports import Drafter, StepCancelledError, Twinned
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.draft_step import run_step
from edgespec.device.draft_thread import DraftThread

# How long closing waits for a step that runs: it ends soon where the drafter asks for its end.
_CLOSING_S: Final = 5.0
_log = logging.getLogger(__name__)


class _NoCacheError(Exception):
    """There is no room for a further cache; the cause says why."""


@dataclass(slots=True, eq=False)
class Seat:
    """One generation's place at a shared drafter. ``notify`` tells its session, ``spawn`` runs a
    task of it, ``accepted`` counts its drafts that were verified, ``over``: it wants no result."""

    shared: SharedDrafter
    key: str
    prompt_length: int
    sampling: SamplingParams
    notify: Callable[[DraftEvent], None]
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    accepted: Callable[[], int]
    over: Callable[[], bool]
    step: StartStep | None = None
    """What was asked for and has not begun."""
    waits: bool = False
    """Whether the session knows that its step has not begun."""
    gone: bool = False

    def ask(self, step: StartStep) -> None:
        """Run ``step`` when it is this generation's turn; ``notify`` hears of it."""
        self.shared.ask(self, step)

    def leave(self) -> None:
        """The generation drafts no more; a second call does nothing."""
        self.shared.let_go(self)


class SharedDrafter:
    """``caches``: how many generations' texts are held at once, at most. ``drafter`` is closed
    with this, and so are its twins."""

    def __init__(
        self,
        drafter: Drafter,
        caches: int = DEFAULT_CACHES,
        policy: TurnPolicy | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bounded("caches", caches, 1, MAX_CACHES)
        if not isinstance(drafter, Twinned):
            caches = 1
        self.turns = DraftTurns(caches, policy or TurnPolicy())
        self._drafters: list[Drafter] = [drafter]
        self._clock = clock
        self._thread = DraftThread("edgespec-draft")
        self._seats: dict[str, Seat] = {}
        self._events: deque[turn.TurnEvent] = deque()
        self._busy = False
        """Whether events are being handled; those that come meanwhile wait."""
        self._untold: dict[str, Seat] = {}
        """Who asked, and was not told yet that it has to wait."""
        self._heard_at = 0.0
        """When the step that runs last showed a sign of life; written by its thread."""
        self._took_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def join(self, seat: Seat) -> None:
        """A generation begins that would like drafts."""
        self._seats[seat.key] = seat
        self._handle(turn.Joined(seat.key))

    def ask(self, seat: Seat, step: StartStep) -> None:
        """See ``Seat.ask``."""
        if seat.gone:
            return
        seat.step = step
        if not seat.waits:
            self._untold[seat.key] = seat
        self._handle(turn.Asked(seat.key, seat.accepted()))

    def let_go(self, seat: Seat) -> None:
        """See ``Seat.leave``."""
        if seat.gone:
            return
        seat.gone, seat.step = True, None
        del self._seats[seat.key]
        self._untold.pop(seat.key, None)
        self._handle(turn.Left(seat.key))

    def close(self) -> None:
        """Free the model. A step that runs is waited for, unless it hangs: then what it uses is
        freed when it comes back, or lost with the process, which may end without it."""
        if self._timer is not None:
            self._timer.cancel()
        running = self.turns.running
        hangs = running is not None and running.given_up
        if not self._thread.close(self._free, 0.0 if hangs else _CLOSING_S):
            _log.warning("a draft step still runs; the draft's memory is freed when it ends")

    def _free(self) -> None:
        for drafter in reversed(self._drafters):
            drafter.close()

    # --- the machine -----------------------------------------------------------------------

    def _handle(self, *events: turn.TurnEvent) -> None:
        self._events += events
        if self._busy:
            return
        self._busy = True
        try:
            while self._events or self._untold:
                if self._events:
                    for action in self.turns.handle(self._events.popleft(), self._clock()):
                        self._do(action)
                else:
                    seat = self._untold.pop(next(iter(self._untold)))
                    seat.waits = True
                    seat.notify(StepWaits())
        finally:
            self._busy = False
        self._arm()

    def _do(self, action: turn.TurnAction) -> None:
        match action:
            case turn.Run(key, cache, fills):
                self._begin(self._seats[key], cache, fills)
            case turn.GiveUp(key, hang_s):
                _log.warning("a draft step has not come back within %g s", hang_s)
                if (seat := self._seats.get(key)) is not None:
                    seat.notify(StepFailed(f"the draft model did not answer within {hang_s:g} s"))
                    self.let_go(seat)
            case _:
                assert_never(action)

    def _begin(self, seat: Seat, cache: int, fills: bool) -> None:
        """Run the step that was asked for; one that waited is planned anew, by what is committed
        by now."""
        self._untold.pop(seat.key, None)
        step, seat.step = seat.step, None
        if step is not None and (seat.waits or (fills and step.keep_length)):
            seat.notify(StepWithdrawn(forgotten=fills))
            step, seat.step = seat.step, None
            self._untold.pop(seat.key, None)
        seat.waits = False
        if step is None or seat.gone:
            self._events.append(turn.Ended(seat.key, 0.0))
            return
        self._heard_at = self._clock()
        seat.spawn(self._run(seat, cache, fills, step))

    def _arm(self) -> None:
        """Deadlines mostly move on, so a timer that is set for an earlier moment stays; one whose
        moment is past was another event loop's."""
        deadline = self.turns.deadline
        if deadline is None:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() > loop.time():
                return
            self._timer.cancel()
        delay_s = max(0.0, deadline - self._clock())
        self._timer = loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._handle(turn.Tick(self._heard_at))

    # --- a step ----------------------------------------------------------------------------

    async def _run(self, seat: Seat, cache: int, fills: bool, step: StartStep) -> None:
        loop = asyncio.get_running_loop()
        said: DraftEvent | None = None
        failed: turn.CacheFailed | None = None
        self._took_s = 0.0
        try:
            work = loop.run_in_executor(self._thread, self._draft, seat, cache, fills, step)
            said = await work
        except StepCancelledError as error:
            said = StepFailed(str(error))  # nobody hears of it, unless it was not asked for
        except _NoCacheError as error:
            _log.warning("no room for %d caches of the draft: %s", cache + 1, error.__cause__)
            failed = turn.CacheFailed(cache)
        except asyncio.CancelledError:
            said = StepFailed("the drafter's thread was closed")
            raise
        except Exception as error:  # whatever a model raises ends the drafting, not the session
            said = StepFailed(f"{type(error).__name__}: {error}")
        finally:
            if failed is None:
                self._ended(seat, said)
            else:
                self._find_another(seat, step, failed)

    def _ended(self, seat: Seat, said: DraftEvent | None) -> None:
        """The session hears first: what it asks for next is known when the next turn is given."""
        busy, self._busy = self._busy, True
        try:
            if said is not None and not seat.gone:
                seat.notify(said)
                if isinstance(said, StepFailed):
                    self.let_go(seat)
        finally:
            self._busy = busy
            self._handle(turn.Ended(seat.key, self._took_s))

    def _find_another(self, seat: Seat, step: StartStep, failed: turn.CacheFailed) -> None:
        """There is no such cache, so the step waits for another one."""
        if not seat.gone:
            seat.step, self._untold[seat.key] = step, seat
        asked = turn.Asked(seat.key, seat.accepted())
        self._handle(failed, turn.Ended(seat.key, 0.0), asked)

    def _draft(self, seat: Seat, cache: int, fills: bool, step: StartStep) -> StepDone:
        """In the drafter's thread: behind a step that nobody waits for any more, if one runs."""
        started_at = self._clock()

        def cancelled() -> bool:
            self._heard_at = self._clock()
            return seat.gone or seat.over()

        if cancelled():
            raise StepCancelledError("the generation is over")
        try:
            drafter = self._cache(cache)
            if fills:
                drafter.begin(seat.prompt_length, seat.sampling)
            return run_step(drafter, step, cancelled)
        finally:
            self._took_s = max(self._clock() - started_at, 1e-9)

    def _cache(self, number: int) -> Drafter:
        if number == len(self._drafters):
            first = self._drafters[0]
            try:
                assert isinstance(first, Twinned)
                self._drafters.append(first.twin())
            except Exception as error:  # whatever a model raises: the caches there are must do
                raise _NoCacheError from error
        return self._drafters[number]
