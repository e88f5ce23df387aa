"""The target writes: many rows of chats in lock step, and what it thought of every position.

A row is a chain of chats: a beginning that is given, what the target writes after it, the end of
the text, the next beginning. With the tokens goes the target's last hidden state at each position,
which costs nothing more here and spares the draft's training the target's forward pass: only the
output head is left to compute there.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

END_ID = 0
# Tokens that the target writes after a beginning.
WRITTEN = (32, 160)


@dataclass(frozen=True, slots=True)
class Texts:
    """``tokens`` int16 and ``written`` bool [N, length]: where the target chose the token itself;
    ``temperature`` [N]; ``states`` bfloat16 [N, length - 1, hidden], or of 0 rows when not kept."""

    tokens: torch.Tensor
    written: torch.Tensor
    temperature: torch.Tensor
    states: torch.Tensor

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save({name: getattr(self, name) for name in Texts.__slots__}, partial)
        partial.replace(path)


def read_texts(path: Path) -> Texts:
    """A file that ``Texts.save`` wrote; its pages are read when they are needed."""
    return Texts(**torch.load(path, mmap=True, weights_only=True))


class Decoder:
    """A Llama that reads one token of each of ``rows`` rows a step, its cache written in place."""

    def __init__(self, model: LlamaForCausalLM, rows: int, length: int) -> None:
        weight, settings = model.lm_head.weight, model.config.to_dict()
        self._model, self._rows = model, rows
        self._head_dim: int = settings["head_dim"]
        self._kv_heads: int = settings["num_key_value_heads"]
        shape = (rows, self._kv_heads, length, self._head_dim)
        self._caches = [
            (weight.new_zeros(shape), weight.new_zeros(shape)) for _ in model.model.layers
        ]
        steps = torch.arange(0, self._head_dim, 2, device=weight.device) / self._head_dim
        theta: float = settings["rope_parameters"]["rope_theta"]
        angles = torch.arange(length, device=weight.device)[:, None] * theta**-steps
        angles = torch.cat((angles, angles), -1)
        self._cos, self._sin = angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)

    def step(self, tokens: torch.Tensor, at: int) -> torch.Tensor:
        """The last hidden states [rows, hidden] after ``tokens`` [rows] at position ``at``."""
        inner = self._model.model
        hidden: torch.Tensor = inner.embed_tokens(tokens)
        for layer, (keys, values) in zip(inner.layers, self._caches, strict=True):
            read, attention = layer.input_layernorm(hidden), layer.self_attn
            queries = self._turned(attention.q_proj(read), at)
            keys[:, :, at] = self._turned(attention.k_proj(read), at)
            values[:, :, at] = self._heads(attention.v_proj(read))
            # The query heads that share a key head are the rows of one matrix.
            grouped = queries.view(self._rows, self._kv_heads, -1, self._head_dim)
            scores = grouped @ keys[:, :, : at + 1].mT * self._head_dim**-0.5
            seen = scores.softmax(-1) @ values[:, :, : at + 1]
            hidden = hidden + attention.o_proj(seen.reshape(self._rows, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        last: torch.Tensor = inner.norm(hidden)
        return last

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self._rows, -1, self._head_dim)

    def _turned(self, flat: torch.Tensor, at: int) -> torch.Tensor:
        heads = self._heads(flat)
        left, right = heads.chunk(2, -1)
        return heads * self._cos[at] + torch.cat((-right, left), -1) * self._sin[at]


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
    *,
    keep_states: bool,
) -> Texts:
    """Rows of ``length`` tokens, one for each of ``temperature`` [rows]."""
    rows, device = len(temperature), target.device
    torch.manual_seed(seed)
    dice = random.Random(seed)
    scripts = [Row(beginnings, dice) for _ in range(rows)]
    tokens = torch.zeros(rows, length, dtype=torch.int16)
    written = torch.zeros(rows, length, dtype=torch.bool)
    tokens[:, 0] = torch.tensor([script.next(END_ID)[0] for script in scripts])
    decoder = Decoder(target, rows, length)
    states = []
    heat = temperature.to(device)
    for at in range(length - 1):
        states.append(decoder.step(tokens[:, at].to(device, torch.long), at))
        chosen = choose(target.lm_head(states[-1]).float(), heat).tolist()
        if not keep_states:
            states.clear()
        new = [script.next(token) for script, token in zip(scripts, chosen, strict=True)]
        tokens[:, at + 1] = torch.tensor([token for token, _ in new])
        written[:, at + 1] = torch.tensor([own for _, own in new])
    hidden = target.config.hidden_size
    kept = torch.stack(states, 1) if states else torch.zeros(0, length - 1, hidden)
    return Texts(tokens, written, temperature, kept.to("cpu", torch.bfloat16))
