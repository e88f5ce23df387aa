"""Our 4-bit draft beside llama.cpp's Q4_0 with the same weights, in turns.

    python benchmarks/llama_cpp_peer.py --peer-python PATH [--pairs 30] [--prefills 5]

PATH (or ``LLAMA_CPP_PYTHON``) is an interpreter with numpy, ``gguf`` and llama.cpp itself: in a new
virtual environment ``pip install gguf xllamacpp``, which is a wheel of llama.cpp for processors
with AVX2, or ``gguf llama-cpp-python``, which is compiled for minutes.

A random draft of Qwen3-0.6B's shape is made and exported, and its integers and scales are written
as a GGUF, bit for bit. Before anything is timed both are compared with a float32 computation with
the same weights. Then processes that stay alive take turns, ours first in every other pair: a step
behind 64 to 88 tokens; four rows with the logits of each; five rows with those of the last; a
prefill of 256 tokens. Ours is told without the choice of its guesses, which is not in llama.cpp's
time either, and as the whole step that a device takes. Medians, quartiles in brackets; ratios are
those of pairs. llama.cpp has its own defaults: keys and values in float16, weights packed anew
while they are loaded. Where other programs take the cores, its second thread spins while it waits
for the first: set ``OMP_WAIT_POLICY=passive`` there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from random_draft import make_draft
from stored_draft import StoredDraft, write_tensors

from edgespec.benchmark.report import machine, versions
from edgespec.drafters.checkpoint import read_shape
from edgespec.drafters.parity import relative
from edgespec.drafters.reference_model import reference_logits

HERE = Path(__file__).resolve().parent
SHAPE, CONTEXT, BEHIND, SPAN, PREFILL = "0.6B", 512, 64, 24, 256
WARM_UP, END_WITHIN_S = 3, 30.0
CHECKED = (8, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that both do in turns."""

    name: str
    rows: int
    every: bool
    """Are the logits of all rows wanted?"""

    def start(self, turn: int) -> int:
        """How many tokens are kept before it."""
        places = SPAN // self.rows + 1
        return 0 if self.rows == PREFILL else BEHIND + turn % places * self.rows


STEPS = (
    Kind("step", 1, False),
    Kind("4 rows, logits of each", 4, True),
    Kind("5 rows, logits of the last", 5, False),
)
PREFILLS = Kind(f"prefill of {PREFILL}", PREFILL, False)


class Process:
    """A child that answers one JSON line with one."""

    def __init__(self, *command: str) -> None:
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.said = self._line()

    def feed(
        self, keep: int, tokens: Sequence[int], every: bool = False, save: str = ""
    ) -> dict[str, float]:
        assert self._child.stdin is not None
        request = {"keep": keep, "tokens": list(tokens), "every": every, "save": save}
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        return self._line()

    @property
    def resident_mib(self) -> float:
        return float(psutil.Process(self._child.pid).memory_info().rss) / 2**20

    def close(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()

    def _line(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"{self._child.args} ended with {self._child.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def has_llama(python: str) -> bool:
    """Can this interpreter write a GGUF and run it? It says what it has, or what is missing."""
    try:
        return not subprocess.run([python, str(HERE / "llama_cpp_process.py"), "check"]).returncode
    except OSError:
        return False


def text(count: int, seed: int = 0) -> list[int]:
    """``count`` ids of the vocabulary."""
    found: list[int] = np.random.default_rng(seed).integers(0, 151_936, count).tolist()
    return found


def prepare(folder: Path, peer: str) -> tuple[Path, Path]:
    """(our draft, the GGUF), made where they are not there."""
    draft, gguf = folder / "draft", folder / "draft.gguf"
    if not (draft / "edgespec.json").is_file():
        make_draft(draft, SHAPE, context_length=CONTEXT)
    if not gguf.is_file():
        shape = read_shape(folder / "draft.source")
        with tempfile.TemporaryDirectory(dir=folder) as tensors:
            write_tensors(StoredDraft(draft, shape), shape, CONTEXT, Path(tensors))
            script = str(HERE / "llama_cpp_process.py")
            subprocess.run([peer, script, "write", tensors, str(gguf)], check=True)
    return draft, gguf


@contextlib.contextmanager
def processes(draft: Path, gguf: Path, peer: str, threads: int) -> Iterator[dict[str, Process]]:
    """Our drafter, our drafter for trees, and llama.cpp."""
    ours = (sys.executable, str(HERE / "draft_process.py"), str(draft), str(threads))
    theirs = (peer, str(HERE / "llama_cpp_process.py"), "serve", str(gguf), str(threads))
    with contextlib.ExitStack() as stack:
        found: dict[str, Process] = {}
        for name, command in (
            ("plain", (*ours, "plain")),
            ("tree", (*ours, "tree")),
            ("peer", theirs),
        ):
            found[name] = Process(*command)
            stack.callback(found[name].close)
        yield found


def compare(draft: Path, arms: dict[str, Process], folder: Path) -> None:
    """Print how far both are from float32 arithmetic and from each other, over logits of the last
    of 8 to 32 tokens. Raises ``SystemExit`` where one is another model."""
    shape = read_shape(folder / "draft.source")
    tokens = text(max(CHECKED))
    whole = reference_logits(shape, StoredDraft(draft, shape), tokens)
    rows: dict[str, list[Any]] = {"float32": [whole[length - 1] for length in CHECKED]}
    for name, key in (("ours", "plain"), ("llama.cpp", "peer")):
        file = folder / f"{key}.npy"
        rows[name] = []
        for length in CHECKED:
            arms[key].feed(0, tokens[:length], save=str(file))
            rows[name].append(np.load(file))
    print("| logits of | beside | correlation | rms of difference / deviation | same best |")
    print("| --- | --- | ---: | ---: | ---: |")
    for one, other in (("ours", "float32"), ("llama.cpp", "float32"), ("ours", "llama.cpp")):
        pairs = list(zip(rows[one], rows[other], strict=True))
        correlation = min(float(np.corrcoef(a, b)[0, 1]) for a, b in pairs)
        away = max(relative(a, b) for a, b in pairs)
        same = sum(int(a.argmax() == b.argmax()) for a, b in pairs)
        print(f"| {one} | {other} | {correlation:.4f} | {away:.3f} | {same} of {len(pairs)} |")
        if correlation < 0.9:
            raise SystemExit(f"{one} and {other} are not the same model: {correlation:.3f}")


def measure(kind: Kind, arms: dict[str, Process], turns: int) -> list[dict[str, dict[str, float]]]:
    """Times of each pair, by arm."""
    ours = arms["tree" if kind.every else "plain"]
    sides = [("ours", ours), ("peer", arms["peer"])]
    for _, arm in sides:
        arm.feed(0, text(BEHIND))
    found = []
    for turn in range(-WARM_UP if kind is not PREFILLS else -1, turns):
        pair = {}
        for name, arm in sides if turn % 2 else sides[::-1]:
            keep = kind.start(max(turn, 0))
            tokens = text(kind.rows, seed=turn + WARM_UP)
            pair[name] = arm.feed(keep, tokens, kind.every)
        if turn >= 0:
            found.append(pair)
    return found


def spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def show(threads: int, kind: Kind, found: list[dict[str, dict[str, float]]]) -> None:
    for time in ("cpu", "clock"):
        whole = [1e3 * pair["ours"][f"{time}_s"] for pair in found]
        model = [
            w - 1e3 * pair["ours"][f"choice_{time}_s"] for w, pair in zip(whole, found, strict=True)
        ]
        peer = [1e3 * pair["peer"][f"{time}_s"] for pair in found]
        ratios = [m / p for m, p in zip(model, peer, strict=True)]
        whole_ratios = [w / p for w, p in zip(whole, peer, strict=True)]
        print(
            f"| {threads} | {kind.name} | {'CPU' if time == 'cpu' else time} | {spread(model, 1)} |"
            f" {spread(peer, 1)} | {spread(ratios, 2)} | {spread(whole, 1)} |"
            f" {spread(whole_ratios, 2)} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", default=os.environ.get("LLAMA_CPP_PYTHON", ""))
    parser.add_argument("--pairs", type=int, default=30, help="of steps")
    parser.add_argument("--prefills", type=int, default=5, help="pairs of prefills")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas")
    parser.add_argument("--folder", type=Path, help="keep the models here, and use those there")
    parser.add_argument("--json", type=Path, help="write every time into this file")
    options = parser.parse_args()
    peer = options.peer_python
    if not has_llama(peer):
        raise SystemExit(
            f"--peer-python {peer!r} is no interpreter with gguf and llama.cpp: make a virtual"
            " environment, install gguf and xllamacpp there, and name its python"
        )
    print(json.dumps({"machine": machine(), "versions": versions()}))
    kept: dict[str, Any] = {"machine": machine(), "versions": versions(), "argv": sys.argv[1:]}
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        draft, gguf = prepare(folder, peer)
        for number, threads in enumerate(int(part) for part in options.threads.split(",")):
            with processes(draft, gguf, peer, threads) as arms:
                if not number:
                    print(json.dumps(arms["peer"].said, indent=1))
                    compare(draft, arms, folder)
                    print(
                        "| threads | what | time | ours ms | llama.cpp ms | ratio | step | ratio |"
                    )
                    print("| ---: | --- | --- | --- | --- | --- | --- | --- |")
                for kind in (*STEPS, PREFILLS):
                    turns = options.prefills if kind is PREFILLS else options.pairs
                    found = measure(kind, arms, turns)
                    show(threads, kind, found)
                    kept[f"{threads} threads, {kind.name}"] = found
                    if options.json:
                        options.json.write_text(json.dumps(kept, indent=1))
                sizes = {name: round(arm.resident_mib) for name, arm in arms.items()}
                print(f"resident MiB with {threads} threads: {sizes}, load {psutil.getloadavg()}")


if __name__ == "__main__":
    main()
