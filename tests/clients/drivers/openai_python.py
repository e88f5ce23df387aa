"""OpenAI's own package for Python: chat completions and responses."""

from __future__ import annotations

import json

import parts
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{parts.URL}/v1", api_key="none", max_retries=0)
RESPONSES_TOOL = {"type": "function", **parts.OPENAI_TOOL["function"], "strict": True}


class City(BaseModel):
    city: str
    country: str


def ask(question: str, **options):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=parts.MODEL, messages=messages, **options)


def plain():
    assert parts.MODEL in [one.id for one in client.models.list()]
    return ask(parts.ASK["plain"]).choices[0].message.content


def stream():
    chunks = ask(parts.ASK["plain"], stream=True, stream_options={"include_usage": True})
    return parts.join_pieces(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)


def tools(strict: bool = False):
    tool = json.loads(json.dumps(parts.OPENAI_TOOL))
    tool["function"]["strict"] = strict
    messages = [{"role": "user", "content": parts.ASK["tools"]}]
    while True:
        with client.chat.completions.stream(
            model=parts.MODEL, messages=messages, tools=[tool]
        ) as events:
            message = events.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.to_dict())
        for call in message.tool_calls:
            weather = parts.read_weather(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather})


def strict_tools():
    return tools(strict=True)


def structured():
    done = client.chat.completions.parse(
        model=parts.MODEL,
        messages=[{"role": "user", "content": parts.ASK["structured"]}],
        response_format=City,
    )
    return done.choices[0].message.parsed.model_dump_json()


def thoughts():
    message = ask(parts.ASK["thoughts"]).choices[0].message
    return f"{message.reasoning_content}|{message.content}"


def responses():
    with client.responses.stream(model=parts.MODEL, input=parts.ASK["plain"]) as events:
        return events.get_final_response().output_text


def responses_tools():
    done = client.responses.create(
        model=parts.MODEL, input=parts.ASK["tools"], tools=[RESPONSES_TOOL]
    )
    (call,) = [one for one in done.output if one.type == "function_call"]
    output = parts.read_weather(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    return client.responses.create(
        model=parts.MODEL, previous_response_id=done.id, input=[result], tools=[RESPONSES_TOOL]
    ).output_text


def responses_structured():
    done = client.responses.parse(
        model=parts.MODEL, input=parts.ASK["structured"], text_format=City
    )
    return done.output_parsed.model_dump_json()


parts.run_parts(
    plain=plain,
    stream=stream,
    tools=tools,
    strict_tools=strict_tools,
    structured=structured,
    thoughts=thoughts,
    responses=responses,
    responses_tools=responses_tools,
    responses_structured=responses_structured,
)
