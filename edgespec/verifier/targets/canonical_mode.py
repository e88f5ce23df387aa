"""Canonical mode gives the logits of a position the same bits under every schedule.

Theory of operation. Bases of row tiles are tried in a fixed order, cheapest first: with packed
weights (``linear_layers.py``) 2 rows, or 4 where they are quicker, then 8, 16 and 32, and row by
row only where canonical mode was asked for by name. Layers that are not packed, and attention, then
take a base of their own, the smallest with which most row counts agree. A base holds when

1. every matrix product of a shape that the loaded model has gives a row the same bits at every
   place of the base (``row_tiles.agreeing_sizes``), and so does attention, and
2. whole passes agree to the bit under schedules of all kinds (``run_self_test``), which covers what
   is between the products.

On a GPU, whose attention (``paged_attention.py``) needs no tiles, the bases are ``GPU_BASES``: so
few rows take the time of reading the weights in any case.

Where no base holds with packed weights, they are unpacked. The order is fixed and nothing is timed,
so a verifier that starts again computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams, noise_bits
from edgespec.verifier.targets.canonical_attention import (
    KEY_TILE,
    CanonicalGroups,
    canonical_attention,
)
from edgespec.verifier.targets.kv_pool import KvPool
from edgespec.verifier.targets.linear_layers import (
    NarrowEmbedding,
    PackedLinear,
    is_packed,
    quick_rows,
    unpack_model,
)
from edgespec.verifier.targets.loading import LoadedModel
from edgespec.verifier.targets.memory_sizing import TOKENS_NEEDED
from edgespec.verifier.targets.pass_plan import LayerAttention, LayerStates
from edgespec.verifier.targets.quantized_linear import QuantizedLinear
from edgespec.verifier.targets.row_tiles import (
    SIZES,
    RowTiles,
    TiledLayer,
    agreeing_linear_sizes,
    agreeing_packed_sizes,
    agreeing_sizes,
    install,
    remove,
    whole_vector_rows,
)

RunPass = Callable[[Sequence[PassRequest]], torch.Tensor]
"""Runs a pass over reserved requests, and returns logits [sampled rows, vocabulary]."""
Step = tuple[list[PassRequest], list[int], list[int]]
"""One pass of a schedule: its requests, the first of which is the tested session's; the sampled
rows of that session whose logits are compared; and its nodes to keep."""
_PROMPT = 19
"""Tokens of the tested text that count as its prompt. The number is odd, and no multiple of a tile
or a block, so that passes are padded."""
_LENGTH = 27
"""Tokens of the whole tested text."""
_KEY = "\0self-test"
_OTHER = "\0self-test other"

# Equal siblings of one pass: few, as in a decoding pass, and many, as in a prefill.
_SIBLINGS = (5, 30, 100)


def run_self_test(
    pool: KvPool, run: RunPass, vocabulary_size: int, *, single: RunPass | None = None
) -> str:
    """Compute the same text under several schedules, and compare the logits to the last bit.

    The text is computed one token at a time (by ``single`` if that is given), in chunks, as a tree
    beside wrong guesses, packed with another session, and as many equal siblings.

    Returns a description of where logits differ; it is empty if they agree everywhere. ``pool`` is
    left as it was. With fewer than ``TOKENS_NEEDED`` free tokens the test fails."""
    if pool.free_tokens < TOKENS_NEEDED:
        return f"{pool.free_tokens} free tokens, {TOKENS_NEEDED} needed"
    text = _make_text(vocabulary_size)
    wrong = [(token + 1) % vocabulary_size for token in text]
    reference = schedule_logits(pool, single or run, _single_steps(text))
    schedules = {
        "chunked": (_feed_chunks(text, [7, 16, 20, 21]), reference),
        "other prefill": (_feed_chunks(text, [1, 3, _PROMPT + 4]), reference),
        "tree": (_feed_tree(text, wrong), reference),
        "packed": (_feed_packed(text, wrong), reference),
        "beside one like it": (_feed_beside_another(text, wrong), reference),
    }
    for count in _SIBLINGS:
        schedules[f"each of {count} equal siblings"] = _feed_siblings(text, count), reference[1:2]
    failed = []
    for name, (schedule, wanted) in schedules.items():
        logits = schedule_logits(pool, run, schedule)
        if not torch.equal(logits, wanted.expand_as(logits)):
            failed.append(f"{name} differs by {float((logits - wanted).abs().max()):.1e}")
    return "; ".join(failed)


def has_finite_logits(pool: KvPool, run: RunPass, vocabulary_size: int) -> bool:
    """Return whether the logits behind a short text are finite; True when the pool has no room for
    the text."""
    if pool.free_tokens < TOKENS_NEEDED:
        return True
    text = _make_text(vocabulary_size)
    logits = schedule_logits(pool, run, iter([([_feed(text, 0, _LENGTH)], [0], [])]))
    return bool(torch.isfinite(logits.amax(dim=-1)).all())


def tree_logits(pool: KvPool, run: RunPass, vocabulary_size: int) -> torch.Tensor | None:
    """Return the logits of a short text as a tree beside wrong guesses, or None when the pool has
    no room."""
    if pool.free_tokens < TOKENS_NEEDED:
        return None
    text = _make_text(vocabulary_size)
    wrong = [(token + 1) % vocabulary_size for token in text]
    return schedule_logits(pool, run, _feed_tree(text, wrong))


def _make_text(vocabulary_size: int) -> list[int]:
    return [noise_bits(1, position, 0) % vocabulary_size for position in range(_LENGTH)]


def schedule_logits(pool: KvPool, run: RunPass, steps: Iterable[Step]) -> torch.Tensor:
    """Return the logits [wanted rows of all steps, vocabulary] of a schedule, float32 on the CPU.
    Most schedules want the rows behind text[_PROMPT - 1] .. text[-1]."""
    rows = []
    for key in (_KEY, _OTHER):
        pool.open(key, 1, SamplingParams())
    try:
        for requests, wanted, kept in steps:
            pool.reserve(requests)
            logits = run(requests)
            for request in requests:
                pool.commit(request)
            rows.append(logits[wanted])
            pool.keep(_KEY, kept)
    finally:
        for key in (_KEY, _OTHER):
            pool.close(key)
    return torch.cat(rows).float().cpu()


def _feed(text: Sequence[int], start: int, stop: int, *, sample: bool = True) -> PassRequest:
    return PassRequest(_KEY, start, tuple(text[start:stop]), sample=sample)


def _single_steps(text: list[int]) -> Iterator[Step]:
    yield [_feed(text, 0, _PROMPT)], [0], []
    for position in range(_PROMPT, _LENGTH):
        yield [_feed(text, position, position + 1)], [0], []


def _feed_chunks(text: list[int], cuts: list[int]) -> Iterator[Step]:
    """Feed up to each cut; what is behind the prompt is fed as a chain of right guesses."""
    start = 0
    for stop in [*[cut for cut in cuts if cut < _PROMPT], _PROMPT - 1]:
        yield [_feed(text, start, stop, sample=False)], [], []
        start = stop
    stops = [cut for cut in cuts if cut > _PROMPT] + [_LENGTH]
    for stop in stops:
        chain = tuple(text[start + 1 : stop])
        parents = tuple(range(-1, len(chain) - 1))
        request = PassRequest(_KEY, start, (text[start],), chain, parents)
        yield [request], list(range(len(chain) + 1)), list(range(len(chain)))
        start = stop


def _tree_request(text: list[int], wrong: list[int]) -> tuple[PassRequest, list[int]]:
    """The text's chain as the last branch of a tree: wrong branches come first at every depth."""
    tokens: list[int] = []
    parents: list[int] = []
    right = bad = -1
    chain = []
    for position in range(_PROMPT, _LENGTH):
        tokens += [wrong[position], text[position]]
        parents += [bad if position % 2 else right, right]
        bad, right = len(tokens) - 2, len(tokens) - 1
        chain.append(right)
    feed = tuple(text[_PROMPT - 2 : _PROMPT])
    return PassRequest(_KEY, _PROMPT - 2, feed, tuple(tokens), tuple(parents)), chain


def _feed_tree(text: list[int], wrong: list[int]) -> Iterator[Step]:
    yield [_feed(text, 0, _PROMPT - 2, sample=False)], [], []
    request, chain = _tree_request(text, wrong)
    yield [request], [0, *(1 + node for node in chain)], chain


def _feed_packed(text: list[int], wrong: list[int]) -> Iterator[Step]:
    yield [_feed(text, 0, _PROMPT - 2, sample=False)], [], []
    request, chain = _tree_request(text, wrong)
    other = PassRequest(_OTHER, 0, tuple(wrong))
    yield [request, other], [0, *(1 + node for node in chain)], chain


def _feed_beside_another(text: list[int], wrong: list[int]) -> Iterator[Step]:
    """Feed one token at a time in passes that another session with as many rows shares."""
    others = [replace(_feed(wrong, 0, _PROMPT), key=_OTHER)]
    others += [
        replace(_feed(wrong, position, position + 1), key=_OTHER)
        for position in range(_PROMPT, _LENGTH)
    ]
    for (requests, wanted, kept), other in zip(_single_steps(text), others, strict=True):
        yield [*requests, other], wanted, kept


def _feed_siblings(text: list[int], count: int) -> Iterator[Step]:
    """The first token behind the prompt, ``count`` times: all at one position, at many places."""
    yield [_feed(text, 0, _PROMPT - 1, sample=False)], [], []
    tokens, parents = (text[_PROMPT],) * count, (-1,) * count
    request = PassRequest(_KEY, _PROMPT - 1, (text[_PROMPT - 1],), tokens, parents)
    yield [request], list(range(1, 1 + count)), []


TILE_BASES = (8, 16, 32)

SMALL_BASES = (1, 2, 4, *TILE_BASES)
"""Bases of attention, and of plain layers beside others. The bases of quantised layers come first:
a product of one row takes the least time, where it has the bits that larger ones have."""
ROW_BY_ROW = 0
"""The base for one row at a time in every product, where nothing else holds."""
GPU_BASES = (64, 128)

# Keys of the attention that is tried: one tile and a part of the next.
_TRIED_KEYS = KEY_TILE + 40
# Counts of attention groups that are tried in one call; the last is the most there may be.
_BATCHES = (2, 3, 8, 16)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention heads of a model, whose products are tried."""

    heads: int
    kv_heads: int
    head_dim: int


def head_shape(loaded: LoadedModel) -> HeadShape:
    config = loaded.model.config
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return HeadShape(heads, loaded.key_width // int(head_dim), int(head_dim))


class CanonicalModeError(ValueError):
    """Canonical mode was asked for, and no way of computing holds; the message says why."""


@dataclass(frozen=True, slots=True)
class CanonicalMode:
    tiles: RowTiles | None
    failures: tuple[str, ...]
    """Reasons why each base that was tried before does not hold."""


def find_canonical_mode(
    loaded: LoadedModel,
    self_test: Callable[[RowTiles], str],
    *,
    row_by_row: bool,
    paged: bool = False,
) -> CanonicalMode:
    """Install the cheapest way of computing that holds for ``loaded``, and return it.

    ``self_test`` runs whole passes with the tiles that it is given, and returns where they differ.
    ``row_by_row`` allows the slowest way. ``paged`` means that attention is a GPU's. torch must
    have been set to one thread. If nothing holds, the model has plain weights afterwards."""
    failures: list[str] = []
    if other := _other_products(loaded):
        unpack_model(loaded.model)
        return CanonicalMode(None, (f"{other} is no plain matrix product whose rows can be tiled",))
    if paged:
        found = _first_that_holds(loaded, self_test, GPU_BASES[:1], failures)
        return CanonicalMode(found, tuple(failures))
    found = None
    if any(isinstance(part, QuantizedLinear) for part in loaded.model.modules()):
        found = _first_that_holds(loaded, self_test, (1, 2, 4), failures)
    if is_packed(loaded.model):
        bases = (max(2, quick_rows()), *TILE_BASES)  # 1 row takes no less time than 2
        found = _first_that_holds(loaded, self_test, bases, failures)
        if found is None:
            unpack_model(loaded.model)
    if found is None:
        found = _first_that_holds(loaded, self_test, TILE_BASES, failures)
    if found is None and row_by_row:
        found = _first_that_holds(loaded, self_test, (ROW_BY_ROW,), failures)
    return CanonicalMode(found, tuple(failures))


def _first_that_holds(
    loaded: LoadedModel,
    self_test: Callable[[RowTiles], str],
    bases: Sequence[int],
    failures: list[str],
) -> RowTiles | None:
    """Install and return the first of ``bases`` that holds. Reasons why others do not hold are
    added to ``failures``."""
    for base in bases:
        with torch.inference_mode():
            tiles = _try_products(loaded, base, failures)
        if tiles is None:
            continue
        if not (why_not := self_test(tiles)):
            return tiles
        remove(_linear_layers(loaded))
        failures.append(f"{tiles}: {why_not}")
    return None


def _try_products(loaded: LoadedModel, base: int, failures: list[str]) -> RowTiles | None:
    """Find for each layer the row counts that agree with ``base``, install them, and return the
    tiles. Return None, and add a reason to ``failures``, if the base does not hold for a layer or
    for attention."""
    heads = head_shape(loaded)
    one_row, base = base == ROW_BY_ROW, max(1, base)
    bases: tuple[int, ...] = (base,) if one_row or base in TILE_BASES else SMALL_BASES
    if base in GPU_BASES:
        bases, attention = GPU_BASES, SIZES[base]  # a GPU's attention needs no tiles
    else:
        attention = _choose_widest(bases, lambda base: _attention_sizes(loaded, heads, base))
    attention = attention[:1] if one_row else attention
    inner_width = loaded.model.config.intermediate_size
    row_multiple = whole_vector_rows(base, (inner_width, heads.head_dim))
    tiles = RowTiles(base, row_multiple, attention, largest=base)
    if not attention:
        failures.append(f"{tiles}: attention gives equal rows different bits")
        return None
    found: list[tuple[TiledLayer, tuple[int, ...]]] = []
    known: dict[tuple[object, ...], tuple[int, ...]] = {}
    for layer in _linear_layers(loaded):
        kind = _find_kind(layer)
        if kind not in known:
            own = bases if isinstance(layer, torch.nn.Linear) else (base,)
            sizes = _choose_widest(own, partial(_layer_sizes, layer))
            known[kind] = sizes[:1] if one_row else sizes
        if not known[kind]:
            failures.append(
                f"{tiles}: a {layer.in_features} x {layer.out_features} product"
                " gives equal rows different bits"
            )
            return None
        found.append((layer, known[kind]))
    install(found)
    batch = 1 if base in GPU_BASES else _attention_batch(loaded, heads, attention[0])
    largest = min(sizes[-1] for _, sizes in found)
    return replace(tiles, largest=largest, attention_batch=batch)


def _choose_widest(
    bases: Sequence[int], sizes_of: Callable[[int], tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the sizes of the base whose agreeing sizes reach furthest. The smallest base wins a
    tie."""
    best: tuple[int, ...] = ()
    for base in bases:
        sizes = sizes_of(base)
        if sizes and (not best or sizes[-1] > best[-1]):
            best = sizes
        if best and best[-1] == SIZES[base][-1]:
            break
    return best


def _find_kind(layer: TiledLayer) -> tuple[object, ...]:
    """Return a key that is equal for layers whose products are computed alike."""
    if isinstance(layer, PackedLinear):
        return (layer.dtype, layer.in_features, layer.out_features, layer.bias is None)
    if isinstance(layer, QuantizedLinear):
        return (layer.bits, layer.in_features, layer.out_features, layer.bias is None)
    weight = layer.weight
    return (weight.shape, weight.stride(), weight.data_ptr() % 64, layer.bias is None)


def _layer_sizes(layer: TiledLayer, base: int) -> tuple[int, ...]:
    if isinstance(layer, PackedLinear):
        return agreeing_packed_sizes(layer, base)
    if isinstance(layer, QuantizedLinear):
        return _agreeing_quantized_sizes(layer, base)
    return agreeing_linear_sizes(layer.weight, layer.bias, base)


def _linear_layers(loaded: LoadedModel) -> Iterator[TiledLayer]:
    return (part for part in loaded.model.modules() if isinstance(part, TiledLayer))


def _agreeing_quantized_sizes(layer: QuantizedLinear, base: int) -> tuple[int, ...]:
    """Find the ``agreeing_sizes`` of the layer itself for random rows: results are float32 numbers,
    so another order of the sums would show."""
    generator = torch.Generator().manual_seed(layer.in_features)
    probes = torch.randn((4, layer.in_features), generator=generator)
    return agreeing_sizes(layer.product, probes, base)


def _other_products(loaded: LoadedModel) -> str:
    """Return the name of a matrix that no layer with a known product holds, such as an expert's, or
    an empty one."""
    for name, part in loaded.model.named_modules():
        if isinstance(part, QuantizedLinear):
            continue
        known = isinstance(part, (torch.nn.Linear, torch.nn.Embedding, NarrowEmbedding))
        own = chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
        for tensor, values in own:
            plain = type(values) in (torch.Tensor, torch.nn.Parameter)
            if values.ndim > 1 and not (known and plain and values.is_floating_point()):
                return f"{name}.{tensor}"
    return ""


def _attention_sizes(loaded: LoadedModel, shape: HeadShape, base: int) -> tuple[int, ...]:
    """Find the ``agreeing_sizes`` of attention to random keys, all rows at one position."""
    probes = _attention_probes(loaded, shape)
    return agreeing_sizes(lambda rows: _attend(loaded, shape, rows, 1), probes, base)


def _attention_batch(loaded: LoadedModel, shape: HeadShape, size: int) -> int:
    """Return how many groups of ``size`` rows, the smallest, may be computed in one call: 1 where a
    group's bits depend on those beside it."""
    probes = _attention_probes(loaded, shape)
    which = torch.arange(max(_BATCHES) * size, device=probes.device) % len(probes)
    rows = probes[which]
    alone = torch.cat([_attend(loaded, shape, one, 1) for one in rows.split(size)])
    for count in _BATCHES:
        together = _attend(loaded, shape, rows[: count * size], count)
        if not torch.equal(together, alone[: count * size]):
            return 1
    return max(_BATCHES)


def _attention_probes(loaded: LoadedModel, shape: HeadShape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape.head_dim + 1)
    width = shape.heads * shape.head_dim
    return torch.randn((4, width), generator=generator).to(loaded.device)


def _attend(loaded: LoadedModel, shape: HeadShape, rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Attend from ``rows`` [count, heads * head_dim], in ``groups`` groups, to the same random
    keys, in float32."""
    count, padded = len(rows), len(rows) // groups
    generator = torch.Generator().manual_seed(shape.head_dim)
    size = (2 * KEY_TILE, loaded.key_width)
    keys, values = (torch.randn(size, generator=generator).to(loaded.device) for _ in range(2))
    slots = torch.arange(2 * KEY_TILE, device=loaded.device).expand(groups, -1)
    mask = torch.zeros(2 * KEY_TILE, device=loaded.device)
    mask[_TRIED_KEYS:] = -torch.inf
    query = rows.view(count, shape.heads, shape.head_dim).transpose(0, 1)
    own = query[: shape.kv_heads]
    tried = CanonicalGroups(
        rows=torch.arange(count, device=loaded.device),
        real=torch.arange(count, device=loaded.device),
        key_slots=slots.split(KEY_TILE, dim=1),
        masks=tuple(part.expand(groups, padded, -1).contiguous() for part in mask.split(KEY_TILE)),
    )
    states = LayerStates(query, own, own, keys, values)
    return canonical_attention(states, tried, LayerAttention(shape.head_dim**-0.5)).flatten(1)
