"""Haystack's chat generators."""

from __future__ import annotations

import parts
from haystack.components.agents import Agent
from haystack.components.generators.chat import (
    OpenAIChatGenerator,
    OpenAIResponsesChatGenerator,
)
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret


def make(kind=OpenAIChatGenerator, **options):
    return kind(
        api_key=Secret.from_token("none"),
        model=parts.MODEL,
        api_base_url=f"{parts.URL}/v1",
        **options,
    )


def get_weather(city: str) -> str:
    return parts.read_weather({"city": city})


TOOL = Tool(
    name="get_weather",
    description="Return the weather of a city.",
    parameters=parts.WEATHER_SCHEMA,
    function=get_weather,
)


def ask(generator, question: str) -> str:
    return generator.run(messages=[ChatMessage.from_user(question)])["replies"][0].text


def plain():
    return ask(make(), parts.ASK["plain"])


def stream():
    pieces = []
    ask(make(streaming_callback=lambda chunk: pieces.append(chunk.content)), parts.ASK["plain"])
    return parts.join_pieces(pieces)


def tools(**options):
    agent = Agent(chat_generator=make(**options), tools=[TOOL])
    return agent.run(messages=[ChatMessage.from_user(parts.ASK["tools"])])["last_message"].text


def strict_tools():
    return tools(tools_strict=True)


def structured():
    form = {"name": "city", "strict": True, "schema": parts.CITY_SCHEMA}
    options = {"response_format": {"type": "json_schema", "json_schema": form}}
    return ask(make(generation_kwargs=options), parts.ASK["structured"])


def responses():
    return ask(make(OpenAIResponsesChatGenerator), parts.ASK["plain"])


parts.run_parts(
    plain=plain,
    stream=stream,
    tools=tools,
    strict_tools=strict_tools,
    structured=structured,
    responses=responses,
)
