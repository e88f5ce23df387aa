"""Training text: the project's shared corpus if it exists, else this Python's own library.

Documents come in a seeded order, each with the name of its source. A document is held out for
validation if a hash of its text falls below ``HELD_OUT_SHARE``, so every stage of the recipe agrees
on the split without writing it down.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

USER = "<|user|>"
ASSISTANT = "<|assistant|>"
HELD_OUT_SHARE = 0.02

# Repetitions of each source in one pass over the whole: code and short instructions count more than
# their bytes, because the demo prompts look like them.
REPEATS = {
    "books_public_domain": 0.6,
    "python_peps": 0.7,
    "cpython311_lib": 1.6,
    "cpython311_language_topics": 1.0,
    "gsm8k_train": 1.5,
    "tldr_pages_en": 1.2,
    "tinyshakespeare": 0.5,
    "standard_library": 1.0,
}


@dataclass(frozen=True, slots=True)
class Document:
    source: str
    text: str

    @property
    def held_out(self) -> bool:
        return int.from_bytes(_digest(self.text, 4), "big") / 2**32 < HELD_OUT_SHARE


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


def documents(seed: int = 0) -> list[Document]:
    """Return all documents, repeated by source weight and shuffled by ``seed``.

    Raises ``FileNotFoundError`` if ``EDGESPEC_DATA`` names a folder without a corpus.
    """
    folder = Path(os.environ.get("EDGESPEC_DATA", "../shared/data")) / "corpus"
    if "EDGESPEC_DATA" in os.environ and not folder.is_dir():
        raise FileNotFoundError(f"EDGESPEC_DATA: there is no folder {folder}")
    found = list(_shared(folder)) if folder.is_dir() else list(_standard_library())
    if not found:
        raise FileNotFoundError(f"no training text in {folder} nor in the standard library")
    rng = random.Random(seed)
    chosen: list[Document] = []
    for document in found:
        repeats = REPEATS.get(document.source, 1.0)
        copies = int(repeats) + (rng.random() < repeats - int(repeats))
        chosen.extend([document] * (min(copies, 1) if document.held_out else copies))
    rng.shuffle(chosen)
    return chosen


def _shared(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.glob("*.txt.xz")):
        source = path.name.removesuffix(".txt.xz")
        with lzma.open(path, "rt", encoding="utf-8") as file:
            for text in file.read().split("<|doc|>\n")[1:]:
                # Whole books would make the held-out share a lottery, so they are cut into
                # chapters.
                for piece in _pieces(text.strip(), 60_000):
                    yield Document(source, _shaped(source, piece))


def _pieces(text: str, length: int) -> Iterator[str]:
    while len(text) > length:
        cut = text.rfind("\n\n", length // 2, length)
        cut = cut if cut > 0 else length
        yield text[:cut]
        text = text[cut:].lstrip()
    if text:
        yield text


def _shaped(source: str, text: str) -> str:
    """Turn question/answer and task/command pages into the chat form the bundled pair knows."""
    if source == "gsm8k_train":
        question, answer = text.split("Answer:", 1) if "Answer:" in text else (text, "")
        question = question.removeprefix("Question:").strip()
        answer = re.sub(r"<<[^>]*>>", "", answer).strip()
        return f"{USER}{question}{ASSISTANT}{answer}"
    # Half of the pages are shaped, chosen by their text alone.
    if source == "tldr_pages_en" and _digest(text, 1)[0] % 2:
        title = text.splitlines()[0].lstrip("# ").strip()
        rest = "\n".join(text.splitlines()[1:]).strip()
        return f"{USER}How do I use {title}?{ASSISTANT}{rest}"
    return text


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = set(path.relative_to(root).parts)
        if parts & {"site-packages", "test", "tests", "idlelib", "encodings", "__pycache__"}:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore").strip()
        if text:
            yield from (Document("standard_library", piece) for piece in _pieces(text, 60_000))
