"""Which drafts take several leaves a step, and who is told why another does not. Oracle: the list
of reasons in docs/cli.md; a drafter that answers leaf by leaf."""

from __future__ import annotations

import pytest

from edgespec.config import AgentConfig, DraftSection, PolicySection
from edgespec.core.device.events import StartStep, StepDone
from edgespec.core.ports import Candidate, TreeRows, most_leaves, never_cancelled
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import load_drafter
from edgespec.device.draft_step import run_step
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.device.drafters.tree_rows import PathDrafter

FOUR = PolicySection(leaves=4)


def _config(**draft: object) -> AgentConfig:
    return AgentConfig(draft=DraftSection(**draft), policy=FOUR)  # type: ignore[arg-type]


def test_the_bundled_draft_takes_as_many_as_are_asked_for() -> None:
    for policy, expected in ((PolicySection(), 1), (FOUR, 4)):
        drafter = load_drafter(AgentConfig(policy=policy))
        assert drafter is not None
        assert most_leaves(drafter) == expected
        drafter.close()


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ({"window": 256}, "window"),
        ({"memory_budget": "900MiB"}, "memory budget"),
        ({"lookup": True}, "guesses from the text"),
    ],
)
def test_who_cannot_says_why(draft: dict[str, object], why: str) -> None:
    said: list[str] = []
    drafter = load_drafter(_config(**draft), say=said.append)
    assert drafter is not None
    assert most_leaves(drafter) == 1
    assert any(line.startswith("one leaf a draft step") and why in line for line in said)
    drafter.close()


def test_a_step_is_run_as_it_is_meant() -> None:
    drafter = PathDrafter(ToyDrafter(ToyModel(vocabulary_size=16)), 2)
    drafter.begin(2, SamplingParams())
    rows = TreeRows((), (4, 5), (1, 1), (2, 3))
    done = run_step(drafter, StartStep(0, (1, 2), 2, rows), never_cancelled)
    singles = []
    for token in (4, 5):
        drafter.begin(2, SamplingParams())
        singles.append(run_step(drafter, StartStep(0, (1, 2, token), 2), never_cancelled))
    assert done == StepDone(singles[0].candidates, (singles[1].candidates,))


class _Answers(PathDrafter):
    """Says what it is told to."""

    answer: object = ()

    def step_tree(self, *_: object) -> tuple[tuple[Candidate, ...], ...]:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((), "a tuple of 2 answers"),
        ([(), ()], "a tuple of 2 answers"),
        (((), [Candidate(1, 0.0)]), "returned list"),
        (((Candidate(1, 0.0),) * 3, ()), "3 guesses, but at most 2"),
        (((), (Candidate(-1, 0.0),)), "no token id"),
    ],
)
def test_another_answer_ends_the_drafting(answer: object, message: str) -> None:
    toy = ToyDrafter(ToyModel(vocabulary_size=16))
    drafter = _Answers(toy, 2)
    drafter.answer = answer
    step = StartStep(0, (1,), 2, TreeRows((), (4, 5), (0, 0), (1, 2)))
    with pytest.raises((TypeError, ValueError), match=message):
        run_step(drafter, step, never_cancelled)
    with pytest.raises(TypeError, match="takes one leaf a step"):
        run_step(toy, step, never_cancelled)
