"""GuideLLM: a few requests one after another, and a few at the same time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import parts

COUNT = 6


def run(profile: str, *options: str) -> str:
    """Return how many requests succeeded. Raises ``ValueError`` if one did not."""
    file = Path(f"{profile}.json")
    parts.run_program(
        *("guidellm", "benchmark", "run", "--target", parts.URL, "--model", parts.MODEL),
        *("--processor", os.environ["EDGESPEC_CLIENT_TOKENIZER"]),
        *("--data", "prompt_tokens=32,output_tokens=8"),
        *("--profile", profile, *options, "--max-requests", str(COUNT)),
        *("--output-dir", ".", "--outputs", str(file)),
        HF_HUB_OFFLINE="1",
    )
    (found,) = json.loads(file.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    if totals["errored"] or totals["successful"] < COUNT:
        raise ValueError(f"not all requests succeeded: {totals}")
    return str(totals["successful"])


def synchronous():
    return run("synchronous")


def throughput():
    return run("throughput")


parts.run_parts(synchronous=synchronous, throughput=throughput)
