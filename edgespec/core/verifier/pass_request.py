"""What a session asks of the pass that starts now, and what it learns from one that is over.

Theory of operation. The committed tokens that the cache lacks are fed, as many as there is room
for. If they are all of them, the target's next token is sampled, and nodes may ride behind them:
those of the device that are worth their row, or else the verifier's own guesses
(``served_drafts.py``). The device is told of its own nodes only, since that is what it learns from.

For a target that looks at one path only, a tree is cut to its likeliest chain: the first choice at
each place, since siblings come with the likelier before the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocol.messages import Open
from edgespec.core.protocol.prefix import CommittedPrefix
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.inbox import DraftInbox
from edgespec.core.verifier.priced_share import PricedShare
from edgespec.core.verifier.served_drafts import ServedDrafts
from edgespec.core.verifier.session_events import Offer, VerifyCounters


class PassFormer:
    """Forms the requests of one session; ``end`` is where its text ends at the latest, ``served``
    None: it has no drafts of the verifier's own; ``share`` is its part of a row's price.
    ``trees`` False: the target verifies chains alone."""

    def __init__(
        self,
        request: Open,
        prefix: CommittedPrefix,
        inbox: DraftInbox,
        most_nodes: int,
        end: int,
        served: ServedDrafts | None,
        share: PricedShare,
        *,
        trees: bool = True,
    ) -> None:
        self._trees = trees
        self._key, self._prefix, self._inbox = request.session_id, prefix, inbox
        self._most_nodes, self._end, self._served = most_nodes, end, served
        self._logprobs = request.logprobs
        self._share = share

    def form(self, cache_length: int, offer: Offer) -> PassRequest:
        """The request for a pass in which ``offer`` leaves room."""
        key, first, last = self._key, cache_length, self._prefix.length
        logprobs = self._logprobs
        feed = tuple(self._prefix.tokens[first : min(last, first + offer.max_rows)])
        if first + len(feed) < last:
            return PassRequest(key, first, feed, sample=False)
        room = min(offer.max_rows - len(feed), self._most_nodes)
        price = min(1.0, offer.least_chance) * self._share.value
        nodes = self._inbox.verifiable(room, self._end, price)
        if nodes:
            index = {node.id: i for i, node in enumerate(nodes)}
            tokens = tuple([node.token for node in nodes])
            parents = tuple([index.get(node.parent, -1) for node in nodes])
            if not self._trees:
                tokens, parents = likeliest_chain(tokens, parents)
            return PassRequest(key, first, feed, tokens, parents, logprobs=logprobs)
        if self._served is None:
            return PassRequest(key, first, feed, logprobs=logprobs)
        depth = self._end - 1 - last  # a node can matter only before the last token
        least = offer.least_chance if offer.least_guess is None else offer.least_guess
        guesses = self._served.propose(self._prefix.tokens, room, depth, least)
        tokens, parents = tuple(guesses.tokens), tuple(guesses.parents)
        if not self._trees:
            tokens, parents = likeliest_chain(tokens, parents)
        served = len(tokens)
        return PassRequest(key, first, feed, tokens, parents, served=served, logprobs=logprobs)

    def learn(
        self,
        request: PassRequest,
        targets: tuple[int, ...],
        accepted: tuple[int, ...],
        counters: VerifyCounters,
    ) -> int:
        """The pass sampled ``targets`` and accepted these nodes. Returns how many of them are the
        device's."""
        if self._served is None or request.drafted:
            return len(accepted)
        self._served.learn(request.tokens, targets[1:], accepted)
        counters.server_drafted += request.served
        counters.server_accepted += len(accepted)
        return 0


def likeliest_chain(
    tokens: Sequence[int], parents: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents of the path that takes the first child everywhere; nodes as in
    ``PassRequest``.

    Worked example: of a tree with the paths ``a b``, ``a c`` and ``d``, in this order, ``a b``.
    """
    chain: list[int] = []
    at = -1
    for node, parent in enumerate(parents):  # a child comes behind its parent
        if parent == at:
            chain.append(tokens[node])
            at = node
    return tuple(chain), tuple(range(-1, len(chain) - 1))
