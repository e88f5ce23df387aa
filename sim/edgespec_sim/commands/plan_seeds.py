"""Plans of a link for one seed after another, side by side, until their speeds are known."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from rich.console import Console

from edgespec.cli.running import say
from edgespec_sim.commands.pool import default_processes
from edgespec_sim.planning.link_modes import plan_link, pooled
from edgespec_sim.planning.plan_values import Plan, PlanSettings
from edgespec_sim.planning.replication import seeds_wanted

_Round = Callable[[Sequence[PlanSettings], int], list[Plan]]


def plan_many(settings: PlanSettings, count: int | None, within: float, seconds: float) -> Plan:
    """From ``settings.seed`` on so many seeds; None: until the widest interval is ``within`` it, or
    ``seconds`` have gone. The first seed chooses the draft length of stop-and-wait for all."""
    began_s = time.monotonic()
    plans = [plan_link(settings)]
    seed_s = time.monotonic() - began_s
    with ExitStack() as around:
        console = Console(stderr=True)
        status = console.status("one seed") if console.is_terminal else None
        if status is not None:
            around.enter_context(status)
        play = _player(around, count)
        while True:
            widest = pooled(plans).half_width
            wanted = count or seeds_wanted(len(plans), widest, within)
            more = wanted - len(plans)
            if count is None and more:
                left_s = seconds - (time.monotonic() - began_s)
                more = min(more, int(left_s / seed_s))
            if more <= 0:
                break
            if status is not None:
                status.update(f"{len(plans) + more} seeds")
            first = settings.seed + len(plans)
            round_s = time.monotonic()
            asked = [replace(settings, seed=first + index) for index in range(more)]
            plans += play(asked, plans[0].gamma)
            seed_s = (time.monotonic() - round_s) / more
    found = pooled(plans)
    sure = found.half_width is not None and found.half_width <= within
    if count is None and not sure:
        width = "unknown" if found.half_width is None else f"+/- {found.half_width:.1%}"
        seeds = "one seed" if len(plans) == 1 else f"{len(plans)} seeds"
        say(f"no more than {seeds} in {seconds:.0f} s: the widest interval is {width}")
    return replace(found, settings=settings)


def _player(around: ExitStack, count: int | None) -> _Round:
    """Several processes, made when they are first needed and ended with ``around``."""
    processes = default_processes()
    if count == 1 or processes == 1:
        return lambda asked, gamma: [plan_link(one, gamma) for one in asked]
    pool = around.enter_context(
        multiprocessing.get_context("spawn").Pool(processes, _leave_signals_to_the_main_process)
    )
    return lambda asked, gamma: pool.map(partial(plan_link, gamma=gamma), asked, chunksize=1)


def _leave_signals_to_the_main_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
