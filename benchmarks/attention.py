"""Attention of one layer by every backend that works here, in turns: medians, ratios to the first.

    python benchmarks/attention.py [--dtype bfloat16] [--heads 16,8,128] [--device cuda]

``a call a session`` is what plain mode did before there were backends: torch's attention with
``enable_gqa``, keys gathered into fresh memory, each session by itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from edgespec.benchmark.report import machine, versions
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.ports import PassRequest
from edgespec.targets.attention_backend import AttentionBackend, LayerAttention, LayerStates
from edgespec.targets.batch_rows import BatchRows, lay_out
from edgespec.targets.grouped_attention import GroupedAttention
from edgespec.targets.kv_pool import BLOCK_SIZE, KvPool
from edgespec.targets.loading import DTYPES
from edgespec.targets.paged_attention import PagedAttention

# Sessions, rows of each, cached rows of each.
PASSES = (
    (1, 1, 256),
    (1, 8, 256),
    (4, 1, 256),
    (8, 1, 256),
    (8, 4, 256),
    (64, 1, 64),
    (8, 1, 1024),
)


def batch_of(pool: KvPool, sessions: int, rows: int, context: int) -> BatchRows:
    """Chains behind caches of nearly equal lengths, in blocks that do not follow each other."""
    free = (1 + torch.randperm(pool.block_count)).tolist()
    batch = []
    for index in range(sessions):
        cached = context - index % 7
        blocks = tuple(free.pop() for _ in range(-(-(cached + rows) // BLOCK_SIZE)))
        parents = tuple(range(-1, rows - 2))
        tokens = (1,) * len(parents)
        batch.append(PassRequest(f"s{index}", cached, (1,), tokens, parents, blocks=blocks))
        pool.open(f"s{index}", 1, SamplingParams())
    pool.reserve(batch)
    return lay_out(pool, batch)


def a_call_a_session(rows: BatchRows, states: LayerStates) -> Callable[[], object]:
    heads, _, head_dim = states.query.shape
    kv_heads, parts = states.key.shape[0], []
    for index in range(len(rows.requests)):
        session = rows.session(index)
        slots = torch.from_numpy(session.slots).to(states.keys.device)
        keys = torch.arange(len(slots))
        mask = keys <= torch.from_numpy(session.positions)[:, None]
        place = slice(session.first_row, session.first_row + len(session.positions))
        parts.append((place, slots, mask.to(slots.device)))

    def run() -> object:
        out = torch.zeros(
            (rows.row_count, heads, head_dim), dtype=states.query.dtype, device=states.query.device
        )
        for place, slots, mask in parts:
            k = states.keys.index_select(0, slots).view(1, -1, kv_heads, head_dim).transpose(1, 2)
            v = states.values.index_select(0, slots).view(1, -1, kv_heads, head_dim)
            found = functional.scaled_dot_product_attention(
                states.query[None, :, place],
                k,
                v.transpose(1, 2),
                attn_mask=mask,
                enable_gqa=heads != kv_heads,
            )
            out[place] = found[0].transpose(0, 1)
        return out

    return run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--heads", default="16,8,128", help="query heads, key heads, head dimension"
    )
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    heads, kv_heads, head_dim = (int(part) for part in args.heads.split(","))
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    torch.set_num_threads(1)
    torch.manual_seed(1)
    backends: dict[str, AttentionBackend] = {"grouped": GroupedAttention()}
    if device.type == "cuda":
        backends["paged"] = PagedAttention(heads, kv_heads, device)
    print(f"machine: {machine()}\nversions: {versions()}\ncommand: {' '.join(sys.argv)}")
    print("sessions, rows, cached: microseconds a layer (ratio to a call a session)")
    for sessions, count, context in PASSES:
        pool = KvPool(1, kv_heads * head_dim, sessions * (context + 64), dtype, device)
        rows = batch_of(pool, sessions, count, context)
        with torch.inference_mode():
            pool.data[:, :, BLOCK_SIZE:].normal_()
            query = torch.randn((rows.row_count, heads, head_dim)).to(dtype).to(device)
            own = torch.zeros((kv_heads, rows.row_count, head_dim), dtype=dtype, device=device)
            keys, values = pool.data[0, 0], pool.data[1, 0]
            states = LayerStates(query.transpose(0, 1), own, own, keys, values)
            layer = LayerAttention(head_dim**-0.5)
            work = {"a call a session": a_call_a_session(rows, states)}
            for name, backend in backends.items():
                work[name] = partial(backend.lay_out(rows).attend, layer, states)
            times = in_turns(work, args.rounds, device)
        first = times["a call a session"]
        told = ", ".join(f"{name} {t:.0f} ({t / first:.2f})" for name, t in times.items())
        print(f"{sessions:3d} {count:3d} {context:5d}: {told}", flush=True)
    return 0


def in_turns(
    work: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Median microseconds of each; on a CPU those of the thread, which a busy machine stretches
    less."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 2):
        for name, run in work.items():
            began = clock()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number >= 2:  # the first rounds warm up
                times[name].append(1e6 * (clock() - began))
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    sys.exit(main())
