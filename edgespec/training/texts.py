"""The texts that a draft learns from and is judged on: read from files, or written by a model.

A text is token ids and the place from which on they count: what stands before, a prompt, is only
read. Noise is the one that device and verifier share, so acceptance here is what it is in service,
for a chain of guesses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from edgespec.bench.prompts import read_prompts, whole_text
from edgespec.sampling.tensors import gumbel_noise
from edgespec.telemetry.recording import RecordedText, is_recording, read_recording

SHORTEST: Final = 8
"""Tokens to be guessed of a piece of a text; shorter ones are left out, as prompts of none are."""
HELD_BACK_SHARE, LEAST_HELD_BACK, MOST_HELD_BACK = 0.2, 12, 96
JUDGED_TEMPERATURES: Final = (0.0, 0.7)
_TOGETHER: Final = 32  # texts that are written or read in one pass


class Text(NamedTuple):
    """``tokens`` of which those from ``start`` on are to be guessed; ``start`` is at least 1."""

    tokens: list[int]
    start: int

    @property
    def is_prompt(self) -> bool:
        """Nothing of it is to be guessed: what a model writes after it is."""
        return self.start == len(self.tokens)


Pieces = list[list[Text]]
"""Of texts: those of one inner list are learned from together, or held back together."""


def read_pieces(
    paths: Sequence[Path],
    encode: Callable[[str], list[int]],
    length: int,
    vocabulary: str,
    *,
    as_prompts: bool,
) -> Pieces:
    """The files' texts. A JSON Lines file has a prompt or text a line, by the fields that
    ``edgespec bench --prompts`` knows; a recording has what was committed in ``vocabulary``; any
    other file is one text. ``as_prompts``: a line's last ``length // 2`` tokens, or pieces of
    ``length // 4`` of a whole text; else all is cut into pieces of ``length``, of a recording half
    of it what stands before. Raises ``ValueError`` or ``OSError`` naming the file."""
    pieces: Pieces = []
    for path in paths:
        jsonl = path.suffix == ".jsonl"
        if not as_prompts and is_recording(path):
            pieces += [_committed(one, length // 2) for one in read_recording(path, vocabulary)]
        elif as_prompts and jsonl:
            lines = (encode(prompt.text)[-(length // 2) :] for prompt in read_prompts(path))
            pieces += [[Text(ids, len(ids))] for ids in lines if ids]
        else:
            texts = (one.text for one in read_prompts(path)) if jsonl else [whole_text(path)]
            size = length // 4 if as_prompts else length
            for ids in map(encode, texts):
                cut = (ids[at : at + size] for at in range(0, len(ids), size))
                whole = [piece for piece in cut if len(piece) >= min(SHORTEST, size)]
                pieces += [[Text(piece, len(piece) if as_prompts else 1)] for piece in whole]
    return pieces


def _committed(text: RecordedText, size: int) -> list[Text]:
    """Each committed token once, behind up to ``size`` others, so many of a piece."""
    tokens, places = text.tokens.tolist(), range(text.start, len(text.tokens), size)
    return [
        Text(tokens[max(0, at - size) : at + size], min(at, size))
        for at in places
        if len(tokens) - at >= SHORTEST
    ]


class Split(NamedTuple):
    """Pieces by what they are for; ``choosing`` and ``judging`` are held back from training."""

    training: list[Text]
    choosing: list[Text]
    judging: list[Text]


def split(pieces: Pieces, seed: int) -> Split:
    """A fifth is held back, 12 to 96 pieces: a third of them to choose the best checkpoint by, the
    others to judge it. Raises ``ValueError`` where fewer are left for training."""
    texts = list({repr(text): text for text in pieces}.values())
    random.Random(seed).shuffle(texts)
    order = list(chain.from_iterable(texts))
    held = max(LEAST_HELD_BACK, min(MOST_HELD_BACK, round(HELD_BACK_SHARE * len(order))))
    if len(order) < 2 * held:
        raise ValueError(
            f"there are {len(order)} different texts, but at least {2 * LEAST_HELD_BACK} are needed"
            f" ({LEAST_HELD_BACK} to train on, {LEAST_HELD_BACK} to judge by)"
        )
    return Split(order[held:], order[: held // 3], order[held // 3 : held])


@torch.inference_mode()
def write(
    model: Any,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    seeds: Sequence[int],
    count: int,
    check: Callable[[], None],
) -> list[Text]:
    """What ``model`` writes after each prompt, of at least one token: up to ``count`` tokens, or to
    the end of the text. ``check`` is called before each token and may raise."""
    device = model.device
    longest = max(map(len, prompts))
    fed = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
    lengths = torch.tensor([[len(ids)] for ids in prompts], device=device)
    places = torch.arange(longest, device=device) - (longest - lengths)
    mask, positions = (places >= 0).long(), places.clamp(min=0)
    heat = torch.tensor(temperatures, device=device)[:, None]
    written: list[list[int]] = [[] for _ in prompts]
    going, cache, ends = set(range(len(prompts))), None, end_ids(model)
    for step in range(count):
        check()
        got = model(fed, attention_mask=mask, position_ids=positions, past_key_values=cache)
        cache, scores = got.past_key_values, got.logits[:, -1].float()
        if any(temperatures):
            next_places = [len(ids) + step for ids in prompts]
            scores = scores + heat * gumbel_noise(seeds, next_places, scores.shape[-1], device)
        chosen = scores.argmax(-1)
        tokens = chosen.tolist()
        for row in sorted(going):
            written[row].append(tokens[row])
        going -= {row for row in going if tokens[row] in ends}
        if not going:
            break
        fed, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(fed)], -1)
    return [Text([*ids, *new], len(ids)) for ids, new in zip(prompts, written, strict=True)]


def end_ids(model: Any) -> set[int | None]:
    """The tokens that end a text of ``model``."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return set(found) if isinstance(found, list | tuple) else {found}


def padded(texts: Sequence[Text], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [texts, longest] filled up at the right, and where in the flat [texts * longest] of
    them the next token is one to be guessed, text by text."""
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.tensor([t.tokens + [0] * (longest - len(t.tokens)) for t in texts])
    places = [
        row * longest + at
        for row, text in enumerate(texts)
        for at in range(text.start - 1, len(text.tokens) - 1)
    ]
    return tokens.to(device), torch.tensor(places, device=device)


@torch.inference_mode()
def choices(
    model: Any,
    texts: Sequence[Text],
    temperature: float,
    seeds: Sequence[int],
    vocabulary_size: int,
    check: Callable[[], None],
) -> list[torch.Tensor]:
    """Of each text the tokens that ``model`` would choose behind each prefix, where they count."""
    found: list[torch.Tensor] = []
    for first in range(0, len(texts), _TOGETHER):
        check()
        part = texts[first : first + _TOGETHER]
        tokens, places = padded(part, model.device)
        logits = model(tokens, use_cache=False).logits[..., :vocabulary_size].flatten(0, 1)
        counts = [len(text.tokens) - text.start for text in part]
        rows = logits[places].float().split(counts)
        for number, (text, scores) in enumerate(zip(part, rows, strict=True), first):
            if temperature:
                own = [seeds[number]] * len(scores)
                positions = range(text.start, len(text.tokens))
                noise = gumbel_noise(own, positions, vocabulary_size, scores.device)
                scores = scores + temperature * noise
            found.append(scores.argmax(-1))
    return found


class HeldBack:
    """Texts that nobody learns from, with the target's choices at each temperature that is judged:
    ``pieces``, or what the target writes after those that are prompts, up to ``count`` tokens."""

    def __init__(
        self,
        target: Any,
        pieces: Sequence[Text],
        count: int,
        vocabulary_size: int,
        check: Callable[[], None],
    ) -> None:
        self._size, self._check = vocabulary_size, check
        self._seeds = list(range(len(pieces)))
        self._judged: list[tuple[float, Sequence[Text], list[torch.Tensor]]] = []
        prompts = [piece.tokens for piece in pieces if piece.is_prompt]
        for temperature in JUDGED_TEMPERATURES:
            texts = [piece for piece in pieces if not piece.is_prompt]
            for first in range(0, len(prompts), _TOGETHER):
                part = prompts[first : first + _TOGETHER]
                seeds = self._seeds[first : first + _TOGETHER]
                texts += write(target, part, [temperature] * len(part), seeds, count, check)
            wanted = choices(target, texts, temperature, self._seeds, vocabulary_size, check)
            self._judged.append((temperature, texts, wanted))

    def acceptance(self, draft: Any) -> dict[float, list[float]]:
        """By temperature, the share of the target's choices that are ``draft``'s too, text by
        text."""
        shares: dict[float, list[float]] = {}
        for temperature, texts, wanted in self._judged:
            found = choices(draft, texts, temperature, self._seeds, self._size, self._check)
            pairs = zip(found, wanted, strict=True)
            shares[temperature] = [(own == its).float().mean().item() for own, its in pairs]
        return shares
