"""Codex, OpenAI's agent for the terminal, without questions to the user."""

from __future__ import annotations

import os
from pathlib import Path

import parts

CONFIG = f"""\
model = "{parts.MODEL}"
model_provider = "edgespec"

[model_providers.edgespec]
name = "edgespec"
base_url = "{parts.URL}/v1"
wire_api = "responses"
"""


def run(question: str) -> str:
    home = Path(os.environ["HOME"]) / ".codex"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(CONFIG)
    free = "--dangerously-bypass-approvals-and-sandbox"
    return parts.run_program("codex", "exec", "--skip-git-repo-check", free, question)


def plain():
    return run(parts.ASK["plain"])


def task():
    return parts.describe_task(run(parts.ASK["task"]))


parts.run_parts(plain=plain, task=task)
