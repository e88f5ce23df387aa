"""What cannot be is refused by name. Oracle: ``refusals.txt``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgespec.core import link_model
from edgespec.core.device.memory import parse_budget
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import EXACT_RULE, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.verifier.admission import refuse_open
from edgespec.core.verifier.relaxed_rules import acceptance_rule, why_not_offered

SMALL = ModelInfo("big", "words-1", 100, 64)
ASKED = Open("s", "big", "words-1", (1, 2, 3), sampling=SamplingParams(max_tokens=4))


def why_not(**changes: Any) -> str:
    """The fault for a request that differs so from one that is taken."""
    if "sampling" in changes:
        changes["sampling"] = replace(ASKED.sampling, **changes["sampling"])
    fault = refuse_open(
        replace(ASKED, **changes), SMALL, Limits(context_length=8), frozenset({EXACT_RULE})
    )
    return "" if fault is None else f"{fault.code.name}: {fault.message}"


def open_request(**changes: Any) -> None:
    if why := why_not(**changes):
        raise ValueError(why)


def rule(text: str) -> None:
    assert why_not_offered(text, ("exact",)) is not None
    acceptance_rule(text)


KINDS: dict[str, Callable[..., object]] = {
    "sampling": SamplingParams,
    "constraint": partial(Constraint, ConstraintKind.REGEX),
    "rule": rule,
    "budget": parse_budget,
    "queue": link_model.SharedQueue,
    "link": link_model.LinkSettings,
    "delays": link_model.DelaySchedule,
    "capacity": link_model.CapacitySchedule,
    "losses": link_model.LossSchedule,
    "outages": link_model.OutageSchedule,
    "open": open_request,
}
REFUSALS = (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8")


def frozen(value: Any) -> Any:
    return tuple(map(frozen, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("refusal", re.findall(r"^\w.* => .*$", REFUSALS, re.MULTILINE))
def test_what_cannot_be_is_named(refusal: str) -> None:
    head, _, said = refusal.partition(" => ")
    kind, _, text = head.partition(" | ")
    text = re.sub(r"@(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    fields = {name: frozen(value) for name, value in yaml.safe_load(text).items()}
    with pytest.raises(ValueError, match=re.escape(said)):
        KINDS[kind](**fields)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": ""},
        {"vocabulary": ""},
        {"prompt": (99,) * 7},
        {"committed": (0, 99, 1, 2)},
        {"prompt": (1,) * 5, "committed": (1, 2, 3)},
    ],
)
def test_a_request_that_can_be_served_is_taken(changes: dict[str, Any]) -> None:
    assert why_not(**changes) == ""
