"""LM Evaluation Harness: a task of multiple choice, and one that generates."""

from __future__ import annotations

import json
import os
from pathlib import Path

import parts

QUESTIONS = (
    ("The capital of France is", ["Paris", "Rome"], 0),
    ("The capital of Italy is", ["Paris", "Rome"], 1),
    ("Two and two make", ["four", "nine"], 0),
)
COMMON = """\
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""
CHOICE = """\
task: edgespec_choice
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
GENERATION = """\
task: edgespec_generation
output_type: generate_until
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def run(task: str, text: str) -> float:
    """Return the score of a task; any number shows that the harness got what it needs."""
    rows = [{"question": q, "choices": c, "label": place} for q, c, place in QUESTIONS]
    Path("questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path(f"{task}.yaml").write_text(text + COMMON)
    tokenizer = os.environ["EDGESPEC_CLIENT_TOKENIZER"]
    where = f"model={parts.MODEL},base_url={parts.URL}/v1/completions,tokenizer={tokenizer}"
    parts.run_program(
        *("lm_eval", "--model", "local-completions", "--tasks", task, "--include_path", "."),
        *("--model_args", where, "--output_path", task),
        HF_HUB_OFFLINE="1",
        OPENAI_API_KEY="none",
    )
    (found,) = Path(task).rglob("results_*.json")
    scores = json.loads(found.read_text())["results"][task]
    return next(one for key, one in scores.items() if key.endswith(",none") and "stderr" not in key)


def score():
    return run("edgespec_choice", CHOICE)


def generate():
    return run("edgespec_generation", GENERATION)


parts.run_parts(score=score, generate=generate)
