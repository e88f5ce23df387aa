"""Greedy texts of several sessions on a target, decoded beside each other with drafts of all kinds.

The reference is the library's own ``generate`` of the same model: another attention, another cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from edgespec.core.ports import PassRequest, PassResult, TargetModel
from edgespec.core.protocol.sampling import SamplingParams

_GREEDY = SamplingParams()


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """``count`` greedy tokens of the library's ``generate``, whatever the end token is."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    text: list[int] = out[0, len(prompt) :].tolist()
    return text


def decode_beside(
    target: TargetModel, prompts: Sequence[list[int]], texts: Sequence[list[int]], seed: int = 0
) -> list[list[int]]:
    """What ``target`` writes behind each of ``prompts``, as many tokens as the text of each has.

    Each pass serves some of the sessions. ``texts`` are what is expected; the drafts are trees in
    which some of it hides among wrong nodes, chains of it, chains of wrong tokens, or nothing. The
    first half of a long prompt is fed in a pass of its own.
    """
    rng, size = random.Random(seed), target.info.vocabulary_size
    written = [list(prompt) for prompt in prompts]
    cached = [0] * len(prompts)
    for index, prompt in enumerate(prompts):
        target.open(f"s{index}", len(prompt), _GREEDY)
        if len(prompt) > 8:
            cached[index] = len(prompt) // 2
            target.forward(
                [PassRequest(f"s{index}", 0, tuple(prompt[: cached[index]]), sample=False)]
            )
    goals = [len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True)]
    while unfinished := [i for i, goal in enumerate(goals) if len(written[i]) < goal]:
        batch = []
        for index in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            ahead = texts[index][len(written[index]) - len(prompts[index]) :]
            tokens, parents = random_draft(rng, ahead[: rng.randrange(7)], size)
            feed = tuple(written[index][cached[index] :])
            batch.append(PassRequest(f"s{index}", cached[index], feed, tokens, parents))
        for request, result in zip(batch, target.forward(batch), strict=True):
            index = int(request.key[1:])
            kept, new = accepted(request, result)
            target.keep(request.key, kept)
            cached[index] = len(written[index]) + len(kept)
            written[index] += new
    for index in range(len(prompts)):
        target.close(f"s{index}")
    return [
        text[len(prompt) : goal] for text, prompt, goal in zip(written, prompts, goals, strict=True)
    ]


def random_draft(
    rng: random.Random, right: Sequence[int], vocabulary_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents: ``right`` as a chain, beside and behind it wrong nodes, or neither."""
    tokens: list[int] = []
    parents: list[int] = []
    last = -1
    for token in right:
        for _ in range(rng.choice([0, 0, 1, 2])):
            tokens.append(rng.randrange(vocabulary_size))
            parents.append(rng.choice([last, len(tokens) - 2]))
        tokens.append(token)
        parents.append(last)
        last = len(tokens) - 1
    for _ in range(rng.randrange(3)):
        tokens.append(rng.randrange(vocabulary_size))
        parents.append(len(tokens) - 2)
    return tuple(tokens), tuple(parents)


def accepted(request: PassRequest, result: PassResult) -> tuple[list[int], list[int]]:
    """Nodes that are the target's own tokens, and the tokens that the pass commits."""
    kept: list[int] = []
    new = [result.targets[0]]
    for node, (token, parent) in enumerate(zip(request.tokens, request.parents, strict=True)):
        if parent == (kept[-1] if kept else -1) and token == new[-1]:
            kept.append(node)
            new.append(result.targets[1 + node])
    return kept, new
