"""Long prompts: how well a draft guesses behind them, what they cost, and what they cost others.

    python benchmarks/long_prompts.py record --model TARGET --store DIR --lengths 1024,4096,8000
    python benchmarks/long_prompts.py windows --draft DRAFT --store DIR --windows 0,1024,4096
    python benchmarks/long_prompts.py times [--model TARGET] [--draft DRAFT] --lengths 1024,8000
    python benchmarks/long_prompts.py loop --draft DRAFT --length 4096
    python benchmarks/long_prompts.py beside [--model TARGET] --length 32768 --shares 0.22,1,3.3

``record`` lets the target continue real texts, greedily, and keeps its tokens in the store. Prompts
are the first tokens of public-domain books and of Python's library ($EDGESPEC_DATA/corpus).
``windows`` runs the draft behind the same texts, with several lengths of ``draft.window`` (0: the
whole text), and prints its acceptance rate with a 95 % interval over the texts, how much it differs
from that of the first window text by text, its prefill, its steps, its keys and values, and what
the next turn of the conversation feeds. ``times`` compares a
draft with each of ``--windows``, the verifier, transformers and, with ``--vllm-python``, vLLM by
length: the prompt, a step or pass behind it, the next turn, keys and values, and the memory of a
process that does nothing else. ``loop`` reads a prompt for the draft as a device does, and compares
how late timers of the event loop are with how late they are otherwise. ``beside`` runs the
verifier's engine and a real target: one long prompt beside seven sessions that decode. Without a
model ``times`` and ``beside`` make a small checkpoint with random weights and a context of 65,536
tokens.

Times are processor time, with one thread for each model, so that other programs disturb them less,
except in ``loop``, which takes wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

import psutil

from edgespec.bench.intervals import mean_interval
from edgespec.config import VerifierConfig
from edgespec.config.verifier import LimitsSection
from edgespec.core.device.events import StartStep, StepDone
from edgespec.core.ports import PREFILL_CHUNK, PassRequest, TargetModel
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.device.build import load_tokenizer
from edgespec.device.drafter_pool import DrafterLease, DrafterPool
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.tokenizer import prompt_encoder
from edgespec.verifier.build import load_target

TEXTS = {"prose": "books_public_domain.txt.xz", "code": "cpython311_lib.txt.xz"}
CHUNK = 512
TURN_TOKENS = 200
"""Tokens that the next turn of a conversation adds to prompt and answer."""
PARTS = ("draft", "verifier", "transformers", "vllm")
STEPS = 12
"""Steps or passes of which ``times`` takes the median."""
RANDOM_CONTEXT = 1 << 16
"""Context of the checkpoint with random weights."""
T = TypeVar("T")
GREEDY = SamplingParams(max_tokens=1 << 16, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class LongText:
    """A prompt and the target's own tokens behind it."""

    kind: str
    number: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    prefill_s: float
    """Processor time of the target for the prompt, in passes of ``CHUNK`` rows."""
    pass_s: float
    """Median processor time of a pass of one row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("record", "windows", "times", "loop", "beside"))
    parser.add_argument("--model", default="")
    parser.add_argument("--quantize", default="", help="number format of the target's weights")
    parser.add_argument("--draft", default="")
    parser.add_argument("--vllm-python", default="", help="the Python that has vLLM")
    parser.add_argument("--parts", type=_names, default=list(PARTS), help="what is timed")
    parser.add_argument("--store", type=Path, default=Path("long-prompts"))
    parser.add_argument("--lengths", type=_numbers, default=[1024, 4096, 8000])
    parser.add_argument("--windows", type=_numbers, default=[0, 512, 1024, 2048, 4096])
    parser.add_argument("--texts", type=int, default=1, help="texts of each kind and length")
    parser.add_argument("--tokens", type=int, default=96, help="tokens that the target adds")
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--shares", type=_shares, default=[0.22])
    parser.add_argument("--json", type=Path, help="file to which each row is added")
    asked = parser.parse_args()
    steps = {"record": record, "windows": windows, "times": times, "loop": loop, "beside": beside}
    for row in steps[asked.what](asked):
        print("  ".join(f"{name} {_show(value)}" for name, value in row.items()), flush=True)
        if asked.json:
            with asked.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"what": asked.what, **row}) + "\n")


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def _shares(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def _show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


Row = dict[str, str | int | float]
Parts = list[tuple[str, Callable[[int], Row]]]


# --- texts ----------------------------------------------------------------------------------------


def read_prompts(model: str, kind: str, length: int, count: int) -> list[tuple[int, ...]]:
    """Return ``count`` prompts of ``length`` tokens, from different places of one corpus."""
    import lzma

    path = Path(os.environ["EDGESPEC_DATA"]) / "corpus" / TEXTS[kind]
    with lzma.open(path, "rt", encoding="utf-8") as file:
        text = file.read(20_000_000).replace("<|doc|>", "")
    encode = prompt_encoder(load_tokenizer(model), chat=False)
    found, chars = [], 8 * length
    for number in range(count):
        start = text.index("\n", 100_000 + number * 1_500_000) + 1
        tokens = tuple(encode(text[start : start + chars]))
        assert len(tokens) >= length, f"{len(tokens)} tokens in {chars} characters"
        found.append(tokens[:length])
    return found


def record(asked: argparse.Namespace) -> Iterator[Row]:
    target = open_target(asked.model, max(asked.lengths) + asked.tokens + 1, asked.quantize)
    for length in asked.lengths:
        for kind in TEXTS:
            path = _path(asked.store, kind, length)
            if path.exists():
                continue
            texts = [
                continue_text(target, kind, number, prompt, asked.tokens)
                for number, prompt in enumerate(
                    read_prompts(asked.model, kind, length, asked.texts)
                )
            ]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in texts))
            yield {
                "kind": kind,
                "length": length,
                "texts": len(texts),
                "target_prefill_s": fmean(one.prefill_s for one in texts),
                "target_pass_ms": 1e3 * fmean(one.pass_s for one in texts),
            }


def _path(store: Path, kind: str, length: int) -> Path:
    return store / f"{kind}-{length}.jsonl"


def open_target(model: str, tokens: int, quantize: str = "") -> TargetModel:
    limits = LimitsSection(max_cached_tokens=tokens + 4096)
    return load_target(VerifierConfig(model=model, threads=1, limits=limits, quantize=quantize))


def continue_text(
    target: TargetModel, kind: str, number: int, prompt: tuple[int, ...], count: int
) -> LongText:
    target.open("text", len(prompt), GREEDY)
    began, feed, cached = time.process_time(), list(prompt), 0
    while len(feed) > CHUNK:
        target.forward([PassRequest("text", cached, tuple(feed[:CHUNK]), sample=False)])
        cached, feed = cached + CHUNK, feed[CHUNK:]
    tokens, passes_s = list[int](), list[float]()
    prefill_s = 0.0
    while len(tokens) < count:
        at = time.process_time()
        (found,) = target.forward([PassRequest("text", cached, tuple(feed))])
        cached += len(feed)
        if tokens:
            passes_s.append(time.process_time() - at)
        else:
            prefill_s = time.process_time() - began
        feed = [found.targets[0]]
        tokens += feed
    target.close("text")
    return LongText(kind, number, prompt, tuple(tokens), prefill_s, median(passes_s))


def read_texts(store: Path, kind: str, length: int) -> list[LongText]:
    lines = _path(store, kind, length).read_text().splitlines()
    return [
        replace(one, prompt=tuple(one.prompt), tokens=tuple(one.tokens))
        for one in (LongText(**json.loads(line)) for line in lines)
    ]


# --- the draft behind them ------------------------------------------------------------------------


class CountingDrafter(OnnxDrafter):
    """Counts the tokens that its runs were fed."""

    fed = 0

    def _forward(self, cached: int, tokens: Sequence[int], rows: int = 1):  # type: ignore[no-untyped-def]
        self.fed += len(tokens)
        return super()._forward(cached, tokens, rows)


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft behind one text."""

    acceptance: float
    places: int
    prefill_s: float
    step_s: float
    held_rows: int
    kv_bytes: int
    turn_fed: int
    """Tokens that the next turn feeds; 0 where the draft's context has no room for it."""
    turn_s: float


def windows(asked: argparse.Namespace) -> Iterator[Row]:
    first = dict[tuple[str, int], list[Judged]]()
    """The texts of each kind and length behind the first window, with which others are compared."""
    for window in asked.windows:
        drafter = CountingDrafter(Path(asked.draft), threads=1, window=window)
        for length in asked.lengths:
            if length + asked.tokens >= drafter.info.context_length:
                continue
            found = {
                kind: [judge(drafter, text) for text in read_texts(asked.store, kind, length)]
                for kind in TEXTS
                if _path(asked.store, kind, length).exists()
            }
            if len(found) > 1:
                found["all"] = [one for judged in found.values() for one in judged]
            for kind, judged in found.items():
                row = {"window": window, "kind": kind, "length": length, **summarise(judged)}
                yield row | compare(first.setdefault((kind, length), judged), judged)
        drafter.close()


def compare(first: Sequence[Judged], others: Sequence[Judged]) -> Row:
    """Return how many more places the draft guesses behind the same texts than with the first
    window, as a share of all, and the interval."""
    more = [other.acceptance - one.acceptance for one, other in zip(first, others, strict=True)]
    least, most = mean_interval(more)
    return {"more_than_first": fmean(more), "more_interval": f"{least:.3f} to {most:.3f}"}


def judge(drafter: CountingDrafter, text: LongText) -> Judged:
    """Run the draft behind a text as a device does, one step for each token of the target."""
    drafter.begin(len(text.prompt), GREEDY)
    guesses, length, steps_s = [], len(text.prompt), list[float]()
    prefill_s, found = _cpu_s(lambda: drafter.step(0, text.prompt, 2))
    for token in text.tokens:
        guesses.append(found[0].token)
        step_s, found = _cpu_s(partial(drafter.step, length, (token,), 2))
        steps_s.append(step_s)
        length += 1
    hits = sum(a == b for a, b in zip(guesses, text.tokens, strict=True))
    held, kv_bytes = drafter.held_tokens, held_bytes(drafter)
    turn_fed, turn_s = next_turn(drafter, (*text.prompt, *text.tokens))
    return Judged(
        acceptance=hits / len(text.tokens),
        places=len(text.tokens),
        prefill_s=prefill_s,
        step_s=median(steps_s),
        held_rows=held,
        kv_bytes=kv_bytes,
        turn_fed=turn_fed,
        turn_s=turn_s,
    )


def held_bytes(drafter: CountingDrafter) -> int:
    row_bytes = sum(rows[:, :1].nbytes for _, rows in drafter.cached_rows(1))
    return drafter.held_tokens * row_bytes


def next_turn(drafter: CountingDrafter, text: Sequence[int]) -> tuple[int, float]:
    """Return the tokens that the next turn behind ``text`` feeds, and its seconds; zeros where it
    has no room."""
    whole, fed = (*text, *text[:TURN_TOKENS]), drafter.fed
    if len(whole) >= drafter.info.context_length:
        return 0, 0.0
    drafter.begin(len(whole), GREEDY)
    took_s, _ = _cpu_s(lambda: drafter.step(0, whole, 2))
    return drafter.fed - fed, took_s


def summarise(judged: Sequence[Judged]) -> Row:
    least, most = mean_interval([one.acceptance for one in judged])
    turns = [one for one in judged if one.turn_fed]
    return {
        "acceptance": fmean(one.acceptance for one in judged),
        "interval": f"{least:.3f} to {most:.3f}",
        "texts": len(judged),
        "places": sum(one.places for one in judged),
        "prefill_s": fmean(one.prefill_s for one in judged),
        "step_ms": 1e3 * median(one.step_s for one in judged),
        "held_rows": max(one.held_rows for one in judged),
        "kv_mib": max(one.kv_bytes for one in judged) / 2**20,
        "next_turn_fed": fmean(one.turn_fed for one in turns) if turns else 0,
        "next_turn_s": fmean(one.turn_s for one in turns) if turns else 0.0,
    }


# --- times by length ------------------------------------------------------------------------------


def times(asked: argparse.Namespace) -> Iterator[Row]:
    """Time each part in processes of its own, one for each length, so that a process's memory is
    that part's."""
    with _models(asked.model, asked.draft) as (model, draft):
        verifier = partial(verifier_times, model, asked.quantize)
        parts: Parts = [
            (f"draft, window {window}", partial(draft_times, draft, window))
            for window in asked.windows
            if draft
        ]
        if model:
            parts += [("verifier", verifier), ("transformers", partial(transformers_times, model))]
            if asked.vllm_python:
                parts.append(("vllm", partial(vllm_times, asked.vllm_python, model)))
        parts = [one for one in parts if one[0].split(",")[0] in asked.parts]
        for length in asked.lengths:
            for name, part in parts:
                if found := _run_apart(part, length):
                    yield {"length": length, "part": name, **found}


def _run_apart(part: Callable[[int], Row], length: int) -> Row:
    """Run a part in a process of its own, and add how much of it lies in memory at its end."""
    apart = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=apart) as pool:
        return pool.submit(_measure_memory, part, length).result()


def _measure_memory(part: Callable[[int], Row], length: int) -> Row:
    found = part(length)
    if found and "resident_mib" not in found:
        found["resident_mib"] = psutil.Process().memory_info().rss / 2**20
    return found


@contextmanager
def _models(model: str, draft: str) -> Iterator[tuple[str, str]]:
    """Yield the target and the draft that were asked for, or, without any, a checkpoint of random
    weights and its draft in 8 bits."""
    if model or draft:
        yield model, draft
        return
    from edgespec.device.export.export import export_draft

    with _model_folder("") as folder:
        path = Path(folder).parent / "draft"
        export_draft(Path(folder), path, bits=8, context_length=RANDOM_CONTEXT)
        yield folder, str(path)


def some_prompt(vocabulary_size: int, length: int) -> tuple[int, ...]:
    """Return some tokens: the time of a step depends on their number alone."""
    return tuple((17 * index + index // 7) % (vocabulary_size - 4) + 2 for index in range(length))


def draft_times(draft: str, window: int, length: int) -> Row:
    """Return nothing where the draft's context has no room."""
    drafter = CountingDrafter(Path(draft), threads=1, window=window)
    if length + STEPS >= drafter.info.context_length:
        return {}
    prompt = some_prompt(drafter.info.vocabulary_size, length)
    drafter.begin(length, GREEDY)
    prefill_s, _ = _cpu_s(lambda: drafter.step(0, prompt, 2))
    steps = [_cpu_s(partial(drafter.step, length + at, (5,), 2))[0] for at in range(STEPS)]
    kv_bytes = held_bytes(drafter)
    turn_fed, turn_s = next_turn(drafter, (*prompt, *[5] * STEPS))
    return {
        "prefill_s": prefill_s,
        "step_ms": 1e3 * median(steps),
        "next_turn_fed": turn_fed,
        "next_turn_s": turn_s,
        "kv_mib": kv_bytes / 2**20,
    }


def verifier_times(model: str, quantize: str, length: int) -> Row:
    target = open_target(model, length + TURN_TOKENS, quantize)
    engine = RealEngine(target, length + 4096, 1.0)
    prompt = some_prompt(target.info.vocabulary_size, length)
    engine.open("first turn", prompt)
    while not engine.has_begun("first turn"):
        engine.run_pass()
    prefill_s = engine.now
    passes_s = [engine.run_pass()[1] for _ in range(STEPS)]
    engine.close("first turn")
    engine.run_pass()  # it was laid out before the end of the turn
    fed, at = 0, engine.now
    engine.open("next turn", [*prompt, *prompt[:TURN_TOKENS]])
    while not engine.has_begun("next turn"):
        rows, _ = engine.run_pass()
        fed += rows["next turn"]
    return {
        "prefill_s": prefill_s,
        "step_ms": 1e3 * median(passes_s),
        "next_turn_fed": fed,
        "next_turn_s": engine.now - at,
        "kv_mib": length * token_bytes(model) / 2**20,
    }


def token_bytes(model: str) -> int:
    """Return the size of the keys and values of a token in all layers, in float32."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 4 * int(layers) * int(heads) * int(head_dim)


def transformers_times(model: str, length: int) -> Row:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = some_prompt(loaded.config.vocab_size, length)
    cache, steps_s, found = None, list[float](), None
    with torch.inference_mode():
        began = time.process_time()
        for start in range(0, len(prompt), CHUNK):
            ids = torch.tensor([prompt[start : start + CHUNK]])
            found = loaded(ids, past_key_values=cache, logits_to_keep=1)
            cache = found.past_key_values
        prefill_s = time.process_time() - began
        for _ in range(STEPS):
            assert found is not None
            at = time.process_time()
            ids = found.logits[:, -1:].argmax(-1)
            found = loaded(ids, past_key_values=cache)
            steps_s.append(time.process_time() - at)
    return {"prefill_s": prefill_s, "step_ms": 1e3 * median(steps_s)}


VLLM_SCRIPT = """
import json, sys, time

import psutil
from vllm import LLM, SamplingParams

model, prompt, steps, chunk, room = json.loads(sys.stdin.read())
engine = LLM(
    model,
    dtype="float32",
    max_model_len=len(prompt) + steps + 1,
    max_num_batched_tokens=chunk,
    max_num_seqs=1,
    enable_prefix_caching=False,
    enforce_eager=True,
    async_scheduling=False,
    kv_cache_memory_bytes=room,
    distributed_executor_backend="uni",
    skip_tokenizer_init=True,
).llm_engine
sampling = SamplingParams(
    temperature=0.0, max_tokens=steps + 1, ignore_eos=True, detokenize=False
)
engine.add_request("text", {"prompt_token_ids": prompt}, sampling)
took_s = []
while engine.has_unfinished_requests():
    at = time.process_time()
    engine.step()
    took_s.append(time.process_time() - at)
assert not psutil.Process().children(recursive=True), "vLLM computes in other processes"
print(json.dumps([took_s, psutil.Process().memory_info().rss]))
"""
"""Reads the model, the prompt, the passes behind it, the rows of a pass and the bytes for keys and
values. Writes the seconds of each pass and the memory at the end."""


def vllm_times(python: str, model: str, length: int) -> Row:
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    prompt = some_prompt(int(config["vocab_size"]), length)
    room = 2 * (length + 1024) * token_bytes(model)
    done = subprocess.run(
        [python, "-c", VLLM_SCRIPT],
        input=json.dumps([model, prompt, STEPS, CHUNK, room]),
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    took_s, resident_bytes = json.loads(done.stdout.splitlines()[-1])
    passes_s = took_s[-STEPS:]
    return {
        "prefill_s": sum(took_s[:-STEPS]),
        "step_ms": 1e3 * median(passes_s),
        "resident_mib": resident_bytes / 2**20,
    }


# --- the device's event loop while its draft reads a prompt ---------------------------------------


TICK_S = 0.005


def loop(asked: argparse.Namespace) -> Iterator[Row]:
    yield from asyncio.run(_measure_loop(Path(asked.draft), asked.length))


async def _measure_loop(draft: Path, length: int) -> list[Row]:
    """Read four prompts that have nothing in common, and wait as long after each."""
    drafter = OnnxDrafter(draft)
    pool, rows = DrafterPool(drafter), list[Row]()
    reading, idle, took_s = list[float](), list[float](), list[float]()
    for number in range(4):
        prompt = tuple(1000 + 100 * number + index % 97 for index in range(length))
        lease = DrafterLease(pool, length, GREEDY)
        at = time.perf_counter()
        step = asyncio.create_task(lease.step(StartStep(0, prompt, 2)))
        reading += await _tick(step.done)
        took_s.append(time.perf_counter() - at)
        assert isinstance(await step, StepDone)
        lease.end()
        until = time.perf_counter() + took_s[-1]
        idle += await _tick(lambda: time.perf_counter() >= until)  # noqa: B023
    pool.close()
    for name, late in (("reading", reading), ("idle", idle)):
        late.sort()
        rows.append(
            {
                "loop": name,
                "length": length,
                "prompt_s": fmean(took_s),
                "ticks": len(late),
                "late_p50_ms": 1e3 * median(late),
                "late_p99_ms": 1e3 * late[int(0.99 * len(late))],
                "late_max_ms": 1e3 * late[-1],
            }
        )
    return rows


async def _tick(ends: Callable[[], bool]) -> list[float]:
    late = []
    while not ends():
        at = time.perf_counter()
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - at - TICK_S)
    return late


def _cpu_s(run: Callable[[], T]) -> tuple[float, T]:
    """Run ``run`` and return its processor time, and its result."""
    at = time.process_time()
    found = run()
    return time.process_time() - at, found


# --- one long prompt beside others ----------------------------------------------------------------


class RealEngine:
    """The engine of a verifier with a real target. Its clock is the target's processor time, and
    devices acknowledge at once."""

    def __init__(self, target: TargetModel, context_length: int, share: float) -> None:
        limits = m.Limits(context_length=context_length, max_unreceived=1 << 16)
        engine_limits = ee.EngineLimits(cache=target.cache, prefill_share=share)
        self.engine = VerifyEngine(target.info, limits, engine_limits, contain=False)
        self.target, self.now, self._streams = target, 0.0, 0
        self._batch: tuple[PassRequest, ...] = ()
        self._closing = list[str]()
        """Sequences of the next pass that are closed behind it."""
        self._stream_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}

    def open(self, name: str, prompt: Sequence[int]) -> None:
        self._streams += 1
        self._stream_of[name], self._name_of[self._streams] = self._streams, name
        opening = m.Open(name, "", "", tuple(prompt), sampling=GREEDY, drafting=False)
        self._do(self.engine.handle(ee.StreamOpened(self._streams, opening), self.now))

    def close(self, name: str) -> None:
        stream = self._stream_of.pop(name)
        self._do(self.engine.handle(ee.StreamMessage(stream, m.Cancel()), self.now))

    def has_begun(self, name: str) -> bool:
        prefix = self.engine.sessions[name].prefix
        return prefix.length > prefix.prompt_length

    def run_pass(self) -> tuple[dict[str, int], float]:
        """Run one pass; return the rows of each session in it, and its seconds."""
        batch, self._batch = self._batch, ()
        took_s, results = _cpu_s(lambda: self.target.forward(batch))
        for key in self._closing:
            self.target.close(key)
        self._closing.clear()
        self.now += took_s
        self._do(self.engine.handle(ee.BatchDone(tuple(results)), self.now))
        return {one.key: len(one.feed) for one in batch}, took_s

    def _do(self, actions: Sequence[ee.EngineAction]) -> None:
        for action in actions:
            match action:
                case ee.RunBatch(requests):
                    self._batch = requests
                case ee.OpenSequence():
                    self.target.open(action.key, action.prompt_length, action.sampling, action.text)
                case ee.CloseSequence(key) if any(one.key == key for one in self._batch):
                    self._closing.append(key)
                case ee.CloseSequence(key):
                    self.target.close(key)
                case ee.KeepNodes(key, nodes):
                    self.target.keep(key, nodes)
                case ee.SendTo(stream, m.Commit() as commit) if commit.tokens:
                    received = m.Received(commit.position + len(commit.tokens), 0)
                    if self._name_of[stream] in self._stream_of:
                        message = ee.StreamMessage(stream, received)
                        self._do(self.engine.handle(message, self.now))
                case _:
                    pass


@contextmanager
def _model_folder(model: str) -> Iterator[str]:
    """Yield the name of the model, or a folder with a small one of random weights."""
    if model:
        yield model
        return
    from tests.kit.tiny_checkpoints import tiny_config, write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(
            max_position_embeddings=RANDOM_CONTEXT,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
        )
        yield str(write_checkpoint(Path(folder) / "random", config))


def beside(asked: argparse.Namespace) -> Iterator[Row]:
    with _model_folder(asked.model) as model:
        for share in asked.shares:
            target = open_target(model, asked.length + 8 * 4096)
            size = target.info.vocabulary_size
            prompt = [(17 * index + index // 7) % (size - 4) + 2 for index in range(asked.length)]
            alone = RealEngine(target, asked.length + 4096, share)
            alone.open("long", prompt)
            while not alone.has_begun("long"):
                alone.run_pass()
            alone.close("long")
            alone_s = alone.now
            again = RealEngine(target, asked.length + 4096, share)
            others = [f"session {number}" for number in range(7)]
            for number, name in enumerate(others):
                again.open(name, prompt[number : number + 200])
            before = [again.run_pass()[1] for _ in range(60)][20:]
            again.open("long", prompt)
            gaps_s, rows, at = list[float](), list[int](), again.now
            while not again.has_begun("long"):
                fed, took_s = again.run_pass()
                gaps_s.append(took_s)
                rows.append(fed.get("long", 0))
            first_s = again.now - at
            # The next turn: the same prompt and a little more, beside the same sessions.
            again.close("long")
            cached = again.engine.cache_scheduler.prefix_hit_tokens
            again.open("long", [*prompt, *prompt[:TURN_TOKENS]])
            turn_at = again.now
            while not again.has_begun("long"):
                again.run_pass()
            for name in ("long", *others):
                again.close(name)
            yield {
                "share": share,
                "length": asked.length,
                "gap_ms": 1e3 * median(before),
                "p95_ratio": _p95(gaps_s) / _p95(before),
                "p50_ratio": median(gaps_s) / median(before),
                "rows_per_pass": fmean(rows),
                "ttft_alone_s": alone_s,
                "ttft_beside_s": first_s,
                "ttft_ratio": first_s / alone_s,
                "next_turn_cached": again.engine.cache_scheduler.prefix_hit_tokens - cached,
                "next_turn_s": again.now - turn_at,
            }


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


if __name__ == "__main__":
    assert PREFILL_CHUNK <= CHUNK
    main()
