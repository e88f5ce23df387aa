"""Claude Code, Anthropic's agent for the terminal, without questions to the user."""

from __future__ import annotations

import parts


def run(question: str) -> str:
    return parts.run_program(
        *("claude", "-p", question, "--allowedTools", "Bash"),
        ANTHROPIC_BASE_URL=parts.URL,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_MODEL=parts.MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=parts.MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


def plain():
    return run(parts.ASK["plain"])


def task():
    return parts.describe_task(run(parts.ASK["task"]))


parts.run_parts(plain=plain, task=task)
