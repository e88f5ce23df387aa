"""Which sessions share the next packed pass.

Theory of operation. Sessions that might use a pass wait in line, longest waiting first. When no
pass runs, each is offered the room that is left, at most ``max_rows_per_session`` rows, and no more
than the cache has room for (``cache_keeper.py``). Those that decline leave the line until something
happens to them; those for whom there is no room keep their place. After a pass that failed, its
sessions are tried one at a time.

Decode first: sessions whose text moves on by the pass come before those that feed a prompt, and a
row is kept for each of them before anybody's drafts get it. Prompts follow in the order of
``prompt_line.py`` and share the rows that ``prefill_budget.py`` leaves them while somebody decodes;
an eighth of the pass is theirs however many decode. ``fairness.py`` says who has to wait for the
sake of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgespec.core.protocol.estimators import GUESSED_PASS_S, MovingAverage, SlopeEstimator
from edgespec.core.protocol.messages import MAX_PRICE
from edgespec.core.protocol.work import PassRequest
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.fairness import Fairness
from edgespec.core.verifier.prompt_line import PromptLine
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Offer

# Best of 1, 1.5, 2 and 3 on the floor of 200 laptops (docs/measurements.md).
_MARGIN = 1.5
# Prompt rows are taken for no more than the rest of a pass: their price is that of all rows.
_LEAST_DECODING = 0.25
# Of the rows of a pass, this part is kept for prompts where more sessions decode than it has rows.
_PROMPT_PART = 8

AskSession = Callable[[str, Offer, float], PassRequest | None]
"""Make a session an offer; None when it declines."""


@statically_frozen
class Batch:
    """A pass that is running: each session with its part."""

    started_at: float
    parts: tuple[tuple[VerifySession, PassRequest], ...]


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
        self._pass_s = MovingAverage()
        self._row_s = SlopeEstimator()
        self._tokens = MovingAverage()
        self._prompt_rows = MovingAverage()
        self._decoding, self._prompts_waiting = MovingAverage(), MovingAverage()
        """Sessions in line for a pass: those that decode, and those with a prompt."""
        self._prompts = PromptLine(credential_of)

    @property
    def pass_s(self) -> float | None:
        """Moving average of the passes that sampled; None before the first."""
        return self._pass_s.get(0.0) if self._pass_s.count else None

    def enqueue(self, key: str) -> None:
        self._waiting.setdefault(key, self.passes)

    def forget(self, key: str) -> None:
        self._waiting.pop(key, None)
        self._alone.discard(key)
        self._prompts.forget(key)

    def form(
        self, sessions: Mapping[str, VerifySession], now: float
    ) -> tuple[tuple[PassRequest, ...], list[str]]:
        """Offer room in a pass that starts now: its requests, none if no session wants one, and
        the keys that were asked."""
        assert self.running is None
        asked: list[str] = []
        parts: dict[str, tuple[VerifySession, PassRequest]] = {}
        pass_s, least_chance = self._pass_s.get(GUESSED_PASS_S), self.least_chance
        line, first_prompt, prompt_room = self._line(sessions, now)
        room, most_rows = self._limits.max_rows_per_pass, self._limits.max_rows_per_session
        offer = Offer(most_rows, pass_s, least_chance)
        kept = min(prompt_room, max(1, room // _PROMPT_PART)) if first_prompt < len(line) else 0
        for place, key in enumerate(line):
            alone, is_prompt = key in self._alone, place >= first_prompt
            if is_prompt:
                free = min(room, prompt_room)
            else:
                decoders = first_prompt - place - 1
                free = max(min(1, room - kept), room - kept - decoders)
            if room <= 0 or (alone and parts):
                break
            if free <= 0 or not self.fairness.admits(key, now, prompt=is_prompt):
                continue
            most = free if free < most_rows else most_rows
            most = self._keeper.rows_for(key, most, parts, len(line) - place - 1, now)
            if most == 0:
                continue
            asked.append(key)
            del self._waiting[key]
            if most != offer.max_rows:
                offer = Offer(most, pass_s, least_chance)
            request = self._ask(key, offer, now)
            if request is not None:
                request = self._with_blocks(request)
                parts[key] = sessions[key], request
                rows = len(request.feed) + len(request.tokens)
                room -= rows
                self.fairness.count(key, rows, prompt=is_prompt)
                if is_prompt:
                    prompt_room -= len(request.feed)
            if alone and parts:
                break
        for key in self._keeper.evicted:
            self.enqueue(key)
        self._keeper.evicted.clear()
        if parts:
            self.running = Batch(now, tuple(parts.values()))
        return tuple(request for _, request in parts.values()), asked

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
        self.fairness.plan(decoding, prompts, now)
        if decoding:
            self._decoding.add(len(decoding))
            self._prompts_waiting.add(len(prompts))
        if self._alone:
            return list(missing), 0, most
        left_out = {key: self.passes - self._waiting[key] for key in missing}
        line = self.fairness.first_come(decoding, left_out)
        if prompts:
            in_order = self._prompts.order(prompts, now)
            line = line + self.fairness.prompts_in_turn(in_order, left_out)
            if any(map(_decodes, sessions.values())):
                most = self._prompts.rows
        return line, len(decoding), most

    def _with_blocks(self, request: PassRequest) -> PassRequest:
        rows = len(request.feed) + len(request.tokens)
        table = self._keeper.reserve(request.key, request.cache_length + rows)
        if not table:
            return request
        return request.with_blocks(table)

    def finish(self, now: float) -> Batch:
        """The pass is over, well or badly."""
        assert self.running is not None
        batch, self.running = self.running, None
        self.passes += 1
        if any(request.sample for _, request in batch.parts):
            self._pass_s.add(now - batch.started_at)
            rows = sum([len(one.feed) + len(one.tokens) for _, one in batch.parts])
            self.fairness.note(len(batch.parts), rows, now - batch.started_at)
            self._row_s.add(rows, now - batch.started_at)
            prompt_rows = sum([len(one.feed) - 1 for _, one in batch.parts if one.feed])
            self._prompt_rows.add(prompt_rows)
            drafted = sum([len(request.tokens) for _, request in batch.parts])
            drafts_s = drafted * max(0.0, self._row_s.get() or 0.0)
            pace = max(1.0, self._tokens.get(1.0) / max(1.0, self._decoding.get(1.0)))
            self._prompts.note(prompt_rows, now - batch.started_at, drafts_s, pace, now)
        for _, request in batch.parts:
            if len(request.feed) == 1:
                self.fairness.note_rows(request.row_count)
            if request.sample:
                self._prompts.forget(request.key)
        return batch

    def count(self, tokens: int) -> None:
        """The pass committed so many, of all its sessions; 0: it did not sample."""
        if tokens:
            self._tokens.add(tokens)

    @property
    def row_price(self) -> int:
        """``least_chance`` in thousandths, as commits tell it."""
        return min(MAX_PRICE, round(MAX_PRICE * self.least_chance))

    @property
    def least_chance(self) -> float:
        """A draft node less likely to be right than this does not pay for its row.

        A row makes the pass ``row_s`` longer. In that time the verifier decodes ``row_s * tokens /
        decode_s`` tokens otherwise (goodput as in SmartSpec, arXiv 2406.14066), where ``decode_s``
        is the pass without its prompt rows: those have to be computed anyway. Sessions that wait
        with their prompts are held up like those that decode, so the price rises by ``waiting /
        decoding``. A node has to bring more than all that, by ``_MARGIN``, since what is left out
        now is there for the next pass. Worked example: rows of 0.5 ms in passes of 20 ms that
        commit 8 tokens give 1.5 * 0.5 * 8 / 20 = 0.3; with one prompt in line for four sessions
        that decode 0.375. It is 0 while the time of a row is not known.
        """
        row_s, pass_s = self._row_s.get(), self._pass_s.get(0.0)
        if row_s is None or row_s <= 0.0 or pass_s <= 0.0:
            return 0.0
        decode_s = max(pass_s - row_s * self._prompt_rows.get(0.0), _LEAST_DECODING * pass_s)
        held_up = 1.0 + self._prompts_waiting.get(0.0) / max(1.0, self._decoding.get(1.0))
        return _MARGIN * row_s * self._tokens.get(0.0) * held_up / decode_s

    def run_alone(self, key: str) -> None:
        """The session gets its next pass to itself, so that a failure is its own."""
        self._alone.add(key)

    def run_with_others(self, key: str) -> None:
        """The session's last pass went well: it may share passes again."""
        self._alone.discard(key)


def _decodes(session: VerifySession) -> bool:
    """Whether the session's text moves on by the next pass."""
    return session.missing_rows == 1
