"""Pictures in prompts: headers, the store, and whole generations over an engine.

Oracle of the generations: the toy's law for exactly these pictures, computed without sessions. What
a verifier keeps, has dropped or never had changes only how many bytes are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device import events as dev
from edgespec.core.device.comparison_policies import WindowedPolicy
from edgespec.core.device.kept_prefixes import KeptPrefixes
from edgespec.core.device.link_session import SLOWEST_BYTES_PER_S, ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import ReadPictures
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.pictures import (
    MAX_PICTURES,
    PART_BYTES,
    Picture,
    PictureInput,
    PlacedPicture,
    check_picture,
    place_pictures,
    read_header,
)
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.picture_store import PictureStore
from edgespec.verifier.targets.toy import ToyTarget
from tests.core.test_prefixes import (
    BOUNDS,
    LIMITS,
    MODEL,
    SAMPLING,
    A,
    B,
    Played,
    Verifier,
    new_agent,
    play,
)
from tests.kit.pictures import gif, jpeg, png, segment, solid_png, webp
from tests.sim.faults.checks import target_stream

# --- headers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(solid_png(3, 2), ("PNG", 3, 2), id="png"),
        pytest.param(gif(300, 2), ("GIF", 300, 2), id="gif"),
        pytest.param(webp(1000, 7, b"VP8X"), ("WebP", 1000, 7), id="webp-extended"),
        pytest.param(webp(16_384, 1, b"VP8L"), ("WebP", 16_384, 1), id="webp-lossless"),
        pytest.param(webp(16_383, 9, b"VP8 "), ("WebP", 16_383, 9), id="webp-lossy"),
        pytest.param(jpeg(640, 480), ("JPEG", 640, 480), id="jpeg-baseline"),
        pytest.param(jpeg(5, 6, marker=0xC2), ("JPEG", 5, 6), id="jpeg-progressive"),
        pytest.param(
            jpeg(7, 8, before=segment(0xE1, bytes(500)) + segment(0xC4) + b"\xff\xff\xd8\xff\x01"),
            ("JPEG", 7, 8),
            id="jpeg-behind-other-segments",
        ),
        pytest.param(
            jpeg(7, 8, before=segment(0xE1, jpeg(9, 9))), ("JPEG", 7, 8), id="jpeg-with-thumbnail"
        ),
    ],
)
def test_a_header_states_format_and_size(data: bytes, expected: tuple[str, int, int]) -> None:
    header = read_header(data)
    assert (header.format, header.width, header.height) == expected
    assert header.pixels == expected[1] * expected[2]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b"", "no picture in a known format", id="empty"),
        pytest.param(b"<svg/>", "no picture in a known format (PNG, JPEG, WebP or GIF)", id="svg"),
        pytest.param(png()[:20], "PNG file with a damaged header", id="png-cut"),
        pytest.param(png(0, 9), "PNG file with a damaged header", id="png-without-width"),
        pytest.param(gif(1, 1)[:9], "GIF file with a damaged header", id="gif-cut"),
        pytest.param(webp(1, 1)[:29], "WebP file with a damaged header", id="webp-cut"),
        pytest.param(
            b"RIFF" + bytes(4) + b"WAVE" + bytes(40), "WebP file with a damaged", id="riff-sound"
        ),
        pytest.param(jpeg(1, 1)[:8], "JPEG file with a damaged header", id="jpeg-cut"),
        pytest.param(
            jpeg(1, 1, before=segment(0xDA)), "JPEG file with a damaged", id="jpeg-without-frame"
        ),
        pytest.param(
            jpeg(1, 1, before=b"\xff\xe1\0\0"), "JPEG file with a damaged", id="jpeg-empty-segment"
        ),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=r"is (no picture|a)") as caught:
        read_header(data)
    assert why in str(caught.value)


@given(st.binary(max_size=60), st.sampled_from([png(), gif(2, 2), webp(2, 2), jpeg(2, 2)]))
def test_any_bytes_have_a_header_or_are_refused(noise: bytes, whole: bytes) -> None:
    for data in (noise, whole[: len(noise)], whole[:12] + noise, whole[:2] + noise):
        with suppress(ValueError):
            assert read_header(data).pixels > 0


def test_bounds_are_named_with_the_value() -> None:
    bounds = PictureInput(token=5, max_bytes=300, max_pixels=1000)
    assert check_picture(png(100, 10, size=300), bounds).pixels == 1000
    with pytest.raises(ValueError, match="has 301 bytes, but a picture may have at most 300"):
        check_picture(png(size=301), bounds)
    with pytest.raises(ValueError, match=r"has 101 x 10 = 1010 pixels, but .* at most 1000"):
        check_picture(png(101, 10), bounds)


def test_pictures_go_to_their_placeholders() -> None:
    bounds = PictureInput(token=9)
    assert place_pictures([1, 9, 2, 9], [b"a", b"b"], bounds) == (
        PlacedPicture(1, b"a"),
        PlacedPicture(3, b"b"),
    )
    with pytest.raises(ValueError, match=r"has 1 placeholders \(token 9\) for 2 pictures"):
        place_pictures([1, 9], [b"a", b"b"], bounds)


# --- the store --------------------------------------------------------------------------------


def test_a_picture_is_found_by_its_owner_and_key_alone() -> None:
    store = PictureStore(10_000)
    store.keep("a", b"k", b"n", b"data")
    assert store.find("a", b"k", b"n") == b"data"
    assert store.find("b", b"k", b"n") is None
    assert store.find("a", b"other", b"n") is None
    assert (store.found, store.missed, store.received_bytes) == (1, 2, 4)
    store.forget("a")
    assert store.find("a", b"k", b"n") is None
    assert store.held_bytes == 0


def test_a_full_store_drops_what_its_largest_owner_used_longest_ago() -> None:
    size = 1000
    store = PictureStore(4 * (size + 256))
    for name in (b"1", b"2", b"3"):
        store.keep("a", b"k", name, bytes(size))
    store.keep("b", b"k", b"4", bytes(size))
    assert store.find("a", b"k", b"1") is not None  # used again
    store.keep("b", b"k", b"5", bytes(size))
    kept = [one for one in (b"1", b"2", b"3") if store.find("a", b"k", one) is not None]
    assert (kept, store.evicted, store.held_bytes) == ([b"1", b"3"], 1, store.most_bytes)


def test_a_picture_larger_than_the_store_is_not_kept() -> None:
    store = PictureStore(1000)
    store.keep("a", b"k", b"small", bytes(10))
    store.keep("a", b"k", b"large", bytes(1000))
    assert store.find("a", b"k", b"large") is None
    assert store.find("a", b"k", b"small") is not None


def test_arriving_pictures_have_a_bound_and_a_peer_half_of_it() -> None:
    store = PictureStore(1000)
    assert store.admit(1, "here", 500) is None
    assert "of here 500 bytes are arriving, and the limit is 500" in str(store.admit(2, "here", 1))
    assert store.admit(3, "there", 500) is None
    assert "of all devices 1000 bytes" in str(store.admit(4, "elsewhere", 1))
    store.release(1)
    store.release(1)
    assert store.arriving_bytes == 500
    assert store.admit(2, "here", 500) is None


# --- generations ------------------------------------------------------------------------------

TOKEN = 9
INPUT = PictureInput(token=TOKEN, max_count=3, max_bytes=200_000, max_pixels=1 << 20)
WITH_STORE = replace(BOUNDS, picture_bytes=1 << 20)
CAT, DOG = png(96, 64, size=150_000, seed=1), png(64, 64, size=300, seed=2)
PROMPT = (1, 2, TOKEN, 3, 4, TOKEN, 5)
PLACED = (PlacedPicture(2, CAT), PlacedPicture(5, DOG))


def seeing_verifier(limits: ee.EngineLimits = WITH_STORE) -> Verifier:
    return Verifier(limits, pictures=INPUT)


def expected_tokens(prompt: Sequence[int], pictures: Sequence[PlacedPicture]) -> tuple[int, ...]:
    target = ToyTarget(MODEL, pictures=INPUT)
    seed = target.read_pictures(prompt, [one.data for one in pictures], ()).content
    assert isinstance(seed, int)
    return target_stream(MODEL.perturbed(0.5, seed), prompt, SAMPLING, LIMITS.context_length).tokens


def check_output(
    played: Played, prompt: Sequence[int] = PROMPT, pictures: Sequence[PlacedPicture] = PLACED
) -> None:
    assert isinstance(played.end, dev.Finish)
    assert tuple(played.tokens) == expected_tokens(prompt, pictures)


def count_asked(played: Played) -> list[int]:
    """Return how many pictures each ``PicturesMissing`` asked for."""
    asked = [one for one in played.received if isinstance(one, m.PicturesMissing)]
    return [len(one.numbers) for one in asked]


def sent_bytes(played: Played) -> int:
    return sum(len(one.data) for one in played.sent if isinstance(one, m.PicturePart))


def test_a_conversation_sends_each_picture_once() -> None:
    verifier, agent = seeing_verifier(), new_agent()
    only_cat = (1, 2, TOKEN, 3)
    first = play(verifier, only_cat, agent, pictures=PLACED[:1])
    check_output(first, only_cat, PLACED[:1])
    second = play(verifier, PROMPT, agent, pictures=PLACED)
    check_output(second)
    third = play(verifier, PROMPT, agent, pictures=PLACED)
    check_output(third)
    assert [count_asked(one) for one in (first, second, third)] == [[1], [1], []]
    assert [sent_bytes(one) for one in (first, second, third)] == [len(CAT), len(DOG), 0]
    store = verifier.engine.pictures
    assert (store.found, store.missed, store.arriving_bytes) == (3, 2, 0)
    assert store.received_bytes == len(CAT) + len(DOG)
    assert second.counters.picture_misses == 1
    assert second.counters.picture_bytes == len(DOG)


def test_the_pictures_change_the_output_and_drafts_without_them_are_often_right() -> None:
    verifier = seeing_verifier()
    with_pictures = play(verifier, PROMPT, new_agent(), pictures=PLACED)
    without = play(verifier, PROMPT, new_agent())
    assert with_pictures.tokens != without.tokens
    acceptance = with_pictures.counters.acceptance
    assert acceptance is not None
    assert acceptance > 4 / MODEL.vocabulary_size  # chance is one in that number


def test_one_picture_at_two_places_is_sent_once() -> None:
    placed = (PlacedPicture(2, DOG), PlacedPicture(5, DOG))
    played = play(seeing_verifier(), PROMPT, new_agent(), pictures=placed)
    check_output(played, PROMPT, placed)
    assert (count_asked(played), sent_bytes(played)) == ([1], len(DOG))


def test_parts_have_a_fixed_size() -> None:
    played = play(seeing_verifier(), PROMPT, new_agent(), pictures=PLACED)
    sizes = [len(one.data) for one in played.sent if isinstance(one, m.PicturePart)]
    assert sizes == [PART_BYTES, PART_BYTES, len(CAT) - 2 * PART_BYTES, len(DOG)]


def test_a_picture_cannot_be_named_under_another_key_or_credential() -> None:
    verifier, agent, other = seeing_verifier(), new_agent(), new_agent()
    for kept, credential in ((agent, A), (other, A), (agent, B), (agent, A)):
        played = play(verifier, PROMPT, kept, credential, pictures=PLACED)
        check_output(played)
        expected = [] if (kept, credential) == (agent, A) and verifier.streams > 1 else [2]
        assert count_asked(played) == expected


def test_an_evicted_picture_is_asked_for_again() -> None:
    room = 2 * (len(CAT) + 256)  # half of it is what a prompt may have
    verifier, agent = seeing_verifier(replace(BOUNDS, picture_bytes=room)), new_agent()
    prompt = (1, 2, TOKEN, 3)
    for seed, asked in ((1, [1]), (2, [1]), (3, [1]), (1, [1]), (1, [])):
        placed = (PlacedPicture(2, png(size=150_000, seed=seed)),)
        played = play(verifier, prompt, agent, pictures=placed)
        check_output(played, prompt, placed)
        assert count_asked(played) == asked
    assert verifier.engine.pictures.evicted == 2
    assert verifier.engine.pictures.held_bytes <= room


@pytest.mark.parametrize("restarts", [False, True], ids=["resumed", "on-another-verifier"])
def test_a_broken_link_continues_with_the_same_pictures(restarts: bool) -> None:
    verifier, agent = seeing_verifier(), new_agent()
    then = seeing_verifier() if restarts else None
    played = play(verifier, PROMPT, agent, cut_after=10, then=then, pictures=PLACED)
    check_output(played)
    assert count_asked(played) == ([2, 2] if restarts else [2])
    assert [one.pictures for one in played.opens] == [tuple(one.name for one in PLACED)] * 2


def test_a_named_beginning_and_pictures_go_together() -> None:
    verifier, agent = seeing_verifier(), new_agent()
    prompt = (*PROMPT, *range(1, 9), *range(10, 22))
    check_output(play(verifier, prompt, agent, pictures=PLACED), prompt)
    again = (*prompt, 6)
    for pictures_kept in (True, False):
        if not pictures_kept:
            verifier.engine.pictures.forget("")
        played = play(verifier, again, agent, pictures=PLACED)
        check_output(played, again)
        assert played.named[0] >= len(prompt) // 4 * 4
        assert count_asked(played) == ([] if pictures_kept else [2])
    verifier.engine.prefixes.forget("")
    played = play(verifier, again, agent, pictures=PLACED)
    check_output(played, again)
    assert played.missed == 1


def test_drafts_wait_until_the_pictures_are_read() -> None:
    played = play(seeing_verifier(), PROMPT, new_agent(), pictures=PLACED)
    kinds = [type(one) for one in played.sent]
    assert m.Draft in kinds
    assert m.Draft not in kinds[: len(kinds) - kinds[::-1].index(m.PicturePart)]


def test_rows_of_pictures_count_in_the_context() -> None:
    """Ninety-six by 64 pixels are six rows, and 64 by 64 are four: eight more than placeholders."""
    verifier = seeing_verifier()
    played = play(verifier, PROMPT, new_agent(), pictures=PLACED)
    (opened,) = [one for one in played.received if isinstance(one, m.Opened)]
    assert opened.limits.context_length == LIMITS.context_length - 8
    assert (opened.picture_tokens, played.counters.picture_tokens) == (8, 8)
    target = ToyTarget(MODEL, pictures=INPUT)
    small = VerifyEngine(target.info, m.Limits(context_length=14), WITH_STORE)
    fault = refusal_of(small, *send_all(small, PLACED))
    assert fault.code is m.FaultCode.CONTEXT_TOO_LONG
    assert "7 tokens and 2 pictures, which take 8 rows more, do not leave room" in fault.message
    assert "in the context of 14" in fault.message


def test_equal_tokens_with_other_pictures_share_no_cached_rows() -> None:
    """The toy's cache raises an error where a row was computed behind another picture."""
    shape = CacheShape(LIMITS.context_length // 4, 4)
    verifier, agent = seeing_verifier(replace(WITH_STORE, cache=shape)), new_agent()
    swapped = (PlacedPicture(2, DOG), PlacedPicture(5, CAT))
    for pictures in (PLACED, swapped, (), PLACED):
        played = play(verifier, PROMPT, agent, pictures=pictures)
        if pictures:
            check_output(played, PROMPT, pictures)
    assert verifier.engine.cache_scheduler.prefix_hit_tokens > 0


# --- refusals ---------------------------------------------------------------------------------


def opening(pictures: Sequence[Picture], prompt: Sequence[int] = PROMPT) -> ee.StreamOpened:
    request = m.Open(
        "s", "", "", tuple(prompt), sampling=SAMPLING, prefix_key=b"k", pictures=tuple(pictures)
    )
    return ee.StreamOpened(1, request, peer="here", credential=Credential("a"))


def parts_of(number: int, data: bytes) -> list[ee.StreamMessage]:
    return [
        ee.StreamMessage(1, m.PicturePart(number, start, data[start : start + PART_BYTES]))
        for start in range(0, len(data), PART_BYTES)
    ]


def send_all(engine: VerifyEngine, placed: Sequence[PlacedPicture]) -> tuple[ee.EngineAction, ...]:
    """Open a stream, send all pictures and let a toy read them; return the last actions."""
    engine.handle(opening([one.name for one in placed]), 0.0)
    actions: tuple[ee.EngineAction, ...] = ()
    for number, one in enumerate(placed):
        for event in parts_of(number, one.data):
            actions = engine.handle(event, 0.0)
    (read,) = actions
    assert isinstance(read, ee.ReadPictureData)
    done = ToyTarget(MODEL, pictures=INPUT).read_pictures(read.prompt, read.data, read.positions)
    return engine.handle(ee.PicturesRead(1, done), 0.0)


def new_engine(pictures: PictureInput | None = INPUT, most_bytes: int = 1 << 20) -> VerifyEngine:
    target = ToyTarget(MODEL, pictures=pictures)
    return VerifyEngine(target.info, LIMITS, replace(WITH_STORE, picture_bytes=most_bytes))


def refusal_of(engine: VerifyEngine, *actions: ee.EngineAction) -> m.Fault:
    """Return the fault with which these actions end stream 1, of which nothing is left."""
    send, close = actions
    assert isinstance(send, ee.SendTo)
    assert isinstance(send.message, m.Fault)
    assert close == ee.CloseStream(1)
    assert not engine.registry.incomplete
    assert engine.pictures.arriving_bytes == 0
    return send.message


NAME = PLACED[1].name


@pytest.mark.parametrize(
    ("engine", "event", "why"),
    [
        pytest.param(
            new_engine(None), opening([NAME]), "'toy' reads text only here", id="text-model"
        ),
        pytest.param(
            new_engine(),
            opening([replace(NAME, position=at) for at in range(4)], (TOKEN,) * 4),
            "4 pictures, but may have at most 3",
            id="too-many",
        ),
        pytest.param(
            new_engine(),
            opening([replace(NAME, position=2, size_bytes=200_001)], (1, 2, TOKEN)),
            "picture 0 has 200001 bytes, but a picture may have at most 200000",
            id="too-large",
        ),
        pytest.param(
            new_engine(),
            opening([replace(NAME, position=1)], (1, 2, TOKEN)),
            "(token 9) stand at [2] in the prompt, but the pictures at [1]",
            id="elsewhere",
        ),
        pytest.param(
            new_engine(),
            opening([NAME]),
            "(token 9) stand at [2, 5] in the prompt, but the pictures at [5]",
            id="placeholder-in-a-text",
        ),
        pytest.param(
            new_engine(most_bytes=300_000),
            opening([one.name for one in PLACED]),
            "150300 bytes in all, but a prompt may have at most 150000",
            id="too-large-together",
        ),
    ],
)
def test_names_beyond_the_bounds_are_refused_before_any_byte(
    engine: VerifyEngine, event: ee.StreamOpened, why: str
) -> None:
    fault = refusal_of(engine, *engine.handle(event, 0.0))
    assert fault.code is m.FaultCode.INVALID
    assert why in fault.message


def named(data: bytes, position: int = 2) -> Picture:
    return PlacedPicture(position, data).name


LARGE = png(2048, 1024)
SHORT = (1, 2, TOKEN, 3)


@pytest.mark.parametrize(
    ("name", "parts", "why"),
    [
        pytest.param(
            named(DOG),
            [m.PicturePart(0, 0, b"x" * len(DOG))],
            "the bytes of picture 0 do not have the SHA-256",
            id="other-bytes",
        ),
        pytest.param(
            named(DOG), [m.PicturePart(1, 0, DOG)], "byte 0 of picture 1 was sent", id="other-one"
        ),
        pytest.param(
            named(CAT),
            [m.PicturePart(0, PART_BYTES, CAT[:PART_BYTES])],
            f"byte {PART_BYTES} of picture 0 was sent, but byte 0 of picture 0 comes next",
            id="gap",
        ),
        pytest.param(
            named(CAT),
            [m.PicturePart(0, 0, CAT[:1])],
            "a part of 1 bytes from byte 0 of picture 0 was sent, but the picture has 150000",
            id="short-part",
        ),
        pytest.param(
            named(DOG), [m.PicturePart(0, 0, DOG + b"x")], "but the picture has 300", id="too-long"
        ),
        pytest.param(
            named(LARGE),
            [m.PicturePart(0, 0, LARGE)],
            "picture 0 has 2048 x 1024 = 2097152 pixels, but a picture may have at most 1048576",
            id="too-many-pixels",
        ),
        pytest.param(
            named(b"text"),
            [m.PicturePart(0, 0, b"text")],
            "picture 0 is no picture in a known format",
            id="no-picture",
        ),
        pytest.param(
            named(DOG),
            [m.PicturePart(0, 0, DOG), m.PicturePart(0, 0, DOG)],
            "a part of a picture was sent, but none is missing",
            id="once-more",
        ),
        pytest.param(
            named(DOG),
            [m.PrefixTokens((1,))],
            "1 ids were sent for a prefix of 0",
            id="ids-of-a-prefix",
        ),
    ],
)
def test_hostile_parts_end_their_stream(
    name: Picture, parts: Sequence[m.PicturePart], why: str
) -> None:
    engine = new_engine()
    (asked,) = engine.handle(opening([name], SHORT), 0.0)
    assert asked == ee.SendTo(1, m.PicturesMissing((0,)))
    actions: tuple[ee.EngineAction, ...] = ()
    for part in parts:
        actions = engine.handle(ee.StreamMessage(1, part), 0.0)
    fault = refusal_of(engine, *actions)
    assert fault.code is m.FaultCode.INVALID
    assert why in fault.message


def test_parts_that_nobody_asked_for_end_the_session() -> None:
    engine = new_engine()
    engine.handle(opening([], (1, 2)), 0.0)
    actions = engine.handle(ee.StreamMessage(1, m.PicturePart(0, 0, b"x")), 0.0)
    faults = [one.message for one in actions if isinstance(one, ee.SendTo)]
    assert [one.code for one in faults if isinstance(one, m.Fault)] == [m.FaultCode.INVALID]


def test_pictures_that_the_target_cannot_read_are_refused() -> None:
    engine = new_engine()
    engine.handle(opening([named(DOG)], SHORT), 0.0)
    (read,) = engine.handle(parts_of(0, DOG)[0], 0.0)
    assert read == ee.ReadPictureData(1, SHORT, (DOG,), (2,))
    actions = engine.handle(ee.PicturesRead(1, None, "the decoder says no"), 0.0)
    fault = refusal_of(engine, *actions)
    assert (fault.code, fault.message) == (m.FaultCode.INVALID, "the decoder says no")


def test_a_stream_that_is_lost_meanwhile_leaves_nothing() -> None:
    engine = new_engine()
    engine.handle(opening([named(CAT)], SHORT), 0.0)
    engine.handle(parts_of(0, CAT)[0], 0.0)
    assert engine.pictures.arriving_bytes == len(CAT)
    assert engine.handle(ee.StreamLost(1), 0.0) == ()
    assert engine.pictures.arriving_bytes == 0
    # The same while the target reads.
    engine.handle(opening([named(DOG)], SHORT), 0.0)
    engine.handle(parts_of(0, DOG)[0], 0.0)
    assert engine.handle(ee.StreamMessage(1, m.Cancel()), 0.0) == (ee.CloseStream(1),)
    assert engine.handle(ee.PicturesRead(1, ReadPictures(0)), 0.0) == ()
    assert not engine.sessions


def test_parts_may_come_slowly_but_not_never() -> None:
    engine, stall_s = new_engine(), WITH_STORE.stall_s
    engine.handle(opening([named(CAT)], SHORT), 0.0)
    first, second, *_ = parts_of(0, CAT)
    engine.handle(first, 0.9 * stall_s)
    assert engine.handle(ee.Poll(), 1.5 * stall_s) == ()
    engine.handle(second, 1.6 * stall_s)
    while not (actions := engine.handle(ee.Poll(), engine.deadline or 0.0)):
        assert engine.deadline is not None
    fault = refusal_of(engine, *actions)
    assert fault.code is m.FaultCode.OVERLOADED
    assert fault.message == "the pictures did not arrive in time"


def test_pictures_of_other_devices_that_arrive_leave_no_room() -> None:
    engine = new_engine(most_bytes=2 * len(CAT))
    engine.handle(opening([named(CAT)], SHORT), 0.0)
    other = replace(opening([named(DOG)], SHORT), stream=2)
    send, close = engine.handle(other, 0.0)
    assert isinstance(send, ee.SendTo)
    assert isinstance(send.message, m.Fault)
    assert send.message.code is m.FaultCode.OVERLOADED
    assert "of here 150000 bytes are arriving, and the limit is 150000" in send.message.message
    assert close == ee.CloseStream(2)


def test_a_revoked_credential_loses_its_pictures() -> None:
    engine = new_engine()
    send_all(engine, PLACED)
    assert engine.pictures.held_bytes > len(CAT)
    engine.registry.forget_texts("a")
    assert engine.pictures.held_bytes == 0


def test_another_generation_of_the_same_session_has_its_own_pictures() -> None:
    """The secret proves that the device is the same, which may begin anew."""
    engine = new_engine()
    first = opening([named(DOG)], SHORT)
    secret = replace(first.request, session_secret=b"secret")
    engine.handle(replace(first, request=secret), 0.0)
    engine.handle(parts_of(0, DOG)[0], 0.0)
    engine.handle(ee.PicturesRead(1, ReadPictures(0, 1)), 0.0)
    assert list(engine.sessions) == ["s"]
    other = replace(secret, pictures=(named(CAT),))
    actions = engine.handle(replace(first, stream=2, request=other), 0.0)
    assert ee.SendTo(2, m.PicturesMissing((0,))) in actions
    assert not engine.sessions


# --- the device -------------------------------------------------------------------------------


def new_session(pictures: Sequence[PlacedPicture] = PLACED) -> DraftSession:
    names = tuple([one.name for one in pictures])
    request = m.Open("s", "", "", PROMPT, sampling=SAMPLING, drafting=False, pictures=names)
    session = DraftSession(
        request,
        WindowedPolicy(),
        ReconnectPolicy(),
        0,
        kept=KeptPrefixes(b"k"),
        pictures=[one.data for one in pictures],
    )
    session.handle(dev.Start(), 0.0)
    session.handle(dev.Connected("v"), 0.0)
    return session


def test_uploading_has_the_time_that_a_slow_link_takes() -> None:
    session = new_session()
    session.handle(m.PicturesMissing((0, 1)), 1.0)
    size = len(CAT) + len(DOG)
    assert session.deadline == 1.0 + ReconnectPolicy().answer_s + size / SLOWEST_BYTES_PER_S


@pytest.mark.parametrize(
    "numbers", [pytest.param((2,), id="unknown"), pytest.param((MAX_PICTURES - 1,), id="largest")]
)
def test_a_verifier_cannot_ask_for_what_is_not_there(numbers: tuple[int, ...]) -> None:
    session = new_session()
    assert dev.Disconnect() in session.handle(m.PicturesMissing(numbers), 0.0)
    assert session.state is dev.BACKING_OFF


def test_a_verifier_cannot_ask_twice() -> None:
    session = new_session()
    assert len(session.handle(m.PicturesMissing((1,)), 0.0)) == 1
    assert dev.Disconnect() in session.handle(m.PicturesMissing((1,)), 0.0)
    assert session.counters.picture_bytes == len(DOG)


def test_a_refusal_says_that_there_were_pictures() -> None:
    """An older version finds no prompt and says only that."""
    session = new_session()
    fault = m.Fault(m.FaultCode.INVALID, "Open.prompt has 0 entries, but must have 1 to 9")
    end = session.handle(fault, 0.0)[-1]
    assert isinstance(end, dev.Fail)
    assert end.why.startswith("the verifier refuses a prompt with pictures: Open.prompt has 0")


def test_a_session_with_pictures_needs_a_key() -> None:
    with pytest.raises(ValueError, match="but kept is None"):
        DraftSession(
            m.Open("s", "", "", PROMPT), WindowedPolicy(), ReconnectPolicy(), 0, pictures=[DOG]
        )
