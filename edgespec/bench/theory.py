"""Comparison of a draft's measured acceptance with theory: ``edgespec bench --theory``.

Theory of operation. At each place of the target's own outputs there are two laws of the next token
at the session's temperature, the target's p and the draft's q. With TV = sum |p - q| / 2,

    ideal      1 - TV: no rule accepts a token drawn from q more often and keeps p (Leviathan et
               al., arXiv 2211.17192)
    expected   sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x): how often both ends, which
               share their noise, draw the same token
    bound      (1 - TV) / (1 + TV): a lower bound of the expected value (Daliri, Musco and Suresh,
               arXiv 2408.07978)

For two siblings no rule covers the target's token more often than 1 - max over A of p(A) - P(one
of them is in A). Sets of the tokens with the largest p / q are tried, with siblings drawn without
replacement (as edgespec does; RSD, arXiv 2402.14160) and independently (SpecTr, arXiv 2310.15141).

Let a drafted token be accepted with probability a after a rejected one and b after an accepted one,
so that b - a is the correlation of neighbours. A chain of up to g tokens per pass then gives, in
the long run,

    1 + f * (1 - b**g) / (1 - b),  f = a + s * (b - a),  s = a * b**g / (1 - b**g * (b - a))

tokens per pass. f is the probability that its first token is accepted, and s that the token before
it was accepted. For a = b this is Leviathan's (1 - a**(g + 1)) / (1 - a). Worked: a = 0.5, b = 0.8,
g = 2: s = 0.32 / 0.808 = 0.396, f = 0.619, 1 + 0.619 * 0.36 / 0.2 = 2.11 tokens.

Means are over the places of an output and then over outputs; intervals are 95 % over outputs, which
share one seed, so that equal positions have equal noise. A value that is measured above the ideal,
or below the bound, beyond its interval, is a bug, and the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from statistics import fmean
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

from edgespec.bench.intervals import mean_interval, ratio_interval
from edgespec.core.ports import Drafter, PassRequest, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling.arrays import Row, probabilities

GAMMAS: Final = (1, 2, 4, 8)
_EDGES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.01)
_SLACK: Final = 1e-3
"""Difference that rounding can cause, which is no bug."""
_LEAST_REST: Final = 1e-9
"""Smallest 1 - q that is divided by. Below it the ideal of two siblings comes out too high."""
_FEWEST_TEXTS: Final = 5
"""Fewest outputs whose interval may show that something is impossible."""

Law = NDArray[np.float64]


class Place(NamedTuple):
    """Theoretical and measured values of one context."""

    variation: float
    expected: float
    pair_ideal: float
    """Ideal of two siblings drawn without replacement."""
    independent_ideal: float
    """Ideal of two siblings drawn independently."""
    rank: int = -1
    """Rank of the target's token among the draft's candidates, or -1 if it was not among them."""

    @property
    def ideal(self) -> float:
        return 1.0 - self.variation

    @property
    def bound(self) -> float:
        return self.ideal / (1.0 + self.variation)

    @property
    def measured(self) -> float:
        return float(self.rank == 0)

    @property
    def pair_measured(self) -> float:
        return float(0 <= self.rank < 2)

    @property
    def luck(self) -> float:
        """Measured minus expected value."""
        return self.measured - self.expected


def compare_laws(p: Law, q: Law) -> Place:
    """Compare the target's law p with the draft's law q, [V] each.

    With tokens ordered by p / q, the largest first, max(p_y / p_x, q_y / q_x) is its first term for
    all y up to x and its second term after it, so running sums give ``expected``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(p > 0.0, p / q, 0.0)
    order = np.argsort(-ratios, kind="stable")
    p, q = p[order], q[order]
    within, rest = np.cumsum(p), _sum_later(q)
    both = (p > 0.0) & (q > 0.0)
    sums = within[both] / p[both] + rest[both] / q[both]
    # Two without replacement miss the tokens up to x with the sum over the others, whose mass is
    # ``rest``, of q_y * (rest - q_y) / (1 - q_y).
    odds = q / np.maximum(1.0 - q, _LEAST_REST)
    missed = np.clip(rest * _sum_later(odds) - _sum_later(q * odds), 0.0, rest)
    return Place(
        0.5 * float(np.abs(p - q).sum()),
        float((1.0 / sums).sum()),
        1.0 - max(0.0, float((within - 1.0 + missed).max())),
        1.0 - max(0.0, float((within - 1.0 + rest**2).max())),
    )


def _sum_later(values: Law) -> Law:
    """Return, for each of ``values``, the sum of all later ones."""
    return np.append(np.cumsum(values[:0:-1])[::-1], 0.0)


class ComparedText(NamedTuple):
    """Places of one output, at least one."""

    name: str
    places: tuple[Place, ...]


@runtime_checkable
class OpenTarget(TargetModel, Protocol):
    """A target that shows its logits."""

    def pass_logits(self, batch: Sequence[PassRequest]) -> Row:
        """Run one pass as ``forward`` does, and return the logits of the sampled rows, [rows,
        vocabulary], in place of the tokens."""


@runtime_checkable
class OpenDrafter(Drafter, Protocol):
    """A drafter that shows its logits."""

    @property
    def logits(self) -> Row:
        """Logits of the last step, [vocabulary], which are valid until the next one."""


class TheoryRecorder:
    """Compares the laws along the outputs that ``record_tape`` visits."""

    def __init__(self, target: TargetModel, drafter: Drafter, sampling: SamplingParams) -> None:
        """Raise ``ValueError`` for a model that shows no logits."""
        inner = drafter.inner or drafter  # A paced drafter shows no logits.
        if not isinstance(target, OpenTarget):
            raise ValueError(f"--theory: the target shows no logits ({type(target).__name__})")
        if not isinstance(inner, OpenDrafter):
            raise ValueError(f"--theory: the draft shows no logits ({type(inner).__name__})")
        self.texts: list[ComparedText] = []
        self._target, self._drafter, self._sampling = target, inner, sampling

    def places(self, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[Place]:
        """Yield the place of each of ``tokens``. The caller advances the generator right after the
        drafter's step at that place, whose logits are read."""
        for row in self._target_rows(prompt, tokens):
            laws = [probabilities(one, self._sampling) for one in (row, self._drafter.logits)]
            size = max(one.size for one in laws)
            p, q = (np.pad(one, (0, size - one.size)) for one in laws)
            yield compare_laws(p, q)

    def _target_rows(self, prompt: Sequence[int], tokens: Sequence[int]) -> Row:
        """Return the logits after ``prompt`` and after each of ``tokens`` but the last, from one
        pass."""
        nodes = tuple(tokens[:-1])
        request = PassRequest("theory", 0, tuple(prompt), nodes, tuple(range(-1, len(nodes) - 1)))
        self._target.open(request.key, len(prompt), self._sampling)
        try:
            return self._target.pass_logits([request])
        finally:
            self._target.close(request.key)


def chain_tokens(behind_miss: float, behind_hit: float, gamma: int) -> float:
    """Return the tokens per pass by the formula at the head of this file. ``behind_miss`` is a,
    ``behind_hit`` is b."""
    full = behind_hit**gamma
    again = full * (behind_hit - behind_miss)
    started = behind_miss * full / (1.0 - again) if behind_miss else 0.0
    first = behind_miss + started * (behind_hit - behind_miss)
    each = float(gamma) if behind_hit == 1.0 else (1.0 - full) / (1.0 - behind_hit)
    return 1.0 + first * each


def replayed_tokens(hits: Sequence[bool], gamma: int) -> float:
    """Return the tokens per pass of chains of ``gamma`` tokens along these places."""
    at = passes = 0
    while at < len(hits):
        right = 0
        while right < gamma and at + right < len(hits) and hits[at + right]:
            right += 1
        at, passes = at + right + 1, passes + 1
    return len(hits) / passes


def beside_theory(texts: Sequence[ComparedText]) -> dict[str, Any]:
    """Return the whole comparison of at least one output, ready for JSON."""
    hits = [[place.rank == 0 for place in text.places] for text in texts]
    pairs = [pair for one in hits for pair in pairwise(one)]
    rate = fmean([hit for one in hits for hit in one])
    wrong, right = (
        fmean([hit for before, hit in pairs if before == state] or [rate])
        for state in (False, True)
    )
    return {
        "texts": [
            {"name": text.name}
            | {name: [getattr(one, name) for one in text.places] for name in Place._fields}
            for text in texts
        ],
        "means": {
            name: _estimate([fmean(map(attrgetter(name), text.places)) for text in texts])
            for name in _COLUMNS
        },
        "by_variation": list(_by_variation(texts)),
        "right_behind_wrong": wrong,
        "right_behind_right": right,
        "chains": [
            {
                "gamma": gamma,
                "independent": chain_tokens(rate, rate, gamma),
                "correlated": chain_tokens(wrong, right, gamma),
                "measured": _estimate([replayed_tokens(one, gamma) for one in hits]),
            }
            for gamma in GAMMAS
        ],
        "impossible": list(_find_impossible(texts)),
    }


_IN_TABLE: Final = ("bound", "expected", "measured", "ideal")
_COLUMNS: Final = ("variation", *_IN_TABLE, "luck", "pair_measured", *Place._fields[2:4])


def _estimate(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": fmean(values), "interval": list(mean_interval(values))}


def _by_variation(texts: Sequence[ComparedText]) -> Iterator[dict[str, Any]]:
    """Yield one row per group of places by their total variation: means over the places of the
    group, with an interval of the measured value."""
    for low, high in pairwise(_EDGES):
        groups = [[one for one in text.places if low <= one.variation < high] for text in texts]
        groups = [group for group in groups if group]
        places = [one for group in groups for one in group]
        if places:
            right = [sum(one.measured for one in group) for group in groups]
            yield {
                "from": low,
                "to": min(high, 1.0),
                "places": len(places),
                **{name: fmean(map(attrgetter(name), places)) for name in _IN_TABLE},
                "interval": list(ratio_interval(right, [len(group) for group in groups])),
            }


def _find_impossible(texts: Sequence[ComparedText]) -> Iterator[str]:
    """Yield a sentence about each measured value that theory rules out."""
    for what, more, than, less in (
        ("the first guess is right", "measured", "1 - TV", "ideal"),
        ("a guess of two is right", "pair_measured", "two can", "pair_ideal"),
        ("(1 - TV) / (1 + TV) lies", "bound", "the first guess is right", "measured"),
    ):
        low, high = mean_interval(
            [fmean(getattr(x, more) - getattr(x, less) for x in text.places) for text in texts]
        )
        if low > _SLACK and len(texts) >= _FEWEST_TEXTS:
            yield (
                f"impossible: {what} {low:.3f} to {high:.3f} more often than {than}: that is a bug"
                " of the sampling or of this comparison"
            )


def theory_table(found: Mapping[str, Any]) -> Table:
    """Return a table with one line per group of places by total variation, and one for all."""
    title = "how often the first guess is right, by the total variation of the two laws there"
    table = Table(title=title, title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("TV", "places", "at least", "expected", "measured", "at most"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["by_variation"]:
        measured = _show_estimate({"mean": row["measured"], "interval": row["interval"]})
        cells = [measured if one == "measured" else f"{row[one]:.3f}" for one in _IN_TABLE]
        table.add_row(f"{row['from']:g}-{row['to']:g}", str(row["places"]), *cells)
    means, places = found["means"], sum(row["places"] for row in found["by_variation"])
    table.add_section()
    every = [_show_estimate(means[name]) for name in _IN_TABLE]
    table.add_row(f"{means['variation']['mean']:.3f}", str(places), *every)
    return table


def theory_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below the table. Sentences about impossible values come last."""
    means = found["means"]
    yield f"measured less expected of the shared noise: {_show_estimate(means['luck'])}"
    more = means["pair_measured"]["mean"] - means["measured"]["mean"]
    yield (
        f"one of two siblings is right: {_show_estimate(means['pair_measured'])}, {more:.3f} more"
        f" than one; at most {means['pair_ideal']['mean']:.3f} drawn without replacement,"
        f" {means['independent_ideal']['mean']:.3f} independently"
    )
    wrong, right = found["right_behind_wrong"], found["right_behind_right"]
    yield (
        f"right behind a right guess {right:.3f}, behind a wrong one {wrong:.3f}: correlation"
        f" {right - wrong:.3f}"
    )
    for row in found["chains"]:
        yield (
            f"chains of {row['gamma']}: {_show_estimate(row['measured'])} tokens a pass; by the"
            f" formula {row['correlated']:.3f}, without correlation {row['independent']:.3f}"
        )
    yield from found["impossible"]


def _show_estimate(estimate: Mapping[str, Any]) -> str:
    low, high = estimate["interval"]
    return f"{estimate['mean']:.3f} ({low:.3f} to {high:.3f})"
