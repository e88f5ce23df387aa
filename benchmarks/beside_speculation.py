"""Compare generations by llama.cpp, transformers and edgespec, alone and with drafts.

    python benchmarks/beside_speculation.py FOLDER --draft DRAFT --gguf f32=F32.gguf \\
        --draft-gguf Q4_0.gguf --node-modules DIR [--minutes 8] [--json FILE]

FOLDER is a checkpoint that the native engine serves, DRAFT the folder of an exported draft.
``--gguf NAME=FILE`` are the same weights for llama.cpp, and may be given more than once; the first
one also runs with llama.cpp's own speculation: lookup in the input, and the draft model in
``--draft-gguf``. llama.cpp comes from the npm package node-llama-cpp (``beside_others.py``).
transformers runs alone, with prompt lookup, and with the assistant model of ``--assistant``.
edgespec runs as its users run it: a verifier process and an agent, gRPC between them, the link
emulated (``--rtts``).

Each arm is a process of its own, which loads the model and generates greedily from the first
prompts of the bench's sets chat, code and maths, in the model's chat template. The arms take turns.
Rounds follow one another until the next one would not end within ``--minutes``; the first one is
always whole. Figures are medians over the rounds, with the least and the greatest:

* ``tokens/s``: tokens after the first of each text, over the time that they took;
* ``first token``: milliseconds from the request to the first token, the median of the texts;
* ``peak MiB``: largest resident memory, of the process that runs the target and of the device;
* ``same``: texts that transformers alone generated as well (a quantised target has its own).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from edgespec.bench.prompts import BUILT_IN
from edgespec.bench.report import describe_machine, list_versions
from edgespec.models.tokenizer import prompt_encoder

KINDS: Final = ("chat", "code", "maths")
WARM_TOKENS: Final = 4
_MIB: Final = 1 << 20


@dataclass(slots=True)
class Run:
    """The texts and times of one arm in one round."""

    texts: list[list[int]]
    first_ms: list[float]
    """Time to the first token of each text."""
    rest_ms: list[float]
    """Time from the first to the last token of each text."""
    target_mib: float
    device_mib: float = 0.0
    """Peak memory of the device's process; 0 if there is only one process."""

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * sum(len(one) - 1 for one in self.texts) / sum(self.rest_ms)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of generating."""

    name: str
    run: Callable[[argparse.Namespace, list[list[int]]], Run]


def own_peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- transformers --------------------------------------------------------------------------------


class _Clock:
    """Streamer of ``generate`` that keeps the time of each token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._had_prompt = False

    def put(self, value: Any) -> None:
        if self._had_prompt:
            self.times_s += [time.perf_counter()] * int(value.numel())
        self._had_prompt = True

    def end(self) -> None:
        """Do nothing: the last token was put."""


def run_transformers(
    args: argparse.Namespace, prompts: list[list[int]], *, lookup: bool, assistant: str
) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    more: dict[str, Any] = {}
    if lookup:
        more["prompt_lookup_num_tokens"] = 10
    if assistant:
        helper = AutoModelForCausalLM.from_pretrained(assistant, dtype=torch.float32).eval()
        more["assistant_model"] = helper
    run = Run([], [], [], 0.0)
    for number, prompt in enumerate([prompts[0], *prompts]):
        clock = _Clock()
        given = torch.tensor([prompt])
        begun_s = time.perf_counter()
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=args.tokens if number else WARM_TOKENS,
            do_sample=False,
            streamer=clock,
            **more,
        )
        if number:
            run.texts.append(found[0, len(prompt) :].tolist())
            run.first_ms.append(1e3 * (clock.times_s[0] - begun_s))
            run.rest_ms.append(1e3 * (clock.times_s[-1] - clock.times_s[0]))
    run.target_mib = own_peak_mib()
    return run


# --- llama.cpp -----------------------------------------------------------------------------------


def run_llama(
    args: argparse.Namespace, prompts: list[list[int]], *, gguf: str, lookup: bool, draft: str
) -> Run:
    script = Path(__file__).with_name("llama_cpp_texts.mjs")
    asked = {
        "modules": args.node_modules,
        "gguf": gguf,
        "draft": draft,
        "lookup": lookup,
        "threads": args.threads,
        "tokens": args.tokens,
        "warmTokens": WARM_TOKENS,
        "prompts": prompts,
    }
    done = subprocess.run(
        ["node", str(script)], input=json.dumps(asked), check=True, capture_output=True, text=True
    )
    return Run(**json.loads(done.stdout.splitlines()[-1]))


# --- edgespec ------------------------------------------------------------------------------------


def run_edgespec(
    args: argparse.Namespace,
    prompts: list[list[int]],
    *,
    quantize: str,
    draft: str,
    rtt_ms: float,
    more: Sequence[str],
) -> Run:
    return asyncio.run(_run_edgespec(args, prompts, quantize, draft, rtt_ms, more))


async def _run_edgespec(
    args: argparse.Namespace,
    prompts: list[list[int]],
    quantize: str,
    draft: str,
    rtt_ms: float,
    more: Sequence[str],
) -> Run:
    from edgespec.bench.measurement import LentDrafter, measure
    from edgespec.cli.verifier import verifier_process
    from edgespec.config import AgentConfig, DraftSection, LinkSection
    from edgespec.core.protocol.sampling import SamplingParams
    from edgespec.device import build
    from edgespec.device.agent import Agent, AgentOptions
    from edgespec.wire.shaped import ShapedTransport

    options = ["--model", args.model, f"--set=threads={args.threads}", *more]
    if quantize:
        options.append(f"--set=quantize={quantize}")
    run = Run([], [], [], 0.0)
    async with verifier_process(options) as (address, _):
        draft_section = DraftSection(model=draft or build.NONE)
        config = AgentConfig(tokenizer=args.model, draft=draft_section)
        drafter = build.load_drafter(config)
        tokenizer = build.load_tokenizer(args.model)
        up, down = build.link_models(LinkSection(rtt_ms=rtt_ms))
        transport = ShapedTransport(build.connect(address), up, down)
        info = (await transport.info()).model
        lent = None if drafter is None else LentDrafter(drafter)
        agent_options = AgentOptions(text_tables=build.text_tables(config))
        async with Agent(
            transport, lent, tokenizer.encode, tokenizer.stream, agent_options
        ) as agent:
            for number, prompt in enumerate([prompts[0], *prompts]):
                count = args.tokens if number else WARM_TOKENS
                sampling = SamplingParams(max_tokens=count)
                done = await measure(agent, prompt, sampling, info.eos_token_ids)
                if number:
                    run.texts.append(list(done.tokens))
                    run.first_ms.append(1e3 * done.times_s[0])
                    run.rest_ms.append(1e3 * (done.times_s[-1] - done.times_s[0]))
        run.target_mib = sum(_peak_mib(pid) for pid in _children(os.getpid()))
        if drafter is not None:
            drafter.close()
    run.device_mib = own_peak_mib()
    return run


def _children(pid: int) -> list[int]:
    """Return the child processes of a process, and theirs."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    own = [int(word) for word in path.read_text(encoding="ascii").split()]
    return [*own, *(other for one in own for other in _children(one))]


def _peak_mib(pid: int) -> float:
    """Return the largest resident memory of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next((int(one.split()[1]) / 1024 for one in lines if one.startswith("VmHWM")), 0.0)


# --- arms ----------------------------------------------------------------------------------------


def make_arms(args: argparse.Namespace) -> list[Arm]:
    """Return the arms that the arguments allow."""
    found = []

    def add(name: str, run: Callable[..., Run], **given: Any) -> None:
        found.append(Arm(name, lambda args, prompts: run(args, prompts, **given)))

    add("transformers float32", run_transformers, lookup=False, assistant="")
    add("transformers float32, prompt lookup", run_transformers, lookup=True, assistant="")
    if args.assistant:
        name = "transformers float32, assistant"
        add(name, run_transformers, lookup=False, assistant=args.assistant)
    for number, given in enumerate(args.gguf):
        name, _, path = given.partition("=")
        add(f"llama.cpp {name}", run_llama, gguf=path, lookup=False, draft="")
        if number == 0:
            add(f"llama.cpp {name}, lookup", run_llama, gguf=path, lookup=True, draft="")
            if args.draft_gguf:
                draft = args.draft_gguf
                add(f"llama.cpp {name}, draft", run_llama, gguf=path, lookup=False, draft=draft)
    plain = ["--set=server_drafts=false"]
    for quantize in ("", "int8", "int4"):
        name = f"edgespec {quantize or 'float32'}"
        common: dict[str, Any] = {"quantize": quantize, "rtt_ms": 0.0}
        add(name, run_edgespec, draft="", more=plain, **common)
        if quantize != "int4":
            add(f"{name}, draft", run_edgespec, draft=args.draft, more=(), **common)
        if not quantize:
            add(f"{name}, lookup", run_edgespec, draft="lookup", more=(), **common)
            for rtt_ms in map(float, args.rtts.split(",")):
                behind = {"quantize": quantize, "rtt_ms": rtt_ms}
                link = f"link of {rtt_ms:g} ms"
                add(f"{name}, {link}", run_edgespec, draft="", more=plain, **behind)
                add(f"{name}, {link}, draft", run_edgespec, draft=args.draft, more=(), **behind)
    wanted = args.arms.split(";") if args.arms else [""]
    return [one for one in found if any(one.name.startswith(word) for word in wanted)]


def read_ids(args: argparse.Namespace) -> list[list[int]]:
    """Return the prompts as token ids."""
    from edgespec.device.build import load_tokenizer

    encode = prompt_encoder(load_tokenizer(args.model), chat=True)
    each = -(-args.prompts // len(KINDS))
    rows = [BUILT_IN[kind][number] for number in range(each) for kind in KINDS]
    return [encode(one.text) for one in rows[: args.prompts]]


def in_child(name: str) -> Run:
    """Run one arm in a process of its own."""
    command = [sys.executable, *sys.argv, "--only", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-2000:]}")
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def spread(values: Sequence[float], digits: int = 1) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--draft", required=True, help="folder of an exported draft")
    parser.add_argument("--assistant", default="", help="a checkpoint, for transformers")
    parser.add_argument("--gguf", action="append", default=[], help="NAME=FILE, for llama.cpp")
    parser.add_argument("--draft-gguf", default="", help="draft model for llama.cpp")
    parser.add_argument("--node-modules", default="node_modules", help="with node-llama-cpp")
    parser.add_argument("--arms", default="", help="beginnings of names, with semicolons")
    parser.add_argument("--rtts", default="20", help="ms of round trip of edgespec's links")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the target")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all rounds")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    arms = {one.name: one for one in make_arms(args)}
    if args.only:
        print(json.dumps(asdict(arms[args.only].run(args, read_ids(args)))))
        return 0
    print(f"command: {shlex.join(sys.argv)}")
    print(f"machine: {describe_machine()}\nversions: {list_versions()}")
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    begun_s, round_s, rounds = time.monotonic(), 0.0, 0
    while not rounds or time.monotonic() - begun_s + round_s < 60.0 * args.minutes:
        started_s = time.monotonic()
        for name in arms:
            print(f"round {rounds + 1}: {name}", file=sys.stderr, flush=True)
            try:
                runs[name].append(in_child(name))
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
        rounds, round_s = rounds + 1, time.monotonic() - started_s
    print(
        f"{args.threads} threads, {args.prompts} prompts, {args.tokens} tokens, {rounds} rounds\n"
    )
    print("| arm | tokens/s | first token, ms | peak MiB: target, device | same |")
    print("| --- | ---: | ---: | ---: | ---: |")
    reference = next((one[0].texts for name, one in runs.items() if one), [])
    for name, found in runs.items():
        if not found:
            print(f"| {name} | failed | | | |")
            continue
        same = sum(a == b for a, b in zip(found[0].texts, reference, strict=True))
        peaks = [statistics.median(one.target_mib for one in found)]
        if found[0].device_mib:
            peaks.append(statistics.median(one.device_mib for one in found))
        columns = [
            spread([one.tokens_per_second for one in found]),
            spread([statistics.median(one.first_ms) for one in found], 0),
            ", ".join(f"{one:.0f}" for one in peaks),
            f"{same} of {len(reference)}",
        ]
        print(f"| {name} | {' | '.join(columns)} |")
    if args.json:
        rows = {name: [*map(asdict, found)] for name, found in runs.items()}
        head = {"command": sys.argv, "machine": describe_machine(), "versions": list_versions()}
        args.json.write_text(json.dumps({**head, "runs": rows}) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
