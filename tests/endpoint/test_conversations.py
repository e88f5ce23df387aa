"""Which conversation a request belongs to. Oracle: what the scripted agent is handed."""

from __future__ import annotations

from typing import Any

from tests.endpoint.live_endpoint import ScriptedAgent, ask, over_script

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: object) -> dict[str, object]:
    return {"role": "user", "content": text}


async def handed(path: str, *asked: dict[str, Any]) -> list[str]:
    agent = ScriptedAgent(["a"])
    async with over_script(agent) as live:
        for one in asked:
            assert (await ask(live, path, one)).status == 200
    return agent.conversations


async def test_the_turns_of_a_chat_are_one_conversation() -> None:
    answer = {"role": "assistant", "content": "a"}
    first, later, other_system, other = await handed(
        CHAT,
        {"messages": [SYSTEM, user("Hi")]},
        {"messages": [SYSTEM, user([{"type": "text", "text": "Hi"}]), answer, user("And?")]},
        {"messages": [user("Hi")]},
        {"messages": [SYSTEM, user("Ho")]},
    )
    assert first == later
    assert len({first, other_system, other}) == 3
    assert len(first) == 16


async def test_a_key_names_it_and_texts_of_one_request_share_it() -> None:
    named = await handed(
        CHAT,
        {"messages": [user("Hi")], "prompt_cache_key": "mine", "n": 2},
        {"messages": [user("Ho")], "prompt_cache_key": "mine"},
        {"messages": [user("Ho")], "prompt_cache_key": "yours"},
    )
    assert named[0] == named[1] == named[2] != named[3]
    assert await handed(COMPLETION, {"prompt": "abc", "prompt_cache_key": "mine"}) == named[:1]
    assert "mine" not in named[0]
