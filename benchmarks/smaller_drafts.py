"""What early exits and trimmed heads cost in acceptance, and what they save in time and size.

    EDGESPEC_DATA=... python benchmarks/smaller_drafts.py [--texts 6] [--tokens 120]

The bundled target goes on with Spec-Bench's prompts; its texts are the same for all. Then drafts
that were made of one checkpoint (the bundled draft, and the target's own first layers) walk along
each text by themselves, taking turns text by text. The ids to keep are those of other prompts'
texts, as a user would have them. Acceptance counts first guesses and either of two; times are
medians of the steps, and as ratios of the whole draft's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from memory_acceptance import Tally, target_text, walk

from edgespec.benchmark.prompts import read_prompts
from edgespec.benchmark.report import machine, versions
from edgespec.compose import load_target, load_tokenizer
from edgespec.config import VerifierConfig
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.drafters.export import export_draft
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.folders import Role, model_info, resolve_model


def kept_sets(encode: Callable[[str], list[int]], texts: list[str]) -> dict[str, tuple[int, ...]]:
    """All ids that occur in ``texts``, and the commonest of them, by what they are called."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(encode(text))
    ranked = [token for token, _ in counts.most_common()]
    sizes = {f"{size} ids": size for size in (256, 1024) if size < len(ranked)}
    return {"": (), f"{len(ranked)} ids": tuple(ranked)} | {
        name: tuple(ranked[:size]) for name, size in sizes.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    sampling = SamplingParams(
        temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True
    )
    encode = load_tokenizer("bundled").encode
    path = Path(os.environ["EDGESPEC_DATA"]) / "prompts" / "spec_bench.jsonl"
    texts = [prompt.text for prompt in read_prompts(path)]
    long = [text for text in texts if len(encode(text)) >= options.prompt]
    every = max(1, len(long) // options.texts)
    asked = [encode(text)[: options.prompt] for text in long[::every]][: options.texts]
    kept = kept_sets(encode, [text for at, text in enumerate(long) if at % every])
    target = load_target(VerifierConfig(model="bundled", canonical=False, threads=1))
    wanted = [target_text(target, str(i), prompt, sampling) for i, prompt in enumerate(asked)]
    del target
    drafters, tallies, sizes = {}, {}, {}
    with tempfile.TemporaryDirectory() as name:
        for role, depths in ((Role.DRAFT, (3, 2, 1)), (Role.TARGET, (6, 5, 4, 3, 2))):
            source = resolve_model("bundled", role)
            info = model_info(source)
            for layers in depths:
                for label, ids in kept.items():
                    if label and (role is Role.TARGET or layers < 3):
                        continue
                    key = f"{role.value}'s first {layers}", label or "all ids"
                    folder = Path(name) / "-".join(key).replace(" ", "")
                    export_draft(source, folder, info, bits=4, layers=layers, kept=ids)
                    sizes[key] = sum(file.stat().st_size for file in folder.glob("model.onnx*"))
                    drafters[key] = OnnxDrafter(folder, threads=1)
                    tallies[key] = Tally()
        for prompt, text in zip(asked, wanted, strict=True):
            for key, drafter in drafters.items():
                walk(drafter, prompt, text, sampling, tallies[key])
    print(machine(), versions())
    print(f"{len(asked)} texts, {options.prompt} + {options.tokens} tokens, {sampling}")
    print("| layers | head | first guess | one of two | ms a step | of the whole draft's | MB |")
    print("| --- | --- | ---: | ---: | --- | ---: | ---: |")
    whole = statistics.median(next(iter(tallies.values())).step_s)
    for (layers, head), tally in tallies.items():
        low, middle, high = statistics.quantiles(tally.step_s, n=4)
        print(
            f"| {layers} | {head} | {tally.first / tally.tried:.3f} |"
            f" {tally.either / tally.tried:.3f} |"
            f" {middle * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f}) |"
            f" {middle / whole:.2f} | {sizes[layers, head] / 1e6:.1f} |"
        )


if __name__ == "__main__":
    main()
