"""A relaxed rule on real logits: thresholds by a token's importance beside a fixed one. LOSSY.

    python benchmarks/dsd_rule.py [--texts 24] [--tokens 96] [--drafts 8] [--json FILE]

Offline, on the bundled pair, greedy: a draft of 8 tokens, one pass of the target over all of them,
and the text goes on behind the last one that the rule takes. This is no path of the product, whose
texts are the target's own; nothing here is reachable from it. Fixed: a drafted token is tolerated
from ``least`` times the probability of the target's best one on. By importance: the threshold rises
from ``least`` to 1 with the token's importance (``edgespec_sim/token_sources/token_importance.py``,
a reading of arXiv 2511.11733). Shown are tokens a round (a pass), and over the exact rule with the
quartiles of texts; the share of tokens that are not the target's own choice behind what precedes
them; and the perplexity of the text under the target. No machine's speed plays a part.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from edgespec.benchmark.report import machine, versions
from edgespec.compose import load_drafter, load_target
from edgespec.config import AgentConfig, VerifierConfig
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec.ports import PassRequest
from edgespec.targets.torch_target import TorchTarget
from edgespec_sim.token_sources.tape import tape_named
from edgespec_sim.token_sources.token_importance import Matches, importance, law, threshold_of

LEAST = (0.8, 0.5, 0.3, 0.1, 0.03, 0.0)
Row: TypeAlias = NDArray[np.float64]
Threshold: TypeAlias = Callable[[Row, Row, Matches], float]
"""Of the laws of target and draft at a position, and of the text so far."""


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    least: float
    threshold: Threshold


@dataclass(slots=True)
class Written:
    """One text, as a rule let it go on."""

    tokens: list[int]
    rounds: int = 0
    changed: int = 0
    """Tokens that are not the target's own."""
    logprob: float = 0.0
    """Of all tokens under the target."""

    @property
    def tokens_per_round(self) -> float:
        return len(self.tokens) / self.rounds


def fixed(least: float) -> Rule:
    return Rule("fixed", least, lambda _target, _draft, _matches: least)


def by_importance(least: float) -> Rule:
    def threshold(target: Row, draft: Row, matches: Matches) -> float:
        return threshold_of(least, importance(target.tolist(), draft.tolist(), matches))

    return Rule("by importance", least, threshold)


EXACT = Rule("exact", 1.0, lambda _target, _draft, _matches: math.inf)


class Pair:
    """The bundled models, side by side."""

    def __init__(self, drafts: int) -> None:
        drafter, target = load_drafter(AgentConfig()), load_target(VerifierConfig())
        assert isinstance(drafter, OnnxDrafter)
        assert isinstance(target, TorchTarget)
        self._drafter, self._target, self._drafts = drafter, target, drafts
        self._drafted: list[int] = []
        """What the drafter has been fed."""

    def write(self, prompt: Sequence[int], count: int, rule: Rule) -> Written:
        sampling = SamplingParams(max_tokens=count)
        self._drafter.begin(len(prompt), sampling)
        self._drafted.clear()
        self._target.open("text", len(prompt), sampling)
        text, cached, written, matches = [*prompt], 0, Written([]), Matches()
        ends = self._target.info.eos_token_ids
        while len(written.tokens) < count and not set(ends) & set(written.tokens):
            chain, drafts = self._draft(text)
            request = PassRequest(
                "text", cached, tuple(text[cached:]), tuple(chain), tuple(range(-1, len(chain) - 1))
            )
            logits = self._target.run_pass([request])
            laws = torch.softmax(logits.double(), dim=-1).cpu().numpy()
            taken = _walk(rule, chain, drafts, laws, matches, written)
            self._target.keep("text", range(taken))
            text += written.tokens[len(text) - len(prompt) :]
            cached = len(text) - 1
        self._target.close("text")
        return written

    def _draft(self, text: list[int]) -> tuple[list[int], list[Row]]:
        """A chain, and the draft's law at each of its tokens."""
        kept = 0
        while kept < min(len(self._drafted), len(text) - 1) and self._drafted[kept] == text[kept]:
            kept += 1
        chain: list[int] = []
        laws: list[Row] = []
        feed = text[kept:]
        for _ in range(self._drafts):
            (best, *_) = self._drafter.step(kept, feed, 1)
            self._drafted[kept:] = feed
            laws.append(np.array(law(self._drafter.logits.tolist())))
            chain.append(best.token)
            kept, feed = kept + len(feed), [best.token]
        return chain, laws


def _walk(
    rule: Rule,
    chain: Sequence[int],
    drafts: Sequence[Row],
    laws: NDArray[np.float64],
    matches: Matches,
    written: Written,
) -> int:
    """Go on with ``written`` by one round; how many drafts were taken."""
    written.rounds += 1
    for place, (token, draft) in enumerate(zip(chain, drafts, strict=True)):
        target = laws[place]
        own = int(target.argmax())
        taken = token == own
        if not taken:
            ratio = float(target[token] / target[own])
            if ratio >= rule.threshold(target, draft, matches):
                taken = True
                written.changed += 1
        matches.note(int(draft.argmax()) == own)
        written.tokens.append(token if taken else own)
        written.logprob += math.log(max(1e-300, float(target[written.tokens[-1]])))
        if not taken:
            return place
    bonus = laws[len(chain)]
    written.tokens.append(int(bonus.argmax()))
    written.logprob += math.log(float(bonus.max()))
    return len(chain)


def summary(rule: Rule, texts: list[Written], exact: list[Written]) -> dict[str, float | str]:
    tokens = sum(len(text.tokens) for text in texts)
    rounds = sum(text.rounds for text in texts)
    over = [
        one.tokens_per_round / other.tokens_per_round
        for one, other in zip(texts, exact, strict=True)
    ]
    low, _, high = quantiles(over, n=4)
    return {
        "rule": rule.name,
        "least": rule.least,
        "tokens_per_round": tokens / rounds,
        "over_exact": fmean(over),
        "over_exact_low": low,
        "over_exact_high": high,
        "changed": sum(text.changed for text in texts) / tokens,
        "perplexity": math.exp(-sum(text.logprob for text in texts) / tokens),
        "texts_changed": sum(text.changed > 0 for text in texts) / len(texts),
    }


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pair, tape = Pair(options.drafts), tape_named("bundled-greedy")
    prompts = [generation.prompt for generation in tape.generations[: options.texts]]
    rows, exact = [], []
    print("rule           least  tokens a round  over exact (quartiles)   changed  perplexity")
    for rule in (EXACT, *(make(least) for least in LEAST for make in (fixed, by_importance))):
        texts = [pair.write(prompt, options.tokens, rule) for prompt in prompts]
        exact = exact or texts
        row = summary(rule, texts, exact)
        rows.append(row)
        print(
            f"{rule.name:13s} {rule.least:6g} {row['tokens_per_round']:15.2f}"
            f" {row['over_exact']:11.3f} ({row['over_exact_low']:.3f} to"
            f" {row['over_exact_high']:.3f}) {row['changed']:8.1%} {row['perplexity']:11.3f}",
            flush=True,
        )
    differing = sum(
        tuple(text.tokens[: len(generation.tokens)])
        != generation.tokens[: min(len(text.tokens), len(generation.tokens))]
        for text, generation in zip(exact, tape.generations, strict=False)
    )
    print(f"exact texts that are not the tape's: {differing} of {len(exact)}", file=sys.stderr)
    if options.json:
        content = {"machine": machine(), "versions": versions(), "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
