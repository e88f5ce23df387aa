"""Table rows of a loaded draft that has only a part of its target's ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from edgespec.models.folders import KEPT_IDS


class Rows(NamedTuple):
    """The table rows of a draft with a part of its target's ids, on the draft's device."""

    ids: torch.Tensor
    """Id of each row."""
    of_ids: torch.Tensor
    """Row of each of the target's ids; 0, the stand-in, for an id that is not kept."""

    def scatter(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [..., rows] as scores of all ids. An id that is not kept has -inf."""
        shape = (*scores.shape[:-1], len(self.of_ids))
        return scores.new_full(shape, -torch.inf).index_copy_(-1, self.ids, scores)


def find_rows(model: Any) -> Rows | None:
    """Return the rows of a loaded ``model``, or None if it has a row for each id."""
    kept = vars(model.config).get(KEPT_IDS)
    if kept is None:
        return None
    ids = torch.tensor(kept["ids"])
    of_ids = torch.zeros(kept["size"], dtype=torch.long)
    of_ids[ids] = torch.arange(len(ids))
    return Rows(ids.to(model.device), of_ids.to(model.device))


def id_count(model: Any) -> int:
    """Return the number of ids that a loaded ``model`` may be fed."""
    kept = vars(model.config).get(KEPT_IDS)
    return int(model.config.vocab_size if kept is None else kept["size"])
