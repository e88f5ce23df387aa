"""A rank: ``python -m edgespec.verifier.targets.tensor_parallel_rank LIFE_DESCRIPTOR``.

Commands come on standard input and answers leave on what was standard output; whatever else prints
goes to standard error. It is started and ended by rank 0 (``tensor_parallel_group.py``) and by
nobody else: signals that ask to stop are rank 0's to heed, because a drain goes on needing all
ranks. The end of rank 0 ends this process twice over: a thread reads a pipe that ends with it, and
on Linux the kernel kills the child of a thread that is gone (``prctl(2)``, PR_SET_PDEATHSIG), which
works as well on a process that hangs or was stopped.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from edgespec.verifier.targets.tensor_parallel_messages import (
    FromRank,
    GoOn,
    Loaded,
    LoadModel,
    MessageError,
    RankFailed,
    Ready,
    ToRank,
    encode,
    receive,
)
from edgespec.verifier.targets.tensor_parallel_replay import Replica, replay

_LOG = logging.getLogger(__name__)
_SET_PARENT_DEATH_SIGNAL = 1
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Tell = Callable[[FromRank], None]
Hear = Callable[[], "ToRank | None"]


def main() -> None:
    for number in _STOPPING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    life = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    threading.Thread(target=_end_with_rank_0, args=(life,), daemon=True).start()
    answers = os.dup(1)
    os.dup2(2, 1)
    code = _serve(os.fdopen(0, "rb"), partial(_write, answers))
    logging.shutdown()
    # Not through the interpreter's end: a process group that others have left may wait there.
    os._exit(code)


def _end_with_rank_0(life: int) -> None:
    os.read(life, 1)  # Nothing ever comes: it returns when rank 0 is no more.
    os._exit(1)


def _write(descriptor: int, message: FromRank) -> None:
    view = memoryview(encode(message))
    while view:
        view = view[os.write(descriptor, view) :]


def _serve(commands: BinaryIO, tell: Tell) -> int:
    """Until rank 0 closes the commands; the exit code."""

    def hear() -> ToRank | None:
        return receive(commands.read)  # type: ignore[return-value]

    try:
        first = hear()
        if first is None:
            return 0
        replica, collectives = _load(first, hear, tell)
        tell(Ready())
        while (command := hear()) is not None:
            if (failure := replay(replica, command, collectives)) is not None:
                _LOG.error("%s", failure)
                tell(failure)
    except Exception as error:
        _LOG.debug("the error in full", exc_info=error)
        tell(RankFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _load(first: ToRank, hear: Hear, tell: Tell) -> tuple[Replica, Callable[[], int]]:
    """This rank's target, and the count of its exchanges."""
    if not isinstance(first, LoadModel):
        raise MessageError(f"{type(first).__name__} came before LoadModel")
    from edgespec.verifier.targets.pipeline_stage import StageShare
    from edgespec.verifier.targets.tensor_parallel import join_group
    from edgespec.verifier.targets.tensor_parallel_model import Share
    from edgespec.verifier.targets.torch_target import TorchTarget

    def wait_for_all() -> None:
        tell(Loaded())
        if not isinstance(hear(), GoOn):
            raise MessageError("rank 0 did not say that all ranks are loaded")

    join_group(first)
    share: Share | StageShare
    if first.stage_delay_s is None:
        share = Share(first.rank, first.world_size, wait_for_all)
    else:
        share = StageShare(first.rank, first.world_size, wait_for_all, first.stage_delay_s)
    options: dict[str, Any] = dict(first.options)
    return TorchTarget(share=share, **options), lambda: share.collectives


if __name__ == "__main__":
    main()
