"""Decides how many rows of prompts a pass may carry, and which prompts come first.

Theory of operation. A prompt is long: fed at once, it would make one pass many times as long as
usual, and every session that decodes would wait for it. So prompts are fed in parts, beside the
sessions that decode (chunked prefill under a time budget, as in Sarathi-Serve, arXiv 2403.02310).
``PrefillBudget`` computes how many rows may be fed so that a pass becomes longer by a share of its
usual duration. When no session decodes, prompts have the whole pass.

    rows = mean_rows + (base_s * share - (mean_s - base_s)) / row_s

``base_s`` is the mean duration of passes without prompts. ``mean_rows`` and ``mean_s`` are the
means over recent passes with prompts. ``row_s`` is the slope between those passes, or the slope
from ``base_s`` to them if that is steeper, since a pass never gets shorter with more rows. Where
each row takes equally long, the formula is base_s * share / row_s. On a GPU the first rows are
free, because a pass that reads all weights has time to compute them; only the slope near the budget
shows how many rows fit.

Worked examples, with a share of 0.25. Passes of 24 ms and rows of 0.5 ms: 0.25 * 24 / 0.5 = 12
rows. Passes of 23 ms in which 103 rows are free and each further row takes 0.2 ms: 103 + 0.25 * 23
/ 0.2 = 132 rows.

The cost for a prompt. If every row takes equally long, a prompt is fed in the part share / (1 +
share) of the time: with a share of 0.25 its first token comes 5 times as late as alone, and with
3.3 it comes 1.3 times as late. If rows are free, it is hardly late at all: in the second example
132 rows in 28.8 ms are as many per second as a pass of 1,024 prompt rows computes
(docs/measurements/long-prompts.md).

Steady load. Prompts that keep arriving have to be fed as fast as they arrive. So the budget is
three times what ``PromptLoad`` measures if that is more, up to three fifths of the verifier's time.
``tokens_per_pass`` counts there, the mean number of tokens that a session commits per pass: where
drafts raise it, fewer passes are made, and each pass has to feed more.

Bursts. The share protects sessions that were there first. Eight requests that arrive at once are
soon one session that decodes and seven prompts that wait, and the share would let the first one
decode alone for tens of passes. That would cost all eight a third more of the processor's time. So
prompts that came no later than every decoding session began get a fair part: one share of the time
for each of the seven prompts, and one for each session that decodes. While several credentials are
active only the usual share holds, so that the burst of one client delays no other.

Measuring. One pass in four carries an eighth fewer rows, so that the slope can be measured. One
pass in ``BASE_EVERY`` carries no prompt row, so that ``base_s`` is measured while prompts wait.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Final

from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.estimators import MovingAverage, SlopeEstimator

PREFILL_SHARE: Final = 0.22
"""Default of ``EngineLimits.prefill_share``. With 0.5 ten long prompts stretched the gaps of a
running stream to 1.5."""
MAX_PREFILL_SHARE: Final = 1.5
"""Largest share for prompts that keep arriving: they get 1.5 / (1 + 1.5) = three fifths of the
verifier's time."""
ARRIVAL_MARGIN: Final = 3.0
"""Margin for prompts that come in clusters: with a factor of 2 they waited half as long again."""
MIN_PREFILL_ROWS: Final = 8
"""Least budget. Fewer rows are not cheaper: CPUs compute tiles of 8 rows and more
(``targets/row_tiles.py``).
"""
INITIAL_PREFILL_ROWS: Final = 32
"""Budget before the first prompts were timed beside decoding sessions."""
MAX_PREFILL_ROWS: Final = 1 << 20
"""Budget if rows cost no time: more than any pass has."""
MAX_GROWTH: Final = 1.25
"""Largest factor by which the budget grows from one pass to the next. A pass that was late for
another reason must not admit a whole prompt at once."""
BASE_EVERY: Final = 32
"""One pass of this many carries no prompt row, which costs prompts 3 % of their speed."""
NEAR_WEIGHT: Final = 0.15
"""Weight of the last pass among those near the budget, as in ``MovingAverage``: some seven passes
count, so that the budget follows a prompt whose rows get dearer as it gets longer."""
NEAR_SAMPLES: Final = 8
"""Passes with prompts after which the budget follows the measurements."""
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
        """Most prompt rows of the next pass. In one pass of ``BASE_EVERY`` it is 0, so that a pass
        without prompts is measured. If no session decodes in that pass, there is nothing to
        measure, and prompts may have ``usual_rows``."""
        return 0 if self._passes % BASE_EVERY == BASE_EVERY - 1 else self.usual_rows

    def rows_for_share(self, share: float) -> int:
        """Return ``rows`` for a pass that may become longer by ``share``, or by the usual share if
        that is larger."""
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
        """The budget, less an eighth in one pass of four, so that the slope can be measured."""
        held_back = 0 if self._passes % 4 else self._budget // 8
        return max(MIN_PREFILL_ROWS, self._budget - held_back)

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
        """Return how many prompt rows a pass may carry in the long run. ``note_pass`` explains the
        arguments.

        The larger of two numbers counts: the rows that the share allows, and the rows that must be
        fed to keep up with the prompts that arrive. The budget stays as it is until enough passes
        were timed."""
        base_s = self._usual_s
        if base_s is None or self._near_s.count < NEAR_SAMPLES:
            return self._budget
        within_share = self._rows_beside(base_s, self._share)
        most_share = tokens_per_pass * max(self._share, MAX_PREFILL_SHARE)
        to_keep_up = min(
            tokens_per_pass * ARRIVAL_MARGIN * arriving, self._rows_beside(base_s, most_share)
        )
        return min(MAX_PREFILL_ROWS, int(max(within_share, to_keep_up)))

    def _rows_beside(self, base_s: float, share: float) -> float:
        """Return how many prompt rows make a pass of ``base_s`` seconds longer by ``share``, by the
        formula at the head of this file."""
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
    def rows(self) -> int:
        """Most rows of prompts in the next pass beside sessions that decode; 0 now and then, as
        ``PrefillBudget.rows``."""
        return self._budget.rows

    @property
    def usual_rows(self) -> int:
        """``rows`` without the passes in which it is 0."""
        return self._budget.usual_rows

    def rows_in_burst(self, decoding_since: Mapping[str, float], keys: Iterable[str]) -> int:
        """Return the most rows of the prompts ``keys`` in a pass beside sessions of one client.

        ``decoding_since`` states since when each session decodes. A prompt that waited already when
        the first session began belongs to its burst, and counts as much as a decoding session.
        """
        first_at = min(decoding_since.values())
        same_burst = sum(self._since[key] <= first_at for key in keys)
        return self._budget.rows_for_share(same_burst / len(decoding_since))

    @property
    def rows_without_decoding(self) -> int:
        """Most rows of prompts in a pass in which no session decodes, such that it ends soon."""
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
