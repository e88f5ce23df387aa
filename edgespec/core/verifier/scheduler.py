"""Which sessions share the next packed pass.

Theory of operation. Sessions that might use a pass wait in line, longest waiting first. When no
pass runs, each is offered the room that is left, at most ``max_rows_per_session`` rows, and no more
than the cache has room for (``cache_keeper.py``). Those that decline leave the line until something
happens to them, or others have a pass that they can share; those for whom there is no room keep
their place. After a pass that failed, its sessions are tried one at a time.

Decode first: sessions whose text moves on by the pass come before those that feed a prompt, and a
row is kept for each of them before anybody's drafts get it. Prompts follow in the order of
``prompt_line.py`` and share the rows that ``prefill_budget.py`` leaves them while somebody decodes;
an eighth of the pass is theirs however many decode. ``fairness.py`` says who has to wait for the
sake of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from edgespec.core.protocol.estimators import GUESSED_PASS_S
from edgespec.core.protocol.messages import MAX_PRICE, RunAhead
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.fairness import Fairness
from edgespec.core.verifier.forming import Batch, Forming, decodes
from edgespec.core.verifier.prompt_line import PromptLine
from edgespec.core.verifier.row_price import RowPriceKeeper
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Offer

# Of the rows of a pass, this part is kept for prompts where more sessions decode than it has rows.
_PROMPT_PART = 8

AskSession = Callable[[str, Offer, float], PassRequest | None]
"""Make a session an offer; None when it declines."""


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
        self._alone: set[str] = set()
        """Sessions whose last pass failed in company."""
        self._declined: dict[str, None] = {}
        """Sessions that would rather wait for a draft than run a pass of their own."""
        self._price = RowPriceKeeper()
        self._prompts = PromptLine(credential_of)

    @property
    def pass_s(self) -> float | None:
        """Moving average of the passes that sampled; None before the first."""
        return self._price.pass_s

    def enqueue(self, key: str) -> None:
        self._waiting.setdefault(key, self.passes)
        self._declined.pop(key, None)

    def forget(self, key: str) -> None:
        self._waiting.pop(key, None)
        self._declined.pop(key, None)
        self._alone.discard(key)
        self._prompts.forget(key)

    def form(
        self, sessions: Mapping[str, VerifySession], now: float
    ) -> tuple[tuple[PassRequest, ...], list[str]]:
        """Offer room in a pass that starts now: its requests, none if no session wants one, and
        the keys that were asked."""
        assert self.running is None
        forming = self._forming()
        line, first_prompt, prompt_room = self._line(sessions, now)
        room = forming.room
        kept = min(prompt_room, max(1, room // _PROMPT_PART)) if first_prompt < len(line) else 0
        for place, key in enumerate(line):
            alone, is_prompt = key in self._alone, place >= first_prompt
            room = forming.room
            if is_prompt:
                free = min(room, prompt_room)
            else:
                decoders = first_prompt - place - 1
                free = max(min(1, room - kept), room - kept - decoders)
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
        if forming.parts and self._alone.isdisjoint(forming.parts):
            self._take_along(sessions, forming, now)
        for key in self._keeper.evicted:
            self.enqueue(key)
        self._keeper.evicted.clear()
        parts = tuple(forming.parts.values())
        if parts:
            self.running = Batch(now, parts)
        return tuple(request for _, request in parts), forming.asked

    def _offer(
        self,
        session: VerifySession,
        key: str,
        free: int,
        others: int,
        forming: Forming,
        now: float,
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
        request = self._with_blocks(request)
        parts[key] = session, request
        forming.room -= request.row_count
        return request

    def _forming(self) -> Forming:
        pass_s, most = self._price.pass_s, self._limits.max_rows_per_session
        offer = Offer(
            most,
            GUESSED_PASS_S if pass_s is None else pass_s,
            self.least_chance,
            least_guess=self._price.least_guess if self._limits.server_drafts else None,
        )
        return Forming(self._limits.max_rows_per_pass, offer)

    def _take_along(
        self, sessions: Mapping[str, VerifySession], forming: Forming, now: float
    ) -> None:
        """Ask those again who would rather have waited for a draft: a pass runs now in which they
        can have a token, and before the next one begins no draft is of use."""
        for key in [key for key in self._declined if key not in self._alone]:
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
            self._price.note_line(len(decoding) + len(self._declined), len(prompts))
        if not self._alone.isdisjoint(missing):
            return list(missing), 0, most
        left_out = {key: self.passes - self._waiting[key] for key in missing}
        line = self.fairness.first_come(decoding, left_out)
        if prompts:
            in_order = self._prompts.order(prompts, now)
            line = line + self.fairness.prompts_in_turn(in_order, left_out)
            if any(map(decodes, sessions.values())):
                most = self._prompts.rows
        return line, len(decoding), most

    def _with_blocks(self, request: PassRequest) -> PassRequest:
        rows = len(request.feed) + len(request.tokens)
        table = self._keeper.reserve(request.key, request.cache_length + rows)
        if not table:
            return request
        return request.with_blocks(table)

    def finish(self, now: float, target_s: float | None = None) -> Batch:
        """The pass is over, well or badly; ``target_s`` as in ``BatchDone``."""
        assert self.running is not None
        batch, self.running = self.running, None
        self.passes += 1
        if any(request.sample for _, request in batch.parts):
            took_s = now - batch.started_at
            rows, prompt_rows, drafted = batch.count_rows()
            self.fairness.note(len(batch.parts), rows, took_s if target_s is None else target_s)
            self._price.note_pass(rows, prompt_rows, took_s, target_s)
            drafts_s = drafted * self._price.row_s
            self._prompts.note(prompt_rows, took_s, drafts_s, self._price.pace, now)
        for _, request in batch.parts:
            if len(request.feed) == 1:
                self.fairness.note_rows(1 + len(request.tokens))
            if request.sample:
                self._prompts.forget(request.key)
        return batch

    def count(self, tokens: int) -> None:
        """The pass committed so many, of all its sessions; 0: it did not sample."""
        if tokens:
            self._price.note_tokens(tokens)

    @property
    def row_price(self) -> int:
        """``least_chance`` in thousandths, as commits tell it."""
        return min(MAX_PRICE, round(MAX_PRICE * self.least_chance))

    @property
    def least_chance(self) -> float:
        """A draft node less likely to be right than this does not pay for its row
        (``row_price.py``)."""
        return self._price.least_chance

    def run_alone(self, key: str) -> None:
        """The session gets its next pass to itself, so that a failure is its own."""
        self._alone.add(key)

    def run_with_others(self, key: str) -> None:
        """The session's last pass went well: it may share passes again."""
        self._alone.discard(key)
