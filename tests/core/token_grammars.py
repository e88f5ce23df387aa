"""Grammars over token ids for tests: automata whose every text can be written down, and the text
that a target gives with drafts, pass by pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgespec.core.ports import PassRequest, TargetModel
from edgespec.core.protocol.constraint import Constraint, ConstraintKind, mask_of
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.drafts import ExactRule

EOS = 0


@dataclass(frozen=True, slots=True)
class Automaton:
    """``moves[state]`` says where each token leads; the first state is 0."""

    moves: tuple[Mapping[int, int], ...]
    ends: frozenset[int]

    def allowed(self, output: Sequence[int]) -> set[int]:
        """The scalar law: what may come behind ``output``, the end token where nothing else."""
        state = 0
        for token in output:
            state = self.moves[state][token]
        found = set(self.moves[state])
        return found | {EOS} if state in self.ends or not found else found

    def constraint(self) -> Constraint:
        return Constraint(ConstraintKind.GRAMMAR, repr(self), lambda: AutomatonMatcher(self))


class AutomatonMatcher:
    """``Matcher`` over an automaton; counts the tokens it was fed."""

    fed = 0

    def __init__(self, automaton: Automaton) -> None:
        self._automaton, self._states = automaton, [0]

    @property
    def accepting(self) -> bool:
        return self._states[-1] in self._automaton.ends

    def mask(self) -> bytes:
        return mask_of(self._automaton.moves[self._states[-1]])

    def consume(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            AutomatonMatcher.fed += 1
            found = self._automaton.moves[self._states[-1]].get(token)
            if found is None:
                return count
            self._states.append(found)
        return len(tokens)

    def rollback(self, count: int) -> None:
        assert 0 < count < len(self._states)
        del self._states[len(self._states) - count :]


def lawful_text(
    model: ToyModel,
    prompt: Sequence[int],
    params: SamplingParams,
    mask: Callable[[Sequence[int]], bytes],
) -> list[int]:
    """The oracle: one token after the other, by the scalar specification; ``mask`` of the output
    so far."""
    output: list[int] = []
    while len(output) < params.max_tokens and output[-1:] != [EOS]:
        text = [*prompt, *output]
        row = model.logits(text)
        output.append(choose(row, params, len(text), prompt, output, mask(output)))
    return output


def drafted_text(
    target: TargetModel,
    prompt: Sequence[int],
    params: SamplingParams,
    guess: Callable[[Sequence[int], random.Random], int],
    seed: int,
    *,
    held: Sequence[int] = (),
) -> list[int]:
    """What a target commits with a random tree of ``guess``-ed nodes in each pass, from ``held``
    on; now and then its cache is taken away."""
    dice = random.Random(seed)
    tokens, cached = [*prompt, *held], 0
    target.open("drafted", len(prompt), params, tuple(tokens))
    while True:
        nodes: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = []
        for node in range(dice.randrange(7)):
            parent = dice.randrange(-1, node)
            path = [*(paths[parent] if parent >= 0 else tokens[len(prompt) :])]
            nodes.append(guess(path, dice))
            parents.append(parent)
            paths.append([*path, nodes[-1]])
        request = PassRequest(
            "drafted", cached, tuple(tokens[cached:]), tuple(nodes), tuple(parents)
        )
        (result,) = target.forward([request])
        walk = ExactRule().walk(nodes, parents, result.targets)
        target.keep("drafted", walk.nodes)
        cached = len(tokens) + len(walk.nodes)
        for token in walk.tokens:
            tokens.append(token)
            if token == EOS or len(tokens) - len(prompt) >= params.max_tokens:
                target.close("drafted")
                return tokens[len(prompt) :]
        cached = dice.choice((0, cached, cached, cached))
