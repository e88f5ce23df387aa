"""The codec: messages survive a round trip, errors name bounds, and any bytes either decode or are
refused.

Oracle of the fuzz tests: a message or ``ProtocolViolation``, nothing else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.pictures import (
    MAX_PICTURE_BYTES,
    MAX_PICTURES,
    Picture,
    PictureInput,
)
from edgespec.core.protocol.sampling import MIN_REPETITION_PENALTY, SamplingParams
from edgespec.wire import codec
from edgespec.wire.pb import speculation_pb2 as pb

LIMITS = codec.WireLimits(context_length=128)

UINT32 = st.integers(0, 2**32 - 1)
TOKEN = st.integers(0, m.MAX_TOKEN_ID)
NAME = st.text(st.characters(categories=["L", "N", "P"]), max_size=20)
SHARE = st.floats(0.0, 1.0, exclude_min=True)
PENALTY = st.floats(-100.0, 100.0)


@st.composite
def drafts(draw: st.DrawFn) -> m.Draft:
    tokens = draw(st.lists(TOKEN, max_size=16))
    first = draw(st.integers(1, 2**32 - 16))
    parents = tuple(draw(st.integers(0, node - 1)) for node in range(first, first + len(tokens)))
    if 0 not in parents:
        return m.Draft(first, parents, tuple(tokens))
    return m.Draft(first, parents, tuple(tokens), draw(st.integers(1, 2**32 - 1)), draw(UINT32))


@st.composite
def commits(draw: st.DrawFn) -> m.Commit:
    tokens = draw(st.lists(TOKEN, max_size=16))
    return m.Commit(
        position=draw(st.integers(0, 2**32 - 17)),
        tokens=tuple(tokens),
        accepted=draw(st.integers(0, len(tokens))),
        stale=draw(UINT32),
        queue_us=draw(UINT32),
        verify_us=draw(UINT32),
        rows=draw(UINT32),
        echo=draw(st.integers(0, 2**64 - 1)),
        held_us=draw(UINT32),
        finish=draw(st.none() | st.sampled_from(FINISHES)),
        row_price=draw(st.none() | st.integers(0, 1000)),
        credit=draw(st.none() | UINT32),
        read=draw(UINT32),
    )


# A full context travels as a full output.
FINISHES = [reason for reason in m.FinishReason if reason is not m.FinishReason.CONTEXT]

SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 100.0),
    top_k=st.integers(0, 1 << 24),
    top_p=SHARE,
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=SHARE.map(lambda share: max(MIN_REPETITION_PENALTY, 100.0 * share)),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    logit_bias=st.dictionaries(TOKEN, st.floats(-1e4, 1e4), max_size=5),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(TOKEN, max_size=5).map(tuple),
    max_tokens=st.integers(1 << 10, 1 << 20),
    min_tokens=st.integers(0, 1 << 10),
    ignore_eos=st.booleans(),
)

OPEN = st.builds(
    m.Open,
    session_id=NAME.filter(bool),
    model=NAME,
    vocabulary=NAME,
    prompt=st.lists(TOKEN, min_size=1, max_size=64).map(tuple),
    committed=st.lists(TOKEN, max_size=64).map(tuple),
    sampling=SAMPLING,
    run_ahead=st.sampled_from(m.RunAhead),
    drafting=st.booleans(),
    session_secret=st.binary(max_size=64),
)


@st.composite
def named_opens(draw: st.DrawFn) -> m.Open:
    """Draw an ``Open`` whose first ids are named: a part of the prompt, or more than all of it."""
    whole = draw(OPEN.filter(lambda one: len(one.prompt) + len(one.committed) > 1))
    prompt, committed = whole.prompt, whole.committed
    length = draw(st.integers(1, len(prompt) + len(committed)))
    name, key = draw(st.binary(min_size=32, max_size=32)), draw(st.binary(min_size=1, max_size=64))
    return replace(
        whole,
        prompt=prompt[length:],
        committed=committed[max(0, length - len(prompt)) :],
        prefix_key=key,
        prefix=m.Prefix(length, name, len(prompt)),
    )


SHA256 = st.binary(min_size=32, max_size=32)


@st.composite
def pictured_opens(draw: st.DrawFn) -> m.Open:
    """Draw an ``Open`` with pictures, sometimes with a named beginning."""
    whole = draw(named_opens() | OPEN)
    length = whole.prompt_length
    places = draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=8, unique=True))
    pictures = [
        Picture(draw(SHA256), draw(st.integers(1, MAX_PICTURE_BYTES)), at) for at in sorted(places)
    ]
    key = whole.prefix_key or draw(st.binary(min_size=1, max_size=64))
    return replace(whole, pictures=tuple(pictures), prefix_key=key)


UPLINK: st.SearchStrategy[m.Uplink] = st.one_of(
    drafts(),
    named_opens(),
    pictured_opens(),
    st.builds(
        m.PicturePart,
        st.integers(0, MAX_PICTURES - 1),
        st.integers(0, MAX_PICTURE_BYTES - 1),
        st.binary(min_size=1, max_size=99),
    ),
    st.builds(m.PrefixTokens, st.lists(TOKEN, min_size=1, max_size=64).map(tuple)),
    st.builds(m.Received, position=UINT32, echo=st.integers(0, 2**64 - 1)),
    st.just(m.Cancel()),
    OPEN,
)

SECONDS = st.floats(0.0, 1e9)
BOUNDS = st.builds(m.Limits, UINT32, UINT32, UINT32, UINT32, SECONDS)

MODEL = st.builds(
    ModelInfo,
    NAME,
    NAME,
    st.integers(1, 2**32 - 1),
    st.integers(1, 2**32 - 1),
    st.lists(TOKEN, max_size=5).map(tuple),
    pictures=st.none()
    | st.builds(
        PictureInput,
        TOKEN,
        st.integers(1, MAX_PICTURES),
        st.integers(1, MAX_PICTURE_BYTES),
        st.integers(1, 2**32 - 1),
    ),
)


UINT64 = st.integers(0, 2**64 - 1)
DRAFTED = st.tuples(UINT64, UINT64).map(lambda pair: sorted(pair, reverse=True))
TOTALS = st.builds(
    lambda drafted, rest: m.DraftTotals(*chain(*drafted), *rest),
    st.tuples(DRAFTED, DRAFTED, DRAFTED),
    st.tuples(UINT64, UINT64, UINT64),
)


@st.composite
def infos(draw: st.DrawFn) -> m.VerifierInfo:
    most = draw(UINT32)
    held = draw(st.integers(0, most))
    adapters = tuple(draw(st.lists(MODEL, max_size=3)))
    drafts = draw(st.none() | TOTALS)
    return m.VerifierInfo(draw(MODEL), draw(BOUNDS), held, most, draw(UINT32), adapters, drafts)


DOWNLINK: st.SearchStrategy[m.Downlink] = st.one_of(
    commits(),
    st.builds(
        m.Opened,
        limits=BOUNDS,
        model=NAME,
        position=UINT32,
        prefix_block=st.integers(0, 1 << 16),
        picture_tokens=st.integers(0, 1 << 20),
    ),
    st.just(m.PrefixMissing()),
    st.builds(
        m.PicturesMissing,
        st.lists(st.integers(0, MAX_PICTURES - 1), min_size=1, unique=True).map(
            lambda numbers: tuple(sorted(numbers))
        ),
    ),
    st.builds(m.Fault, st.sampled_from(m.FaultCode), st.text(max_size=50), SECONDS),
)


@given(UPLINK)
def test_an_uplink_message_comes_out_as_it_went_in(message: m.Uplink) -> None:
    assert codec.decode_uplink(codec.encode_uplink(message, LIMITS), LIMITS) == message


@given(DOWNLINK)
def test_a_downlink_message_comes_out_as_it_went_in(message: m.Downlink) -> None:
    assert codec.decode_downlink(codec.encode_downlink(message, LIMITS), LIMITS) == message


@given(infos())
def test_verifier_info_comes_out_as_it_went_in(info: m.VerifierInfo) -> None:
    assert codec.decode_info(codec.encode_info(info, LIMITS), LIMITS) == info


def test_drafts_that_cannot_be_are_refused_and_a_peer_of_before_tells_none() -> None:
    info = m.VerifierInfo(ModelInfo("m", "v", 9, 8), m.Limits(), 0, 0, drafts=m.DraftTotals(3, 2))
    assert codec.decode_info(codec.encode_info(replace(info, drafts=None))).drafts is None
    with pytest.raises(
        codec.ProtocolViolation, match=r"DraftTotals.device_accepted is 4.*\[0, 3\]"
    ):
        codec.encode_info(replace(info, drafts=m.DraftTotals(3, 4)))
    with pytest.raises(codec.ProtocolViolation, match=r"DraftTotals.model_us is -1"):
        codec.encode_info(replace(info, drafts=m.DraftTotals(model_us=-1)))


# Every parameter differs from its usual value.
OTHER: dict[str, Any] = {
    **{"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5},
    **{"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {3: 1.0}, "seed": 7},
    **{"stop_token_ids": (2,), "stop": ("end",), "max_tokens": 9, "ignore_eos": True},
    "min_tokens": 5,
    "constraint": Constraint(ConstraintKind.REGEX, "a"),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_no_sampling_parameter_is_forgotten(name: str) -> None:
    assert OTHER[name] != getattr(SamplingParams(), name)
    sampling = SamplingParams(**{name: OTHER[name]})
    decoded = codec.decode_uplink(codec.encode_uplink(m.Open("s", "", "", (1,), sampling=sampling)))
    assert isinstance(decoded, m.Open)
    # The device looks for stop strings, so they do not travel.
    assert decoded.sampling == (SamplingParams() if name == "stop" else sampling)


@given(
    UPLINK.map(lambda message: codec.encode_uplink(message, LIMITS))
    | DOWNLINK.map(lambda message: codec.encode_downlink(message, LIMITS)),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 1 << 16),
)
@settings(max_examples=300)
def test_a_damaged_message_decodes_or_is_refused(
    payload: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(payload)
    for index, value in changes:
        damaged[index % len(damaged)] = value
    for form in (bytes(damaged), bytes(damaged[: cut % len(damaged)]), payload + payload):
        for decode in (codec.decode_uplink, codec.decode_downlink):
            with suppress(codec.ProtocolViolation):
                decode(form, LIMITS)


@given(named_opens())
def test_a_version_without_prefixes_finds_no_prompt_in_an_open_that_names_one(
    message: m.Open,
) -> None:
    """Such a version knows the fields up to ``plain``. It must refuse, since it would generate from
    the end of a prompt."""
    wire = pb.DeviceMessage.FromString(codec.encode_uplink(message, LIMITS)).open
    wire.ClearField("prefix")
    wire.ClearField("prefix_key")
    with pytest.raises(codec.ProtocolViolation, match=r"Open.prompt has 0 entries"):
        codec.decode_uplink(pb.DeviceMessage(open=wire).SerializeToString(), LIMITS)


@given(pictured_opens())
def test_a_version_without_pictures_finds_no_prompt_in_an_open_that_has_some(
    message: m.Open,
) -> None:
    """Such a version knows the fields up to ``prefix``. It must refuse, since it would generate as
    if the pictures were not there."""
    wire = pb.DeviceMessage.FromString(codec.encode_uplink(message, LIMITS)).open
    wire.ClearField("media")
    with pytest.raises(codec.ProtocolViolation, match=r"Open.prompt has 0 entries"):
        codec.decode_uplink(pb.DeviceMessage(open=wire).SerializeToString(), LIMITS)


def test_bytes_of_a_picture_cost_less_than_others() -> None:
    part = m.PicturePart(0, 0, b"x" * 65_536)
    assert codec.charged_bytes(part, 65_540) == 65_540 / 64
    assert codec.charged_bytes(m.Cancel(), 9) == 9.0


def test_what_a_later_version_adds_is_ignored() -> None:
    unknown_field = bytes([14 << 3, 7])
    assert codec.decode_uplink(codec.encode_uplink(m.Received(9, 1)) + unknown_field) == m.Received(
        9, 1
    )


def test_a_version_that_does_not_count_pictures_reads_the_same_opened() -> None:
    """Oracle: the messages of such a version, made of today's description without the field. An
    ``Opened`` without pictures has the same bytes as before."""
    description = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    (fields,) = [one.field for one in description.message_type if one.name == "Opened"]
    (new,) = [one for one in fields if one.name == "picture_tokens"]
    fields.remove(new)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(description)
    earlier = message_factory.GetMessageClass(
        pool.FindMessageTypeByName("edgespec.v1.VerifierMessage")
    )
    plain = m.Opened(m.Limits(), "toy", 12, prefix_block=64)
    payload = codec.encode_downlink(replace(plain, picture_tokens=8), LIMITS)
    read: Any = earlier.FromString(payload)
    read.DiscardUnknownFields()
    assert read.SerializeToString() == codec.encode_downlink(plain, LIMITS)
    assert codec.decode_downlink(read.SerializeToString(), LIMITS) == plain


def _open(**fields: Any) -> bytes:
    defaults: dict[str, Any] = {"version": 1, "session_id": "s", "prompt": [1]}
    return pb.DeviceMessage(open=pb.Open(**{**defaults, **fields})).SerializeToString()


REFUSALS = (Path(__file__).parent / "wire_refusals.txt").read_text(encoding="utf-8")
KINDS: dict[str, tuple[type[Any], Callable[[bytes, codec.WireLimits], object]]] = {
    "device": (pb.DeviceMessage, codec.decode_uplink),
    "verifier": (pb.VerifierMessage, codec.decode_downlink),
    "info": (pb.InfoReply, codec.decode_info),
}


def write_out(found: re.Match[str]) -> str:
    return "".join(found[1].replace("#", str(number)) for number in range(int(found[2])))


@pytest.mark.parametrize("refusal", re.findall(r"^\w.* => .*$", REFUSALS, re.MULTILINE))
def test_a_violation_names_the_field_the_value_and_the_bound(refusal: str) -> None:
    head, _, said = refusal.partition(" => ")
    kind, _, text = head.partition(" | ")
    wire, decode = KINDS[kind.rstrip(" |")]
    message = text_format.Parse(re.sub(r"@<(.*?)>\*(\d+)", write_out, text), wire())
    with pytest.raises(codec.ProtocolViolation, match=re.escape(said)):
        decode(message.SerializeToString(), LIMITS)


def test_bytes_that_are_no_message_are_refused() -> None:
    for payload, text in (
        (b"\xff\xff", "2 bytes are not a DeviceMessage"),
        (b"\x0a" * 2_000_000, r"bytes of the message is 2000000, but must be in \[0, 1048576\]"),
    ):
        with pytest.raises(codec.ProtocolViolation, match=text):
            codec.decode_uplink(payload, LIMITS)


@pytest.mark.parametrize(
    "message",
    [
        m.Draft(5, (5,), (1,)),
        m.Draft(5, (4, 5), (1,)),
        m.Draft(5, (4,), (-1,)),
        m.Draft(5, (0,), (1,), base_position=3, base_hash=1 << 32),
        m.Received(0, 1 << 64),
        m.Open("s", "", "", (1,), sampling=SamplingParams(logit_bias={-1: 1.0})),
    ],
)
def test_what_would_be_refused_is_not_sent(message: m.Uplink) -> None:
    with pytest.raises(codec.ProtocolViolation, match=r"must"):
        codec.encode_uplink(message)


def test_a_long_fault_is_cut_and_still_arrives() -> None:
    decoded = codec.decode_downlink(
        codec.encode_downlink(m.Fault(m.FaultCode.INTERNAL, "ä" * 2000))
    )
    assert isinstance(decoded, m.Fault)
    assert decoded.message == "ä" * 512


# A vocabulary of 150 000, a late position in the generation, and a pass of some 30 ms.
CHAIN = m.Draft(first_node_id=5000, parents=(4999, 5000), tokens=(149_000, 148_000))
RUN_AHEAD = m.Commit(4000, (149_000,), verify_us=31_000)
CORRECTION = m.Commit(4000, (149_000,), stale=1, queue_us=17_000, verify_us=31_000, rows=2)
ECHOED = m.Commit(4000, (149_000,), verify_us=31_000, echo=100, held_us=17_000)


@pytest.mark.parametrize(
    ("message", "budget_bytes"),
    [
        (CHAIN, 12 * 2),
        (m.Draft(5000, (4999,), (149_000,)), 12),
        (RUN_AHEAD, 24),
        (CORRECTION, 24),
        (ECHOED, 24),
        (m.Commit(4000, (149_000,) * 5, 4, 1, 17_000, 31_000, 8, 100, 18_000), 24 * 5),
        (replace(CORRECTION, echo=100, held_us=17_000), 28),
        (m.Received(4000, 100), 8),
    ],
)
def test_a_message_stays_within_its_payload_budget(
    message: m.Uplink | m.Downlink, budget_bytes: int
) -> None:
    assert codec.payload_bytes(message) <= budget_bytes


def test_a_commit_may_hold_as_many_tokens_as_one_resume_is_sent_in() -> None:
    full = m.Commit(7, tuple(range(m.MAX_COMMIT_TOKENS)))
    assert codec.decode_downlink(codec.encode_downlink(full)) == full
    with pytest.raises(codec.ProtocolViolation, match="has 4097 entries, but must have 0 to 4096"):
        codec.encode_downlink(m.Commit(7, (1,) * (m.MAX_COMMIT_TOKENS + 1)))


@pytest.mark.parametrize("prompt_length", [1025, 60_000])
def test_an_open_beyond_the_context_is_refused_by_its_count(
    prompt_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = codec.WireLimits.for_context(1024)
    monkeypatch.setattr("edgespec.wire.codec.check_tokens", fail_decoding)
    with pytest.raises(codec.ContextExceeded, match=f"{prompt_length} tokens .* context is 1024"):
        codec.decode_uplink(_open(prompt=[7] * prompt_length), limits)
    with pytest.raises(codec.ContextExceeded, match="1025 tokens"):
        codec.decode_uplink(_open(prompt=[7] * 1024, committed=[7]), limits)


def test_an_open_that_could_never_fit_is_refused_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payload = _open(prompt=[7] * 300_000)
    monkeypatch.setattr("edgespec.wire.codec.pb.DeviceMessage", fail_decoding)
    with pytest.raises(codec.ProtocolViolation, match=r"is 300013, but must be in \[0, 262144\]"):
        codec.decode_uplink(payload, codec.WireLimits.for_context(1024))


def fail_decoding(*_: object) -> tuple[int, ...]:
    raise AssertionError("it was decoded")


def test_a_secret_is_in_no_repr() -> None:
    message = m.Open("s", "", "", (1,), session_secret=b"hush")
    assert "hush" not in repr(message)
    assert message != replace(message, session_secret=b"")
