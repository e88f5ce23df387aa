"""What a smaller cache costs in acceptance, and in time a step: KV types and windows.

    EDGESPEC_DATA=... python benchmarks/memory_acceptance.py [--texts 8] [--tokens 160]

The bundled target goes on with long prompts (Spec-Bench's summaries); its texts are the same for
all. Then the bundled draft, exported with each KV type, walks along each text by itself, with the
whole context and with windows that slide (``draft_walks.py``). Acceptance counts first guesses and
either of two; times are medians of the steps, the drafts taking turns text by text.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from draft_walks import long_prompts, parse, walked

from edgespec.core.device.kv_type import KvType
from edgespec.drafters.export import export_draft
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.folders import Role, model_info, resolve_model

WINDOWS = (0, 256, 128, 64)


def main() -> None:
    options = parse(__doc__, prompt=480, temperature=0.7)
    source = resolve_model("bundled", Role.DRAFT)
    with tempfile.TemporaryDirectory() as name:
        drafters: dict[tuple[str, int], OnnxDrafter] = {}
        for kv_type in KvType:
            folder = Path(name) / kv_type.value
            export_draft(source, folder, model_info(source), bits=4, kv_type=kv_type)
            for window in WINDOWS:
                drafters[kv_type.value, window] = OnnxDrafter(folder, threads=1, window=window)
        tallies = walked(drafters, long_prompts(options.prompt)[: options.texts], options)
    print("| KV type | window | first guess | one of two | ms a step |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for (kv, window), tally in tallies.items():
        print(
            f"| {kv} | {window or 'whole'} | {tally.first_share:.3f} |"
            f" {tally.either_share:.3f} | {tally.median_s * 1e3:.2f} |"
        )


if __name__ == "__main__":
    main()
