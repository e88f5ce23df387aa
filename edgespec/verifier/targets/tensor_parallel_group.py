"""Rank 0's hold on the processes of the other ranks: start them, tell them, notice their end.

Theory of operation. A rank is a child process with three pipes: commands in, answers out, and one
that carries nothing and ends with this process, however that ends; the child ends with it. What is
written to a command pipe is "broadcast" without a collective, so a rank that is gone is noticed by
the operating system at once. One thread starts the ranks, reads all answers and looks at the clock;
it feeds ``PassAgreement``, and the first time that says ``lost`` it tells whoever asked to be told.
After that every call raises ``TargetLostError``, and the verifier ends. The ranks are killed when
that thread ends (``tensor_parallel_rank.py``), even those that hang or were stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from edgespec.core.ports import PassRequest, TargetLostError
from edgespec.verifier.targets.tensor_parallel_agreement import PassAgreement, Verdict
from edgespec.verifier.targets.tensor_parallel_messages import (
    LENGTH_BYTES,
    FromRank,
    Loaded,
    LoadModel,
    MessageError,
    PassFailed,
    RankFailed,
    Ready,
    RunPass,
    ToRank,
    body_length,
    decode,
    encode,
)

RANK_MODULE = "edgespec.verifier.targets.tensor_parallel_rank"
_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
_ENDS_WITHIN_S = 3.0
_READ_BYTES = 1 << 16
_Result = TypeVar("_Result")


@dataclass(slots=True)
class RankProcess:
    """One of the other ranks."""

    rank: int
    process: subprocess.Popen[bytes]
    life: int
    """This process's end of the pipe that carries nothing."""
    unread: bytearray = field(default_factory=bytearray)

    @property
    def commands(self) -> int:
        """The file descriptor to write to."""
        assert self.process.stdin is not None
        return self.process.stdin.fileno()

    @property
    def answers(self) -> int:
        """The file descriptor to read from."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def close(self, within_s: float) -> None:
        """End the process, by force when it takes longer than ``within_s``."""
        with contextlib.suppress(OSError):
            os.close(self.life)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def end_words(self) -> str:
        """How the process ended, for people; it has closed its pipes."""
        who = f"(process {self.process.pid})"
        try:
            code = self.process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            return f"{who} closed its pipe"
        return f"{who} " + (f"was killed by signal {-code}" if code < 0 else f"ended: code {code}")


class RankGroup:
    """Ranks 1 .. ``world_size`` - 1, each a child process. Calls come from one thread at a time."""

    def __init__(
        self,
        world_size: int,
        pass_within_s: float,
        *,
        setting: str = "tensor_parallel.pass_within_s",
        clock: Callable[[], float] = time.monotonic,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self._clock, self._look_every_s = clock, look_every_s
        others = frozenset(range(1, world_size))
        self._agreement = PassAgreement(others, pass_within_s, setting=setting)
        self._changed = threading.Condition()
        self._heard: dict[type[FromRank], set[int]] = {Loaded: set(), Ready: set()}
        self._tell: list[Callable[[str], None]] = []
        self._stopping = False
        self._wanted: tuple[int, ...] = ()
        self._ranks: list[RankProcess] = []
        self._started = threading.Event()
        self._not_started: Exception | None = None
        self._watch = threading.Thread(target=self._watch_all, name="edgespec-ranks", daemon=True)

    def start(self, messages: Sequence[LoadModel]) -> None:
        """One process for each message. Raises ``OSError`` when there can be none."""
        self._wanted = tuple(message.rank for message in messages)
        self._watch.start()
        self._started.wait()
        if self._not_started is not None:
            raise self._not_started
        for message, rank in zip(messages, self._ranks, strict=True):
            self._send(rank, encode(message))

    @property
    def lost(self) -> str | None:
        """Why the ranks are out of step, or None."""
        with self._changed:
            return self._agreement.lost

    def lost_within(self, within_s: float) -> str | None:
        """``lost``, for which this waits so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._agreement.lost, within_s)
            return self._agreement.lost

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """``tell`` is called once, from a thread of this group, or now if it is late."""
        with self._changed:
            if self._agreement.lost is None:
                self._tell.append(tell)
                return
        tell(self._agreement.lost)

    def wait_for(self, kind: type[Loaded] | type[Ready], within_s: float) -> None:
        """Until all other ranks have said so. Raises ``TargetLostError``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._agreement.lost or len(self._heard[kind]) == len(self._ranks),
                within_s,
            )
            silent = {rank.rank for rank in self._ranks} - self._heard[kind]
            if self._agreement.lost is None and silent:
                word = kind.__name__.lower()
                self._agreement.gone(min(silent), f"was not {word} after {within_s:g} s")
        self._check()

    def tell_all(self, message: ToRank) -> None:
        """Send a command that needs no answer. Raises ``TargetLostError``."""
        self._check()
        body = encode(message)
        for rank in self._ranks:
            self._send(rank, body)

    def run_pass(
        self,
        batch: Sequence[PassRequest],
        work: Callable[[], _Result],
        collectives: Callable[[], int],
    ) -> _Result:
        """Have every rank run the pass, here by ``work``; ``collectives`` counts this rank's.

        Raises what ``work`` raises when it was the same everywhere, else ``TargetLostError``.
        """
        self._check()
        with self._changed:
            number = self._agreement.began(self._clock())
        before = collectives()
        try:
            self.tell_all(RunPass(number, tuple(batch)))
            result = work()
        except Exception as error:
            self._settle(collectives() - before, error)
            raise
        with self._changed:
            self._agreement.ended()
        self._check()
        return result

    def close(self) -> None:
        """End the other ranks; never raises."""
        self._stopping = True
        if self._watch.is_alive():
            self._watch.join()
        for rank in self._ranks:
            rank.close(_ENDS_WITHIN_S)
        self._ranks.clear()

    # --- within a call ---------------------------------------------------------------------

    def _settle(self, collectives: int, error: Exception) -> None:
        """Wait until it is clear whether all ranks failed alike. Raises ``TargetLostError``."""
        with self._changed:
            reason = f"{type(error).__name__}: {error}"
            self._agreement.failed(collectives, reason, self._clock())
            while self._agreement.verdict is Verdict.WAIT:
                self._changed.wait(self._look_every_s)
                self._agreement.look(self._clock())
        self._check(error)

    def _check(self, cause: Exception | None = None) -> None:
        if (why := self.lost) is not None:
            raise TargetLostError(why) from cause

    def _send(self, rank: RankProcess, body: bytes) -> None:
        view = memoryview(body)
        until = self._clock() + self._agreement.pass_within_s
        try:
            while view:
                try:
                    view = view[os.write(rank.commands, view) :]
                except BlockingIOError:
                    self._wait_to_write(rank, until)
        except OSError as error:
            with self._changed:
                if self._agreement.lost is None:
                    self._agreement.gone(rank.rank, rank.end_words())
            self._check(error)

    def _wait_to_write(self, rank: RankProcess, until: float) -> None:
        """The pipe is full, because the rank is busy, or hangs."""
        room = select.poll()
        room.register(rank.commands, select.POLLOUT)
        room.poll(1e3 * self._look_every_s)
        if self._clock() >= until:
            with self._changed:
                self._agreement.gone(
                    rank.rank,
                    f"took no command for {self._agreement.pass_within_s:g} s"
                    f" ({self._agreement.setting})",
                )
        self._check()

    # --- the watching thread ---------------------------------------------------------------

    def _watch_all(self) -> None:
        try:
            for one in self._wanted:
                self._ranks.append(_start_rank(one))
        except Exception as error:
            self._not_started = error
            return
        finally:
            self._started.set()
        try:
            with selectors.DefaultSelector() as selector:
                for rank in self._ranks:
                    selector.register(rank.answers, selectors.EVENT_READ, rank)
                while not self._stopping:
                    if self._is_lost_after(selector.select(self._look_every_s)):
                        break
        except Exception as error:  # nobody may wait for a thread that is not there
            _LOG.exception("watching the ranks failed")
            with self._changed:
                self._agreement.gone(0, f"cannot watch the others: {error}")
        if not self._stopping:
            self._announce()

    def _is_lost_after(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> bool:
        for key, _ in ready:
            self._read(key.data)
        with self._changed:
            self._agreement.look(self._clock())
            self._changed.notify_all()
            return self._agreement.lost is not None

    def _read(self, rank: RankProcess) -> None:
        data = os.read(rank.answers, _READ_BYTES)
        if not data:
            if not self._stopping:
                words = rank.end_words()
                with self._changed:
                    self._agreement.gone(rank.rank, words)
            return
        rank.unread += data
        while len(rank.unread) >= LENGTH_BYTES:
            end = LENGTH_BYTES + body_length(bytes(rank.unread[:LENGTH_BYTES]))
            if len(rank.unread) < end:
                break
            message = decode(bytes(rank.unread[LENGTH_BYTES:end]))
            del rank.unread[:end]
            self._hear(rank.rank, message)

    def _hear(self, rank: int, message: ToRank | FromRank) -> None:
        with self._changed:
            match message:
                case Loaded() | Ready():
                    self._heard[type(message)].add(rank)
                case PassFailed():
                    self._agreement.reported(rank, message, self._clock())
                case RankFailed(reason):
                    self._agreement.gone(rank, f"failed: {reason}")
                case _:
                    raise MessageError(f"rank {rank} sent a {type(message).__name__}")

    def _announce(self) -> None:
        with self._changed:
            why, tell = self._agreement.lost or "", self._tell
            self._tell = []
            self._changed.notify_all()
        for one in tell:
            one(why)


def _start_rank(rank: int) -> RankProcess:
    """A child that holds the other ends of three pipes and nothing else of ours."""
    life_read, life_write = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE, str(life_read)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(life_read,),
            # One bar that shows how far loading is will do.
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            # A Ctrl-C in the terminal is rank 0's to heed.
            start_new_session=True,
        )
    except OSError:
        os.close(life_write)
        raise
    finally:
        os.close(life_read)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return RankProcess(rank, process, life_write)
