"""When a device's connection is probed, raced by a new one and replaced.

Oracle: the rules in ``connection_watch.py``, as scripts of (time, event, actions, state).
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from edgespec.core.device import connection_watch as cw
from edgespec.core.device.connection_watch import (
    PROBING,
    RACING,
    RESTING,
    WATCHING,
    ConnectFresh,
    ConnectionWatch,
    DropFresh,
    FreshAnswered,
    FreshFailed,
    MessageReceived,
    Probe,
    ProbeEnded,
    Replace,
    Replaced,
    Unused,
    Used,
    WatchTick,
)

Step = tuple[float, cw.WatchEvent, tuple[cw.WatchAction, ...], cw.WatchState]
NONE: tuple[cw.WatchAction, ...] = ()
# A connection that has brought a message, and that nothing uses.
BEGUN: list[Step] = [
    (0.0, Used(), NONE, RESTING),
    (1.0, MessageReceived(), NONE, WATCHING),
    (1.0, Unused(), NONE, RESTING),
]

SCRIPTS: dict[str, list[Step]] = {
    "a connection that never brought anything is not watched": [
        (0.0, Used(), NONE, RESTING),
        (60.0, WatchTick(), NONE, RESTING),
        (60.0, Unused(), NONE, RESTING),
    ],
    "a pause is short: the next use needs no probe": [
        *BEGUN,
        (10.9, Used(), NONE, WATCHING),
        (11.2, MessageReceived(), NONE, WATCHING),
    ],
    "after a pause the first use probes, and the answer ends it": [
        *BEGUN,
        (11.0, Used(), (Probe(),), PROBING),
        (11.2, ProbeEnded(True), NONE, WATCHING),
    ],
    "a message of the stream is an answer too": [
        *BEGUN,
        (11.0, Used(), (Probe(),), PROBING),
        (11.2, MessageReceived(), NONE, WATCHING),
        (11.3, ProbeEnded(True), NONE, WATCHING),
    ],
    "a dead connection is replaced by the one that answers": [
        *BEGUN,
        (11.0, Used(), (Probe(),), PROBING),
        (11.4, WatchTick(), NONE, PROBING),
        (11.5, WatchTick(), (ConnectFresh(),), RACING),
        (11.8, FreshAnswered(), (Replace(),), WATCHING),
    ],
    "an old connection that answers late is kept": [
        *BEGUN,
        (11.0, Used(), (Probe(),), PROBING),
        (11.5, WatchTick(), (ConnectFresh(),), RACING),
        (11.7, ProbeEnded(True), (DropFresh(),), WATCHING),
    ],
    "a call is a probe itself": [
        *BEGUN,
        (11.0, Used(is_probe=True), NONE, PROBING),
        (11.5, WatchTick(), (ConnectFresh(),), RACING),
        (11.6, ProbeEnded(False), NONE, RACING),
        (11.9, FreshAnswered(), (Replace(),), WATCHING),
    ],
    "a connection that breaks is raced at once": [
        *BEGUN,
        (11.0, Used(), (Probe(),), PROBING),
        (11.1, ProbeEnded(False), (ConnectFresh(),), RACING),
    ],
    "a quiet stream is probed, at growing intervals": [
        *BEGUN,
        (2.0, Used(), NONE, WATCHING),
        (2.9, WatchTick(), NONE, WATCHING),
        (3.0, WatchTick(), (Probe(),), PROBING),
        (3.1, ProbeEnded(True), NONE, WATCHING),
        (5.0, WatchTick(), NONE, WATCHING),
        (5.1, WatchTick(), (Probe(),), PROBING),
        (5.2, ProbeEnded(True), NONE, WATCHING),
        (9.1, WatchTick(), NONE, WATCHING),
        (9.2, WatchTick(), (Probe(),), PROBING),
        (9.3, MessageReceived(), NONE, WATCHING),  # the stream goes on
        (10.3, WatchTick(), NONE, PROBING),  # the probe of before has not ended
    ],
    "while the network is down the new connection is begun again": [
        *BEGUN,
        (2.0, Used(), NONE, WATCHING),
        (3.0, WatchTick(), (Probe(),), PROBING),
        (3.5, WatchTick(), (ConnectFresh(),), RACING),
        (5.5, WatchTick(), (DropFresh(), ConnectFresh()), RACING),
        (6.0, ProbeEnded(False), NONE, RACING),
        (6.0, Unused(), NONE, RACING),  # the session waits for its next attempt
        (6.1, Used(), NONE, RACING),
        (7.5, WatchTick(), (DropFresh(), ConnectFresh()), RACING),
        (7.6, FreshAnswered(), (Replace(),), WATCHING),
    ],
    "a new connection that is refused is followed by a longer pause": [
        *BEGUN,
        (2.0, Used(), NONE, WATCHING),
        (3.0, WatchTick(), (Probe(),), PROBING),
        (3.1, ProbeEnded(False), (ConnectFresh(),), RACING),
        (3.2, FreshFailed(), NONE, WATCHING),
        (5.1, WatchTick(), NONE, WATCHING),
        (5.2, WatchTick(), (Probe(),), PROBING),
    ],
    "what nothing uses any more is given up": [
        *BEGUN,
        (2.0, Used(), NONE, WATCHING),
        (3.0, WatchTick(), (Probe(),), PROBING),
        (3.5, WatchTick(), (ConnectFresh(),), RACING),
        (3.6, Unused(), NONE, RACING),
        (5.5, WatchTick(), (DropFresh(),), RESTING),
    ],
    "a connection that was replaced meanwhile is a new one": [
        *BEGUN,
        (2.0, Used(), NONE, WATCHING),
        (3.0, WatchTick(), (Probe(),), PROBING),
        (3.5, WatchTick(), (ConnectFresh(),), RACING),
        (3.6, Replaced(), (DropFresh(),), RESTING),
        (60.0, Used(), NONE, RESTING),
    ],
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_connection_is_watched_by_the_rules(script: list[Step]) -> None:
    watch = ConnectionWatch()
    for now, event, actions, state in script:
        assert (watch.handle(event, now), watch.state) == (actions, state), (now, event)


def test_a_race_ends_after_its_attempts() -> None:
    watch = ConnectionWatch(cw.WatchPolicy(max_attempts=3))
    for now, event, *_ in BEGUN:
        watch.handle(event, now)
    now, found = 2.0, list(watch.handle(Used(), 2.0))
    while watch.state is not RACING or found.count(ConnectFresh()) < 3:
        assert watch.deadline is not None
        now = watch.deadline
        found += watch.handle(WatchTick(), now)
    assert watch.deadline is not None
    assert watch.handle(WatchTick(), watch.deadline) == (DropFresh(),)
    assert watch.state is WATCHING


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_at_most_one_probe_and_one_new_connection_are_under_way(seed: int) -> None:
    """Random events that fit what is under way. Invariants: the deadline is never in the past once
    it was handled, a connection that is not used causes nothing new, and both counts stay below
    two."""
    dice, watch, now = random.Random(seed), ConnectionWatch(), 0.0
    uses = probes = fresh = 0
    for _ in range(2000):
        now += dice.choice([0.0, 0.1, 0.6, 3.0, 20.0])
        if watch.deadline is not None and now > watch.deadline:
            now, event = watch.deadline, WatchTick()
        else:
            options: list[Any] = [Replaced(), *[WatchTick()] * 3, *[Used(dice.random() < 0.3)] * 3]
            options += [MessageReceived(), Unused() if uses == 1 else WatchTick()] * bool(uses)
            options += [ProbeEnded(dice.random() < 0.5)] * 3 * bool(probes)
            options += [FreshAnswered(), FreshFailed()] * bool(fresh)
            event = dice.choice(options)
        uses += isinstance(event, Used) - isinstance(event, Unused)
        probes -= isinstance(event, ProbeEnded)
        fresh -= isinstance(event, FreshAnswered | FreshFailed)
        for action in watch.handle(event, now):
            probes = 0 if isinstance(action, Replace) else probes + isinstance(action, Probe)
            fresh += isinstance(action, ConnectFresh) - isinstance(action, DropFresh)
            assert uses or not isinstance(action, Probe | ConnectFresh)
        if isinstance(event, Replaced):
            probes = 0
        assert 0 <= probes <= 1
        assert 0 <= fresh <= 1
        assert watch.deadline is None or watch.deadline > now
        assert (watch.deadline is None) == (watch.state is RESTING)
