"""Decides which sessions share the next packed pass.

Theory of operation. Sessions that might use a pass wait in a queue, longest waiting first. When no
pass runs, each is offered the remaining room: at most ``max_rows_per_session`` rows, and no more
than fit in the cache (``cache_scheduler.py``). A session that declines leaves the queue until an
event changes it, or until others run a pass that it can share. A session for which there is no room
keeps its place. After a failed pass, its sessions are tried one at a time.

Decode first: sessions that decode come before sessions that feed a prompt, and each has a row of
its own before any session's drafts get one. Prompts follow in the order of ``PromptQueue``, which
also decides how many rows they may have together (``prompt_queue.py``); an eighth of the pass is
kept for them however many sessions decode. ``fairness.py`` decides which sessions must wait for the
sake of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.estimators import ASSUMED_PASS_S
from edgespec.core.protocol.messages import MAX_PRICE, RunAhead
from edgespec.core.protocol.work import PassRequest
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.cache_scheduler import CacheScheduler
from edgespec.core.verifier.draft_round import (
    LONGEST_CHAIN,
    MAX_STEPS_BEFORE_PROMPTS,
    MIN_PASS_S,
    ChainStart,
    DraftRound,
    DraftsDone,
    RoundTimes,
    RunDrafts,
    block_pays,
    chain_length,
)
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.fairness import Fairness
from edgespec.core.verifier.prompt_queue import PromptQueue
from edgespec.core.verifier.row_price import RowPriceEstimator
from edgespec.core.verifier.server_model import EMPTY_ROUNDS, MAX_REST, PROBE_EVERY, DraftTimes
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


@statically_frozen
class PassOrder:
    """The sessions that wait for a pass, in the order in which they are offered rows: first
    ``decoding``, then ``prompts``."""

    decoding: list[str]
    """Ids of sessions with one token to feed."""
    prompts: list[str]
    """Ids of sessions that feed a prompt. After a failed pass all sessions stand here, the oldest
    first, since each one gets its next pass alone."""
    prompt_rows: int
    """Most rows that ``prompts`` may have together."""


def is_decoding(session: VerifySession) -> bool:
    """Return whether the session has one token to feed, so that its next pass commits tokens."""
    return session.rows_to_feed == 1


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
        order = self._order_queue(sessions, now)
        self._offer_in_order(sessions, order, forming, now)
        if not forming.parts and not order.prompt_rows:
            # This pass was to be measured without prompts, but no session decodes in it.
            order = replace(order, decoding=[], prompt_rows=self._prompts.usual_rows)
            self._offer_in_order(sessions, order, forming, now)
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
        order: PassOrder,
        forming: FormingPass,
        now: float,
    ) -> None:
        """Offer rows to the sessions of ``order`` until the pass is full."""
        prompt_rows_left, kept_for_prompts = order.prompt_rows, 0
        if order.prompts:
            kept_for_prompts = min(prompt_rows_left, max(1, forming.rows_left // _PROMPT_DIVISOR))
        keys = [*order.decoding, *order.prompts]
        for place, key in enumerate(keys):
            is_isolated, is_prompt = key in self.isolated_keys, place >= len(order.decoding)
            if forming.rows_left <= 0 or (is_isolated and forming.parts):
                break
            if is_prompt:
                free = min(forming.rows_left, prompt_rows_left)
            else:
                # Each session behind this one keeps a row. Drafts of this one get the others.
                room = forming.rows_left - kept_for_prompts
                free = max(room - (len(order.decoding) - place - 1), min(1, room))
            if free <= 0 or not self.fairness.admits(key, now, prompt=is_prompt):
                continue
            others = len(keys) - place - 1
            request = self._offer_session(sessions[key], key, free, others, forming, now)
            if request is not None:
                self.fairness.charge(key, request.row_count, prompt=is_prompt)
                if is_prompt:
                    prompt_rows_left -= len(request.feed)
            if is_isolated and forming.parts:
                break

    # --- the verifier's own drafts ---------------------------------------------------------

    def plan_round(
        self, sessions: Mapping[str, VerifySession], offer_chain: OfferChain, now: float
    ) -> RunDrafts | None:
        """Return the round of the server model to run before the next pass, or None if none
        pays."""
        pass_s = self.price.pass_s
        if pass_s is None or self.passes < self._drafts_at_pass:
            return None
        # With at most half as many sessions as rows, each one has room for a token and a node.
        most_sessions = self._limits.max_rows_per_pass // 2
        decoding = [key for key in self._waiting if is_decoding(sessions[key])][:most_sessions]
        if not decoding:
            return None
        times = self._measured_times(pass_s, prompts_wait=len(decoding) < len(self._waiting))
        starts = self._offer_chains(decoding, times.prompt_rows, offer_chain, now)
        if self._empty_rounds >= EMPTY_ROUNDS:
            # The model proposed nothing for long. It is tried on the shortest text.
            starts = sorted(starts, key=lambda start: len(start.step.feed))[:1]
        action = RunDrafts(tuple(starts), times, len(decoding) - len(starts))
        pays = bool(DraftRound(action).next_step())
        self._is_probing = not pays and bool(starts) and self._is_probe_due(times, pass_s)
        if self._is_probing:
            shortest = min(starts, key=lambda start: start.missing_tokens)
            action = RunDrafts((shortest,), times, len(decoding) - 1, probe=True)
            self._report_unpaid(shortest.rate, times.step_s, pass_s)
        self._passes_without_proposal += 1
        return action if pays or self._is_probing else None

    def _measured_times(self, pass_s: float, *, prompts_wait: bool) -> RoundTimes:
        """Return the times by which a round before the next pass is planned."""
        price = self.price
        return replace(
            self.draft_times.round_times(pass_s, price.row_s),
            pass_s=price.bare_pass_s,
            waiting_per_decoding=price.waiting_per_decoding,
            least_chance=price.least_chance,
            max_steps=MAX_STEPS_BEFORE_PROMPTS if prompts_wait else LONGEST_CHAIN,
        )

    def _offer_chains(
        self, decoding: Sequence[str], prompt_rows: int, offer_chain: OfferChain, now: float
    ) -> list[ChainStart]:
        """Return where the chains of the sessions ``decoding`` would begin. Texts that the draft
        model has still to read have ``prompt_rows`` rows together; the last one may exceed them."""
        offer = self._begin_forming().offer
        rows_each = self._limits.max_rows_per_pass // len(decoding)
        offer = replace(offer, max_rows=min(offer.max_rows, rows_each))
        is_alone = len(self._waiting) == 1 and not self._awaiting_draft
        starts: list[ChainStart] = []
        for key in decoding:
            start = offer_chain(key, DraftOffer(offer, is_alone), now)
            if start is None:
                continue
            if not start.step.guess:
                if prompt_rows <= 0:
                    continue
                prompt_rows -= len(start.step.feed)
            starts.append(start)
        return starts

    def _is_probe_due(self, times: RoundTimes, pass_s: float) -> bool:
        """Return whether a step should be run although it does not pay, to notice when it does
        again. A step that is longer than a pass is run proportionally less often."""
        passes_per_step = max(1.0, times.step_s / max(pass_s, MIN_PASS_S))
        return self._passes_without_proposal >= PROBE_EVERY * passes_per_step

    def _report_unpaid(self, rate: float, step_s: float, pass_s: float) -> None:
        """Log once that the server model does not pay, with the figures that decide it."""
        if self._has_reported_unpaid:
            return
        self._has_reported_unpaid = True
        self.draft_report = (
            "the draft model does not pay now: its tokens are estimated to be accepted"
            f" with a probability of {rate:.2f}, a step takes"
            f" {1e3 * step_s:.1f} ms and a pass {1e3 * pass_s:.1f} ms; it runs one"
            f" step in {PROBE_EVERY} passes until it pays"
        )

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
            # Steps are timed by comparing passes with many steps and passes with few. Each number
            # is kept for two passes, because a pass carries the nodes that the steps of the pass
            # before it proposed. So half of the passes with many steps carry many nodes.
            few = 0 if blocks else most // 2
            return most if self.passes & 2 else few
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

    def _order_queue(self, sessions: Mapping[str, VerifySession], now: float) -> PassOrder:
        """Return the order in which the waiting sessions are offered rows. Sessions that want no
        pass any more leave the queue."""
        missing = {key: sessions[key].rows_to_feed for key in self._waiting}
        for key in [key for key, rows in missing.items() if not rows]:
            del self._waiting[key], missing[key]
        prompts = {key: rows for key, rows in missing.items() if rows > 1}
        decoding = [key for key, rows in missing.items() if rows == 1]
        for key in decoding:
            self._decoding_since.setdefault(key, now)
        self.fairness.plan_pass([*decoding, *self._awaiting_draft], prompts, now)
        if decoding:
            self.price.note_queue(len(decoding) + len(self._awaiting_draft), len(prompts))
        if not self.isolated_keys.isdisjoint(missing):
            return PassOrder([], list(missing), self._limits.max_rows_per_pass)
        left_out = {key: self.passes - self._waiting[key] for key in missing}
        decoding = self.fairness.sort_by_priority(decoding, left_out)
        if not prompts:
            return PassOrder(decoding, [], self._limits.max_rows_per_pass)
        by_rank = self._prompts.order(prompts, now)
        return PassOrder(
            decoding,
            self.fairness.sort_prompts(by_rank, left_out),
            self._limit_prompt_rows(sessions, prompts, now),
        )

    def _limit_prompt_rows(
        self, sessions: Mapping[str, VerifySession], prompts: Mapping[str, int], now: float
    ) -> int:
        """Return the most rows that the waiting prompts may have together in the next pass."""
        # Sessions that decode may have declined this pass to wait for a draft; they count as well.
        decoding_since = {
            key: at
            for key, at in self._decoding_since.items()
            if key in sessions and is_decoding(sessions[key])
        }
        is_contended = self.fairness.is_contended(now)
        if decoding_since and is_contended:
            return self._prompts.rows
        if decoding_since:
            return self._prompts.rows_in_burst(decoding_since, prompts)
        if is_contended:
            return min(self._limits.max_rows_per_pass, self._prompts.rows_without_decoding)
        return self._limits.max_rows_per_pass

    def finish_pass(self, now: float, target_s: float | None = None, draft_steps: int = 0) -> Batch:
        """End the running pass. ``target_s`` is the target's part of its duration, ``draft_steps``
        the steps that the engine speculator ran in it."""
        assert self.running is not None
        batch, self.running = self.running, None
        self.passes += 1
        rows, prompt_rows, drafted = batch.count_rows()
        took_s = now - batch.started_at
        longest_s = self.price.longest_pass_s(rows)
        target_s = min(longest_s, took_s if target_s is None else target_s)
        took_s = min(longest_s, took_s)
        if self._limits.speculator_tokens:
            self.draft_times.note_pass(draft_steps, target_s)
        if any(request.sample for _, request in batch.parts):
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
