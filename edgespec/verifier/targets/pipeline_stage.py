"""One stage's layers of a model, and the hidden states that come in and go out.

Theory of operation. The layers lie on ``world_size`` stages, one behind another; the first also
embeds tokens, the last norms and projects. A stage's model is the family's own; what belongs to
other stages is taken out before any tensor is read. A module that waits for hidden states stands
where the embedding was, and one that sends them on where the norm was, and a pass is the library's
own forward function.

Rank 0, which serves, is the *last* stage and rank r stage r - 1. So logits never travel, and a pass
that rank 0 has completed was completed by all. Hidden states travel in the order of the passes,
each no sooner usable than ``delay_s`` after it was sent, whatever its receiver did meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

LOAD_WITHIN_S = 3600.0
"""For weights on slow disks. Stages that end are noticed at once."""


class PipelineError(ValueError):
    """The model or an option does not go with layers over several stages; the message says why."""


@dataclass(slots=True)
class StageShare:
    """One stage of ``world_size``, in the process group of its process."""

    rank: int
    world_size: int
    join: Callable[[], None]
    """Called when the weights are loaded. It returns when all stages have theirs."""
    delay_s: float = 0.0
    """Added to each link, one way, for trials. Times are of this host's monotonic clock."""
    received: bool = False
    """The hidden states of the last pass have come."""

    @property
    def stage(self) -> int:
        return (self.rank - 1) % self.world_size

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.rank == 0

    def layers(self, layer_count: int) -> range:
        """Which of a model's layers are this stage's. The last stage, which has the projection, is
        the last to get one more."""
        each, more = divmod(layer_count, self.world_size)
        first = self.stage * each + min(self.stage, more)
        return range(first, first + each + (self.stage < more))

    def agreed(self, yes: bool) -> bool:
        """Whether all stages say yes."""
        votes: list[Any] = [None] * self.world_size
        distributed.all_gather_object(votes, yes)
        return all(votes)

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[1, rows, width] from the stage before, when ``delay_s`` has passed since they left."""
        source = self.rank - 1 if self.rank > 0 else self.world_size - 1
        sent_s = torch.zeros(1, dtype=torch.float64)
        hidden = torch.empty((1, rows, width), dtype=dtype)
        distributed.recv(sent_s, source)
        distributed.recv(hidden, source)
        self.received = True
        if self.delay_s > 0.0:
            time.sleep(max(0.0, float(sent_s) + self.delay_s - time.monotonic()))
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Hand [1, rows, width] to the stage behind."""
        goal = (self.rank + 1) % self.world_size
        distributed.send(torch.tensor([time.monotonic()], dtype=torch.float64), goal)
        distributed.send(hidden.contiguous(), goal)


def join_stages(rank: int, stages: int, port: int, listener: int = -1) -> None:
    """Make this process a rank of torch's default process group. Rank 0 hands over the socket that
    it listens on, on the loopback interface, so that nobody beyond this host can reach it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=LOAD_WITHIN_S)
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        port,
        stages,
        rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=None if listener < 0 else listener,
    )
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=stages, timeout=limit)


def leave_stages() -> None:
    distributed.destroy_process_group()


class _Elsewhere(torch.nn.Module):
    """In the place of what another stage holds."""

    def forward(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return states


class _Arrival(torch.nn.Module):
    """In the place of the embedding: tokens in, the hidden states of their rows out."""

    def __init__(self, share: StageShare, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._share, self._width, self._dtype = share, width, dtype

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._share.receive(tokens.shape[-1], self._width, self._dtype)


class _Departure(torch.nn.Module):
    """In the place of the norm, behind the last layer."""

    def __init__(self, share: StageShare) -> None:
        super().__init__()
        self._share = share

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self._share.send(hidden)
        return hidden


def check_stageable(config: Any, stages: int) -> None:
    """Raises ``PipelineError`` where a stage would have no layer."""
    if stages > config.num_hidden_layers:
        raise PipelineError(
            f"pipeline.stages is {stages}, but the model has {config.num_hidden_layers} layers"
        )


def stage_class(config: Any, share: StageShare) -> Any:
    """A class like the family's own whose ``from_pretrained`` reads this stage's tensors alone, and
    takes those of the others for known."""
    family: Any = AutoModelForCausalLM._model_mapping[type(config)]
    layers = share.layers(config.num_hidden_layers)

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        family.__init__(self, *arguments, **options)
        _take_out(self, share)

    assert layers
    known = [*(family._keys_to_ignore_on_load_unexpected or ()), *_of_others(config, share)]
    names = {"__init__": init, "_keys_to_ignore_on_load_unexpected": known}
    # Under the family's name: transformers looks up by it how a checkpoint's tensors are read.
    return type(family.__name__, (family,), names)


def join_stage(model: Any, share: StageShare) -> None:
    """Connect ``model``, whose weights are loaded, with the stages before and behind."""
    base, config = model.model, model.config
    if not share.is_first:
        base.embed_tokens = _Arrival(share, config.hidden_size, model.dtype)
        if hasattr(base, "embedding_multiplier"):
            base.embedding_multiplier = 1.0  # Granite's: the first stage has multiplied
    if not share.is_last:
        base.norm = _Departure(share)
        model.forward = partial(_marks, model)
    layers = share.layers(config.num_hidden_layers)
    for layer in base.layers[layers.start : layers.stop]:
        for module in layer.modules():
            if isinstance(number := getattr(module, "layer_idx", None), int):
                module.layer_idx = number - layers.start  # its place in this stage's cache


def _marks(model: Any, *, logits_to_keep: torch.Tensor, **arguments: Any) -> CausalLMOutputWithPast:
    """A pass of a stage without projection. In the place of logits stands the largest number of
    each row's hidden states, as wide as logits without their memory: for the self-test."""
    hidden = model.model(**arguments).last_hidden_state[:, logits_to_keep]
    marks = hidden.amax(-1, keepdim=True).expand(-1, -1, model.config.vocab_size)
    return CausalLMOutputWithPast(logits=marks)


def _take_out(model: Any, share: StageShare) -> None:
    base, layers = model.model, share.layers(model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    if not (share.is_first or (share.is_last and tied)):
        base.embed_tokens = _Elsewhere()
    for number in range(model.config.num_hidden_layers):
        if number not in layers:
            base.layers[number] = _Elsewhere()
    if not share.is_last:
        base.norm = model.lm_head = _Elsewhere()
        model.all_tied_weights_keys = {}


def _of_others(config: Any, share: StageShare) -> list[str]:
    layers = share.layers(config.num_hidden_layers)
    others = [str(number) for number in range(config.num_hidden_layers) if number not in layers]
    patterns = [rf"^model\.layers\.({'|'.join(others)})\."] if others else []
    if not (share.is_first or (share.is_last and config.tie_word_embeddings)):
        patterns.append(r"^model\.embed_tokens\.")
    if not share.is_last:
        patterns += [r"^model\.norm\.", r"^lm_head\."]
    return patterns
