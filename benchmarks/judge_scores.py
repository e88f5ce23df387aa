"""Which score tells a harmless mismatch from a harmful one? Of what ``judge_probe.py`` mined.

    python benchmarks/judge_scores.py OUT.npz

A logistic probe learns the outcome from the target's last states, by five folds over texts; the
other scores are what the rules of ``relaxed_rules.py`` and DSD's key tokens go by. Printed are AUC,
the share that is let pass where 90 % of the harmful ones are not, and how much is harmless of the
quarter and the half that a score would take first; then, for the share that a rule with its
parameters takes, what is harmless of it and of as many that the probe takes. Intervals are 95 % of
a bootstrap over texts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import numpy as np

RECALL: Final = 0.9
PENALTIES: Final = (30.0, 300.0)
Measure = Callable[[np.ndarray], float]


def probe(x: np.ndarray, y: np.ndarray, groups: np.ndarray, penalty: float) -> np.ndarray:
    """Of each row the logit that it is harmless, by a probe that saw no row of its text."""
    found = np.zeros(len(y))
    for fold in range(5):
        seen = groups % 5 != fold
        found[~seen] = fitted(x[seen], y[seen], penalty)(x[~seen])
    return found


def fitted(x: np.ndarray, y: np.ndarray, penalty: float) -> Callable[[np.ndarray], np.ndarray]:
    mean, spread = x.mean(0), x.std(0) + 1e-6
    rows = np.c_[(x - mean) / spread, np.ones(len(x))]
    weights = np.zeros(rows.shape[1])
    ridge = np.full(rows.shape[1], penalty)
    ridge[-1] = 0.0
    for _ in range(12):  # Newton's steps
        p = 1 / (1 + np.exp(-np.clip(rows @ weights, -30, 30)))
        hessian = rows.T @ (rows * (p * (1 - p))[:, None]) + np.diag(ridge + 1e-6)
        weights -= np.linalg.solve(hessian, rows.T @ (p - y) + ridge * weights)
    return lambda new: np.c_[(new - mean) / spread, np.ones(len(new))] @ weights


def auc(score: np.ndarray, y: np.ndarray) -> float:
    order = np.argsort(np.argsort(score + 1e-9 * np.random.default_rng(0).random(len(score))))
    good = y.sum()
    return float((order[y == 1].sum() - good * (good - 1) / 2) / (good * (len(y) - good)))


def passes(score: np.ndarray, y: np.ndarray) -> float:
    """The share let pass where RECALL of the harmful ones are not."""
    return float((score > np.quantile(score[y == 0], RECALL)).mean())


def at_share(score: np.ndarray, y: np.ndarray, share: float) -> float:
    """Of the ``share`` with the best scores, the part that is harmless."""
    return float(y[np.argsort(-score)[: max(1, round(share * len(y)))]].mean())


def cell(measure: Measure, groups: np.ndarray) -> str:
    """The measure of all rows, with its interval; it gets the numbers of rows."""
    dice, names = np.random.default_rng(0), np.unique(groups)
    rows_of = {name: np.flatnonzero(groups == name) for name in names}
    drawn = (
        np.concatenate([rows_of[n] for n in dice.choice(names, len(names))]) for _ in range(300)
    )
    low, high = np.quantile([measure(at) for at in drawn], (0.025, 0.975))
    return f"{measure(np.arange(len(groups))):.3f} ({low:.3f} to {high:.3f})"


def table(scores: dict[str, np.ndarray], y: np.ndarray, groups: np.ndarray) -> None:
    print("| score | AUC | let pass at recall 90 % | harmless of the first 25 % | of 50 % |")
    for name, score in scores.items():
        print(f"| {name} |", " | ".join(cell(one, groups) for one in of(score, y)), "|", flush=True)


def of(score: np.ndarray, y: np.ndarray) -> tuple[Measure, ...]:
    return (
        lambda at: auc(score[at], y[at]),
        lambda at: passes(score[at], y[at]),
        lambda at: at_share(score[at], y[at], 0.25),
        lambda at: at_share(score[at], y[at], 0.5),
    )


def beside(takes: np.ndarray, judged: np.ndarray, y: np.ndarray) -> tuple[Measure, ...]:
    def share(at: np.ndarray) -> float:
        return float(takes[at].mean())

    def good(at: np.ndarray) -> float:
        return float(y[at][takes[at]].mean())

    def its(at: np.ndarray) -> float:
        return at_share(judged[at], y[at], share(at))

    return share, good, its, lambda at: its(at) - good(at)


def main() -> None:
    found = np.load(sys.argv[1])
    rows, y, groups = found["rows"], found["y"], found["groups"]
    (logprob, margin, entropy, rank), states = rows[:, :4].T, rows[:, 4:]
    print(f"{len(y)} mismatches, {y.mean():.3f} harmless")
    scores = {
        f"probe, {name}, penalty {penalty:g}": probe(x, y, groups, penalty)
        for name, x in (("both states", states), ("the state that chose", states[:, :384]))
        for penalty in PENALTIES
    }
    judged = scores[f"probe, the state that chose, penalty {PENALTIES[-1]:g}"]
    numbers = np.c_[np.log1p(rank), rows[:, :3]]
    scores |= {
        "probe of the four numbers that rules see": probe(numbers, y, groups, 1.0),
        "dsd, margin: p of the best": -margin,
        "the same, key where entropy is high": -margin - 1.5 * (entropy > np.median(entropy)),
        "the same, key where entropy is low": -margin - 1.5 * (entropy <= np.median(entropy)),
        "distance / entropy": -margin / (entropy + 0.05),
        "bild: p": logprob,
        "top-k: rank": -rank,
        "typical: p * exp(entropy)": logprob + entropy,
        "entropy, low first": -entropy,
    }
    table(scores, y, groups)
    rules = {
        "top-k:2": rank < 2,
        "dsd:0.5": margin <= np.log(2.0),
        "bild:2": logprob >= -2.0,
        "typical": np.exp(logprob) > np.minimum(0.09, 0.3 * np.exp(-entropy)),
    }
    print("| rule | takes | harmless of these | of as many of the probe's | difference |")
    for name, takes in rules.items():
        measures = beside(takes, judged, y)
        print(f"| {name} |", " | ".join(cell(one, groups) for one in measures), "|", flush=True)
    last, kept, texts = found["last"][:, 4:], found["kept"], found["of"]
    print(f"{len(kept)} lines that are not the target's, {kept.mean():.3f} harmless")
    by_token = fitted(states, y, PENALTIES[0])(last)
    table({"probe of tokens": by_token, "own": probe(last, kept, texts, 100.0)}, kept, texts)


if __name__ == "__main__":
    main()
