"""Qwen Code, an agent for the terminal, without questions to the user."""

from __future__ import annotations

import parts


def run(question: str) -> str:
    return parts.run_program(
        *("qwen", "--auth-type", "openai", "--yolo", "-p", question),
        OPENAI_BASE_URL=f"{parts.URL}/v1",
        OPENAI_API_KEY="none",
        OPENAI_MODEL=parts.MODEL,
    )


def plain():
    return run(parts.ASK["plain"])


def task():
    return parts.describe_task(run(parts.ASK["task"]))


parts.run_parts(plain=plain, task=task)
