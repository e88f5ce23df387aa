"""Verifiers as stations of a closed queueing network: how many sessions they hold, how often.

Theory of operation. Each user either thinks (mean ``think_s``) or is being served; a verifier with
n active sessions serves all of them at once, each at a rate that depends on n alone. Such a network
of delay stations and processor-sharing stations has a product-form stationary law in which only the
means of think and service times count, not their distributions (Baskett, Chandy, Muntz and Palacios
1975; Kelly, Reversibility and Stochastic Networks, 1979, chapter 3; for one verifier it is the
machine-repairman model). The service rates come from ``service_curves.py``.

    balanced  policies that go where it is fastest keep equal verifiers equally full: all of a kind
              are one station, and its sessions are dealt out evenly
    random    each verifier is a station of its own; the others are there only as their mean

A scenario starts with nobody active. ``transient`` follows the mean of that over the scenario's
duration (the fluid limit: Kurtz 1970), with Poisson numbers around it; without it, what is told is
the law in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgespec_sim.planning.service_curves import Floats, ServiceCurve

_STEP_S = 0.1
# Numbers of sessions this many standard deviations from the mean are as good as impossible.
_DEVIATIONS = 6.0
_MOST_STATES = 400
_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Users:
    """Those of one group who use one kind of verifier."""

    group: str
    count: float
    think_s: float
    start_within_s: float


@dataclass(frozen=True, slots=True)
class Law:
    """States of the verifiers of one kind."""

    active: Floats
    """Sessions at one verifier."""
    time: Floats
    """Share of time in that state; sum 1."""
    ending: Mapping[str, Floats]
    """Requests of each group that end per second, over all verifiers, while in that state."""


@dataclass(frozen=True, slots=True)
class Station:
    """The verifiers of one kind and who uses them. ``pooled``: how many of them act as one."""

    count: int
    pooled: int
    users: tuple[Users, ...]
    curve: ServiceCurve

    def _cycle_s(self, active: float) -> Floats:
        at = np.array([active])
        return np.array([self.curve.groups[one.group].cycle_at(at)[0] for one in self.users])

    def shares(self, active: float) -> Floats:
        """Users of each group who are being served in the long run, if each verifier had
        ``active`` sessions; in sessions a verifier."""
        cycle_s = self._cycle_s(active)
        think_s = np.array([one.think_s for one in self.users])
        counts = np.array([one.count for one in self.users])
        shares: Floats = counts * cycle_s / (think_s + cycle_s) / self.count
        return shares

    def mean_active(self) -> float:
        """The number of sessions that keeps itself up: users served, if it is as full as that."""
        low, high = 0.0, sum(one.count for one in self.users) / self.count
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.shares(middle).sum() > middle else (low, middle)
        return low

    def stationary(self) -> Law:
        """The product form over the sessions of ``pooled`` verifiers, on a window around its
        mean."""
        mean = self.mean_active()
        mix = self.shares(mean) / self.shares(mean).sum()
        states, weights = self._chain(mean, mix)
        for _ in range(3):  # what the others hold on average is what this one does
            mean = float(states @ weights) / self.pooled
            states, weights = self._chain(mean, mix)
        bins = max(1, math.ceil(len(states) / _MOST_STATES))
        starts = np.arange(0, len(states), bins)
        time = np.add.reduceat(weights, starts)
        total = np.maximum(time, 1e-300)
        active = np.add.reduceat(states * weights, starts) / total / self.pooled
        return Law(active, time, self._ending(active, mix))

    def _chain(self, mean: float, mix: Floats) -> tuple[Floats, Floats]:
        counts = np.array([one.count for one in self.users])
        think_s = np.array([one.think_s for one in self.users])
        centre = mean * self.pooled
        reach = _DEVIATIONS * math.sqrt(centre + 1.0) + 2.0
        low = max(0, int(centre - reach))
        states = np.arange(low, min(int(centre + reach), int(counts.sum())) + 1, dtype=float)
        elsewhere = (self.count - self.pooled) * mean
        thinking = counts - np.outer(states + elsewhere, mix)
        share = self.pooled / self.count
        begin = (np.maximum(thinking, 0.0) / think_s).sum(axis=1) * share
        ending = self._ending(states / self.pooled, mix)
        end = np.sum(list(ending.values()), axis=0) * share
        steps = np.log(np.maximum(begin[:-1], 1e-300)) - np.log(np.maximum(end[1:], 1e-300))
        logs = np.concatenate([[0.0], np.cumsum(steps)])
        weights = np.exp(logs - logs.max())
        return states, weights / weights.sum()

    def _ending(self, active: Floats, mix: Floats) -> dict[str, Floats]:
        return {
            one.group: self.count * active * part / self.curve.groups[one.group].cycle_at(active)
            for one, part in zip(self.users, mix, strict=True)
        }

    def transient(self, duration_s: float) -> Law:
        """From nobody active to the end of the scenario."""
        steps = max(1, round(duration_s / _STEP_S))
        step_s = duration_s / steps
        counts = np.array([one.count for one in self.users])
        think_s = np.array([one.think_s for one in self.users])
        start_s = np.array([max(one.start_within_s, step_s) for one in self.users])
        thinking, active = np.zeros(len(counts)), np.zeros(len(counts))
        laws: list[Law] = []
        for step in range(steps):
            # The part of this step in which first questions still come.
            fresh_s = np.clip(start_s - step * step_s, 0.0, step_s)
            asking = counts / start_s * fresh_s + thinking * -np.expm1(-step_s / think_s)
            thinking -= thinking * -np.expm1(-step_s / think_s)
            active += asking
            law = self._around(active)
            laws.append(law)
            ending = np.array([float(law.ending[one.group] @ law.time) for one in self.users])
            left = np.minimum(active, ending * step_s)
            active -= left
            thinking += left
        return Law(
            np.concatenate([law.active for law in laws]),
            np.concatenate([law.time for law in laws]) / steps,
            {
                one.group: np.concatenate([law.ending[one.group] for law in laws])
                for one in self.users
            },
        )

    def _around(self, active: Floats) -> Law:
        """Poisson numbers of sessions about their mean, at one moment."""
        total = float(active.sum())
        mean = total * self.pooled / self.count
        reach = _DEVIATIONS * math.sqrt(mean) + 1.0
        low, high = max(0, int(mean - reach)), int(mean + reach) + 1
        states = np.unique(np.linspace(low, high, 25).round())
        logs = states * math.log(max(mean, 1e-300)) - mean - _log_factorial(states)
        # A state stands for all numbers nearer to it than to its neighbours.
        widths = np.gradient(states) if len(states) > 1 else np.ones(1)
        weights = np.exp(logs) * widths
        mix = active / total if total else np.full(len(active), 1.0 / len(active))
        at = states / self.pooled
        return Law(at, weights / weights.sum(), self._ending(at, mix))


def _log_factorial(numbers: Floats) -> Floats:
    return np.array([math.lgamma(number + 1.0) for number in numbers])
