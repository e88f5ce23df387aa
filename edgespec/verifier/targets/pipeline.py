"""One target model whose layers lie on several processes of this host, one behind another.

Experimental. Every stage but the last is a child process. The last one is this process, which
serves, samples, and tells the others each call (``open``, ``run_pass``, ``keep``, ``close``) over a
pipe, in order. Hidden states go from stage to stage on their own way (``pipeline_stage.py``).

What the last stage refuses is refused before the others are told. When a pass raises before the
hidden states have come through, a stage ends, or a call takes longer than ``pass_within_s``, some
stage may hold keys that another lacks: then all stages are *lost*. They are killed, which ends
whatever waits for them, and every further call raises ``TargetLostError``. So the verifier ends,
and its devices resume elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from transformers import AutoConfig

from edgespec.core.ports import PassRequest, TargetLostError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.pipeline_stage import (
    LOAD_WITHIN_S,
    PipelineError,
    StageShare,
    check_stageable,
    join_stages,
    leave_stages,
)
from edgespec.verifier.targets.torch_target import TorchTarget

_PROGRAM = (sys.executable, "-m", "edgespec.verifier.targets.pipeline")
_LOG = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.5
_WHY_WITHIN_S = 5.0
"""A stage's end is seen in a broken link sooner than its reason."""
_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


@dataclass(frozen=True, slots=True)
class StageOptions:
    rank: int
    """In the process group. Rank r > 0 is the r-th stage, rank 0 is the last."""
    stages: int
    port: int
    """Where the stages meet, on the loopback interface."""
    delay_s: float
    target: dict[str, Any]


def pipeline_target(
    path: str,
    *,
    stages: int,
    delay_ms: float = 0.0,
    pass_within_s: float = 300.0,
    device: str = "auto",
    **options: Any,
) -> PipelineTarget:
    """A ``TorchTarget`` with these options over ``stages`` processes, on CPUs. ``delay_ms`` is
    added to each link between two of them, one way.

    Raises as that does, ``PipelineError`` when the model or an option does not go with stages, and
    ``TargetLostError`` when a stage does not come up.
    """
    if device not in ("auto", "cpu"):
        raise PipelineError(
            f"device is {device!r}, but with pipeline.stages {stages} must be auto or cpu: stages"
            " compute on CPUs so far"
        )
    if options.get("quantize"):
        raise PipelineError(
            f"quantize is {options['quantize']!r}, but pipeline.stages {stages} cuts plain weights"
            " alone"
        )
    if options.get("pool_budget") is not None:
        raise PipelineError(
            "kv_budget and gpu_memory_utilization size the cache of one process, but"
            f" pipeline.stages is {stages}; give limits.max_cached_tokens instead"
        )
    check_stageable(AutoConfig.from_pretrained(path, trust_remote_code=False), stages)
    every = {"path": path, **options, "device": "cpu"}
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    others = [StageOptions(rank, stages, port, delay_ms / 1e3, every) for rank in range(1, stages)]
    processes = StageProcesses(others, pass_within_s)

    def build() -> PipelineTarget:
        join = partial(join_stages, 0, stages, port, listener.detach())
        return PipelineTarget(StageShare(0, stages, join, delay_ms / 1e3), processes, **every)

    try:
        processes.start()
        return _unless_lost(build, processes)
    except BaseException:
        processes.close()
        raise


class PipelineTarget(TorchTarget):
    """The last stage, which everybody talks to. ``close_stages`` ends the others."""

    def __init__(self, share: StageShare, processes: StageProcesses, **options: Any) -> None:
        # Until all are built, each stage makes the same calls by itself and is not told of any.
        self._processes: StageProcesses | None = None
        super().__init__(share=share, **options)
        processes.wait_until_ready()
        self._share, self._processes = share, processes

    @property
    def mode(self) -> str:
        return f"{super().mode}, layers over {self._share.world_size} stages (experimental)"

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        super().open(key, prompt_length, sampling, text)
        self._others.tell("open", key, prompt_length, tuple(text))

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        super().keep(key, nodes)
        self._others.tell("keep", key, tuple(nodes))

    def close(self, key: str) -> None:
        super().close(key)
        self._others.tell("close", key)

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """``tell`` is called once, from some thread, with the reason why the stages are lost."""
        self._others.loss.add_done_callback(lambda loss: tell(loss.result()))

    def close_stages(self) -> None:
        """End the other stages and leave the process group. The target is of no use then."""
        self._others.close()
        leave_stages()

    @property
    def _others(self) -> StageProcesses:
        assert self._processes is not None
        return self._processes

    def _run(self, batch: Sequence[PassRequest]) -> torch.Tensor:
        if self._processes is None:
            return super()._run(batch)
        self._share.received = False
        with self._processes.pass_over(batch, lambda: self._share.received):
            return super()._run(batch)


class StageProcesses:
    """The stages before the last one, each a child process. Calls come from one thread at a time.

    A thread of its own starts the children, reads what they say and looks at the clock. Where the
    system can, it kills them when that thread ends, in whatever way this process ended.
    """

    def __init__(
        self,
        stages: Sequence[StageOptions],
        pass_within_s: float,
        *,
        program: Sequence[str] = _PROGRAM,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self.loss: Future[str] = Future()
        """Why the stages cannot go on, once they cannot."""
        self._wanted, self._pass_within_s = stages, pass_within_s
        self._program, self._look_every_s = program, look_every_s
        self._children: dict[Connection, _Child] = {}
        self._silent = {one.rank for one in stages}
        self._ready: Future[None] = Future()
        self._busy_since: float | None = None
        self._closing = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="edgespec-stages", daemon=True)

    def start(self) -> None:
        """Raises ``TargetLostError`` when there can be no processes."""
        self._thread.start()
        self._started.wait()
        self._check()

    def wait_until_ready(self, within_s: float = LOAD_WITHIN_S) -> None:
        """Until all have built their target. Raises ``TargetLostError``."""
        if not _one_of(self._ready, self.loss, within_s=within_s):
            self._lose(f"stage {min(self._silent)} was not ready after {within_s:g} s")
        self._check()

    def tell(self, method: str, *arguments: Any) -> None:
        """Have every stage call that method of its target. Raises ``TargetLostError``."""
        self._check()
        began = self._busy_since is None
        self._busy_since = self._busy_since or time.monotonic()
        body = pickle.dumps((method, *arguments))
        try:
            for link in self._children:
                link.send_bytes(body)
        except OSError as error:
            self._fail(error)
        finally:
            if began:
                self._busy_since = None

    @contextlib.contextmanager
    def pass_over(
        self, batch: Sequence[PassRequest], received: Callable[[], bool]
    ) -> Iterator[None]:
        """Have every stage run the pass, beside what is done within this context. When that raises
        though the last stage has ``received`` what it waits for, the others have run the pass to
        its end, so it may be tried again; else raises ``TargetLostError``."""
        self._busy_since = time.monotonic()
        try:
            self.tell("run_pass", tuple(batch))
            yield
        except TargetLostError:
            raise
        except Exception as error:
            if not received():
                self._fail(error)
            raise
        finally:
            self._busy_since = None
        self._check()

    def close(self) -> None:
        """End the stages. Never raises."""
        self._closing = True
        if self._thread.is_alive():
            self._thread.join()
        for link, child in self._children.items():
            child.process.kill()
            child.process.wait()
            link.close()
        self._children.clear()

    def _check(self, cause: Exception | None = None) -> None:
        if self.loss.done():
            raise TargetLostError(self.loss.result()) from cause

    def _fail(self, error: Exception) -> None:
        """Raises ``TargetLostError`` with the reason that the stages give, or ``error``."""
        futures.wait([self.loss], _WHY_WITHIN_S)
        self._lose(f"the last stage failed in a pass: {type(error).__name__}: {error}")
        self._check(error)

    def _lose(self, why: str) -> None:
        with contextlib.suppress(futures.InvalidStateError):  # the first reason counts
            self.loss.set_result(why)

    # --- the watching thread ---------------------------------------------------------------

    def _watch(self) -> None:
        try:
            for options in self._wanted:
                link, child = _started(self._program, options)
                self._children[link] = child
        except OSError as error:
            self._lose(f"a stage cannot be started: {error}")
        finally:
            self._started.set()
        try:
            while not self.loss.done() and not self._closing:
                ready: list[Any] = wait(list(self._children), self._look_every_s)
                for link in ready:
                    self._read(link, self._children[link])
                began = self._busy_since
                if began is not None and time.monotonic() - began > self._pass_within_s:
                    self._lose(
                        f"a pass was not done after {self._pass_within_s:g} s"
                        " (pipeline.pass_within_s): a stage hangs"
                    )
        except Exception as error:  # nobody may wait for a thread that is not there
            _LOG.exception("watching the stages failed")
            self._lose(f"the stages cannot be watched: {error}")
        if self.loss.done():
            for child in list(self._children.values()):
                child.process.kill()

    def _read(self, link: Connection, child: _Child) -> None:
        try:
            failure = link.recv()
        except (EOFError, OSError):
            if not self._closing:
                self._lose(f"stage {child.rank} {child.end_words()}")
            return
        if failure:
            return self._lose(f"stage {child.rank} failed: {failure}")
        self._silent.discard(child.rank)
        if not self._silent and not self._ready.done():
            self._ready.set_result(None)


@dataclass(frozen=True, slots=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]

    def end_words(self) -> str:
        """How the process ended, for people. It has closed its link."""
        who = f"(process {self.process.pid})"
        try:
            code = self.process.wait(_WHY_WITHIN_S)
        except subprocess.TimeoutExpired:
            return f"{who} closed its link"
        return f"{who} " + (f"was killed by signal {-code}" if code < 0 else f"ended: code {code}")


def _started(program: Sequence[str], options: StageOptions) -> tuple[Connection, _Child]:
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [*program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is for the verifier's ready line
            pass_fds=(theirs.fileno(),),
            # One bar that shows how far loading is will do.
            env={**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            # A Ctrl-C in the terminal is for the last stage to heed.
            start_new_session=True,
        )
    with contextlib.suppress(OSError):  # it has ended already, which is seen when it is read
        ours.send(astuple(options))  # built-in values, so that nothing is imported to read them
    return ours, _Child(options.rank, process)


def _one_of(*awaited: Future[Any], within_s: float | None = None) -> bool:
    return bool(futures.wait(awaited, within_s, futures.FIRST_COMPLETED).done)


def _unless_lost(build: Callable[[], PipelineTarget], processes: StageProcesses) -> PipelineTarget:
    """What ``build`` returns or raises. ``TargetLostError`` as soon as a stage is lost, even while
    ``build`` waits for it: then its thread is left behind."""
    built: Future[PipelineTarget] = Future()

    def work() -> None:
        try:
            built.set_result(build())
        except BaseException as error:
            built.set_exception(error)

    threading.Thread(target=work, name="edgespec-last-stage", daemon=True).start()
    _one_of(built, processes.loss)
    error = built.exception() if built.done() else None
    if built.done() and not isinstance(error, RuntimeError):
        return built.result()
    futures.wait([processes.loss], _WHY_WITHIN_S)  # a broken link is seen sooner than its reason
    if processes.loss.done():
        raise TargetLostError(processes.loss.result()) from error
    return built.result()


# --- in a stage's process ------------------------------------------------------------------


def main() -> None:
    """A stage, until the last one closes the link. Signals that ask to stop are for the last stage
    to heed, because a drain goes on needing all stages."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # works on a process that hangs or was stopped, too
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    link, code = Connection(int(sys.argv[1])), 0
    try:
        _serve(link)
    except Exception as error:
        _LOG.debug("the error in full", exc_info=error)
        code = 1
        with contextlib.suppress(OSError):
            link.send(f"{type(error).__name__}: {error}")
    logging.shutdown()
    # Not through the interpreter's end: a process group that others have left may wait there.
    os._exit(code)


def _serve(link: Connection) -> None:
    options = StageOptions(*link.recv())
    join = partial(join_stages, options.rank, options.stages, options.port)
    share = StageShare(options.rank, options.stages, join, options.delay_s)
    target = TorchTarget(share=share, **options.target)
    link.send("")
    while True:
        try:
            method, *arguments = link.recv()
        except EOFError:
            return
        if method == "open":  # nothing is sampled here, so it is not told how
            key, prompt_length, text = arguments
            target.open(key, prompt_length, SamplingParams(), text)
        else:
            getattr(target, method)(*arguments)


if __name__ == "__main__":
    main()
