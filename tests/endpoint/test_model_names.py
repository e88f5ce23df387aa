"""Which names an endpoint knows, and what it asks its verifiers for. Oracle: what they told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from edgespec.core.ports import DeviceStream, LinkError
from edgespec.core.protocol.messages import Limits, VerifierInfo
from edgespec.core.protocol.work import ModelInfo
from edgespec.endpoint.models import Chosen, Presence, ServedModels, VerifierPresence, VerifierWatch
from edgespec.endpoint.request_json import ApiError

BASE = ModelInfo("base", "words", 100, 4096, (), "fp-base")
ADAPTER = replace(BASE, name="sql", fingerprint="fp-sql")


def models(*infos: VerifierInfo | None, only: str = "") -> ServedModels:
    watch = VerifierWatch({})
    watch.statuses = tuple(
        VerifierPresence(str(place), Presence.READY if info else Presence.AWAY, info)
        for place, info in enumerate(infos)
    )
    return ServedModels(watch, only)


def told(model: ModelInfo, *adapters: ModelInfo) -> VerifierInfo:
    return VerifierInfo(model, Limits(context_length=0), 0, 8, 0, adapters)


def test_one_model_by_two_names_is_asked_for_by_none() -> None:
    """So that a text can go on where it is called otherwise; not where it is another model."""
    twin = replace(BASE, name="twin")
    assert [models(told(BASE), told(twin)).choose(one).asked for one in ("base", "twin")] == [
        "",
        "",
    ]
    other = replace(twin, fingerprint="fp-other")
    assert models(told(BASE), told(other)).choose("twin").asked == "twin"
    nameless = replace(BASE, fingerprint=""), replace(twin, fingerprint="")
    assert models(*map(told, nameless)).choose("twin").asked == "twin"
    assert models(told(BASE, ADAPTER), told(twin, ADAPTER)).choose("sql").asked == "sql"


def test_an_endpoint_held_to_one_name_answers_by_no_other() -> None:
    found = models(told(BASE, ADAPTER), only="sql")
    assert [one.name for one in found.listed] == ["sql"]
    assert [found.choose(one).asked for one in ("", "edgespec", "sql")] == ["sql"] * 3
    for one in (found, models(only="sql")):
        with pytest.raises(ApiError, match="'base' does not exist here; this is 'sql'"):
            one.choose("base")
    assert models(only="sql").choose("sql") == Chosen("sql", None)


def test_what_has_another_vocabulary_cannot_be_asked_for() -> None:
    found = models(told(BASE, replace(ADAPTER, vocabulary="more words")))
    assert [one.name for one in found.listed] == ["base"]


def test_a_long_list_of_names_is_cut_in_a_message() -> None:
    many = [replace(ADAPTER, name=f"a{number}") for number in range(40)]
    with pytest.raises(ApiError, match=r"there are 'base', 'a0', .*'a14' and 25 more$"):
        models(told(BASE, *many)).choose("sequel")


class Slow:
    """A verifier that answers when it is let."""

    def __init__(self) -> None:
        self.gate, self.asked = asyncio.Event(), 0

    async def connect(self) -> DeviceStream:
        raise LinkError("for questions only")

    async def info(self) -> VerifierInfo:
        self.asked += 1
        await self.gate.wait()
        return told(BASE, ADAPTER)

    async def close(self) -> None:
        return


async def test_many_who_ask_for_an_unknown_name_are_one_question() -> None:
    """Also where its answer takes longer than an answer is new."""
    verifier = Slow()
    watch = VerifierWatch({"a": verifier})
    asking = [asyncio.create_task(watch.look_anew()) for _ in range(5)]
    while not verifier.asked:  # noqa: ASYNC110 # of things that have no event
        await asyncio.sleep(0)
    watch._looked_at = -1e9
    verifier.gate.set()
    await asyncio.gather(*asking)
    assert verifier.asked == 1
    assert [one.name for one in ServedModels(watch).listed] == ["base", "sql"]
    await watch.close()
