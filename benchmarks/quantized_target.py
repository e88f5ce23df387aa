"""What rounding a target's weights does to drafts and to passes.

For each number format: the share of positions of the target's own greedy texts at which the draft
model's first choice is the target's token, and the processor time of a pass in
canonical mode, formats taking turns.

    python benchmarks/quantized_target.py TARGET --draft DRAFT --prompts humaneval.jsonl
    python benchmarks/quantized_target.py TARGET
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.tokenizer import TextTokenizer
from edgespec.ports import PassRequest
from edgespec.targets.torch_target import TorchTarget

FORMATS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}
GREEDY = SamplingParams()
ROWS = ((1, 1), (1, 4), (1, 8), (8, 1), (8, 4))
"""Sessions and rows of each."""
CACHED = 64
PROMPT_LENGTH, TEXT_LENGTH = 128, 96


def texts_of(target: TorchTarget, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt with ``TEXT_LENGTH`` greedy tokens behind it, one a pass, all side by side."""
    texts, cached = [list(prompt) for prompt in prompts], [0] * len(prompts)
    for index, prompt in enumerate(prompts):
        target.open(str(index), len(prompt), GREEDY)
    for _ in range(TEXT_LENGTH):
        batch = [
            PassRequest(str(index), start, tuple(text[start:]))
            for index, (text, start) in enumerate(zip(texts, cached, strict=True))
        ]
        cached = [len(text) for text in texts]
        for text, result in zip(texts, target.forward(batch), strict=True):
            text.append(result.targets[0])
    for index in range(len(prompts)):
        target.close(str(index))
    return texts


def accepted(draft: Any, texts: list[list[int]]) -> float:
    hits = 0
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([text])
            guesses = draft(ids).logits[0, -TEXT_LENGTH - 1 : -1].argmax(dim=1)
            hits += int((guesses == ids[0, -TEXT_LENGTH:]).sum())
    return hits / (TEXT_LENGTH * len(texts))


def pass_time_s(target: TorchTarget, sessions: int, rows: int) -> float:
    """Processor time of a pass, ``sessions`` with ``rows`` rows each behind ``CACHED`` tokens."""
    keys = [f"s{index}" for index in range(sessions)]
    for key in keys:
        target.open(key, CACHED, GREEDY)
        target.forward([PassRequest(key, 0, tuple(range(CACHED)), sample=False)])
    chain = tuple(range(rows - 1))
    batch = [PassRequest(key, CACHED, (1,), chain, tuple(range(-1, rows - 2))) for key in keys]
    start = time.thread_time()  # canonical mode has one thread, and others may use the machine
    target.forward(batch)
    taken = time.thread_time() - start
    for key in keys:
        target.close(key)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=Path, help="JSON lines with a field `prompt`")
    parser.add_argument("--count", type=int, default=30, help="prompts")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    targets = {
        name: TorchTarget(str(options.target), name=name, vocabulary="", device="cpu", **settings)
        for name, settings in FORMATS.items()
    }
    write = sys.stdout.write
    for name, target in targets.items():
        write(f"{name:9} {target.mode}\n")
    if options.draft is not None:
        tokenizer = TextTokenizer(options.draft)
        lines = options.prompts.read_text().splitlines()[: options.count]
        prompts = [tokenizer.encode(json.loads(line)["prompt"])[-PROMPT_LENGTH:] for line in lines]
        draft: Any = transformers.AutoModelForCausalLM.from_pretrained(
            options.draft, dtype=torch.float32
        )
        reference: list[list[int]] = []
        for name, target in targets.items():
            texts = texts_of(target, prompts)
            reference = reference or texts
            same = sum(text == first for text, first in zip(texts, reference, strict=True))
            write(
                f"{name:9} draft right at {accepted(draft, texts):.1%} of positions;"
                f" {same} of {len(texts)} texts as float32's\n"
            )
    for sessions, rows in ROWS:
        times: dict[str, list[float]] = {name: [] for name in targets}
        for _ in range(options.repeats):
            for name, target in targets.items():
                times[name].append(pass_time_s(target, sessions, rows))
        base = statistics.median(times["float32"])
        cells = []
        for name, taken in times.items():
            median = statistics.median(taken)
            low, _, high = statistics.quantiles(taken, n=4)
            spread = f"{1e3 * low:.2f}-{1e3 * high:.2f}"
            cells.append(f"{name} {median / base:.2f} ({1e3 * median:.2f} ms, {spread})")
        write(f"{sessions} x {rows}: {', '.join(cells)}\n")


if __name__ == "__main__":
    main()
