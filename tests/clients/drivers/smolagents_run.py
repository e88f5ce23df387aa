"""Smolagents: its model and the agent that calls tools."""

from __future__ import annotations

import parts
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(model_id=parts.MODEL, api_base=f"{parts.URL}/v1", api_key="none")


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: Name of the city.
    """
    return parts.read_weather({"city": city})


def messages():
    return [{"role": "user", "content": [{"type": "text", "text": parts.ASK["plain"]}]}]


def plain():
    return model.generate(messages()).content


def stream():
    return parts.join_pieces(one.content for one in model.generate_stream(messages()))


def tools():
    agent = ToolCallingAgent(tools=[get_weather], model=model, max_steps=4, verbosity_level=0)
    return agent.run(parts.ASK["tools"])


parts.run_parts(plain=plain, stream=stream, tools=tools)
