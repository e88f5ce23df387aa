"""One rank's share of a model: its weights, and the exchanges that make the layers whole.

Theory of operation (Shoeybi et al. 2019, Megatron-LM, section 3). Query, key, value, gate and up
projections are cut by columns: a rank computes some heads and some of the inner width. Output and
down projections are cut by rows: every rank has a partial sum, and an exchange adds them. Embedding
and vocabulary projection are cut by tokens. transformers knows the plan of each family and reads
only a rank's share of every tensor; its forward functions, which work on distributed tensors, are
then replaced by plain layers with hooks, so that all that is done to plain linear layers (canonical
mode's row tiles) holds for a share as well.

Sums. A library's all-reduce adds in an order that may depend on the size of the tensor. In
canonical mode (``ordered``) the ranks exchange their partial results as they are and each adds them
in the order of the ranks, so a row's bits depend on the row alone.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

COLUMNS = ("colwise",)
ROWS = ("rowwise", "rowwise_rep")
TOKENS = ("embedding_rowwise",)
VOCABULARY = ("colwise_gather_output", "colwise_rep")
UNCUT = ("replicated_with_grad_allreduce", "replicate")
LAYER_STYLES = (*COLUMNS, *ROWS, *TOKENS, *UNCUT)
"""Of transformers' plans, below the vocabulary projection."""


class TensorParallelError(ValueError):
    """The model or the machine cannot be shared among so many ranks; the message says why."""


@dataclass(slots=True)
class Share:
    """One rank of ``world_size``, in the process group of its process."""

    rank: int
    world_size: int
    wait_for_all: Callable[[], None]
    """Called when the weights are loaded; returns when all ranks have theirs."""
    ordered: bool = False
    """Add partial sums in the order of the ranks, whatever the shape."""
    collectives: int = 0
    """Exchanges begun so far; the same on every rank that is in step."""

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``partial``, equal on all of them; may reuse its memory."""
        self.collectives += 1
        if not self.ordered:
            partial = partial.contiguous()
            distributed.all_reduce(partial)
            return partial
        parts = self._gather(partial)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def join(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """[.., width]: all ranks' columns side by side. All but the last ranks hold
        ceil(width / world_size) of them, the last ones what is left."""
        self.collectives += 1
        whole = -(-width // self.world_size)
        padded = functional.pad(part, (0, whole - part.shape[-1]))
        return torch.cat(self._gather(padded), dim=-1)[..., :width]

    def agreed(self, yes: bool) -> bool:
        """Whether all ranks say yes."""
        self.collectives += 1
        votes: list[Any] = [None] * self.world_size
        distributed.all_gather_object(votes, yes)
        return all(votes)

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        distributed.all_gather(parts, part)
        return parts


def check_shareable(config: Any, world_size: int) -> None:
    """Raises ``TensorParallelError`` naming the number that ``world_size`` does not divide, what of
    the family's plan is not supported, or the library that is missing."""
    if world_size == 1:
        return
    _check_plan(config.model_type, config.base_model_tp_plan)
    heads = config.num_attention_heads
    counted = {
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "attention heads": heads,
        "columns of intermediate_size": config.intermediate_size,
    }
    for name, count in counted.items():
        if count % world_size:
            raise TensorParallelError(
                f"the model has {count} {name}, which tensor_parallel.size {world_size} does not"
                " divide"
            )
    if importlib.util.find_spec("accelerate") is None:
        raise TensorParallelError(
            "tensor parallel needs accelerate, which is not installed: pip install 'edgespec[tp]'"
        )


def _check_plan(model_type: str, plan: dict[str, str] | None) -> None:
    """Experts, and layers of which each rank would see all heads, are refused."""
    others = sorted(set((plan or {}).values()) - set(LAYER_STYLES))
    if not plan or others:
        styles = f"a plan with {', '.join(others)}" if others else "no plan"
        raise TensorParallelError(
            f"model type {model_type!r} has {styles} for tensor parallel; supported are"
            f" {', '.join(LAYER_STYLES)}"
        )


def loading_options(share: Share) -> dict[str, Any]:
    """Arguments for transformers' ``from_pretrained``, which then reads this rank's share alone."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=share.world_size, tp_plan="auto")}


def share_layers(model: Any, share: Share) -> None:
    """Turn the distributed layers of ``model``, as transformers has loaded it, into plain ones with
    exchanges. Raises ``TensorParallelError`` for layers that cannot be turned."""
    plan = dict(model.tp_plan or {})
    _check_plan(
        model.config.model_type,
        {name: style for name, style in plan.items() if style not in VOCABULARY},
    )
    _make_local(model)
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None:
            continue
        if style not in (*TOKENS, *UNCUT) and type(module) is not torch.nn.Linear:
            raise TensorParallelError(
                f"{name} is a {type(module).__name__}, but only plain linear layers can be shared:"
                " tensor parallel and quantised weights do not go together"
            )
        module.__dict__.pop("forward", None)  # transformers' own exchange
        if style in ROWS:
            _add_up(module, share)
        elif style in VOCABULARY:
            _join_columns(module, share)
        elif style in TOKENS:
            _look_up_and_add(module, share)


def _make_local(model: torch.nn.Module) -> None:
    """Replace every distributed parameter by this rank's part of it; tied ones stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not hasattr(parameter, "to_local"):
                continue
            if id(parameter) not in made:
                local = parameter.to_local().detach()
                made[id(parameter)] = torch.nn.Parameter(local, requires_grad=False)
            module._parameters[name] = made[id(parameter)]


def _add_up(module: Any, share: Share) -> None:
    """A bias is added once, on rank 0."""
    if module.bias is not None and share.rank > 0:
        module.bias = None
    module.register_forward_hook(lambda _module, _inputs, out: share.add(out))


def _join_columns(module: Any, share: Share) -> None:
    width = module.out_features
    module.register_forward_hook(lambda _module, _inputs, out: share.join(out, width))


def _look_up_and_add(module: Any, share: Share) -> None:
    """A token of another rank's is looked up at this rank's first row and then zeroed."""
    first = share.rank * -(-module.num_embeddings // share.world_size)
    count = module.weight.shape[0]
    module.padding_idx = None
    elsewhere: list[torch.Tensor] = []

    def before(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        own = inputs[0] - first
        elsewhere[:] = [(own < 0) | (own >= count)]
        return (own.masked_fill(elsewhere[0], 0),)

    def behind(_module: torch.nn.Module, _inputs: Any, rows: torch.Tensor) -> torch.Tensor:
        return share.add(rows.masked_fill(elsewhere.pop().unsqueeze(-1), 0))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(behind)
