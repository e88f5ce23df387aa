"""Passes that are recorded once and then repeated: on a GPU, CUDA graphs.

Theory of operation. A pass of a few rows is some hundred launches that a GPU has done before the
host has asked for the next; repeated from a recording, all of them are one launch. A recording
repeats the same work on the same memory, so passes are put into buckets, each with tensors of its
own (``static_pass.py``). The first pass of a bucket runs as it always did, the second is recorded,
and the following ones are repeated. What fits no bucket, a long prefill above all, runs as it
always did, and so does everything once recording has failed: then the reason is logged, and
nobody's text is touched.

How work is recorded is behind ``Recorder``: ``cuda_graphs.py`` on a GPU. A recorder of the tests
repeats torch's operations, one by one, on the tensors of the recording; so all of this file and of
``static_pass.py`` is held against the plain path on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from edgespec.core.ports import PassRequest
from edgespec.verifier.targets.batch_rows import BatchRows, lay_out
from edgespec.verifier.targets.kv_pool import KvPool
from edgespec.verifier.targets.paged_attention import PagedAttention
from edgespec.verifier.targets.pass_plan import PassPlan
from edgespec.verifier.targets.static_pass import SIZES, Bucket, StaticPass, bucket_of

logger = logging.getLogger(__name__)

MOST_RECORDINGS = 48
"""At a time. Each holds some MiB of the device's memory for its list of launches."""
_IDLE_PASSES = 4096
"""A recording that was not used for so many passes may make room for another."""

Call = Callable[[PassPlan], torch.Tensor]
"""The model over a plan: logits [sampled rows, vocabulary]."""


class RecorderFull(Exception):
    """There is no memory for one more recording; those that there are go on."""


class Recording(Protocol):
    """Work that can be repeated."""

    def replay(self) -> None:
        """Do the work again, on the memory that it was recorded with."""
        ...


class Recorder(Protocol):
    """What records work on a device."""

    used_bytes: int
    """Of the device's memory, by all recordings that were made."""
    wrecked: bool
    """Whether recording has failed in a way that makes it unsafe to free what it has made."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Do ``work``, and record it. Raises ``RecorderFull``, or anything else where it cannot be
        recorded; ``work`` may then have been done or not."""
        ...


@dataclass(slots=True)
class _Recorded:
    static: StaticPass
    recording: Recording
    used: int
    """The number of its last pass."""


class GraphedPasses:
    """The recorded passes of one model over one pool."""

    def __init__(
        self, call: Call, pool: KvPool, attention: PagedAttention, recorder: Recorder
    ) -> None:
        self._call, self._pool, self._attention = call, pool, attention
        self._recorder = recorder
        self._recorded: dict[Bucket, _Recorded] = {}
        self._seen: set[Bucket] = set()
        self._logits: torch.Tensor | None = None
        """[most rows, vocabulary], of all recordings."""
        self._passes = 0
        self._full = False
        self.why_not = ""
        """Why nothing is recorded or repeated any more; empty while all is well."""
        self.replayed = 0
        """Passes that were repeated from a recording."""
        self.eager_first = True
        """Whether the first pass of a bucket goes unrecorded; a self-test has no time for that."""

    def __str__(self) -> str:
        how = f"failed ({self.why_not})" if self.why_not else "in use"
        return f"{how}, {self.replayed} passes repeated from {self.recordings} recordings"

    @property
    def recordings(self) -> int:
        """How many there are."""
        return len(self._recorded)

    def run(self, rows: BatchRows) -> torch.Tensor | None:
        """Logits [sampled rows, vocabulary] of a pass whose blocks are reserved, valid until the
        next pass; None where it has to run without a recording. Needs inference mode."""
        if self.why_not:
            return None
        self._passes += 1
        bucket = bucket_of(rows, self._attention)
        if bucket is None:
            return None
        if self._recorded and self._tables_moved():
            self._recorded.clear()
        known = self._recorded.get(bucket)
        if known is None:
            return self._record(bucket, rows) if self._worth(bucket) else None
        known.used = self._passes
        count = known.static.send(rows)
        try:
            known.recording.replay()
        except RuntimeError as error:  # if the device is lost, the plain path will say so
            self._give_up(error)
            return None
        self.replayed += 1
        return self._found(count)

    def run_requests(self, batch: Sequence[PassRequest]) -> torch.Tensor | None:
        """``run`` of requests."""
        return self.run(lay_out(self._pool, batch))

    def _worth(self, bucket: Bucket) -> bool:
        """Whether a recording of ``bucket`` is to be made now."""
        if self._full:
            return False
        if self.eager_first and bucket not in self._seen:
            self._seen.add(bucket)
            return False
        if len(self._recorded) < MOST_RECORDINGS:
            return True
        oldest = min(self._recorded, key=lambda one: self._recorded[one].used)
        if self._passes - self._recorded[oldest].used < _IDLE_PASSES:
            return False
        del self._recorded[oldest]
        return True

    def _record(self, bucket: Bucket, rows: BatchRows) -> torch.Tensor | None:
        try:
            static = StaticPass(bucket, self._pool, self._attention)
            count = static.send(rows)
            recording = self._recorder.record(lambda: self._compute(static.plan))
        except RecorderFull as error:
            self._full = True
            logger.info("no more passes are recorded: %s", error)
            return None
        except Exception as error:  # what cannot be recorded may raise anything
            self._give_up(error)
            return None
        self._recorded[bucket] = _Recorded(static, recording, self._passes)
        return self._found(count)

    def _compute(self, plan: PassPlan) -> None:
        logits = self._call(plan)
        if self._logits is None:
            self._logits = logits.new_empty((SIZES[-1], logits.shape[-1]))
        self._logits[: logits.shape[0]].copy_(logits)

    def _found(self, count: int) -> torch.Tensor:
        assert self._logits is not None
        return self._logits[:count]

    def _tables_moved(self) -> bool:
        now = self._pool.tables.device_copy
        return any(known.static.tables is not now for known in self._recorded.values())

    def _give_up(self, error: Exception) -> None:
        # The recordings are kept: after a failed capture it may be unsafe to free them.
        self.why_not = f"{type(error).__name__}: {error}"
        logger.warning("passes run without CUDA graphs from now on, so slower: %s", self.why_not)
