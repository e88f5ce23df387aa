"""Small drafts that begin as a part of a larger model: some of its layers, and the rows of its
tables that stand for frequent ids.

A draft's step reads each of its weights once, so its time falls with their number. Of a model with
a large vocabulary and few layers, most weights are in the table (FR-Spec, arXiv 2502.14856, keeps a
quarter of the head). ``models.folders.KeptIds`` describes the rows that are kept.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from edgespec.models.folders import KEPT_IDS, KeptIds
from edgespec.training.kept_rows import find_rows, id_count
from edgespec.training.texts import (
    LOGITS_AT_ONCE,
    Text,
    head_logits,
    hidden_rows,
    pad_texts,
    row_parts,
)

_WEIGHT_OF_PREDICTED: Final = 2
"""Times that a token to be predicted counts. A token of a prompt is only read."""


_PER_LAYER: Final = ("layer_types", "no_rope_layers")
"""Lists of a configuration with an entry for each layer."""


_SOFTER: Final = (1.0, 0.5, 0.25, 0.125)


def select_frequent_ids(
    texts: Iterable[tuple[Sequence[int], int]], size: int, count: int, always: Collection[int]
) -> KeptIds:
    """Return the ``count`` most frequent ids of a target with ``size`` ids.

    ``texts``: token ids of each text, and the place from which on they are to be predicted; those
    count twice.
    ``always``: ids to keep in any case, such as the ends of a text. So is id 0, the stand-in for
    all others.

    Ids that are equally frequent, or in no text, are taken from the lowest one on: a BPE vocabulary
    has frequent ones first. Raises ``ValueError`` for a count outside [1, size]."""
    if not len(kept := {0, *always}) <= count <= size:
        raise ValueError(
            f"vocabulary is {count}, but must be in [{len(kept)}, {size}], the ids of the target"
        )
    found = Counter[int]()
    for tokens, start in texts:
        found.update(tokens)
        for _ in range(_WEIGHT_OF_PREDICTED - 1):
            found.update(tokens[start:])
    order = sorted(range(size), key=lambda token: (token not in kept, -found[token], token))
    return KeptIds(size, tuple(sorted(order[:count])))


def cut_model(model: Any, layers: Sequence[int], kept: KeptIds | None) -> Any:
    """Return a new model of only some of the ``layers`` of ``model`` and of its tables' rows.

    ``layers``: numbers of the layers, in the order in which they are applied; none means all.
    ``kept``: the ids to keep, or None for all.

    Raises ``ValueError`` for a layer that does not exist or is given twice."""
    config, count = copy.deepcopy(model.config), int(model.config.num_hidden_layers)
    chosen = list(layers) or list(range(count))
    if not all(0 <= one < count for one in chosen) or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"layers are {','.join(map(str, chosen))}, but must be different numbers in"
            f" [0, {count - 1}]"
        )
    known = vars(config)
    known["num_hidden_layers"] = len(chosen)
    for name in _PER_LAYER:
        if kinds := known.get(name):
            known[name] = [kinds[one] for one in chosen]
    size = int(model.config.vocab_size)
    if kept is not None:
        known |= {KEPT_IDS: {"size": kept.size, "ids": list(kept.ids)}, "pad_token_id": None}
        known["vocab_size"] = len(kept.ids)
    weights, rows = model.state_dict(), torch.tensor(kept.ids if kept else (), dtype=torch.long)
    small = AutoModelForCausalLM.from_config(config).to(model.device, model.dtype)
    own = {}
    for name in small.state_dict():
        before, middle, after = name.partition(".layers.")
        number, _, rest = after.partition(".")
        source = f"{before}{middle}{chosen[int(number)]}.{rest}" if middle else name
        weight = weights[source]
        has_ids = kept is not None and weight.ndim == 2 and len(weight) == size and not middle
        own[name] = weight[rows.to(weight.device)] if has_ids else weight
    small.load_state_dict(own)
    return small.eval()


@torch.inference_mode()
def soften(model: Any, texts: Sequence[Text]) -> float:
    """Scale the logits of a new part so that it predicts ``texts`` best, and return the factor.

    Layers that follow others than before give far too certain logits, and many steps would only
    undo that: the first two of SmolLM2's 30 layers begin with a loss of 18.4 nats a token, and with
    7.8 at a quarter of their logits. The factor, one of ``_SOFTER``, goes into the last norm."""
    losses, table = dict.fromkeys(_SOFTER, 0.0), find_rows(model)
    for text in texts:
        tokens, places = pad_texts([text], model.device)
        output, rows = hidden_rows(model, tokens, places)
        after = tokens.flatten()[places + 1]
        for part in row_parts(len(rows), id_count(model), LOGITS_AT_ONCE):
            logits = head_logits(model, output, rows[part]).float()
            own = after[part] if table is None else table.of_ids[after[part]]
            for factor in losses:
                loss = torch.nn.functional.cross_entropy(logits * factor, own, reduction="sum")
                losses[factor] += float(loss)
    best = min(_SOFTER, key=lambda factor: losses[factor])
    offset = 1.0 if str(model.config.model_type).startswith("gemma") else 0.0
    weight = model.base_model.norm.weight
    weight.copy_((weight + offset) * best - offset)
    return best
