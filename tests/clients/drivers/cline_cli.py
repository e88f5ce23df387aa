"""Cline for the terminal, without questions to the user."""

from __future__ import annotations

import parts


def run(question: str) -> str:
    parts.run_program(
        *("cline", "auth", "-p", "openai-compatible", "-k", "none"),
        *("-b", f"{parts.URL}/v1", "-m", parts.MODEL),
    )
    return parts.run_program("cline", question)


def plain():
    return run(parts.ASK["plain"])


def task():
    return parts.describe_task(run(parts.ASK["task"]))


parts.run_parts(plain=plain, task=task)
