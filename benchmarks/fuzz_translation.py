"""Cut random texts at random tokens, and check how a draft with another tokenizer reads each text.

    python benchmarks/fuzz_translation.py [--cuts 1000000] [--seed 1] [--folders FOLDER,FOLDER]

Small tokenizers of the families of public models (``tests/kit/tokenizer_families.py``) and the
tokenizers of ``--folders`` are paired, each with each. Texts are of mixed scripts, code, emoji and
control characters, in canonical ids or in others. Three checks for each text
(``tests/kit/translation_worlds.py``): the draft's ids spell the text, whatever was cut off and
added; every continuation keeps the committed ids and loses no byte; a draft that knows the text
writes it through the drafter, by ids of the target only. The exit status is 1 after a finding.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from itertools import cycle, permutations
from pathlib import Path

from edgespec.bench.report import describe_machine, list_versions
from edgespec.models.byte_vocabulary import ByteVocabulary
from edgespec.models.tokenizer import TextTokenizer
from edgespec.models.translation import Translation
from tests.kit.tokenizer_families import FAMILIES, load_family
from tests.kit.translation_worlds import check_cuts, play_text

MOST_SHOWN, EVERY_S = 20, 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuts", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folders", default="", help="tokenizers of real models, by comma")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(f"machine: {describe_machine()}\nversions: {list_versions()}")
    print(f"command: {' '.join(sys.argv)}")
    done, findings = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        known = {family: load_family(family, Path(name)) for family in FAMILIES}
        for folder in filter(None, options.folders.split(",")):
            known[folder] = ByteVocabulary(TextTokenizer(Path(folder)), Path(folder).name)
        pairs = [Translation(known[a], known[b]) for a, b in permutations(known, 2)]
        print(f"{len(known)} tokenizers, {len(pairs)} pairs")
        said_s = time.monotonic()
        for number, pair in enumerate(cycle(pairs)):
            if done["cuts"] >= options.cuts or len(findings) >= MOST_SHOWN:
                break
            dice = random.Random(f"{options.seed} {number}")
            try:
                done["cuts"] += check_cuts(pair, dice)
                done["texts"] += 1
                if number // len(pairs) % 4 == 0:
                    tokens, steps = play_text(pair, dice, number % 3)
                    done["tokens written"] += tokens
                    done["steps"] += steps
            except AssertionError as error:
                findings.append(f"case {number}: {error}")
            if time.monotonic() - said_s > EVERY_S:
                said_s = time.monotonic()
                print(f"{dict(done)}, {len(findings)} findings", file=sys.stderr, flush=True)
    for line in findings:
        print(line)
    print(f"{dict(done)}: {len(findings)} findings")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
