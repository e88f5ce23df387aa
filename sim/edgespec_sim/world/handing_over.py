"""What becomes of a running session whose phone changes its cell.

Theory of operation. The session stays with its verifier, over the backhaul, or moves to the new
cell's. To move, the device lets go of its stream and opens the session at the new verifier with all
it has delivered, as after any lost link: the text is the target's own wherever it goes on. There
the prefix is computed again, or its keys and values come over the backhaul and only what they lack
is computed. ``cheapest`` compares what is left of the answer:

    stay                 tokens left x a token's time at the old verifier
    move, by either way  tokens left x a token's time at the new one + the way there

A token's time is a pass with the sessions that are there, and for an arm that waits for each
verdict the round trip as well, over the tokens that a pass brought so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.core.protocol.messages import RunAhead
from edgespec_sim.radio.attachment import Change
from edgespec_sim.scenario.handover_sections import Sessions
from edgespec_sim.world.cells import Cells
from edgespec_sim.world.hardware import Hardware
from edgespec_sim.world.network import Network
from edgespec_sim.world.site import Site
from edgespec_sim.world.user import User


@dataclass(frozen=True, slots=True)
class _Price:
    """In seconds for the rest of an answer."""

    stay_s: float
    recompute_s: float
    kv_s: float

    @property
    def best(self) -> Sessions:
        if self.stay_s <= min(self.recompute_s, self.kv_s):
            return Sessions.STAY
        return Sessions.KV if self.kv_s < self.recompute_s else Sessions.RECOMPUTE


class HandingOver:
    """``sites`` in the order of the stations."""

    def __init__(
        self,
        network: Network,
        cells: Cells,
        sites: Sequence[tuple[Site, Hardware]],
        users: Sequence[User],
        noticed: Callable[[User, str], None],
        now_s: Callable[[], float],
    ) -> None:
        self._network, self._cells, self._sites, self._users = network, cells, sites, users
        self._noticed, self._now_s = noticed, now_s
        cells.changed = self._changed

    def _changed(self, change: Change) -> None:
        user = self._users[change.device]
        device, old = user.device, user.site
        site, hardware = self._sites[change.new]
        if device is None or old is None:
            self._noticed(user, "handover")
            return
        user.handed.handovers += 1
        how = Sessions.STAY
        if site is not old and site.reachable and not hardware.sliced and _has_room(site):
            how = self._how(user, old, site, hardware)
        if how is Sessions.STAY:
            self._noticed(user, "handover")
            return
        self._move(user, old, site, hardware, how)

    def _how(self, user: User, old: Site, site: Site, hardware: Hardware) -> Sessions:
        wanted = self._cells.section.sessions
        return self.price(user, old, site, hardware).best if wanted is Sessions.CHEAPEST else wanted

    def price(self, user: User, old: Site, site: Site, hardware: Hardware) -> _Price:
        """Of the three ways, for the session that runs."""
        left = user.tokens_left
        setup_s = self._network.connecting_s(user.settings.group, user.number, site.name)
        there_s = left * self._token_s(user, site, 1) + setup_s
        first_s = hardware.prefill_s(user.prefix_tokens)
        kv_s = self._cells.transfer_s(self._kv_bytes(user))
        return _Price(
            stay_s=left * self._token_s(user, old, 0),
            recompute_s=there_s + first_s,
            kv_s=there_s + max(0.0, kv_s - setup_s),
        )

    def _token_s(self, user: User, site: Site, more: int) -> float:
        view = site.view
        pass_s = view.pass_s + view.session_s * max(0, view.sessions - 1 + more)
        if user.run_ahead is RunAhead.NEVER:
            pass_s += self._rtt_s(user, site)
        return pass_s / user.tokens_per_pass

    def _rtt_s(self, user: User, site: Site) -> float:
        return self._network.view(user.settings.group, user.number, site.name).rtt_s

    def _kv_bytes(self, user: User) -> int:
        return user.prefix_tokens * self._cells.section.kv_bytes_per_token

    def _move(self, user: User, old: Site, site: Site, hardware: Hardware, how: Sessions) -> None:
        ready_s = self._now_s() + self._cells.gap_s
        if how is Sessions.KV:
            ready_s = max(ready_s, self._cells.transfer(old.name, self._kv_bytes(user)))
            hardware.bring(user.key, user.prefix_tokens)
            user.handed.with_kv += 1
        else:
            user.handed.recomputed += 1
        self._noticed(user, "session moved")
        user.move_to(site, ready_s)


def _has_room(site: Site) -> bool:
    view = site.view
    return view.sessions < view.max_sessions
