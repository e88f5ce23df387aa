"""Measure how well some layers of a target draft for the whole of it: layers left out, early exits.

    python benchmarks/own_layers.py --model FOLDER --store DIR [--searched 3] [--tokens 64]

DIR holds the target's greedy texts (``real_pair.py record``). Every position is computed at once,
with the text before it as it is, so acceptance is the share of positions at which the reduced
model's likeliest token is the target's.

* *Layers left out* (SWIFT, arXiv 2410.06916): one layer after another is removed, always the one
  of the candidates with which most positions of a few texts stay right; all texts judge the result.
  The candidates are the layers that harmed least when the search last tried all.
* *Early exits* (LayerSkip, SpecEE): the final norm and head read the state behind each layer, of a
  target that was not trained for it. The *oracle* takes the first exit that is right.

A layer's cost is its share of the weights of a step, the head included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from edgespec.bench.intervals import mean_interval
from tests.sim.pair_worlds import Text, read_texts

_TRIED = 5
"""Candidates for the next layer to be removed, when not all are tried."""
_WHOLE_ROUND_EVERY = 5


def batch(texts: Sequence[Text], tokens: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Return the texts as one padded batch, and the place of each output in its row."""
    rows = [[*one.prompt, *one.tokens[:tokens]] for one in texts]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return ids, [(len(one.prompt), len(row)) for one, row in zip(texts, rows, strict=True)]


class Reduced:
    """A target of which some layers run."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._layers = list(self._model.model.layers)
        self.count = len(self._layers)

    def states(
        self, ids: torch.Tensor, layers: Sequence[int], *, every: bool = False
    ) -> list[torch.Tensor]:
        """Return the normed states behind the last of ``layers``; with ``every``, behind each."""
        model = self._model.model
        model.layers = torch.nn.ModuleList([self._layers[one] for one in layers])
        found: list[torch.Tensor] = []
        hooks = []
        if every:
            for layer in model.layers:

                def keep(_module: object, _given: object, out: Any) -> None:
                    found.append(out[0] if isinstance(out, tuple) else out)

                hooks.append(layer.register_forward_hook(keep))
        with torch.inference_mode():
            last = model(input_ids=ids, use_cache=False).last_hidden_state
            states = [model.norm(one) for one in found] if every else [last]
        for hook in hooks:
            hook.remove()
        return states

    def right(
        self, states: torch.Tensor, ids: torch.Tensor, places: Sequence[tuple[int, int]]
    ) -> list[list[bool]]:
        """Return, text by text, whether the likeliest token is the target's at each position."""
        found = []
        with torch.inference_mode():
            for row, (start, end) in enumerate(places):
                logits = self._model.lm_head(states[row, start - 1 : end - 1])
                found.append((logits.argmax(-1) == ids[row, start:end]).tolist())
        return found

    def cost(self, layers: int) -> float:
        """Return the weights that a step with this number of layers reads, as a share of all."""
        each = sum(int(one.numel()) for one in self._layers[0].parameters())
        head = int(self._model.lm_head.weight.numel())
        return (each * layers + head) / (each * self.count + head)


def search(
    model: Reduced, ids: torch.Tensor, places: Sequence[tuple[int, int]], least: int
) -> list[list[int]]:
    """Remove one layer after another; return the layers that are left after each removal."""
    layers, found, order = list(range(model.count)), list[list[int]](), list[int]()
    while len(layers) > least:
        whole = len(found) % _WHOLE_ROUND_EVERY == 0
        tried = layers if whole else [one for one in order if one in layers][:_TRIED]
        scores = {}
        for one in tried:
            left = [other for other in layers if other != one]
            right = model.right(model.states(ids, left)[0], ids, places)
            scores[one] = fmean(sum(text) / len(text) for text in right)
        order = sorted(scores, key=lambda one: -scores[one]) if whole else order
        worst = max(scores, key=lambda one: scores[one])
        layers = [one for one in layers if one != worst]
        found.append(layers)
        print(f"{len(layers)} layers: {scores[worst]:.3f} on the searched texts", file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--searched", type=int, default=3, help="texts of the search")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--least", type=int, default=8, help="layers at which the search ends")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    texts = read_texts(options.store / "texts-0.jsonl")
    model = Reduced(options.model)
    step = len(texts) // options.searched
    few = batch(texts[::step][: options.searched], options.tokens)
    found = search(model, *few, options.least)
    ids, places = batch(texts, options.tokens)
    print("| layers | right | cost of a step |\n| ---: | --- | ---: |")
    for layers in found:
        if len(layers) % 2 == 0:
            right = model.right(model.states(ids, layers)[0], ids, places)
            shares = [sum(one) / len(one) for one in right]
            low, high = mean_interval(shares)
            cost = model.cost(len(layers))
            print(f"| {len(layers)} | {fmean(shares):.3f} ({low:.3f}–{high:.3f}) | {cost:.2f} |")
    exits = [
        model.right(states, ids, places)
        for states in model.states(ids, range(model.count), every=True)
    ]
    print("\n| exit behind layer | right | cost of a step |\n| ---: | --- | ---: |")
    for number, right in enumerate(exits, 1):
        if number % 4 == 0 or number >= model.count - 3:
            share = fmean(sum(one) / len(one) for one in right)
            print(f"| {number} | {share:.3f} | {model.cost(number):.2f} |")
    costs, never = [], 0
    for text in range(len(texts)):
        for position in range(len(exits[0][text])):
            first = next((n for n, one in enumerate(exits, 1) if one[text][position]), 0)
            never += not first
            costs.append(model.cost(first or model.count))
    print(f"\noracle of exits: mean cost {fmean(costs):.2f} of a step; {never} never right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
