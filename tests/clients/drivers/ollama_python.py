"""Ollama's own package for Python."""

from __future__ import annotations

import parts
from ollama import Client

client = Client(parts.URL)


def ask(question: str, **options):
    return client.chat(parts.MODEL, [{"role": "user", "content": question}], **options)


def plain():
    names = [one.model for one in client.list().models]
    assert parts.MODEL in [name.removesuffix(":latest") for name in names]
    client.show(parts.MODEL)
    client.ps()
    return ask(parts.ASK["plain"]).message.content


def generate():
    return client.generate(parts.MODEL, parts.ASK["plain"]).response


def stream():
    return parts.join_pieces(part.message.content for part in ask(parts.ASK["plain"], stream=True))


def tools():
    messages = [{"role": "user", "content": parts.ASK["tools"]}]
    while True:
        message = client.chat(parts.MODEL, messages, tools=[parts.OPENAI_TOOL]).message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            weather = parts.read_weather(call.function.arguments)
            messages.append({"role": "tool", "tool_name": call.function.name, "content": weather})


def structured():
    return ask(parts.ASK["structured"], format=parts.CITY_SCHEMA).message.content


def thoughts():
    message = ask(parts.ASK["thoughts"], think=True).message
    return f"{message.thinking}|{message.content}"


parts.run_parts(
    plain=plain,
    generate=generate,
    stream=stream,
    tools=tools,
    structured=structured,
    thoughts=thoughts,
)
