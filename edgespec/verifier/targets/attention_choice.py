"""Which attention backend a loaded model gets in plain mode; canonical mode brings its own."""

from __future__ import annotations

import logging

import torch

from edgespec.sampling.torch_device_copies import current_device
from edgespec.verifier.targets.attention_backend import AttentionBackend, LayerAttention
from edgespec.verifier.targets.backend_self_test import HeadShape, disagreement, random_sinks
from edgespec.verifier.targets.grouped_attention import GroupedAttention
from edgespec.verifier.targets.loading import LoadedModel
from edgespec.verifier.targets.paged_attention import PagedAttention

logger = logging.getLogger(__name__)


def choose_backend(loaded: LoadedModel) -> AttentionBackend:
    """The quickest backend that works for ``loaded`` on its device: on CUDA the paged kernel where
    Triton is installed and agrees with the reference, else groups."""
    if loaded.device.type != "cuda":
        return GroupedAttention()
    shape = head_shape(loaded)
    try:
        paged = PagedAttention(shape.heads, shape.kv_heads, loaded.device)
        with current_device(loaded.device):
            why_not = disagreement(
                paged, shape, tried_layers(shape, loaded.device), loaded.dtype, loaded.device
            )
    except Exception as error:  # a kernel that does not compile may raise anything
        why_not = f"{type(error).__name__}: {error}"
    else:
        if not why_not:
            return paged
    logger.warning("attention runs without the paged kernel, so slower: %s", why_not)
    return GroupedAttention()


def tried_layers(shape: HeadShape, device: torch.device) -> tuple[LayerAttention, LayerAttention]:
    """What the start-up tests ask: a plain layer, and one with everything a layer may have."""
    sinks = random_sinks(shape, device)
    return LayerAttention(0.125), LayerAttention(0.125, 24, 20.0, sinks)


def head_shape(loaded: LoadedModel) -> HeadShape:
    """The heads of the model's attention, of this rank."""
    config = loaded.model.config
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return HeadShape(heads // loaded.ranks, loaded.key_width // int(head_dim), int(head_dim))
