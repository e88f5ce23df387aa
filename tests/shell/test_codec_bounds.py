"""The codec at its bounds: full and empty commits, Opens as long as the context, secrets.

Oracle: a message comes out as it went in, or is refused before its tokens are copied.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edgespec.core.protocol.messages import MAX_COMMIT_TOKENS, Commit, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.wire.codec import decode_downlink, decode_uplink, encode_downlink, encode_uplink
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.wire_limits import ContextExceeded, ProtocolViolation, WireLimits


def open_bytes(**fields: Any) -> bytes:
    defaults: dict[str, Any] = {"version": 1, "session_id": "s", "prompt": [1]}
    return pb.DeviceMessage(open=pb.Open(**{**defaults, **fields})).SerializeToString()


# --- commits at their bounds ----------------------------------------------------------------


def test_a_commit_may_hold_as_many_tokens_as_one_resume_is_sent_in() -> None:
    full = Commit(7, tuple(range(MAX_COMMIT_TOKENS)))
    assert decode_downlink(encode_downlink(full)) == full
    with pytest.raises(ProtocolViolation, match="has 4097 entries, but must have 0 to 4096"):
        encode_downlink(Commit(7, (1,) * (MAX_COMMIT_TOKENS + 1)))


def test_a_commit_may_be_empty_to_say_that_the_verifier_is_at_work() -> None:
    for commit in (Commit(7, ()), Commit(7, (), stale=3, echo=9, held_us=5)):
        assert decode_downlink(encode_downlink(commit)) == commit


# --- the context bounds an Open -------------------------------------------------------------


@pytest.mark.parametrize("prompt_length", [1025, 60_000])
def test_an_open_beyond_the_context_is_refused_by_its_count(
    prompt_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = WireLimits.for_context(1024)
    monkeypatch.setattr("edgespec.wire.codec.check_tokens", _never)
    with pytest.raises(ContextExceeded, match=f"{prompt_length} tokens .* context is 1024"):
        decode_uplink(open_bytes(prompt=[7] * prompt_length), limits)
    with pytest.raises(ContextExceeded, match="1025 tokens"):
        decode_uplink(open_bytes(prompt=[7] * 1024, committed=[7]), limits)


def test_an_open_that_could_never_fit_is_refused_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    payload = open_bytes(prompt=[7] * 300_000)
    monkeypatch.setattr("edgespec.wire.codec.pb", None)  # nothing can be parsed
    with pytest.raises(ProtocolViolation, match=r"is 300013, but must be in \[0, 262144\]"):
        decode_uplink(payload, WireLimits.for_context(1024))


def test_the_longest_open_of_a_context_fits() -> None:
    longest = Open(
        "s" * 128,
        "m" * 256,
        "v" * 256,
        (150_000,) * 131_071,
        (150_000,),
        SamplingParams(logit_bias=dict.fromkeys(range(1024), 0.5)),
        session_secret=b"x" * 64,
    )
    limits = WireLimits.for_context(131_072)
    assert decode_uplink(encode_uplink(longest, limits), limits) == longest


def _never(*_: object) -> tuple[int, ...]:
    raise AssertionError("tokens were decoded")


def test_a_secret_is_in_no_repr() -> None:
    message = Open("s", "", "", (1,), session_secret=b"hush")
    assert "hush" not in repr(message)
    assert message != dataclasses.replace(message, session_secret=b"")
