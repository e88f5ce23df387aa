"""Beginnings of texts that a device names instead of sending their ids.

Oracle: the target's own text, computed without sessions. Whatever a verifier keeps, has dropped or
never knew, a device receives that text, and a name stands only for the ids of its own agent.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from edgespec.core.device import events as dev
from edgespec.core.device.comparison_policies import WindowedPolicy
from edgespec.core.device.kept_prefixes import MAX_NAMES, MAX_VERIFIERS, KeptPrefixes
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.pictures import PictureInput, PlacedPicture
from edgespec.core.protocol.prefix_names import PrefixNames
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.prefix_store import PrefixStore, block_bytes
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from tests.sim.faults.checks import target_stream

MODEL = ToyModel(vocabulary_size=32, order=2, seed=5)
SAMPLING = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
BLOCK = 4
BOUNDS = ee.EngineLimits(prefix_bytes=1 << 20, prefix_block=BLOCK)
LIMITS = m.Limits(context_length=4096)
DICE = random.Random(7)
PROMPT = tuple(DICE.randrange(32) for _ in range(41))
A, B = Credential("a"), Credential("b")


@dataclass
class Verifier:
    """An engine with its target. ``change`` may change what a device sends before it arrives."""

    limits: ee.EngineLimits = BOUNDS
    change: Callable[[m.Uplink], m.Uplink] = lambda message: message

    pictures: PictureInput | None = None

    def __post_init__(self) -> None:
        self.target = ToyTarget(MODEL, cache=self.limits.cache, pictures=self.pictures)
        self.engine = VerifyEngine(self.target.info, LIMITS, self.limits, contain=False)
        self.streams = 0


@dataclass
class Played:
    """The messages of one generation, and its output."""

    tokens: list[int] = field(default_factory=list)
    sent: list[m.Uplink] = field(default_factory=list)
    received: list[m.Downlink] = field(default_factory=list)
    end: dev.Finish | dev.Fail | None = None
    counters: dev.DraftCounters = field(default_factory=dev.DraftCounters)

    @property
    def opens(self) -> list[m.Open]:
        return [one for one in self.sent if isinstance(one, m.Open)]

    @property
    def named(self) -> list[int]:
        """Length of the named beginning of each ``Open``; 0: it was sent whole."""
        return [0 if one.prefix is None else one.prefix.length for one in self.opens]

    @property
    def missed(self) -> int:
        return sum(isinstance(one, m.PrefixMissing) for one in self.received)


def play(
    verifier: Verifier,
    prompt: Sequence[int],
    kept: KeptPrefixes | None,
    credential: Credential = ANYBODY,
    *,
    name: str = "here",
    cut_after: int | None = None,
    then: Verifier | None = None,
    pictures: Sequence[PlacedPicture] = (),
) -> Played:
    """Play one generation to its end, with ``pictures`` in its prompt. After ``cut_after`` tokens
    its link breaks once; the next stream goes to the verifier ``then``, if there is one."""
    played, now = Played(), 0.0
    names = tuple([one.name for one in pictures])
    request = m.Open(
        f"session {id(played)}", "", "", tuple(prompt), sampling=SAMPLING, pictures=names
    )
    drafter = ToyDrafter(MODEL.perturbed(0.3))
    session = DraftSession(
        request,
        WindowedPolicy(),
        ReconnectPolicy(),
        1 << 16,
        kept=kept,
        pictures=[one.data for one in pictures],
    )
    drafter.begin(len(prompt), SAMPLING)
    events = deque[tuple[object, object]]([(session, dev.Start())])
    stream = 0
    while played.end is None:
        if not events:  # nothing happens before the deadline of a back-off
            assert session.deadline is not None
            now = session.deadline
            events.append((session, dev.Tick()))
        machine, event = events.popleft()
        if isinstance(event, m.Downlink):
            played.received.append(event)
        for action in machine.handle(event, now):  # type: ignore[attr-defined]
            match action:
                case dev.Connect():
                    verifier.streams += 1
                    stream = verifier.streams
                    events.append((session, dev.Connected(name)))
                case dev.Transmit(message):
                    played.sent.append(message)
                    message = verifier.change(message)
                    if isinstance(message, m.Open):
                        opened = ee.StreamOpened(stream, message, credential=credential)
                        events.append((verifier.engine, opened))
                    else:
                        events.append((verifier.engine, ee.StreamMessage(stream, message)))
                case dev.StartStep(keep, feed, width):
                    events.append((session, dev.StepDone(drafter.step(keep, feed, width))))
                case dev.Deliver(tokens=tokens):
                    played.tokens += tokens
                    if cut_after is not None and len(played.tokens) >= cut_after:
                        cut_after = None
                        events = deque(one for one in events if one[0] is not session)
                        events.append((verifier.engine, ee.StreamLost(stream)))
                        if then is not None:
                            verifier, events = then, deque()
                        events.append((session, dev.LinkDown("cut")))
                        break
                case dev.Finish() | dev.Fail():
                    played.end = action
                case ee.SendTo(number, message):
                    if number == stream:
                        events.append((session, message))
                case ee.ReadPictureData(number, text, data, places):
                    read = verifier.target.read_pictures(text, data, places)
                    events.append((verifier.engine, ee.PicturesRead(number, read)))
                case ee.OpenSequence(key, length, sampling, text):
                    verifier.target.open(key, length, sampling, text)
                    if action.pictures is not None:
                        verifier.target.use_pictures(key, action.pictures)
                case ee.KeepNodes(key, nodes):
                    verifier.target.keep(key, nodes)
                case ee.RunBatch(requests):
                    done = ee.BatchDone(tuple(verifier.target.forward(requests)))
                    events.append((verifier.engine, done))
                case ee.CloseSequence(key):
                    verifier.target.close(key)
    while events:  # the verifier reads the last messages
        machine, event = events.popleft()
        if machine is verifier.engine:
            for action in verifier.engine.handle(event, now):  # type: ignore[arg-type]
                if isinstance(action, ee.CloseSequence):
                    verifier.target.close(action.key)
    played.counters = session.counters
    return played


def check_text(played: Played, prompt: Sequence[int]) -> None:
    expected = target_stream(MODEL, prompt, SAMPLING, LIMITS.context_length)
    assert tuple(played.tokens) == expected.tokens
    assert isinstance(played.end, dev.Finish)


def new_agent() -> KeptPrefixes:
    return KeptPrefixes(DICE.randbytes(16), least_tokens=1)


def next_prompt(first: Played, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
    return (*prompt, *first.tokens, 1, 2, 3)


def test_a_turn_sends_only_what_is_new() -> None:
    verifier, agent = Verifier(), new_agent()
    first = play(verifier, PROMPT, agent)
    check_text(first, PROMPT)
    prompt = next_prompt(first)
    second = play(verifier, prompt, agent)
    check_text(second, prompt)
    whole = (len(PROMPT) + len(first.tokens)) // BLOCK * BLOCK
    assert (first.named, second.named) == ([0], [whole])
    assert second.opens[0].prompt == prompt[whole:]
    assert second.counters.named_tokens == whole == verifier.engine.prefixes.found_tokens
    assert second.missed == second.counters.prefix_misses == 0


def test_a_changed_history_names_what_agrees() -> None:
    """A template may leave out a thought of the turn before."""
    verifier, agent = Verifier(), new_agent()
    play(verifier, PROMPT, agent)
    prompt = (*PROMPT[:30], 31 - PROMPT[30], *PROMPT[31:], 5)
    second = play(verifier, prompt, agent)
    check_text(second, prompt)
    assert second.named == [28]


def test_choices_of_one_prompt_name_it() -> None:
    verifier, agent = Verifier(), new_agent()
    for named in (0, 40, 40):
        played = play(verifier, PROMPT, agent)
        check_text(played, PROMPT)
        assert played.named == [named]


def test_a_resume_names_what_was_committed() -> None:
    verifier, agent = Verifier(), new_agent()
    played = play(verifier, PROMPT, agent, cut_after=12)
    check_text(played, PROMPT)
    held = len(PROMPT) + len(played.opens[1].committed) + played.named[1]
    assert played.named[0] == 0
    assert played.named[1] >= (len(PROMPT) + 12) // BLOCK * BLOCK
    assert played.opens[1].prefix is not None
    assert played.opens[1].prefix.prompt_length == len(PROMPT)
    assert held - len(PROMPT) - len(PROMPT) >= 12 - BLOCK
    assert played.missed == 0


@pytest.mark.parametrize("cut_after", [1, 9, 20])
def test_a_failover_between_tokens_sends_the_ids_a_trip_later(cut_after: int) -> None:
    """Both machines have one address, as behind a proxy."""
    agent = new_agent()
    played = play(Verifier(), PROMPT, agent, cut_after=cut_after, then=Verifier())
    check_text(played, PROMPT)
    assert played.missed == 1
    assert played.counters.prefix_misses == 1
    assert played.counters.named_tokens == 0


def test_a_restart_between_turns_costs_a_trip_once() -> None:
    agent = new_agent()
    prompt = next_prompt(play(Verifier(), PROMPT, agent))
    restarted = Verifier()
    for misses in (1, 0, 0):
        played = play(restarted, prompt, agent)
        check_text(played, prompt)
        assert played.missed == misses
        prompt = next_prompt(played, prompt)


def test_another_verifier_gets_whole_prompts() -> None:
    agent = new_agent()
    prompt = next_prompt(play(Verifier(), PROMPT, agent))
    played = play(Verifier(), prompt, agent, name="elsewhere")
    check_text(played, prompt)
    assert (played.named, played.missed) == ([0], 0)


def test_machines_behind_one_name_are_named_less_and_less_often() -> None:
    """Every verifier here is another one, so every name misses."""
    agent, prompt, misses = new_agent(), PROMPT, 0
    for _ in range(30):
        played = play(Verifier(), prompt, agent)
        check_text(played, prompt)
        misses += played.missed
    assert misses == 5, "with 0, 2, 6 and 14 whole prompts between them"


@pytest.mark.parametrize("kind", ["another credential", "another agent"])
def test_a_prefix_of_others_cannot_be_named(kind: str) -> None:
    """The name itself is right: it was taken from the wire."""
    verifier, agent = Verifier(), new_agent()
    first = play(verifier, PROMPT, agent, A)
    prompt = next_prompt(first)
    stolen = play(verifier, prompt, agent, A).opens[0]
    assert stolen.prefix is not None
    thief, credential = (stolen, B) if kind == "another credential" else (stolen, A)
    if kind == "another agent":
        thief = replace(stolen, prefix_key=b"of another agent")
    opened = ee.StreamOpened(900, replace(thief, session_id="thief"), credential=credential)
    unknown = replace(thief, prefix=replace(stolen.prefix, name=bytes(32)))
    answers = [
        verifier.engine.handle(one, 1.0)
        for one in (
            opened,
            ee.StreamOpened(901, replace(unknown, session_id="guess"), credential=credential),
        )
    ]
    assert answers[0] == (ee.SendTo(900, m.PrefixMissing()),)
    assert answers[1] == (ee.SendTo(901, m.PrefixMissing()),)


def test_two_devices_with_one_key_have_their_own_texts() -> None:
    verifier, one, other = Verifier(), new_agent(), new_agent()
    prompt = next_prompt(play(verifier, PROMPT, one, A))
    for agent, named in ((other, 0), (one, 68), (other, 72)):
        played = play(verifier, prompt, agent, A)
        check_text(played, prompt)
        assert (played.named, played.missed) == ([named], 0)


def forge(change: Callable[[m.Prefix], m.Prefix]) -> Callable[[m.Uplink], m.Uplink]:
    def changed(message: m.Uplink) -> m.Uplink:
        if isinstance(message, m.Open) and message.prefix is not None:
            return replace(message, prefix=change(message.prefix))
        return message

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda prefix: replace(prefix, name=bytes(32)),
        lambda prefix: replace(prefix, name=prefix.name[::-1]),
    ],
    ids=["no name", "a wrong name"],
)
def test_a_wrong_name_is_answered_by_the_ids(change: Callable[[m.Prefix], m.Prefix]) -> None:
    agent, verifier = new_agent(), Verifier()
    prompt = next_prompt(play(verifier, PROMPT, agent))
    verifier.change = forge(change)
    played = play(verifier, prompt, agent)
    check_text(played, prompt)
    assert played.missed == 1


@pytest.mark.parametrize("more", [BLOCK, -BLOCK, 4000])
def test_a_wrong_length_is_refused(more: int) -> None:
    agent, verifier = new_agent(), Verifier()
    prompt = next_prompt(play(verifier, PROMPT, agent))
    verifier.change = forge(lambda prefix: replace(prefix, length=prefix.length + more))
    played = play(verifier, prompt, agent)
    assert (played.tokens, played.missed) == ([], 1)
    assert isinstance(played.end, dev.Fail)
    assert f"68 ids were sent for a prefix of {68 + more}" in played.end.why


def test_a_version_that_does_not_know_names_is_sent_the_whole_prompt_at_once() -> None:
    """It finds no prompt in the ``Open``, as on the wire, and refuses."""
    agent = new_agent()
    prompt = next_prompt(play(Verifier(), PROMPT, agent))

    def forget(message: m.Uplink) -> m.Uplink:
        if isinstance(message, m.Open):
            known = () if message.prefix is not None else message.prompt
            return replace(message, prompt=known, prefix=None, prefix_key=b"")
        return message

    old = Verifier(change=forget)
    for opens in (2, 1):
        played = play(old, prompt, agent)
        check_text(played, prompt)
        assert len(played.opens) == opens
        assert played.named[-1] == 0
        assert played.counters.named_tokens == 0


def test_a_verifier_that_keeps_none_is_never_given_a_name() -> None:
    agent, verifier = new_agent(), Verifier(ee.EngineLimits())
    for _ in range(2):
        played = play(verifier, PROMPT, agent)
        check_text(played, PROMPT)
        assert played.named == [0]


def test_an_agent_without_names_leaves_nothing_behind() -> None:
    verifier = Verifier()
    check_text(play(verifier, PROMPT, None), PROMPT)
    assert verifier.engine.prefixes.held_bytes == 0


def open_named(verifier: Verifier, stream: int) -> tuple[ee.EngineAction, ...]:
    prefix = m.Prefix(8, bytes(32), 8)
    request = m.Open("s", "", "", (), sampling=SAMPLING, prefix_key=b"k", prefix=prefix)
    return verifier.engine.handle(ee.StreamOpened(stream, request), 0.0)


def test_ids_that_do_not_come_are_not_awaited_for_ever() -> None:
    verifier = Verifier()
    open_named(verifier, 1)
    engine, now = verifier.engine, 0.0
    actions: tuple[ee.EngineAction, ...] = ()
    while not actions:
        assert engine.deadline is not None
        now = engine.deadline
        actions = engine.handle(ee.Poll(), now)
    match actions:
        case (ee.SendTo(1, m.Fault(code)), ee.CloseStream(1)):
            assert code is m.FaultCode.OVERLOADED
        case _:
            pytest.fail(str(actions))
    assert BOUNDS.stall_s <= now <= BOUNDS.stall_s + 3.0
    assert engine.deadline is None


@pytest.mark.parametrize("count", [0, 7, 9])
def test_another_number_of_ids_is_refused(count: int) -> None:
    verifier = Verifier()
    open_named(verifier, 1)
    tokens = m.PrefixTokens((1,) * count)
    send, close = verifier.engine.handle(ee.StreamMessage(1, tokens), 0.0)
    assert isinstance(send, ee.SendTo)
    assert isinstance(send.message, m.Fault)
    assert f"{count} ids were sent for a prefix of 8" in send.message.message
    assert close == ee.CloseStream(1)


def test_a_stream_that_waits_for_ids_can_be_cancelled_and_lost() -> None:
    verifier = Verifier()
    open_named(verifier, 1)
    assert verifier.engine.handle(ee.StreamMessage(1, m.Cancel()), 0.0) == (ee.CloseStream(1),)
    open_named(verifier, 2)
    assert verifier.engine.handle(ee.StreamLost(2), 0.0) == ()
    assert not verifier.engine.registry.incomplete


def test_ids_that_nobody_asked_for_end_the_stream() -> None:
    verifier = Verifier()
    request = m.Open("s", "", "", PROMPT, sampling=SAMPLING)
    verifier.engine.handle(ee.StreamOpened(1, request), 0.0)
    actions = verifier.engine.handle(ee.StreamMessage(1, m.PrefixTokens((1,))), 0.0)
    faults = [one.message for one in actions if isinstance(one, ee.SendTo)]
    assert [one.code for one in faults if isinstance(one, m.Fault)] == [m.FaultCode.INVALID]


# --- the store --------------------------------------------------------------------------------


def put(store: PrefixStore, owner: str, tokens: list[int], key: bytes = b"k") -> list[m.Prefix]:
    """Keep a text; return all beginnings that could be named."""
    names = PrefixNames(key, store.block_tokens)
    store.keep(owner, names, tokens)
    size = store.block_tokens
    return [m.Prefix((at + 1) * size, name, 1) for at, name in enumerate(names.names)]


def test_a_store_returns_the_ids_of_every_beginning() -> None:
    store, text = PrefixStore(1 << 20, 3), [DICE.randrange(1 << 24) for _ in range(20)]
    beginnings = put(store, "a", text)
    assert [one.length for one in beginnings] == [3, 6, 9, 12, 15, 18]
    for one in beginnings:
        found = store.find("a", b"k", one)
        assert found is not None
        assert found.tokens == tuple(text[: one.length])
        assert found.names.names == [two.name for two in beginnings[: one.length // 3]]
    assert (store.found, store.found_tokens, store.missed) == (6, 63, 0)


def test_a_full_store_drops_ends_of_the_largest_owner_first() -> None:
    """Whatever is kept and used in whatever order: the bound holds, a text that is found is the
    text, and a beginning is there as long as anything behind it."""
    dice = random.Random(3)
    store, texts = PrefixStore(20 * block_bytes(2), 2), list[tuple[str, list[int]]]()
    for _ in range(400):
        owner = dice.choice("aaab")
        shared = dice.choice(texts)[1][: dice.randrange(20)] if texts else []
        text = [*shared, *(dice.randrange(9) for _ in range(dice.randrange(1, 30)))]
        texts.append((owner, text))
        put(store, owner, text)
        assert store.held_bytes <= 20 * block_bytes(2)
        for owner, text in texts[-6:]:
            names = PrefixNames(b"k", 2).extend(text)
            named = [m.Prefix(2 * (at + 1), name, 1) for at, name in enumerate(names)]
            found = [store.find(owner, b"k", one) for one in dice.sample(named, len(named))]
            lengths = {len(one.tokens) for one in found if one is not None}
            assert lengths == set(range(2, 2 * len(lengths) + 1, 2))
            for one in found:
                assert one is None or list(one.tokens) == text[: len(one.tokens)]


def test_one_owner_cannot_drop_the_texts_of_another() -> None:
    store = PrefixStore(10 * block_bytes(2), 2)
    mine = put(store, "a", list(range(10)))
    for start in range(50):
        put(store, "b", [start, *range(40)])
    assert store.find("a", b"k", mine[-1]) is not None


def test_a_revoked_owner_leaves_nothing() -> None:
    store = PrefixStore(1 << 20, 2)
    mine = put(store, "a", list(range(10)))
    store.forget("a")
    store.forget("nobody")
    assert (store.held_bytes, store.find("a", b"k", mine[0])) == (0, None)


def test_names_stand_for_all_tokens_before_them() -> None:
    """Two texts have one name only where they are equal from the beginning on."""
    dice = random.Random(5)
    seen: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
    for _ in range(300):
        key = dice.choice((b"", b"k", b"\0"))
        text = [dice.randrange(3) for _ in range(dice.randrange(12))]
        for at, name in enumerate(PrefixNames(key, 2).extend(text)):
            meant = (key, tuple(text[: 2 * at + 2]))
            assert seen.setdefault(name, meant) == meant
    assert len(set(seen.values())) == len(seen)


def test_an_agent_remembers_a_bounded_number_of_names() -> None:
    agent, count = new_agent(), MAX_VERIFIERS + 3
    texts = [PrefixNames(agent.key, 1) for _ in range(count)]
    for number, names in enumerate(texts):
        names.extend([number] * (MAX_NAMES + 5))
        agent.note_kept(f"verifier {number}", names)
    assert [agent.block_tokens(f"verifier {number}") for number in (0, 2, 3)] == [0, 0, 1]
    assert agent.find("verifier 3", texts[-1]) == 0
    assert agent.find(f"verifier {count - 1}", texts[-1]) == MAX_NAMES


def test_what_a_revoked_key_has_sent_is_dropped_with_its_open_sessions() -> None:
    verifier, agent = Verifier(), new_agent()
    prompt = next_prompt(play(verifier, PROMPT, agent, A))
    assert verifier.engine.prefixes.held_bytes > 0
    running = m.Open("running", "", "", prompt, sampling=SAMPLING, prefix_key=agent.key)
    verifier.engine.handle(ee.StreamOpened(900, running, credential=A), 1.0)
    verifier.engine.registry.forget_texts("a")
    verifier.engine.handle(ee.StreamLost(900), 1.0)
    assert verifier.engine.prefixes.held_bytes == 0
