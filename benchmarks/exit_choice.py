"""What a choice of the bundled draft's exit by its own confidence costs and saves (SpecEE, S2D).

    python benchmarks/exit_choice.py TEXTS.json

``TEXTS.json`` is what ``target_texts.py`` keeps; 60 greedy texts are taken. The exits are as they
are, nobody trained them. A step ends behind the first or the second layer where that exit is sure
enough. A step's price is that of ``exit_oracle.py``; each exit that was looked at in vain adds a
head, 0.2 of a step, and is shown without that too.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Final

import torch
from target_texts import read

from edgespec.bench.measurement import mean_interval
from edgespec.models.folders import Role, resolve_model
from edgespec.training.distill import load_model

PRICES: Final = (0.53, 0.79)
HEAD: Final = 0.2


def main() -> None:
    rows = [one.text for one in read(Path(sys.argv[1])) if one.temperature == 0.0]
    rows = [one for one in rows if len(one.tokens) - one.start > 32]
    rows = rows[:: max(1, len(rows) // 60)][:60]
    draft = load_model(resolve_model("bundled", Role.DRAFT), exact=True)
    found = []
    with torch.inference_mode():
        for tokens, start in rows:
            made = draft.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
            states = [one[0, start - 1 : len(tokens) - 1] for one in made.hidden_states[1:]]
            laws = [draft.lm_head(draft.model.norm(one)).softmax(-1) for one in states[:-1]]
            laws.append(draft.lm_head(states[-1]).softmax(-1))
            wanted = torch.tensor(tokens[start:])
            sure = [law.max(-1).values for law in laws]
            found.append((sure, [law.argmax(-1) == wanted for law in laws]))
    print("| exits | from | early | right | price of a step | without heads |")
    for exits, least in product(((0,), (1,), (0, 1)), (0.5, 0.7, 0.8, 0.9, 0.95)):
        columns: list[list[float]] = [[], [], [], []]
        for sure, right in found:
            price = torch.ones(len(sure[0]))
            heads, good = HEAD * len(exits) * price, right[-1].clone()
            done = torch.zeros(len(price), dtype=torch.bool)
            for looked, at in enumerate(exits):
                ends = (sure[at] >= least) & ~done
                price[ends], heads[ends] = PRICES[at], HEAD * looked
                good[ends] = right[at][ends]
                done |= ends
            values = (done.float(), good.float(), price + heads, price)
            for column, value in zip(columns, values, strict=True):
                column.append(value.mean().item())
        cells = [
            f"{fmean(one):.3f} ({low:.3f} to {high:.3f})"
            for one in columns
            for low, high in [mean_interval(one)]
        ]
        print(f"| {'+'.join(str(one + 1) for one in exits)} | {least} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
