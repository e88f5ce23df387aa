"""The best that a choice of the exit for every step could bring (DEL 2504.05598, SpecEE 2504.08850,
S2D's nested drafts): an oracle takes the cheapest exit that is right.

    python benchmarks/exit_oracle.py TEXTS.json [--rtts 0,20,100] [--limit 100]

``TEXTS.json`` is what ``target_texts.py`` keeps; the greedy
texts are taken. Exits are the bundled target's own layers (its last norm and its head behind each)
and those of the bundled draft; the cost of each is the CPU time of a step of its 4-bit export over
that of the bundled draft, in turns. Where no exit is right the oracle takes the cheapest one. It is
played in virtual time beside the bundled draft (25 ms a pass, 8 ms a step times the cost): by the
default policy, and by a device that drafts four deep and waits. No second choices on either side.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import torch
from judge_drafts import STEP_S, Stage, Text, play
from safetensors.torch import load_file, save_file
from target_texts import read

from edgespec.bench.arms import Arm, arm_settings
from edgespec.bench.measurement import mean_interval, ratio_interval
from edgespec.core.device.goodput_policy import PolicyName, named_policy
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import export_draft
from edgespec.models.folders import Role, model_info, resolve_model
from edgespec.training.distill import load_model
from edgespec_sim.token_sources.match_tape import MatchTape, TapedGeneration
from edgespec_sim.token_sources.source import TapeSource

ROUNDS: Final = 12


def exits(model: Any, tokens: Sequence[int], start: int) -> torch.Tensor:
    """bool [layers, tokens from ``start`` on]: whether the choice behind each layer is right."""
    made = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    asked = slice(start - 1, len(tokens) - 1)
    wanted = torch.tensor(tokens[start:])
    early = [
        model.lm_head(model.model.norm(state[0, asked])).argmax(-1) == wanted
        for state in made.hidden_states[1:-1]
    ]
    return torch.stack([*early, made.logits[0, asked].argmax(-1) == wanted])


def exported(source: Path, layers: int, root: Path) -> OnnxDrafter:
    """The first layers of the model alone, with 4 bits."""
    folder = root / f"{source.name}{layers}"
    folder.mkdir()
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    kept = {
        name: value
        for name, value in load_file(source / "model.safetensors").items()
        if name.split(".")[1] != "layers" or int(name.split(".")[2]) < layers
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    export_draft(folder, folder / "draft", model_info(folder))
    return OnnxDrafter(folder / "draft", threads=1)


def costs(drafters: Sequence[OnnxDrafter], tokens: Sequence[int]) -> list[float]:
    """CPU time of a step of each over one of the last, the median of rounds in turns."""
    times: list[list[float]] = [[] for _ in drafters]
    for _ in range(ROUNDS):
        for drafter, spent in zip(drafters, times, strict=True):
            drafter.begin(1, SamplingParams())
            drafter.step(0, tokens[:64], 1)
            started = time.process_time()
            for place, token in enumerate(tokens[64:128], 64):
                drafter.step(place, [token], 1)
            spent.append(time.process_time() - started)
    return [median(map(lambda a, b: a / b, one, times[-1])) for one in times]


def oracle(right: torch.Tensor, prices: Sequence[float]) -> tuple[torch.Tensor, list[float]]:
    """Of each token whether any exit is right, and the price of the cheapest such."""
    any_right = right.any(0)
    first = torch.where(any_right, right.int().argmax(0), 0)
    return any_right, [prices[at] for at in first.tolist()]


def tpot_ms(
    text: Text, right: torch.Tensor, prices: Sequence[float], rtt_s: float, waits: bool
) -> float:
    ranks = tuple(0 if one else -1 for one in right.tolist())
    tape = MatchTape("t", "d", 2, (TapedGeneration("text", text.prompt, text.said, ranks),))
    source = TapeSource(tape)
    mean = fmean(prices)

    def step_s(kept: int, fed: int) -> float:
        place = kept + fed - len(text.prompt)
        return STEP_S * (prices[place] if 0 <= place < len(prices) else mean)

    settings = arm_settings(Arm.VANILLA, 4)
    policy = settings.policy if waits else named_policy(PolicyName("windowed"))
    ahead = settings.run_ahead if waits else RunAhead.AUTO
    stage = Stage(source.drafter(), policy, rtt_s, step_s, target=source.target(), run_ahead=ahead)
    found = play(text, stage)
    assert found.said == text.said
    return found.tpot_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("--rtts", default="0,20,100")
    parser.add_argument("--limit", type=int, default=100)
    options = parser.parse_args()
    folders = [resolve_model("bundled", role) for role in (Role.TARGET, Role.DRAFT)]
    models = [load_model(folder, exact=True) for folder in folders]
    rows = [one.text for one in read(options.texts) if one.temperature == 0.0]
    rows = [one for one in rows if len(one[0]) - one[1] > 32]
    rows = rows[:: max(1, len(rows) // options.limit)][: options.limit]
    with torch.inference_mode():
        found = [[exits(model, *row) for row in rows] for model in models]
    with tempfile.TemporaryDirectory() as name:
        counts = [model.config.num_hidden_layers for model in models]
        kinds = [(0, k) for k in range(1, counts[0])] + [(1, k) for k in range(1, counts[1] + 1)]
        drafters = [exported(folders[which], layers, Path(name)) for which, layers in kinds]
        longest = max((tokens for tokens, _ in rows), key=len)
        prices = costs(drafters, longest)
    for (which, layers), price in zip(kinds, prices, strict=True):
        shares = [one[layers - 1].float().mean().item() for one in found[which]]
        low, high = mean_interval(shares)
        whose = ("target", "draft")[which]
        print(
            f"| {whose}, {layers} | {price:.2f} | {fmean(shares):.3f} ({low:.3f} to {high:.3f}) |"
        )
    early = counts[0] - 1
    arms: dict[str, Callable[[int], tuple[torch.Tensor, list[float]]]] = {
        "bundled draft": lambda at: (found[1][at][-1], [1.0] * found[1][at].shape[1]),
        "target's exits, oracle": lambda at: oracle(found[0][at][:early], prices[:early]),
        "draft's exits, oracle": lambda at: oracle(found[1][at], prices[early:]),
        "draft's last exit at its first one's price": lambda at: (
            found[1][at][-1],
            [prices[early]] * found[1][at].shape[1],
        ),
    }
    texts = [
        Text(
            tuple(tokens[:start]),
            tuple(tokens[start:]),
            SamplingParams(max_tokens=len(tokens) - start, ignore_eos=True),
        )
        for tokens, start in rows
    ]
    for name, arm in arms.items():
        played = [arm(at) for at in range(len(rows))]
        shares, means = (
            [one.float().mean().item() for one, _ in played],
            [fmean(p) for _, p in played],
        )
        low, high = mean_interval(shares)
        right = f"{fmean(shares):.3f} ({low:.3f} to {high:.3f})"
        print(f"{name}: right {right}, a step {fmean(means):.2f}")
    print(f"n {len(rows)}\n| RTT | device | arm | ms a token | speed over the bundled draft |")
    for rtt_ms, waits in product(map(float, options.rtts.split(",")), (False, True)):
        base: list[float] = []
        for name, arm in arms.items():
            times = [tpot_ms(text, *arm(at), rtt_ms / 1e3, waits) for at, text in enumerate(texts)]
            base = base or times
            low, high = ratio_interval(base, times)
            ratio = f"{sum(base) / sum(times):.3f} ({low:.3f} to {high:.3f})"
            device = "waits" if waits else "default"
            print(f"| {rtt_ms:g} | {device} | {name} | {fmean(times):.1f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
