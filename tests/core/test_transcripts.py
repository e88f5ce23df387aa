"""Golden transcripts: every event and action of both sessions, complete, in a few small scenes.

Oracle: the texts in ``transcripts``, read by a person when they change. To accept a change:
``REWRITE_TRANSCRIPTS=1 pytest tests/core/test_transcripts.py``, and look at the difference. (The
tests hide all ``EDGESPEC_`` variables from themselves, so the name has no such beginning.)
"""

from __future__ import annotations

import os
import re
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path

import pytest

from edgespec.core.device import events as draft_events
from edgespec.core.device.policy import DraftPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import session_events as verify_events
from edgespec.core.verifier.session import VerifySession
from tests.sim.faults.options import WorldOptions
from tests.sim.faults.worlds import run_world

FOLDER = Path(__file__).parent / "transcripts"
REWRITE = bool(os.environ.get("REWRITE_TRANSCRIPTS"))


def _options(policy: DraftPolicy, run_ahead: RunAhead, cuts: int = 0) -> WorldOptions:
    return WorldOptions(
        model=ToyModel(vocabulary_size=16, order=2, seed=1),
        policies=(policy,),
        sampling=SamplingParams(max_tokens=8),
        run_ahead=run_ahead,
        delay_s=0.02,
        step_s=0.01,
        pass_s=0.03,
        cuts=cuts,
        faults_until_s=0.4,
    )


@dataclass(frozen=True, slots=True)
class Scene:
    name: str
    options: WorldOptions
    shows: str
    """What makes the scene worth reading; the transcript must match it."""


SCENES = (
    Scene(
        "pearl_with_a_miss",
        _options(PearlPolicy(3), RunAhead.NEVER),
        r"CORRECTED",
    ),
    Scene(
        "hedged_window_with_run_ahead",
        _options(WindowedPolicy(2), RunAhead.ALWAYS),
        r"stale=[1-9]",
    ),
    Scene(
        "reconnect",
        _options(WindowedPolicy(), RunAhead.AUTO, cuts=1),
        r"LinkDown[\s\S]*Attach",
    ),
)


def _spell(value: object) -> str:
    """A short repr: class and the fields that are not at their defaults."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return "[" + " ".join(_spell(item) for item in value) + "]"
    if is_dataclass(value) and not isinstance(value, type):
        shown = [
            f"{field.name}={_spell(getattr(value, field.name))}"
            for field in fields(value)
            if getattr(value, field.name) != _default(field)
        ]
        return f"{type(value).__name__}({', '.join(shown)})"
    return repr(value)


def _default(field: Field[object]) -> object:
    factory = field.default_factory
    return field.default if factory is MISSING else factory()


def _play(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> str:
    lines: list[str] = []
    draft_handle, verify_handle = DraftSession.handle, VerifySession.handle

    def note(side: str, now: float, event: object, actions: tuple[object, ...], state: str) -> None:
        lines.append(f"{now * 1e3:8.1f} {side} {_spell(event)} -> {state}")
        lines.extend(f"{'':20}{_spell(action)}" for action in actions)

    def device(
        session: DraftSession, event: draft_events.DraftEvent, now: float
    ) -> tuple[draft_events.DraftAction, ...]:
        actions = draft_handle(session, event, now)
        state = (
            f"{session.state.value}, {session.prefix.length} held, {len(session.tree.nodes)} nodes"
        )
        note("device  ", now, event, actions, state)
        return actions

    def verifier(
        session: VerifySession, event: verify_events.VerifyEvent, now: float
    ) -> tuple[verify_events.VerifyAction, ...]:
        actions = verify_handle(session, event, now)
        nodes = len(session.inbox.tree.nodes)
        state = f"{session.state.value}, {session.prefix.length} held, {nodes} nodes"
        note("verifier", now, event, actions, state)
        return actions

    monkeypatch.setattr(DraftSession, "handle", device)
    monkeypatch.setattr(VerifySession, "handle", verifier)
    run_world(scene.options, 1)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_the_transcript_is_as_ever(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FOLDER / f"{scene.name}.txt"
    said = _play(scene, monkeypatch)
    assert re.search(scene.shows, said), f"{scene.name} does not show {scene.shows}"
    if REWRITE:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(said, encoding="utf-8")
    assert said.splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_no_transcript_is_left_behind() -> None:
    assert {path.stem for path in FOLDER.glob("*")} == {scene.name for scene in SCENES}
