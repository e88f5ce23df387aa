"""Acceptance of a draft whose tokenizer is not the target's, with real models.

    python benchmarks/other_tokenizers.py record --target FOLDER --store FILE [--texts 24]
        [--tokens 64] [--temperatures 0,0.7,1] [--prompts FILE.jsonl]
    python benchmarks/other_tokenizers.py judge --target FOLDER --store FILE --draft DRAFT
        [--lookahead 0,1,2] [--own-noise] [--depth 8] [--json FILE]

``record`` lets the target write its texts once. ``judge`` plays each text against a draft, as a
session does: from the committed tokens the draft makes a chain of up to ``--depth`` tokens, the
target's own tokens judge it, and the next chain begins behind the first token that differs. A draft
with the target's own tokenizer is judged in the same way. Columns: share of the places at which the
first candidate is right, and at which one of three is; tokens right in a row, at most ``--depth``;
runs of the draft model for each judged place; seconds of processor time for each run are not
measured. ``--own-noise`` leaves out the noise that both ends share. Intervals are 95 % over texts.
The exit status is 1 if a committed token was not continued as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from edgespec.bench.intervals import mean_interval
from edgespec.bench.prompts import DEFAULT_PROMPTS, read_prompts
from edgespec.core import ports
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import load_tokenizer
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.translating_drafter import TranslatingDrafter
from edgespec.models.byte_vocabulary import ByteVocabulary
from edgespec.models.folders import model_info
from edgespec.models.tokenizer import TextTokenizer
from edgespec.models.translation import Translation, describe_translation
from edgespec.training.distill import load_model
from edgespec.training.texts import write

WIDTH, ROUND = 3, 32


class CountingDrafter:
    """The drafter ``inner``, with a count of its steps."""

    def __init__(self, inner: ports.Drafter) -> None:
        self.inner, self.info, self.begin, self.close = inner, inner.info, inner.begin, inner.close
        self.steps = 0

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: ports.Cancelled = ports.never_cancelled,
    ) -> tuple[ports.Candidate, ...]:
        self.steps += 1
        return self.inner.step(keep_length, feed, width, cancelled)


@dataclass(slots=True)
class Tally:
    """Counts of the texts of one temperature, one number for each text."""

    first: list[float] = field(default_factory=list)
    any_rank: list[float] = field(default_factory=list)
    in_a_row: list[float] = field(default_factory=list)
    runs: list[float] = field(default_factory=list)


def record(args: argparse.Namespace) -> None:
    tokenizer, model = load_tokenizer(args.target), load_model(Path(args.target), exact=False)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        model.to(torch.bfloat16)  # twice as quick; its texts are as good as any
    prompts = [
        one.text for one in (read_prompts(args.prompts) if args.prompts else DEFAULT_PROMPTS)
    ]
    prompts = prompts[: args.texts]
    ids = [tokenizer.encode(text)[-256:] for text in prompts]
    rows = []
    for heat in map(float, args.temperatures.split(",")):
        seeds = list(range(len(ids)))
        for first in range(0, len(ids), ROUND):
            part = slice(first, first + ROUND)
            heats = [heat] * len(ids[part])
            texts = write(model, ids[part], heats, seeds[part], args.tokens, lambda: None)
            rows += [
                {"temperature": heat, "seed": seed, "tokens": one.tokens, "start": one.start}
                for one, seed in zip(texts, seeds[part], strict=True)
            ]
    Path(args.store).write_text(json.dumps(rows))
    print(f"{len(rows)} texts in {args.store}")


def play(drafter: ports.Drafter, row: dict[str, Any], depth: int) -> tuple[list[int], list[int]]:
    """Return the rank of the right candidate at each judged place (-1 for none), and the number of
    tokens that were right in each chain."""
    tokens, position = row["tokens"], row["start"]
    sampling = SamplingParams(temperature=row["temperature"], seed=row["seed"])
    drafter.begin(position, sampling)
    keep, ranks, rows = 0, list[int](), list[int]()
    held: list[int] = []
    while position < len(tokens):
        wanted, right = tokens[:position], 0
        for _ in range(depth):
            while keep and held[:keep] != wanted[:keep]:
                keep -= 1
            keep = min(keep, len(wanted) - 1)
            found = [one.token for one in drafter.step(keep, wanted[keep:], WIDTH)]
            held = list(wanted)
            keep = len(held)
            at = position + right
            if at >= len(tokens):
                break
            ranks.append(found.index(tokens[at]) if tokens[at] in found else -1)
            if ranks[-1]:
                break
            right += 1
            wanted = [*wanted, tokens[at]]
        rows.append(right)
        position += right + 1
    return ranks, rows


def judge(args: argparse.Namespace) -> int:
    rows = json.loads(Path(args.store).read_text())
    target = model_info(Path(args.target))
    inner = CountingDrafter(OnnxDrafter(Path(args.draft), threads=1))
    same = inner.info.vocabulary == target.vocabulary
    results = []
    pair = None
    if not same:
        pair = Translation(
            *(
                ByteVocabulary(TextTokenizer(Path(one)), Path(one).name)
                for one in (args.target, args.draft)
            ),
            target_ends=target.eos_token_ids,
            draft_ends=inner.info.eos_token_ids,
        )
        print(describe_translation(pair))
    for ahead in [0] if same else [int(one) for one in args.lookahead.split(",")]:
        for shared in (True, False) if args.own_noise and not same else (True,):
            drafter: ports.Drafter = inner
            if pair is not None:
                drafter = TranslatingDrafter(
                    inner, pair, target, shares_noise=shared, lookahead_words=ahead
                )
            for heat in sorted({row["temperature"] for row in rows}):
                if not heat and not shared:
                    continue
                tally = Tally()
                chosen = [one for one in rows if one["temperature"] == heat]
                for row in chosen[:: max(1, len(chosen) // args.texts)][: args.texts]:
                    row["tokens"] = row["tokens"][: row["start"] + args.tokens]
                    before = inner.steps
                    ranks, chains = play(drafter, row, args.depth)
                    if not ranks:
                        continue
                    tally.first.append(fmean([rank == 0 for rank in ranks]))
                    tally.any_rank.append(fmean([rank >= 0 for rank in ranks]))
                    tally.in_a_row.append(fmean(chains))
                    tally.runs.append((inner.steps - before) / len(ranks))
                noise = "shared" if shared else "own"
                words = [f"lookahead {ahead}  noise {noise:<6}  temperature {heat:g}"]
                for name in ("first", "any_rank", "in_a_row", "runs"):
                    values = getattr(tally, name)
                    low, high = mean_interval(values)
                    words.append(f"{name} {fmean(values):.3f} [{low:.3f}, {high:.3f}]")
                results.append(words)
                print("  ".join(words), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["record", "judge"])
    parser.add_argument("--target", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--draft", default="")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0,0.7,1")
    parser.add_argument("--lookahead", default="1")
    parser.add_argument("--own-noise", action="store_true")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if args.what == "record":
        record(args)
        return 0
    return judge(args)


if __name__ == "__main__":
    sys.exit(main())
