"""Which prompt is fed next: the shortest remaining one first, with ageing.

Theory of operation. A session whose cache lacks more than its last committed token has a *prompt*
to feed, new or lost to others. Feeding the one with the fewest rows left first gives the shortest
mean wait; alone it would starve the long ones. So a prompt's rank grows with its wait: it is

    rank = time since it came / rows it still lacks       (highest response ratio, Hansen 1971)

and the highest goes first. Of ten equal prompts that come at once the first is fed to its end, then
the second. Worked example: a prompt of 4,000 rows that has waited for 2 s (0.0005 s a row) goes
before a prompt of 100 rows until that has waited for 50 ms. A wait grows without end and rows do
not, so nobody starves.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.prefill_budget import PrefillBudget, PromptLoad


class PromptLine:
    """Prompts are known by their session's key, from ``order`` until ``forget``;
    ``credential_of`` is the engine's own table of whose they are."""

    def __init__(self, credential_of: Mapping[str, Credential] | None = None) -> None:
        self._credential_of = {} if credential_of is None else credential_of
        self._since: dict[str, float] = {}
        self._budget = PrefillBudget()
        self._load = PromptLoad()

    @property
    def rows(self) -> int:
        """Prompt rows that the next pass may carry beside decoding sessions."""
        return self._budget.rows

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
        """The session is over, or its prompt is fed."""
        self._since.pop(key, None)

    def note(
        self, prompt_rows: int, took_s: float, drafts_s: float, pace: float, now: float
    ) -> None:
        """A pass that sampled is over. It took so long with so many rows of prompts, ``drafts_s``
        of it for draft nodes; of late, ``pace`` tokens came in a session's part of a pass."""
        arriving = self._load.rows_per_s(now) * took_s
        self._budget.note(prompt_rows, max(0.0, took_s - drafts_s), arriving, pace)
