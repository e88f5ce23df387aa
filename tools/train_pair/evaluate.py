"""How often the draft's choices are the target's token, on prompts neither model was trained on.

The target writes its own text for each prompt; the draft is then asked, on every prefix of it, what
comes next. The share of first choices that are right is the acceptance rate of a chain, the share
of second choices what a hedge adds. Noise is shared, as in production.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.folders import Role, model_info, resolve_model
from edgespec.models.tokenizer import TextTokenizer
from edgespec.targets.torch_target import TorchTarget

FIELDS = ("prompt", "question", "text")
SETS = ("humaneval", "gsm8k_test", "mt_bench", "mbpp", "oasst_prompts")


def prompts(each: int) -> Iterator[tuple[str, str]]:
    folder = Path(os.environ.get("EDGESPEC_DATA", "../shared/data")) / "prompts"
    for name in SETS:
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for line in lines[:: max(1, len(lines) // each)][:each]:
            row = json.loads(line)
            text = next((row[f] for f in FIELDS if f in row), None) or row["turns"][0]
            chat = name not in ("humaneval",)
            yield name, f"<|user|>{text}<|assistant|>" if chat else text


def stream(target: TorchTarget, prompt: list[int], params: SamplingParams) -> list[int]:
    tokens, cached, eos = list(prompt), 0, set(target.info.eos_token_ids)
    target.open("evaluation", len(prompt), params)
    while len(tokens) - len(prompt) < params.max_tokens:
        request = PassRequest("evaluation", cached, tuple(tokens[cached:]))
        cached = len(tokens)
        tokens.append(target.forward([request])[0].targets[0])
        if tokens[-1] in eos:
            break
    target.close("evaluation")
    return tokens[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", default="bundled")
    parser.add_argument("--each", type=int, default=8, help="prompts of each set")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--show", action="store_true", help="print the texts")
    args = parser.parse_args()
    folder = resolve_model(args.target, Role.TARGET)
    info = model_info(folder)
    target = TorchTarget(str(folder), name=info.name, vocabulary=info.vocabulary, dtype="float32")
    drafter = OnnxDrafter(resolve_model(args.draft, Role.DRAFT))
    tokenizer = TextTokenizer(folder)
    for temperature in (0.0, 0.7, 1.0):
        hits: dict[str, list[int]] = {}
        for number, (name, text) in enumerate(prompts(args.each)):
            params = SamplingParams(temperature=temperature, seed=number, max_tokens=args.tokens)
            prompt = tokenizer.encode(text)[-512:]
            output = stream(target, prompt, params)
            if args.show:
                print(f"--- {name} at {temperature}: {tokenizer.decode(output)!r}")
            drafter.begin(len(prompt), params)
            feed, keep = prompt, 0
            for token in output:
                guesses = [c.token for c in drafter.step(keep, feed, 2)]
                keep, feed = keep + len(feed), [token]
                rank = guesses.index(token) if token in guesses else 2
                for key in (name, "all"):
                    hits.setdefault(key, [0, 0, 0])[rank] += 1
        for key, (first, second, missed) in sorted(hits.items()):
            total = first + second + missed
            print(
                f"temperature {temperature} {key:14s} {total:5d} tokens  "
                f"first {first / total:.3f}  second {second / total:.3f}"
            )


if __name__ == "__main__":
    main()
