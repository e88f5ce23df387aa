"""The vLLM engine: are its texts right, and what does a token cost beside vLLM by itself?

    python benchmarks/vllm_engine.py exact --model FOLDER [--texts 1000] [-- vLLM's flags]
    python benchmarks/vllm_engine.py speed --model FOLDER --arm plain|speculative|ours [-- ...]

For an environment with ``edgespec[vllm]``. ``exact`` makes short texts in eights, each with one
kind of drafts (right, wrong, late, none, or mixed), greedy or sampled, and compares them token by
token with those of this project's own engine on the same model; the exit status is 1 when one
differs. A small ``--max-model-len`` lets vLLM's cache be so small that sessions lose their place in
it. ``speed`` steps one engine in this process at 1, 4 and 8 sessions, without a network:

    plain         vLLM's own scheduler and sampler, no speculation
    speculative   the same with speculation configured, and never a draft
    ours          drafts injected, tokens by this project's law: with no drafts, and with chains of
                  which each token is right with 0.8

and prints one JSON line for each point: milliseconds a token of one session, and tokens a step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.core.protocol.sampling import SamplingParams
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


def speed(arm: str, options: Any, repeats: int) -> None:
    """Print the points of one arm."""
    if arm == "ours":
        target = _target(options)
        for sessions in (1, 4, 8):
            for share in (None, RIGHT):
                times = [_ours(target, sessions, share, n) for n in range(repeats)]
                _tell("ours" if share is None else f"ours, {share} right", sessions, times)
        return
    core = _plain(options, speculative=arm == "speculative")
    for sessions in (1, 4, 8):
        times = [_stepped(core, sessions, n) for n in range(repeats)]
        _tell(arm, sessions, times)


def _tell(arm: str, sessions: int, times: list[tuple[float, float]]) -> None:
    ms = [one for one, _ in times]
    print(
        json.dumps(
            {
                "arm": arm,
                "sessions": sessions,
                "ms_a_token": round(statistics.median(ms), 2),
                "from": round(min(ms), 2),
                "to": round(max(ms), 2),
                "tokens_a_step": round(statistics.median([rate for _, rate in times]), 2),
            }
        ),
        flush=True,
    )


def _ours(target: VllmTarget, sessions: int, right: float | None, n: int) -> tuple[float, float]:
    """Milliseconds a token of a session, and tokens of a session a step."""
    length, size = 96, target.info.vocabulary_size
    plain = [
        Text(f"{n} {i}", _prompt(n, i, size), SamplingParams(), lambda done: ())
        for i in range(sessions)
    ]
    began_s, steps = time.perf_counter(), target.steps
    run(target, plain, length)
    if right is not None:
        texts = []
        for one in plain:
            chance = random.Random(one.key)
            guesses = [t if chance.random() < right else (t + 1) % size for t in one.tokens]
            texts.append(
                Text(
                    one.key,
                    one.prompt,
                    one.params,
                    lambda done, all_=guesses: all_[done : done + CHAIN],
                )
            )
        began_s, steps = time.perf_counter(), target.steps
        run(target, texts, length)
    took_s = time.perf_counter() - began_s
    return 1e3 * took_s / length, length / (target.steps - steps)


def _prompt(n: int, index: int, size: int) -> list[int]:
    chance = random.Random(f"{n} {index}")
    return [chance.randrange(size) for _ in range(PROMPT)]


def _stepped(core: Any, sessions: int, n: int) -> tuple[float, float]:
    from vllm import SamplingParams as VllmParams
    from vllm.v1.engine import EngineCoreRequest

    length, steps = 96, 0
    size = core.vllm_config.model_config.get_vocab_size()
    began_s = time.perf_counter()
    for index in range(sessions):
        params = VllmParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        request = EngineCoreRequest(
            f"{n} {index}",
            _prompt(n, index, size),
            None,
            params,
            None,
            time.time(),
            None,
            None,
            None,
        )
        core.add_request(*core.preprocess_add_request(request))
    while core.scheduler.has_unfinished_requests():
        _, executed = core.step()
        core.post_step(executed)
        steps += executed
    took_s = time.perf_counter() - began_s
    core.step()  # the worker forgets what has ended
    return 1e3 * took_s / length, length / steps


# --- engines ----------------------------------------------------------------------------------


def _target(options: argparse.Namespace) -> VllmTarget:
    from edgespec.engines.vllm.core import VllmCore, VllmOptions

    core = VllmCore(
        VllmOptions(
            str(options.model), max_model_len=options.max_model_len, flags=tuple(options.flags)
        )
    )
    size = model_info(options.model).vocabulary_size
    return VllmTarget(core, ModelInfo("vllm", "", size, core.context_length), 64)


def _plain(options: argparse.Namespace, *, speculative: bool) -> Any:
    """vLLM's own engine core, in this process as ours is."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = EngineArgs.from_cli_args(parser.parse_args(options.flags))
    arguments.model, arguments.skip_tokenizer_init = str(options.model), True
    arguments.dtype, arguments.async_scheduling, arguments.max_num_seqs = "float32", False, 65
    if speculative:
        proposer = "edgespec.engines.vllm.worker.NoProposer"
        arguments.speculative_config = {
            "method": "custom_class",
            "model": proposer,
            "num_speculative_tokens": 15,
        }
    config = arguments.create_engine_config()
    return EngineCore(config, Executor.get_class(config), log_stats=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("exact", "speed"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--arm", choices=("plain", "speculative", "ours"), default="ours")
    parser.add_argument("--repeats", type=int, default=7)
    mine, theirs = sys.argv[1:], []
    if "--" in mine:
        at = mine.index("--")
        mine, theirs = mine[:at], mine[at + 1 :]
    options = parser.parse_args(mine)
    options.flags = theirs
    if options.what == "exact":
        return 1 if exact(_target(options), options.model, options.texts) else 0
    speed(options.arm, options, options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
