"""Aider with its edit blocks. It has no tools, so a task is three edits of a file."""

from __future__ import annotations

from pathlib import Path

import parts

EDITS = (("empty", "one"), ("also empty", "ten"), ("ten", "two"))


def run(question: str, *files: str) -> str:
    return parts.run_program(
        *("aider", "--model", f"openai/{parts.MODEL}", "--openai-api-base", f"{parts.URL}/v1"),
        *("--openai-api-key", "none", "--edit-format", "diff", "--no-git", "--yes-always"),
        *("--no-show-model-warnings", "--no-check-update", "--analytics-disable"),
        *("--no-pretty", "--message", question, *files),
    )


def plain():
    return run(parts.ASK["plain"])


def edits():
    Path("notes.txt").write_text("empty\nalso empty\n")
    answers = [run(f'In notes.txt replace "{old}" by "{new}".', "notes.txt") for old, new in EDITS]
    return parts.describe_task(answers[-1])


parts.run_parts(plain=plain, edits=edits)
