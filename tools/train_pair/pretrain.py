"""Train one Llama-shaped model on the corpus: Muon for the matrices, AdamW for the rest.

The learning rate is a function of the share of the *time* budget used (warm-up, constant, linear
decay over the last 45 %), so that ``--minutes`` is the only knob and a slow machine still ends
with a cooled-down model. Muon: Jordan et al. 2024, torch.optim.Muon.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tools.train_pair.corpus import documents
from tools.train_pair.vocabulary import VOCABULARY_SIZE, token_ids, train_tokenizer

CONTEXT_LENGTH = 1024
# The last part of the budget runs at the full context; the first, at --length, learns the language.
LONG_SHARE = 0.12
SHAPES = {
    # hidden, layers, heads, key/value heads, feed-forward
    "target": (384, 6, 6, 2, 1024),
    "draft": (192, 3, 3, 1, 512),
}


def new_model(role: str, seed: int) -> LlamaForCausalLM:
    hidden, layers, heads, kv_heads, feed_forward = SHAPES[role]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def optimizers_for(
    model: torch.nn.Module, scale: float = 1.0, *, muon: bool = True
) -> list[torch.optim.Optimizer]:
    """Muon multiplies in bfloat16: where that is slow, a small step takes as long again for it,
    and AdamW at the same rate, to which Muon's is matched, takes its place."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    if not muon:
        return [
            torch.optim.AdamW(part, lr=rate * scale, betas=(0.9, 0.95), weight_decay=0.0)
            for part, rate in ((matrices, 2e-3), (others, 4e-3))
        ]
    return [
        torch.optim.Muon(
            matrices,
            lr=2e-3 * scale,
            momentum=0.95,
            weight_decay=0.05,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=4e-3 * scale, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(share: float) -> float:
    """Learning-rate factor after ``share`` of the budget: warm-up 2 %, flat, linear to 0.02."""
    if share < 0.02:
        return share / 0.02
    return max(0.02, min(1.0, (1.0 - share) / 0.45))


def batches(ids: np.ndarray, rows: int, length: int, seed: int) -> itertools.chain[torch.Tensor]:
    """Endless [rows, length + 1] windows, every window once per pass, in a seeded order."""

    def one_pass(number: int) -> list[torch.Tensor]:
        rng = np.random.default_rng((seed, number))
        offset = int(rng.integers(0, length))
        starts = np.arange(offset, len(ids) - length - 1, length)
        rng.shuffle(starts)
        out = []
        for index in range(0, len(starts) - rows + 1, rows):
            chosen = starts[index : index + rows]
            window = np.stack([ids[s : s + length + 1] for s in chosen]).astype(np.int64)
            out.append(torch.from_numpy(window))
        return out

    return itertools.chain.from_iterable(one_pass(n) for n in itertools.count())


def loss_of(model: LlamaForCausalLM, window: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over [rows, length] targets."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(window[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


@cache
def compiled_loss() -> Callable[[LlamaForCausalLM, torch.Tensor], torch.Tensor]:
    """``loss_of``, 1.4 to 1.6 times as fast where bfloat16 is quick."""
    return torch.compile(loss_of, dynamic=False)


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, ids: np.ndarray, rows: int, length: int) -> float:
    stream = batches(ids, rows, length, seed=1)
    return float(np.mean([compiled_loss()(model, next(stream)).item() for _ in range(8)]))


def prepare(folder: Path) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Tokenizer, training ids and held-out ids, cached in ``folder``."""
    file = folder / "tokenizer" / "tokenizer.json"
    if not (folder / "train.npy").exists():
        found = documents()
        tokenizer = (
            Tokenizer.from_file(str(file))
            if file.exists()
            else train_tokenizer(found, folder / "tokenizer")
        )
        np.save(folder / "train.npy", token_ids(found, tokenizer, held_out=False))
        np.save(folder / "held_out.npy", token_ids(found, tokenizer, held_out=True))
    tokenizer = Tokenizer.from_file(str(file))
    return tokenizer, np.load(folder / "train.npy"), np.load(folder / "held_out.npy")


def train(role: str, folder: Path, minutes: float, rows: int, length: int, micro: int) -> None:
    _, ids, held_out = prepare(folder)
    print(f"{len(ids) / 1e6:.1f}M training tokens, {len(held_out) / 1e6:.2f}M held out", flush=True)
    model = new_model(role, seed=0)
    print(f"{role}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    optimizers = optimizers_for(model)
    base = [[g["lr"] for g in o.param_groups] for o in optimizers]
    short = batches(ids, rows, length, seed=0)
    stretch = CONTEXT_LENGTH // length
    long = batches(ids, rows // stretch, CONTEXT_LENGTH, seed=1)
    start, seen = time.monotonic(), 0
    for step in itertools.count():
        share = (time.monotonic() - start) / (60 * minutes)
        if share >= 1:
            break
        window, part_rows = next(short), micro
        if share > 1 - LONG_SHARE:
            window, part_rows = next(long), micro // stretch
        losses = []
        for part in window.split(part_rows):
            loss = compiled_loss()(model, part)
            (loss * len(part) / len(window)).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, learning_rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = learning_rate * rate(share)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += rows * length
        if step % 20 == 0:
            speed = seen / (time.monotonic() - start)
            print(
                f"step {step} {seen / 1e6:.2f}M tokens {share:.1%} {speed:.0f} tok/s "
                f"loss {np.mean(losses):.3f}",
                flush=True,
            )
        if step % 200 == 199:
            print(
                f"held-out loss {validation_loss(model, held_out, micro, length):.3f}", flush=True
            )
            model.save_pretrained(folder / role)
    print(
        f"held-out loss {validation_loss(model, held_out, micro, length):.3f} at the end",
        flush=True,
    )
    model.save_pretrained(folder / role)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=sorted(SHAPES))
    parser.add_argument("--folder", type=Path, default=Path("build/pair"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rows", type=int, default=48, help="windows a step")
    parser.add_argument("--length", type=int, default=256, help="tokens a window")
    parser.add_argument("--micro", type=int, default=16, help="windows a forward pass")
    args = parser.parse_args()
    train(args.role, args.folder, args.minutes, args.rows, args.length, args.micro)


if __name__ == "__main__":
    main()
