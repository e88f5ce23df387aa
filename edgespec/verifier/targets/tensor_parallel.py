"""One target model over several ranks of one host: rank 0 of them, which everybody talks to.

``TensorParallelTarget`` is a ``TorchTarget`` on this rank's share of the model. What changes the
cache is done here first and then told to the others; a pass is told to them just before it runs, so
that all run it at once (``tensor_parallel_group.py``). Only this rank samples.

The ranks are processes of this host; they meet, and exchange tensors on CPUs, over the loopback
interface. GPUs exchange over NCCL, rank r on device r.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
from torch import distributed
from transformers import AutoConfig

from edgespec.core.ports import PassRequest, TargetLostError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.pipeline_stage import StageShare
from edgespec.verifier.targets.self_test import SelfTest
from edgespec.verifier.targets.tensor_parallel_group import RankGroup
from edgespec.verifier.targets.tensor_parallel_messages import (
    CloseReplica,
    GoOn,
    KeepReplica,
    Loaded,
    LoadModel,
    OpenReplica,
    Ready,
)
from edgespec.verifier.targets.tensor_parallel_model import (
    Share,
    TensorParallelError,
    check_shareable,
)
from edgespec.verifier.targets.torch_target import TorchTarget

LOAD_WITHIN_S = 3600.0
"""For weights on slow disks; ranks that end are noticed at once."""
_SELF_TEST_WITHIN_S = 600.0
# Ranks import torch at their own pace before they meet, on a busy machine for minutes.
_MEET_WITHIN_S = 600.0
# The watching thread speaks first, with a better message.
_COLLECTIVE_SLACK_S = 30.0
_WHY_WITHIN_S = 5.0
_LOOPBACK = "127.0.0.1"
_Result = TypeVar("_Result")
_Target = TypeVar("_Target", bound="TensorParallelTarget")


@dataclass(frozen=True, slots=True)
class RankPlan(Generic[_Target]):
    """How a model is spread over ranks."""

    ranks: int
    pass_within_s: float
    setting: str
    """The name of ``pass_within_s`` in the configuration."""
    share: Callable[[int, int, Callable[[], None]], Share | StageShare]
    """Of a rank: its number, how many there are, what to call with the weights loaded."""
    target: type[_Target]
    """Of rank 0."""
    stage_delay_s: float | None = None
    """None: every rank has a share of all layers."""


def torch_target(
    path: str, *, ranks: int = 1, pass_within_s: float = 300.0, device: str = "auto", **options: Any
) -> TorchTarget:
    """A ``TorchTarget`` with these options, over ``ranks`` processes when that is more than one.

    Raises as that does, ``TensorParallelError`` when the model, the machine or an option cannot be
    shared among so many, and ``TargetLostError`` when a rank does not come up.
    """
    if ranks == 1:
        return TorchTarget(path, device=device, **options)
    if options.get("quantize"):
        raise TensorParallelError(
            f"quantize is {options['quantize']!r}, but tensor_parallel.size {ranks} shares plain"
            " weights alone"
        )
    if options.get("pool_budget") is not None:
        raise TensorParallelError(
            "kv_budget and gpu_memory_utilization size the cache of one process, but"
            f" tensor_parallel.size is {ranks}; give limits.max_cached_tokens instead"
        )
    device = _common_device(device, ranks)
    check_shareable(AutoConfig.from_pretrained(path, trust_remote_code=False), ranks)
    if device == "cpu":
        if options.get("model_threads") is None:
            options["model_threads"] = max(1, torch.get_num_threads() // ranks)
        # transformers takes the machine's accelerator for what the ranks compute on.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    setting = "tensor_parallel.pass_within_s"
    plan = RankPlan(ranks, pass_within_s, setting, Share, TensorParallelTarget)
    return start_ranks(path, plan, {**options, "device": device})


class TensorParallelTarget(TorchTarget):
    """Rank 0; ``group`` holds the others. ``close_ranks`` ends them."""

    words = "tensor parallel over {} ranks"

    def __init__(
        self, path: str, *, share: Share | StageShare, group: RankGroup, **options: Any
    ) -> None:
        self._group: RankGroup | None = None  # building is the same on all ranks and not told
        super().__init__(path, share=share, **options)
        group.wait_for(Ready, _SELF_TEST_WITHIN_S)
        self._ranks, self._share, self._group = share.world_size, share, group

    @property
    def mode(self) -> str:
        return f"{super().mode}, {self.words.format(self._ranks)}"

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        super().open(key, prompt_length, sampling, text)
        self._others.tell_all(OpenReplica(key, prompt_length, tuple(text)))

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        super().keep(key, nodes)
        self._others.tell_all(KeepReplica(key, tuple(nodes)))

    def close(self, key: str) -> None:
        super().close(key)
        self._others.tell_all(CloseReplica(key))

    def self_test(self) -> SelfTest:
        """As of one rank, while it is being built; not later, since only passes are told."""
        if self._group is not None:
            raise RuntimeError("the self-test of a tensor parallel target runs at its start")
        return super().self_test()

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """``tell`` hears once, from some thread, why the ranks cannot go on."""
        self._others.when_lost(tell)

    def close_ranks(self) -> None:
        """End the other ranks and leave the process group; the target is of no use then."""
        self._others.close()
        distributed.destroy_process_group()

    @property
    def _others(self) -> RankGroup:
        assert self._group is not None
        return self._group

    def _run(self, batch: Sequence[PassRequest]) -> torch.Tensor:
        if self._group is None:
            return super()._run(batch)
        return self._group.run_pass(
            batch, lambda: super(TensorParallelTarget, self)._run(batch), self._collectives
        )

    def _collectives(self) -> int:
        return self._share.collectives


def join_group(share: LoadModel, listener: int = -1) -> None:
    """Make this process a rank of torch's default process group. Rank 0 hands over the socket that
    it listens on, so that nobody beyond this host can reach it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = str(share.rank)  # transformers asks for it
    limit = timedelta(seconds=share.collective_within_s)
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK,
        share.meeting_port,
        share.world_size,
        share.rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=None if listener < 0 else listener,
    )
    where = None
    if dict(share.options)["device"] == "cuda":
        where = torch.device("cuda", share.rank)
        torch.cuda.set_device(where)
    distributed.init_process_group(
        "gloo" if where is None else "nccl",
        store=store,
        rank=share.rank,
        world_size=share.world_size,
        timeout=limit,
        device_id=where,
    )


def start_ranks(path: str, plan: RankPlan[_Target], options: dict[str, Any]) -> _Target:
    """Rank 0 of a model over the ranks of ``plan``, with the others started and loaded.

    Raises as ``TorchTarget``, and ``TargetLostError`` when a rank does not come up.
    """
    ranks = plan.ranks
    group = RankGroup(ranks, plan.pass_within_s, setting=plan.setting)
    collective_within_s = max(plan.pass_within_s, _MEET_WITHIN_S) + _COLLECTIVE_SLACK_S
    with socket.create_server((_LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        pairs = tuple({"path": path, **options}.items())
        own, *others = (
            LoadModel(rank, ranks, port, collective_within_s, pairs, plan.stage_delay_s)
            for rank in range(ranks)
        )

        def wait_for_all() -> None:
            group.wait_for(Loaded, LOAD_WITHIN_S)
            group.tell_all(GoOn())

        def build() -> _Target:
            join_group(own, listener.detach())
            share = plan.share(0, ranks, wait_for_all)
            return plan.target(path, share=share, group=group, **options)

        try:
            group.start(others)
            return _unless_lost(build, group)
        except BaseException:
            group.close()
            raise


def _unless_lost(build: Callable[[], _Result], group: RankGroup) -> _Result:
    """What ``build`` returns or raises; ``TargetLostError`` as soon as a rank is lost, even while
    ``build`` waits for it in an exchange: then its thread is left behind."""
    done = threading.Event()
    results: list[_Result] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(build())
        except BaseException as error:
            errors.append(error)
        done.set()

    group.when_lost(lambda _: done.set())
    threading.Thread(target=work, name="edgespec-rank-0", daemon=True).start()
    done.wait()
    if results:
        return results[0]
    if errors and not isinstance(errors[0], RuntimeError):
        raise errors[0]
    # An exchange that breaks is seen here sooner than why it broke.
    if (why := group.lost_within(_WHY_WITHIN_S)) is not None:
        raise TargetLostError(why) from (errors[0] if errors else None)
    raise errors[0]


def _common_device(name: str, ranks: int) -> str:
    """``cpu`` or ``cuda``, which has a device for each rank. Raises ``TensorParallelError``."""
    if name not in ("auto", "cpu", "cuda"):
        raise TensorParallelError(
            f"device is {name!r}, but with tensor_parallel.size {ranks} must be auto, cpu or cuda"
            " (rank r takes device r)"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return "cpu"
    if (count := torch.cuda.device_count()) < ranks:
        raise TensorParallelError(f"tensor_parallel.size is {ranks}, but there are {count} GPUs")
    return "cuda"
