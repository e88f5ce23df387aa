"""The best number of positions for the steps of a parallel draft, its *places*.

Theory of operation. One run of a parallel draft gives candidates for k positions. The first one is
right with the chance r_0, the next one with r_1 if the first is right, and so on, and r falls with
the place. A run costs one row and about 2 * (k - 1) further ones: k - 1 mask tokens, and as many
tokens that the step before it drafted and that are fed now. So more places bring a chain sooner,
and it breaks sooner.

Both are weighed from one correction to the next. Time counts from the moment when the verifier
sends the correction. Position q of the chain is drafted by run q // k, so it arrives at

    A_q = rtt + step + (q // k) * (step + 2 * (k - 1) * row)     (the first run feeds one token)

and is committed at C_q = min(C_(q-1) + T, max(C_(q-1), A_q + 1.5 * P)): by the verifier itself, T
after the position before it, or by the pass of P that begins next when it has arrived, half a pass
later on average. With R_q the chance that all positions before q are right and r the chance of q,
the chain ends at q with R_q * (1 - r), after q + 1 tokens. So a token takes

    sum(R_q * (1 - r) * C_q) / sum(R_q * (1 - r) * (q + 1))

(the renewal theorem). With passes of 25 ms, a round trip of 20 ms, r_0 = 0.85, rows of a fifth of a
step, and places that keep 0.95, 0.9, 0.85 .. of that, a token takes 15.2 ms with steps of 8 ms and
k = 1, and 13.9 ms with k = 2. With steps of 24 ms it takes 25 ms with k = 1, as without drafts, and
20.5 ms with k = 8. With places that keep 0.85, 0.7, 0.6 .., k = 1 is best for steps of 8 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from edgespec.core.device.policy import DraftView

_LONGEST_CHAIN: Final = 64
_LEAST_CHANCE: Final = 1e-3
_SURE_RATE: Final = 0.99
MIN_ADVANTAGE: Final = 1.2
"""Factor by which several places must be quicker than one: the rates are estimates, and misses come
in runs, which favours one place."""


def choose_places(view: DraftView) -> int:
    """Return the number of places with which a token takes least time: a power of two, up to the
    draft's."""
    chances, most = view.estimates.guesses, view.estimates.max_places
    rates = [chances.at(place).acceptance.rate(0) for place in range(most)]
    best, best_s, places = 1, token_s(view, rates[:1]) / MIN_ADVANTAGE, 2
    while places <= most:
        found_s = token_s(view, rates[:places])
        if found_s < best_s:
            best, best_s = places, found_s
        places *= 2
    return best


def token_s(view: DraftView, rates: Sequence[float]) -> float:
    """Return the seconds per token with draft steps of ``len(rates)`` places, by the formula above.

    ``rates`` are the acceptance rates of the places. For a verifier that waits for drafts there is
    no time T."""
    places, pass_s, own_s = len(rates), view.pass_s, view.decoding_s
    single_s, row_s = view.estimates.single_step_s(view.pass_s), view.estimates.further_row_s
    arrival_s = view.rtt_s + single_s + (places - 1) * row_s
    committed_s, chance, tokens, seconds = 0.0, 1.0, 0.0, 0.0
    for position in range(_LONGEST_CHAIN):
        place = position % places
        if position and not place:
            arrival_s += single_s + 2 * (places - 1) * row_s
        drafted_s = max(committed_s, arrival_s + 1.5 * pass_s)
        committed_s = drafted_s if own_s is None else min(committed_s + own_s, drafted_s)
        rate = min(rates[place], _SURE_RATE)
        tokens += chance * (1.0 - rate) * (position + 1)
        seconds += chance * (1.0 - rate) * committed_s
        chance *= rate
        if chance < _LEAST_CHANCE:
            break
    return (seconds + chance * committed_s) / (tokens + chance * (position + 1))
