"""OpenCode, an agent for the terminal, without questions to the user."""

from __future__ import annotations

import json
from pathlib import Path

import parts

CONFIG = {
    "model": f"edgespec/{parts.MODEL}",
    "provider": {
        "edgespec": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{parts.URL}/v1"},
            "models": {parts.MODEL: {}},
        }
    },
}


def run(question: str) -> str:
    Path("opencode.json").write_text(json.dumps(CONFIG))
    return parts.run_program("opencode", "run", question)


def plain():
    return run(parts.ASK["plain"])


def task():
    return parts.describe_task(run(parts.ASK["task"]))


parts.run_parts(plain=plain, task=task)
