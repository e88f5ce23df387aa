"""A draft that holds the first and the last tokens of a text, beside one that holds them all.

    EDGESPEC_DATA=... python benchmarks/draft_window.py match [--texts 40] [--long FILE...]
    python benchmarks/draft_window.py cost [--shape 135M] [--lengths 1024,8192,32768]

``match``: of how many places the bundled draft's first choice is the bundled target's, both reading
texts that neither was trained on. Public articles of 1,024 tokens, which is the target's context;
and this project's own pages as one text of 32,768 tokens, of which the target sees the last 512 to
1,024 and the draft's positions are drawn on to the end (``all`` holds the whole text). Intervals
are 95 % over articles, and over pieces of 1,024 tokens of the long text.

``cost``: a draft of random weights. What its cache keeps resident, and the CPU time of a step
behind texts of these lengths, the arms in turns; and what it costs when rows leave.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from memory import make_draft

from edgespec.bench.measurement import mean_interval
from edgespec.bench.report import machine, versions
from edgespec.core.device.memory import MIB
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import load_tokenizer
from edgespec.device.drafters import token_cache
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import export_draft
from edgespec.models.folders import Role, model_info, resolve_model
from edgespec.telemetry.process_memory import resident_bytes

CONTEXT, LONG, EVERY = 1024, 32_768, 16
PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


@dataclass(frozen=True, slots=True)
class Arm:
    window: int
    sinks: int = token_cache.SINKS
    moving: bool = True

    def __str__(self) -> str:
        if not self.window:
            return "all"
        return f"{self.window}, " + (f"{self.sinks} first" if self.moving else "fed anew")

    def drafter(self, folder: Path) -> OnnxDrafter:
        token_cache.SINKS = self.sinks  # type: ignore[misc]
        drafter = OnnxDrafter(folder, window=self.window or model_info(folder).context_length)
        drafter._window = token_cache.DraftWindow(drafter._window.size, moving=self.moving)
        return drafter


ARMS = [
    Arm(window, sinks, moving)
    for window in (64, 128, 256)
    for sinks, moving in ((4, True), (0, True), (0, False))
]


# --- acceptance ---------------------------------------------------------------------------------


def articles(limit: int) -> Iterator[list[int]]:
    tokenizer = load_tokenizer("bundled")
    path = Path(os.environ["EDGESPEC_DATA"]) / "prompts" / "spec_bench.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        tokens = tokenizer.encode(row["turns"][0])
        if limit and row["category"] in ("summarization", "rag") and len(tokens) >= CONTEXT:
            limit -= 1
            yield list(tokens[:CONTEXT])


def choices(text: Sequence[int]) -> list[int]:
    """The bundled target's behind each token, seeing the last 512 to 1,024."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = resolve_model("bundled", Role.TARGET)
    model, half = AutoModelForCausalLM.from_pretrained(folder).float().eval(), CONTEXT // 2
    found: list[int] = []
    with torch.inference_mode():
        for start in range(0, max(1, len(text) - half), half):
            ids = torch.tensor([list(text[start : start + CONTEXT])])
            found += model(ids).logits[0].argmax(-1).tolist()[len(found) - start :]
    return found


def hits(
    arm: Arm, folder: Path, text: Sequence[int], said: Sequence[int], every: int
) -> list[bool]:
    """At every so many places."""
    drafter, found = arm.drafter(folder), []
    drafter.begin(1, SamplingParams())
    for start in range(0, len(text) - every + 1, every):
        (guess,) = drafter.step(start, text[start : start + every], 1)
        found.append(guess.token == said[start + every - 1])
    drafter.close()
    return found


def stretched(folder: Path) -> Path:
    """The bundled draft with positions up to the long text's end."""
    source = folder / "source"
    shutil.copytree(resolve_model("bundled", Role.DRAFT), source)
    (source / "edgespec.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    export_draft(source, folder / "draft", model_info(source), context_length=LONG)
    return folder / "draft"


def match(limit: int, pages: Sequence[Path]) -> None:
    read = [(text, choices(text)) for text in articles(limit)]
    print(f"\n{len(read)} articles of {CONTEXT} tokens, behind the first 256\n")
    print("| holds | right | 95 % |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = stretched(Path(name))
        for arm in (Arm(0), *ARMS) if read else ():
            rates = [statistics.fmean(hits(arm, folder, *one, 1)[256:]) for one in read]
            low, high = mean_interval(rates)
            print(
                f"| {arm} | {statistics.fmean(rates):.3f} | {low:.3f} to {high:.3f} |", flush=True
            )
        text = load_tokenizer("bundled").encode("".join(p.read_text("utf-8") for p in pages))
        text = text[: min(LONG, len(text) // CONTEXT * CONTEXT)]
        said = choices(text)
        print(f"\none text of {len(text)} tokens, every {EVERY}th place\n")
        print("| holds | 1k to 8k | 95 % | 8k to 32k | 95 % |\n|---|---|---|---|---|", flush=True)
        for arm in (Arm(0), *ARMS):
            right = np.array(hits(arm, folder, text, said, EVERY)).reshape(-1, CONTEXT // EVERY)
            cells = []
            for part in (right[1:8], right[8:]):
                pieces = [float(piece) for piece in part.mean(1)]
                low, high = mean_interval(pieces)
                cells += [f"{statistics.fmean(pieces):.3f}", f"{low:.3f} to {high:.3f}"]
            print(f"| {arm} | {' | '.join(cells)} |", flush=True)


# --- memory and time ----------------------------------------------------------------------------


def step_ms(drafter: OnnxDrafter, place: int, token: int) -> float:
    """CPU time of a step at ``place``."""
    started = time.process_time()
    drafter.step(place, [token], 1)
    return 1e3 * (time.process_time() - started)


def filled(folder: Path, text: Sequence[int]) -> OnnxDrafter:
    """A draft that holds all of ``text``, as numbers as good as those of its prefill."""
    drafter, dice = OnnxDrafter(folder, threads=1), np.random.default_rng(1)
    drafter.begin(1, SamplingParams())
    for _, rows in drafter.cached_rows(len(text)):
        for head in rows:
            head[:] = dice.standard_normal(head.shape, dtype=np.float32)
    drafter._cache.tokens.extend(text)
    drafter._window.held = len(text)
    return drafter


def cost(shape: str, lengths: Sequence[int], window: int) -> None:
    print(f"\n{shape}, 4 bits, window {window}; CPU ms on one thread, medians\n")
    print("| text | process MiB | a step | rows leave | all: more MiB | a step | window of all |")
    print("|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "draft"
        size = make_draft(folder, shape, context_length=max(lengths) + 256).model.vocabulary_size
        text = np.random.default_rng(0).integers(1, size, max(lengths) + 256).tolist()
        drafter = OnnxDrafter(folder, threads=1, window=window)
        for length in lengths:
            drafter.begin(1, SamplingParams())
            drafter.step(0, text[:length], 1)
            before, whole = resident_bytes(), filled(folder, text[:length])
            times, whole_times = [], []
            for place in range(length, length + 160):
                times.append(step_ms(drafter, place, text[place]))
                if place < length + 40:
                    whole_times.append(step_ms(whole, place, text[place]))
            usual, full = statistics.median(times), statistics.median(whole_times)
            more = resident_bytes() - before
            whole.close()
            print(
                f"| {length} | {before / MIB:.0f} | {usual:.1f} | {max(times) - usual:.1f} |"
                f" {more / MIB:.0f} | {full:.1f} | {usual / full:.2f} |",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("match", "cost"))
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--long", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--shape", default="135M")
    parser.add_argument("--lengths", default="1024,8192,32768")
    parser.add_argument("--window", type=int, default=1024)
    args = parser.parse_args()
    print(machine(), versions(), sep="\n")
    if args.what == "cost":
        cost(args.shape, [int(one) for one in args.lengths.split(",")], args.window)
    elif not os.environ.get("EDGESPEC_DATA"):
        print("EDGESPEC_DATA must name the folder of public texts", file=sys.stderr)
        return 2
    else:
        match(args.texts, args.long)
    return 0


if __name__ == "__main__":
    sys.exit(main())
