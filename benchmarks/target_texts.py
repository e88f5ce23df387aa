"""What the bundled target writes behind public prompts, kept in a file; ``steer_draft.py``,
``judge_probe.py`` and ``exit_oracle.py`` share it.

    EDGESPEC_DATA=... python benchmarks/target_texts.py TEXTS.json [--rounds 4]

Every prompt once greedy, then at 0.7 with other seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from edgespec.device.build import load_tokenizer
from edgespec.models.folders import Role, resolve_model
from edgespec.training.distill import load_model
from edgespec.training.texts import Text, write

SETS: Final = (
    ("humaneval", "code", 114),
    ("gsm8k_test", "maths", 200),
    ("mt_bench", "chat", 49),
    ("mbpp", "code", 150),
    ("oasst_prompts", "chat", 100),
)
KINDS: Final = [kind for _, kind, count in SETS for _ in range(count)]
"""Of the texts of a round, in their order."""
PROMPT: Final = 96
TOKENS: Final = 96


class Written(NamedTuple):
    temperature: float
    seed: int
    text: Text


def read(path: Path) -> list[Written]:
    return [Written(heat, seed, Text(*one)) for heat, seed, one in json.loads(path.read_text())]


def batch(texts: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, filled up, and whether what follows a token is to be guessed."""
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.tensor([text.tokens + [0] * (longest - len(text.tokens)) for text in texts])
    places = torch.arange(longest)
    wanted = [(places >= one.start - 1) & (places < len(one.tokens) - 1) for one in texts]
    return tokens, torch.stack(wanted)


def prompts() -> Iterator[list[int]]:
    folder, encode = Path(os.environ["EDGESPEC_DATA"]) / "prompts", load_tokenizer("bundled").encode
    for name, _, count in SETS:
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        for row in map(json.loads, lines):
            said = row.get("prompt") or row.get("question") or row.get("text") or row["turns"][0]
            text = said if name == "humaneval" else f"<|user|>{said}<|assistant|>"
            yield encode(text)[-PROMPT:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("--rounds", type=int, default=4, help="texts behind a prompt")
    options = parser.parse_args()
    target: Any = load_model(resolve_model("bundled", Role.TARGET), exact=True)
    found, asked = list[Written](), list(prompts())
    for number in range(options.rounds):
        heat = 0.7 if number else 0.0
        for first in range(0, len(asked), 128):
            part = asked[first : first + 128]
            seeds = [number * 100_000 + first + at for at in range(len(part))]
            said = write(target, part, [heat] * len(part), seeds, TOKENS, lambda: None)
            found += [Written(heat, seed, text) for seed, text in zip(seeds, said, strict=True)]
            print(f"{len(found)} texts, {time.process_time():.0f} s", flush=True)
    options.texts.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
