"""Does canonical mode hold on this model, machine and torch build? A few passes at start-up.

The same text is computed one token at a time, in chunks, as a tree beside wrong guesses, packed
with another session, and as many equal siblings; the logits must be the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams, noise_bits
from edgespec.verifier.targets.kv_pool import KvPool

RunPass = Callable[[Sequence[PassRequest]], torch.Tensor]
"""A pass over reserved requests: logits [sampled rows, vocabulary]."""
Step = tuple[list[PassRequest], list[int], list[int]]
"""Requests (the first is the tested one), its sampled rows that count, its nodes to keep."""
_PROMPT = 19
_LENGTH = 27
_KEY = "\0self-test"
_OTHER = "\0self-test other"
# Equal siblings of one pass: few, as in a decoding pass, and many, as in a prefill.
_SIBLINGS = (5, 30, 100)
# The longest schedule: the prompt and its siblings, in whole blocks, and the other session's first.
TOKENS_NEEDED = 160


@dataclass(frozen=True, slots=True)
class SelfTest:
    ok: bool
    max_difference: float
    """Largest absolute difference of a logit between two schedules."""
    message: str


def run_self_test(pool: KvPool, run: RunPass, vocabulary_size: int) -> SelfTest:
    """Compare all schedules with one token at a time; leaves ``pool`` as it was.

    Needs ``TOKENS_NEEDED`` free tokens; too few is a failure.
    """
    if pool.free_tokens < TOKENS_NEEDED:
        return SelfTest(
            False, float("nan"), f"{pool.free_tokens} free tokens, {TOKENS_NEEDED} needed"
        )
    text = _text(vocabulary_size)
    wrong = [(token + 1) % vocabulary_size for token in text]
    reference = schedule_logits(pool, run, _single_steps(text))
    worst, failed = 0.0, []
    schedules = {
        "chunked": _chunks(text, [7, 16, 20, 21]),
        "other prefill": _chunks(text, [1, 3, _PROMPT + 4]),
        "tree": _tree(text, wrong),
        "packed": _packed(text, wrong),
    }
    for name, schedule in schedules.items():
        logits = schedule_logits(pool, run, schedule)
        difference = float((logits - reference).abs().max())
        worst = max(worst, difference)
        if not torch.equal(logits, reference):
            failed.append(f"{name} differs by {difference:.1e}")
    for count in _SIBLINGS:
        logits = schedule_logits(pool, run, _siblings(text, count))
        difference = float((logits - reference[1]).abs().max())
        worst = max(worst, difference)
        if not torch.equal(logits, reference[1].expand_as(logits)):
            failed.append(f"{count} equal siblings differ by {difference:.1e}")
    message = "; ".join(failed) or "single steps, chunks, trees and packed agree bit for bit"
    return SelfTest(not failed, worst, message)


def finite_logits(pool: KvPool, run: RunPass, vocabulary_size: int) -> bool:
    """Whether the logits behind a short text are numbers; leaves ``pool`` as it was.

    True without a pass when the pool has no room for one.
    """
    if pool.free_tokens < TOKENS_NEEDED:
        return True
    text = _text(vocabulary_size)
    logits = schedule_logits(pool, run, iter([([_feed(text, 0, _LENGTH)], [0], [])]))
    return bool(torch.isfinite(logits.amax(dim=-1)).all())


def _text(vocabulary_size: int) -> list[int]:
    return [noise_bits(1, position, 0) % vocabulary_size for position in range(_LENGTH)]


def schedule_logits(pool: KvPool, run: RunPass, steps: Iterable[Step]) -> torch.Tensor:
    """Logits [wanted rows of all steps, vocabulary], float32 on the CPU; most schedules want those
    behind text[_PROMPT - 1] .. text[-1]."""
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


def _chunks(text: list[int], cuts: list[int]) -> Iterator[Step]:
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


def _tree(text: list[int], wrong: list[int]) -> Iterator[Step]:
    yield [_feed(text, 0, _PROMPT - 2, sample=False)], [], []
    request, chain = _tree_request(text, wrong)
    yield [request], [0, *(1 + node for node in chain)], chain


def _packed(text: list[int], wrong: list[int]) -> Iterator[Step]:
    yield [_feed(text, 0, _PROMPT - 2, sample=False)], [], []
    request, chain = _tree_request(text, wrong)
    other = PassRequest(_OTHER, 0, tuple(wrong))
    yield [request, other], [0, *(1 + node for node in chain)], chain


def _siblings(text: list[int], count: int) -> Iterator[Step]:
    """The first token behind the prompt, ``count`` times: all at one position, at many places."""
    yield [_feed(text, 0, _PROMPT - 1, sample=False)], [], []
    tokens, parents = (text[_PROMPT],) * count, (-1,) * count
    request = PassRequest(_KEY, _PROMPT - 1, (text[_PROMPT - 1],), tokens, parents)
    yield [request], list(range(1, 1 + count)), []
