"""What would a probe on the target's states let pass? (Judge Decoding, 2501.19309; AutoJudge,
2504.20039; arbitrage of whole lines; DSD's key tokens.)

    python benchmarks/judge_probe.py TEXTS.json OUT.npz [--most 1200] [--lines 300]

``TEXTS.json`` is what ``target_texts.py`` keeps; the greedy texts are taken. Wherever the bundled
draft's first choice is another token, it takes the target's place and the target goes on greedily.
The outcome is the same when

    arithmetic  both texts end with the same number (where both end; else as any other text)
    Python      it compiles if the target's does, and the rest agrees
    any other   the rest agrees: what stands 6 to 18 tokens behind stands within 4 tokens of there

``OUT.npz`` has, of each mismatch, what a rule sees of it, the target's last states where it chose
and on the drafted token, and whether it is harmless; ``judge_scores.py`` asks who could have known.
``--lines``: the same of whole lines that the draft writes; the states are of their last token.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from judge_drafts import is_python
from target_texts import KINDS, read

from edgespec.models.folders import Role, resolve_model
from edgespec.models.tokenizer import TextTokenizer
from edgespec.training.distill import load_model
from edgespec.training.texts import Text, choices, end_ids, padded, write

AHEAD: Final = 24
"""Tokens that the target goes on for, or to the length of the text if it is arithmetic."""


def number_at_end(text: str) -> str:
    found = re.findall(r"-?[\d,]*\.?\d+", text)
    return found[-1].replace(",", "") if found else ""


def rest_agrees(new: Sequence[int], old: Sequence[int]) -> bool:
    """Both begin behind the replaced token."""
    piece = list(new[6:18])
    return any(piece == list(old[at : at + len(piece)]) for at in range(2, 11))


def go_on(target: Any, prefixes: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
    """What the target says behind each prefix, the prefix left out."""
    found: list[list[int]] = [[] for _ in prefixes]
    order = sorted(range(len(prefixes)), key=lambda at: (counts[at], len(prefixes[at])))
    for first in range(0, len(order), 128):
        part = order[first : first + 128]
        asked, most = [prefixes[at] for at in part], max(counts[at] for at in part)
        said = write(target, asked, [0.0] * len(part), [0] * len(part), most, lambda: None)
        for at, text in zip(part, said, strict=True):
            found[at] = text.tokens[text.start :][: counts[at]]
        print(f"{first + len(part)} of {len(order)}, {time.process_time():.0f} s", flush=True)
    return found


@torch.inference_mode()
def states(target: Any, texts: Sequence[Sequence[int]], where: Sequence[int]) -> np.ndarray:
    """Of each text the last states at ``where`` and one before, and the scores of the token there
    by the state before: log-probability, margin, entropy and rank."""
    found = []
    for first in range(0, len(texts), 32):
        part = [
            Text(list(one[: at + 1]), at)
            for one, at in zip(texts[first : first + 32], where[first : first + 32], strict=True)
        ]
        tokens, _ = padded(part, torch.device("cpu"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = target.model(tokens, use_cache=False).last_hidden_state.float()
        for row, one in enumerate(part):
            law = target.lm_head(made[row, one.start - 1]).log_softmax(-1)
            own = law[one.tokens[-1]]
            margin, entropy = law.max() - own, -(law.exp() * law).sum()
            scores = torch.stack([own, margin, entropy, (law > own).sum().float()])
            last = made[row]
            found.append(torch.cat([scores, last[one.start - 1], last[one.start]]).numpy())
    return np.stack(found).astype(np.float64)


def pick(found: list[Any], most: int) -> list[Any]:
    chosen = np.random.default_rng(0).choice(len(found), min(most, len(found)), replace=False)
    return [found[at] for at in sorted(chosen)]


class Lab:
    def __init__(self, texts: Sequence[Text]) -> None:
        self.target, self.draft = (
            load_model(resolve_model("bundled", one), exact=True) for one in Role
        )
        self.texts, self.decode = texts, TextTokenizer(resolve_model("bundled", Role.TARGET)).decode
        self.ends = set(end_ids(self.target))
        self.kinds = KINDS

    def prefix(self, number: int, at: int, *behind: int) -> list[int]:
        text = self.texts[number]
        return [*text.tokens[: text.start + at], *behind]

    def mismatches(self) -> list[tuple[int, int, int]]:
        """Text, place and the draft's token, where enough stands behind to compare."""
        found, total, missed = [], 0, 0
        guesses = choices(self.draft, self.texts, 0.0, [0] * len(self.texts), 4096, lambda: None)
        for number, (text, guess) in enumerate(zip(self.texts, guesses, strict=True)):
            said = text.tokens[text.start :]
            for at, (own, its) in enumerate(zip(guess.tolist(), said, strict=True)):
                total, missed = total + 1, missed + (own != its)
                ends = own in self.ends or its in self.ends
                if own != its and not ends and len(said) - at > AHEAD:
                    found.append((number, at, own))
        print(f"{total} tokens, {missed} mismatches, {len(found)} with enough behind", flush=True)
        return found

    def mined(self, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores and states, whether harmless, and the text of each mismatch."""
        found = pick(self.mismatches(), most)
        longest = max(len(text.tokens) - text.start for text in self.texts)
        prefixes = [self.prefix(*one) for one in found]
        maths = [
            self.kinds[number] == "maths" and self.texts[number].tokens[-1] in self.ends
            for number, _, _ in found
        ]
        counts = [
            longest - at - 1 if m else AHEAD for m, (_, at, _) in zip(maths, found, strict=True)
        ]
        said = go_on(self.target, prefixes, counts)
        y, groups = np.zeros(len(found)), np.array([number for number, _, _ in found])
        for row, ((number, at, own), new) in enumerate(zip(found, said, strict=True)):
            y[row] = self.same(number, at, [own, *new])
        for kind in ("code", "maths", "chat"):
            rows = np.array([self.kinds[number] == kind for number in groups])
            print(f"{kind}: {rows.sum()} mismatches, {y[rows].mean():.3f} harmless")
        return states(self.target, prefixes, [len(one) - 1 for one in prefixes]), y, groups

    def same(self, number: int, at: int, new: list[int]) -> bool:
        """Whether the outcome is the same with ``new`` from ``at`` on."""
        text, kind = self.texts[number], self.kinds[number]
        prompt, said = text.tokens[: text.start], text.tokens[text.start :]
        whole = [*said[:at], *new]
        if kind == "maths" and said[-1] in self.ends and whole[-1] in self.ends:
            return number_at_end(self.decode(said)) == number_at_end(self.decode(whole))
        if kind == "code":
            cut = [self.decode([*prompt, *one]) for one in (said[: len(whole)], whole)]
            python = [is_python(one.rpartition("\n")[0]) for one in cut]
            if python == [True, False]:
                return False
        return rest_agrees(new[1:], said[at + 1 :])

    def lines(self, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As ``mined``, of lines that the draft wrote and the target would have written otherwise;
        the states are of their last token."""
        starts = [
            (number, at)
            for number, text in enumerate(self.texts)
            for at in range(1, len(text.tokens) - text.start - AHEAD - 12)
            if "\n" in self.decode(text.tokens[text.start + at - 1 : text.start + at])
        ]
        starts = pick(starts, most)
        drafted = go_on(self.draft, [self.prefix(*one) for one in starts], [32] * len(starts))
        other: list[tuple[int, int, list[int]]] = []
        whole = 0
        for (number, at), new in zip(starts, drafted, strict=True):
            ends = [place for place, one in enumerate(new) if "\n" in self.decode([one])]
            line, begin = new[: ends[0] + 1] if ends else [], self.texts[number].start + at
            whole += bool(line)
            if line and line != self.texts[number].tokens[begin : begin + len(line)]:
                other.append((number, at, line))
        prefixes = [self.prefix(number, at, *line) for number, at, line in other]
        said = go_on(self.target, prefixes, [AHEAD] * len(prefixes))
        y = np.zeros(len(other))
        for row, ((number, at, line), new) in enumerate(zip(other, said, strict=True)):
            old = self.texts[number].tokens[self.texts[number].start + at :]
            places = range(max(0, len(line) - 6), len(line) + 10)
            y[row] = any(new[2:14] == old[place : place + 12] for place in places)
        print(f"{whole} lines, {len(other)} are not the target's, {y.mean():.3f} of these harmless")
        rows = states(self.target, prefixes, [len(one) - 1 for one in prefixes])
        return rows, y, np.array([number for number, _, _ in other])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--most", type=int, default=1200, help="mismatches")
    parser.add_argument("--lines", type=int, default=300)
    options = parser.parse_args()
    lab = Lab([one.text for one in read(options.texts) if one.temperature == 0.0])
    rows, y, groups = lab.mined(options.most)
    last, kept, of = lab.lines(options.lines)
    np.savez(options.out, rows=rows, y=y, groups=groups, last=last, kept=kept, of=of)


if __name__ == "__main__":
    main()
