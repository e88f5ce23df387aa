"""Which token ids a smaller draft keeps: a list of them, or those of a text."""

from __future__ import annotations

import re
from pathlib import Path

from edgespec.models.folders import ModelFolderError
from edgespec.models.tokenizer import TextTokenizer

MAX_FILE_BYTES = 64 << 20
# Long texts are encoded in pieces, each of whole lines.
_PIECE_CHARACTERS = 1 << 16


def read_kept_ids(path: Path, folder: Path) -> tuple[int, ...]:
    """The ids that the file at ``path`` names, ascending: it holds numbers (with spaces, commas or
    lines between; JSON's list will do), or else a text, whose tokens by the tokenizer in ``folder``
    are meant. Raises ``ModelFolderError`` naming the file."""
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise ModelFolderError(f"{path}: {size} bytes, but at most {MAX_FILE_BYTES} are read")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path}: not readable as text: {error}") from error
    if _holds_numbers(text):
        ids = {int(number) for number in re.findall(r"\d+", text)}
    else:
        ids = _ids_of(text, TextTokenizer(folder))
    if not ids:
        raise ModelFolderError(f"{path}: names no token to keep")
    return tuple(sorted(ids))


def _holds_numbers(text: str) -> bool:
    return re.fullmatch(r"[\d\s,\[\]]*", text, re.ASCII) is not None


def _ids_of(text: str, tokenizer: TextTokenizer) -> set[int]:
    ids: set[int] = set()
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        length += len(line)
        if length >= _PIECE_CHARACTERS:
            ids.update(tokenizer.encode("".join(piece)))
            piece, length = [], 0
    ids.update(tokenizer.encode("".join(piece)))
    return ids
