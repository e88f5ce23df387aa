"""Texts that a draft learns from and is judged on, read from files or written by a model.

A text is a list of token ids, and the position from which they are to be predicted; the tokens
before it, a prompt, are only read. Texts are written with the noise that device and verifier share,
so acceptance here equals acceptance in service, for chains of draft nodes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from edgespec.bench.prompts import read_prompts, whole_text
from edgespec.sampling.tensors import gumbel_noise
from edgespec.telemetry.recording import RecordedText, is_recording, read_recording
from edgespec.training.kept_rows import find_rows

SHORTEST: Final = 8
"""Fewest tokens to be predicted in a piece of a text. Shorter pieces and empty prompts are left
out."""
HELD_BACK_SHARE, LEAST_HELD_BACK, MOST_HELD_BACK = 0.2, 12, 96
JUDGED_TEMPERATURES: Final = (0.0, 0.7)
HELD_BACK_ROUND: Final = 8
"""Held-back texts that are prepared together."""


class Text(NamedTuple):
    """Token ids. Those from ``start`` on, which is at least 1, are to be predicted."""

    tokens: list[int]
    start: int

    @property
    def is_prompt(self) -> bool:
        """Whether no token is to be predicted: a model will continue this text."""
        return self.start == len(self.tokens)


Pieces = list[list[Text]]
"""Pieces of texts. The pieces of one inner list are all used for training, or all held back."""


def read_pieces(
    paths: Sequence[Path],
    encode: Callable[[str], list[int]],
    length: int,
    vocabulary: str,
    *,
    as_prompts: bool,
) -> Pieces:
    """Return the texts of the files, cut into pieces.

    A JSON Lines file has one prompt or text per line, in the fields that ``edgespec bench
    --prompts`` knows. A recording holds tokens that were committed in ``vocabulary``. Any other
    file is one text. With ``as_prompts``, a line gives its last ``length // 2`` tokens, and a whole
    text gives pieces of ``length // 4``. Otherwise everything is cut into pieces of ``length``; in
    a piece of a recording, up to half are the tokens before it. Raises ``ValueError`` or
    ``OSError``, which name the file."""
    pieces: Pieces = []
    for path in paths:
        jsonl = path.suffix == ".jsonl"
        if not as_prompts and is_recording(path):
            pieces += [_cut_committed(one, length // 2) for one in read_recording(path, vocabulary)]
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


def _cut_committed(text: RecordedText, size: int) -> list[Text]:
    """Return pieces of a recorded text that hold each committed token once, up to ``size`` tokens
    per piece, after up to ``size`` earlier tokens."""
    tokens, places = text.tokens.tolist(), range(text.start, len(text.tokens), size)
    return [
        Text(tokens[max(0, at - size) : at + size], min(at, size))
        for at in places
        if len(tokens) - at >= SHORTEST
    ]


class Split(NamedTuple):
    """Pieces by their use. ``choosing`` and ``judging`` are held back from training."""

    training: list[Text]
    choosing: list[Text]
    judging: list[Text]


def split(pieces: Pieces, seed: int) -> Split:
    """Split the pieces for training and judging.

    A fifth, 12 to 96 pieces, is held back: a third of it chooses the best checkpoint, the rest
    judges that. Raises ``ValueError`` if fewer pieces than that remain for training."""
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


@dataclass(frozen=True, slots=True)
class Writing:
    """Progress of texts that are being written: tokens so far, and the most that there can be."""

    what: str
    tokens: int
    most_tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(1e-9, self.seconds)

    @property
    def left_s(self) -> float:
        """Seconds until all texts are written, if none ends early."""
        return (self.most_tokens - self.tokens) / max(1e-9, self.tokens_per_s)


class Pace:
    """Counts the tokens of texts that are written, and reports them."""

    def __init__(self, report: Callable[[Writing], None], what: str, most_tokens: int) -> None:
        self._report, self._what, self._most_tokens = report, what, most_tokens
        self._tokens, self._began_s = 0, time.monotonic()

    def count(self, tokens: int) -> None:
        """Record that ``tokens`` more tokens were written."""
        self._tokens = min(self._most_tokens, self._tokens + tokens)
        seconds = time.monotonic() - self._began_s
        self._report(Writing(self._what, self._tokens, self._most_tokens, seconds))


# --- logits without a tensor of [tokens, vocabulary] ----------------------------------------------
#
# With a vocabulary of 256,000, the logits of 256 tokens take 268 MB, and a loss needs several such
# tensors. So the decoder runs once for all tokens, and its head for a few rows at a time.

Hidden = tuple[Any, torch.Tensor]
"""Output of a decoder, and its last hidden states [rows, width] at the rows to be predicted."""


def hidden_rows(model: Any, tokens: torch.Tensor, places: torch.Tensor) -> Hidden:
    """Run the decoder of ``model`` over ``tokens`` [texts, longest]. Return its output, and the
    rows at ``places``, which index the flat [texts * longest]."""
    if (table := find_rows(model)) is not None:
        tokens = table.of_ids[tokens]
    output = model.base_model(tokens, use_cache=False)
    return output, output.last_hidden_state.flatten(0, 1)[places]


def head_logits(model: Any, output: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the logits [rows, vocabulary] of ``model`` for hidden states ``rows`` [rows, width].

    The model's own ``forward`` computes them, with any scale or cap that it has. Meanwhile its
    decoder is replaced by a function that returns ``output``, an earlier output of it."""
    decoder = model.base_model
    output.last_hidden_state = rows[None]
    decoder.forward = lambda *_, **__: output  # shadows the method of the class in this instance
    try:
        logits: torch.Tensor = model(torch.zeros(1, 1, dtype=torch.long, device=rows.device)).logits
    finally:
        del decoder.forward
    return logits[0]


def row_parts(count: int, vocabulary_size: int, numbers: int) -> Iterator[slice]:
    """Return slices of ``count`` rows. The logits of each slice are at most ``numbers`` numbers, or
    one row."""
    size = max(1, numbers // vocabulary_size)
    return (slice(first, min(count, first + size)) for first in range(0, count, size))


LOGITS_AT_ONCE: Final = 1 << 23
"""Numbers in a tensor of logits: 32 MiB in float32."""


def _no_count(tokens: int) -> None:
    """Ignore how many tokens were written."""


@torch.inference_mode()
def write(
    model: Any,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    seeds: Sequence[int],
    count: int,
    check: Callable[[], None],
    wrote: Callable[[int], None] = _no_count,
    at_once: int = 1 << 30,
) -> list[Text]:
    """Let ``model`` continue each prompt, of at least one token, and return the texts.

    ``temperatures``, ``seeds``: one for each prompt.
    ``count``: most tokens to write for a prompt; an end token ends it earlier.
    ``check``: called before each token; it may raise.
    ``wrote``: called with the number of tokens that were written since the last call.
    ``at_once``: most texts that have a KV cache at the same time."""
    if len(prompts) > at_once:
        texts = list[Text]()
        for first in range(0, len(prompts), at_once):
            part = slice(first, first + at_once)
            given = prompts[part], temperatures[part], seeds[part]
            texts += write(model, *given, count, check, wrote)
        return texts
    device = model.device
    longest = max(map(len, prompts))
    fed = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
    lengths = torch.tensor([[len(ids)] for ids in prompts], device=device)
    places = torch.arange(longest, device=device) - (longest - lengths)
    mask, positions = (places >= 0).long(), places.clamp(min=0)
    heat = torch.tensor(temperatures, device=device)[:, None]
    written: list[list[int]] = [[] for _ in prompts]
    going, cache, ends = set(range(len(prompts))), None, end_ids(model)
    table = find_rows(model)
    for step in range(count):
        check()
        got = model(
            fed if table is None else table.of_ids[fed],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, scores = got.past_key_values, got.logits[:, -1].float()
        scores = scores if table is None else table.scatter(scores)
        if any(temperatures):
            next_places = [len(ids) + step for ids in prompts]
            scores = scores + heat * gumbel_noise(seeds, next_places, scores.shape[-1], device)
        chosen = scores.argmax(-1)
        tokens = chosen.tolist()
        for row in sorted(going):
            written[row].append(tokens[row])
        wrote(len(going))
        going -= {row for row in going if tokens[row] in ends}
        if not going:
            break
        fed, positions = chosen[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(fed)], -1)
    return [Text([*ids, *new], len(ids)) for ids, new in zip(prompts, written, strict=True)]


def end_ids(model: Any) -> set[int | None]:
    """Return the tokens that end an output of ``model``."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return set(found) if isinstance(found, list | tuple) else {found}


def pad_texts(texts: Sequence[Text], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [texts, longest], padded at the right, and the indices in the flat
    [texts * longest] after which the next token is to be predicted, text by text."""
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.tensor([t.tokens + [0] * (longest - len(t.tokens)) for t in texts])
    places = [
        row * longest + at
        for row, text in enumerate(texts)
        for at in range(text.start - 1, len(text.tokens) - 1)
    ]
    return tokens.to(device), torch.tensor(places, device=device)


@torch.inference_mode()
def draw_choices(
    model: Any,
    texts: Sequence[Text],
    temperature: float,
    seeds: Sequence[int],
    vocabulary_size: int,
    check: Callable[[], None],
) -> list[torch.Tensor]:
    """Return, for each text, the tokens that ``model`` would choose at the positions to be
    predicted."""
    found, table = list[torch.Tensor](), find_rows(model)
    for text, seed in zip(texts, seeds, strict=True):
        check()
        tokens, places = pad_texts([text], model.device)
        output, rows = hidden_rows(model, tokens, places)
        chosen = []
        for part in row_parts(len(rows), vocabulary_size, LOGITS_AT_ONCE):
            scores = head_logits(model, output, rows[part]).float()
            scores = (scores if table is None else table.scatter(scores))[:, :vocabulary_size]
            if temperature:
                positions = range(text.start + part.start, text.start + part.stop)
                own = [seed] * len(positions)
                noise = gumbel_noise(own, positions, vocabulary_size, scores.device)
                scores = scores + temperature * noise
            chosen.append(scores.argmax(-1))
        found.append(torch.cat(chosen))
    return found


class HeldBack:
    """Texts that are held back from training, with the target's choices at each judged temperature.

    The texts are ``pieces``. Pieces that are prompts are continued by the target, with up to
    ``count`` tokens. They are prepared in rounds. ``kept`` holds the rounds of an earlier run, and
    the rounds of this run are added to it, in types that ``torch.load`` reads without running code.
    ``is_enough`` is called after each round; once it returns True, the remaining texts are not used
    at all. ``translate`` returns a text in the ids of a draft with another tokenizer, which is then
    judged by the words of the target's texts; None: the draft has the target's ids."""

    def __init__(
        self,
        target: Any,
        pieces: Sequence[Text],
        count: int,
        vocabulary_size: int,
        check: Callable[[], None],
        *,
        kept: list[Any] | None = None,
        wrote: Callable[[int], None] = _no_count,
        is_enough: Callable[[], bool] = lambda: False,
        at_once: int = 1 << 30,
        translate: Callable[[Text], Text | None] | None = None,
    ) -> None:
        self.id_count, self.check = vocabulary_size, check
        self._is_translated = translate is not None
        self._rounds = [] if kept is None else kept
        heats = JUDGED_TEMPERATURES
        for first in range(0, len(pieces), HELD_BACK_ROUND):
            if first < HELD_BACK_ROUND * len(self._rounds):
                continue
            if self._rounds and is_enough():
                break
            part = pieces[first : first + HELD_BACK_ROUND]
            seeds = list(range(first, first + len(part)))
            prompts = [number for number, piece in enumerate(part) if piece.is_prompt]
            written = (
                write(
                    target,
                    [part[number].tokens for _ in heats for number in prompts],
                    [heat for heat in heats for _ in prompts],
                    [seeds[number] for _ in heats for number in prompts],
                    count,
                    check,
                    wrote,
                    at_once,
                )
                if prompts
                else []
            )
            prepared = []
            for place, heat in enumerate(heats):
                texts = list(part)
                for number, text in zip(prompts, written[place * len(prompts) :], strict=False):
                    texts[number] = text
                if translate is None:
                    wanted = draw_choices(target, texts, heat, seeds, vocabulary_size, check)
                else:
                    # A text of no words has a stand-in, so that temperatures have equally many.
                    texts = [translate(text) or Text([0, 0], 1) for text in texts]
                    wanted = [torch.tensor(text.tokens[text.start :]) for text in texts]
                prepared.append((heat, [tuple(text) for text in texts], wanted))
            self._rounds.append((seeds, prepared))

    def __len__(self) -> int:
        return sum(len(seeds) for seeds, _ in self._rounds)

    def acceptance(self, draft: Any) -> dict[float, list[float]]:
        """Return, by temperature, the share of the target's choices that ``draft`` makes too, for
        each text."""
        shares: dict[float, list[float]] = {heat: [] for heat in JUDGED_TEMPERATURES}
        for heat, texts, seeds, wanted in self.texts_by_temperature():
            # The noise of the target's ids is none of the draft's, so its best word counts.
            own_heat = 0.0 if self._is_translated else heat
            found = draw_choices(draft, texts, own_heat, seeds, self.id_count, self.check)
            pairs = zip(found, wanted, strict=True)
            shares[heat] += [
                (own == its.to(own.device)).float().mean().item() for own, its in pairs
            ]
        return shares

    def texts_by_temperature(
        self,
    ) -> Iterator[tuple[float, list[Text], Sequence[int], Sequence[torch.Tensor]]]:
        """Yield, round by round, a temperature, the texts at it, their seeds, and the target's
        choices in each text."""
        for seeds, prepared in self._rounds:
            for heat, texts, wanted in prepared:
                yield heat, [Text(*text) for text in texts], seeds, wanted
