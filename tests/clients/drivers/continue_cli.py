"""Continue for the terminal, without questions to the user."""

from __future__ import annotations

import json
from pathlib import Path

import parts

CONFIG = {
    "name": "edgespec",
    "version": "1.0.0",
    "schema": "v1",
    "models": [
        {
            "name": "edgespec",
            "provider": "openai",
            "model": parts.MODEL,
            "apiBase": f"{parts.URL}/v1",
            "apiKey": "none",
            "roles": ["chat"],
            "capabilities": ["tool_use"],
        }
    ],
}


def run(question: str) -> str:
    Path("config.yaml").write_text(json.dumps(CONFIG))
    return parts.run_program("cn", "-p", "--auto", "--config", "config.yaml", question)


def plain():
    return run(parts.ASK["plain"])


def task():
    return parts.describe_task(run(parts.ASK["task"]))


parts.run_parts(plain=plain, task=task)
