"""Which sessions share the next packed pass.

Theory of operation. Sessions that might use a pass wait in line, longest waiting first. When no
pass runs, each is offered the room that is left, at most ``max_rows_per_session`` rows, and no more
than the cache has room for (``cache_keeper.py``). Those that decline leave the line until something
happens to them, or others have a pass that they can share; those for whom there is no room keep
their place. After a pass that failed, its sessions are tried one at a time.

Decode first: sessions whose text moves on by the pass come before those that feed a prompt, and a
row is kept for each of them before anybody's drafts get it. Prompts follow in the order of
``PromptLine`` and share the rows that ``PrefillBudget`` leaves them while somebody decodes;
an eighth of the pass is theirs however many decode. While nobody decodes they have the whole pass,
but a short one where several credentials are at work. ``fairness.py`` says who has to wait for the
sake of others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from edgespec.core.protocol.estimators import GUESSED_PASS_S, SlopeEstimator
from edgespec.core.protocol.messages import MAX_PRICE, RunAhead
from edgespec.core.protocol.work import PassRequest
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.fairness import Fairness
from edgespec.core.verifier.own_drafts import (
    EMPTY_ROUNDS,
    LEAST_PASS_S,
    LONGEST_CHAIN,
    MOST_REST,
    MOST_STEPS,
    PROBE_EVERY,
    ChainStart,
    DraftRound,
    DraftsDone,
    DraftTimes,
    RunDrafts,
    chain_length,
)
from edgespec.core.verifier.row_price import RowPriceKeeper
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Offer


@statically_frozen
class Batch:
    started_at: float
    parts: tuple[tuple[VerifySession, PassRequest], ...]

    def count_rows(self) -> tuple[int, int, int]:
        """Rows in all, those that are fed beside the last token of a text, and draft nodes."""
        rows = prompt_rows = drafted = 0
        for _, request in self.parts:
            fed, nodes = len(request.feed), len(request.tokens)
            rows += fed + nodes
            drafted += nodes
            if fed > 1:
                prompt_rows += fed - 1
        return rows, prompt_rows, drafted


@dataclass(slots=True)
class Forming:
    """The pass that is being formed: rows that are left, the last offer of them, who takes part,
    who was asked."""

    room: int
    offer: Offer
    parts: dict[str, tuple[VerifySession, PassRequest]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


def decodes(session: VerifySession) -> bool:
    return session.missing_rows == 1


# How many prompt rows a pass may carry while others decode in it: so many that it becomes about a
# quarter as long again (chunked prefill under a budget of time, as in Sarathi-Serve, arXiv
# 2403.02310). When nobody decodes, prompts have the whole pass. Prompts that keep coming have to be
# served as fast as they come: the budget is thrice what ``PromptLoad`` measures if that is more, up
# to three fifths of the verifier's time.
#
# Formula: rows = share * base_s / row_s with share pace * ``SHARE`` up to ``BURST_SHARE``, or pace
# * ``SPARE`` * arriving rows a pass up to the share pace * ``MOST_SHARE``, at least ``LEAST_ROWS``.
# A pass with n prompt rows is taken to last base_s + n * row_s, a line through the passes of late.
# With passes of 24 ms and prompt rows of 0.5 ms that is 0.25 * 24 / 0.5 = 12, hence 16 rows; on a
# GPU, with rows of 0.02 ms, 300. The pace is how many tokens a session has of a pass: where drafts
# make it more, passes may be, and have to be, as much longer, or prompts would pay for drafts.
#
# Every other pass carries half of the budget, so that the line can always be drawn.

BURST_SHARE: Final = 0.3
"""Whatever the pace: a stream's gaps are asked to be at most 1.3 of the quiet ones."""
SHARE: Final = 0.25
"""At 0.5 ten long prompts stretched the gaps of a running stream to 1.5."""
MOST_SHARE: Final = 1.5
SPARE: Final = 3.0
"""Prompts come in clusters: at twice the median they waited half as long again."""
LEAST_ROWS: Final = 16
"""Fewer are not cheaper: CPUs compute tiles of 16 rows (``targets/row_tiles.py``)."""
FIRST_ROWS: Final = 32
"""Before the first prompt was timed beside decoding sessions."""
MOST_ROWS: Final = 1 << 20
PROMPT_PASS_S: Final = 0.1
"""How long a pass of prompts alone may take while several credentials are at work. Whoever comes
meanwhile waits for its end, and a first token is asked within 0.3 s: this pass, one with the
newcomer's prompt, and the network."""
PROMPT_PASS_PART: Final = 4.0
"""Such a pass may take this many times as long as one without prompt rows, whatever
``PROMPT_PASS_S``: so prompts lose at most a quarter of their pace by it."""
FIRST_PROMPT_ROWS: Final = 256
"""The rows of such a pass before the first prompt was timed."""
SLOT_S: Final = 1.0
"""Seconds of a slot; with ``SLOTS`` eight seconds are remembered. A slot holds tens of passes, and
a burst of prompts is over within four slots."""
SLOTS: Final = 8


class PrefillBudget:
    """Learns from finished passes; ``rows`` is the budget of the next one."""

    def __init__(self) -> None:
        self._took_s = SlopeEstimator()
        self._budget = FIRST_ROWS
        self._halve = False

    def note(
        self, prompt_rows: int, took_s: float, arriving: float = 0.0, pace: float = 1.0
    ) -> None:
        """A pass that sampled is over; ``prompt_rows`` of its rows were prompts, and so many
        ``arriving`` rows come in the time that a pass takes. ``took_s`` is without the rows of
        drafts; a session has ``pace`` tokens of a pass."""
        self._took_s.add(prompt_rows, took_s)
        if prompt_rows:
            self._halve = not self._halve
            # A pass that was late for another reason must not let a whole prompt in at once.
            affordable = self._affordable(arriving, pace)
            self._budget = max(LEAST_ROWS, min(affordable, 2 * self._budget))

    @property
    def rows(self) -> int:
        return self._budget // 2 if self._halve else self._budget

    @property
    def rows_alone(self) -> int:
        """How many prompt rows a pass may have in which nobody decodes, so that it is over soon."""
        row_s, base_s = self._took_s.get(), self._took_s.value(0.0)
        if row_s is None or base_s is None:
            return FIRST_PROMPT_ROWS
        if row_s <= 0.0:
            return MOST_ROWS
        base_s = max(0.0, base_s)
        rows = (max(PROMPT_PASS_S, PROMPT_PASS_PART * base_s) - base_s) / row_s
        return max(LEAST_ROWS, min(MOST_ROWS, int(rows)))

    def _affordable(self, arriving: float, pace: float) -> int:
        row_s, base_s = self._took_s.get(), self._took_s.value(0.0)
        if row_s is None or base_s is None:
            return self._budget
        if row_s <= 0.0:
            return MOST_ROWS
        base_rows = max(0.0, base_s) / row_s
        burst = min(pace * SHARE, BURST_SHARE) * base_rows
        lasting = pace * min(SPARE * arriving, MOST_SHARE * base_rows)
        return min(MOST_ROWS, int(max(burst, lasting)))


class PromptLoad:
    """Prompt rows that arrive a second, all the time.

    The lower median of the rows that came in the last ``SLOTS`` slots of ``SLOT_S``: what came in
    fewer than half of them is a burst and does not count. Of the credentials whose prompts come in
    a slot, none counts for more than all others together: who sends long prompts in a loop would
    else make everybody's passes longer."""

    def __init__(self) -> None:
        self._slots: deque[int] = deque([0] * SLOTS, SLOTS)
        self._counts: Counter[str] = Counter()
        self._slot_ends_at: float | None = None
        self._median = 0

    def add(self, rows: int, now: float, credential: str = "") -> None:
        """A prompt with so many rows to compute came, of the credential of that name."""
        self._turn(now)
        self._counts[credential] += rows

    def rows_per_s(self, now: float) -> float:
        self._turn(now)
        return self._median / SLOT_S

    def _turn(self, now: float) -> None:
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


class PromptLine:
    """Which prompt is fed next: the one with the highest rank = time since it came / rows it still
    lacks (highest response ratio, Hansen 1971), so the shortest first, and nobody starves.

    Prompts are known by their session's key, from ``order`` until ``forget``; ``credential_of`` is
    the engine's own table of whose they are."""

    def __init__(self, credential_of: Mapping[str, Credential] | None = None) -> None:
        self._credential_of = {} if credential_of is None else credential_of
        self._since: dict[str, float] = {}
        self._budget = PrefillBudget()
        self._load = PromptLoad()

    @property
    def rows(self) -> int:
        return self._budget.rows

    @property
    def rows_alone(self) -> int:
        return self._budget.rows_alone

    def order(self, missing: Mapping[str, int], now: float) -> list[str]:
        """The keys of ``missing`` in the order in which they are fed; the values are the rows that
        each still lacks."""
        since = self._since
        for key, rows in missing.items():
            if key not in since:
                since[key] = now
                self._load.add(rows, now, self._credential_of.get(key, ANYBODY).name)
        return sorted(missing, key=lambda key: ((since[key] - now) / missing[key], missing[key]))

    def forget(self, key: str) -> None:
        self._since.pop(key, None)

    def note(
        self, prompt_rows: int, took_s: float, drafts_s: float, pace: float, now: float
    ) -> None:
        """A pass that sampled is over. It took so long with so many rows of prompts, ``drafts_s``
        of it for draft nodes; of late, ``pace`` tokens came in a session's part of a pass."""
        arriving = self._load.rows_per_s(now) * took_s
        self._budget.note(prompt_rows, max(0.0, took_s - drafts_s), arriving, pace)


# Of the rows of a pass, this part is kept for prompts where more sessions decode than it has rows.
_PROMPT_PART = 8

AskSession = Callable[[str, Offer, float], PassRequest | None]
"""Make a session an offer; None when it declines."""
AskChain = Callable[[str, Offer, float], ChainStart | None]
"""Ask where a chain of the verifier's own would begin before that offer; None: nowhere."""


class PassScheduler:
    """``credential_of`` is the engine's own table: whose each session is."""

    def __init__(
        self,
        limits: EngineLimits,
        keeper: CacheKeeper,
        ask: AskSession,
        credential_of: Mapping[str, Credential] | None = None,
    ) -> None:
        self.running: Batch | None = None
        self.passes = 0
        self._limits, self._keeper, self._ask = limits, keeper, ask
        self.fairness = Fairness({} if credential_of is None else credential_of)
        self._waiting: dict[str, int] = {}
        """The line, and at which pass each joined it."""
        self.alone: set[str] = set()
        """Sessions whose last pass failed in company: each gets its next one to itself, so that a
        failure is its own."""
        self._declined: dict[str, None] = {}
        """Sessions that would rather wait for a draft than run a pass of their own."""
        self.price = RowPriceKeeper()
        self._prompts = PromptLine(credential_of)
        self.draft_times = DraftTimes()
        self._undrafted = 0
        """Passes since anything was guessed by the verifier's own draft model."""
        self._empty_rounds = self._drafts_at_pass = 0
        """Rounds in a row that brought no guess, and the pass before which there is none."""
        self._unspeculated = 0
        """Passes in a row in which the target's own speculator was not asked, since it pays not."""
        self.draft_report = ""
        """What the operator has to be told about the draft model; the engine clears it."""
        self._was_unpaid_told = False

    def enqueue(self, key: str) -> None:
        self._waiting.setdefault(key, self.passes)
        self._declined.pop(key, None)

    def forget(self, key: str) -> None:
        self._waiting.pop(key, None)
        self._declined.pop(key, None)
        self.alone.discard(key)
        self._prompts.forget(key)

    def form(
        self, sessions: Mapping[str, VerifySession], now: float, began_at: float | None = None
    ) -> tuple[tuple[PassRequest, ...], list[str]]:
        """Offer room in a pass that starts now: its requests, none if no session wants one, and
        the keys that were asked. ``began_at``: as in the offers."""
        assert self.running is None
        forming = self._forming(began_at)
        self._keeper.begin_pass(now)
        line, first_prompt, prompt_room = self._line(sessions, now)
        room = forming.room
        kept = min(prompt_room, max(1, room // _PROMPT_PART)) if first_prompt < len(line) else 0
        for place, key in enumerate(line):
            alone, is_prompt = key in self.alone, place >= first_prompt
            room = forming.room
            if is_prompt:
                free = min(room, prompt_room)
            elif (free := room - kept - (first_prompt - place - 1)) < 1:
                free = min(1, room - kept)
            if room <= 0 or (alone and forming.parts):
                break
            if free <= 0 or not self.fairness.admits(key, now, prompt=is_prompt):
                continue
            others = len(line) - place - 1
            request = self._offer(sessions[key], key, free, others, forming, now)
            if request is not None:
                self.fairness.count(key, request.row_count, prompt=is_prompt)
                if is_prompt:
                    prompt_room -= len(request.feed)
            if alone and forming.parts:
                break
        if forming.parts and self.alone.isdisjoint(forming.parts):
            self._take_along(sessions, forming, now)
        for key in self._keeper.evicted:
            self.enqueue(key)
        self._keeper.evicted.clear()
        parts = tuple(forming.parts.values())
        if parts:
            self.running = Batch(now, parts)
        return tuple(request for _, request in parts), forming.asked

    def draft(
        self, sessions: Mapping[str, VerifySession], ask: AskChain, now: float
    ) -> RunDrafts | None:
        """The round of the verifier's own draft model before the next pass; None: none pays."""
        if (pass_s := self.price.pass_s) is None or self.passes < self._drafts_at_pass:
            return None
        most = self._limits.max_rows_per_pass
        decoding = [key for key in self._waiting if decodes(sessions[key])][: most // 2]
        if not decoding:
            return None
        forming = self._forming()
        rows = min(forming.offer.max_rows, most // len(decoding))
        offer = replace(forming.offer, max_rows=rows)
        price = self.price
        times = replace(
            self.draft_times.of(pass_s, price.row_s),
            pass_s=price.undrafted_s,
            held_up=price.held_up,
            least_chance=price.least_chance,
            most_steps=MOST_STEPS if len(decoding) < len(self._waiting) else LONGEST_CHAIN,
        )
        starts: list[ChainStart] = []
        prompt_rows = times.prompt_rows
        for key in decoding:
            start = ask(key, offer, now)
            if start is None:
                continue
            if not start.step.guess:  # the last one may be longer than what is left
                if prompt_rows <= 0:
                    continue
                prompt_rows -= len(start.step.feed)
            starts.append(start)
        if self._empty_rounds >= EMPTY_ROUNDS:
            starts = sorted(starts, key=lambda start: len(start.step.feed))[:1]
        action = RunDrafts(tuple(starts), times, len(decoding) - len(starts))
        due = self._undrafted >= PROBE_EVERY * max(1.0, times.step_s / max(pass_s, LEAST_PASS_S))
        if due and starts and not DraftRound(action).next_step():
            shortest = min(starts, key=lambda start: len(start.step.feed))
            action = RunDrafts((shortest,), times, len(decoding) - 1, probe=True)
            if not self._was_unpaid_told:
                self._was_unpaid_told = True
                self.draft_report = (
                    "the draft model's guesses do not pay now: they are taken to be right with"
                    f" a chance of {shortest.rate:.2f}, a step takes {1e3 * times.step_s:.1f} ms"
                    f" and a pass {1e3 * pass_s:.1f} ms; it runs one step in {PROBE_EVERY} passes"
                    " until they do"
                )
        self._undrafted += 1
        return action if DraftRound(action).next_step() else None

    def drafted(self, done: DraftsDone) -> None:
        """A round is over."""
        for rows, took_s in done.steps:
            self.draft_times.note_step(rows, took_s)
            self.price.note_round(took_s)
        if any(chain.guesses for chain in done.chains):
            if self._empty_rounds >= EMPTY_ROUNDS:
                self.draft_report = "the draft model guesses again"
            self._undrafted = self._empty_rounds = 0
        elif any(chain.fed is None for chain in done.chains):
            self._empty_rounds += 1
            beyond = self._empty_rounds - EMPTY_ROUNDS
            if beyond >= 0:
                rest = min(MOST_REST, PROBE_EVERY << min(beyond, 16))
                self._drafts_at_pass = self.passes + rest
            if beyond == 0:
                self.draft_report = (
                    f"the draft model gave no guess in {EMPTY_ROUNDS} rounds in a row; it is tried"
                    f" again after {PROBE_EVERY} passes, and then less often. Is its vocabulary the"
                    " target's, is there memory for its cache, and are its weights whole?"
                )

    def draft_steps(self) -> int:
        """How many tokens the target's own speculator should propose behind the pass that is
        formed now."""
        most = self._limits.own_drafts
        batch, pass_s, step_s = self.running, self.price.pass_s, self.draft_times.own_step_s
        if not most or batch is None:
            return 0
        if pass_s is None or step_s is None:  # to be timed, they have to vary
            return most if self.passes % 2 else most // 2
        rates = [
            rate
            for session, request in batch.parts
            if request.sample and (rate := session.chain_rate) is not None
        ]
        length = chain_length(rates, most, pass_s, max(0.0, step_s), self.price.row_s)
        self._unspeculated = 0 if length else self._unspeculated + 1
        if self._unspeculated >= PROBE_EVERY:  # to notice when it pays again
            self._unspeculated, length = 0, 1
        return length

    def _offer(
        self, session: VerifySession, key: str, free: int, others: int, forming: Forming, now: float
    ) -> PassRequest | None:
        """Offer a session ``free`` rows; None when it declines or the cache has no room for it.
        ``others`` stand behind it."""
        parts, most = forming.parts, min(free, self._limits.max_rows_per_session)
        if session.missing_rows:
            most = self._keeper.rows_for(key, most, parts, others, now)
            if most == 0:
                return None
        forming.asked.append(key)
        self._waiting.pop(key, None)
        offer = forming.offer
        if most != offer.max_rows or bool(parts) != offer.runs_anyway:
            offer = forming.offer = replace(offer, max_rows=most, runs_anyway=bool(parts))
        request = self._ask(key, offer, now)
        if request is None:
            if session.request.run_ahead is RunAhead.AUTO:
                self._declined[key] = None
            return None
        self._declined.pop(key, None)
        if table := self._keeper.reserve(key, request.cache_length + request.row_count):
            request = request.with_blocks(table)
        parts[key] = session, request
        forming.room -= request.row_count
        return request

    def _forming(self, began_at: float | None = None) -> Forming:
        pass_s, most = self.price.pass_s, self._limits.max_rows_per_session
        wait_s = GUESSED_PASS_S if pass_s is None else pass_s
        if self._limits.drafter:  # no longer than the verifier takes to guess as well
            wait_s = self.draft_times.of(wait_s, 0.0).step_s
        offer = Offer(
            most,
            wait_s,
            self.price.least_chance,
            began_at=began_at,
            least_guess=self.price.least_guess if self._limits.server_drafts else None,
        )
        return Forming(self._limits.max_rows_per_pass, offer)

    def _take_along(
        self, sessions: Mapping[str, VerifySession], forming: Forming, now: float
    ) -> None:
        """Ask those again who would rather have waited for a draft: a pass runs now in which they
        can have a token, and before the next one begins no draft is of use."""
        for key in [key for key in self._declined if key not in self.alone]:
            session = sessions.get(key)
            if session is None or not decodes(session):
                del self._declined[key]
            elif forming.room > 0 and self.fairness.admits(key, now, prompt=False):
                request = self._offer(session, key, 1, 0, forming, now)
                if request is not None:
                    self.fairness.count(key, request.row_count, prompt=False)

    def _line(
        self, sessions: Mapping[str, VerifySession], now: float
    ) -> tuple[list[str], int, int]:
        """Who is asked in what order; from which place on they have a prompt to feed; and how many
        rows those may have together."""
        missing = {key: sessions[key].missing_rows for key in self._waiting}
        for key in [key for key, rows in missing.items() if not rows]:
            del self._waiting[key], missing[key]
        most = self._limits.max_rows_per_pass
        prompts = {key: rows for key, rows in missing.items() if rows > 1}
        decoding = [key for key, rows in missing.items() if rows == 1]
        self.fairness.plan([*decoding, *self._declined], prompts, now)
        if decoding:
            self.price.note_line(len(decoding) + len(self._declined), len(prompts))
        if not self.alone.isdisjoint(missing):
            return list(missing), 0, most
        left_out = {key: self.passes - self._waiting[key] for key in missing}
        line = self.fairness.first_come(decoding, left_out)
        if prompts:
            in_order = self._prompts.order(prompts, now)
            line = line + self.fairness.prompts_in_turn(in_order, left_out)
            if any(map(decodes, sessions.values())):
                most = self._prompts.rows
            elif self.fairness.is_contended(now):
                most = min(most, self._prompts.rows_alone)
        return line, len(decoding), most

    def finish(self, now: float, target_s: float | None = None, draft_steps: int = 0) -> Batch:
        """The pass is over; the target's own speculator ran so many steps in it."""
        assert self.running is not None
        batch, self.running = self.running, None
        self.passes += 1
        took_s = now - batch.started_at
        target_s = took_s if target_s is None else target_s
        if self._limits.own_drafts:
            self.draft_times.note_pass(draft_steps, target_s)
        if any(request.sample for _, request in batch.parts):
            rows, prompt_rows, drafted = batch.count_rows()
            self.fairness.note(len(batch.parts), rows, target_s)
            served = sum(request.served for _, request in batch.parts)
            self.price.note_pass(rows, prompt_rows, took_s, target_s, served)
            drafts_s = drafted * self.price.row_s
            self._prompts.note(prompt_rows, took_s, drafts_s, self.price.pace, now)
        for _, request in batch.parts:
            if len(request.feed) == 1:
                self.fairness.note_rows(1 + len(request.tokens))
            if request.sample:
                self._prompts.forget(request.key)
        return batch

    @property
    def row_price(self) -> int:
        return min(MAX_PRICE, round(MAX_PRICE * self.price.least_chance))
