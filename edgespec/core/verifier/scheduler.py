"""Decides which sessions share the next packed pass.

Theory of operation. Sessions that might use a pass wait in a queue, longest waiting first. When no
pass runs, each is offered the remaining room: at most ``max_rows_per_session`` rows, and no more
than fit in the cache (``cache_scheduler.py``). A session that declines leaves the queue until an
event changes it, or until others run a pass that it can share. A session for which there is no
room keeps its place. After a failed pass, its sessions are tried one at a time.

Decode first: sessions that decode come before sessions that feed a prompt, and a row is kept for
each of them before any session's drafts get it. Prompts follow in the order of ``PromptQueue``.
While sessions decode, prompts share the rows that ``PrefillBudget`` allows, and an eighth of the
pass is kept for them however many sessions decode. Prompts that came in one burst with all these
sessions get a fair part. While none decodes, prompts have the whole pass, but a short one if
several credentials are active. ``fairness.py`` decides which sessions must wait for the sake of
others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.estimators import ASSUMED_PASS_S, MovingAverage, SlopeEstimator
from edgespec.core.protocol.messages import MAX_PRICE, RunAhead
from edgespec.core.protocol.work import PassRequest
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.cache_scheduler import CacheScheduler
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.fairness import Fairness
from edgespec.core.verifier.row_price import RowPriceEstimator
from edgespec.core.verifier.server_model import (
    EMPTY_ROUNDS,
    LONGEST_CHAIN,
    MAX_REST,
    MAX_STEPS_BEFORE_PROMPTS,
    MIN_PASS_S,
    PROBE_EVERY,
    ChainStart,
    DraftRound,
    DraftsDone,
    DraftTimes,
    RunDrafts,
    block_pays,
    chain_length,
)
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import DraftOffer, Offer


@statically_frozen
class Batch:
    """The pass that runs: when it started, and each session with its request."""

    started_at: float
    parts: tuple[tuple[VerifySession, PassRequest], ...]

    def count_rows(self) -> tuple[int, int, int]:
        """Return the rows in all, the rows that feed more than a text's last token, and the draft
        nodes."""
        rows = prompt_rows = drafted = 0
        for _, request in self.parts:
            fed, nodes = len(request.feed), len(request.tokens)
            rows += fed + nodes
            drafted += nodes
            if fed > 1:
                prompt_rows += fed - 1
        return rows, prompt_rows, drafted


@dataclass(slots=True)
class FormingPass:
    """The pass that is being formed: the rows left, the last offer, the sessions that take part,
    and the sessions that were offered rows."""

    rows_left: int
    offer: Offer
    parts: dict[str, tuple[VerifySession, PassRequest]] = field(default_factory=dict)
    offered_keys: list[str] = field(default_factory=list)


def is_decoding(session: VerifySession) -> bool:
    """Return whether the session has one token to feed, so that its next pass commits tokens."""
    return session.rows_to_feed == 1


# Prefill budget: how many prompt rows a pass may carry while others decode in it, so that the pass
# becomes longer by a share of its usual duration (chunked prefill under a time budget, as in
# Sarathi-Serve, arXiv 2403.02310). When no session decodes, prompts have the whole pass.
#
#     rows = mean_rows + (base_s * share - (mean_s - base_s)) / row_s
#
# ``base_s`` is the mean of passes without prompts. ``mean_rows`` and ``mean_s`` are the means of
# recent passes with prompts, and ``row_s`` is the slope between those passes, but no less than that
# from ``base_s`` to them: passes never get cheaper by the row. Where each row takes equally long
# this is base_s * share / row_s. On a GPU the first rows are free, since a pass that reads all
# weights has time to compute them; only the slope near the budget finds how many rows fit.
#
# Worked examples, with a share of 0.25. Passes of 24 ms and rows of 0.5 ms: 0.25 * 24 / 0.5 = 12
# rows. Passes of 23 ms in which 103 rows are free and others take 0.2 ms: 103 + 0.25 * 23 / 0.2 =
# 132 rows.
#
# The cost for a prompt: with equal rows it is fed in the part share / (1 + share) of the time,
# so a share of 0.25 makes its first token 5 times as late as alone, and a share of 3.3 1.3 times as
# late. With free rows it is hardly late at all: in the second example 132 rows in 28.8 ms are as
# many a second as a pass of 1,024 prompt rows computes (docs/measurements/long-prompts.md).
#
# Prompts that arrive steadily have to be fed as fast as they arrive: the budget is three times what
# ``PromptLoad`` measures if that is more, up to three fifths of the verifier's time. There,
# ``tokens_per_pass`` counts, the mean number of tokens that a session commits per pass: where
# drafts raise it, fewer passes are made, and each has to feed more.
#
# The share protects sessions that were there first. Prompts that came no later than every session
# that decodes began are the rest of one burst: eight requests at once are one prompt that is fed
# and seven that wait for it. They get a fair part, one share of the time for each of the seven and
# one for each session that decodes. With the usual share the first session would decode alone for
# tens of passes, which would cost all eight a third more of the processor's time. While several
# credentials are active there is only the usual share, so that no client's burst delays another's.
#
# One pass in four carries an eighth less, so that the slope can be measured, and one in
# ``BASE_EVERY`` carries no prompt row, so that ``base_s`` is measured while prompts wait.

PREFILL_SHARE: Final = 0.22
"""Default of ``EngineLimits.prefill_share``. With 0.5 ten long prompts stretched the gaps of a
running stream to 1.5."""
MAX_PREFILL_SHARE: Final = 1.5
ARRIVAL_MARGIN: Final = 3.0
"""Margin for prompts that come in clusters: with a factor of 2 they waited half as long again."""
MIN_PREFILL_ROWS: Final = 8
"""Least budget. Fewer rows are not cheaper: CPUs compute tiles of 8 rows and more
(``targets/row_tiles.py``).
"""
INITIAL_PREFILL_ROWS: Final = 32
"""Budget before the first prompts were timed beside decoding sessions."""
MAX_PREFILL_ROWS: Final = 1 << 20
MAX_GROWTH: Final = 1.25
"""Largest factor by which the budget grows from one pass to the next. A pass that was late for
another reason must not admit a whole prompt at once."""
BASE_EVERY: Final = 32
NEAR_WEIGHT: Final = 0.15
"""Weight of the last pass among those near the budget, as in ``MovingAverage``: some seven passes
count, so that the budget follows a prompt whose rows get dearer as it gets longer."""
NEAR_SAMPLES: Final = 8
PROMPT_PASS_S: Final = 0.1
"""Longest pass of prompts alone, in seconds, while several credentials are active. A newcomer waits
for the end of such a pass, and the goal for the first token is 0.3 s: this pass, one pass with the
newcomer's prompt, and the network.
"""
PROMPT_PASS_FACTOR: Final = 4.0
"""Such a pass may in any case take this many times as long as one without prompt rows, so that
prompts lose at most a quarter of their speed by ``PROMPT_PASS_S``.
"""
INITIAL_PROMPT_ROWS: Final = 256
"""Rows of such a pass before the first prompt was timed."""
SLOT_S: Final = 1.0
"""Seconds of a slot; ``SLOTS`` slots remember eight seconds. A slot holds tens of passes, and a
burst of prompts has ended within four slots.
"""
SLOTS: Final = 8


class PrefillBudget:
    """Learns from finished passes how many prompt rows the next one may carry (``rows``).

    Passes may become longer by ``share`` of a pass without prompts."""

    def __init__(self, share: float = PREFILL_SHARE) -> None:
        self._share = share
        self._took_s = SlopeEstimator()
        """Durations of all passes by their prompt rows, few and many."""
        self._base_s = MovingAverage()
        """Durations of passes without prompts."""
        self._near_s = SlopeEstimator(NEAR_WEIGHT)
        """Durations of passes with prompts beside sessions that decode."""
        self._budget = INITIAL_PREFILL_ROWS
        self._passes = 0
        self._follows_prompt = False
        """Whether the last pass carried prompt rows."""

    def note_pass(
        self,
        prompt_rows: int,
        took_s: float,
        arriving: float = 0.0,
        tokens_per_pass: float = 1.0,
        *,
        decodes: bool = True,
    ) -> None:
        """Record a finished pass that sampled.

        ``prompt_rows`` of its rows were prompts. ``took_s`` is its duration without the rows of
        drafts. ``arriving`` is how many prompt rows arrive in the duration of a pass,
        ``tokens_per_pass`` the mean tokens per session and pass. ``decodes`` states whether a
        session decoded in it.
        """
        self._took_s.add(prompt_rows, took_s)
        if not decodes:
            return
        self._passes += 1
        if not prompt_rows:
            if self._follows_prompt:  # It is rare, so it has to count.
                self._base_s.limit_weight(1)
            self._base_s.add(took_s)
            self._follows_prompt = False
            return
        self._follows_prompt = True
        self._near_s.add(prompt_rows, took_s)
        most = int(MAX_GROWTH * self._budget)
        affordable = self._affordable_rows(arriving, tokens_per_pass)
        self._budget = max(MIN_PREFILL_ROWS, min(affordable, most))

    @property
    def rows(self) -> int:
        """Most prompt rows of the next pass. It is 0 now and then, to measure a pass without
        prompts; if no session decodes in that pass, ``usual_rows`` are meant."""
        return 0 if self._passes % BASE_EVERY == BASE_EVERY - 1 else self.usual_rows

    def rows_within(self, share: float) -> int:
        """Return ``rows`` for a pass that may become longer by ``share`` if that is more than the
        usual share."""
        rows = self.rows
        if not rows or share <= self._share:
            return rows
        base_s, row_s = self._usual_s, self._took_s.get()
        if base_s is None or row_s is None:
            return max(rows, min(INITIAL_PROMPT_ROWS, int(rows * share / self._share)))
        row_s = max(row_s, self._near_s.get() or 0.0)
        if row_s <= 0.0:
            return MAX_PREFILL_ROWS
        return min(MAX_PREFILL_ROWS, rows + int(base_s * (share - self._share) / row_s))

    @property
    def usual_rows(self) -> int:
        less = 0 if self._passes % 4 else self._budget // 8
        return max(MIN_PREFILL_ROWS, self._budget - less)

    @property
    def rows_without_decoding(self) -> int:
        """Most prompt rows of a pass in which no session decodes, such that the pass ends soon."""
        row_s, base_s = self._took_s.get(), self._took_s.value(0.0)
        if row_s is None or base_s is None:
            return INITIAL_PROMPT_ROWS
        if row_s <= 0.0:
            return MAX_PREFILL_ROWS
        base_s = max(0.0, base_s)
        rows = (max(PROMPT_PASS_S, PROMPT_PASS_FACTOR * base_s) - base_s) / row_s
        return max(MIN_PREFILL_ROWS, min(MAX_PREFILL_ROWS, int(rows)))

    @property
    def _usual_s(self) -> float | None:
        """Duration of a pass without prompts, in seconds; None if it is not known."""
        return self._base_s.get(0.0) if self._base_s.count else self._took_s.value(0.0)

    def _affordable_rows(self, arriving: float, tokens_per_pass: float) -> int:
        """Return how many prompt rows a pass may carry in the long run. The arguments are those of
        ``note_pass``.

        Two limits are computed, and the larger one counts: what a burst of prompts may add to a
        pass, and what must be fed to keep up with the prompts that arrive. The budget stays as it
        is until enough passes were timed."""
        base_s = self._usual_s
        if base_s is None or self._near_s.count < NEAR_SAMPLES:
            return self._budget
        longest = tokens_per_pass * max(self._share, MAX_PREFILL_SHARE)
        lasting = min(
            tokens_per_pass * ARRIVAL_MARGIN * arriving, self._rows_within(base_s, longest)
        )
        burst = self._rows_within(base_s, self._share)
        return min(MAX_PREFILL_ROWS, int(max(burst, lasting)))

    def _rows_within(self, base_s: float, share: float) -> float:
        """Return how many prompt rows make a pass longer by ``share`` of ``base_s``."""
        mean_rows, mean_s = self._near_s.mean
        base_s = min(base_s, mean_s)
        added_s = mean_s - base_s
        row_s = max(self._near_s.get() or 0.0, added_s / mean_rows)
        if row_s <= 0.0:
            return MAX_PREFILL_ROWS
        return mean_rows + (base_s * share - added_s) / row_s


class PromptLoad:
    """Measures how many prompt rows arrive per second in steady load.

    The measure is the lower median of the rows that arrived in the last ``SLOTS`` slots of
    ``SLOT_S``. Rows that arrive in fewer than half of the slots are a burst and do not count.
    Within a slot, no credential counts for more than all others together; otherwise a client that
    sends long prompts in a loop would make all passes longer.
    """

    def __init__(self) -> None:
        self._slots: deque[int] = deque([0] * SLOTS, SLOTS)
        self._counts: Counter[str] = Counter()
        self._slot_ends_at: float | None = None
        self._median = 0

    def add(self, rows: int, now: float, credential: str = "") -> None:
        """Record a new prompt with ``rows`` rows to compute, of the credential with that name."""
        self._advance_slots(now)
        self._counts[credential] += rows

    def rows_per_s(self, now: float) -> float:
        self._advance_slots(now)
        return self._median / SLOT_S

    def _advance_slots(self, now: float) -> None:
        if self._slot_ends_at is None or now >= self._slot_ends_at + SLOTS * SLOT_S:
            self._slots.extend([0] * SLOTS)
            self._counts.clear()
            self._slot_ends_at, self._median = now + SLOT_S, 0
        while now >= self._slot_ends_at:
            most = max(self._counts.values(), default=0)
            others = sum(self._counts.values()) - most
            self._slots.append(others + min(most, others) if others else most)
            self._counts.clear()
            self._slot_ends_at += SLOT_S
            self._median = sorted(self._slots)[(SLOTS - 1) // 2]


class PromptQueue:
    """Orders the waiting prompts: the highest rank = waiting time / missing rows comes first
    (highest response ratio, Hansen 1971). Short prompts go first, and none starves.

    Prompts are known by session id, from ``order`` until ``forget``. ``credential_of`` is the
    engine's own table of the sessions' credentials.
    """

    def __init__(
        self,
        credential_of: Mapping[str, Credential] | None = None,
        prefill_share: float = PREFILL_SHARE,
    ) -> None:
        self._credential_of = {} if credential_of is None else credential_of
        self._since: dict[str, float] = {}
        self._budget = PrefillBudget(prefill_share)
        self._load = PromptLoad()

    @property
    def usual_rows(self) -> int:
        return self._budget.usual_rows

    @property
    def rows(self) -> int:
        return self._budget.rows

    def rows_in_burst(self, decoding: Mapping[str, float], keys: Iterable[str]) -> int:
        """Return the most rows of the prompts ``keys`` in a pass beside sessions of one client.
        ``decoding`` states since when each session decodes."""
        first = min(decoding.values())
        same_burst = sum(self._since[key] <= first for key in keys)
        return self._budget.rows_within(same_burst / len(decoding))

    @property
    def rows_without_decoding(self) -> int:
        return self._budget.rows_without_decoding

    def order(self, missing: Mapping[str, int], now: float) -> list[str]:
        """Return the session ids of ``missing`` in feeding order; its values are the rows that each
        still has to feed."""
        since = self._since
        for key, rows in missing.items():
            if key not in since:
                since[key] = now
                self._load.add(rows, now, self._credential_of.get(key, ANYBODY).name)
        return sorted(missing, key=lambda key: ((since[key] - now) / missing[key], missing[key]))

    def forget(self, key: str) -> None:
        self._since.pop(key, None)

    def note_pass(
        self,
        prompt_rows: int,
        took_s: float,
        drafts_s: float,
        tokens_per_pass: float,
        now: float,
        *,
        decodes: bool,
    ) -> None:
        """Record a finished pass that sampled: its prompt rows, its duration, the seconds that its
        draft nodes took, the recent mean of tokens per session and pass, and whether a session
        decoded in it."""
        arriving = self._load.rows_per_s(now) * took_s
        own_s = max(0.0, took_s - drafts_s)
        self._budget.note_pass(prompt_rows, own_s, arriving, tokens_per_pass, decodes=decodes)


# Divisor of the rows that are kept for prompts if more sessions decode than a pass has rows.
_PROMPT_DIVISOR = 8

OfferRows = Callable[[str, Offer, float], PassRequest | None]
"""Offers rows to a session; returns its request, or None if it declines."""
OfferChain = Callable[[str, DraftOffer, float], ChainStart | None]
"""Returns where a chain of the server model would begin before that offer; None for nowhere."""


class PassScheduler:
    """The queue of sessions that wait for a pass, and the pass that runs.

    ``credential_of`` is the engine's own table of the sessions' credentials, ``draft_times`` are
    the measured times of the server model or the engine speculator.
    """

    def __init__(
        self,
        limits: EngineLimits,
        cache_scheduler: CacheScheduler,
        offer_rows: OfferRows,
        credential_of: Mapping[str, Credential] | None = None,
        draft_times: DraftTimes | None = None,
    ) -> None:
        self.running: Batch | None = None
        self.passes = 0
        self._limits, self._cache_scheduler, self._offer_rows = limits, cache_scheduler, offer_rows
        self.fairness = Fairness({} if credential_of is None else credential_of)
        self._waiting: dict[str, int] = {}
        """The queue: the number of the pass at which each session joined it, by session id."""
        self._decoding_since: dict[str, float] = {}
        """When each session was first offered a row to decode, by session id."""
        self.isolated_keys: set[str] = set()
        """Sessions whose last pass failed together with others. Each gets its next pass alone, so
        that a failure can be attributed to it."""
        self._awaiting_draft: dict[str, None] = {}
        """Sessions that declined an offer in order to wait for a draft."""
        self.price = RowPriceEstimator()
        self._prompts = PromptQueue(credential_of, limits.prefill_share)
        self.draft_times = DraftTimes() if draft_times is None else draft_times
        self._passes_without_proposal = 0.0
        """Passes since the server model last proposed a token, less those for which the probes
        since then have used up the time."""
        self._is_probing = False
        """Whether the round that runs is a probe."""
        self._empty_rounds = self._drafts_at_pass = 0
        """Rounds in a row that proposed no token, and the first pass at which a round may run
        again."""
        self._passes_without_speculation = 0
        """Passes in a row in which the engine speculator did not run because it does not pay."""
        self.draft_report = ""
        """Log line about the server model; the engine clears it."""
        self._has_reported_unpaid = False

    def enqueue(self, key: str) -> None:
        self._waiting.setdefault(key, self.passes)
        self._awaiting_draft.pop(key, None)

    def forget(self, key: str) -> None:
        self._waiting.pop(key, None)
        self._awaiting_draft.pop(key, None)
        self._decoding_since.pop(key, None)
        self.isolated_keys.discard(key)
        self._prompts.forget(key)

    def form_pass(
        self, sessions: Mapping[str, VerifySession], now: float, began_at: float | None = None
    ) -> tuple[tuple[PassRequest, ...], list[str]]:
        """Form a pass that starts now.

        Returns its requests, empty if no session wants a pass, and the session ids that were
        offered rows. ``began_at`` is passed on in the offers.
        """
        assert self.running is None
        forming = self._begin_forming(began_at)
        self._cache_scheduler.begin_pass(now)
        line, first_prompt, prompt_room = self._order_queue(sessions, now)
        self._offer_in_order(sessions, line, first_prompt, prompt_room, forming, now)
        if not forming.parts and not prompt_room:
            # No session decodes in the pass that was to be measured without prompts.
            line, first_prompt = line[first_prompt:], 0
            prompt_room = self._prompts.usual_rows
            self._offer_in_order(sessions, line, first_prompt, prompt_room, forming, now)
        if forming.parts and self.isolated_keys.isdisjoint(forming.parts):
            self._offer_again(sessions, forming, now)
        for key in self._cache_scheduler.evicted:
            self.enqueue(key)
        self._cache_scheduler.evicted.clear()
        parts = tuple(forming.parts.values())
        if parts:
            self.running = Batch(now, parts)
        return tuple(request for _, request in parts), forming.offered_keys

    def _offer_in_order(
        self,
        sessions: Mapping[str, VerifySession],
        line: list[str],
        first_prompt: int,
        prompt_room: int,
        forming: FormingPass,
        now: float,
    ) -> None:
        """Offer rows to the sessions of ``line`` until the pass is full. Those from index
        ``first_prompt`` on feed prompts, at most ``prompt_room`` rows together."""
        room = forming.rows_left
        prompt_rows_kept = (
            min(prompt_room, max(1, room // _PROMPT_DIVISOR)) if first_prompt < len(line) else 0
        )
        for place, key in enumerate(line):
            is_isolated, is_prompt = key in self.isolated_keys, place >= first_prompt
            room = forming.rows_left
            if is_prompt:
                free = min(room, prompt_room)
            elif (free := room - prompt_rows_kept - (first_prompt - place - 1)) < 1:
                free = min(1, room - prompt_rows_kept)
            if room <= 0 or (is_isolated and forming.parts):
                break
            if free <= 0 or not self.fairness.admits(key, now, prompt=is_prompt):
                continue
            others = len(line) - place - 1
            request = self._offer_session(sessions[key], key, free, others, forming, now)
            if request is not None:
                self.fairness.charge(key, request.row_count, prompt=is_prompt)
                if is_prompt:
                    prompt_room -= len(request.feed)
            if is_isolated and forming.parts:
                break

    def plan_round(
        self, sessions: Mapping[str, VerifySession], offer_chain: OfferChain, now: float
    ) -> RunDrafts | None:
        """Return the round of the server model to run before the next pass, or None if none
        pays."""
        if (pass_s := self.price.pass_s) is None or self.passes < self._drafts_at_pass:
            return None
        most = self._limits.max_rows_per_pass
        decoding = [key for key in self._waiting if is_decoding(sessions[key])][: most // 2]
        if not decoding:
            return None
        forming = self._begin_forming()
        rows = min(forming.offer.max_rows, most // len(decoding))
        offer = replace(forming.offer, max_rows=rows)
        price = self.price
        times = replace(
            self.draft_times.round_times(pass_s, price.row_s),
            pass_s=price.bare_pass_s,
            waiting_per_decoding=price.waiting_per_decoding,
            least_chance=price.least_chance,
            max_steps=MAX_STEPS_BEFORE_PROMPTS
            if len(decoding) < len(self._waiting)
            else LONGEST_CHAIN,
        )
        is_alone = len(self._waiting) == 1 and not self._awaiting_draft
        draft_offer = DraftOffer(offer, is_alone)
        starts: list[ChainStart] = []
        prompt_rows = times.prompt_rows
        for key in decoding:
            start = offer_chain(key, draft_offer, now)
            if start is None:
                continue
            if not start.step.guess:  # The last one may exceed the rest.
                if prompt_rows <= 0:
                    continue
                prompt_rows -= len(start.step.feed)
            starts.append(start)
        if self._empty_rounds >= EMPTY_ROUNDS:
            starts = sorted(starts, key=lambda start: len(start.step.feed))[:1]
        action = RunDrafts(tuple(starts), times, len(decoding) - len(starts))
        is_probe_due = self._passes_without_proposal >= PROBE_EVERY * max(
            1.0, times.step_s / max(pass_s, MIN_PASS_S)
        )
        self._is_probing = False
        if is_probe_due and starts and not DraftRound(action).next_step():
            shortest = min(starts, key=lambda start: start.missing_tokens)
            action = RunDrafts((shortest,), times, len(decoding) - 1, probe=True)
            self._is_probing = True
            if not self._has_reported_unpaid:
                self._has_reported_unpaid = True
                self.draft_report = (
                    "the draft model does not pay now: its tokens are estimated to be accepted"
                    f" with a probability of {shortest.rate:.2f}, a step takes"
                    f" {1e3 * times.step_s:.1f} ms and a pass {1e3 * pass_s:.1f} ms; it runs one"
                    f" step in {PROBE_EVERY} passes until it pays"
                )
        self._passes_without_proposal += 1
        return action if DraftRound(action).next_step() else None

    def finish_round(self, done: DraftsDone) -> None:
        """Record a finished round."""
        for rows, took_s in done.steps:
            self.draft_times.note_step(rows, took_s)
            self.price.note_round(took_s)
            if self._is_probing and (pass_s := self.price.pass_s):
                # A probe that reads a long text proposes nothing for many rounds.
                self._passes_without_proposal -= PROBE_EVERY * took_s / pass_s
        if any(chain.guesses for chain in done.chains):
            if self._empty_rounds >= EMPTY_ROUNDS:
                self.draft_report = "the draft model proposes tokens again"
            self._passes_without_proposal, self._empty_rounds = 0.0, 0
        elif any(chain.fed is None for chain in done.chains):
            self._empty_rounds += 1
            beyond = self._empty_rounds - EMPTY_ROUNDS
            if beyond >= 0:
                rest = min(MAX_REST, PROBE_EVERY << min(beyond, 16))
                self._drafts_at_pass = self.passes + rest
            if beyond == 0:
                self.draft_report = (
                    f"the draft model proposed no token in {EMPTY_ROUNDS} rounds in a row; it is"
                    f" tried again after {PROBE_EVERY} passes, and then less often. Check that its"
                    " vocabulary is the target's, that there is memory for its cache, and that its"
                    " weights are complete"
                )

    def choose_speculator_steps(self) -> int:
        """Return how many tokens the engine speculator should propose behind the pass that was just
        formed."""
        most, batch = self._limits.speculator_tokens, self.running
        if not most or batch is None:
            return 0
        pass_s, step_s = self.price.pass_s, self.draft_times.speculator_step_s
        blocks = self._limits.speculator_blocks
        if pass_s is None or step_s is None:
            # The steps must vary to be timed. Two passes each, so that a pass with steps carries
            # the nodes of a pass with steps as often as not.
            return most if self.passes & 2 else 0 if blocks else most // 2
        reaches = [
            found
            for session, request in batch.parts
            if request.sample and (found := session.speculator_reaches(most))
        ]
        step_s, row_s = max(0.0, step_s), self.price.row_s
        if blocks:
            length = most if block_pays(reaches, pass_s, most * step_s, row_s) else 0
        else:
            length = chain_length(reaches, pass_s, step_s, row_s)
        self._passes_without_speculation = 0 if length else self._passes_without_speculation + 1
        if self._passes_without_speculation >= PROBE_EVERY:  # to notice when it pays again
            self._passes_without_speculation, length = 0, most if blocks else 1
        return length

    def _offer_session(
        self,
        session: VerifySession,
        key: str,
        free: int,
        others: int,
        forming: FormingPass,
        now: float,
    ) -> PassRequest | None:
        """Offer a session ``free`` rows; return None if it declines or the cache has no room for
        it. ``others`` is the number of sessions behind it in the queue."""
        parts, most = forming.parts, min(free, self._limits.max_rows_per_session)
        if session.rows_to_feed:
            most = self._cache_scheduler.rows_for(key, most, parts, others, now)
            if most == 0:
                return None
        forming.offered_keys.append(key)
        self._waiting.pop(key, None)
        offer = forming.offer
        if most != offer.max_rows or bool(parts) != offer.runs_anyway:
            offer = forming.offer = replace(offer, max_rows=most, runs_anyway=bool(parts))
        request = self._offer_rows(key, offer, now)
        if request is None:
            if session.request.run_ahead is RunAhead.AUTO:
                self._awaiting_draft[key] = None
            return None
        self._awaiting_draft.pop(key, None)
        if table := self._cache_scheduler.reserve(key, request.cache_length + request.row_count):
            request = request.with_blocks(table)
        parts[key] = session, request
        forming.rows_left -= request.row_count
        return request

    def _begin_forming(self, began_at: float | None = None) -> FormingPass:
        pass_s, most = self.price.pass_s, self._limits.max_rows_per_session
        wait_s = ASSUMED_PASS_S if pass_s is None else pass_s
        offer = Offer(
            most,
            wait_s,
            self.price.least_chance,
            began_at=began_at,
            least_lookup_chance=self.price.least_lookup_chance
            if self._limits.server_drafts
            else None,
        )
        return FormingPass(self._limits.max_rows_per_pass, offer)

    def _offer_again(
        self, sessions: Mapping[str, VerifySession], forming: FormingPass, now: float
    ) -> None:
        """Offer again to sessions that declined in order to wait for a draft.

        The pass runs anyway and can give them a token. A draft that arrives meanwhile can only join
        the next pass.
        """
        for key in [key for key in self._awaiting_draft if key not in self.isolated_keys]:
            session = sessions.get(key)
            if session is None or not is_decoding(session):
                del self._awaiting_draft[key]
            elif forming.rows_left > 0 and self.fairness.admits(key, now, prompt=False):
                request = self._offer_session(session, key, 1, 0, forming, now)
                if request is not None:
                    self.fairness.charge(key, request.row_count, prompt=False)

    def _order_queue(
        self, sessions: Mapping[str, VerifySession], now: float
    ) -> tuple[list[str], int, int]:
        """Return the order in which sessions are offered rows, the index at which prompts begin in
        it, and the rows that prompts may have together."""
        missing = {key: sessions[key].rows_to_feed for key in self._waiting}
        for key in [key for key, rows in missing.items() if not rows]:
            del self._waiting[key], missing[key]
        most = self._limits.max_rows_per_pass
        prompts = {key: rows for key, rows in missing.items() if rows > 1}
        decoding = [key for key, rows in missing.items() if rows == 1]
        for key in decoding:
            self._decoding_since.setdefault(key, now)
        self.fairness.plan_pass([*decoding, *self._awaiting_draft], prompts, now)
        if decoding:
            self.price.note_queue(len(decoding) + len(self._awaiting_draft), len(prompts))
        if not self.isolated_keys.isdisjoint(missing):
            return list(missing), 0, most
        left_out = {key: self.passes - self._waiting[key] for key in missing}
        line = self.fairness.sort_by_priority(decoding, left_out)
        if prompts:
            in_order = self._prompts.order(prompts, now)
            line = line + self.fairness.sort_prompts(in_order, left_out)
            began_at = {
                key: at
                for key, at in self._decoding_since.items()
                if key in sessions and is_decoding(sessions[key])
            }
            is_contended = self.fairness.is_contended(now)
            if began_at and is_contended:
                most = self._prompts.rows
            elif began_at:
                most = self._prompts.rows_in_burst(began_at, prompts)
            elif is_contended:
                most = min(most, self._prompts.rows_without_decoding)
        return line, len(decoding), most

    def finish_pass(self, now: float, target_s: float | None = None, draft_steps: int = 0) -> Batch:
        """End the running pass. ``target_s`` is the target's part of its duration, ``draft_steps``
        the steps that the engine speculator ran in it."""
        assert self.running is not None
        batch, self.running = self.running, None
        self.passes += 1
        took_s = now - batch.started_at
        target_s = took_s if target_s is None else target_s
        if self._limits.speculator_tokens:
            self.draft_times.note_pass(draft_steps, target_s)
        if any(request.sample for _, request in batch.parts):
            rows, prompt_rows, drafted = batch.count_rows()
            self.fairness.note_pass(len(batch.parts), rows, target_s)
            server_rows = sum(request.server_nodes for _, request in batch.parts)
            self.price.note_pass(rows, prompt_rows, took_s, target_s, server_rows)
            drafts_s = drafted * self.price.row_s
            self._prompts.note_pass(
                prompt_rows,
                took_s,
                drafts_s,
                self.price.tokens_per_pass,
                now,
                decodes=any(one.sample and len(one.feed) == 1 for _, one in batch.parts),
            )
        for _, request in batch.parts:
            if len(request.feed) == 1:
                self.fairness.note_rows(1 + len(request.tokens))
            if request.sample:
                self._prompts.forget(request.key)
        return batch

    @property
    def row_price(self) -> int:
        return min(MAX_PRICE, round(MAX_PRICE * self.price.least_chance))
