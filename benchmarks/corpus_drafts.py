"""What a corpus on the device brings (``--draft-corpus``), in virtual time.

    EDGESPEC_DATA=... python benchmarks/corpus_drafts.py [--rtts 20,50] [--temperatures 0,0.7]
        [--tokens 96] [--limit 24] [--sets questions,beside]

As in ``judge_drafts.py``: the bundled draft runs for real, a pass takes 25 ms and a step 8, texts
are played one after another on one device that keeps what it learned. Sets of texts:

    unseen      code behind a place in a Python file of this repository; every eighth file, none of
                which is in the store, where the others are
    edited      the same in files that are in the store, with the name that a file uses most changed
    questions   a question of Spec-Bench's retrieval set; all its documents are in the store
    beside      the same questions behind the last 400 tokens of their documents

``bundled`` texts are what the bundled target says, ``written`` ones what stands in the file, or for
questions in the document from the sentence on that has most words of it: what a target would say,
greedily, that writes the file as it is, or answers in the document's words. Sources: the draft
model; guesses from the text (``draft.lookup``); both; and each of the last two with the corpus.
Means over the texts with 95 % intervals; ``over`` is the time over that of the line above without
the corpus, text by text. Exits 1 if a text is not the target's.
"""

from __future__ import annotations

import argparse
import json
import keyword
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from judge_drafts import Played, Text, play, said_behind

from edgespec.bench.measurement import Interval, mean_interval, ratio_interval
from edgespec.bench.report import machine, versions
from edgespec.core.device.estimates import Learned
from edgespec.core.device.goodput_policy import named_policy
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_guesses import Corpus, TextTables
from edgespec.device.build import load_tokenizer
from edgespec.device.corpus import open_corpus
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.folders import Role, resolve_model

ROOT: Final = Path(__file__).parents[1]
HELD_OUT_EVERY: Final = 8
PROMPT_TOKENS: Final = 200
DOCUMENT_TOKENS: Final = 400
SETS: Final = ("unseen", "edited", "questions", "beside")
BUNDLED, WRITTEN = "bundled", "written"
SOURCES: Final = ("model", "text", "text, corpus", "model, text", "model, text, corpus")
TOKENIZER: Final = load_tokenizer("bundled")
Cut = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt, and what stands behind it."""


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def python_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split()]


def cuts(texts: Sequence[str], limit: int, tokens: int) -> list[Cut]:
    """Each text in two behind some line in its middle."""
    dice, found = random.Random(0), list[Cut]()
    for text in texts:
        lines = text.splitlines(keepends=True)
        at = dice.randrange(len(lines) // 3, max(len(lines) // 3 + 1, 2 * len(lines) // 3))
        prompt = tuple(encode("".join(lines[:at])))[-PROMPT_TOKENS:]
        behind = tuple(encode("".join(lines[at:])))[:tokens]
        if len(prompt) == PROMPT_TOKENS and len(behind) == tokens:
            found.append((prompt, behind))
    step = max(1, len(found) // limit)
    return found[::step][:limit]


def edited(text: str) -> str:
    """With the name of five letters or more that it uses most called something else."""
    names = re.findall(r"\b[a-z_]{5,}\b", text)
    most = Counter(name for name in names if not keyword.iskeyword(name)).most_common(1)
    return re.sub(rf"\b{most[0][0]}\b", "quantity_of_it", text) if most else text


def questions() -> Iterator[tuple[str, str]]:
    """Documents and question."""
    path = Path(os.environ.get("EDGESPEC_DATA", "")) / "prompts" / "spec_bench.jsonl"
    if not path.is_file():
        print(f"left out: {path} is not to be found, EDGESPEC_DATA names the data")
        return
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["category"] == "rag":
                documents, _, question = row["turns"][0].strip().rpartition("\n")
                yield documents, question


def quoted(documents: str, question: str, tokens: int) -> tuple[int, ...]:
    """The document from the sentence on that has most words of the question; empty: it ends before
    so many tokens."""
    sentences = re.split(r"(?<=[.!?]) ", documents)
    asked = set(question.lower().rstrip("?").split())
    shared = [len(asked & set(sentence.lower().split())) for sentence in sentences]
    found = tuple(encode(" " + " ".join(sentences[shared.index(max(shared)) :])))[:tokens]
    return found if len(found) == tokens else ()


def sets(limit: int, tokens: int, folder: Path) -> Iterator[tuple[str, list[Cut], Corpus]]:
    """Their names, cuts and stores."""
    files = python_files()
    held = [path for number, path in enumerate(files) if number % HELD_OUT_EVERY == 0]
    kept = [path for path in files if path not in held]
    store = _store([str(path) for path in kept])
    unseen, seen = ([path.read_text(encoding="utf-8") for path in some] for some in (held, kept))
    yield "unseen", cuts(unseen, limit, tokens), store
    yield "edited", cuts([edited(text) for text in seen], limit, tokens), store
    if asked := list(questions()):
        path = folder / "documents.txt"
        path.write_text("\n\n".join(documents for documents, _ in asked), encoding="utf-8")
        store = _store([str(path)])
        chosen = asked[:: max(1, len(asked) // limit)][:limit]
        plain = [tuple(encode(f"Question: {question}\nAnswer:")) for _, question in chosen]
        behind = [quoted(*both, tokens) for both in chosen]
        yield "questions", list(zip(plain, behind, strict=True)), store
        beside = [
            (*encode(documents)[-DOCUMENT_TOKENS:], *encode("\n"), *prompt)
            for (documents, _), prompt in zip(chosen, plain, strict=True)
        ]
        yield "beside", list(zip(beside, behind, strict=True)), store


def _store(names: Sequence[str]) -> Corpus:
    return open_corpus(names, "bundled", encode, lambda text: print(text, file=sys.stderr))


def texts(cuts: Sequence[Cut], said_by: str, temperature: float, tokens: int) -> list[Text]:
    if said_by == BUNDLED:
        return said_behind([prompt for prompt, _ in cuts], temperature, tokens)
    law = SamplingParams(temperature, max_tokens=tokens, ignore_eos=True)
    return [
        Text(prompt, behind, replace(law, seed=number))
        for number, (prompt, behind) in enumerate(cuts)
        if behind
    ]


def played(texts: Sequence[Text], source: str, corpus: Corpus, rtt_s: float) -> list[Played]:
    said = TextTables(ngrams=True) if "text" in source else None
    if said is not None and "corpus" in source:
        said.corpus = corpus
    drafter = OnnxDrafter(resolve_model("bundled", Role.DRAFT), threads=1)
    learned, policy, model = Learned(), named_policy(), "model" in source
    try:
        return [play(one, drafter, policy, rtt_s, learned, said, model=model) for one in texts]
    finally:
        drafter.close()


def _shown(values: Sequence[float], interval: Interval) -> str:
    return f"{sum(values) / len(values):.2f} ({interval[0]:.2f} to {interval[1]:.2f})"


def compare(heard: Sequence[Text], corpus: Corpus, rtt_s: float, head: str) -> int:
    """Print a line a source; the number of wrong texts."""
    wrong, times = 0, list[float]()
    for source in SOURCES:
        found = played(heard, source, corpus, rtt_s)
        before, times = times, [one.tpot_ms for one in found]
        columns = [[one.pass_tokens for one in found], [one.wasted for one in found], times]
        shown = " | ".join(_shown(column, mean_interval(column)) for column in columns)
        over = ""
        if "corpus" in source:
            low, high = ratio_interval(times, before)
            over = f"{sum(times) / sum(before):.3f} ({low:.3f} to {high:.3f})"
        print(f"{head} | {source} | {shown} | {over} |", flush=True)
        wrong += sum(not one.exact for one in found)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rtts", default="20,50", help="milliseconds, with commas")
    parser.add_argument("--temperatures", default="0,0.7", help="with commas")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--limit", type=int, default=24, help="texts of each set")
    parser.add_argument("--sets", default=",".join(SETS), help="names, with commas")
    options = parser.parse_args()
    print(json.dumps({"machine": machine(), "versions": versions()}))
    print("| texts | T | RTT | source | tokens a pass | wasted a token | ms a token | over |")
    print("| --- | ---: | ---: | --- | --- | --- | --- | --- |")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # the stores of a bench are nobody's
        for name, found, corpus in sets(options.limit, options.tokens, Path(folder)):
            if name not in options.sets.split(","):
                continue
            for temperature in map(float, options.temperatures.split(",")):
                for said_by in (BUNDLED,) if temperature else (BUNDLED, WRITTEN):
                    heard = texts(found, said_by, temperature, options.tokens)
                    for rtt_ms in map(float, options.rtts.split(",")) if heard else ():
                        head = f"| {name}, {said_by} ({len(heard)}) | {temperature:g} | {rtt_ms:g}"
                        wrong += compare(heard, corpus, rtt_ms / 1e3, head)
    if wrong:
        print(f"{wrong} texts are not the target's")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
