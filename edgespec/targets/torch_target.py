"""The target model on torch and transformers: one packed forward pass for all sessions.

Life of a pass: check every request -> reserve blocks, all or nothing -> lay the rows out
(``pass_plan.py``) -> one call of the model, whose attention reads and writes the pool
(``packed_attention.py``) -> choose a token for every sampled row (``sampler.py``).

Canonical mode makes the logits of a position the same to the last bit under every schedule: see
``pass_plan.py`` for how. It costs up to twice the time of a single-token pass, is the default on
CPUs, is checked on the loaded model at start-up and is left, with a warning, where it fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from edgespec.core.sampling import SamplingParams
from edgespec.ports import CapacityError, ModelInfo, PassRequest, PassResult
from edgespec.targets.kv_pool import KvPool
from edgespec.targets.loading import LoadedModel, load_model
from edgespec.targets.pass_plan import PassPlan, node_depths, plan_pass
from edgespec.targets.sampler import SampleRow, choose_tokens
from edgespec.targets.self_test import SelfTest, run_self_test

logger = logging.getLogger(__name__)


class TorchTarget:
    """``ports.TargetModel`` for Llama, Mistral, Qwen2 and Qwen3 checkpoints.

    ``path`` is a folder with safetensors or a hub id; ``name`` and ``vocabulary`` (a fingerprint)
    are passed on in ``info``. ``max_cached_tokens`` bounds the key-value pool over all sessions.
    ``canonical`` None means on for CPUs and off for GPUs. Canonical mode sets torch to one
    intra-op thread, *for the whole process*, since thread counts change how sums associate; in
    plain mode ``model_threads`` sets the count when given.

    Raises ``UnsupportedModelError`` for a model it cannot serve, ``ValueError`` for a bad option.
    """

    def __init__(
        self,
        path: str,
        *,
        name: str,
        vocabulary: str,
        dtype: str = "auto",
        device: str = "auto",
        max_cached_tokens: int = 65_536,
        max_sessions: int = 64,
        context_length: int | None = None,
        canonical: bool | None = None,
        model_threads: int | None = None,
    ) -> None:
        if max_sessions < 1:
            raise ValueError(f"max_sessions is {max_sessions}, but must be >= 1")
        loaded = load_model(path, dtype=dtype, device=device, context_length=context_length)
        self._model = loaded.model
        self._max_sessions = max_sessions
        self._info = ModelInfo(
            name, vocabulary, loaded.vocabulary_size, loaded.context_length, loaded.eos_token_ids
        )
        self._pool = _pool(loaded, max_cached_tokens)
        self.canonical = loaded.device.type == "cpu" if canonical is None else canonical
        if self.canonical:
            self._enter_canonical_mode()
        if model_threads is not None and not self.canonical:
            torch.set_num_threads(model_threads)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def free_tokens(self) -> int:
        """Room in the key-value pool, in tokens (whole blocks)."""
        return self._pool.free_tokens

    def open(self, key: str, prompt_length: int, sampling: SamplingParams) -> None:
        if self._pool.session_count >= self._max_sessions:
            raise CapacityError(
                f"{self._pool.session_count} sessions are open, limit max_sessions "
                f"{self._max_sessions}"
            )
        if not 0 < prompt_length <= self._info.context_length:
            raise CapacityError(
                f"prompt of {prompt_length} tokens, limit 1 to {self._info.context_length} "
                "(context_length)"
            )
        self._pool.open(key, prompt_length, sampling)

    def fits(self, batch: Sequence[PassRequest]) -> bool:
        """Whether ``forward(batch)`` finds room; does not check the requests otherwise."""
        return self._pool.missing_tokens(batch) == 0

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        """As in the port. Raises ``CapacityError`` or ``ValueError`` before anything changes, so
        the same sessions can go on with another batch."""
        if not batch:
            return []
        self._check(batch)
        self._pool.reserve(batch)
        logits = self._run(batch)
        for request in batch:
            self._pool.commit(request)
        rows = [row for request in batch if request.sample for row in self._sample_rows(request)]
        with torch.inference_mode():
            chosen = iter(choose_tokens(logits, rows))
        return [
            PassResult(
                request.key,
                tuple(next(chosen) for _ in range(1 + len(request.tokens)))
                if request.sample
                else (),
            )
            for request in batch
        ]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        with torch.inference_mode():
            self._pool.keep(key, nodes)

    def close(self, key: str) -> None:
        self._pool.close(key)

    def self_test(self) -> SelfTest:
        """Check that logits do not depend on the schedule. A few small passes; between sessions."""
        return run_self_test(self._pool, self._run, self._info.vocabulary_size)

    def _enter_canonical_mode(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        result = self.self_test()
        if not result.ok:
            logger.warning("canonical mode is off, self-test failed: %s", result.message)
            torch.set_num_threads(threads)
            self.canonical = False

    def _run(self, batch: Sequence[PassRequest]) -> torch.Tensor:
        """Logits [sampled rows, vocabulary] of a reserved batch."""
        with torch.inference_mode():
            plan = plan_pass(self._pool, batch, canonical=self.canonical)
            return _call_model(self._model, plan, self._info.vocabulary_size)

    def _sample_rows(self, request: PassRequest) -> list[SampleRow]:
        sequence = self._pool.sequence(request.key)
        params = sequence.sampling
        positions = [sequence.length, *(sequence.length + d for d in node_depths(request.parents))]
        if not params.penalised:
            return [SampleRow(params, position) for position in positions]
        prompt = sequence.tokens[: sequence.prompt_length]
        outputs = [sequence.tokens[sequence.prompt_length :]]
        for token, parent in zip(request.tokens, request.parents, strict=True):
            outputs.append([*outputs[1 + parent], token])
        return [
            SampleRow(params, position, prompt, output)
            for position, output in zip(positions, outputs, strict=True)
        ]

    def _check(self, batch: Sequence[PassRequest]) -> None:
        if len({request.key for request in batch}) != len(batch):
            raise ValueError("two requests of one pass have the same key")
        for request in batch:
            self._check_request(request)

    def _check_request(self, request: PassRequest) -> None:
        key, parents = request.key, request.parents
        cached = self._pool.sequence(key).length
        if not 0 <= request.cache_length <= cached:
            raise ValueError(
                f"{key!r}: cache_length is {request.cache_length}, but {cached} tokens are cached"
            )
        if not request.feed:
            raise ValueError(f"{key!r}: feed is empty, but must hold at least one token")
        if len(request.tokens) != len(parents) or (request.tokens and not request.sample):
            raise ValueError(f"{key!r}: nodes need parents, and sample=True")
        if any(not -1 <= parent < node for node, parent in enumerate(parents)):
            raise ValueError(f"{key!r}: parents {parents} must come before their nodes")
        low, high = min(request.feed + request.tokens), max(request.feed + request.tokens)
        if low < 0 or high >= self._info.vocabulary_size:
            raise ValueError(
                f"{key!r}: token ids {low} to {high}, limit 0 to {self._info.vocabulary_size - 1}"
            )
        length = request.cache_length + len(request.feed) + max(node_depths(parents), default=0)
        if length > self._info.context_length:
            raise CapacityError(
                f"{key!r}: {length} tokens, limit context_length {self._info.context_length}"
            )


def _pool(loaded: LoadedModel, max_cached_tokens: int) -> KvPool:
    return KvPool(
        loaded.layer_count, loaded.key_width, max_cached_tokens, loaded.dtype, loaded.device
    )


def _call_model(model: Any, plan: PassPlan, vocabulary_size: int) -> torch.Tensor:
    arguments = {
        "input_ids": plan.tokens,
        "position_ids": plan.positions,
        "use_cache": False,
        "edgespec_pass": plan,
    }
    if plan.sampled_count == 0:  # a pure prefill: spare the vocabulary projection
        model.model(**arguments)
        return torch.empty((0, vocabulary_size), device=plan.tokens.device)
    logits: torch.Tensor = model(**arguments, logits_to_keep=plan.sampled_rows).logits
    return logits[0, : plan.sampled_count]
