"""Threads of a pass on a CPU, in canonical mode.

Theory of operation. torch splits work among threads by size, and a piece that does not fill a
vector is computed by another function, to the last bit. So in canonical mode torch has one thread
for everything but two kinds of work, which take nearly all of the time:

* products with packed weights, whose bits were compared at this number of threads
  (``row_tiles.agreeing_sizes``);
* what falls into parts that one thread computes whole, so that it does not matter which threads
  there are: the attention groups of a prompt, and the rows of quantised products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")

_count = 1


def set_count(count: int) -> None:
    """Set how many threads a pass may have, for this process, as torch's own count is."""
    global _count
    _count = count


def count() -> int:
    """Return how many threads a pass may have."""
    return _count


def in_threads(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return ``product(rows)``, computed with all threads; the caller has set torch to one."""
    if _count == 1:
        return product(rows)
    torch.set_num_threads(_count)  # of this thread only; it takes 0.3 us
    try:
        return product(rows)
    finally:
        torch.set_num_threads(1)


def map_all(work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Return ``work`` of each of ``parts``, each computed whole by one thread.

    Raises what the first failed part raised, after all have ended."""
    if _count == 1 or len(parts) == 1:
        return [work(part) for part in parts]
    futures = [_make_pool(_count).submit(_on_one_thread, work, part) for part in parts]
    wait(futures)
    return [future.result() for future in futures]


def _on_one_thread(work: Callable[[Part], Result], part: Part) -> Result:
    # Both settings belong to the thread.
    torch.set_num_threads(1)
    with torch.inference_mode():
        return work(part)


@cache
def _make_pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="pass")
