"""Names of the texts that the verifiers of an agent keep, so that only new ids have to be sent.

A verifier that keeps the ids of a generation says so when it opens it (``Opened.prefix_block``).
The agent notes the names of that text's beginnings (``prefix_names.py``), and the next ``Open`` to
the same verifier names the longest one that its own text has. A verifier may have dropped it, for
lack of room or by a restart. Then it asks for the ids, which costs a round trip, and the agent
forgets what it had noted.

One name may stand for several machines behind a proxy, where an earlier text is found by chance
only. So after the n-th miss in a row the agent sends 2**n - 2 prompts whole before it names again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Final

from edgespec.core.device.events import DraftCounters
from edgespec.core.protocol.messages import Open, Opened, Prefix, PrefixTokens
from edgespec.core.protocol.prefix_names import PrefixNames
from edgespec.core.protocol.tree import CommittedPrefix

LEAST_NAMED_TOKENS: Final = 256
"""A shorter beginning is sent: its bytes are less than what a miss costs."""
MAX_VERIFIERS: Final = 8
"""Verifiers whose texts are noted; the one that was used longest ago is forgotten."""
MAX_NAMES: Final = 8_192
"""Names for each verifier, of half a million tokens. They take some 2 MiB."""
_MAX_DOUBLINGS: Final = 6


@dataclass(slots=True)
class _Keeper:
    """The memory of one verifier. The name that was used longest ago is in front."""

    block_tokens: int = 0
    names: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    misses: int = 0
    """Misses since the last beginning that was found."""
    rests: int = 0
    """Prompts to send whole before a beginning is named again."""


class KeptPrefixes:
    """The texts that verifiers keep for one agent. ``key`` is the key of their names, which the
    agent draws at random. A beginning of less than ``least_tokens`` is not named."""

    def __init__(self, key: bytes, least_tokens: int = LEAST_NAMED_TOKENS) -> None:
        self.key = key
        self._least_tokens = least_tokens
        self._keepers: OrderedDict[str, _Keeper] = OrderedDict()

    def block_tokens(self, verifier: str) -> int:
        """Return the block of the names that may be given to ``verifier`` now; 0: none may."""
        keeper = self._keepers.get(verifier)
        if keeper is None or not keeper.names:
            return 0
        if keeper.rests:
            keeper.rests -= 1
            return 0
        return keeper.block_tokens

    def find(self, verifier: str, names: PrefixNames) -> int:
        """Return how many tokens of a text ``verifier`` keeps; 0 if they are too few to name."""
        known = self._keepers[verifier].names
        places = range(len(names.names), 0, -1)
        count = next((place for place in places if names.names[place - 1] in known), 0)
        length = count * names.block_tokens
        return length if length >= self._least_tokens else 0

    def note_kept(self, verifier: str, names: PrefixNames) -> None:
        """Note that ``verifier`` keeps a text, all blocks of which are named."""
        keeper = self._keepers.pop(verifier, None) or _Keeper()
        if keeper.block_tokens != names.block_tokens:
            keeper.block_tokens = names.block_tokens
            keeper.names.clear()
        for name in reversed(names.names):
            keeper.names[name] = None
            keeper.names.move_to_end(name)
        while len(keeper.names) > MAX_NAMES:
            keeper.names.popitem(last=False)
        self._keepers[verifier] = keeper
        if len(self._keepers) > MAX_VERIFIERS:
            self._keepers.popitem(last=False)

    def note_found(self, verifier: str) -> None:
        """Note that ``verifier`` had the beginning that was named to it."""
        if (keeper := self._keepers.get(verifier)) is not None:
            keeper.misses = keeper.rests = 0

    def note_missing(self, verifier: str) -> None:
        """Note that ``verifier`` did not have it, and so none of the texts noted before."""
        if (keeper := self._keepers.get(verifier)) is not None:
            keeper.names.clear()
            keeper.misses += 1
            keeper.rests = 2 ** min(keeper.misses, _MAX_DOUBLINGS) - 2


class SentPrefix:
    """The part of one generation's text that is sent, and the part that its verifier keeps.

    ``prefix`` is the generation's own, which grows."""

    __slots__ = (
        *("_counters", "_is_kept", "_kept", "_may_name", "_named", "_names", "_prefix"),
        "_verifier",
    )

    def __init__(
        self, kept: KeptPrefixes, prefix: CommittedPrefix, counters: DraftCounters
    ) -> None:
        self._kept, self._prefix, self._counters = kept, prefix, counters
        self._names: PrefixNames | None = None
        self._verifier = ""
        """The verifier of this stream."""
        self._named: Prefix | None = None
        """The beginning that was named on this stream and that ``Opened`` has not confirmed."""
        self._may_name = True
        """False once a verifier refused a prompt whose beginning was named."""
        self._is_kept = False
        """Whether the verifier keeps this generation's text."""

    @property
    def is_unconfirmed(self) -> bool:
        """Whether a beginning was named on this stream and the verifier has not opened yet."""
        return self._named is not None

    def shorten(self, request: Open, verifier: str) -> Open:
        """Return the ``Open`` of a new stream to ``verifier``: the longest beginning of the text
        that it keeps goes by its name, if there is one."""
        self.note_text()
        self._verifier, self._named, self._is_kept = verifier, None, False
        whole = replace(request, prefix_key=self._kept.key)
        block_tokens = self._kept.block_tokens(verifier) if self._may_name else 0
        if not block_tokens:
            return whole
        names = self._name_text(block_tokens)
        length, prompt_length = self._kept.find(verifier, names), len(request.prompt)
        if not length:
            return whole
        name = names.names[length // block_tokens - 1]
        self._named = Prefix(length, name, prompt_length)
        self._counters.named_tokens += length
        return replace(
            whole,
            prompt=request.prompt[length:],
            committed=request.committed[max(0, length - prompt_length) :],
            prefix=self._named,
        )

    def on_opened(self, opened: Opened) -> None:
        """Note what the verifier has and keeps."""
        self.on_found()
        self._is_kept = opened.prefix_block > 0
        if self._is_kept:
            self._name_text(opened.prefix_block)
            self.note_text()

    def on_found(self) -> None:
        """Note that the verifier has the beginning that was named on this stream, if one was: it
        asks for something else now."""
        if self._named is not None:
            self._kept.note_found(self._verifier)
            self._named = None

    def on_missing(self) -> PrefixTokens | None:
        """Return the ids of the beginning that was named on this stream; None if none was, or if
        they were sent already."""
        if (named := self._named) is None:
            return None
        self._note_in_vain(named)
        return PrefixTokens(tuple(self._prefix.tokens[: named.length]))

    def on_refused(self) -> None:
        """Name nothing more in this generation, since the verifier refused an ``Open`` with a
        name."""
        if self._named is not None:
            self._note_in_vain(self._named)
        self._may_name = False

    def note_text(self) -> None:
        """Note that the verifier keeps the text as far as it is committed, if it keeps any."""
        if self._is_kept and self._names is not None:
            self._names.extend(self._prefix.tokens)
            self._kept.note_kept(self._verifier, self._names)

    def _name_text(self, block_tokens: int) -> PrefixNames:
        names = self._names
        if names is None or names.block_tokens != block_tokens:
            self._names = names = PrefixNames(self._kept.key, block_tokens)
        names.extend(self._prefix.tokens)
        return names

    def _note_in_vain(self, named: Prefix) -> None:
        self._named = None
        self._kept.note_missing(self._verifier)
        self._counters.named_tokens -= named.length
        self._counters.prefix_misses += 1
