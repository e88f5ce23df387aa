"""Train the draft on what the target itself writes.

``sample``: the target goes on from beginnings of the corpus (``beginnings.py``), mostly greedily,
and its texts are kept (``writing.py``). ``distill``: the draft learns the target's
distribution where the target wrote: forward KL, plus cross-entropy on the target's first choice,
because that is what greedy acceptance counts. Beginnings are only read, as a user's prompt is.

Training goes *through* the rounding to 4 bits (straight-through estimator, Bengio et al.
1308.3432), and the rounded weights are what is saved: the exporter then finds integers and scales
that reproduce them, and int4 costs no acceptance. Muon (Jordan et al. 2024) trains the matrices,
AdamW the rest; the learning rate is a function of the share of the *time* budget used, so that
``--minutes`` is the only knob and a slow machine still ends with a cooled-down model.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tools.train_pair.beginnings import Beginnings
from tools.train_pair.corpus import documents
from tools.train_pair.writing import Texts, read_texts, write

SAMPLE_LENGTH = 257
GREEDY_SHARE = 0.55
TEMPERATURES = (0.7, 1.0)
FIRST_CHOICE_WEIGHT = 0.5
BLOCK_SIZE = 32
LOOK_EVERY = 20  # steps between looks for new texts


def optimizers_for(model: torch.nn.Module, *, muon: bool) -> list[torch.optim.Optimizer]:
    """Muon multiplies in bfloat16: where that is slow, a small step takes as long again for it,
    and AdamW at the same rate, to which Muon's is matched, takes its place."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    if not muon:
        return [
            torch.optim.AdamW(part, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
            for part, rate in ((matrices, 1e-3), (others, 2e-3))
        ]
    return [
        torch.optim.Muon(
            matrices,
            lr=1e-3,
            momentum=0.95,
            weight_decay=0.05,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(share: float) -> float:
    """Learning-rate factor after ``share`` of the budget: warm-up 2 %, flat, linear to 0.02."""
    if share < 0.02:
        return share / 0.02
    return max(0.02, min(1.0, (1.0 - share) / 0.45))


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_quick_bfloat16(kind: str) -> bool:
    """Whether ``cpu`` or ``cuda`` multiplies bfloat16 faster than float32.

    A CPU without AVX-512 takes two to ten times as long with it.
    """
    return kind != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def quick(kind: str) -> torch.autocast:
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=has_quick_bfloat16(kind))


def load(folder: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.nn.Module.to(model, device())
    return model


def sample(
    folder: Path,
    minutes: float,
    rows: int,
    length: int,
    seed: int,
    *,
    held_out: bool,
) -> None:
    """Add files to ``texts`` (or ``held_out``) of ``folder``, each of ``rows`` texts of ``length``
    tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    found = [document for document in documents() if document.held_out == held_out]
    sizes = Counter[str]()
    for document in found:
        sizes[document.source] += len(document.text)
    shares = ", ".join(f"{source} {size / 1e6:.1f}" for source, size in sizes.most_common())
    print(f"beginnings are cut from (million characters): {shares}", flush=True)
    beginnings = Beginnings(found, tokenizer, seed)
    target = load(folder / "target", torch.float32).eval()
    temperature = torch.zeros(rows)
    for row in range(round(rows * GREEDY_SHARE), rows):
        temperature[row] = TEMPERATURES[row % len(TEMPERATURES)]
    start = time.monotonic()
    for number in itertools.count():
        if number and time.monotonic() - start > 60 * minutes:
            break
        batch_seed = 10_000 * seed + number
        texts = write(target, beginnings, temperature, length, batch_seed)
        texts.save(folder / ("held_out" if held_out else "texts") / f"{batch_seed:09d}.pt")
        seen = (number + 1) * texts.tokens.numel()
        own = float(texts.written.float().mean())
        speed = seen / (time.monotonic() - start)
        print(f"{seen / 1e6:.2f}M tokens, {own:.0%} written, {speed:.0f} tok/s", flush=True)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [N, K] on the 4-bit grid of its blocks of 32 along K; gradient passes through."""
    blocks = weight.detach().unflatten(-1, (-1, BLOCK_SIZE))
    peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / -8)
    values = (blocks / scale).round().clamp(-8, 7) * scale
    straight_through: torch.Tensor = weight + (values.flatten(-2) - weight.detach())
    return straight_through


def states_of(draft: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The draft's last states [N * T, hidden] after ``tokens`` [N, T] and its output head, with
    rounded weights."""
    weights: dict[str, torch.Tensor] = {
        name: rounded(weight) if weight.ndim == 2 else weight
        for name, weight in draft.model.named_parameters()
    }
    options = {"use_cache": False}
    got = torch.func.functional_call(draft.model, weights, (tokens,), options)
    return got.last_hidden_state.flatten(0, 1), weights["embed_tokens.weight"]


def distill_loss(
    draft: LlamaForCausalLM,
    head: torch.Tensor,
    states: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    *,
    fast: bool,
) -> torch.Tensor:
    """Mean over ``positions`` of the flat ``tokens`` [N, T]; the target is ``states``
    [N, T, hidden] through ``head``; ``fast`` for bfloat16."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=fast):
        with torch.no_grad():
            kept = states.flatten(0, 1)[positions].to(head.dtype)
            wanted = functional.log_softmax(functional.linear(kept, head).float(), -1)
        mine, own_head = states_of(draft, tokens)
        got = functional.linear(mine[positions], own_head).float()
    got = functional.log_softmax(got, -1)
    divergence = functional.kl_div(got, wanted, log_target=True, reduction="batchmean")
    first_choice = functional.nll_loss(got, wanted.argmax(-1))
    loss: torch.Tensor = divergence + FIRST_CHOICE_WEIGHT * first_choice
    return loss


class Lessons:
    """The texts of a folder in batches, those that were seen least first, with the target's states.

    Files that come in while the draft learns are taken up, so a sampler may go on beside it.
    """

    def __init__(self, folder: Path, target: LlamaForCausalLM, seed: int) -> None:
        self._folder, self._target = folder, target
        self._dice = torch.Generator().manual_seed(seed)
        self._files: dict[Path, Texts] = {}
        self._rows: list[tuple[Texts, int]] = []
        self._seen = torch.zeros(0)

    def batches(self, rows: int) -> Iterator[list[tuple[Texts, int]]]:
        """Endless batches of ``rows`` texts: the file's, and which of it."""
        for step in itertools.count():
            if step % LOOK_EVERY == 0:
                self._look()
                if len(self._rows) < rows:
                    raise ValueError(
                        f"a step takes {rows} texts, but {self._folder} has {len(self._rows)}"
                    )
            order = self._seen + torch.rand(len(self._seen), generator=self._dice)
            chosen = order.argsort()[:rows]
            self._seen[chosen] += 1
            yield [self._rows[index] for index in chosen.tolist()]

    def _look(self) -> None:
        for path in sorted(self._folder.glob("*.pt")):
            if path not in self._files:
                new = self._files[path] = read_texts(path)
                self._rows += [(new, row) for row in range(len(new.tokens))]
                # They join the pass that is on, or they alone would be drawn until they had been
                # seen as often as the others.
                passes = self._seen.min().item() if len(self._seen) else 0.0
                self._seen = torch.cat([self._seen, torch.full((len(new.tokens),), passes)])

    def parts(
        self, chosen: list[tuple[Texts, int]], micro: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """States, tokens and flat positions to learn of ``chosen``, ``micro`` texts at a time.

        Half of the positions: those before a token that the target wrote, filled up or cut short by
        chance, so that all parts have one shape.
        """
        for at in range(0, len(chosen), micro):
            part = chosen[at : at + micro]
            tokens = torch.stack([texts.tokens[row, :-1] for texts, row in part])
            own = torch.stack([texts.written[row, 1:] for texts, row in part])
            order = own.flatten() + torch.rand(own.numel(), generator=self._dice)
            positions = order.topk(own.numel() // 2).indices.to(device())
            tokens = tokens.to(device(), torch.long)
            with torch.no_grad(), quick(tokens.device.type):
                states = self._target.model(tokens, use_cache=False).last_hidden_state
            yield states, tokens, positions


@torch.no_grad()
def agreement(draft: LlamaForCausalLM, texts: Texts, rows: int = 4) -> str:
    """In how many positions that the target wrote the rounded draft's likeliest token is the
    text's, by temperature."""
    words = []
    for temperature in texts.temperature.unique().tolist():
        hits = total = 0
        (chosen,) = torch.nonzero(texts.temperature == temperature, as_tuple=True)
        for part in chosen.split(rows):
            tokens = texts.tokens[part].to(device(), torch.long)
            own = texts.written[part, 1:].flatten().to(device())
            with quick(tokens.device.type):
                states, head = states_of(draft, tokens[:, :-1])
                guesses = functional.linear(states[own], head).argmax(-1)
            hits += int((guesses == tokens[:, 1:].flatten()[own]).sum())
            total += len(guesses)
        words.append(f"{hits / max(1, total):.4f} of {total} at {temperature:.1f}")
    return "first choices right: " + ", ".join(words)


def save(draft: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights on the 4-bit grid, and how long the texts were that they learned from."""
    state = {
        name: rounded(weight.detach()) if weight.ndim == 2 else weight.detach()
        for name, weight in draft.named_parameters()
    }
    draft.config.trained_length = SAMPLE_LENGTH - 1
    draft.save_pretrained(folder, state_dict=state)


def distill(folder: Path, minutes: float, rows: int, micro: int) -> None:
    """Train the ``draft`` in ``folder`` on, in 4 bits throughout."""
    target = load(folder / "target", torch.float32).eval()
    head = target.lm_head.weight.detach()
    lessons = Lessons(folder / "texts", target, seed=2)
    watched = [read_texts(path) for path in sorted((folder / "held_out").glob("*.pt"))]
    draft = load(folder / "draft", torch.float32)
    size = sum(parameter.numel() for parameter in draft.parameters())
    print(f"draft: {size / 1e6:.2f}M", flush=True)
    fast = has_quick_bfloat16(device().type)
    optimizers = optimizers_for(draft, muon=fast)
    base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    loss_of = torch.compile(distill_loss, dynamic=False)
    start, seen = time.monotonic(), 0
    for step, chosen in enumerate(lessons.batches(rows)):
        if step % 100 == 0:
            if step:
                save(draft, folder / "draft")
            for texts in watched:
                print(agreement(draft, texts), flush=True)
        share = (time.monotonic() - start) / (60 * minutes)
        if share >= 1:
            break
        losses = []
        for states, tokens, positions in lessons.parts(chosen, micro):
            loss = loss_of(draft, head, states, tokens, positions, fast=fast)
            (loss * len(tokens) / rows).backward()
            losses.append(loss.item())
            seen += tokens.numel()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, learning_rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = learning_rate * rate(share)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            speed = seen / (time.monotonic() - start)
            mean = sum(losses) / len(losses)
            print(
                f"step {step} {share:.1%} {seen / 1e6:.2f}M {speed:.0f} tok/s loss {mean:.3f}",
                flush=True,
            )
    save(draft, folder / "draft")
    for texts in watched:
        print(agreement(draft, texts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("sample", "distill"))
    parser.add_argument("--folder", type=Path, default=Path("build/pair"))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--rows", type=int, help="texts a batch (64) or a step (16)")
    parser.add_argument("--micro", type=int, default=8, help="texts a forward pass of distill")
    parser.add_argument(
        "--length", type=int, default=SAMPLE_LENGTH, help="tokens of a text; all alike in a folder"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sample: another one, other texts")
    parser.add_argument(
        "--held-out", action="store_true", help="sample from held-out documents, to watch distill"
    )
    args = parser.parse_args()
    if args.stage == "sample":
        sample(
            args.folder,
            args.minutes,
            args.rows or 64,
            args.length,
            args.seed,
            held_out=args.held_out,
        )
    else:
        distill(args.folder, args.minutes, args.rows or 16, args.micro)


if __name__ == "__main__":
    main()
