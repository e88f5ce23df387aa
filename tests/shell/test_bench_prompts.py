"""Reading prompts: every format in use gives its text, and a wrong line is named.

Oracle: the texts written into the files by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgespec.bench.prompts import (
    DEFAULT_PROMPTS,
    MAX_LINE_CHARACTERS,
    PromptError,
    choose_workload,
    read_prompts,
)
from edgespec.bench.runner import BenchSettings
from edgespec.cli import bench
from edgespec.cli.main import app

FORMATS = (
    ({"question_id": 81, "category": "writing", "turns": ["hello", "and then?"]}, "hello"),
    ({"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}, "def f():\n"),
    ({"id": 2, "question": "How many?", "answer": "3"}, "How many?"),
    ({"task_id": 9, "text": "Write a function.", "test": "assert f()"}, "Write a function."),
    ({"id": 0, "prompt": "What is it?"}, "What is it?"),
    ({"text": "  kept as it is "}, "  kept as it is "),
)


def written(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("row", "text"), FORMATS)
def test_each_format_gives_its_prompt(row: object, text: str, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(row))
    assert [prompt.text for prompt in read_prompts(path)] == [text]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ('{"answer": "x"}', "it has: answer"),
        ('{"turns": []}', r"turns\[0\] must be a text"),
        ('{"turns": "x"}', r"turns\[0\] must be a text"),
        ('{"prompt": 7}', "prompt must be a text"),
        ('{"question": "  "}', "question must be a text that is not empty"),
        ('{"text": "' + "x" * MAX_LINE_CHARACTERS + '"}', "longer than 1048576 characters"),
    ],
)
def test_a_wrong_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, '{"text": "fine"}', line)
    with pytest.raises(PromptError, match=rf"prompts\.jsonl:2: .*{said}"):
        list(read_prompts(path))


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="holds no prompt"):
        list(read_prompts(written(tmp_path, "", "")))
    with pytest.raises(PromptError, match="no such file"):
        list(read_prompts(tmp_path / "absent.jsonl"))
    (tmp_path / "latin").write_bytes(b'{"text": "\xe9"}')
    with pytest.raises(PromptError, match="not readable as UTF-8"):
        list(read_prompts(tmp_path / "latin"))


def test_a_workload_is_the_first_prompts_that_fit() -> None:
    workload = choose_workload(
        DEFAULT_PROMPTS,
        lambda text: [ord(c) for c in text],
        limit=2,
        room=100,
        eos_token_ids=(0,),
    )
    fitting = [p for p in DEFAULT_PROMPTS if len(p.text) <= 100]
    assert workload.names == tuple(p.name for p in fitting[:2])
    assert workload.too_long == DEFAULT_PROMPTS.index(fitting[1]) - 1
    with pytest.raises(ValueError, match=r"none of the 9 prompts fits.*room for 5 prompt tokens"):
        choose_workload(
            DEFAULT_PROMPTS, lambda text: [1] * len(text), limit=2, room=5, eos_token_ids=()
        )


@pytest.mark.parametrize(
    ("arguments", "draft_ms"), [((), 8.0), (("--draft", "lookup"), 0.0), (("--draft-ms", "3"), 3.0)]
)
def test_what_is_looked_up_is_not_paced_as_a_model(
    arguments: tuple[str, ...], draft_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[BenchSettings] = []

    class Bench:
        def __init__(self, settings: BenchSettings, *others: object) -> None:
            found.append(settings)

        def execute(self, json: Path | None) -> int:
            return 0

    monkeypatch.setattr(bench, "_Bench", Bench)
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 0, done.output
    assert [one.draft_ms for one in found] == [draft_ms]
