"""What a device agent keeps resident, term by term, as plain arithmetic.

Theory of operation. The peak of a process is the sum of its terms: what is there before a draft
(runtime and libraries, which the driver measures, since it differs by system), what the draft adds
at rest (weights, tokenizer), and what grows with a text (keys and values, guesses, workspace). A
process peaks either while it loads the draft or with a full window, so the last term is what
loading needs beyond the others. Constants were measured with onnxruntime 1.31 on an x86-64 CPU, in
fresh processes of drafts of 1 to 600 million parameters (``benchmarks/memory.py``).

The idea to model speculative decoding's memory term by term and to fit it to a device: SpecMemo
(arXiv 2506.01986).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.core.device.kv_type import KvType
from edgespec.core.device.memory_size import MIB

# The runtime's code and tables that a first session touches.
_SESSION_BYTES = 11 * MIB
# (weights kept for the kernels, the table's second copy), over what is stored.
_KEPT = {4: (1.67, 0.0), 8: (1.255, 0.94), 32: (1.0, 1.0)}
# What a graph that holds its own weights keeps of them besides.
_INLINE = 0.55
_TABLE_INTEGERS = {4: 0.8, 8: 0.89, 32: 0.0}
_LINK_BYTES = 5 * MIB
_TOKENIZER_FACTOR = 9.0
_THREAD_BYTES = 256 * 1024
_NODE_BYTES = 1024
_MOST_NODES = 256
_SAMPLING_ROWS = 11
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DraftVariant:
    """One exported draft as far as memory and speed depend on it."""

    name: str
    bits: int
    kv_type: KvType
    stored_bytes: int
    """Of the graph and its weights, on disk."""
    table_bytes: int
    """Of them, the embedding."""
    inline: bool
    """The weights lie inside the graph's file."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocabulary_size: int
    context_length: int
    """Tokens that it looks at, at most: its positions, or as many as it was trained on."""
    tokenizer_bytes: int = 0
    """On disk; 0: none is loaded."""

    @property
    def kv_bytes_per_token(self) -> int:
        """2 * layers * kv_heads * head_dim numbers: 28 layers of 8 heads of 128 take 229,376 bytes
        as float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_type.bytes


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """What may be traded for memory."""

    window: int
    """Tokens whose keys and values are held; a longer text slides through."""
    width: int
    """Guesses a step."""
    chunk: int
    """Prompt tokens fed at a time."""
    threads: int
    caches: int = 1
    """Generations whose keys and values are held at once, a window of each."""


@dataclass(frozen=True, slots=True)
class MemoryTerm:
    name: str
    bytes: int
    why: str
    """The formula with its numbers."""


def memory_terms(
    variant: DraftVariant, settings: DraftSettings, runtime_bytes: int
) -> tuple[MemoryTerm, ...]:
    """The terms whose sum is the predicted peak of the process, in bytes."""
    at_rest = weights_bytes(variant)
    terms = (
        MemoryTerm("runtime and libraries", runtime_bytes, "measured in this process"),
        MemoryTerm("draft session", _SESSION_BYTES, "code and tables of the runtime"),
        MemoryTerm(
            "weights", at_rest, f"{variant.bits} bits, {variant.stored_bytes / MIB:.1f} MiB stored"
        ),
        MemoryTerm("tokenizer", tokenizer_bytes(variant), "text to tokens and back"),
        MemoryTerm(
            "keys and values",
            settings.caches * kv_bytes(variant, settings.window),
            f"{settings.window} tokens of {variant.kv_bytes_per_token} bytes"
            f" ({variant.kv_type.value})"
            + (f" in each of {settings.caches} caches" if settings.caches > 1 else ""),
        ),
        MemoryTerm(
            "candidate nodes",
            candidate_bytes(settings),
            f"width {settings.width}, at most {_MOST_NODES} steps",
        ),
        MemoryTerm(
            "logits and sampling",
            sampling_bytes(variant),
            f"{_SAMPLING_ROWS} rows of {variant.vocabulary_size} ids",
        ),
        MemoryTerm(
            "workspace",
            workspace_bytes(variant, settings),
            f"{settings.chunk} tokens at a time, threads: {settings.threads}",
        ),
        MemoryTerm("link", _LINK_BYTES, "gRPC, event loop, messages"),
    )
    grown = sum(term.bytes for term in terms[4:])
    surplus = max(0, load_surplus_bytes(variant) - grown)
    loading = MemoryTerm("loading", surplus, "what the loading of weights needs for a moment")
    return (*terms, loading)


def weights_bytes(variant: DraftVariant) -> int:
    """What the weights keep resident: the kernels' repacked copy, and of 8 and 32 bits the table
    again as it is stored, for looking up embeddings.

    Formula: a * stored + b * table, (a, b) by bits: 4: (1.67, 0), 8: (1.255, 0.94), 32: (1, 1); and
    0.55 * stored where the graph's file holds the weights itself. 100 MiB of 4 bits keep 167 MiB.
    """
    kept, table = _KEPT[variant.bits]
    inline = _INLINE if variant.inline else 0.0
    return int((kept + inline) * variant.stored_bytes + table * variant.table_bytes)


def load_surplus_bytes(variant: DraftVariant) -> int:
    """What loading needs for a moment beyond what stays: the integers of the largest matrix, the
    table, before they are repacked.

    Formula: c * table, c by bits: 4: 0.8, 8: 0.89, 32: 0. A table of 93 MiB in 4 bits: 74 MiB.
    """
    return int(_TABLE_INTEGERS[variant.bits] * variant.table_bytes)


def tokenizer_bytes(variant: DraftVariant) -> int:
    """What a tokenizer keeps.

    Formula: 9 * its file. 0.25 MiB take 2.2 MiB."""
    return int(_TOKENIZER_FACTOR * variant.tokenizer_bytes)


def kv_bytes(variant: DraftVariant, window: int) -> int:
    """Keys and values of a full window, in whole pages for each head of each buffer.

    Formula: 2 * layers * kv_heads * ceil(window * head_dim * bytes / 4096) * 4096. 28 layers of 8
    heads of 128 float32 numbers and 1024 tokens: 448 * 128 pages, 224 MiB.
    """
    head_bytes = window * variant.head_dim * variant.kv_type.bytes
    pages = -(-head_bytes // PAGE_BYTES)
    return 2 * variant.layers * variant.kv_heads * pages * PAGE_BYTES


def candidate_bytes(settings: DraftSettings) -> int:
    """The speculation tree: its nodes, their guesses and messages.

    Formula: 256 steps * width * 1 KiB. Width 2: 0.5 MiB."""
    return _MOST_NODES * settings.width * _NODE_BYTES


def sampling_bytes(variant: DraftVariant) -> int:
    """The row of logits, and the scratch arrays of whoever chooses from it.

    Formula: 11 * vocabulary * 4. 151,936 ids: 6.4 MiB."""
    return _SAMPLING_ROWS * variant.vocabulary_size * 4


def workspace_bytes(variant: DraftVariant, settings: DraftSettings) -> int:
    """Activations of a chunk, the attention's scratch, the threads' stacks.

    Formula: chunk * 4 * (3 * feed_forward + 2 * (heads + 2 * kv_heads) * head_dim + 4 * hidden)
    + threads * 256 KiB; float16 keys and values are widened again for each product: heads * chunk *
    window * 6 more. A chunk of 64 with 3072, (16 + 16) * 128, 1024 and one thread: 5.5 MiB.
    """
    heads = (variant.heads + 2 * variant.kv_heads) * variant.head_dim
    row = 4 * (3 * variant.feed_forward + 2 * heads + 4 * variant.hidden)
    scratch = 0
    if variant.kv_type is KvType.FLOAT16:
        scratch = 6 * variant.heads * settings.chunk * settings.window
    return settings.chunk * row + scratch + settings.threads * _THREAD_BYTES
