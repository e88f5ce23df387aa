"""The parts of a tensor parallel target by themselves: the agreement, messages, what can be shared.

Oracles: the cases in which somebody would wait for ever; what was sent arrives.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device.memory import MachineMemory
from edgespec.core.ports import PassRequest, TargetLostError
from edgespec.verifier.targets import tensor_parallel_group
from edgespec.verifier.targets.pool_size import PoolBudget
from edgespec.verifier.targets.tensor_parallel import torch_target
from edgespec.verifier.targets.tensor_parallel_agreement import PassAgreement, Verdict
from edgespec.verifier.targets.tensor_parallel_group import RankGroup
from edgespec.verifier.targets.tensor_parallel_messages import (
    CloseReplica,
    FromRank,
    GoOn,
    KeepReplica,
    Loaded,
    LoadModel,
    MessageError,
    OpenReplica,
    PassFailed,
    RankFailed,
    Ready,
    RunPass,
    ToRank,
    decode,
    encode,
    receive,
)
from edgespec.verifier.targets.tensor_parallel_model import TensorParallelError, check_shareable

# --- the agreement by itself ----------------------------------------------------------------


def _agreement() -> PassAgreement:
    return PassAgreement(frozenset({1, 2}), pass_within_s=60.0, agree_within_s=5.0)


def test_a_pass_beyond_its_time_is_a_hang() -> None:
    agreement = _agreement()
    agreement.began(100.0)
    assert agreement.deadline == 160.0
    agreement.look(159.9)
    assert agreement.lost is None
    agreement.look(160.0)
    assert agreement.lost == (
        "pass 1 was not done after 60 s (tensor_parallel.pass_within_s): a rank hangs"
    )


def test_time_between_passes_is_nobodys() -> None:
    agreement = _agreement()
    agreement.began(0.0)
    agreement.ended()
    assert agreement.deadline is None
    agreement.look(1e9)
    assert agreement.lost is None


def test_a_failure_that_nobody_shares_is_told_after_a_while() -> None:
    agreement = _agreement()
    agreement.began(0.0)
    agreement.failed(2, "no memory", 10.0)
    agreement.reported(1, PassFailed(1, 2, "no memory"), 11.0)
    assert agreement.verdict is Verdict.WAIT
    assert agreement.deadline == 15.0
    agreement.look(15.0)
    assert agreement.lost == "rank 0 failed in pass 1: no memory; not rank 2"


def test_the_order_of_reports_does_not_matter() -> None:
    for first in (True, False):
        agreement = _agreement()
        agreement.began(0.0)
        if first:
            agreement.failed(2, "no memory", 1.0)
        agreement.reported(2, PassFailed(1, 2, "gone"), 2.0)
        agreement.reported(1, PassFailed(1, 2, "gone"), 3.0)
        if not first:
            agreement.failed(2, "no memory", 4.0)
        assert agreement.verdict is Verdict.ALIKE
        assert agreement.began(5.0) == 2
        assert agreement.deadline == 65.0


def test_failures_behind_other_exchanges_are_fatal() -> None:
    """As when an exchange breaks because the other rank has left it."""
    agreement = _agreement()
    agreement.began(0.0)
    agreement.reported(1, PassFailed(1, 2, "no memory"), 1.0)
    agreement.failed(3, "connection reset", 1.0)
    assert agreement.lost == (
        "rank 0 failed in pass 1 behind 3 exchanges (connection reset), rank 1 behind 2 (no memory)"
    )


def test_reports_of_other_passes_and_ends_of_ranks_are_fatal() -> None:
    agreement = _agreement()
    agreement.began(0.0)
    agreement.ended()
    agreement.reported(1, PassFailed(1, 4, "late"), 1.0)
    assert agreement.lost == "rank 1 failed in pass 1: late"
    agreement = _agreement()
    agreement.gone(2, "(process 7) was killed by signal 9")
    agreement.gone(1, "later")
    assert agreement.lost == "rank 2 (process 7) was killed by signal 9"


# --- the group's processes ------------------------------------------------------------------


@contextlib.contextmanager
def _group_of(script: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """One rank, which is this shell script."""

    def start(rank: int) -> tensor_parallel_group.RankProcess:
        life_read, life_write = os.pipe()
        os.close(life_read)
        pipe = subprocess.PIPE
        process = subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, bufsize=0)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return tensor_parallel_group.RankProcess(rank, process, life_write)

    monkeypatch.setattr(tensor_parallel_group, "_start_rank", start)
    group = RankGroup(2, 0.2, look_every_s=0.05)
    try:
        with contextlib.suppress(TargetLostError):  # the script may be over by now
            group.start([LoadModel(1, 2, 1, 1.0, ())])
        yield group
    finally:
        group.close()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -9 $$", "was killed by signal 9"),
        ("read line; exit 3", "ended: code 3"),
        ("echo junk; exec cat >/dev/null", "cannot watch the others: .* limit 1073741824"),
    ],
    ids=["killed", "exits", "nonsense"],
)
def test_a_rank_that_ends_or_talks_nonsense_is_told_while_nobody_calls(
    script: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    done = threading.Event()

    def tell(why: str) -> None:
        told.append(why)
        done.set()

    with _group_of(script, monkeypatch) as group:
        group.when_lost(tell)
        with contextlib.suppress(TargetLostError):
            group.tell_all(KeepReplica("line\n", ()))
        assert done.wait(60)
        assert told == [group.lost]
        assert re.search(words, told[0])


def test_a_rank_that_takes_no_command_is_lost_after_the_time_of_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _group_of("exec sleep 1000", monkeypatch) as group:
        with pytest.raises(TargetLostError, match=r"rank 1 took no command for 0\.2 s"):
            group.tell_all(OpenReplica("a", 1, tuple(range(1 << 17))))
        group._ranks[0].process.kill()


# --- what can be shared --------------------------------------------------------------------


def test_heads_that_do_not_divide_are_refused_with_both_numbers() -> None:
    config = SimpleNamespace(
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=96,
        model_type="qwen3",
        base_model_tp_plan={"layers.*.self_attn.q_proj": "colwise"},
    )
    with pytest.raises(TensorParallelError, match=r"2 key-value heads, which .*\.size 3 does not"):
        check_shareable(config, 3)
    config.num_key_value_heads = None  # as many as there are attention heads
    config.intermediate_size = 97
    with pytest.raises(TensorParallelError, match=r"97 columns of intermediate_size, .*size 4"):
        check_shareable(config, 4)
    check_shareable(config, 1)


def test_a_device_that_only_one_rank_can_have_is_refused() -> None:
    with pytest.raises(TensorParallelError, match=r"device is 'cuda:3', but .*size 2 must be"):
        torch_target("nowhere", ranks=2, device="cuda:3", name="m", vocabulary="v")


# --- messages -------------------------------------------------------------------------------

IDS = st.lists(st.integers(0, 1 << 40), max_size=6).map(tuple)
NAMES = st.sampled_from(["", "a", "ключ", "\0probe"])
REQUESTS = st.builds(
    PassRequest, NAMES, st.integers(0, 99), IDS, IDS, IDS, st.booleans(), blocks=IDS
)
MESSAGES: st.SearchStrategy[ToRank | FromRank] = st.one_of(
    st.builds(
        LoadModel,
        st.integers(1, 63),
        st.integers(2, 64),
        st.integers(1, 65_535),
        st.floats(1.0, 1e5),
        st.lists(st.tuples(NAMES, st.none() | st.booleans() | NAMES)).map(tuple),
    ),
    st.just(GoOn()),
    st.builds(OpenReplica, NAMES, st.integers(0, 9), IDS),
    st.builds(RunPass, st.integers(1, 1 << 60), st.lists(REQUESTS, max_size=3).map(tuple)),
    st.builds(KeepReplica, NAMES, IDS),
    st.builds(CloseReplica, NAMES),
    st.just(Loaded()),
    st.just(Ready()),
    st.builds(PassFailed, st.integers(1, 99), st.integers(0, 99), NAMES),
    st.builds(RankFailed, NAMES),
)


@given(st.lists(MESSAGES, max_size=4), st.integers(0, 30))
def test_a_stream_of_messages_arrives_as_it_was_sent_or_says_where_it_is_cut(
    messages: list[ToRank | FromRank], cut: int
) -> None:
    sent = b"".join(map(encode, messages))
    whole = io.BytesIO(sent)
    assert [receive(whole.read) for _ in messages] == messages
    assert receive(whole.read) is None
    if 0 < cut < len(sent):
        found = list(_until_the_cut(io.BytesIO(sent[:-cut])))
        assert found == messages[: len(found)]
        assert len(found) < len(messages)


def _until_the_cut(stream: io.BytesIO) -> Iterator[ToRank | FromRank]:
    with contextlib.suppress(MessageError):
        while (one := receive(stream.read)) is not None:
            yield one


@pytest.mark.parametrize("body", [b"", b"junk", encode(GoOn())[4:-1], b"\xe9\x63\x00\x00\x00"])
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(MessageError):
        decode(body)


def test_a_length_beyond_the_limit_is_refused_before_anything_is_read() -> None:
    with pytest.raises(MessageError, match="limit"):
        receive(io.BytesIO(b"\xff\xff\xff\xff").read)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("GptOss", "'gpt_oss' has no plan for tensor parallel; supported are colwise, rowwise"),
        ("Phi3", "'phi3' has a plan with colwise_gather_output, rowwise_split_input for tensor"),
        ("Qwen3Moe", "'qwen3_moe' has a plan with moe_tp_experts, packed_colwise for tensor"),
    ],
)
def test_families_whose_layers_cannot_be_shared_are_refused(family: str, message: str) -> None:
    config = getattr(transformers, f"{family}Config")()
    check_shareable(config, 1)
    with pytest.raises(TensorParallelError, match=message):
        check_shareable(config, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int8"}, "quantize is 'int8', but tensor_parallel.size 2 shares plain"),
        (
            {"pool_budget": PoolBudget(None, 0.9, 64, lambda: MachineMemory(1, 1, 1))},
            "tensor_parallel.size is 2; give limits.max_cached_tokens instead",
        ),
    ],
)
def test_options_that_cannot_be_shared_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TensorParallelError, match=message):
        torch_target("nowhere", ranks=2, device="cpu", **options)
