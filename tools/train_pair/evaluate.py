"""Measure how often the draft's choices are the target's token, on prompts that neither model was
trained on.

The target generates its own text for each prompt; each draft then predicts the next token after
every prefix of it. The share of first choices that are right is the acceptance rate of a chain, and
the share of second choices is the gain of a hedge. Noise is shared, as in production. Intervals are
95 % of a bootstrap over prompts, since the positions of one text are no independent trials. With
several drafts (``--draft OLD NEW``) the gain of each over the first is computed prompt by prompt.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgespec.bench.intervals import ratio_interval
from edgespec.bench.prompts import read_prompts
from edgespec.core.ports import TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.folders import model_info
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.tokenizer import TextTokenizer
from edgespec_sim.token_sources.match_tape import MISS, walk_along
from tools.train_pair.corpus import ASSISTANT, USER

SETS = ("humaneval", "gsm8k_test", "mt_bench", "mbpp", "oasst_prompts")
TEMPERATURES = (0.0, 0.7, 1.0)
SESSIONS = 40  # texts that the target generates in one pass


@dataclass(frozen=True, slots=True)
class Text:
    set_name: str
    params: SamplingParams
    prompt: list[int]
    output: list[int]


def prompts(each: int) -> Iterator[tuple[str, str]]:
    folder = Path(os.environ.get("EDGESPEC_DATA", "../shared/data")) / "prompts"
    for name in SETS:
        every = list(read_prompts(folder / f"{name}.jsonl"))
        for prompt in every[:: max(1, len(every) // each)][:each]:
            chat = name not in ("humaneval",)
            yield name, f"{USER}{prompt.text}{ASSISTANT}" if chat else prompt.text


def fill(target: TargetModel, texts: Sequence[Text]) -> None:
    """Let the target generate the outputs, all texts in lock step."""
    eos, cached = set(target.info.eos_token_ids), [0] * len(texts)
    for number, text in enumerate(texts):
        target.open(str(number), len(text.prompt), text.params)
    going = list(range(len(texts)))
    while going:
        requests = []
        for number in going:
            tokens = (*texts[number].prompt, *texts[number].output)
            requests.append(PassRequest(str(number), cached[number], tokens[cached[number] :]))
            cached[number] = len(tokens)
        for number, result in zip(going, target.forward(requests), strict=True):
            texts[number].output.append(result.targets[0])
        going = [n for n in going if not _has_ended(texts[n], eos)]
    for number in range(len(texts)):
        target.close(str(number))


def _has_ended(text: Text, eos: set[int]) -> bool:
    return text.output[-1] in eos or len(text.output) == text.params.max_tokens


def ranks(drafter: OnnxDrafter, text: Text) -> list[int]:
    """Count the output's tokens that were the draft's first choice, its second, or neither."""
    drafter.begin(len(text.prompt), text.params)
    found = walk_along(drafter.step, text.prompt, text.output, 2).ranks
    return [found.count(rank) for rank in (0, 1, MISS)]


def report(temperature: float, drafts: Sequence[str], sets: np.ndarray, found: np.ndarray) -> None:
    """Print a line for each set and draft; ``found`` [drafts, prompts, 3], ``sets`` [prompts]."""
    for name in (*sorted(set(sets)), "all"):
        rows = found[:, (sets == name) | (name == "all")]
        totals = rows[0].sum(-1)
        for draft, row in zip(drafts, rows, strict=True):
            low, high = ratio_interval(row[:, 0].tolist(), totals.tolist())
            first, second = row[:, :2].sum(0) / totals.sum()
            line = (
                f"temperature {temperature} {name:14s} {totals.sum():5d} tokens  "
                f"first {first:.3f} [{low:.3f}, {high:.3f}]  second {second:.3f}"
            )
            if len(drafts) > 1:
                gained = row[:, 0] - rows[0, :, 0]
                low, high = ratio_interval(gained.tolist(), totals.tolist())
                gain = gained.sum() / totals.sum()
                line += f"  gain {gain:+.3f} [{low:+.3f}, {high:+.3f}]  {draft}"
            print(line, flush=True)


def written(folder: Path, temperatures: Sequence[float], each: int, tokens: int) -> list[Text]:
    """Return the target's texts for every prompt at every one of ``temperatures``."""
    from edgespec.verifier.targets.torch_target import TorchTarget

    info, tokenizer = model_info(folder), TextTokenizer(folder)
    target = TorchTarget(str(folder), name=info.name, vocabulary=info.vocabulary, dtype="float32")
    texts = []
    for temperature in temperatures:
        for number, (name, text) in enumerate(prompts(each)):
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=tokens)
            texts.append(Text(name, params, tokenizer.encode(text)[-512:], []))
    for at in range(0, len(texts), SESSIONS):
        fill(target, texts[at : at + SESSIONS])
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", nargs="+", default=["bundled"], help="one or more")
    parser.add_argument("--each", type=int, default=8, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", nargs="+", type=float, default=TEMPERATURES)
    args = parser.parse_args()
    folder = resolve_source(args.target, Purpose.TARGET).folder
    texts = written(folder, args.temperature, args.each, args.tokens)
    drafters = [OnnxDrafter(resolve_source(draft, Purpose.DRAFT).folder) for draft in args.draft]
    for temperature in sorted({one.params.temperature for one in texts}):
        some = [one for one in texts if one.params.temperature == temperature]
        found = np.array([[ranks(drafter, one) for one in some] for drafter in drafters])
        report(temperature, args.draft, np.array([one.set_name for one in some]), found)


if __name__ == "__main__":
    main()
