"""LangChain's chat model for OpenAI's API."""

from __future__ import annotations

import parts
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(base_url=f"{parts.URL}/v1", api_key="none", model=parts.MODEL, max_retries=0)


class City(BaseModel):
    city: str
    country: str


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return parts.read_weather({"city": city})


def plain():
    return model.invoke(parts.ASK["plain"]).content


def stream():
    return parts.join_pieces(chunk.content for chunk in model.stream(parts.ASK["plain"]))


def tools(**options):
    bound = model.bind_tools([get_weather], **options)
    messages = [HumanMessage(parts.ASK["tools"])]
    while True:
        answer = bound.invoke(messages)
        if not answer.tool_calls:
            return answer.content
        messages.append(answer)
        for call in answer.tool_calls:
            result = get_weather.invoke(call["args"])
            messages.append(ToolMessage(result, tool_call_id=call["id"]))


def strict_tools():
    return tools(strict=True)


def structured():
    found = model.with_structured_output(City).invoke(parts.ASK["structured"])
    return found.model_dump_json()


def forced_call():
    bound = model.with_structured_output(City, method="function_calling")
    return bound.invoke(parts.ASK["structured"]).model_dump_json()


def responses():
    return model.model_copy(update={"use_responses_api": True}).invoke(parts.ASK["plain"]).text


parts.run_parts(
    plain=plain,
    stream=stream,
    tools=tools,
    strict_tools=strict_tools,
    structured=structured,
    forced_call=forced_call,
    responses=responses,
)
