"""LlamaIndex's model for servers with OpenAI's API."""

from __future__ import annotations

import asyncio

import parts
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

llm = OpenAILike(
    model=parts.MODEL,
    api_base=f"{parts.URL}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
)


class City(BaseModel):
    """A city and its country."""

    city: str
    country: str


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return parts.read_weather({"city": city})


def plain():
    return llm.chat([ChatMessage(role="user", content=parts.ASK["plain"])]).message.content


def stream():
    messages = [ChatMessage(role="user", content=parts.ASK["plain"])]
    return parts.join_pieces(chunk.delta for chunk in llm.stream_chat(messages))


def tools():
    async def run() -> str:
        agent = FunctionAgent(tools=[get_weather], llm=llm)
        return str(await agent.run(parts.ASK["tools"]))

    return asyncio.run(run())


def structured():
    return llm.as_structured_llm(City).complete(parts.ASK["structured"]).raw.model_dump_json()


parts.run_parts(plain=plain, stream=stream, tools=tools, structured=structured)
