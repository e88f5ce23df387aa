"""A process with limits, which renders chat templates and holds tokenizers that verifiers lend.

A chat template is a program, and the patterns of a tokenizer are nearly one. jinja2's sandbox keeps
a template from the machine, but not from using up memory or time. So everything that does not come
with edgespec runs in a child process (``limited_process.py``). The child starts at the first use,
answers one question after the other, and is replaced if it was killed. A question costs some 0.2 ms
more than without the child. The child takes some 26 MiB, plus the usual memory of a tokenizer. It
imports neither a runtime for models nor anything of the network.

The two ends exchange frames: eight bytes with the length, and JSON. The child runs
``text_process.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, BinaryIO, Final

if TYPE_CHECKING:
    pass

TEMPLATE_BYTES: Final = 192 << 20
"""Limit on the data of a process that only renders templates."""
TEMPLATE_BYTES_IN_BUDGET: Final = 64 << 20
"""The same limit beside a draft with a memory budget."""
RESIDENT_BYTES: Final = 28 << 20
"""Usual resident memory of such a process, counted by memory plans."""
_CPU_S: Final = 5
"""Processor seconds for one question, in addition to those for its length (``_BYTES_PER_S``)."""
_START_CPU_S: Final = 30
"""Processor seconds to start: a vocabulary of 256 k tokens takes some 5 s to load."""
_BYTES_PER_S: Final = 200_000
"""Bytes of text that add one processor second to the limit. Tokenizers are five times as fast."""
_ANSWER_S: Final = 15.0
"""Seconds for one question, on a busy machine."""
_START_S: Final = 60.0
_MAX_FRAME: Final = 1 << 28
_LENGTH_BYTES: Final = 8


class TextWorkerError(RuntimeError):
    """The child did not answer: it took too long or too much memory, or cannot be started."""


class TextRefusedError(RuntimeError):
    """A template refuses its input, with its own message."""


class TextWorker:
    """One child process. Calls come from any thread and are answered one after the other.

    Args:
        script: The file that the child runs (``text_process.py``).
        most_bytes: Limit on the data of the child.
        folder: The tokenizer that the child loads; empty if it only renders templates.
    """

    def __init__(self, script: str, most_bytes: int = TEMPLATE_BYTES, folder: str = "") -> None:
        from edgespec.models.limited_process import LimitedProcesses

        self._script, self._folder, self.most_bytes = script, folder, most_bytes
        """The limit on data for a child that starts from now on."""
        self._processes = LimitedProcesses()
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = threading.Lock()
        weakref.finalize(self, self._processes.reap)

    def call(self, operation: str, *given: Any) -> Any:
        """Return the child's answer to one question: ``render`` a source with its variables, find
        the ``variables`` of a source, or a question about its tokenizer (``text_process.py``).

        Raises ``TextRefusedError``, ``TextWorkerError`` if there is no answer, and ``RuntimeError``
        with the message of any other error."""
        question = json.dumps([operation, *given]).encode()
        if not self._one_at_a_time.acquire(timeout=_ANSWER_S):
            raise TextWorkerError(f"others have been waited for longer than {_ANSWER_S:g} s")
        try:
            kind, answer = self._answer(question)
        finally:
            self._one_at_a_time.release()
        if kind == "refused":
            raise TextRefusedError(answer)
        if kind == "failed":
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        """End the child and the calls that wait for it. A second call does nothing."""
        self._processes.close()  # ends the question that is being answered
        with self._one_at_a_time:
            if self._process is not None:
                self._discard(self._process)

    def _answer(self, question: bytes) -> tuple[str, Any]:
        process = self._ensure_started()
        cpu_s = _CPU_S + len(question) // _BYTES_PER_S
        frame = self._exchange(process, question, _ANSWER_S * cpu_s / _CPU_S)
        if frame is None:
            self._discard(process)
            if self._processes.is_closed:
                raise TextWorkerError("this side is stopping")
            raise TextWorkerError(
                f"it takes more than the {cpu_s} s of processor time or the"
                f" {self.most_bytes >> 20} MiB that are given"
            )
        kind, answer = json.loads(frame)
        if kind == "failed" and answer == "":  # out of memory
            self._discard(process)
            answer = f"it takes more than the {self.most_bytes >> 20} MiB that are given"
        return kind, answer

    def _ensure_started(self) -> subprocess.Popen[bytes]:
        """Return the child, and start it if there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            self._discard(self._process)
        try:
            given = json.dumps([sys.path, self._folder, _START_CPU_S, _CPU_S, _BYTES_PER_S])
            process = self._processes.start(self._script, self.most_bytes, (given,))
        except OSError as error:
            raise TextWorkerError(f"no process can be started: {error}") from error
        if self._exchange(process, None, _START_S) is None:
            self._discard(process)
            raise TextWorkerError(
                f"its process does not start within {_START_CPU_S} s of processor time and"
                f" {self.most_bytes >> 20} MiB"
            )
        self._process = process
        return process

    def _exchange(
        self, process: subprocess.Popen[bytes], question: bytes | None, within_s: float
    ) -> bytes | None:
        """Return the answer to a question, or None if the child died or had to be killed.
        ``question`` None waits for the child to start."""
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(within_s, end)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            if question is not None:
                write_frame(process.stdin, question)
            answer = read_frame(process.stdout)
        except (OSError, ValueError):
            return None
        finally:
            timer.cancel()
        return None if late.is_set() else answer

    def _discard(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # it did not read the whole question
                    pass
        self._processes.forget(process)
        self._process = None


# --- frames --------------------------------------------------------------------------------------


def write_frame(sink: BinaryIO | Any, content: bytes) -> None:
    sink.write(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
    sink.flush()


def read_frame(source: BinaryIO | Any) -> bytes:
    """Return the next frame. Raises ``OSError`` if the other end has closed the pipe."""
    length = int.from_bytes(_read_exactly(source, _LENGTH_BYTES), "big")
    if length > _MAX_FRAME:
        raise OSError(f"a frame of {length} bytes, but at most {_MAX_FRAME} are read")
    return _read_exactly(source, length)


def _read_exactly(source: BinaryIO | Any, length: int) -> bytes:
    content: bytes = source.read(length)
    if len(content) < length:
        raise OSError("the other end has gone")
    return content
