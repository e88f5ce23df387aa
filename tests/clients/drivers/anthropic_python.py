"""Anthropic's own package for Python."""

from __future__ import annotations

import parts
from anthropic import Anthropic

client = Anthropic(base_url=parts.URL, api_key="none", max_retries=0)
TOOL = {
    "name": "get_weather",
    "description": "Return the weather of a city.",
    "input_schema": parts.WEATHER_SCHEMA,
}


def ask(question: str, **options):
    messages = [{"role": "user", "content": question}]
    return client.messages.create(model=parts.MODEL, max_tokens=512, messages=messages, **options)


def text_of(message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def plain():
    return text_of(ask(parts.ASK["plain"], system="Be short."))


def stream():
    messages = [{"role": "user", "content": parts.ASK["plain"]}]
    with client.messages.stream(model=parts.MODEL, max_tokens=512, messages=messages) as events:
        return parts.join_pieces(events.text_stream)


def tools():
    messages = [{"role": "user", "content": parts.ASK["tools"]}]
    while True:
        with client.messages.stream(
            model=parts.MODEL, max_tokens=512, messages=messages, tools=[TOOL]
        ) as events:
            message = events.get_final_message()
        if message.stop_reason != "tool_use":
            return text_of(message)
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": parts.read_weather(block.input),
            }
            for block in message.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def structured():
    form = {"format": {"type": "json_schema", "schema": parts.CITY_SCHEMA}}
    return text_of(ask(parts.ASK["structured"], output_config=form))


def thoughts():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    messages = [{"role": "user", "content": parts.ASK["thoughts"]}]
    message = client.messages.create(
        model=parts.MODEL, max_tokens=2048, messages=messages, thinking=thinking
    )
    thought = "".join(block.thinking for block in message.content if block.type == "thinking")
    return f"{thought}|{text_of(message)}"


def count_tokens():
    messages = [{"role": "user", "content": parts.ASK["plain"]}]
    return client.messages.count_tokens(model=parts.MODEL, messages=messages).input_tokens


parts.run_parts(
    plain=plain,
    stream=stream,
    tools=tools,
    structured=structured,
    thoughts=thoughts,
    count_tokens=count_tokens,
)
