"""Beginnings for the target to continue: questions, requests, code and prose of the corpus.

python -m tools.train_pair.beginnings build/prompts.jsonl

A draft is used on texts that begin like users' prompts, so beginnings look like these: whole
questions of the corpus, sentences put as a request, functions up to their docstring, plain cuts.
Only training documents are cut; no prompt of an evaluation set is among them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer

from edgespec.models.folders import BUNDLED_FOLDER
from tools.train_pair.corpus import ASSISTANT, USER, Document, documents

LONGEST = 320  # tokens of a beginning
CODE = ("cpython311_lib", "standard_library")
FUNCTION = re.compile(r'^ *(?:def|class) [^\n]+:\n +"""[^"]{8,600}"""\n', re.MULTILINE)
SENTENCE = re.compile(r"[A-Z][^.?!]{12,300}[.?!]")
# Share of each kind.
SHARES = {"question": 0.2, "request": 0.2, "function": 0.2, "cut": 0.4}


def question(text: str, dice: random.Random) -> str:
    """Return the user's part of a chat document, ready for the answer, or an empty string for
    another document."""
    user, mark, _ = text.partition(ASSISTANT)
    return user + mark if mark else ""


def request(text: str, dice: random.Random) -> str:
    """Return one to four consecutive sentences, put as a user's request."""
    plain = text.replace(USER, "").replace(ASSISTANT, " ")
    at = dice.randrange(len(plain))
    found = SENTENCE.findall(plain[at : at + 1500])[: dice.choice((1, 1, 2, 3, 4))]
    said = " ".join(" ".join(sentence.split()) for sentence in found)
    return f"{USER}{said}{ASSISTANT}" if said else ""


def function(text: str, dice: random.Random) -> str:
    """Return a function or class of Python up to the end of its docstring, often with lines before
    it."""
    found = FUNCTION.search(text, dice.randrange(len(text)))
    if found is None:
        return ""
    before = text[max(0, found.start() - dice.choice((0, 0, 200, 500))) : found.start()]
    return before[before.find("\n") + 1 :] + found.group()


def cut(text: str, dice: random.Random) -> str:
    """Return a stretch from the start of a line to the end of a word."""
    at = text.rfind("\n", 0, dice.randrange(len(text))) + 1
    end = at + dice.randint(20, 400)
    while end < len(text) and not text[end].isspace():
        end += 1
    return text[at:end]


KINDS = {"question": question, "request": request, "function": function, "cut": cut}


class Beginnings(Iterator[str]):
    """Endless beginnings of 4 to ``LONGEST`` tokens, drawn by ``seed``."""

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, seed: int) -> None:
        self._dice = random.Random(seed)
        self._tokenizer = tokenizer
        texts: dict[str, list[str]] = defaultdict(list)
        for document in documents:
            if document.text:
                texts[document.source].append(document.text)
        code = [texts[source] for source in CODE if source in texts]
        chats = [t for found in texts.values() for t in found if ASSISTANT in t]
        # A source is drawn first, then a text of it, so that a few long books count as much as
        # thousands of short pages.
        self._groups = {"question": [chats] if chats else [], "function": code}
        self._all = list(texts.values())
        if not self._all:
            raise ValueError("there are 0 documents to cut beginnings from, at least 1 is needed")

    def __next__(self) -> str:
        while True:
            (kind,) = self._dice.choices(list(SHARES), list(SHARES.values()))
            groups = self._groups.get(kind, self._all)
            if not groups:
                continue
            text = KINDS[kind](self._dice.choice(self._dice.choice(groups)), self._dice)
            if 4 <= len(self._tokenizer.encode(text).ids) <= LONGEST:
                return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = [document for document in documents() if not document.held_out]
    sizes = Counter[str]()
    for document in found:
        sizes[document.source] += len(document.text)
    shares = ", ".join(f"{source} {size / 1e6:.1f}" for source, size in sizes.most_common())
    print(f"beginnings are cut from (million characters): {shares}")
    tokenizer = Tokenizer.from_file(str(BUNDLED_FOLDER / "target" / "tokenizer.json"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", encoding="utf-8") as file:
        for text in islice(Beginnings(found, tokenizer, args.seed), args.count):
            file.write(json.dumps({"prompt": text}) + "\n")


if __name__ == "__main__":
    main()
