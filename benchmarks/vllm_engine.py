"""The vLLM engine: are its texts right, and what does a token cost beside vLLM by itself?

    python benchmarks/vllm_engine.py exact --model FOLDER [--texts 1000] [-- vLLM's flags]
    python benchmarks/vllm_engine.py speed --model FOLDER [--repeats 7] [-- vLLM's flags]

For an environment with ``edgespec[vllm]``. ``exact`` makes short texts in eights, each with one
kind of drafts (right, wrong, late, none, or mixed), greedy or sampled, and compares them token by
token with those of this project's own engine on the same model; the exit status is 1 when one
differs. A small ``--max-model-len`` lets vLLM's cache be so small that sessions lose their place in
it. ``speed`` steps one engine
in this process, without a network, at 1, 4 and 8 sessions, in turns: with vLLM's own sampler and
without speculation, which is what vLLM does by itself; with speculation and never a draft; with
tokens by this project's law; and with drafts of which each is right with 0.8. One JSON line for
each point: milliseconds a token of one session, and tokens a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.engines.vllm.core import VllmCore, VllmOptions
from edgespec.engines.vllm.target import VllmTarget
from edgespec.models.folders import model_info
from edgespec.ports import ModelInfo, PassRequest, PassResult, TargetModel

PROMPT, LENGTH, CHAIN, BESIDE = 24, 32, 5, 8
RIGHT = 0.8
KINDS = ("none", "right", "wrong", "late", "mixed")


@dataclass(slots=True)
class Text:
    """One session while its text is made."""

    key: str
    prompt: list[int]
    params: SamplingParams
    drafts: Callable[[int], Sequence[int]]
    """Behind so many tokens of the answer."""
    tokens: list[int] = field(default_factory=list)
    cached: int = 0

    def request(self) -> PassRequest:
        text = self.prompt + self.tokens
        chain = tuple(self.drafts(len(self.tokens))) if self.tokens else ()
        parents = tuple(range(-1, len(chain) - 1))
        return PassRequest(self.key, self.cached, tuple(text[self.cached :]), chain, parents)

    def take(self, request: PassRequest, result: PassResult) -> list[int]:
        """The accepted nodes."""
        right = 0
        while right < len(request.tokens) and request.tokens[right] == result.targets[right]:
            right += 1
        self.cached = request.cache_length + len(request.feed) + right
        self.tokens += result.targets[: right + 1]
        return list(range(right))


def run(target: TargetModel, texts: Sequence[Text], length: int) -> int:
    """Make all texts beside each other; how many passes that took."""
    for text in texts:
        target.open(text.key, len(text.prompt), text.params, text.prompt)
    passes = 0
    while going := [text for text in texts if len(text.tokens) < length]:
        batch = [text.request() for text in going]
        results = target.forward(batch)
        passes += 1
        for text, request, result in zip(going, batch, results, strict=True):
            target.keep(text.key, text.take(request, result))
    for text in texts:
        target.close(text.key)
    return passes


# --- exact ------------------------------------------------------------------------------------


def exact(target: VllmTarget, model: Path, count: int) -> int:
    """How many of ``count`` texts differ."""
    from edgespec.targets.torch_target import TorchTarget

    own = TorchTarget(str(model), name="own", vocabulary="", canonical=False)
    wrong: dict[str, int] = dict.fromkeys(KINDS, 0)
    made: dict[str, int] = dict.fromkeys(KINDS, 0)
    passes: dict[str, int] = dict.fromkeys(KINDS, 0)
    for group in range(0, count, BESIDE):
        kind = KINDS[group // BESIDE % len(KINDS)]
        texts = list(_texts(group, model, lambda done: ()))
        run(own, texts, LENGTH)
        answers = [text.tokens[:LENGTH] for text in texts]
        again = list(_texts(group, model, lambda done: ()))
        for text, answer in zip(again, answers, strict=True):
            text.drafts = _drafts(kind, answer, random.Random(text.key))
        passes[kind] += run(target, again, LENGTH)
        for text, answer in zip(again, answers, strict=True):
            made[kind] += 1
            if (found := text.tokens[:LENGTH]) != answer:
                wrong[kind] += 1
                first = next(i for i in range(LENGTH) if found[i] != answer[i])
                print(f"text {text.key}, {kind} drafts: differs at {first}", flush=True)
    for kind in KINDS:
        tokens = LENGTH * made[kind] / max(1, passes[kind])
        print(
            json.dumps(
                {"drafts": kind, "texts": made[kind], "differ": wrong[kind]}
                | {"tokens_a_pass": round(tokens, 2)}
            ),
            flush=True,
        )
    return sum(wrong.values())


def _texts(group: int, model: Path, drafts: Callable[[int], Sequence[int]]) -> Iterator[Text]:
    size = model_info(model).vocabulary_size
    for index in range(group, group + BESIDE):
        chance = random.Random(index)
        prompt = [chance.randrange(size) for _ in range(chance.randint(2, 2 * PROMPT))]
        params = SamplingParams()
        if index % 2:
            params = SamplingParams(
                temperature=chance.uniform(0.3, 1.2),
                top_k=chance.choice([0, 20, 50]),
                top_p=chance.uniform(0.8, 1.0),
                min_p=chance.choice([0.0, 0.02]),
                repetition_penalty=chance.choice([1.0, 1.1]),
                frequency_penalty=chance.choice([0.0, 0.3]),
                seed=index,
            )
        yield Text(str(index), prompt, params, drafts)


def _drafts(kind: str, answer: list[int], chance: random.Random) -> Callable[[int], Sequence[int]]:
    def drafts(done: int) -> Sequence[int]:
        coming = answer[done : done + CHAIN]
        match kind:
            case "right":
                return coming
            case "wrong":
                return [token + 1 if token == 0 else token - 1 for token in coming]
            case "late":
                return answer[done - 1 : done + CHAIN - 1]
            case "mixed":
                right = coming[: chance.randint(0, CHAIN)]
                return [*right, *coming[-1:] * chance.randint(0, 2)]
        return ()

    return drafts


# --- speed ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to make a step. ``right``: chains of which each token is right so often."""

    name: str
    our_sampler: bool
    speculation: bool
    """In every step; else in those with drafts."""
    right: float | None = None


ARMS = (
    Arm("vLLM's sampler, no speculation", False, False),
    Arm("vLLM's sampler, speculation, no drafts", False, True),
    Arm("our sampler, speculation, no drafts", True, True),
    Arm("ours, no drafts", True, False),
    Arm(f"ours, drafts {RIGHT} right", True, False, RIGHT),
)


def speed(target: VllmTarget, runner: Any, repeats: int) -> None:
    """Print the points, all arms in turns."""
    ours = runner._sample.__self__
    for sessions in (1, 4, 8):
        found: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in ARMS}
        for repeat in range(repeats):
            for arm in ARMS:
                set_arm(runner, ours, arm)
                found[arm.name].append(_measure(target, sessions, arm.right, repeat))
        for name, times in found.items():
            ms = [one for one, _ in times]
            point = {
                "arm": name,
                "sessions": sessions,
                "ms_a_token": round(statistics.median(ms), 2),
                "least": round(min(ms), 2),
                "most": round(max(ms), 2),
                "tokens_a_step": round(statistics.median([rate for _, rate in times]), 2),
            }
            print(json.dumps(point), flush=True)


def set_arm(runner: Any, ours: Any, arm: Arm) -> None:
    """Steps of vLLM's ``runner`` are made ``arm``'s way; ``ours``: its ``RunnerSampling``."""
    ours._recurrent = arm.speculation
    if arm.our_sampler:
        runner._sample = ours.sample
        return

    def sample(logits: Any, metadata: Any) -> Any:
        output = type(runner)._sample(runner, logits, metadata)
        for name, tokens in zip(
            runner.input_batch.req_ids, output.sampled_token_ids.tolist(), strict=True
        ):
            ours._rows[name] = (tokens[0],), (), ""
        return output

    runner._sample = sample


def _measure(
    target: VllmTarget, sessions: int, right: float | None, repeat: int
) -> tuple[float, float]:
    """Milliseconds a token of a session, and tokens of a session a step."""
    length, size = 64, target.info.vocabulary_size
    texts = [
        Text(f"{repeat} {i}", _prompt(repeat, i, size), SamplingParams(), lambda done: ())
        for i in range(sessions)
    ]
    if right is not None:
        run(target, texts, length)
        texts = [_guessing(text, right, size) for text in texts]
    began_s, steps = time.perf_counter(), target.steps
    run(target, texts, length)
    took_s = time.perf_counter() - began_s
    return 1e3 * took_s / length, length / (target.steps - steps)


def _guessing(known: Text, right: float, size: int) -> Text:
    chance = random.Random(known.key)
    guesses = [t if chance.random() < right else (t + 1) % size for t in known.tokens]
    return Text(known.key, known.prompt, known.params, lambda done: guesses[done : done + CHAIN])


def _prompt(repeat: int, index: int, size: int) -> list[int]:
    chance = random.Random(f"{repeat} {index}")
    return [chance.randrange(size) for _ in range(PROMPT)]


# --- engines ----------------------------------------------------------------------------------


def _target(options: argparse.Namespace) -> tuple[VllmTarget, VllmCore]:
    core = VllmCore(
        VllmOptions(
            str(options.model), max_model_len=options.max_model_len, flags=tuple(options.flags)
        )
    )
    size = model_info(options.model).vocabulary_size
    return VllmTarget(core, ModelInfo("vllm", "", size, core.context_length), 64), core


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("exact", "speed"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--repeats", type=int, default=7)
    mine, theirs = sys.argv[1:], []
    if "--" in mine:
        at = mine.index("--")
        mine, theirs = mine[:at], mine[at + 1 :]
    options = parser.parse_args(mine)
    options.flags = theirs
    if options.what == "speed":  # the runner has to be within reach
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        options.flags += ["--distributed-executor-backend", "uni"]
    target, core = _target(options)
    if options.what == "exact":
        return 1 if exact(target, options.model, options.texts) else 0
    speed(target, core._core.model_executor.driver_worker.worker.model_runner, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
