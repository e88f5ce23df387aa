"""Pydantic AI with its models of chat completions and of responses."""

from __future__ import annotations

import asyncio

import parts
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{parts.URL}/v1", api_key="none")
model = OpenAIChatModel(parts.MODEL, provider=provider)


class City(BaseModel):
    city: str
    country: str


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return parts.read_weather({"city": city})


def plain():
    return Agent(model).run_sync(parts.ASK["plain"]).output


def stream():
    async def run() -> str:
        async with Agent(model).run_stream(parts.ASK["plain"]) as result:
            pieces = result.stream_text(delta=True, debounce_by=None)
            return parts.join_pieces([one async for one in pieces])

    return asyncio.run(run())


def tools():
    return Agent(model, tools=[get_weather]).run_sync(parts.ASK["tools"]).output


def structured():
    found = Agent(model, output_type=NativeOutput(City)).run_sync(parts.ASK["structured"])
    return found.output.model_dump_json()


def forced_call():
    agent = Agent(model, output_type=City, tools=[get_weather])
    return agent.run_sync(parts.ASK["structured"]).output.model_dump_json()


def responses_tools():
    agent = Agent(OpenAIResponsesModel(parts.MODEL, provider=provider), tools=[get_weather])
    return agent.run_sync(parts.ASK["tools"]).output


parts.run_parts(
    plain=plain,
    stream=stream,
    tools=tools,
    structured=structured,
    forced_call=forced_call,
    responses_tools=responses_tools,
)
