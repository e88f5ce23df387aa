"""Acceptance rules: which drafted tokens of a pass are committed.

Theory of operation. A pass computes the target's own token behind every node. The exact rule
accepts a node if it equals the target's token at its place, so the output is exactly the target's.
All other rules are LOSSY: their output may differ from the target's own.

If the target's own token was drafted, every rule accepts it. If it was not, a relaxed rule may
accept a drafted token in its place: the likeliest of those that it finds good enough. The walk then
goes on behind that token, whose row the pass has computed. A rule is a pure function of the pass's
scores of a node (``work.NodeScore``) and uses nothing else.

Three things hold under every rule. A token that the constraint or the sampling rules out is never
accepted. Only the target ends an output, so an end token is neither accepted in place of another
token nor replaced by one. Nodes of the verifier's own are judged by the exact rule: they may come
from other texts of the same API key, and must change no token of this one.

    exact               the target's own token
    typical:EPS,DELTA   p > min(EPS, DELTA * exp(-entropy))  (Medusa, arXiv 2401.10774, section 2.3)
    top-k:K             one of the K likeliest tokens
    margin:NATS         log p is at most NATS below that of the likeliest token
    dsd:SHARE           p >= SHARE * p of the likeliest  (DSD, arXiv 2511.11733, its threshold)
    bild:NATS           -log p <= NATS, else roll back  (BiLD, arXiv 2302.07863; its fallback, when
                        the draft is unsure, is the device's draft policy)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from edgespec.core.protocol.checks import check_range
from edgespec.core.protocol.messages import EXACT_RULE
from edgespec.core.protocol.work import NodeScore
from edgespec.core.statically_frozen import statically_frozen


@statically_frozen
class Walk:
    """The result of a rule: the accepted nodes and the tokens to commit."""

    nodes: tuple[int, ...]
    """Indices of the accepted nodes of the pass, from root to leaf."""
    tokens: tuple[int, ...]
    """Tokens to commit: one for each accepted node, and one more. Never empty."""
    replaced: tuple[int, ...] = ()
    """Indices in ``tokens`` of tokens that are not the target's own."""


class AcceptanceRule(Protocol):
    """Decides which nodes of a pass are accepted."""

    def walk(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        targets: Sequence[int],
        scores: Sequence[NodeScore] = (),
        ends: frozenset[int] = frozenset(),
    ) -> Walk:
        """Return which nodes are accepted and which tokens are committed.

        ``tokens[i]`` and ``parents[i]`` describe node i of the pass; parent -1 is the root.
        ``targets[0]`` is the target's token at the root, ``targets[1 + i]`` its token after node i.
        ``scores`` belong to the first nodes, which are the ones that a relaxed rule may accept.
        ``ends`` are the tokens that end the output. The exact rule uses neither ``scores`` nor
        ``ends``.
        """


@statically_frozen
class ExactRule:
    """Accepts a node if it equals the target's token, so the output is exactly the target's.

    The walk starts at the root and goes to the child that equals the target's token, as long as
    there is one. The target's token at the last node is the correction or the bonus. The committed
    tokens are always the target's own, so no draft can bias them.
    """

    def walk(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        targets: Sequence[int],
        scores: Sequence[NodeScore] = (),
        ends: frozenset[int] = frozenset(),
    ) -> Walk:
        nodes: list[int] = []
        committed = [targets[0]]
        at, wanted = -1, targets[0]
        for node, parent in enumerate(parents):  # a child comes after its parent
            if parent == at and tokens[node] == wanted:
                nodes.append(node)
                at, wanted = node, targets[1 + node]
                committed.append(wanted)
        return Walk(tuple(nodes), tuple(committed))


# --- relaxed rules ------------------------------------------------------------------------------

Accepts = Callable[..., bool]


@dataclass(frozen=True, slots=True)
class _Family:
    """Rules that differ in their parameters only.

    ``accepts`` receives a score and the parameters. ``parameters`` holds the name and range of
    each; ``usual`` the default values, if there are any."""

    accepts: Accepts
    parameters: tuple[tuple[str, float, float], ...]
    usual: tuple[float, ...] = ()

    @property
    def usage(self) -> str:
        names = ",".join(name for name, _, _ in self.parameters)
        return f"[:{names}]" if self.usual else f":{names}"


_FAMILIES: Final[Mapping[str, _Family]] = {
    "typical": _Family(
        lambda one, eps, delta: math.exp(one.logprob) > min(eps, delta * math.exp(-one.entropy)),
        (("EPS", 0.0, 1.0), ("DELTA", 0.0, 1.0)),
        (0.09, 0.3),
    ),
    "top-k": _Family(lambda one, k: one.rank < k, (("K", 1.0, 1000.0),)),
    "margin": _Family(lambda one, nats: one.margin <= nats, (("NATS", 0.0, 100.0),)),
    "dsd": _Family(lambda one, share: math.exp(-one.margin) >= share, (("SHARE", 0.0, 1.0),)),
    "bild": _Family(lambda one, nats: -one.logprob <= nats, (("NATS", 0.0, 100.0),)),
}
RULES_IN_WORDS: Final = ", ".join(
    [EXACT_RULE, *(name + one.usage for name, one in _FAMILIES.items())]
)


@statically_frozen
class RelaxedRule:
    """One rule with its parameters; its string form names them all."""

    name: str
    parameters: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.name}:{','.join([f'{one:g}' for one in self.parameters])}"

    def accepts(self, score: NodeScore) -> bool:
        """Return whether the token may be committed although the target's own token is another
        one."""
        possible = score.logprob > -math.inf
        return possible and _FAMILIES[self.name].accepts(score, *self.parameters)

    def walk(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        targets: Sequence[int],
        scores: Sequence[NodeScore] = (),
        ends: frozenset[int] = frozenset(),
    ) -> Walk:
        nodes = zip(tokens, parents, strict=True)
        drafted_targets = {parent for token, parent in nodes if token == targets[1 + parent]}
        replacements: dict[int, int] = {}
        for node, (score, parent) in enumerate(zip(scores, parents, strict=False)):
            is_end = not ends.isdisjoint((tokens[node], targets[1 + parent]))
            if parent in drafted_targets or is_end or not self.accepts(score):
                continue
            rival = replacements.get(parent)
            if rival is None or score.logprob > scores[rival].logprob:
                replacements[parent] = node
        chosen = list(targets)
        for parent, node in replacements.items():
            chosen[1 + parent] = tokens[node]
        walk = ExactRule().walk(tokens, parents, chosen)
        replaced_nodes = set(replacements.values()).intersection(walk.nodes)
        replaced = tuple([at for at, node in enumerate(walk.nodes) if node in replaced_nodes])
        return Walk(walk.nodes, walk.tokens, replaced)


def parse_rule(text: str) -> RelaxedRule | None:
    """Parse ``NAME[:PARAMETER,...]``; return None for the exact rule.

    Raises ``ValueError`` that lists the rules, or names the parameter and its range.
    """
    if text == EXACT_RULE:
        return None
    name, colon, given = text.partition(":")
    if (family := _FAMILIES.get(name)) is None:
        raise ValueError(f"rule is {text!r}, but must be one of: {RULES_IN_WORDS}")
    try:
        values = tuple([float(part) for part in given.split(",")]) if colon else family.usual
    except ValueError:
        values = ()
    if len(values) != len(family.parameters):
        raise ValueError(f"rule is {text!r}, but must be {name}{family.usage}, in numbers")
    for value, (parameter, low, high) in zip(values, family.parameters, strict=True):
        check_range(f"{parameter} of rule {text!r}", value, low, high)
    return RelaxedRule(name, values)


def full_rule_name(text: str) -> str:
    """Return the rule with all its parameters. Raises ``ValueError`` as ``parse_rule`` does."""
    return str(parse_rule(text) or EXACT_RULE)


def make_rule(text: str) -> AcceptanceRule:
    """Return the rule that ``text`` names. Raises ``ValueError`` as ``parse_rule`` does."""
    return parse_rule(text) or ExactRule()


def check_offer(rule: str) -> None:
    """Raise ``ValueError`` if ``rule`` is neither the name of a rule nor one with its
    parameters."""
    if rule not in _FAMILIES:
        parse_rule(rule)


def explain_rule_refusal(text: str, offered: Collection[str]) -> str | None:
    """Return why a verifier that offers these rules refuses a request for this one, or None.

    A rule is offered by its name, which allows all parameters, or with its parameters.
    """
    try:
        name = full_rule_name(text)
    except ValueError as error:
        return str(error)
    names = {name, name.partition(":")[0]}
    if any(one in names or (":" in one and full_rule_name(one) == name) for one in offered):
        return None
    return f"the rule {text!r} is not offered by this verifier; offered: {', '.join(offered)}"
