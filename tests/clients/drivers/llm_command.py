"""The command ``llm``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import parts

FUNCTION = """
def get_weather(city: str) -> str:
    "Return the weather of a city."
    return f"21 degrees in {city}"
"""
MODEL = {
    "model_id": "edgespec",
    "model_name": parts.MODEL,
    "api_base": f"{parts.URL}/v1",
    "supports_tools": True,
    "supports_schema": True,
}


def run(*arguments: str) -> str:
    folder = Path(os.environ["HOME"]) / "llm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "extra-openai-models.yaml").write_text(json.dumps([MODEL]))
    return parts.run_program(
        "llm", "prompt", "-m", "edgespec", *arguments, LLM_USER_PATH=str(folder)
    )


def plain():
    return run("--no-stream", parts.ASK["plain"])


def stream():
    return run(parts.ASK["plain"])


def tools():
    return run("--functions", FUNCTION, parts.ASK["tools"])


def structured():
    return run("--schema", json.dumps(parts.CITY_SCHEMA), parts.ASK["structured"])


parts.run_parts(plain=plain, stream=stream, tools=tools, structured=structured)
