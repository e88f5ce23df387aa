"""The target writes: many rows of chats in lock step.

A row is a chain of chats: a beginning that is given, what the target writes after it, the end of
the text, the next beginning.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaForCausalLM

END_ID = 0
# Tokens that the target writes after a beginning.
WRITTEN = (32, 160)


@dataclass(frozen=True, slots=True)
class Texts:
    """``tokens`` int16 and ``written`` bool [N, length]: where the target chose the token itself;
    ``temperature`` [N]."""

    tokens: torch.Tensor
    written: torch.Tensor
    temperature: torch.Tensor

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save({name: getattr(self, name) for name in Texts.__slots__}, partial)
        partial.replace(path)


def read_texts(path: Path) -> Texts:
    """A file that ``Texts.save`` wrote; its pages are read when they are needed."""
    return Texts(**torch.load(path, mmap=True, weights_only=True))


class Row:
    """What stands next in one row: a token of a beginning, or what the target chose."""

    def __init__(self, beginnings: Iterator[list[int]], dice: random.Random) -> None:
        self._beginnings, self._dice = beginnings, dice
        self._given: deque[int] = deque()
        self._begin()

    def next(self, chosen: int) -> tuple[int, bool]:
        """The token, and whether it is the target's."""
        if self._given:
            return self._given.popleft(), False
        self._left -= 1
        if chosen == END_ID or self._left == 0:
            if chosen != END_ID:
                self._given.append(END_ID)
            self._begin()
        return chosen, True

    def _begin(self) -> None:
        self._given.extend(next(self._beginnings))
        self._left = self._dice.randint(*WRITTEN)


def choose(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """One token [rows] of each row of ``logits`` [rows, vocabulary]: the likeliest at 0."""
    noise = -torch.empty_like(logits).exponential_().log()
    return (logits + temperature[:, None] * noise).argmax(-1)


@torch.inference_mode()
def write(
    target: LlamaForCausalLM,
    beginnings: Iterator[list[int]],
    temperature: torch.Tensor,
    length: int,
    seed: int,
) -> Texts:
    """Rows of ``length`` tokens, one for each of ``temperature`` [rows]."""
    rows, device = len(temperature), target.device
    torch.manual_seed(seed)
    dice = random.Random(seed)
    scripts = [Row(beginnings, dice) for _ in range(rows)]
    tokens = torch.zeros(rows, length, dtype=torch.int16)
    written = torch.zeros(rows, length, dtype=torch.bool)
    tokens[:, 0] = torch.tensor([script.next(END_ID)[0] for script in scripts])
    cache, heat = DynamicCache(), temperature.to(device)
    for at in range(length - 1):
        fed = tokens[:, at : at + 1].to(device, torch.long)
        logits = target(fed, past_key_values=cache, use_cache=True).logits[:, -1]
        chosen = choose(logits.float(), heat).tolist()
        new = [script.next(token) for script, token in zip(scripts, chosen, strict=True)]
        tokens[:, at + 1] = torch.tensor([token for token, _ in new])
        written[:, at + 1] = torch.tensor([own for _, own in new])
    return Texts(tokens, written, temperature)
