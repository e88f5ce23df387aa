"""A draft made of some of the target's own layers (SWIFT's skipped layers, early exits).

    EDGESPEC_DATA=... python benchmarks/self_draft.py [--target bundled] [--each 8]

The target writes texts for public prompts; every choice of its layers is then asked at every place
of them what comes next, so it is to have few. Printed are the best choice of each size and the
first layers alone (an early exit), with 95 % over texts. The best one of half the layers is
exported with 4 bits and stands beside the bundled draft: how often each is right, and the CPU time
of a step of one over that of the other, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from edgespec.bench.measurement import mean_interval, ratio_interval
from edgespec.bench.report import machine, versions
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import export_draft
from edgespec.models.folders import Role, model_info, resolve_model
from tools.train_pair.evaluate import Text, ranks, written

PROMPT, TOKENS = 160, 96


def right(model: Any, texts: Sequence[Text]) -> list[float]:
    """Of each text the share of its tokens that are the model's choice."""
    shares = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([[*text.prompt[-PROMPT:], *text.output]])
            said = model(ids, use_cache=False).logits[0].argmax(-1)[-len(text.output) - 1 : -1]
            shares.append(float((said == ids[0, -len(text.output) :]).float().mean()))
    return shares


def row(name: str, shares: Sequence[float]) -> None:
    low, high = mean_interval(shares)
    print(f"| {name} | {statistics.fmean(shares):.3f} | {low:.3f} to {high:.3f} |", flush=True)


def exported(source: Path, chosen: Sequence[int], root: Path) -> Path:
    """The draft of the target in ``source`` that has these layers alone."""
    folder = root / "layers"
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(chosen)}))
    tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        parts = name.split(".")
        if parts[1] != "layers":
            tensors[name] = value
        elif int(parts[2]) in chosen:
            parts[2] = str(list(chosen).index(int(parts[2])))
            tensors[".".join(parts)] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    export_draft(folder, root / "draft", model_info(folder))
    return root / "draft"


def step_ratio(first: OnnxDrafter, second: OnnxDrafter, text: Text) -> tuple[float, float]:
    """95 % of the CPU time of a step of the one over one of the other."""
    times: list[list[float]] = [[], []]
    for _ in range(60):
        for drafter, spent in zip((first, second), times, strict=True):
            drafter.begin(1, SamplingParams())
            drafter.step(0, text.prompt[:64], 1)
            started = time.process_time()
            for place, token in enumerate(text.output[:64], 64):
                drafter.step(place, [token], 1)
            spent.append(time.process_time() - started)
    return ratio_interval(*times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--each", type=int, default=8, help="prompts of each set")
    args = parser.parse_args()
    print(machine(), versions(), sep="\n")
    folder = resolve_model(args.target, Role.TARGET)
    texts = [one for one in written(folder, (0.0,), args.each, TOKENS) if len(one.output) > 8]
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    layers = list(model.model.layers)
    print(f"\n{len(texts)} texts, {len(layers)} layers\n\n| layers | right | 95 % |\n|---|---|---|")
    best: dict[int, tuple[float, tuple[int, ...], list[float]]] = {}
    sizes = range(1, len(layers))
    for chosen in chain.from_iterable(combinations(range(len(layers)), size) for size in sizes):
        model.model.layers = torch.nn.ModuleList([layers[index] for index in chosen])
        shares = right(model, texts)
        if chosen == tuple(range(len(chosen))):
            row(f"the first {len(chosen)}", shares)
        best[len(chosen)] = max(
            best.get(len(chosen), (-1.0, (), [])), (statistics.fmean(shares), chosen, shares)
        )
    for count, (_, chosen, shares) in best.items():
        row(f"best {count}: {' '.join(map(str, chosen))}", shares)
    with tempfile.TemporaryDirectory() as name:
        own = OnnxDrafter(exported(folder, best[len(layers) // 2][1], Path(name)), threads=1)
        bundled = OnnxDrafter(resolve_model("bundled", Role.DRAFT), threads=1)
        for label, drafter in (("half of the layers, 4 bits", own), ("the bundled draft", bundled)):
            row(label, [ranks(drafter, one)[0] / len(one.output) for one in texts])
        low, high = step_ratio(own, bundled, max(texts, key=lambda one: len(one.prompt)))
    print(f"\na step of the first over one of the second: {low:.2f} to {high:.2f} of its CPU time")


if __name__ == "__main__":
    main()
