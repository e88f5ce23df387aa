"""Every rank but the first does what rank 0 says, in order, on its own share of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.tensor_parallel_messages import (
    CloseReplica,
    FromRank,
    GoOn,
    KeepReplica,
    LoadModel,
    OpenReplica,
    PassFailed,
    RankFailed,
    RunPass,
    ToRank,
)

UNSAMPLED = SamplingParams()


class Replica(Protocol):
    """What a rank without a sampler does of ``ports.TargetModel``."""

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None: ...

    def run_pass(self, batch: Sequence[PassRequest]) -> object:
        """A pass up to its logits; the rest of it is rank 0's."""

    def keep(self, key: str, nodes: Sequence[int]) -> None: ...

    def close(self, key: str) -> None: ...


def replay(replica: Replica, command: ToRank, collectives: Callable[[], int]) -> FromRank | None:
    """Carry out one command; what rank 0 has to hear of it, if it went wrong.

    A pass that raises leaves the rank as it was before, ready for the next command. Anything else
    that raises was fine on rank 0, so this rank has ``RankFailed``.
    """
    before = collectives()
    try:
        match command:
            case OpenReplica(key, prompt_length, text):
                replica.open(key, prompt_length, UNSAMPLED, text)
            case RunPass(_, batch):
                replica.run_pass(batch)
            case KeepReplica(key, nodes):
                replica.keep(key, nodes)
            case CloseReplica(key):
                replica.close(key)
            case LoadModel() | GoOn():
                return RankFailed(f"{type(command).__name__} came twice")
            case _:
                assert_never(command)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(command, RunPass):
            return PassFailed(command.number, collectives() - before, reason)
        return RankFailed(f"{type(command).__name__}: {reason}")
    return None
