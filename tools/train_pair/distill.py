"""Train the draft on what the target itself writes.

First the target continues beginnings taken from the corpus (greedy and sampled at 0.7 and 1.0);
then the draft learns the target's distribution on those texts: forward KL on every position, plus
cross-entropy on the target's first choice, because that is what greedy acceptance counts. A share
of plain corpus text is mixed in, so that a user's prompt is not foreign to the draft.

The last part of the budget trains *through* the rounding to 4 bits (straight-through estimator,
Bengio et al. 1308.3432), and the rounded weights are what is saved: the exporter then finds
integers and scales that reproduce them, and int4 costs no acceptance.
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from transformers import LlamaForCausalLM

from tools.train_pair.pretrain import batches, new_model, optimizers_for, prepare, rate

SAMPLE_LENGTH = 257
TEMPERATURES = (0.0, 0.7, 1.0, 0.7)
CORPUS_SHARE = 0.3
FIRST_CHOICE_WEIGHT = 0.3
ROUNDED_SHARE = 0.45
BLOCK_SIZE = 32


@torch.inference_mode()
def sample(folder: Path, minutes: float, rows: int, seed: int) -> None:
    """Add to ``samples.npy``: uint16 [N, SAMPLE_LENGTH], beginnings and their continuations."""
    _, ids, _ = prepare(folder)
    target = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.bfloat16).eval()
    target.generation_config.eos_token_id = None
    path = folder / "samples.npy"
    rng, start = np.random.default_rng(seed), time.monotonic()
    out = [np.load(path)] if path.exists() else []
    torch.manual_seed(seed)
    for number in itertools.count():
        if time.monotonic() - start > 60 * minutes:
            break
        length = int(rng.choice([8, 16, 32, 64]))
        starts = rng.integers(0, len(ids) - length, rows)
        begin = torch.from_numpy(np.stack([ids[s : s + length] for s in starts]).astype(np.int64))
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        texts = target.generate(
            begin,
            attention_mask=torch.ones_like(begin),
            max_new_tokens=SAMPLE_LENGTH - length,
            **(options if temperature else {"do_sample": False}),
        )
        out.append(texts.numpy().astype(np.uint16))
        speed = number * rows * SAMPLE_LENGTH / (time.monotonic() - start)
        print(f"batch {number} at temperature {temperature}, {speed:.0f} tok/s", flush=True)
        np.save(path, np.concatenate(out))


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [N, K] on the 4-bit grid of its blocks of 32 along K; gradient passes through."""
    blocks = weight.detach().unflatten(-1, (-1, BLOCK_SIZE))
    peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / -8)
    values = (blocks / scale).round().clamp(-8, 7) * scale
    straight_through: torch.Tensor = weight + (values.flatten(-2) - weight.detach())
    return straight_through


@torch.compile(dynamic=False)
def distill_loss(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, tokens: torch.Tensor, *, low_bits: bool
) -> torch.Tensor:
    weights: dict[str, torch.Tensor] = {
        name: rounded(weight) if low_bits and weight.ndim == 2 else weight
        for name, weight in draft.named_parameters()
    }
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            wanted = target(tokens, use_cache=False).logits
        options = {"use_cache": False}
        got = torch.func.functional_call(draft, weights, (tokens,), options).logits
    wanted, got = (
        wanted.float().flatten(0, 1),
        functional.log_softmax(got.float().flatten(0, 1), -1),
    )
    divergence: torch.Tensor = functional.kl_div(
        got, functional.log_softmax(wanted, -1), log_target=True, reduction="batchmean"
    )
    first_choice: torch.Tensor = functional.nll_loss(got, wanted.argmax(-1))
    return divergence + FIRST_CHOICE_WEIGHT * first_choice


def distill(folder: Path, minutes: float, rows: int, micro: int, more: bool) -> None:
    """Train ``draft`` in ``folder``; ``more`` goes on from what is there, in 4 bits throughout."""
    _, ids, _ = prepare(folder)
    samples = np.load(folder / "samples.npy")
    target = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.bfloat16).eval()
    for parameter in target.parameters():
        parameter.requires_grad_(False)
    draft = new_model("draft", seed=1)
    if more:
        draft = LlamaForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)
    rounded_share = 1.0 if more else ROUNDED_SHARE
    print(f"draft: {sum(p.numel() for p in draft.parameters()) / 1e6:.2f}M", flush=True)
    optimizers = optimizers_for(draft, scale=0.5 if more else 1.0)
    base = [[g["lr"] for g in o.param_groups] for o in optimizers]
    corpus_rows = int(rows * CORPUS_SHARE)
    corpus = batches(ids, corpus_rows, SAMPLE_LENGTH - 1, seed=5)
    rng, start = np.random.default_rng(2 if more else 1), time.monotonic()
    for step in itertools.count():
        share = (time.monotonic() - start) / (60 * minutes)
        if share >= 1:
            break
        chosen = samples[rng.integers(0, len(samples), rows - corpus_rows)].astype(np.int64)
        window = torch.cat([torch.from_numpy(chosen), next(corpus)])[:, :-1]
        losses = []
        for part in window.split(micro):
            loss = distill_loss(draft, target, part, low_bits=share >= 1 - rounded_share)
            (loss * len(part) / rows).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optimizer, rates in zip(optimizers, base, strict=True):
            for group, learning_rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = learning_rate * rate(share)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            speed = (step + 1) * rows * (SAMPLE_LENGTH - 1) / (time.monotonic() - start)
            print(
                f"step {step} {share:.1%} {speed:.0f} tok/s loss {np.mean(losses):.3f}", flush=True
            )
        if step % 200 == 199:
            draft.save_pretrained(folder / "draft")
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.copy_(rounded(parameter))
    draft.save_pretrained(folder / "draft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("sample", "distill"))
    parser.add_argument("--folder", type=Path, default=Path("build/pair"))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--rows", type=int, default=64, help="texts a batch or step")
    parser.add_argument("--micro", type=int, default=16, help="texts a forward pass of distill")
    parser.add_argument("--seed", type=int, default=0, help="of sample: another one, other texts")
    parser.add_argument(
        "--more", action="store_true", help="distill on from the draft that is there"
    )
    args = parser.parse_args()
    if args.stage == "sample":
        sample(args.folder, args.minutes, args.rows, args.seed)
    else:
        distill(args.folder, args.minutes, args.rows, args.micro, args.more)


if __name__ == "__main__":
    main()
