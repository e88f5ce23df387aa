"""Mistakes in what sessions share: blocks, prefixes, passes, prices, the verifier's guesses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from edgespec.core.device.estimates import RowPrice
from edgespec.core.device.policy import DraftView
from edgespec.core.protocol.messages import (
    Commit,
)
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import fairness
from edgespec.core.verifier.admission import SessionSlots
from edgespec.core.verifier.block_ledger import BlockLedger, BlockNames, _hash
from edgespec.core.verifier.cache_keeper import CacheKeeper, PrefixSharing
from edgespec.core.verifier.engine import Containment
from edgespec.core.verifier.engine_events import BatchFailed
from edgespec.core.verifier.fairness import Account, Fairness
from edgespec.core.verifier.scheduler import PassScheduler
from edgespec.core.verifier.served_drafts import Proposal, ServedDrafts
from edgespec.core.verifier.session import VerifySession
from tests.core.test_fairness import (
    test_a_key_over_its_rate_waits_without_busy_polls as rate_is_kept,
)
from tests.core.test_fairness import (
    test_higher_priorities_come_first_and_lower_ones_do_not_starve as do_not_starve,
)
from tests.core.test_fairness import (
    test_what_a_share_leaves_over_is_remembered as remembered,
)
from tests.core.test_row_price import (
    test_a_node_is_priced_at_the_pass_that_it_comes_into as priced_then,
)
from tests.core.test_row_price import (
    test_a_price_is_heard_from_a_pass_and_counts_until_the_next as hears,
)
from tests.core.test_row_price import test_a_verifiers_full_price_is_told as tells_price
from tests.core.test_row_price import test_no_node_is_drafted_below_the_price as pays
from tests.core.test_row_price import (
    test_who_waits_for_a_draft_is_taken_along_by_a_pass_of_others as taken_along,
)
from tests.core.test_row_price import (
    test_with_credit_0_a_device_rests_until_a_commit_brings_credit as rests,
)
from tests.sim.mutant import Mutant, patch

_trim, _victims = BlockLedger.trim, CacheKeeper._victims
_hear = RowPrice.take
_reserve, _settle, _adopt = CacheKeeper.reserve, CacheKeeper.settle, BlockLedger.adopt
_take, _batch_failed = BlockLedger._take, Containment.batch_failed
_learn, _propose = VerifySession._learn, ServedDrafts.propose


def _trims_one_too_many(ledger: BlockLedger, key: str, length: int) -> None:
    _trim(ledger, key, length - ledger.block_tokens)


def _reserves_held_blocks(ledger: BlockLedger, key: str, length: int) -> bool:
    table = ledger._tables.setdefault(key, [])
    missing = ledger.missing(key, length)
    given = (ledger._blank + [1] * missing)[:missing]
    table += given
    for block in given:
        ledger._holders[block] += 1
    return True


def _releases_nothing(ledger: BlockLedger, key: str) -> int:
    return 0


def _prefix_is_not_in_the_name(names: BlockNames, place: int) -> bytes:
    size = names._block_tokens
    return _hash(names._pack(*names.prefix.tokens[place * size : (place + 1) * size]))


def _published_before_its_pass(keeper: CacheKeeper, key: str, length: int) -> tuple[int, ...]:
    """Also what a pass that fails was to fill."""
    table = _reserve(keeper, key, length)
    if keeper._sharing is not None and key in keeper.sessions:
        keeper._sharing.publish(key, min(length, keeper.sessions[key].prefix.length))
    return table


def _failed_pass_is_published(containment: Containment, failure: BatchFailed, now: float) -> None:
    batch = containment._scheduler.running
    assert batch is not None
    for _, request in batch.parts:
        if (sharing := containment._keeper._sharing) is not None:
            sharing.publish(request.key, request.cache_length + len(request.feed))
    _batch_failed(containment, failure, now)


def _nodes_are_published(keeper: CacheKeeper, request: PassRequest, length: int) -> None:
    """Nobody knows yet whether the target can move them to their places."""
    if keeper._sharing is not None:
        keeper._sharing.publish(request.key, length - 1)
    _settle(keeper, request, length)


def _holder_is_not_counted(
    ledger: BlockLedger, key: str, place: int, blocks: Sequence[int]
) -> None:
    _adopt(ledger, key, place, blocks)
    if blocks:
        ledger._holders[blocks[-1]] -= 1


def _holder_counts_twice(ledger: BlockLedger, key: str, place: int, blocks: Sequence[int]) -> None:
    _adopt(ledger, key, place, blocks)
    if blocks:
        ledger._holders[blocks[-1]] += 1


def _gives_away_a_held_block(ledger: BlockLedger) -> int:
    """The one published longest ago, whoever holds it."""
    if not ledger._blank:
        block = next(iter(ledger._name_of))
        ledger._holders[block] = 0
        ledger._idle[block] = None
        ledger._idle.move_to_end(block, last=False)
    return _take(ledger)


def _whole_prefix_is_shared(sharing: PrefixSharing, names: BlockNames) -> int:
    return names.prefix.length // sharing._ledger.block_tokens


def _older_ones_give_way(
    keeper: CacheKeeper, key: str, spared: Collection[str], now: float
) -> list[str]:
    """Any holder is a victim: two sessions take blocks from each other in turns."""
    return [other for other in keeper.sessions if other != key and other not in spared]


def _nobody_gives_way(
    keeper: CacheKeeper, key: str, spared: Collection[str], now: float
) -> list[str]:
    return []


def _evicts_from_the_pass(
    keeper: CacheKeeper, key: str, spared: Collection[str], now: float
) -> list[str]:
    return _victims(keeper, key, (), now)


def _forgets_deficits(account: Account, want_s: float, share: float, session_s: float) -> None:
    account.left_s = inf if want_s <= share else share


def _crowds_have_no_limit(account: Account, want_s: float, share: float, session_s: float) -> None:
    account.left_s = inf


def _nobody_ages(fairness: Fairness, key: str, left_out: int) -> tuple[bool, int]:
    return True, -fairness._of(key).priority


def _rates_are_free(fairness: Fairness, key: str, tokens: int, now: float) -> None:
    return None


def _places_stay_taken(slots: SessionSlots, key: str) -> None:
    slots._peer_of.pop(key, None)


_NO_PRICE = property(lambda _: 0)


def _steps_stay_wide(view: DraftView, parent: int, width: int) -> int:
    return width


def _credit_is_ignored(price: RowPrice, commit: Commit) -> None:
    _hear(price, commit)
    price.credit = None


def _old_prices_stay(price: RowPrice, commit: Commit) -> None:
    if commit.row_price is not None:
        _hear(price, commit)


def _guesses_are_the_devices(
    session: VerifySession,
    request: PassRequest,
    targets: tuple[int, ...],
    accepted: tuple[int, ...],
) -> int:
    _learn(session, request, targets, accepted)
    return len(accepted)


def _guesses_past_the_end(
    served: ServedDrafts, text: Sequence[int], room: int, depth: int, least_chance: float
) -> Proposal:
    return _propose(served, text, room, depth + 1, least_chance)


def _guesses_beyond_the_room(
    served: ServedDrafts, text: Sequence[int], room: int, depth: int, least_chance: float
) -> Proposal:
    return _propose(served, text, room + 1, depth, least_chance)


SHARING_MUTANTS = (
    Mutant("trims one block too many", patch(BlockLedger, "trim", _trims_one_too_many), 50),
    Mutant("blocks are given twice", patch(BlockLedger, "reserve", _reserves_held_blocks), 50),
    Mutant("blocks are never freed", patch(BlockLedger, "release", _releases_nothing), 50),
    Mutant("prefix not in the name", patch(BlockNames, "name", _prefix_is_not_in_the_name), 600),
    Mutant(
        "published before its pass", patch(CacheKeeper, "reserve", _published_before_its_pass), 600
    ),
    Mutant(
        "failed pass is published",
        patch(Containment, "batch_failed", _failed_pass_is_published),
        600,
    ),
    Mutant("nodes are published", patch(CacheKeeper, "settle", _nodes_are_published), 2400),
    Mutant("holder is not counted", patch(BlockLedger, "adopt", _holder_is_not_counted), 600),
    Mutant("holder counts twice", patch(BlockLedger, "adopt", _holder_counts_twice), 600),
    Mutant("held block given away", patch(BlockLedger, "_take", _gives_away_a_held_block), 600),
    Mutant(
        "whole prefix is shared", patch(PrefixSharing, "_shareable", _whole_prefix_is_shared), 600
    ),
    Mutant("pass is waited for again", patch(PrefixSharing, "new_pass", lambda sharing: None), 600),
    Mutant("older ones give way", patch(CacheKeeper, "_victims", _older_ones_give_way), 200),
    Mutant("nobody gives way", patch(CacheKeeper, "_victims", _nobody_gives_way), 300),
    Mutant("evicts from the pass", patch(CacheKeeper, "_victims", _evicts_from_the_pass), 300),
    Mutant(
        "guesses are the device's", patch(VerifySession, "_learn", _guesses_are_the_devices), 60
    ),
    Mutant("guesses past the end", patch(ServedDrafts, "propose", _guesses_past_the_end), 60),
    Mutant("guesses beyond the room", patch(ServedDrafts, "propose", _guesses_beyond_the_room), 60),
    Mutant("deficits forgotten", patch(fairness, "_allow", _forgets_deficits), 0, remembered),
    Mutant("crowds unlimited", patch(fairness, "_allow", _crowds_have_no_limit), 0, remembered),
    Mutant("low priorities starve", patch(Fairness, "_rank", _nobody_ages), 0, do_not_starve),
    Mutant("rates are free", patch(Fairness, "spend", _rates_are_free), 0, rate_is_kept),
    Mutant("places of a key stay taken", patch(SessionSlots, "free", _places_stay_taken), 40),
    Mutant("price untold", patch(PassScheduler, "row_price", _NO_PRICE), 0, tells_price),
    Mutant("siblings free", patch(DraftView, "paying", _steps_stay_wide), 0, pays),
    Mutant("priced at the root", patch(DraftView, "settled_position", 0), 0, priced_then),
    Mutant(
        "passes of others are missed",
        patch(PassScheduler, "_take_along", lambda scheduler, sessions, forming, now: None),
        0,
        taken_along,
    ),
    Mutant("credit ignored", patch(RowPrice, "take", _credit_is_ignored), 0, rests),
    Mutant("old prices stay", patch(RowPrice, "take", _old_prices_stay), 0, hears),
)
