"""Memory of a device's process: the user's budget, what a draft needs, a plan, and a guard.

Theory of operation. The peak of a process is the sum of its terms: what it holds before the draft
is loaded (measured, since it differs by system), what the draft adds at rest (its weights), and
what grows with a generation (keys and values, candidates, workspace). A process peaks while it
loads the draft or with full windows, so the last term is what loading needs beyond the others.
Constants were measured with onnxruntime 1.31 on an x86-64 CPU, in fresh processes of drafts of 1 to
600 million parameters (``benchmarks/memory.py``). Modelling speculative decoding's memory term by
term, to fit it to a device, is SpecMemo's idea (arXiv 2506.01986).

``plan_memory`` returns the first combination that leaves a margin of the budget free. It reduces
what is worth least first: the prefill chunk, then the precision of keys and values, the window (the
last tokens of a text that the draft sees), and the second candidate of a step. What is left over
goes into further caches, for other generations at the same time. ``MemoryGuard`` keeps the running
process within the budget. No output depends on any of it: drafts are hints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Final

MIB: Final = 1 << 20

# --- what a user grants -----------------------------------------------------------------------

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+|%)")
_ALLOWED_FORMS = "must be a size such as 600MiB, 0.5GiB or 600 MB, a share such as 25%, or auto"
# Larger than the memory of any device: a wrong unit is more likely.
_MAX_BUDGET_BYTES = 1 << 44
AUTO = "auto"
AUTO_SHARE = 0.9
"""Share of the free memory that ``auto`` takes; the rest is for other programs that grow."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory that a machine and its limits leave to this process, in bytes."""

    total: int
    """Memory of the machine or limit of the control group, whichever is less."""
    available: int
    """Memory that this process may take in addition: the least of the machine's free memory and
    what the control group's and the process's own limits leave."""
    resident: int
    """Memory that this process holds."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A user's memory budget. At most one of ``bytes`` and ``share`` is set; both None means auto.

    ``text`` is the user's input, for messages."""

    text: str
    bytes: int | None = None
    share: float | None = None
    """Share of the machine's memory."""

    def resolve(self, machine: MachineMemory) -> int:
        """Return the budget of the whole process, in bytes.

        Formula of auto: resident + 0.9 * available. A process of 80 MiB with 1000 MiB free gets 980
        MiB."""
        if self.bytes is not None:
            return self.bytes
        if self.share is not None:
            return int(self.share * machine.total)
        return machine.resident + int(AUTO_SHARE * machine.available)


def parse_budget(text: str, name: str = "memory_budget") -> MemoryBudget:
    """Parse a budget such as ``600MiB``, ``600 MB``, ``25%`` or ``auto``.

    Raises ``ValueError`` with the setting, the text and the allowed forms."""
    if text == AUTO:
        return MemoryBudget(text)
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        hint = ": it lacks a unit" if re.fullmatch(r"[0-9.]+", text.strip()) else ""
        raise ValueError(f"{name} is {text!r}{hint}, but {_ALLOWED_FORMS}")
    number, unit = float(found[1]), found[2]
    if unit == "%":
        if not 0.0 < number <= 100.0:
            raise ValueError(f"{name} is {text!r}, but a share must be in (0%, 100%]")
        return MemoryBudget(text, share=number / 100.0)
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(
            f"{name} is {text!r}: unknown unit {unit!r}; known are B, KB, MB, GB (powers of"
            " 1000), KiB, MiB, GiB (powers of 1024) and %"
        )
    if not 1 <= number * factor <= _MAX_BUDGET_BYTES:
        raise ValueError(f"{name} is {text!r}, but must be in [1B, {_MAX_BUDGET_BYTES >> 30}GiB]")
    return MemoryBudget(text, bytes=int(number * factor))


def in_mib(size_bytes: float) -> str:
    """Return a size for display, such as 614.4 MiB."""
    return f"{size_bytes / MIB:.1f} MiB"


# --- what a draft takes ------------------------------------------------------------------------


class KvType(Enum):
    """Number type of cached keys and values."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT8 = "int8"
    """8-bit integers, with a scale for each layer, head and channel that was fixed at export."""

    @property
    def bytes(self) -> int:
        return {KvType.FLOAT32: 4, KvType.FLOAT16: 2, KvType.INT8: 1}[self]


# Code and tables of the runtime that the first session loads.
_SESSION_BYTES = 11 * MIB
# Factors by bits of a weight: (stored bytes for the kernels' copy, table bytes for a second copy).
_RESIDENT_FACTORS = {4: (1.67, 0.0), 8: (1.255, 0.94), 32: (1.0, 1.0)}
# Share of the stored bytes that stays resident too if the weights lie inside the graph's file.
_INLINE_FACTOR = 0.55
_TABLE_INTEGERS = {4: 0.8, 8: 0.89, 32: 0.0}
_LINK_BYTES = 5 * MIB
_THREAD_BYTES = 256 * 1024
_NODE_BYTES = 1024
_MAX_STEPS_OF_NODES = 256
_SAMPLING_ROWS = 11
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DraftVariant:
    """Properties of one exported draft that its memory and speed depend on."""

    name: str
    bits: int
    kv_type: KvType
    stored_bytes: int
    """Bytes of the graph and its weights on disk."""
    table_bytes: int
    """Bytes of the embedding table on disk."""
    inline: bool
    """Whether the weights lie inside the graph's file."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocabulary_size: int
    context_length: int
    """Longest context of the draft, in tokens: its positions, or the length that it was trained
    on."""
    places: int = 1
    """Positions that one step can draft for, each of which has a row of logits."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values for one token.

        Formula: 2 * layers * kv_heads * head_dim * bytes of a number. 28 layers with 8 heads of 128
        float32 numbers make 229,376."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_type.bytes

    def kv_bytes(self, window: int) -> int:
        """Return the bytes of keys and values of a full window, in whole pages for each head of
        each buffer.

        Formula: 2 * layers * kv_heads * ceil(window * head_dim * bytes / 4096) * 4096. 28 layers of
        8 heads of 128 float32 numbers and 1024 tokens: 448 * 128 pages, 224 MiB."""
        pages = -(-window * self.head_dim * self.kv_type.bytes // PAGE_BYTES)
        return 2 * self.layers * self.kv_heads * pages * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Settings of a draft that can be reduced to save memory."""

    window: int
    """Tokens whose keys and values are held; a longer text slides through the window."""
    width: int
    """Candidates of a draft step."""
    chunk: int
    """Prompt tokens that are fed in one run."""
    threads: int
    caches: int = 1
    """Generations whose keys and values are held at the same time, a window for each."""


class Held(Enum):
    """When the memory of a term is held."""

    ALWAYS = "always"
    SERVING = "in edgespec serve"
    """In ``edgespec serve``, and in no other command."""
    RESERVED = "rarely"
    """Kept free for what rarely happens, such as many large requests at the same time."""


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    name: str
    bytes: int
    why: str
    """The formula with its numbers, for display."""
    held: Held = Held.ALWAYS


def memory_terms(
    variant: DraftVariant,
    settings: DraftSettings,
    runtime_bytes: int,
    additions: Sequence[MemoryTerm] = (),
) -> tuple[MemoryTerm, ...]:
    """Return the terms whose sum is the predicted peak of the process, in bytes, and behind them
    the terms ``additions``, which do not depend on the draft."""
    window, width, ids = settings.window, settings.width, variant.vocabulary_size
    stored, nodes = (
        f"{variant.stored_bytes / MIB:.1f} MiB stored",
        _MAX_STEPS_OF_NODES * _NODE_BYTES,
    )
    tokens = f"{window} tokens of {variant.kv_bytes_per_token} bytes ({variant.kv_type.value})"
    if settings.caches > 1:
        tokens += f" in each of {settings.caches} caches"
    sampled = _SAMPLING_ROWS + variant.places - 1
    working, workspace = f"{settings.chunk} tokens at a time", _workspace_bytes(variant, settings)
    rest = (
        ("runtime and libraries", runtime_bytes, "measured, with the tokenizer"),
        ("draft session", _SESSION_BYTES, "code and tables of the runtime"),
        ("weights", _weights_bytes(variant), f"{variant.bits} bits, {stored}"),
    )
    grown = (
        ("keys and values", settings.caches * variant.kv_bytes(window), tokens),
        ("candidate nodes", width * nodes, f"width {width}, at most {_MAX_STEPS_OF_NODES} steps"),
        (
            "logits and sampling",
            sampling_bytes(ids, variant.places),
            f"{sampled} rows of {ids} ids",
        ),
        ("workspace", workspace, f"{working}, threads: {settings.threads}"),
        ("link", _LINK_BYTES, "gRPC, event loop, messages"),
    )
    # While weights are loaded, the integers of the largest matrix (the table) exist before they are
    # repacked.
    surplus = int(_TABLE_INTEGERS[variant.bits] * variant.table_bytes) - sum(x[1] for x in grown)
    loading = ("loading", max(0, surplus), "what the loading of weights needs for a moment")
    return (*(MemoryTerm(*term) for term in (*rest, *grown, loading)), *additions)


def sampling_bytes(vocabulary_size: int, places: int = 1) -> int:
    """Return the bytes of a row of logits and of the arrays that sample from it, and of a row of
    logits for each further place.

    Formula: (11 + places - 1) * 4 * vocabulary size. 151,936 ids take 6.4 MiB."""
    return (_SAMPLING_ROWS + places - 1) * vocabulary_size * 4


def _weights_bytes(variant: DraftVariant) -> int:
    """Return the resident bytes of the weights: the kernels' repacked copy, and for 8 and 32 bits
    the table again as it is stored, for looking up embeddings.

    Formula: a * stored + b * table, with (a, b) from ``_RESIDENT_FACTORS``, plus 0.55 * stored if
    the graph's file holds the weights itself. 100 MiB of 4 bits keep 1.67 * 100 = 167 MiB."""
    kept, table = _RESIDENT_FACTORS[variant.bits]
    inline = _INLINE_FACTOR if variant.inline else 0.0
    return int((kept + inline) * variant.stored_bytes + table * variant.table_bytes)


def _workspace_bytes(variant: DraftVariant, settings: DraftSettings) -> int:
    """Return the bytes of a chunk's activations, the attention's scratch and the threads' stacks.

    Formula: chunk * 4 * (3 * feed_forward + 2 * (heads + 2 * kv_heads) * head_dim + 4 * hidden) +
    threads * 256 KiB. Float16 keys and values are widened for each product: heads * chunk * window
    * 6 more. A chunk of 64 with 3072, (16 + 16) * 128, 1024 and one thread: 5.5 MiB."""
    heads = (variant.heads + 2 * variant.kv_heads) * variant.head_dim
    row = 4 * (3 * variant.feed_forward + 2 * heads + 4 * variant.hidden)
    widened = variant.kv_type is KvType.FLOAT16
    scratch = 6 * variant.heads * settings.chunk * settings.window if widened else 0
    return settings.chunk * row + scratch + settings.threads * _THREAD_BYTES


_STORE_BYTES_PER_TEXT_BYTE = 3.2
_MAKING_BYTES_PER_TEXT_BYTE = 4.8
_CORPUS_BYTES = 10 * MIB
_CORPUS_SHARE = 0.25


def corpus_text_bytes(budget_bytes: int) -> int:
    """Return the most bytes of text that ``draft.corpus`` may have within a budget.

    Formula: a quarter of the budget, less 10 MiB, over the 3.2 + 4.8 bytes for each byte of text.
    A budget of 600 MiB allows 17.5 MiB of text."""
    per_byte = _STORE_BYTES_PER_TEXT_BYTE + _MAKING_BYTES_PER_TEXT_BYTE
    return max(0, int((_CORPUS_SHARE * budget_bytes - _CORPUS_BYTES) / per_byte))


def corpus_terms(text_bytes: int) -> tuple[MemoryTerm, ...]:
    """Return the memory that ``draft.corpus`` takes for this many bytes of text.

    Formula: 8 bytes of the store for each token, of which a byte of text has 0.4 at most in most
    texts, and 10 MiB for what changed since and for sorting; 12 bytes for each token while the
    store is made anew. 10 MiB of text take 42 MiB, and 48 MiB more at such a time."""
    why = f"index of {in_mib(text_bytes)} of text, and what changed since it was made"
    making = "while the index is made anew, because much of the text has changed"
    return (
        MemoryTerm("corpus", int(_STORE_BYTES_PER_TEXT_BYTE * text_bytes) + _CORPUS_BYTES, why),
        MemoryTerm(
            "corpus, changing", int(_MAKING_BYTES_PER_TEXT_BYTE * text_bytes), making, Held.RESERVED
        ),
    )


# --- the plan ---------------------------------------------------------------------------------

MIN_PLANNED_WINDOW = 128
USUAL_WINDOW = 1024
"""Longest window of a draft in tokens, unless the user asks for another one. Behind real texts of
2,048 to 8,000 tokens a draft with this window guesses as well as one with the whole text."""
CHUNKS = (64, 32, 16)
MARGIN_SHARE, LEAST_MARGIN_BYTES = 0.05, 8 * MIB
# Weights from which on two threads are faster: smaller ones are read by one thread as fast as by
# two.
_TWO_THREADS_FROM_BYTES = 6_000_000


class MemoryPlanError(ValueError):
    """No combination fits; the message gives the smallest budget that would do."""


@dataclass(frozen=True, slots=True)
class MemoryPlanInputs:
    budget_bytes: int
    """Budget of the whole process at its peak."""
    runtime_bytes: int
    """Bytes that the process holds before it loads a draft, its tokenizer included."""
    max_width: int
    """Largest number of candidates per step to plan for."""
    max_window: int = 0
    """Longest window to plan for, in tokens; 0: 1024, or the draft's context if that is shorter."""
    threads: int = 0
    """Threads of the draft; 0: two for a large draft on a machine with two cores or more, else
    one."""
    cores: int = 1
    max_caches: int = 1
    """Largest number of caches to plan for."""
    additions: tuple[MemoryTerm, ...] = ()
    """Memory that some commands hold beyond the runtime and the draft. It counts in every command,
    so a budget that suits one command suits every other."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    variant: DraftVariant
    settings: DraftSettings
    terms: tuple[MemoryTerm, ...]
    budget_bytes: int

    @property
    def predicted_bytes(self) -> int:
        """The most that is planned for: the sum of the terms."""
        return sum(term.bytes for term in self.terms)

    @property
    def serving_bytes(self) -> int:
        """The expected peak of ``edgespec serve`` with a full window in each cache, its process for
        chat templates included."""
        return sum(term.bytes for term in self.terms if term.held is not Held.RESERVED)

    @property
    def generating_bytes(self) -> int:
        """The expected peak of a command that runs one generation at a time, with a full window.

        Formula: the terms that are always held, less the keys and values of all caches but one."""
        always = sum(term.bytes for term in self.terms if term.held is Held.ALWAYS)
        one = self.variant.kv_bytes(self.settings.window)
        return always - (self.settings.caches - 1) * one

    @property
    def margin_bytes(self) -> int:
        return margin_bytes(self.budget_bytes)

    @property
    def fits(self) -> bool:
        """Whether the plan leaves the margin of the budget free."""
        return self.predicted_bytes + self.margin_bytes <= self.budget_bytes

    def list_reductions(self, best: MemoryPlan) -> tuple[str, ...]:
        """Return in words what this plan has less of than ``best``."""
        ours, theirs = self.settings, best.settings
        pairs = [
            ("draft", self.variant.name, best.variant.name),
            ("keys and values", self.variant.kv_type.value, best.variant.kv_type.value),
            ("window", ours.window, theirs.window),
            ("width", ours.width, theirs.width),
            ("prefill chunk", ours.chunk, theirs.chunk),
            ("caches", ours.caches, theirs.caches),
        ]
        return tuple(f"{what} {one} instead of {two}" for what, one, two in pairs if one != two)


def margin_bytes(budget_bytes: int) -> int:
    """Return the bytes that a plan leaves free, for errors of its arithmetic and for the guard to
    act in.

    Formula: max(8 MiB, 0.05 * budget). A budget of 600 MiB keeps 30 MiB free."""
    return max(LEAST_MARGIN_BYTES, int(MARGIN_SHARE * budget_bytes))


def plan_memory(variants: Sequence[DraftVariant], question: MemoryPlanInputs) -> MemoryPlan:
    """Return the best plan within the budget.

    It is a plan of the first of ``variants`` that fits, with as many caches as were requested and
    the budget holds. Raises ``MemoryPlanError`` with the smallest budget that would do."""
    assert variants
    plan = next((one for one in _iterate_plans(variants, question) if one.fits), None)
    if plan is None:
        raise _make_plan_error(variants, question)
    for caches in range(question.max_caches, 1, -1):
        richer = _make_plan(plan.variant, replace(plan.settings, caches=caches), question)
        if richer.fits:
            return richer
    return plan


def plan_without_limit(variants: Sequence[DraftVariant], question: MemoryPlanInputs) -> MemoryPlan:
    """Return the plan for an unlimited budget."""
    return plan_memory(variants, replace(question, budget_bytes=1 << 62))


def smallest_budget(variants: Sequence[DraftVariant], question: MemoryPlanInputs) -> int:
    """Return the smallest budget that any of ``variants`` fits into.

    Formula: max(p + 8 MiB, p / 0.95) for a leanest prediction of p. 152 MiB need 160 MiB."""
    leanest = min(plan.predicted_bytes for plan in _iterate_plans(variants, question))
    return max(leanest + LEAST_MARGIN_BYTES, int(leanest / (1.0 - MARGIN_SHARE)) + 1)


def _iterate_plans(
    variants: Sequence[DraftVariant], question: MemoryPlanInputs
) -> Iterator[MemoryPlan]:
    """Yield all combinations, the best first."""
    for _, same in groupby(variants, key=lambda one: (one.name, one.bits)):
        kinds = tuple(same)
        large = question.cores > 1 and kinds[0].stored_bytes >= _TWO_THREADS_FROM_BYTES
        threads = question.threads or (2 if large else 1)
        for width in range(question.max_width, 0, -1):
            for window in window_sizes(
                question.max_window or min(USUAL_WINDOW, kinds[0].context_length)
            ):
                for variant in kinds:
                    for chunk in CHUNKS:
                        yield _make_plan(
                            variant, DraftSettings(window, width, chunk, threads), question
                        )


def _make_plan(
    variant: DraftVariant, settings: DraftSettings, question: MemoryPlanInputs
) -> MemoryPlan:
    terms = memory_terms(variant, settings, question.runtime_bytes, question.additions)
    return MemoryPlan(variant, settings, terms, question.budget_bytes)


def window_sizes(longest: int) -> tuple[int, ...]:
    """Return the windows to try, longest first: ``longest``, and below it ..., 384, 256, 192 and
    128."""
    found, size = [], MIN_PLANNED_WINDOW
    while size < longest:
        found += [size, size * 3 // 2]
        size *= 2
    return (longest, *(one for one in reversed(found) if one < longest))


def _make_plan_error(
    variants: Sequence[DraftVariant], question: MemoryPlanInputs
) -> MemoryPlanError:
    least = min(_iterate_plans(variants, question), key=lambda plan: plan.predicted_bytes)
    largest = sorted(least.terms, key=lambda term: -term.bytes)[:2]
    parts = ", ".join(f"{term.name} {in_mib(term.bytes)}" for term in largest)
    return MemoryPlanError(
        f"memory budget is {in_mib(question.budget_bytes)}, but the draft {least.variant.name!r}"
        f" needs at least {in_mib(smallest_budget(variants, question))} ({parts}); without a draft"
        " (--draft none) the text comes all the same"
    )


# --- the guard --------------------------------------------------------------------------------

SMALLEST_WINDOW = 64
RECOVERY_S = 30.0
"""Seconds that the process has to stay below the limit before the draft gets more memory again.
Memory for a web page or a build comes and goes within a few seconds, and the cache is filled again
each time its size changes."""


@dataclass(frozen=True, slots=True)
class DraftAllowance:
    """The part of the plan that a draft may use at the moment. ``window`` 0 means that it rests."""

    window: int
    width: int


class MemoryGuard:
    """Keeps ``resident + growth`` below ``budget - margin``.

    Before draft steps ``observe`` gets what the process holds and what the step may add. Where that
    does not leave the margin free, it reduces the draft's allowance, in this order and no further
    than needed:

        whole window -> a shorter one, down to 64 tokens -> one candidate a step -> no cache at all

    Rows that are freed count at once. When the process has stayed well below the limit for a while,
    the guard goes back one rung. The stream goes on in any case: a resting draft has no candidates.
    ``full`` is what was planned; ``bytes_per_token`` is the size of a row of the cache."""

    def __init__(
        self,
        budget_bytes: int,
        margin_bytes: int,
        full: DraftAllowance,
        bytes_per_token: int,
        recovery_s: float = RECOVERY_S,
    ) -> None:
        self.current = full
        self._limit_bytes, self._slack_bytes = budget_bytes - margin_bytes, margin_bytes
        self._full, self._row_bytes = full, max(1, bytes_per_token)
        self._recovery_s = recovery_s
        self._below_limit_since: float | None = None

    def observe(
        self, resident_bytes: int, growth_bytes: int, held_tokens: int, now: float
    ) -> DraftAllowance | None:
        """Return the new allowance, or None if it does not change.

        The process holds ``resident_bytes``, with ``held_tokens`` rows; the next step may add
        ``growth_bytes``."""
        excess = resident_bytes + growth_bytes - self._limit_bytes
        if excess > 0:
            self._below_limit_since = None
            return self._tighten(held_tokens + growth_bytes // self._row_bytes, excess)
        if self.current == self._full:
            return None
        richer = self._next_rung_up()
        added = max(0, richer.window - held_tokens) * self._row_bytes
        if resident_bytes + added + self._slack_bytes > self._limit_bytes:
            self._below_limit_since = None
            return None
        if self._below_limit_since is None:
            self._below_limit_since = now
        if now - self._below_limit_since < self._recovery_s:
            return None
        self._below_limit_since, self.current = now, richer
        return richer

    def _tighten(self, reached: int, excess: int) -> DraftAllowance | None:
        """Reduce the allowance to the longest window that frees ``excess`` bytes or does not take
        them.

        Formula: reached - ceil(excess / row) tokens, where ``reached`` is held + growth / row. 1000
        rows of 1 KiB held, 24 more to come and 100 KiB too much leave a window of 924."""
        current = self.current
        if not current.window:
            return None  # it holds nothing
        window = min(current.window, reached) + -excess // self._row_bytes
        if window >= SMALLEST_WINDOW or current.window > SMALLEST_WINDOW:
            self.current = DraftAllowance(max(window, SMALLEST_WINDOW), current.width)
        elif current.width > 1:
            self.current = DraftAllowance(current.window, 1)
        else:
            self.current = DraftAllowance(0, 0)
        return self.current

    def _next_rung_up(self) -> DraftAllowance:
        current, full = self.current, self._full
        if not current.window:
            return DraftAllowance(min(SMALLEST_WINDOW, full.window), 1)
        if current.width < full.width:
            return DraftAllowance(current.window, full.width)
        return DraftAllowance(min(full.window, 2 * current.window), full.width)
