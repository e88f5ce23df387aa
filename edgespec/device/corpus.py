"""A corpus of the user's texts for lookup drafts (``draft.corpus``), stored in a mapped file.

Theory of operation. A retrieval draft (REST, arXiv 2311.08252; SuffixDecoding, 2411.04975; RASD,
Quan et al. 2025) finds the longest suffix of the output that the corpus contains too, and proposes
the tokens that follow it there. The corpus is stored backwards, each token as a big-endian 32-bit
number. Beside it stands the order of all its places by the ``CORPUS_LENGTH`` tokens that end there,
which is a suffix array of the text read backwards. Bytes compare as their tokens do, so one binary
search finds the place with the longest common suffix, and two more find all places that share it.
Of these places at most ``_SAMPLE``, evenly spread, are counted. A lookup in 10 million tokens takes
24 comparisons a search and no array library.

    file:  digest, 32 bytes | order, 4 bytes a token | tokens backwards, 4 bytes each

Ids are stored one higher, since 0 separates files and matches nothing. The digest covers the texts,
the vocabulary and the format. A store with another digest, or one that is cut off, is made anew. It
lies in the cache under a name that is derived from its list of files. The ``_MAX_STORES`` stores
that were used last are kept.
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edgespec.config import ConfigError
from edgespec.config.common import SetupError
from edgespec.config.files import TooLargeError, read_text, replace_file
from edgespec.core.protocol.text_lookup import CORPUS_LENGTH, RANKS
from edgespec.models.folders import cache_folder
from edgespec.telemetry.recording import RecordingError, is_recording, read_recording

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_CORPUS_BYTES: Final = 32 << 20
"""Most bytes of text in a corpus. Its store takes about 3 bytes on the disk for each of them, and
about 14 bytes of memory while it is made."""
_FORMAT: Final = "1"
_MIN_MATCH: Final = 2
_SAMPLE: Final = 64
_MAX_STORES: Final = 16
_CACHED_LOOKUPS: Final = 4096
_DIGEST_BYTES: Final = 32
_WORD_BYTES: Final = 4
# Characters in one piece of a text. Tokenizers take memory in proportion to their input.
_PIECE_CHARS: Final = 1 << 16
_PROGRESS_FROM_BYTES: Final = 1 << 20

Say = Callable[[str], None]
Encode = Callable[[str], Sequence[int]]
Content = str | bytes
"""Content of a text file, or of a recording: its committed ids, four bytes each, -1 between
texts."""


class StoredCorpus:
    """A ``Corpus`` in the bytes of a store, which stay mapped for the life of the process."""

    def __init__(self, content: memoryview | mmap.mmap) -> None:
        """Read the layout of a store. Raises ``ValueError`` if ``content`` cannot be one."""
        view = memoryview(content)
        self.length = (len(view) - _DIGEST_BYTES) // (2 * _WORD_BYTES)
        if len(view) != _DIGEST_BYTES + self.length * 2 * _WORD_BYTES or not self.length:
            raise ValueError(f"{len(view)} bytes are no store of a corpus")
        end = _DIGEST_BYTES + self.length * _WORD_BYTES
        self.digest = bytes(view[:_DIGEST_BYTES])
        self._order, self._tokens = view[_DIGEST_BYTES:end].cast("i"), view[end:]
        self.after = lru_cache(_CACHED_LOOKUPS)(self._after)
        """Cached lookup with the contract of ``Corpus.after``."""

    def _after(self, end: tuple[int, ...]) -> tuple[int, Sequence[tuple[int, float]]]:
        """Return the length of the longest text in the corpus that is a suffix of ``end``, and the
        tokens that follow it there with their shares, most frequent first. Both are empty below
        ``_MIN_MATCH``.

        At most ``_SAMPLE`` places of the suffix array are looked at, evenly spaced."""
        wanted = b"".join([(token + 1).to_bytes(_WORD_BYTES, "big") for token in reversed(end)])
        near, last = self._find_place(bisect_left, wanted), self.length - 1
        length = max(
            _count_common_words(wanted, self._read(self._order[at], len(wanted)))
            for at in (max(0, near - 1), min(near, last))
        )
        if length < _MIN_MATCH:
            return 0, ()
        shared = wanted[: length * _WORD_BYTES]
        first = self._find_place(bisect_left, shared)
        behind = self._find_place(bisect_right, shared)
        step = -(-(behind - first) // _SAMPLE)
        places = self._order[first:behind:step].tolist()
        counts = Counter([self._read(place - 1, _WORD_BYTES) for place in places])
        del counts[bytes(_WORD_BYTES)]  # A zero marks the end of a file.
        candidates = [
            (int.from_bytes(token, "big") - 1, count / len(places))
            for token, count in counts.most_common(RANKS)
        ]
        return (length, candidates) if candidates else (0, ())

    def _find_place(self, bisect: Callable[..., int], wanted: bytes) -> int:
        """Return the index at which ``wanted`` would stand in the order."""
        order, read, size = self._order, self._read, len(wanted)
        return bisect(order, wanted, key=lambda place: read(place, size))

    def _read(self, place: int, size: int) -> bytes:
        return bytes(self._tokens[place * _WORD_BYTES : place * _WORD_BYTES + size])


def _count_common_words(one: bytes, other: bytes) -> int:
    """Return the number of equal words at the beginning of two byte strings."""
    size = min(len(one), len(other)) // _WORD_BYTES * _WORD_BYTES
    while one[:size] != other[:size]:
        size -= _WORD_BYTES
    return size // _WORD_BYTES


def open_corpus(names: Sequence[str], vocabulary: str, encode: Encode, say: Say) -> StoredCorpus:
    """Return the store of these files and of all text files in these folders.

    It is made first if there is none or if the texts have changed; ``say`` is called with a line
    about that. A recording contributes the tokens that were committed.

    Args:
        names: Files and folders.
        vocabulary: Fingerprint of the tokenizer.
        encode: Encoder of that tokenizer.
        say: Called with lines of progress.

    Raises:
        ConfigError: A file cannot be used; the error names it, the value and the limit.
        SetupError: The store cannot be written.
    """
    texts = _read_all(names, vocabulary)
    digest = _hash_contents([vocabulary, *texts])
    listed = [str(Path(name).expanduser().absolute()) for name in names]
    folder = cache_folder() / "corpus"
    try:
        path = folder / _hash_contents([vocabulary, *listed]).hex()[:_DIGEST_BYTES]
        if (store := _open_store(path, digest)) is None:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, digest + _build_store(texts, encode, say))
            store = _open_store(path, digest)
    except OSError as error:
        raise SetupError(
            f"the store of draft.corpus cannot be written: {error.filename or folder}:"
            f" {error.strerror or error}\n  free some space, or set XDG_CACHE_HOME to another disk"
        ) from error
    assert store is not None
    _delete_old_stores(folder, path)
    return store


def _open_store(path: Path, digest: bytes) -> StoredCorpus | None:
    with suppress(FileNotFoundError, ValueError), path.open("rb") as file:
        store = StoredCorpus(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return store if store.digest == digest else None
    return None


def _delete_old_stores(folder: Path, used: Path) -> None:
    with suppress(OSError):  # Another process may be doing the same, or may own the files.
        used.touch()
        stores = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in stores[_MAX_STORES:]:
            path.unlink()


def _hash_contents(parts: Sequence[Content]) -> bytes:
    digest = hashlib.sha256(f"{_FORMAT} {sys.byteorder} {CORPUS_LENGTH}".encode())
    for part in parts:
        digest.update(hashlib.sha256(_to_bytes(part)).digest())
    return digest.digest()


# --- reading ------------------------------------------------------------------------------------


def _read_all(names: Sequence[str], vocabulary: str) -> list[Content]:
    """Return the texts of files and folders, in order. Raises ``ConfigError``."""
    texts, room = list[Content](), MAX_CORPUS_BYTES
    for path, listed in _list_files(names):
        try:
            text = _read(path, room, vocabulary)
        except TooLargeError as error:
            raise ConfigError(
                f"draft.corpus: {path}: {error}: a corpus has at most {MAX_CORPUS_BYTES} bytes"
            ) from None
        except UnicodeDecodeError as error:
            if listed:
                raise ConfigError(f"draft.corpus: {path} is not UTF-8 text: {error}") from None
            continue
        except RecordingError as error:
            raise ConfigError(f"draft.corpus: {error}") from None
        except OSError as error:
            raise ConfigError(f"draft.corpus: {path}: {error.strerror or error}") from None
        room -= len(_to_bytes(text))
        texts.append(text)
    if not any(texts):
        raise ConfigError(f"draft.corpus: {', '.join(names)}: there is no text")
    return texts


def _read(path: Path, max_bytes: int, vocabulary: str) -> Content:
    if not is_recording(path):
        return read_text(path, max_bytes)
    if (size := len(committed := _read_committed(path, vocabulary))) > max_bytes:
        raise TooLargeError(f"{size} bytes, but at most {max_bytes} are read")
    return committed


def _to_bytes(content: Content) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _read_committed(path: Path, vocabulary: str) -> bytes:
    """Return the committed ids of a recording, as 32-bit integers, with -1 around each text.

    Each text begins with up to ``CORPUS_LENGTH`` tokens of its prompt, which a lookup may match.
    The result is never empty, although a recording may have no text yet. Raises
    ``RecordingError``."""
    end = array("i", [-1])
    parts = [
        part
        for tokens, start in read_recording(path, vocabulary)
        for part in (end, tokens[max(0, start - CORPUS_LENGTH) :])
    ]
    return b"".join([*parts, end])


def _list_files(names: Sequence[str]) -> Iterator[tuple[Path, bool]]:
    """Yield each file, and whether it was named itself.

    A folder yields all files below it that are not hidden, by name."""
    for name in names:
        path = Path(name).expanduser()
        if not path.is_dir():
            yield path, True
            continue
        for below in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in below.relative_to(path).parts)
            if not hidden and below.is_file():
                yield below, False


# --- making a store -----------------------------------------------------------------------------


def _build_store(texts: Sequence[Content], encode: Encode, say: Say) -> bytes:
    """Return a store without its digest."""
    import numpy as np

    size = sum(map(len, texts))
    say(f"draft.corpus: {size / 1e6:.1f} MB in {len(texts)} files are indexed, once")
    report = say if size > _PROGRESS_FROM_BYTES else lambda text: None
    parts, done, percent = list[Any](), 0, 0
    for text in texts:
        if isinstance(text, bytes):
            parts.append(np.frombuffer(text, np.int32).astype(np.int64) + 1)
            done += len(text)
            continue
        for piece in _split_text(text):
            parts.append(np.asarray(encode(piece), np.int64) + 1)
            done += len(piece)
            if done * 10 // size > percent // 10:
                percent = done * 10 // size * 10
                report(f"draft.corpus: {percent} % read")
        parts.append(np.zeros(1, np.int64))
    backwards = np.concatenate(parts)[::-1]
    report(f"draft.corpus: {len(backwards):,} tokens are sorted")
    return _sort_places(backwards).tobytes() + backwards.astype(">u4").tobytes()


def _split_text(text: str) -> Iterator[str]:
    """Yield pieces of about ``_PIECE_CHARS`` characters, cut after an end of line if possible."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + _PIECE_CHARS) + 1
        end = end if end and start + _PIECE_CHARS < len(text) else start + _PIECE_CHARS
        yield text[start:end]
        start = end


def _sort_places(tokens: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return all places, ordered by the ``CORPUS_LENGTH`` tokens that begin there.

    Their ranks by one token are refined to ranks by two, four and more tokens, each time by pairs
    of the ranks before (prefix doubling, Manber and Myers 1990)."""
    import numpy as np

    ranks, known = tokens, 1
    while known < CORPUS_LENGTH:
        behind = np.zeros_like(ranks)
        behind[:-known] = ranks[known:] + 1
        ranks = np.unique(ranks * (int(behind.max()) + 1) + behind, return_inverse=True)[1]
        known *= 2
    return np.argsort(ranks, kind="stable").astype(np.int32)
