"""What early exits and trimmed heads cost in acceptance, and what they save in time and size.

    EDGESPEC_DATA=... python benchmarks/smaller_drafts.py [--texts 6] [--tokens 120]

The bundled target goes on with Spec-Bench's prompts; its texts are the same for all. Then drafts
that were made of one checkpoint (the bundled draft, and the target's own first layers) walk along
each text by themselves, taking turns text by text (``draft_walks.py``). The ids to keep are those
of other prompts' texts, as a user would have them. Acceptance counts first guesses and either of
two; times are medians of the steps, and as ratios of the whole draft's.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from draft_walks import long_prompts, parse, walked

from edgespec.compose import load_tokenizer
from edgespec.drafters.export import export_draft
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.folders import Role, model_info, resolve_model

DEPTHS = ((Role.DRAFT, (3, 2, 1)), (Role.TARGET, (6, 5, 4, 3, 2)))


def kept_sets(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """All ids that occur in ``texts``, and the commonest of them, by what they are called."""
    encode = load_tokenizer("bundled").encode
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(encode(text))
    ranked = [token for token, _ in counts.most_common()]
    sizes = {f"{size} ids": size for size in (256, 1024) if size < len(ranked)}
    return {"": (), f"{len(ranked)} ids": tuple(ranked)} | {
        name: tuple(ranked[:size]) for name, size in sizes.items()
    }


def exported(
    root: Path, kept: Mapping[str, tuple[int, ...]]
) -> tuple[dict[tuple[str, str], OnnxDrafter], dict[tuple[str, str], int]]:
    """Drafts of some layers of both models, and of some ids, and their bytes."""
    drafters: dict[tuple[str, str], OnnxDrafter] = {}
    sizes: dict[tuple[str, str], int] = {}
    for role, depths in DEPTHS:
        source = resolve_model("bundled", role)
        info = model_info(source)
        for layers in depths:
            for label, ids in kept.items():
                if label and (role is Role.TARGET or layers < 3):
                    continue
                key = f"{role.value}'s first {layers}", label or "all ids"
                folder = root / "-".join(key).replace(" ", "")
                export_draft(source, folder, info, bits=4, layers=layers, kept=ids)
                sizes[key] = sum(file.stat().st_size for file in folder.glob("model.onnx*"))
                drafters[key] = OnnxDrafter(folder, threads=1)
    return drafters, sizes


def main() -> None:
    options = parse(__doc__, prompt=96, temperature=0.0)
    long = long_prompts(options.prompt)
    every = max(1, len(long) // options.texts)
    kept = kept_sets([text for at, text in enumerate(long) if at % every])
    with tempfile.TemporaryDirectory() as name:
        drafters, sizes = exported(Path(name), kept)
        tallies = walked(drafters, long[::every][: options.texts], options)
    print("| layers | head | first guess | one of two | ms a step | of the whole draft's | MB |")
    print("| --- | --- | ---: | ---: | --- | ---: | ---: |")
    whole_s = next(iter(tallies.values())).median_s
    for (layers, head), tally in tallies.items():
        low, middle, high = statistics.quantiles(tally.step_s, n=4)
        print(
            f"| {layers} | {head} | {tally.first_share:.3f} |"
            f" {tally.either_share:.3f} |"
            f" {middle * 1e3:.2f} ({low * 1e3:.2f} to {high * 1e3:.2f}) |"
            f" {middle / whole_s:.2f} | {sizes[layers, head] / 1e6:.1f} |"
        )


if __name__ == "__main__":
    main()
