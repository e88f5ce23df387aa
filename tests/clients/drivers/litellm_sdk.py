"""LiteLLM's package, with four of its providers."""

from __future__ import annotations

import json

import litellm
import parts

litellm.telemetry = False


def ask(question: str, provider: str = "openai", **options):
    messages = [{"role": "user", "content": question}]
    return litellm.completion(
        model=f"{provider}/{parts.MODEL}",
        api_base=f"{parts.URL}/v1",
        api_key="none",
        messages=messages,
        **options,
    )


def plain():
    return ask(parts.ASK["plain"]).choices[0].message.content


def stream():
    chunks = ask(parts.ASK["plain"], stream=True)
    return parts.join_pieces(chunk.choices[0].delta.content for chunk in chunks)


def tools():
    messages = [{"role": "user", "content": parts.ASK["tools"]}]
    while True:
        message = (
            litellm.completion(
                model=f"openai/{parts.MODEL}",
                api_base=f"{parts.URL}/v1",
                api_key="none",
                messages=messages,
                tools=[parts.OPENAI_TOOL],
            )
            .choices[0]
            .message
        )
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump())
        for call in message.tool_calls:
            weather = parts.read_weather(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": weather})


def structured():
    form = {"name": "city", "strict": True, "schema": parts.CITY_SCHEMA}
    options = {"response_format": {"type": "json_schema", "json_schema": form}}
    found = ask(parts.ASK["structured"], **options).choices[0].message.content
    return json.dumps(json.loads(found))


def thoughts():
    message = ask(parts.ASK["thoughts"], "hosted_vllm").choices[0].message
    return f"{message.reasoning_content}|{message.content}"


def messages_api():
    done = litellm.completion(
        model=f"anthropic/{parts.MODEL}",
        api_base=parts.URL,
        api_key="none",
        messages=[{"role": "user", "content": parts.ASK["plain"]}],
        max_tokens=256,
    )
    return done.choices[0].message.content


def ollama_api():
    done = litellm.completion(
        model=f"ollama_chat/{parts.MODEL}",
        api_base=parts.URL,
        messages=[{"role": "user", "content": parts.ASK["plain"]}],
    )
    return done.choices[0].message.content


parts.run_parts(
    plain=plain,
    stream=stream,
    tools=tools,
    structured=structured,
    thoughts=thoughts,
    messages_api=messages_api,
    ollama_api=ollama_api,
)
