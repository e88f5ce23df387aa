"""Passes of a target whose layers are one onnxruntime graph (``decoder_graph.py``).

Theory of operation. The rows of a pass are cut into *runs* of the graph, each of which has one of a
short list of row counts; rows that are missing are filled up. A run writes its keys and values into
the pool when it has ended, so later runs of the pass find them there. Within a run all groups of
attention have equally many rows and lines of equally many keys, again of short lists. Canonical
mode keeps those counts with which a row has the same bits as alone (``find_counts``); plain mode
takes every row count as it comes.

A row is in a group whose line holds its ancestors and itself. The fed rows of a session and a chain
of nodes are one line. A tree has a line for each leaf, and a row stands in the first line that has
it.

Layers with a window have shorter lines: without the keys that no row of the group sees. The first
key's position is rounded down to a multiple of ``Counts.window_step``. Sums over the keys of a line
are made in blocks, so that a row has the same bits wherever its line begins: blocks that are left
out would add zeros, and the others hold the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from edgespec.verifier.targets.kv_pool import NULL_SLOT, KvPool
from edgespec.verifier.targets.pass_batch import Indices
from edgespec.verifier.targets.pass_plan import BatchRows, sampled_rows, write_slots
from edgespec.verifier.targets.row_tiles import agreeing_sizes, cut

GRAPH_FAMILIES: Final = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
)
"""Model types whose layers the graph computes."""
ROW_COUNTS: Final = (*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 96, 128)
"""Row counts of a run. More rows than the last gain nothing: their products read the weights once
for each block of rows anyway."""
GROUP_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Row counts of an attention group."""
BASES: Final = (1, 2, 4, 8)
"""The least row counts that canonical mode tries, cheapest first."""
LINE_KEYS: Final = 64
"""All lengths of lines are multiples of it, and it is the least one in plain mode."""
_MOST_LEAST_LINE: Final = 256
"""Canonical mode's lines may be this long where a short one gives other bits. A line of 64 does
with heads of 256 numbers: onnxruntime adds up a score's products in one block there, and in two
blocks where there are more keys."""
_RUN_ROWS: Final = 4
"""Rows that take as long as reading the weights in one more run."""
_LINE_ROWS: Final = 4
"""Rows of attention that take as long as bringing the keys of one more group into place."""
WINDOW_STEPS: Final = (128, 256, 512, 1024)
"""Distances between the positions at which lines may begin. Canonical mode takes the shortest that
holds, plain mode the first. onnxruntime's product (MLAS, sgemm.cpp) adds up 128 keys at a time for
values of 128 numbers and more, and twice as many for values half as wide, up to 1,024."""
_LONGEST_TRIED_LINE: Final = 16_384
"""Longer lines are not tried when the model is loaded: they take a second each."""
_TRIED_WINDOW: Final = 2048
"""Keys that a row sees when steps are tried: more than any block of a sum holds."""
_TRIED_SLOTS: Final = 1024
_TRIED_POSITION: Final = 70
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The numbers that a pass needs in order to be laid out for the graph."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Attention windows in tokens that occur in the layers; 0 is the whole text."""

    @property
    def share(self) -> int:
        """Query heads for each key-value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts with which a row has the same bits in every run."""

    rows: tuple[int, ...]
    """Row counts of a run, ascending."""
    group_rows: tuple[int, ...]
    """Row counts of an attention group, ascending."""
    least_line: int
    """The least length of a line of keys."""
    window_step: int
    """In layers with a window, lines begin at multiples of this position; 0: always with the first
    token."""


@dataclass(slots=True)
class Group:
    """Rows of one session on one line of keys, before they are cut into equal groups."""

    session: int
    rows: Indices
    """Indices into the rows of the pass, at least one."""
    path: Indices | None = None
    """The nodes on the line; None where they are the first nodes, one after the other."""


@dataclass(slots=True)
class GraphModel:
    """A decoder graph with what torch keeps of the model."""

    shape: GraphShape
    embed: Callable[[torch.Tensor], torch.Tensor]
    """Returns float32 [1, rows, hidden] of token ids [1, rows]."""
    session: Any
    probe: Any
    """The session of a graph with one layer, until canonical mode is decided."""
    context_length: int
    constants: Any
    """The constants that the sessions read where they lie."""
    counts: Counts | None = None
    """The counts of canonical mode; None in plain mode."""

    @property
    def least_line(self) -> int:
        """The least length of a line of keys."""
        return LINE_KEYS if self.counts is None else self.counts.least_line

    def run_pass(self, rows: BatchRows) -> torch.Tensor:
        """Compute a pass whose blocks are reserved, and write its keys and values to the pool.

        Returns float32 logits [sampled rows, vocabulary]."""
        count, wanted = rows.row_count, sampled_rows(rows)
        slots = write_slots(rows)
        sizes = ROW_COUNTS if self.counts is None else self.counts.rows
        parts: list[Array] = []
        start = 0
        for size in cut(count, sizes, _RUN_ROWS):
            stop = min(count, start + size)
            padded = stop - start if self.counts is None else size
            first, last = np.searchsorted(wanted, (start, stop))
            sampled = wanted[first:last] - start
            logits = self._run(rows, (start, stop), padded, sampled, slots[start:stop])
            parts.append(logits)
            start = stop
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _run(
        self,
        rows: BatchRows,
        bounds: tuple[int, int],
        padded: int,
        sampled: Indices,
        slots: Indices,
    ) -> Array:
        """Compute the rows from ``bounds[0]`` up to ``bounds[1]``, filled up to ``padded`` rows.

        Returns logits [sampled, vocabulary]."""
        start, stop = bounds
        count = stop - start
        tokens, positions = np.zeros((2, 1, padded), dtype=np.int64)
        tokens[0, :count] = rows.requests.tokens[start:stop]
        positions[0, :count] = rows.positions[start:stop]
        groups = self._lay_out(rows, start, stop)
        wanted = len(sampled)
        if self.counts is not None and wanted:
            sampled = _filled_up(sampled, self.counts.rows)
        pool = rows.pool
        given = groups.inputs(self.shape, padded)
        given |= pool_inputs(self.shape, pool)
        given["rows"] = self.embed(torch.from_numpy(tokens)).numpy()
        given["positions"], given["sampled"] = positions, sampled
        logits, keys, values = self.session.run(None, given)
        by_layer = (self.shape.layers, padded, -1)
        data = pool.data.numpy()
        data[0][:, slots] = keys.reshape(by_layer)[:, :count]
        data[1][:, slots] = values.reshape(by_layer)[:, :count]
        out: Array = logits[0, :wanted]
        return out

    def _lay_out(self, rows: BatchRows, start: int, stop: int) -> RunGroups:
        """Lay out the attention of the rows from ``start`` up to ``stop``."""
        sizes = GROUP_ROWS if self.counts is None else self.counts.group_rows
        if rows.single:
            sessions = np.arange(start, stop)
            picked = np.repeat(sessions[:, None], sizes[0], axis=1)
            positions = rows.positions[picked]
            last = positions[:, 0]
            slots = _line_slots(rows, sessions, last, self.least_line)
            order = np.arange(stop - start)
            real, fresh, goals = np.ones_like(order), order, np.stack([order, last], axis=1)
        else:
            groups, picked, real = _equal_groups(_groups_of(rows, start, stop), sizes)
            positions = rows.positions[picked]
            last = positions.max(axis=1)
            sessions = np.array([group.session for group in groups])
            slots = _line_slots(rows, sessions, last, self.least_line)
            goals, fresh = _fresh_keys(rows, groups, last, (start, stop), slots)
        slots *= np.arange(slots.shape[1]) <= last[:, None]
        whole = Lines(np.zeros_like(last), slots, fresh, goals)
        step = WINDOW_STEPS[0] if self.counts is None else self.counts.window_step
        lines = {
            one: whole.windowed(one, step, positions, self.least_line) for one in self.shape.windows
        }
        return RunGroups(picked - start, real, positions, lines)


def _line_slots(rows: BatchRows, sessions: Indices, last: Indices, least: int) -> Indices:
    """Return int64 [groups, L]: the slots of the keys of each group's session in their order. L is
    at least ``least``."""
    length = line_length(int(last.max()) + 1, least)
    slots = np.full((len(sessions), length), NULL_SLOT, dtype=np.int64)
    found = rows.key_slots(sessions, length)
    slots[:, : found.shape[1]] = found
    return slots


@dataclass(slots=True)
class Lines:
    """The keys to which the G groups of a run attend in layers with one window: lines of L keys."""

    firsts: Indices
    """[G]: the position of the first key on each line."""
    slots: Indices
    """[G, L]: where the keys of each line lie in the pool; ``NULL_SLOT`` behind the last."""
    fresh: Indices
    """[n]: rows of the run whose keys are on a line, so that they are not read from the pool."""
    goals: Indices
    """[n, 2]: the group of each fresh key, and its place on the group's line."""
    window: int = 0
    """How many keys a row sees, its own included; 0: all up to its own."""

    def windowed(self, window: int, step: int, positions: Indices, least: int) -> Lines:
        """Return the lines for layers with ``window``; these ones begin with the first token.

        Left out are keys that no row of the group sees, up to the last multiple of ``step``
        (0: none). ``positions`` [G, R] are the positions of each group's rows. Lines that have
        become shorter have ``least`` keys or more."""
        least_seen = np.maximum(positions.min(axis=1) - window + 1, 0)
        firsts = least_seen // step * step if window and step else np.zeros_like(least_seen)
        if not firsts.any():
            return replace(self, window=window)
        longest = int((positions.max(axis=1) - firsts).max()) + 1
        keys = firsts[:, None] + np.arange(line_length(longest, least))
        end = self.slots.shape[1]
        slots = np.take_along_axis(self.slots, np.minimum(keys, end - 1), axis=1)
        slots[keys >= end] = NULL_SLOT
        places = self.goals[:, 1] - firsts[self.goals[:, 0]]
        is_left = places >= 0
        goals = np.stack([self.goals[is_left, 0], places[is_left]], axis=1)
        return Lines(firsts, slots, self.fresh[is_left], goals, window)

    def inputs(self, shape: GraphShape, positions: Indices) -> dict[str, Array]:
        """Return the inputs of the graph for the lines. ``positions``: as in ``windowed``."""
        length, kv_heads = self.slots.shape[1], shape.kv_heads
        key_head = np.arange(kv_heads)
        fresh_goals = np.empty((len(self.fresh), kv_heads, 3), dtype=np.int64)
        fresh_goals[..., 0] = self.goals[:, :1]
        fresh_goals[..., 1] = key_head
        fresh_goals[..., 2] = self.goals[:, 1:]
        keys = (self.firsts[:, None] + np.arange(length))[:, None]
        own = positions[..., None]
        is_seen = keys <= own
        if self.window:
            is_seen &= keys > own - self.window
        seen = np.tile(is_seen.astype(np.float32)[:, None], (1, 1, shape.share, 1))
        return {
            "places": self.slots[:, None] * kv_heads + key_head[:, None],
            "fresh_rows": (self.fresh[:, None] * kv_heads + key_head).reshape(-1),
            "fresh_goals": fresh_goals.reshape(-1, 3),
            "seen": seen,
            "hidden": np.where(seen, np.float32(0), np.float32(-np.inf)),
        }


@dataclass(slots=True)
class RunGroups:
    """The attention of a run: G groups of R rows."""

    picked: Indices
    """[G, R]: the run's rows in each group; the last one fills a group up."""
    real: Indices
    """[G]: how many rows of each group do not fill it up."""
    positions: Indices
    """[G, R]: the position of each row, which is the last key that it sees."""
    lines: dict[int, Lines]
    """The groups' lines, by the window of the layers that read them."""

    def inputs(self, shape: GraphShape, padded: int) -> dict[str, Array]:
        """Return the inputs of the graph for a run of ``padded`` rows."""
        groups, size = self.picked.shape
        heads, kv_heads, share = shape.heads, shape.kv_heads, shape.share
        head = np.arange(heads).reshape(kv_heads, share, 1)
        by_head = (groups, kv_heads, share * size)
        queries = (self.picked[:, None, None] * heads + head).reshape(by_head)
        # The place of each row and head among the results, which lie as the queries do.
        back = np.zeros((padded, heads), dtype=np.int64)
        places = np.arange(queries.size).reshape(groups, heads, size).transpose(0, 2, 1)
        is_real = np.arange(size) < self.real[:, None]
        back[self.picked[is_real]] = places[is_real]
        found: dict[str, Array] = {"queries": queries, "back": back}
        for window, line in self.lines.items():
            for name, given in line.inputs(shape, self.positions).items():
                found[f"{name}.{window}"] = given
        return found


def pool_inputs(shape: GraphShape, pool: KvPool) -> dict[str, Array]:
    """Return the inputs of the graph that are the pool itself: they share its memory."""
    keys, values = pool.data.numpy().reshape(2, -1, shape.head_dim)
    rows_of_layer = len(keys) // shape.layers
    return {"keys": keys, "values": values, "shifts": np.arange(shape.layers) * rows_of_layer}


def line_length(keys: int, least: int = LINE_KEYS) -> int:
    """Return how long a line for ``keys`` keys is: a multiple of ``LINE_KEYS`` that is at most an
    eighth longer where there are many keys, so that there are few lengths to try. It is at least
    ``least``, such a length."""
    keys = max(keys, least)
    step = max(LINE_KEYS, 1 << (keys - 1).bit_length() >> 4)
    return -(-keys // step) * step


def _filled_up(sampled: Indices, sizes: Sequence[int]) -> Indices:
    """Repeat the last of ``sampled`` up to the next row count."""
    size = next(one for one in sizes if one >= len(sampled))
    return np.pad(sampled, (0, size - len(sampled)), mode="edge")


def _groups_of(rows: BatchRows, start: int, stop: int) -> list[Group]:
    """Return the rows from ``start`` to ``stop`` by session and line."""
    found = []
    for session in range(len(rows.requests)):
        first, count = int(rows.first_rows[session]), int(rows.counts[session])
        low, high = max(start, first), min(stop, first + count)
        if low >= high:
            continue
        parents = rows.requests.parents[session]
        if parents == tuple(range(-1, len(parents) - 1)):
            found.append(Group(session, np.arange(low, high)))
            continue
        fed = len(rows.requests.feeds[session])
        for index, (path, own) in enumerate(leaf_lines(parents)):
            members = own + fed
            if index == 0:
                members = np.concatenate([np.arange(fed), members])
            members = members + first
            members = members[(members >= low) & (members < high)]
            if len(members):
                found.append(Group(session, members, path))
    return found


@lru_cache(maxsize=2048)
def leaf_lines(parents: tuple[int, ...]) -> tuple[tuple[Indices, Indices], ...]:
    """Return for each leaf of a tree the nodes on the path from the root to the leaf, and the part
    of the path that no earlier leaf shares."""
    inner = set(parents)
    placed: set[int] = set()
    found = []
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parents[node]
        path.reverse()
        own = [node for node in path if node not in placed]
        placed.update(own)
        found.append((np.array(path, dtype=np.int64), np.array(own, dtype=np.int64)))
    return tuple(found)


def _equal_groups(
    groups: Sequence[Group], sizes: Sequence[int]
) -> tuple[list[Group], Indices, Indices]:
    """Cut groups into parts of equally many rows, a count of ``sizes`` that takes the least time.

    Returns for each part its group, its rows [parts, size], and how many of the rows are no
    repetition of the last one."""
    counts = [len(group.rows) for group in groups]

    def cost(size: int) -> int:
        return sum(-(-count // size) for count in counts) * (size + _LINE_ROWS)

    size = min(sizes, key=cost)
    parents, picked, real = [], [], []
    for group in groups:
        for first in range(0, len(group.rows), size):
            part = group.rows[first : first + size]
            parents.append(group)
            picked.append(np.pad(part, (0, size - len(part)), mode="edge"))
            real.append(len(part))
    return parents, np.array(picked), np.array(real)


def _fresh_keys(
    rows: BatchRows,
    groups: Sequence[Group],
    last: Indices,
    bounds: tuple[int, int],
    slots: Indices,
) -> tuple[Indices, Indices]:
    """Return the groups and places [n, 2] of keys that are rows of this run, and these rows [n],
    counted from the run's first. Changes ``slots`` [groups, L] of lines through a tree."""
    start, stop = bounds
    goals, fresh = [], []
    for index, group in enumerate(groups):
        session = group.session
        first, base = int(rows.first_rows[session]), int(rows.bases[session])
        fed = len(rows.requests.feeds[session])
        end = int(last[index]) + 1
        # The line from the first fed row on: its place in the text, and its row.
        place = np.arange(base - fed, end)
        row = first + place - (base - fed)
        if group.path is not None:
            path = group.path[: max(0, end - base)]
            row[fed:] = first + fed + path
            slots[index, base:end] = rows.node_slots(session, path)
        is_fresh = (row >= start) & (row < stop)
        fresh.append(row[is_fresh] - start)
        goals.append(np.stack([np.full(len(fresh[-1]), index), place[is_fresh]], axis=1))
    return np.concatenate(goals), np.concatenate(fresh)


# --- canonical mode -------------------------------------------------------------------------


def find_counts(model: GraphModel) -> Counts | str:
    """Return the counts with which a row has the bits that it has alone, or a description of why
    there are none. They are tried on a graph of one layer, whose shapes all layers share."""
    probe = _Probe(model)
    rows = _choose_widest(lambda base: agreeing_sizes(probe.rows, probe.tokens, base, ROW_COUNTS))
    if not rows:
        return "a run of the graph gives equal rows different bits"
    sizes = tuple(size for size in GROUP_ROWS if size in rows)
    group_rows = _choose_widest(lambda base: agreeing_sizes(probe.group, probe.tokens, base, sizes))
    if not group_rows:
        return "attention gives equal rows different bits"
    least = probe.least_line(group_rows)
    if least > _MOST_LEAST_LINE:
        return f"a line of {least} keys gives other bits than a shorter one"
    step = probe.window_step(group_rows) if any(model.shape.windows) else 0
    return Counts(rows, group_rows, least, step)


def probe_logits(model: GraphModel) -> Array:
    """Return float32 numbers [1, any] that the graph of one layer computes for a token."""
    probe = _Probe(model)
    found: Array = probe.rows(probe.tokens[:1]).numpy()
    return found


def _choose_widest(sizes_of: Callable[[int], tuple[int, ...]]) -> tuple[int, ...]:
    """Return the counts of the base whose counts reach furthest. The smallest base wins a tie."""
    best: tuple[int, ...] = ()
    for base in BASES:
        sizes = sizes_of(base)
        if sizes and (not best or sizes[-1] > best[-1]):
            best = sizes
        if best and best[-1] == ROW_COUNTS[-1]:
            break
    return best


class _Probe:
    """Runs the graph of one layer on random keys and values."""

    def __init__(self, model: GraphModel) -> None:
        self._model, self._shape = model, model.shape
        generator = np.random.default_rng(model.shape.head_dim)
        size = (2, _TRIED_SLOTS * model.shape.kv_heads, model.shape.head_dim)
        self._keys, self._values = generator.standard_normal(size, dtype=np.float32)
        self.tokens = torch.tensor([[1], [2], [3], [5]])
        """Rows to try: token ids [4, 1]."""

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute each row in a group of its own, with its logits."""
        return self._run(
            tokens, size=1, position=_TRIED_POSITION, length=2 * LINE_KEYS, output="logits"
        )

    def group(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute all rows as one group."""
        size = len(tokens)
        return self._run(tokens, size=size, position=_TRIED_POSITION, length=2 * LINE_KEYS)

    def least_line(self, group_rows: Sequence[int]) -> int:
        """Return the least length of a line from which on a longer one does not change the bits of
        a row that sees less of it."""
        longest = line_length(min(self._model.context_length, _LONGEST_TRIED_LINE))
        lengths = sorted({line_length(keys) for keys in range(LINE_KEYS, longest + 1, LINE_KEYS)})
        least = lengths[0]
        for size in {group_rows[0], group_rows[-1]}:
            tokens = self.tokens[:1].expand(size, -1)
            for length, longer in pairwise(lengths):
                found = [
                    self._run(tokens, size=size, position=length - 3, length=one)
                    for one in (length, longer)
                ]
                if not torch.equal(*found):
                    least = max(least, longer)
        return least

    def window_step(self, group_rows: Sequence[int]) -> int:
        """Return the shortest of ``WINDOW_STEPS`` at whose multiples a line may begin without
        changing the bits of a row that sees none of the keys before; 0 if there is none."""
        for step in WINDOW_STEPS:
            begins = [(size, first) for size in group_rows for first in (step, 3 * step)]
            if all(self._is_same_from(first, size) for size, first in begins):
                return step
        return 0

    def _is_same_from(self, first: int, size: int) -> bool:
        """Return whether a line that begins at ``first`` gives a group of ``size`` rows the bits
        that a line from the first token on gives them."""
        tokens = self.tokens.repeat(-(-size // len(self.tokens)), 1)[:size]
        position = first + _TRIED_WINDOW + 37
        found = [
            self._run(
                tokens,
                size=size,
                position=position,
                length=line_length(position + 1 - begin),
                first=begin,
                window=_TRIED_WINDOW,
            )
            for begin in (0, first)
        ]
        return torch.equal(*found)

    def _run(
        self,
        tokens: torch.Tensor,
        *,
        size: int,
        position: int,
        length: int,
        first: int = 0,
        window: int = 0,
        output: str = "normed_rows",
    ) -> torch.Tensor:
        """Compute all rows at one position, in groups of ``size`` rows. Their lines have ``length``
        keys from ``first`` on, and a row sees ``window`` of them (0: all up to its own).

        Returns [rows, any]: ``output``, keys and values. Without ``logits`` the head is computed
        for one row: its product takes longer than the layer and does not depend on attention."""
        count = len(tokens)
        groups = count // size
        slots = (first + np.arange(length)) % (_TRIED_SLOTS - 1) + 1
        line = Lines(
            firsts=np.full(groups, first),
            slots=np.repeat(slots[None], groups, axis=0),
            # A key that no row sees: what a group's rows have in common lies in the pool.
            fresh=np.zeros(groups, dtype=np.int64),
            goals=np.stack([np.arange(groups), np.full(groups, length - 1)], axis=1),
            window=window,
        )
        attention = RunGroups(
            picked=np.arange(count).reshape(groups, size),
            real=np.full(groups, size),
            positions=np.full((groups, size), position),
            lines=dict.fromkeys(self._shape.windows, line),
        )
        given = attention.inputs(self._shape, count)
        with torch.inference_mode():
            embedded = self._model.embed(tokens.reshape(1, -1).contiguous())
        rotated = min(position, self._model.context_length - 1)
        out = self._model.probe.run(
            [output, "new_keys", "new_values"],
            given
            | {
                "rows": embedded.numpy(),
                "positions": np.full((1, count), rotated),
                "sampled": np.arange(count if output == "logits" else 1),
                "keys": self._keys,
                "values": self._values,
                "shifts": np.zeros(1, dtype=np.int64),
            },
        )
        return torch.from_numpy(np.concatenate([one[0] for one in out], axis=1))
