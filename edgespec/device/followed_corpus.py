"""The corpus of a device (``draft.corpus``), which follows its files while they change.

Theory of operation. The store of all texts is made once and lies in the cache, under a name that is
derived from the list of files and folders. It is mapped, never changed, and used again at the next
start. Texts that changed or came since it was made are in a second, small store in memory (the
*layer*), and texts that are gone are switched off. A lookup takes the longer match of the two. The
layer is made anew at a change, from tokens that are kept. When it holds more than
``_LAYER_TOKENS``, or more than half of the store is switched off, the store is made anew, for which
only new texts are tokenized. All of that happens in ``refresh``, which a thread calls; what lookups
read is exchanged in one step. So no generation waits, and one that runs already drafts from the
changed files.

A text is known by the hash of its content, so a moved file costs nothing. A recording and what is
no regular file, such as a pipe, are read once. The ``_MAX_STORES`` stores that were used last are
kept.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edgespec.config import ConfigError
from edgespec.config.common import SetupError
from edgespec.config.files import TooLargeError, read_bytes, replace_file
from edgespec.core.protocol.text_lookup import CORPUS_LENGTH, FoundText
from edgespec.device.corpus import (
    HASH_BYTES,
    StoredCorpus,
    build_store,
    hash_text,
    store_identity,
)
from edgespec.device.corpus_files import (
    MAX_CORPUS_BYTES,
    UNREADABLE,
    VANISHED,
    CorpusFolders,
    FoundFiles,
    SkippedFileError,
    Stamp,
    describe_files,
    is_text,
    read_file,
)
from edgespec.models.folders import cache_folder
from edgespec.telemetry.recording import RecordingError, is_recording, read_recording

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_STORES: Final = 16
_LAYER_TOKENS: Final = 1 << 17
_PROGRESS_FROM_BYTES: Final = 1 << 20
# Characters in one piece of a text. Tokenizers take memory in proportion to their input, and a
# prompt that is tokenized at the same time waits for a piece.
_PIECE_CHARS: Final = 1 << 14
_LEAST_PAUSE_S: Final = 1.0
_PAUSE_FACTOR: Final = 10.0
"""The pause between two looks is at least this many times as long as the last one took, so they
take a tenth of one processor at most."""
_PASSING: Final = (UNREADABLE, VANISHED)
"""Reasons that may pass without a change of the file."""
_EMPTY: Final = hash_text(b"")
_log = logging.getLogger(__name__)

Say = Callable[[str], None]
Encode = Callable[[str], Sequence[int]]


class FollowedCorpus:
    """The texts of files and folders, as a ``Corpus`` that may be brought up to date.

    ``after`` is called by one thread, ``refresh`` by another.

    Args:
        names: Files and folders.
        vocabulary: Fingerprint of the tokenizer.
        encode: Encoder of that tokenizer.
        say: Called with lines of progress while the corpus is made.
        max_bytes: Most bytes of text.

    Raises:
        ConfigError: A file that was named cannot be used; the error names it, the value and the
            limit. Or there is no text at all.
        SetupError: The store cannot be written.
    """

    def __init__(
        self,
        names: Sequence[str],
        vocabulary: str,
        encode: Encode,
        say: Say,
        max_bytes: int = MAX_CORPUS_BYTES,
    ) -> None:
        self._vocabulary, self._encode, self._most_bytes = vocabulary, encode, max_bytes
        self._identity = store_identity(vocabulary)
        self._folders = CorpusFolders(names, max_bytes)
        listed = [str(Path(name).expanduser().absolute()) for name in names]
        self._path = cache_folder() / "corpus" / _name_store(vocabulary, listed)
        self._known: dict[Path, tuple[Stamp, bytes | str]] = {}
        """The hash of each file's text as it was read last, or the reason why it is left out."""
        self._read_once: set[Path] = set()
        """Named files that are not read again."""
        self._wanted: set[bytes] = set()
        """Hashes of the texts that lookups read."""
        self._room_bytes = 0
        """Bytes that further named files may have, during ``_update``."""
        self._layer_texts: dict[bytes, NDArray[np.int32]] = {}
        self._store = _open_store(self._path, self._identity)
        self._layers: tuple[StoredCorpus, ...] = ()
        """Stores that lookups read, the latest texts first."""
        self._closed = threading.Event()
        self._running = threading.Lock()
        self._next_at_s = 0.0
        self.summary = ""
        """The number of files, and how many are left out for which reason."""
        try:
            self._update(say, is_first=True)
        except OSError as error:
            raise SetupError(
                f"the store of draft.corpus cannot be written: {error.filename or self._path}:"
                f" {error.strerror or error}\n  free some space, or set XDG_CACHE_HOME to another"
                " disk"
            ) from error
        _delete_old_stores(self._path)
        self._next_at_s = time.monotonic() + _LEAST_PAUSE_S

    def after(self, end: tuple[int, ...]) -> tuple[int, Sequence[tuple[int, float]]]:
        """Return the longest match, with the contract of ``Corpus.after``. Of equally long ones it
        is the one in the texts that changed last."""
        best: tuple[int, Sequence[tuple[int, float]]] = (0, ())
        for layer in self._layers:
            if (found := layer.after(end))[0] > best[0]:
                best = found
        return best

    def find_text(self, part: tuple[int, ...]) -> FoundText | None:
        """Return a text that contains ``part``, with the contract of ``Corpus.find_text``. Texts
        that changed last come first."""
        for layer in self._layers:
            if (found := layer.find_text(part)) is not None:
                return found
        return None

    @property
    def is_due(self) -> bool:
        """Whether it is time to look for changes. Looking takes a tenth of the time at most."""
        return not self._running.locked() and time.monotonic() >= self._next_at_s

    def refresh(self) -> bool:
        """Look for changed files, and return whether lookups now read other texts. It may take as
        long as tokenizing all that changed. ``close`` ends it early.

        A failure is logged, and leaves the texts as they are."""
        with self._running:
            begun_s = time.monotonic()
            try:
                return self._update(_log_progress, is_first=False)
            except (OSError, MemoryError, ValueError) as error:
                _log.warning("draft.corpus stays as it was: %s", error)
                return False
            finally:
                ended_s = time.monotonic()
                pause_s = max(_LEAST_PAUSE_S, _PAUSE_FACTOR * (ended_s - begun_s))
                self._next_at_s = ended_s + pause_s

    def close(self) -> None:
        """End a ``refresh`` that runs, and let none begin."""
        self._closed.set()

    def _update(self, say: Say, *, is_first: bool) -> bool:
        found = self._find_files(is_first)
        held = set() if self._store is None else set(self._store.token_counts)
        new = _NewTexts(self._encode, say)
        self._room_bytes = self._most_bytes
        known, skipped = dict[Path, tuple[Stamp, bytes | str]](), Counter(found.skipped)
        for path, stamp in found.stamps.items():
            if self._closed.is_set():
                return False
            is_named = path in found.named
            if self._is_read_already(path, stamp):
                known[path] = self._known[path]
            else:
                known[path] = stamp, self._read(path, is_named, is_first, held, new)
            if is_named:
                self._room_bytes -= stamp.size_bytes
            if isinstance(reason := known[path][1], str):
                skipped[reason] += 1
        wanted = {one for _, one in known.values() if isinstance(one, bytes)} - {_EMPTY}
        if is_first and not wanted:
            names = ", ".join(map(str, self._folders.paths))
            files = describe_files(0, skipped)
            raise ConfigError(f"draft.corpus: {names}: there is no text ({files})")
        self.summary = describe_files(len(known) - sum(map(_is_reason, known.values())), skipped)
        if new.texts or is_first:
            new.finish(self.summary)
        self._known = known
        if wanted == self._wanted:
            return False
        texts = {**self._layer_texts, **new.texts}
        self._layer_texts = {one: ids for one, ids in texts.items() if one in wanted - held}
        self._exchange(wanted)
        self._wanted = wanted
        return True

    def _find_files(self, is_first: bool) -> FoundFiles:
        try:
            return self._folders.find_files(all_named=is_first)
        except OSError as error:
            name = error.filename or self._folders.paths[0]
            raise ConfigError(f"draft.corpus: {name}: {error.strerror or error}") from None

    def _is_read_already(self, path: Path, stamp: Stamp) -> bool:
        if path not in self._known or self._known[path][1] in _PASSING:
            return False
        return path in self._read_once or self._known[path][0] == stamp

    def _read(
        self, path: Path, is_named: bool, is_first: bool, held: set[bytes], new: _NewTexts
    ) -> bytes | str:
        """Return the hash of a file's text, which is tokenized unless it is there already; or the
        reason why the file is left out. Raises ``ConfigError`` for a named file at the start."""
        try:
            if not is_named:
                content = read_file(path)
            elif is_recording(path):
                self._read_once.add(path)
                ids = _read_committed(path, self._vocabulary)
                return new.add_ids(ids, held, self._layer_texts)
            else:
                content = self._read_named(path)
        except SkippedFileError as error:
            return str(error)
        except (ConfigError, OSError) as error:
            if is_first and isinstance(error, OSError):
                why = f"draft.corpus: {path}: {error.strerror or error}"
                raise ConfigError(why) from None
            if is_first:
                raise
            _log.info("%s", error)
            return UNREADABLE
        return new.add(content, held, self._layer_texts)

    def _read_named(self, path: Path) -> bytes:
        """Return the content of a file that the user named. Raises ``ConfigError`` and
        ``OSError``."""
        try:
            content = read_bytes(path, max(0, self._room_bytes))
        except TooLargeError as error:
            raise ConfigError(
                f"draft.corpus: {path}: {error}: a corpus has at most {self._most_bytes} bytes"
            ) from None
        if not path.is_file():
            self._read_once.add(path)
            self._room_bytes -= len(content)
        if not is_text(content):
            raise ConfigError(f"draft.corpus: {path} is not UTF-8 text")
        return content

    def _exchange(self, wanted: set[bytes]) -> None:
        """Let lookups read the texts ``wanted``. Raises ``OSError`` if no store can be written."""
        store, layer = self._store, self._layer_texts
        layer_tokens = sum(map(len, layer.values()))
        off_tokens = 0
        if store is not None:
            counts = store.token_counts
            off_tokens = sum(count for one, count in counts.items() if one not in wanted)
        is_stale = off_tokens > max(_LAYER_TOKENS, (0 if store is None else store.length) // 2)
        if store is None or layer_tokens > _LAYER_TOKENS or is_stale:
            texts = {} if store is None else store.read_tokens()
            texts = {one: ids for one, ids in texts.items() if one in wanted} | layer
            if not texts:
                self._layers = ()
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, build_store(self._identity, texts))
            store = self._store = _open_store(self._path, self._identity)
            assert store is not None
            self._layer_texts = layer = {}
        layers = [store.only(wanted)]
        if layer:
            content = build_store(self._identity, layer)
            layers.insert(0, StoredCorpus(content, self._identity))
        self._layers = tuple(layers)


def _is_reason(known: tuple[Stamp, bytes | str]) -> bool:
    return isinstance(known[1], str)


def _log_progress(text: str) -> None:
    _log.info("%s", text)


class _NewTexts:
    """Texts that are tokenized now, by their hash."""

    def __init__(self, encode: Encode, say: Say) -> None:
        self.texts: dict[bytes, NDArray[np.int32]] = {}
        self._encode, self._say = encode, say
        self._bytes = self._announced_bytes = 0

    def add(
        self, content: bytes, held: set[bytes], others: Mapping[bytes, NDArray[np.int32]]
    ) -> bytes:
        """Return the hash of a text, and tokenize it unless it is held elsewhere."""
        import numpy as np

        digest = hash_text(content)
        if digest == _EMPTY or digest in held or digest in others or digest in self.texts:
            return digest
        text = content.decode().replace("\r\n", "\n").replace("\r", "\n")
        parts = [np.asarray(self._encode(piece), np.int32) for piece in _split_text(text)]
        self.texts[digest] = np.concatenate([*parts, np.zeros(0, np.int32)])
        self._bytes += len(content)
        if self._bytes - self._announced_bytes > _PROGRESS_FROM_BYTES:
            self._announced_bytes = self._bytes
            self._say(f"draft.corpus: {_show_size(self._bytes)} are read")
        return digest

    def add_ids(
        self, ids: NDArray[np.int32], held: set[bytes], others: Mapping[bytes, NDArray[np.int32]]
    ) -> bytes:
        """Return the hash of a text that is tokenized already."""
        digest = hash_text(ids.tobytes())
        if digest not in held and digest not in others:
            self.texts[digest] = ids
            self._bytes += 4 * len(ids)
        return digest

    def finish(self, summary: str) -> None:
        """Call ``say`` with the number of files if any text was new."""
        if self.texts:
            self._say(f"draft.corpus: {summary}; {_show_size(self._bytes)} of text are new")


def _show_size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{-(-size_bytes // 1000)} kB"


def _split_text(text: str) -> Iterator[str]:
    """Yield pieces of about ``_PIECE_CHARS`` characters, cut after an end of line if possible."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + _PIECE_CHARS) + 1
        end = end if end and start + _PIECE_CHARS < len(text) else start + _PIECE_CHARS
        yield text[start:end]
        start = end


def _read_committed(path: Path, vocabulary: str) -> NDArray[np.int32]:
    """Return the committed ids of a recording, with -1 around each text.

    Each text begins with up to ``CORPUS_LENGTH`` tokens of its prompt, which a lookup may match.
    Raises ``ConfigError``."""
    import numpy as np

    end = array("i", [-1])
    try:
        rows = read_recording(path, vocabulary)
    except RecordingError as error:
        raise ConfigError(f"draft.corpus: {error}") from None
    parts = [
        part for tokens, start in rows for part in (end, tokens[max(0, start - CORPUS_LENGTH) :])
    ]
    return np.frombuffer(b"".join([*parts, end]), np.int32)


# --- stores in the cache --------------------------------------------------------------------------


def _name_store(vocabulary: str, listed: Sequence[str]) -> str:
    digest = hashlib.sha256(store_identity(vocabulary))
    for name in listed:
        digest.update(hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    return digest.hexdigest()[: 2 * HASH_BYTES]


def _open_store(path: Path, identity: bytes) -> StoredCorpus | None:
    with suppress(FileNotFoundError, ValueError), path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return StoredCorpus(content, identity)
    return None


def _delete_old_stores(used: Path) -> None:
    with suppress(OSError):  # Another process may be doing the same, or may own the files.
        used.touch()
        stores = sorted(used.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in stores[_MAX_STORES:]:
            path.unlink()
