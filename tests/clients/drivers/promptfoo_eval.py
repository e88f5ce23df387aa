"""Promptfoo: one prompt through three of its providers."""

from __future__ import annotations

import json
from pathlib import Path

import parts


def run(provider: str) -> str:
    where = {"apiBaseUrl": f"{parts.URL}/v1", "apiKey": "none"}
    config = {
        "prompts": ["{{question}}"],
        "providers": [{"id": f"openai:{provider}:{parts.MODEL}", "config": where}],
        "tests": [{"vars": {"question": parts.ASK["plain"]}}],
    }
    Path("promptfooconfig.json").write_text(json.dumps(config))
    parts.run_program(
        *("promptfoo", "eval", "-c", "promptfooconfig.json", "--no-cache", "--no-table"),
        *("--no-progress-bar", "-o", "found.json"),
        PROMPTFOO_DISABLE_TELEMETRY="1",
        PROMPTFOO_DISABLE_UPDATE="1",
        PROMPTFOO_DISABLE_REMOTE_GENERATION="1",
    )
    (found,) = json.loads(Path("found.json").read_text())["results"]["results"]
    if found.get("error"):
        raise RuntimeError(found["error"])
    return str(found["response"]["output"])


def plain():
    return run("chat")


def responses():
    return run("responses")


def completion():
    return run("completion")


parts.run_parts(plain=plain, responses=responses, completion=completion)
