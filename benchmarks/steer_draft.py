"""Does a draft guess better that gets a vector of the target's states with each commit? (SD2,
"Steering Pretrained Drafters", arXiv 2511.09844.)

    python benchmarks/steer_draft.py TEXTS.json OUT.pt [--steps 400] [--arms steer,own]

The vector is the target's state that chose the last committed token: low, middle and high layers
beside one another, projected to 252 numbers of 8 bits and a scale, 256 bytes. Every layer of the
draft's MLP gets two biases of it, for its gate and for what it gives out. Arms: ``steer`` trains
projection and biases alone; ``own`` trains as large a layer that reads the draft's own state, and
no vector; with ``+all`` behind it, all weights of the draft learn as well (without 4 bits).

``TEXTS.json`` is what ``target_texts.py`` keeps; every sixth prompt is held back, and judged greedy
and at 0.7. A commit is assumed each 1 to 8 tokens in training, each 8 tokens at every offset in the
judgement: so every token is guessed once at each distance from 1 to 8 behind a commit. Printed are
the share of right guesses by distance with 95 % over texts, and the gain text by text. ``OUT.pt``
has, of each arm, the guesses by text, distance and token, which ``steer_time.py`` plays.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from target_texts import KINDS, Written, batch, read
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from edgespec.bench.measurement import mean_interval
from edgespec.models.folders import Role, resolve_model
from edgespec.sampling.tensors import gumbel_noise
from edgespec.training.distill import first_choice, load_model, rate
from edgespec.training.texts import Text

FARTHEST: Final = 8
ROWS, BYTES = 16, 252
Learned = Sequence[tuple[Text, torch.Tensor]]
SHOWN: Final = (1, 2, 4, 8)


class Layer(nn.Module):
    """The biases of one MLP of the draft."""

    def __init__(self, mlp: Any, reads: int) -> None:
        super().__init__()
        hidden, inner = mlp.down_proj.out_features, mlp.down_proj.in_features
        self.own = nn.Linear(reads, BYTES, bias=False) if reads else None
        self.out = nn.Linear(BYTES, hidden + inner, bias=False)
        nn.init.zeros_(self.out.weight)
        self.split = (hidden, inner)


def in_8_bits(vector: torch.Tensor) -> torch.Tensor:
    """What arrives, with the gradient of what was sent."""
    scale = vector.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return vector + ((vector / scale).round() * scale - vector).detach()


class Steered(nn.Module):
    """The draft with its biases; ``vectors`` [texts, tokens, BYTES], or None for its own state."""

    def __init__(self, draft: Any, target: Any, arm: str) -> None:
        super().__init__()
        self.draft, self.steers = draft, arm.startswith("steer")
        width = target.config.hidden_size
        self.project = nn.Linear(3 * width, BYTES, bias=False) if self.steers else None
        reads = 0 if self.steers else draft.config.hidden_size
        self.layers = nn.ModuleList(Layer(one.mlp, reads) for one in draft.model.layers)
        self._biases: dict[int, tuple[torch.Tensor, ...]] = {}
        self._vectors: torch.Tensor | None = None
        for number, one in enumerate(draft.model.layers):
            one.mlp.register_forward_pre_hook(self._before(number))
            one.mlp.gate_proj.register_forward_hook(self._at(number, 1))
            one.mlp.register_forward_hook(self._at(number, 0))

    def _before(self, number: int) -> Any:
        def hook(module: Any, given: tuple[torch.Tensor, ...]) -> None:
            layer: Any = self.layers[number]
            read = layer.own(given[0]) if layer.own else self._vectors
            self._biases[number] = layer.out(read).split(layer.split, -1)

        return hook

    def _at(self, number: int, which: int) -> Any:
        return lambda module, given, made: made + self._biases[number][which]

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, sent: torch.Tensor, wanted: torch.Tensor
    ) -> Any:
        """Logits of ``wanted`` [texts, tokens] alone. ``states`` [texts, tokens, 3, width] of the
        target, ``sent`` [texts, tokens]: whose state the vector of a token is, -1: none."""
        if self.project is not None:
            normed = nn.functional.rms_norm(states.float(), states.shape[-1:])
            vectors = in_8_bits(self.project(normed.flatten(-2)))
            chosen = vectors.gather(1, sent.clamp(min=0)[..., None].expand(-1, -1, BYTES))
            self._vectors = chosen * (sent >= 0)[..., None]
        return logits_of(self.draft, tokens, wanted)


def logits_of(model: Any, tokens: torch.Tensor, wanted: torch.Tensor) -> Any:
    return model.lm_head(model.model(tokens, use_cache=False).last_hidden_state[wanted])


@torch.no_grad()
def of_target(target: Any, texts: Sequence[Text]) -> list[torch.Tensor]:
    """Of each text the states [tokens, 3, width] behind a low layer, a middle one and the last."""
    found: list[torch.Tensor] = []
    for first in range(0, len(texts), ROWS):
        tokens, _ = batch(part := texts[first : first + ROWS])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = target.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
        states = torch.stack([made[1], made[len(made) // 2], made[-1]], 2).bfloat16()
        found += [own[: len(text.tokens)].clone() for own, text in zip(states, part, strict=True)]
    return found


def commits(count: int, longest: int, dice: random.Random) -> torch.Tensor:
    """Of each token the place whose state came with the last commit: the commit's last token is
    the first that is fed with it, and the state before chose that."""
    rows = []
    for _ in range(count):
        row: list[int] = []
        while len(row) < longest:
            row += [len(row) - 1] * dice.randint(1, FARTHEST)
        rows.append(row[:longest])
    return torch.tensor(rows)


def train(model: Steered, target: Any, texts: Learned, steps: int, learning: float) -> None:
    weights = [one for one in model.parameters() if one.requires_grad]
    print(f"{sum(one.numel() for one in weights):,} weights learn", flush=True)
    optimizer = torch.optim.AdamW(weights, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    dice, order = random.Random(0), list[int]()
    for step in range(steps):
        if len(order) < ROWS:
            order = dice.sample(range(len(texts)), len(texts))
        part, order = order[:ROWS], order[ROWS:]
        tokens, wanted = batch([texts[at][0] for at in part])
        its = pad_sequence([texts[at][1] for at in part], batch_first=True)
        sent = commits(len(part), tokens.shape[1], dice)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                theirs = target.lm_head(its[..., 2, :][wanted])
            own = model(tokens, its, sent, wanted)
        loss = first_choice(own.float().log_softmax(-1), theirs.float().log_softmax(-1)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning * rate(step / steps)
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def guessed(
    model: Any, texts: Sequence[Written], states: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Of each text [distance, tokens to be guessed, 3]: the token's place among the draft's choices
    (0, 1, or -1: neither), and the log-probabilities of both choices."""
    found = []
    distances = FARTHEST if isinstance(model, Steered) and model.steers else 1
    for first in range(0, len(texts), ROWS):
        part = texts[first : first + ROWS]
        tokens, wanted = batch([text for _, _, text in part])
        places, counts = torch.arange(tokens.shape[1]), wanted.sum(1).tolist()
        kept = [torch.zeros(FARTHEST, count, 3) for count in counts]
        for offset in range(distances):
            behind = (places - offset) % FARTHEST
            if isinstance(model, Steered):
                sent = (places - behind - 1).clamp(min=-1).expand(len(part), -1)
                its = pad_sequence(list(states[first : first + ROWS]), batch_first=True)
                logits = model(tokens, its, sent, wanted)
            else:
                logits = logits_of(model, tokens, wanted)
            for row, own in enumerate(logits.split(counts)):
                made = of_rows(own, part[row])
                if distances > 1:
                    kept[row][behind[wanted[row]], torch.arange(len(made))] = made
                else:
                    kept[row][:] = made
        found += kept
    return found


def of_rows(logits: torch.Tensor, one: Written) -> torch.Tensor:
    heat, seed, text = one
    places, own = range(text.start, len(text.tokens)), torch.tensor(text.tokens[text.start :])
    law = (logits / (heat or 1.0)).log_softmax(-1)
    if heat:
        noise = gumbel_noise([seed] * len(own), places, logits.shape[-1], logits.device)
        logits = logits + heat * noise
    best = logits.topk(2).indices
    rank = torch.where(best[:, 0] == own, 0, torch.where(best[:, 1] == own, 1, -1))
    return torch.cat([rank[:, None].float(), law.gather(-1, best)], -1)


def row(name: str, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> None:
    for distance in SHOWN:
        now, before = (
            [(one[distance - 1, :, 0] == 0).float().mean().item() for one in side]
            for side in (new, old)
        )
        gains = [mine - its for mine, its in zip(now, before, strict=True)]
        cells = [
            f"{fmean(one):+.3f} ({low:+.3f} to {high:+.3f})"
            for one in (now, gains)
            for low, high in [mean_interval(one)]
        ]
        print(f"| {name} | {distance} |", " | ".join(cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--arms", default="steer,own")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    options = parser.parse_args()
    torch.manual_seed(0)
    target = load_model(resolve_model("bundled", Role.TARGET), exact=True)
    folder = resolve_model("bundled", Role.DRAFT)
    texts, count = read(options.texts), len(KINDS)
    long = [(at, one) for at, one in enumerate(texts) if len(one[2].tokens) - one[2].start > 8]
    held = [one for at, one in long if at % count % 6 == 0 and at < 2 * count]
    learned = [one[2] for at, one in long if at % count % 6]
    total = sum(len(text.tokens) - text.start for text in learned)
    print(f"{len(learned)} texts of {total:,} tokens to learn from; {len(held)} held back")
    theirs = list(zip(learned, of_target(target, learned), strict=True))
    seen = of_target(target, [one.text for one in held])
    results = {"plain": guessed(load_model(folder, exact=True), held, seen)}
    for arm in options.arms.split(","):
        draft = load_model(folder, exact=True)
        draft.requires_grad_(arm.endswith("+all"))
        model = Steered(draft, target, arm)
        train(model, target, theirs, options.steps, options.learning_rate)
        results[arm] = guessed(model, held, seen)
        for heat, name in product((0.0, 0.7), ("plain", arm)):
            at = [number for number, one in enumerate(held) if one[0] == heat]
            new, old = ([results[one][n] for n in at] for one in (name, "plain"))
            row(f"{name}, T {heat:g}, n {len(at)}", new, old)
        torch.save([held, results], options.out)


if __name__ == "__main__":
    main()
