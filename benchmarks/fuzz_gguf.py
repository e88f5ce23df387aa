"""Convert mutated GGUF files: each must be read, or refused by an error that names the file.

    python benchmarks/fuzz_gguf.py [--cases 2000] [--seed 1]

The mutations damage small valid files, mostly their headers (``tests/models/gguf_mutations.py``).
Cases run in child processes of a hundred, whose memory is limited. The exit status is 1 after a
finding: an error of another kind, a crash, a case that takes more than ``--patience`` seconds, more
memory than the limit, or a half-written folder.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from edgespec.bench.report import describe_machine, list_versions
from tests.models.gguf_mutations import judge, limited_memory, mutate, write_models

EACH = 100


def run_cases(first: int, count: int, options: argparse.Namespace, folder: Path) -> None:
    """Judge the cases from ``first`` on, and print a line for each."""
    models = [path.read_bytes() for path in sorted(folder.glob("*.gguf"))]
    work = folder / "work"
    work.mkdir(exist_ok=True)
    with limited_memory():
        for number in range(first, first + count):
            dice = random.Random(f"{options.seed} {number}")
            signal.alarm(options.patience)
            kind, why = judge(mutate(dice.choice(models), dice), work)
            signal.alarm(0)
            why = why.replace(str(work), "")
            print(f"{number}\t{kind}\t{why[:300]!r}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=int, default=60, help="seconds for one case")
    options = parser.parse_args()
    print(f"machine: {describe_machine()}\nversions: {list_versions()}")
    print(f"command: {' '.join(sys.argv)}")
    kinds, reasons, findings = Counter[str](), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        log = folder / "log"
        first = 0
        while first < options.cases:
            log.write_text("")
            if (child := os.fork()) == 0:
                with log.open("w") as out:
                    os.dup2(out.fileno(), 1)
                    run_cases(first, min(EACH, options.cases - first), options, folder)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            lines = log.read_text().splitlines()
            for line in lines:
                number, kind, why = line.split("\t")
                kinds[kind] += 1
                reasons[re.sub(r"\d+|'[^']*'", "#", why)[:60]] += kind == "refused"
                if kind == "finding":
                    findings.append(f"case {number}: {why}")
            first += len(lines)
            if status:
                findings.append(f"case {first}: the process ended with status {status}")
                first += 1
    for finding in findings:
        print(f"finding: {finding}")
    print(f"{dict(kinds)}, {len(reasons)} different reasons, {len(findings)} findings")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
