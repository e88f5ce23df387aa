"""OpenAI's Agents SDK over chat completions and over responses."""

from __future__ import annotations

import asyncio

import parts
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{parts.URL}/v1", api_key="none", max_retries=0)
chat = OpenAIChatCompletionsModel(parts.MODEL, client)
responses_api = OpenAIResponsesModel(parts.MODEL, client)
loop = asyncio.new_event_loop()  # a client belongs to one loop


class City(BaseModel):
    city: str
    country: str


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return parts.read_weather({"city": city})


def run(question: str, **options):
    agent = Agent(name="assistant", **{"model": chat, **options})
    return loop.run_until_complete(Runner.run(agent, question)).final_output


def plain():
    return run(parts.ASK["plain"])


def stream():
    async def read() -> str:
        agent = Agent(name="assistant", model=chat)
        result = Runner.run_streamed(agent, parts.ASK["plain"])
        deltas = []
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                if event.data.type == "response.output_text.delta":
                    deltas.append(event.data.delta)
        return parts.join_pieces(deltas)

    return loop.run_until_complete(read())


def tools():
    return run(parts.ASK["tools"], tools=[get_weather])


def structured():
    return run(parts.ASK["structured"], output_type=City).model_dump_json()


def handoff():
    other = Agent(name="weather", model=chat, tools=[get_weather])
    agent = Agent(name="assistant", model=chat, handoffs=[other])
    result = loop.run_until_complete(Runner.run(agent, "Call transfer_to_weather with {}."))
    assert result.last_agent is other
    return result.final_output


def responses_tools():
    return run(parts.ASK["tools"], model=responses_api, tools=[get_weather])


parts.run_parts(
    plain=plain,
    stream=stream,
    tools=tools,
    structured=structured,
    handoff=handoff,
    responses_tools=responses_tools,
)
