"""Instructor in four of its modes."""

from __future__ import annotations

import instructor
import parts
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    city: str
    country: str


def find(mode, **options):
    openai = OpenAI(base_url=f"{parts.URL}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(openai, mode=mode)
    return client.create(
        model=parts.MODEL,
        response_model=City,
        messages=[{"role": "user", "content": parts.ASK["structured"]}],
        max_retries=0,
        **options,
    )


def structured():
    return find(instructor.Mode.TOOLS).model_dump_json()


def json_schema():
    return find(instructor.Mode.JSON_SCHEMA).model_dump_json()


def responses_tools():
    return find(instructor.Mode.RESPONSES_TOOLS).model_dump_json()


def stream():
    openai = OpenAI(base_url=f"{parts.URL}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    messages = [{"role": "user", "content": parts.ASK["structured"]}]
    *_, last = client.create_partial(
        model=parts.MODEL, response_model=City, messages=messages, max_retries=0
    )
    return last.model_dump_json()


parts.run_parts(
    structured=structured,
    json_schema=json_schema,
    responses_tools=responses_tools,
    stream=stream,
)
