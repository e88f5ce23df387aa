"""Random worlds: every device receives its target's own text despite all faults; and the published
schemes beside ours in virtual time.

Oracle: ``checks`` on every event of every world (see there), against the stream computed directly
from the target's law. Golden counts notice what no check can: drafts that stopped being useful.
Each check has a mutant, a plausible mistake of the machines, that one of its first worlds finds.
Virtual times are exact, so the assertions are about the protocol and its policies, not about a
machine (passes of 25 ms, steps of 8, a draft right about eight times of ten). For each law of
conservation, a plausible mistake of a simulator breaks it within one small world.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.arms import Arm
from edgespec.core.device.comparison_policies import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.device.device_model import DraftCache
from edgespec.core.device.goodput_policy import PolicyName, make_policy
from edgespec.core.device.kept_prefixes import SentPrefix
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import CommitReader, DraftOutbox
from edgespec.core.link_model import LinkModel
from edgespec.core.protocol.acceptance import ExactRule, Walk
from edgespec.core.protocol.messages import Commit, Open, RunAhead
from edgespec.core.protocol.prefix_names import PrefixNames
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import EndCondition, SpeculationTree
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import session_events as se
from edgespec.core.verifier.admission import SessionSlots
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.cache_scheduler import CacheScheduler
from edgespec.core.verifier.draft_inbox import DraftInbox
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.pass_tree import PassTree, PassVerdict
from edgespec.core.verifier.server_drafts import ServerLookup
from edgespec.core.verifier.server_model import ServerModel
from edgespec.core.verifier.session import VerifySession
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.links.path import HopPath
from edgespec_sim.scenario.sections import load_scenario
from edgespec_sim.sessions import SimulatedDevice, Stream
from edgespec_sim.world import run
from edgespec_sim.world.conservation import ConservationError, DirectionWatch
from edgespec_sim.world.user import User
from tests.mutants import Mutants
from tests.sim.faults.worlds import WorldOptions, WorldResult, run_world
from tests.sim.one_session import play_alone
from tests.sim.random_worlds import (
    GOVERNED_FROM,
    REPLAY,
    adversarial_drafter,
    exact_drafter,
    play,
    play_with_prediction,
)
from tests.sources import ROOT

WORLDS = 1600
SLOW_WORLDS = 5600
BATCH = 200


@pytest.mark.parametrize(
    "first",
    [
        *range(0, WORLDS, BATCH),
        *range(GOVERNED_FROM, GOVERNED_FROM + 800, BATCH),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(WORLDS, SLOW_WORLDS, BATCH)),
    ],
)
def test_every_device_gets_the_targets_text(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            play(seed)
        except Exception as error:
            again = REPLAY.format(name=play.__name__, seed=seed)
            raise AssertionError(f"world {seed}: {error}; {again}") from error


@pytest.mark.parametrize("first", range(0, 800, BATCH))
def test_a_device_with_a_prediction_gets_the_targets_text(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            play_with_prediction(seed)
        except Exception as error:
            again = REPLAY.format(name=play_with_prediction.__name__, seed=seed)
            raise AssertionError(f"world {seed}: {error}; {again}") from error


@pytest.mark.parametrize("seed", [5012507, 5014668, 5015358, 5015810, 5020329, 5021985, 7075454])
def test_a_verifier_does_not_wait_for_ids_that_it_has_dropped(seed: int) -> None:
    """A device drafts ids beyond the target's vocabulary, and the verifier runs passes only for
    drafts. It waited two seconds for each such token, and the device for a verdict."""
    play_with_prediction(seed)


def test_tokens_of_a_kept_run_may_be_accepted_more_often_than_they_were_sent() -> None:
    play_with_prediction(5012603)


def test_shares_of_the_cache_follow_a_session_that_fails_while_a_pass_is_formed() -> None:
    """Oracle: ``EntryCheck``. In this world a session kept its share for the rest of that pass, and
    another was refused a block that was free."""
    play(703367)


def test_a_world_is_a_function_of_its_seed() -> None:
    assert [play(seed) for seed in range(20)] == [play(seed) for seed in range(20)]


@pytest.mark.parametrize("name", PolicyName)
@pytest.mark.parametrize("run_ahead", [RunAhead.AUTO, RunAhead.NEVER])
def test_every_policy_gives_the_target_text(name: PolicyName, run_ahead: RunAhead) -> None:
    policies = (make_policy(name),) * 2
    options = WorldOptions(policies=policies, run_ahead=run_ahead, cuts=1, restarts=1)
    for seed in range(3):
        assert all(device.expected for device in run_world(options, seed).devices)


LAW = ToyModel(vocabulary_size=16, order=2, seed=3)
PLAIN = WorldOptions(model=LAW, sampling=SamplingParams(max_tokens=60))
SAMPLED = replace(PLAIN, sampling=SamplingParams(temperature=1.0, seed=11, max_tokens=60))
FAULTY = replace(PLAIN, cuts=3, restarts=1, replacements=1, duplicate_chance=0.3)
KINDS = {"plain": PLAIN, "sampled": SAMPLED, "faulty": FAULTY}
POLICIES: dict[str, DraftPolicy] = {
    **{"windowed": WindowedPolicy(), "tree": WindowedPolicy(3)},
    **{"pearl": PearlPolicy(), "fixed": FixedPolicy(), "fixed 4": FixedPolicy(4)},
}


@pytest.mark.parametrize(
    ("kind", "policies", "run_ahead", "golden"),
    [
        ("plain", ("windowed",), "AUTO", (3, 168, 84, 57)),
        ("sampled", ("windowed",), "AUTO", (8, 154, 81, 52)),
        ("sampled", ("tree",), "AUTO", (8, 522, 364, 52)),
        ("plain", ("pearl",), "NEVER", (29, 129, 0, 31)),
        ("sampled", ("fixed 4",), "NEVER", (35, 88, 0, 25)),
        ("plain", ("windowed", "pearl", "fixed"), "AUTO", (16, 347, 153, 59)),
        ("faulty", ("windowed",), "AUTO", (2, 147, 75, 58)),
        ("faulty", ("windowed",), "NEVER", (28, 190, 55, 31)),
    ],
)
def test_drafts_count_for_as_much_as_ever(
    kind: str, policies: Sequence[str], run_ahead: str, golden: tuple[int, int, int, int]
) -> None:
    """The counts are (accepted, sent, stale, passes). A change that is meant to change them changes
    them here."""
    chosen = tuple(POLICIES[name] for name in policies)
    options = replace(KINDS[kind], policies=chosen, run_ahead=RunAhead[run_ahead])
    assert _counts(run_world(options, 1)) == golden


def _counts(result: WorldResult) -> tuple[int, int, int, int]:
    counters = [device.counters for device in result.devices]
    return (
        sum(c.accepted for c in counters),
        sum(c.sent for c in counters),
        sum(c.stale for c in counters),
        result.passes,
    )


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    """Without run-ahead nothing overtakes the drafts, so every node in a pass is accepted."""
    never = replace(PLAIN, drafter=exact_drafter, run_ahead=RunAhead.NEVER)
    for policy in (FixedPolicy(4), PearlPolicy(), WindowedPolicy()):
        counters = run_world(replace(never, policies=(policy,)), 1).devices[0].counters
        assert counters.acceptance == 1.0
        assert counters.accepted == counters.rows
        assert counters.corrected == 0


def test_a_drafter_that_is_never_right_does_no_harm() -> None:
    for run_ahead in RunAhead:
        hopeless = replace(PLAIN, drafter=adversarial_drafter, run_ahead=run_ahead)
        counters = run_world(hopeless, 1).devices[0].counters
        assert (counters.accepted, counters.hits, counters.committed) == (0, 0, 60)


MUTANTS = Mutants()


@MUTANTS.of(SpeculationTree, "_kill", seeds=20)
def killed_siblings_survive(kill: Any, tree: SpeculationTree, node_id: int) -> None:
    pass


@MUTANTS.of(SpeculationTree, "child_position", seeds=60)
def dead_parents_count(place: Any, tree: SpeculationTree, *where: int) -> Any:
    found = place(tree, *where)
    return tree.prefix.length if found is None else found


@MUTANTS.of(CommitReader, "read", seeds=30)
def overlap_is_delivered_twice(read: Any, reader: CommitReader, commit: Any, now: float) -> Any:
    return read(reader, replace(commit, position=reader._prefix.length), now)


@MUTANTS.of(DraftInbox, "receive", seeds=600)
def hash_is_not_matched(receive: Any, inbox: DraftInbox, draft: Any, now: float) -> Any:
    base = min(draft.base_position, inbox._prefix.length)
    return receive(inbox, replace(draft, base_hash=inbox._prefix.hash_at(base)), now)


@MUTANTS.of(EndCondition, "cut", seeds=40)
def stop_ids_are_ignored(cut: Any, ending: EndCondition, *given: Any) -> Any:
    return cut(replace(ending, stop_ids=frozenset()), *given)


@MUTANTS.of(DraftCache, "_catch_up", seeds=100)
def draft_cache_is_trusted(catch_up: Any, cache: DraftCache, prefix: Any) -> None:
    cache._agreed = min(len(cache._tokens), prefix.length)


@MUTANTS.of(VerifySession, "_on_attach", seeds=200)
def resume_skips_a_token(attach: Any, *given: Any) -> Any:
    def short(action: se.VerifyAction) -> se.VerifyAction:
        match action:
            case se.Send(Commit(position, tokens) as commit) if tokens:
                return se.Send(replace(commit, position=position + 1, tokens=tokens[1:]))
        return action

    return tuple(short(action) for action in attach(*given))


@MUTANTS.of(ExactRule, "walk", seeds=60)
def independent_siblings(
    walk: Any, rule: ExactRule, tokens: Any, parents: Any, targets: Any, *_: Any
) -> Walk:
    """Mistake: accept any node that some row of the pass predicts; the longest path wins."""
    path: list[int] = []
    for node in range(len(tokens)):
        parent = path[-1] if path else -1
        if parents[node] == parent and tokens[node] in targets:
            path.append(node)
    last = targets[1 + path[-1]] if path else targets[0]
    return Walk(tuple(path), (*(tokens[node] for node in path), last))


@MUTANTS.of(DraftOutbox, "new_stream", seeds=500)
def new_stream_has_old_marks(new_stream: Any, outbox: DraftOutbox) -> None:
    pass


@MUTANTS.of(VerifySession, "_on_offer", seeds=20)
def flow_control_is_off(offer: Any, session: VerifySession, *given: Any) -> Any:
    session.device.received = session.prefix.length
    session.device.unacknowledged_since = None
    return offer(session, *given)


@MUTANTS.of(VerifySession, "handle", seeds=50)
def eviction_is_not_told(handle: Any, session: VerifySession, event: Any, now: float) -> Any:
    return () if event == se.Cached(0) else handle(session, event, now)


@MUTANTS.of(VerifyEngine, "_probe_done", seeds=200)
def probe_keeps_its_block(probe_done: Any, engine: VerifyEngine, broken: str | None) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.cache_scheduler, "release", lambda key: None)
        probe_done(engine, broken)


@MUTANTS.of(BlockLedger, "trim", seeds=50)
def trims_one_block_too_many(trim: Any, ledger: BlockLedger, key: str, length: int) -> None:
    trim(ledger, key, length - ledger.block_tokens)


@MUTANTS.of(BlockLedger, "reserve", seeds=50)
def blocks_are_given_twice(reserve: Any, ledger: BlockLedger, key: str, length: int) -> bool:
    table = ledger._tables.setdefault(key, [])
    missing = ledger.missing_count(key, length)
    given = (ledger._free_unnamed + [1] * missing)[:missing]
    table += given
    for block in given:
        ledger._holders[block] += 1
    return True


@MUTANTS.of(BlockLedger, "release", seeds=50)
def blocks_are_never_freed(release: Any, ledger: BlockLedger, key: str) -> int:
    return 0


@MUTANTS.of(CacheScheduler, "reserve", seeds=600)
def published_before_its_pass(
    reserve: Any, cache_scheduler: CacheScheduler, key: str, length: int
) -> Any:
    """Mistake: also publish blocks that a failing pass was to fill."""
    table = reserve(cache_scheduler, key, length)
    if cache_scheduler._sharing is not None and key in cache_scheduler.sessions:
        cache_scheduler._sharing.publish(
            key, min(length, cache_scheduler.sessions[key].prefix.length)
        )
    return table


@MUTANTS.of(CacheScheduler, "settle_pass", seeds=2400)
def nodes_are_published(
    settle: Any, cache_scheduler: CacheScheduler, request: Any, length: int
) -> None:
    """Mistake: publish nodes before the target has moved them to their places."""
    if cache_scheduler._sharing is not None:
        cache_scheduler._sharing.publish(request.key, length - 1)
    settle(cache_scheduler, request, length)


@MUTANTS.of(BlockLedger, "adopt", seeds=600)
def holder_is_not_counted(adopt: Any, ledger: BlockLedger, key: str, at: int, blocks: Any) -> None:
    adopt(ledger, key, at, blocks)
    if blocks:
        ledger._holders[blocks[-1]] -= 1


@MUTANTS.of(CacheScheduler, "_victims", seeds=200)
def older_ones_give_way(
    victims: Any, cache_scheduler: CacheScheduler, key: str, spared: Any, now: float
) -> Any:
    """Mistake: any holder is a victim, so two sessions take blocks from each other in turns."""
    return [other for other in cache_scheduler.sessions if other != key and other not in spared]


@MUTANTS.of(CacheScheduler, "_may_enter", seeds=200)
def everybody_waits_for_the_first(
    may_enter: Any, cache_scheduler: CacheScheduler, key: str
) -> bool:
    """Mistake: sessions wait even if the room is enough for all, and for sessions of another
    credential."""
    older = itertools.takewhile(lambda other: other != key, cache_scheduler.sessions)
    return not any(map(cache_scheduler._is_outside, older))


@MUTANTS.of(CacheScheduler, "_find_order", seeds=1000)
def the_order_is_that_of_opening(find_order: Any, cache_scheduler: CacheScheduler) -> Any:
    """Mistake: blocks above a share are not returned to a newcomer."""
    order = find_order(cache_scheduler)
    line = [key for key in cache_scheduler.sessions if key in order.place_of]
    return replace(order, line=line, place_of={key: at for at, key in enumerate(line)})


@MUTANTS.of(PassVerdict, "count_device_tokens", seeds=60)
def guesses_are_the_devices(count: Any, verdict: PassVerdict) -> int:
    return len(verdict.accepted)


@MUTANTS.of(ServerLookup, "propose", seeds=60)
def guesses_past_the_end(
    propose: Any, served: ServerLookup, text: Any, room: int, depth: int, least_chance: float
) -> Any:
    return propose(served, text, room, depth + 1, least_chance)


@MUTANTS.of(PassTree, "__init__", seeds=60)
def nodes_beyond_the_room(init: Any, tree: PassTree, most: int) -> None:
    init(tree, most + 1)


@MUTANTS.of(ServerModel, "_plan_feed", seeds=60)
def draft_cache_is_off_by_one(missing: Any, chain: ServerModel, text: Any) -> Any:
    keep, feed = missing(chain, text)
    return (keep + 1, feed[1:]) if len(feed) > 1 else (keep, feed)


@MUTANTS.of(SessionSlots, "release", seeds=40)
def places_of_a_key_stay_taken(free: Any, slots: SessionSlots, key: str) -> None:
    slots._peer_of.pop(key, None)


@MUTANTS.of(PrefixNames, "extend", seeds=60)
def names_leave_out_what_came_before(extend: Any, names: PrefixNames, tokens: Any) -> Any:
    size = names.block_tokens
    for first in range(len(names.names) * size, len(tokens) // size * size, size):
        alone = PrefixNames(b"", size)
        names.names.append(extend(alone, tokens[first : first + size])[0])
    return names.names


@MUTANTS.of(SentPrefix, "on_missing", seeds=60)
def ids_of_a_missing_beginning_are_shifted(on_missing: Any, sent: SentPrefix) -> Any:
    answer = on_missing(sent)
    return None if answer is None else replace(answer, tokens=(*answer.tokens[1:], 0))


@pytest.mark.parametrize("name", [*MUTANTS])
def test_a_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS.make(name, monkeypatch)
    for seed in range(MUTANTS.seeds[name]):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{name}: survived {MUTANTS.seeds[name]} worlds")


# --- how fast each way of decoding is -------------------------------------------------------------


PASS_S, STEP_S, TOKENS = 0.025, 0.008, 200
RTTS_MS = (2, 20, 50, 100, 200)
ARMS: dict[str, tuple[DraftPolicy, RunAhead]] = {
    "vanilla": (FixedPolicy(), RunAhead.NEVER),
    "pearl": (PearlPolicy(), RunAhead.NEVER),
    "windowed": (WindowedPolicy(), RunAhead.NEVER),
    "edgespec": (WindowedPolicy(width=2), RunAhead.AUTO),
}


@cache
def tpot_of(arm: str, rtt_ms: int, seed: int) -> float:
    """Return the time per output token in milliseconds."""
    policy, run_ahead = ARMS[arm]
    model = ToyModel(vocabulary_size=64, order=3, seed=seed)
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=TOKENS)
    prompt = tuple(i % 64 for i in range(500))
    request = Open("arm", "", "", prompt, sampling=sampling, run_ahead=run_ahead)
    target, drafter = ToyTarget(model), ToyDrafter(model.perturbed(0.27))
    device = play_alone(target, drafter, request, policy, rtt_ms / 1e3, STEP_S, PASS_S)
    times_s = device.delivery.times_s
    assert len(times_s) == TOKENS
    return (times_s[-1] - times_s[0]) / (TOKENS - 1) * 1e3


def tpot_ms(arm: str, rtt_ms: int) -> float:
    return sum(tpot_of(arm, rtt_ms, seed) for seed in range(4)) / 4


@pytest.mark.parametrize("rtt_ms", RTTS_MS)
def test_never_slower_than_plain_streaming_nor_than_any_other_arm(rtt_ms: int) -> None:
    ours = tpot_ms("edgespec", rtt_ms)
    assert ours <= PASS_S * 1e3 * 1.01
    for arm in ("vanilla", "pearl", "windowed"):
        assert ours <= tpot_ms(arm, rtt_ms) * 1.03, arm


@pytest.mark.parametrize(("rtt_ms", "speed_up"), [(2, 1.7), (20, 1.5), (50, 1.3)])
def test_drafts_pay_at_usual_round_trips(rtt_ms: int, speed_up: float) -> None:
    assert PASS_S * 1e3 / tpot_ms("edgespec", rtt_ms) >= speed_up


# --- mistakes that the laws of conservation must find ---------------------------------------------


WATCHED = load_scenario(str(ROOT / "tests/sim/worlds/watched.yaml"))
NUMBERS = itertools.count()


def watched() -> None:
    run.play(run.Job(WATCHED, Arm.EDGESPEC, 0, 1, Path()))


BREAKS = Mutants()


@BREAKS.of(LinkModel, "arrival")
def a_link_without_propagation(arrival: Any, link: LinkModel, now_s: float, size: int) -> float:
    return now_s


@BREAKS.of(LinkModel, "arrival")
def messages_overtake(arrival: Any, *given: Any) -> Any:
    return arrival(*given) + (0.2 if next(NUMBERS) % 50 == 49 else 0.0)


@BREAKS.of(HopPath, "send")
def messages_arrive_twice(send: Any, *given: Any) -> None:
    send(*given)
    send(*given)


@BREAKS.of(HopPath, "send")
def messages_get_lost(send: Any, *given: Any) -> None:
    if next(NUMBERS) % 40 != 39:
        send(*given)


@BREAKS.of(Stream, "send_down")
def commits_are_made_up_on_the_way(send_down: Any, stream: Stream, message: Any) -> None:
    """Mistake: deliver a token before the verifier has committed it."""
    if isinstance(message, Commit):
        message = replace(message, tokens=(*message.tokens, 7))
    send_down(stream, message)


@BREAKS.of(Stream, "_arrive_down")
def a_message_changes_on_the_way(
    arrive_down: Any, stream: Stream, message: Any, sent_s: float
) -> None:
    if isinstance(message, Commit):
        message = replace(message, tokens=message.tokens[::-1])
    arrive_down(stream, message, sent_s)


@BREAKS.of(User, "_energy_j")
def drafting_is_counted_twice(energy_j: Any, user: User, device: SimulatedDevice) -> Any:
    device.drafting_s *= 4.0
    return energy_j(user, device)


@pytest.mark.parametrize("name", [*BREAKS])
def test_what_breaks_a_law_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS.make(name, monkeypatch)
    with pytest.raises(ConservationError):
        watched()


def test_the_watch_is_on_in_small_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    original = DirectionWatch.arrived

    def arrived(self: DirectionWatch, message: object, now_s: float) -> None:
        seen.append(message)
        original(self, message, now_s)

    monkeypatch.setattr(DirectionWatch, "arrived", arrived)
    watched()
    assert len(seen) > 100
