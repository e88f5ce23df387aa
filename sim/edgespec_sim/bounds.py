"""Lower bounds on the mean time per token: how far is a policy from what cannot be beaten?

Theory of operation. A text is cut at its *misses*, the tokens that none of the draft's guesses on
the committed prefix was; a *run* is the hits between two of them. Let R be the round trip, S a
draft step, P a pass; T(j) when the verifier decides token j, D(j) when the device knows it (as its
own right guess or from a commit). Three facts hold whatever is drafted and sent when:

    a step    D(j) >= D(j-1) + S, if the device guessed j: a step drafts behind what it knows
    a pass    T(j) >= P + the moment at which the verifier had token j-1, as a node or decided
    a miss    D(j) >= T(j) + R/2, if j is a miss; and what the device sent takes R/2 to arrive

Every bound is a chain of them from one miss to the next, with all else for free: passes start when
wanted, draft steps stop when they have become useless, all links carry any message at once. They
hold for one session that has verifier and device to itself, with R, S and P the least of the run;
the share of a batched pass or a queue only adds to them. Sessions start in mid-air: what was
drafted while the prompt was sent is free, and so are the tokens before the first miss and after the
last one of a text.

What is known of the draft is its acceptance: as a mean alone, and then the bound is that of the
kindest law with this mean; or as the runs of real text, whose many short and few long runs are
another thing than a coin's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import assert_never

from edgespec.bench.arms import Arm

ONE_PASS_A_TOKEN = "one pass a token"
ROUND_TRIP_PER_MISS = "a round trip per miss"
STOP_AND_WAIT = "stop and wait at this draft length"
THESE_DRAFTS = "any policy with these drafts"
PERFECT_DRAFTS = "perfect drafts"
# Of ``core.protocol.messages.Limits``.
_MAX_NODES_PER_PASS = 64
# Of ``core.verifier.own_drafts``.
_LONGEST_CHAIN = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """What one session's moves take. Raises ``ValueError`` naming the field and the value."""

    rtt_s: float
    step_s: float
    pass_s: float

    def __post_init__(self) -> None:
        for name in ("rtt_s", "step_s", "pass_s"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}, but must be finite and >= 0")


@dataclass(frozen=True, slots=True)
class RunLengths:
    """How long the runs of hits between misses are."""

    shares: tuple[tuple[int, float], ...]
    """Each length that occurs with its share of the runs; empty: there are no misses to count."""
    tokens_per_run: float
    """All tokens over the number of runs: at least the mean length plus 1."""

    @classmethod
    def of_ranks(cls, texts: Iterable[Sequence[int]], width: int) -> RunLengths:
        """The runs of texts of which the rank of each token among the draft's guesses is known: a
        hit has a rank in [0, ``width``). Counted are the runs from one miss to another."""
        lengths: Counter[int] = Counter()
        tokens = 0
        for ranks in texts:
            misses = [i for i, rank in enumerate(ranks) if not 0 <= rank < width]
            lengths.update(b - a - 1 for a, b in pairwise(misses))
            tokens += len(ranks) - 1  # the first one starts the clock
        count = lengths.total()
        if not count:
            return cls((), 1.0)
        return cls(tuple((n, times / count) for n, times in lengths.items()), tokens / count)

    @property
    def endless(self) -> RunLengths:
        """The same runs without the free ends of a text: no more tokens than theirs."""
        return RunLengths(self.shares, 1.0 + sum(share * n for n, share in self.shares))

    def per_token_s(self, run_s: Callable[[int], float]) -> float:
        """Mean seconds a token when a run of n hits and its miss take ``run_s(n)``."""
        return sum(share * run_s(n) for n, share in self.shares) / self.tokens_per_run


# --- the bounds -----------------------------------------------------------------------------


def target_only_s(costs: Costs) -> float:
    """Plain streaming: a pass a token, back to back, whatever the round trip. It is reached."""
    return costs.pass_s


def round_trip_per_miss_s(costs: Costs, acceptance: float, runs: RunLengths | None = None) -> float:
    """One chain of guesses and no run-ahead: the verifier's next pass waits for a guess, so each
    miss costs a round trip (``vanilla``, ``pearl``, ``windowed``).

    After miss i the device knows it at T(i) + R/2, so its guess of i+1 is there at T(i) + R/2 + S +
    R/2 or later. If that is a miss too, a pass decides it: R + S + P. Else hits i+1 .. i+n follow
    and the pass that decides the next miss holds node i+n, so it ends R/2 + P after D(i+n) or
    later: R + S + (what n - 1 further hits take the device) + P. Each takes it S, or it is the
    target's own token behind an accepted node j-1, which comes R + P after that was sent; never
    two of these in a row, as a pass needs a node.

    With the mean alone, runs of equal length are the kindest: the time is convex in n.
    """

    def run_s(hits: float) -> float:
        return costs.rtt_s + costs.step_s + costs.pass_s + _further_s(costs, hits - 1)

    if runs is not None:
        return runs.per_token_s(run_s)
    misses = _misses(acceptance)
    return misses * run_s(acceptance / misses) if misses else perfect_drafts_s(costs)


def stop_and_wait_s(costs: Costs, gamma: int, runs: RunLengths) -> float:
    """Draft ``gamma``, send, wait: gamma S + R + P a pass, of which a run of n hits and its miss
    take (n + 1) / (gamma + 1), rounded up: an accepted draft brings gamma + 1 tokens. This is no
    mere bound: it is what this policy takes, but for the ends of a text."""
    pass_s = gamma * costs.step_s + costs.rtt_s + costs.pass_s
    return runs.per_token_s(lambda hits: -(-(hits + 1) // (gamma + 1)) * pass_s)


def any_policy_s(costs: Costs, acceptance: float, runs: RunLengths | None = None) -> float:
    """Whatever is drafted, sent and run ahead: trees included, if hits are the tokens that were
    among the guesses of a step.

    After miss i the verifier can decode on by itself (n P for n tokens), or profit from guesses of
    the device, which knows miss i at T(i) + R/2: R + n S. It may also begin the first way and end
    the second, which is never sooner than the better one. The next miss takes one pass more:
    P + min(n P, R + n S).

    With the mean alone, many runs of no hit and few endless ones are the kindest, as the time is
    concave in n: P for each miss, min(S, P) for each hit.
    """

    def run_s(hits: int) -> float:
        alone_s = hits * costs.pass_s
        return costs.pass_s + min(alone_s, costs.rtt_s + hits * costs.step_s)

    if runs is not None:
        return runs.per_token_s(run_s)
    misses = _misses(acceptance)
    return misses * costs.pass_s + (1.0 - misses) * min(costs.step_s, costs.pass_s)


def perfect_drafts_s(costs: Costs, *, run_ahead: bool = False) -> float:
    """Every guess right, so the round trip costs nothing: the device moves on by S a token, or the
    verifier by itself, P a token with run-ahead. Without it, the verifier's own token behind a
    node saves every second step at best, at R + P each. A pass holds so many nodes and no more.

    This one counts all tokens, so a short text may beat it by what the device drafted before the
    first token: about (3/2 R + P) / S tokens are free."""
    alone_s = costs.pass_s if run_ahead else (costs.step_s + costs.rtt_s + costs.pass_s) / 2.0
    full_s = costs.pass_s / (_MAX_NODES_PER_PASS + 1)
    return max(min(costs.step_s, alone_s), full_s)


def perfect_server_drafts_s(costs: Costs, server_step_s: float) -> float:
    """Every guess of the verifier's own draft right: a pass and n steps before it bring n + 1
    tokens, with the shortest or the longest chain best."""
    whole_s = costs.pass_s + _LONGEST_CHAIN * server_step_s
    return min(costs.pass_s, whole_s / (_LONGEST_CHAIN + 1))


def both_perfect_s(costs: Costs, server_step_s: float) -> float:
    """Each token is a guess of the device, S apart, or the verifier's: the rates add up."""
    server_s = perfect_server_drafts_s(costs, server_step_s)
    both_s = costs.step_s * server_s / max(costs.step_s + server_s, 1e-12)
    return max(both_s, costs.pass_s / (_MAX_NODES_PER_PASS + 1))


def lower_bounds(
    arm_name: str,
    *,
    rtt_s: float,
    step_s: float,
    pass_s: float,
    acceptance: float,
    runs: RunLengths | None = None,
    gamma: int | None = None,
    server_step_s: float | None = None,
) -> dict[str, float]:
    """Bounds on the mean seconds per token of an arm (``edgespec/bench/arms.py``), by name.

    ``acceptance`` is the share of positions at which the draft's first guess is right. ``runs`` are
    to be counted with the arm's width: 1, and for ``edgespec`` what it drafts with; without them
    little is known of a tree. ``gamma`` is the fixed draft length of ``vanilla``; None adapts.
    Raises ``ValueError`` naming the value.
    """
    costs = Costs(rtt_s, step_s, pass_s)
    _misses(acceptance)
    arm = Arm(arm_name)
    match arm:
        case Arm.TARGET_ONLY:
            return {ONE_PASS_A_TOKEN: target_only_s(costs)}
        case Arm.EDGESPEC:
            found = {PERFECT_DRAFTS: perfect_drafts_s(costs, run_ahead=True)}
            if runs is not None and runs.shares:
                found[THESE_DRAFTS] = any_policy_s(costs, acceptance, runs)
            return found
        case Arm.SERVER_DRAFT | Arm.BOTH:
            perfect_s = perfect_server_drafts_s if arm is Arm.SERVER_DRAFT else both_perfect_s
            return (
                {} if server_step_s is None else {PERFECT_DRAFTS: perfect_s(costs, server_step_s)}
            )
        case Arm.VANILLA | Arm.PEARL | Arm.WINDOWED:
            found = {PERFECT_DRAFTS: perfect_drafts_s(costs, run_ahead=False)}
            if runs is None or runs.shares:
                found[ROUND_TRIP_PER_MISS] = round_trip_per_miss_s(costs, acceptance, runs)
            if arm is Arm.VANILLA and gamma is not None and runs is not None and runs.shares:
                found[STOP_AND_WAIT] = stop_and_wait_s(costs, gamma, runs)
            return found
        case _:
            assert_never(arm)


def _further_s(costs: Costs, hits: float) -> float:
    """The least time in which a device without run-ahead comes to know so many further hits."""
    if hits <= 0:
        return 0.0
    own_s, told_s = costs.step_s, min(costs.step_s, costs.rtt_s + costs.pass_s)
    if isinstance(hits, int):
        return (hits // 2) * own_s + (hits - hits // 2) * told_s
    # The line below all of these, for means: it meets them at odd numbers.
    return max(0.0, (hits * (own_s + told_s) - (own_s - told_s)) / 2.0)


def _misses(acceptance: float) -> float:
    if not 0.0 <= acceptance <= 1.0:
        raise ValueError(f"acceptance is {acceptance}, but must be in [0, 1]")
    return 1.0 - acceptance
