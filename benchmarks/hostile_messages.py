"""Hostile messages, a function of a seed; and the fuzz of the codec alone.

Four kinds, in equal parts: random bytes, messages that parse as protobuf but hold numbers nobody
should send, valid messages with damaged bytes, and valid ones that come at the wrong time. Oracle:
the codec returns a message that it can encode and decode again to an equal one, or it raises
``ProtocolViolation``; nothing else.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable

from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Open,
    Opened,
    Received,
    RunAhead,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.wire.codec import (
    ProtocolViolation,
    WireLimits,
    decode_downlink,
    decode_info,
    decode_uplink,
    encode_downlink,
    encode_info,
    encode_uplink,
)
from edgespec.wire.pb import speculation_pb2 as pb

VOCABULARY = 64
# Numbers at and around the bounds of fields.
_EDGES = (0, 1, 2, 63, 64, 127, 128, 255, 256, 4095, 4096, 1 << 16, (1 << 31) - 1, (1 << 32) - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-38, 5e-324, 1e308, float("inf"), float("nan"), 100.0, 1e-9)


def number(dice: random.Random) -> int:
    """A number below 2^32, often one at a bound."""
    return dice.choice(_EDGES) if dice.random() < 0.6 else dice.randrange(1 << 32)


def tokens(dice: random.Random, most: int = 24) -> tuple[int, ...]:
    """Token ids of the vocabulary; now and then one outside it."""
    if dice.random() < 0.1:
        return tuple(number(dice) for _ in range(dice.randrange(1, 4)))
    return tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(most)))


def sampling(dice: random.Random) -> SamplingParams:
    """Any parameters that are allowed, the costly ones too."""
    return SamplingParams(
        temperature=dice.choice((0.0, 0.7, 1.0, 100.0, 1e-9)),
        top_k=dice.choice((0, 1, 5, 1 << 20)),
        top_p=dice.choice((1.0, 0.9, 1e-6)),
        min_p=dice.choice((0.0, 0.1, 1.0)),
        repetition_penalty=dice.choice((1.0, 1.3, 0.01, 100.0)),
        presence_penalty=dice.choice((0.0, -100.0, 2.0)),
        frequency_penalty=dice.choice((0.0, 0.5, 100.0)),
        logit_bias={dice.randrange(VOCABULARY): dice.uniform(-100.0, 100.0) for _ in range(2)},
        seed=dice.randrange(1 << 64),
        stop_token_ids=(dice.randrange(VOCABULARY),) if dice.random() < 0.2 else (),
        max_tokens=dice.choice((1, 7, 64, 1 << 20)),
        ignore_eos=dice.random() < 0.5,
    )


def valid_open(dice: random.Random, session_id: str = "") -> Open:
    """An Open that a verifier with a vocabulary of 64 or more serves."""
    return Open(
        session_id or f"fuzz-{dice.randrange(40)}",
        "",
        "",
        tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 40))),
        tuple(dice.randrange(VOCABULARY) for _ in range(dice.choice((0, 0, 0, 3)))),
        sampling(dice),
        dice.choice(list(RunAhead)),
        drafting=dice.random() < 0.7,
        session_secret=dice.randbytes(dice.choice((0, 16, 64))),
    )


def valid_uplink(dice: random.Random) -> bytes:
    """A message that is well-formed, whatever it says."""
    kind = dice.randrange(5)
    if kind == 0:
        return encode_uplink(Received(number(dice) % 4096, number(dice)))
    if kind == 1:
        return encode_uplink(Cancel() if dice.random() < 0.3 else Draft(1, (), ()))
    if kind == 2:
        return encode_uplink(valid_open(dice))
    count, first = dice.randrange(1, 40), dice.choice((1, 1, 50, 1 << 20))
    parents = tuple(dice.choice((0, first + i - 1)) for i in range(count))
    ids = tuple(dice.randrange(VOCABULARY) for _ in range(count))
    base = dice.randrange(1, 200) if 0 in parents else 0
    return encode_uplink(Draft(first, parents, ids, base, dice.randrange(1 << 32) if base else 0))


def valid_downlink(dice: random.Random) -> bytes:
    """Any message of a verifier."""
    kind = dice.randrange(4)
    if kind == 0:
        limits = Limits(number(dice), number(dice), number(dice), number(dice), dice.random() * 99)
        return encode_downlink(Opened(limits, "model", number(dice)))
    if kind == 1:
        return encode_downlink(Fault(dice.choice(list(FaultCode)), "why", dice.random()))
    ids = tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(20)))
    finish = dice.choice((None, None, *FinishReason))
    position = dice.randrange(1 << 20)
    return encode_downlink(Commit(position, ids, dice.randrange(len(ids) + 1), finish=finish))


def odd_uplink(dice: random.Random) -> bytes:
    """A message that parses, with numbers of any size in any field."""
    kind = dice.randrange(4)
    if kind == 0:
        return pb.DeviceMessage(
            received=pb.Received(position=number(dice), echo=number(dice))
        ).SerializeToString()
    if kind == 1:
        draft = pb.Draft(
            first_node_id=number(dice),
            tokens=tokens(dice, 400),
            parent_deltas=tokens(dice),
            base_position=number(dice),
            base_hash=number(dice),
        )
        return pb.DeviceMessage(draft=draft).SerializeToString()
    odd = pb.Sampling(
        temperature=dice.choice(_FLOATS),
        top_k=number(dice),
        top_p=dice.choice(_FLOATS),
        min_p=dice.choice(_FLOATS),
        repetition_penalty=dice.choice(_FLOATS),
        presence_penalty=dice.choice(_FLOATS),
        logit_bias={number(dice): dice.choice(_FLOATS)},
        stop_token_ids=tokens(dice, 90),
        max_tokens=number(dice),
    )
    request = pb.Open(
        version=dice.choice((1, 1, 1, 0, 2)),
        session_id=dice.choice(("a", "a\nb", "x" * 129, "", "\x1b[31m", "ä" * 9)),
        model=dice.choice(("", "", "other", "m" * 300)),
        prompt=tokens(dice, 90),
        committed=tokens(dice),
        sampling=odd if dice.random() < 0.7 else None,
        run_ahead=dice.choice((0, 1, 2, 3)),  # type: ignore[arg-type] # that is the point
        rule=dice.choice(("", "", "typical")),
        session_secret=dice.randbytes(dice.choice((0, 64, 65))),
    )
    return pb.DeviceMessage(open=request).SerializeToString()


def odd_downlink(dice: random.Random) -> bytes:
    """The same for the other direction."""
    commit = pb.Commit(
        position=number(dice),
        tokens=tokens(dice, 90),
        accepted=number(dice) if dice.random() < 0.3 else 0,
        stale=number(dice),
        echo=number(dice),
        held_us=number(dice),
    )
    limits = pb.Limits(context_length=number(dice), lease_s=dice.choice(_FLOATS))
    fault = pb.Fault(message="x" * dice.choice((0, 1024, 1025)), retry_after_s=dice.choice(_FLOATS))
    message = dice.choice(
        (
            pb.VerifierMessage(commit=commit),
            pb.VerifierMessage(opened=pb.Opened(limits=limits, position=number(dice))),
            pb.VerifierMessage(fault=fault),
        )
    )
    return message.SerializeToString()


def damaged(payload: bytes, dice: random.Random) -> bytes:
    """``payload`` with bytes changed, cut off, repeated or put in."""
    data = bytearray(payload or b"\x00")
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(data))
        change = dice.randrange(4)
        if change == 0:
            data[at] = dice.randrange(256)
        elif change == 1:
            del data[max(1, at) :]
        elif change == 2:
            data += data[at:][:400]
        else:
            data[at:at] = dice.randbytes(dice.randrange(1, 12))
    return bytes(data)


def hostile_uplink(dice: random.Random) -> bytes:
    """One message of a device that nobody should send."""
    return _hostile(dice, valid_uplink, odd_uplink)


def hostile_downlink(dice: random.Random) -> bytes:
    """One message of a verifier that nobody should send."""
    return _hostile(dice, valid_downlink, odd_downlink)


def _hostile(
    dice: random.Random,
    valid: Callable[[random.Random], bytes],
    odd: Callable[[random.Random], bytes],
) -> bytes:
    kind = dice.randrange(4)
    if kind == 0:
        return dice.randbytes(dice.choice((0, 1, 3, 20, 200, 3000)))
    if kind == 1:
        return odd(dice)
    return damaged(valid(dice), dice) if kind == 2 else valid(dice)


def fuzz_codec(count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Decode ``count`` hostile messages; what became of them, and the findings."""
    dice, limits = random.Random(seed), WireLimits.for_context(256)
    ends: Counter[str] = Counter()
    findings = []
    for index in range(count):
        up = index % 2 == 0
        payload = hostile_uplink(dice) if up else hostile_downlink(dice)
        for decode, encode in (
            (decode_uplink, encode_uplink) if up else (decode_downlink, encode_downlink),
            (decode_info, encode_info),
        ):
            try:
                message = decode(payload, limits)
                ends[f"codec: {type(message).__name__}"] += 1
                if decode(encode(message, limits), limits) != message:  # type: ignore[arg-type]
                    findings.append(f"message {index}: another one after a round trip: {message}")
            except ProtocolViolation as violation:
                ends[f"codec: {type(violation).__name__}"] += 1
            except Exception:
                findings.append(f"message {index}, {payload!r}:\n{traceback.format_exc()}")
    return ends, findings
