"""Compare the native target on a CPU with transformers and llama.cpp, on the same model and texts.

    python benchmarks/beside_others.py FOLDER                       # transformers and edgespec
    python benchmarks/beside_others.py FOLDER --gguf q4=Q4_0.gguf --gguf q8=Q8_0.gguf \\
        --node-modules DIR                                          # and llama.cpp
    python benchmarks/beside_others.py FOLDER --prompt 3878 --tokens 1 --arms transformers,edgespec

FOLDER is a checkpoint that the native engine serves. llama.cpp comes from the npm package
node-llama-cpp, which brings its binary: ``npm install node-llama-cpp`` in a folder, and name its
``node_modules``. Nothing is speculated: this is about passes.

Each arm is a process of its own, which loads the model, reads a prompt in each session, and then
generates greedily. The arms take turns, as often as ``--rounds`` says. For each arm and count of
sessions it prints medians over the rounds, with the least and the greatest:

* ``first token``: milliseconds from the prompt to the first token of the last session;
* ``a token``: milliseconds between two steps, divided by the sessions, the median of the steps;
* ``CPU``: milliseconds of CPU a token, of all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from edgespec.bench.report import describe_machine, list_versions

WARM_STEPS = 4
Figures = dict[str, float]


def prompts(sessions: int, length: int) -> list[list[int]]:
    """Return a prompt of token ids for each session; no two prompts begin alike."""
    return [
        [(7919 * (i + 31 * session)) % 40_000 + 100 for i in range(length)]
        for session in range(sessions)
    ]


class Steps:
    """Collects the time and the CPU time of steps."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._began = time.perf_counter(), time.process_time()

    def mark(self) -> None:
        """End a step, and begin the next."""
        now = time.perf_counter(), time.process_time()
        self.wall.append(now[0] - self._began[0])
        self.cpu.append(now[1] - self._began[1])
        self._began = now

    def figures(self, sessions: int) -> Figures:
        """Return the figures of an arm; the first step was the prompt."""
        wall, cpu = self.wall[1 + WARM_STEPS :], self.cpu[1 + WARM_STEPS :]
        found = {"first token": 1e3 * self.wall[0]}
        if wall:
            found["a token"] = 1e3 * statistics.median(wall) / sessions
            found["CPU"] = 1e3 * statistics.median(cpu) / sessions
        return found


def run_transformers(args: argparse.Namespace, sessions: int) -> Figures:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        # so that kernels and the like are made before the measurement
        model(torch.tensor([[5] * 16]))
        steps = Steps()
        given: dict[str, Any] = {"input_ids": torch.tensor(prompts(sessions, args.prompt))}
        for _ in range(1 + (args.tokens > 1) * (WARM_STEPS + args.tokens)):
            out = model(**given, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            given = {"input_ids": token, "past_key_values": out.past_key_values}
            steps.mark()
    return steps.figures(sessions)


def run_edgespec(
    args: argparse.Namespace, sessions: int, quantize: str, canonical: bool
) -> Figures:
    from edgespec.verifier.build import prefer_reproducible_products

    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # like the verifier
    prefer_reproducible_products()
    from edgespec.core.ports import PassRequest
    from edgespec.core.protocol.sampling import SamplingParams
    from edgespec.verifier.targets.torch_target import TorchTarget

    target = TorchTarget(
        args.model,
        name="beside",
        vocabulary="",
        quantize=quantize,
        canonical=canonical,
        model_threads=args.threads,
        max_cached_tokens=sessions * (args.prompt + args.tokens + 64),
        max_sessions=sessions,
    )
    texts, greedy = prompts(sessions, args.prompt), SamplingParams(max_tokens=1 << 20)
    steps, last = Steps(), {}
    for session, text in enumerate(texts):
        key = str(session)
        target.open(key, len(text), greedy)
        for start in range(0, len(text), args.chunk):
            end = min(len(text), start + args.chunk)
            request = PassRequest(key, start, tuple(text[start:end]), sample=end == len(text))
            for result in target.forward([request]):
                last[key] = result.targets[0] if result.targets else 0
    steps.mark()
    for step in range((args.tokens > 1) * (WARM_STEPS + args.tokens)):
        requests = [PassRequest(key, args.prompt + step, (last[key],)) for key in last]
        for result in target.forward(requests):
            last[result.key] = result.targets[0]
        steps.mark()
    return steps.figures(sessions)


def run_llama(args: argparse.Namespace, sessions: int, gguf: str) -> Figures:
    script = Path(__file__).with_name("llama_cpp.mjs")
    command = ["node", str(script), args.node_modules, gguf, str(args.threads), str(sessions)]
    command += [
        str(args.prompt),
        str((args.tokens > 1) * (WARM_STEPS + args.tokens)),
        str(WARM_STEPS),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def arms(args: argparse.Namespace) -> dict[str, Any]:
    """Return the function of each arm, by its name."""
    found: dict[str, Any] = {"transformers": run_transformers}
    for quantize in ("", "int8", "int4"):
        for canonical in (True, False):
            mode = "canonical" if canonical else "plain"
            name = f"edgespec {quantize or 'float32'} {mode}"

            def run(
                args: argparse.Namespace,
                sessions: int,
                quantize: str = quantize,
                canonical: bool = canonical,
            ) -> Figures:
                return run_edgespec(args, sessions, quantize, canonical)

            found[name] = run
    for given in args.gguf:
        name, _, path = given.partition("=")

        def run_file(args: argparse.Namespace, sessions: int, path: str = path) -> Figures:
            return run_llama(args, sessions, path)

        found[f"llama.cpp {name}"] = run_file
    chosen = args.arms.split(",") if args.arms else [""]
    return {name: run for name, run in found.items() if any(name.startswith(one) for one in chosen)}


def in_child(name: str, sessions: int) -> Figures:
    """Run one arm in a process of its own."""
    command = [sys.executable, *sys.argv, "--only", name, "--sessions", str(sessions)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):9.2f} ({min(values):.2f}-{max(values):.2f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--gguf", action="append", default=[], help="NAME=FILE, for llama.cpp")
    parser.add_argument("--node-modules", default="node_modules", help="with node-llama-cpp")
    parser.add_argument("--arms", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--sessions", default="1,8", help="counts, separated by commas")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="to generate; 1: the prompt alone")
    parser.add_argument("--chunk", type=int, default=512, help="rows of a prompt's pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    counts = [int(part) for part in args.sessions.split(",")]
    if args.only:
        print(json.dumps(arms(args)[args.only](args, counts[0])))
        return 0
    print(f"command: {shlex.join(sys.argv)}")
    print(f"machine: {describe_machine()}\nversions: {list_versions()}")
    print(f"{args.threads} threads, prompts of {args.prompt} tokens, {args.rounds} rounds")
    samples: dict[tuple[str, int], list[Figures]] = {}
    for _ in range(args.rounds):
        for sessions in counts:
            for name in arms(args):
                samples.setdefault((name, sessions), []).append(in_child(name, sessions))
    for (name, sessions), rounds in samples.items():
        parts = [
            f"{what} {spread([one[what] for one in rounds])} ms"
            for what in ("first token", "a token", "CPU")
            if what in rounds[0]
        ]
        print(f"{sessions:2d} sessions  {name:28s}", "  ".join(parts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
