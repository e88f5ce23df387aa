"""Tests that the fit recovers known laws from traces, and that a profile of a real run is
consistent.

Oracle: synthetic traces, written here from planted laws with seeded scatter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec_sim.commands.profile import collect_samples, fit_errors, fit_profile
from edgespec_sim.cost_profile import ProfileError, read_profile
from edgespec_sim.report.timeline import TraceLine

DRAFT_S, DRAFT_ROW_S, DRAFT_CONTEXT_S = 4e-3, 5e-4, 2e-6
PASS_S, PASS_ROW_S, PASS_CONTEXT_S = 20e-3, 1e-3, 4e-6
PASS_SESSION_S = 1.5e-3
MESSAGE_S, CONNECT_S, SCATTER = 6e-4, 5e-3, 0.05


class Traces:
    """Builder of the traces of both sides of made-up sessions, operation by operation."""

    def __init__(self, seed: int = 1) -> None:
        self.device: list[TraceLine] = []
        self.verifier: list[TraceLine] = []
        self.now_s = 100.0
        self._dice = np.random.default_rng(seed)
        self._count = 0

    def scatter(self, seconds: float) -> float:
        return float(seconds * self._dice.lognormal(0.0, SCATTER))

    def note(
        self, lines: list[TraceLine], kind: str, name: str, session: str, **values: Any
    ) -> None:
        at_s = round(self.now_s, 6)
        lines.append({"at_s": at_s, "session": session, "kind": kind, "name": name, **values})

    def open(self, number: int) -> None:
        key = f"s{number}"
        self.note(self.device, "action", "Connect", key)
        self.now_s += CONNECT_S + self.scatter(MESSAGE_S)
        request = {"session_id": key}
        self.note(self.verifier, "event", "StreamOpened", "", stream=number, request=request)

    def close(self, number: int) -> None:
        self.note(self.verifier, "event", "StreamLost", "", stream=number)

    def step(self, number: int, fed: int, kept: int) -> None:
        key = f"s{number}"
        self.note(
            self.device, "action", "StartStep", key, feed=[1] * fed, keep_length=kept, width=1
        )
        self.now_s += self.scatter(DRAFT_S + DRAFT_ROW_S * fed + DRAFT_CONTEXT_S * kept)
        self.note(self.device, "event", "StepDone", key, candidates=[])

    def draft(self, number: int) -> None:
        self._count += 1
        message = {"name": "Draft", "first_node_id": self._count}
        self.note(self.device, "action", "Transmit", f"s{number}", message=message)
        self.now_s += self.scatter(MESSAGE_S)
        self.note(self.verifier, "event", "StreamMessage", "", stream=number, message=message)

    def run_pass(self, rows: int, cached: int, sessions: int = 1) -> None:
        own = {"feed": [1], "tokens": [2] * (rows - sessions), "cache_length": cached}
        beside = {"feed": [1], "tokens": [], "cache_length": 0}
        requests = [own, *[beside] * (sessions - 1)]
        self.note(self.verifier, "action", "RunBatch", "", requests=requests)
        body_s = PASS_S + PASS_ROW_S * rows + PASS_CONTEXT_S * cached
        self.now_s += self.scatter(body_s + PASS_SESSION_S * (sessions - 1))
        self.note(self.verifier, "event", "BatchDone", "", results=[])

    def commit(self, number: int) -> None:
        self._count += 1
        message = {"name": "Commit", "position": self._count}
        self.note(self.verifier, "action", "SendTo", "", stream=number, message=message)
        self.now_s += self.scatter(MESSAGE_S)
        self.note(self.device, "event", "Commit", f"s{number}", position=self._count)


def traces() -> Traces:
    made = Traces()
    dice = np.random.default_rng(7)
    for number in range(6):
        made.open(number)
        for _ in range(150):
            made.step(number, int(dice.choice([1, 1, 1, 2, 3, 40])), int(dice.integers(0, 2000)))
            made.draft(number)
            rows, cached = int(dice.choice([1, 2, 4, 7, 30, 200])), int(dice.integers(0, 4000))
            made.run_pass(rows, cached, sessions=int(dice.integers(1, min(rows, 9) + 1)))
            made.commit(number)
        made.close(number)
    return made


def test_planted_laws_are_recovered() -> None:
    made = traces()
    samples = collect_samples(made.device, made.verifier)
    assert len(samples.draft_steps) == len(samples.passes) == 900
    assert len(samples.messages) == 1800
    found = fit_profile(samples, "planted", {})
    for rows in (1, 2, 3, 40):
        expected = DRAFT_S + DRAFT_ROW_S * rows
        assert found.draft_step.seconds(rows, 0) == pytest.approx(expected, rel=0.05)
    for rows in (1, 2, 4, 7, 30, 200):
        expected = PASS_S + PASS_ROW_S * rows
        assert found.target_pass.seconds(rows, 0) == pytest.approx(expected, rel=0.05)
    assert found.draft_step.context_s == pytest.approx(DRAFT_CONTEXT_S, rel=0.15)
    assert found.target_pass.context_s == pytest.approx(PASS_CONTEXT_S, rel=0.15)
    # Over 15 seeds the estimate is within 0.4 % on average, with a standard deviation of 6 %.
    assert found.target_pass.session_s == pytest.approx(PASS_SESSION_S, rel=0.2)
    assert found.message.seconds(1) == pytest.approx(MESSAGE_S, rel=0.02)
    assert found.connect_s == pytest.approx(CONNECT_S, rel=0.1)
    low, high = (found.target_pass.seconds(4, 0, chance) for chance in (0.159, 0.841))
    assert high / low == pytest.approx(np.exp(2 * SCATTER), rel=0.05)
    for mine, law in ((samples.draft_steps, found.draft_step), (samples.passes, found.target_pass)):
        mean, worst = fit_errors(mine, law)
        assert 0.0 <= mean <= worst < 0.05


def shift_times(lines: Sequence[TraceLine], by_s: float) -> list[TraceLine]:
    return [{**line, "at_s": line["at_s"] + by_s} for line in lines]


def test_traces_of_two_clocks_are_refused() -> None:
    made = traces()
    with pytest.raises(ProfileError, match="not on one clock"):
        collect_samples(made.device, shift_times(made.verifier, -1.0))


def test_a_line_that_lacks_something_is_refused() -> None:
    made = traces()
    made.note(made.device, "action", "StartStep", "s0")
    with pytest.raises(ProfileError, match="lacks something: 'feed'"):
        collect_samples(made.device, made.verifier)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("connect_s", float("nan"), "connect_s is nan, but must be a finite number"),
        ("connect_s", -1.0, "connect_s is -1.0, but must be"),
        ("about", (), "about is \\[\\], but must be keys and values"),
        ("draft_step", {"table": ((float("nan"), 1.0),)}, "the rows of a time law must increase"),
        ("draft_step", None, "draft_step: key 'table' is missing"),
    ],
)
def test_a_profile_that_is_none_is_named(
    tmp_path: Path, field: str, value: object, why: str
) -> None:
    """A time that is not a number would stop the simulator's clock, so loading must refuse it."""
    made = traces()
    found = fit_profile(collect_samples(made.device, made.verifier), "planted", {})
    path = tmp_path / "p.json"
    path.write_text(json.dumps(json.loads(found.to_json()) | {field: value}))
    with pytest.raises(ProfileError, match=rf"p\.json: .*{why}"):
        read_profile(path)
