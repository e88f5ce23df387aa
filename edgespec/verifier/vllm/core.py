"""vLLM's engine core in this process, stepped by the verifier (``target.StepEngine``).

Its workers run in this process too, or in processes of their own with tensor or pipeline
parallelism. Each step is made for certain sessions, so asynchronous scheduling, which schedules
ahead of the results, is off.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from edgespec.config import VerifierConfig
from edgespec.config.common import SetupError
from edgespec.config.files import temporary_folder
from edgespec.core.ports import TargetLostError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.verifier.vllm.pictures import PictureProcessor, has_processor
from edgespec.verifier.vllm.speculation import (
    TOKENS,
    Speculator,
    describe_speculator,
    draft_bound,
    read_speculation,
)
from edgespec.verifier.vllm.target import Adapter, ExpandedPrompt, StepRequest, StepResult
from edgespec.verifier.vllm.versions import check_install, removed_methods

_LOG = logging.getLogger(__name__)

MAX_DRAFTS: Final = 15
_HERE: Final = "edgespec.verifier.vllm"


class VllmCore:
    """vLLM's engine core with the model in the folder ``model``.

    ``flags`` are vLLM's own flags, which it takes besides ``settings``. Raises ``SetupError`` if
    vLLM refuses a flag or the model.
    """

    def __init__(
        self,
        model: str,
        settings: VerifierConfig,
        flags: Sequence[str] = (),
        adapters: Sequence[Adapter] = (),
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._ids: dict[str, str] = {}
        self._count = 0
        max_drafts = min(MAX_DRAFTS, settings.limits.max_nodes_per_pass)
        config, self.speculator = _make_config(model, settings, flags, len(adapters), max_drafts)
        self.context_length = int(config.model_config.max_model_len)
        self.pictures = None
        """Processor of pictures; None for a model without one, and where pictures are refused."""
        if config.model_config.is_multimodal_model and settings.limits.picture_mib:
            self.pictures = PictureProcessor(config.model_config)
        quantised = config.model_config.quantization
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.number_format = f"{dtype}-{quantised}" if quantised else dtype
        self.max_drafts = max(max_drafts, self.speculator.tokens)
        self._core = _make_engine_core(config, speculates=self.speculator.tokens > 0)
        atexit.register(self.shut_down)
        try:
            block = self.speculator.tokens if self.speculator.blocks else 0
            self._core.collective_rpc("edgespec_install", args=(self.speculator.method, block))
        except Exception as error:  # vLLM has no exception class for this
            self.shut_down()
            raise SetupError(
                f"vLLM's workers cannot use this project's sampling: {error}"
            ) from error
        self._adapters = self._load_adapters(adapters)
        self._scheduler = self._core.scheduler
        self.max_rows = int(self._scheduler.max_num_scheduled_tokens)

    def _load_adapters(self, adapters: Sequence[Adapter]) -> dict[str, Any]:
        from vllm.lora.request import LoRARequest

        requests: dict[str, Any] = {"": None}
        for number, one in enumerate(adapters, 1):
            requests[one.name] = LoRARequest(one.name, number, str(one.folder))
            try:
                self._core.add_lora(requests[one.name])
            except Exception as error:  # vLLM has no exception class for this
                self.shut_down()
                raise SetupError(f"vLLM cannot load the adapter {one.folder}: {error}") from error
        return requests

    @property
    def cache_share(self) -> float:
        return float(self._scheduler.kv_cache_manager.usage)

    def add(
        self,
        key: str,
        text: Sequence[int],
        prompt_length: int,
        sampling: SamplingParams,
        adapter: str = "",
        pictures: ExpandedPrompt | None = None,
    ) -> None:
        from vllm import SamplingParams as VllmParams
        from vllm.v1.engine import EngineCoreRequest

        from edgespec.verifier.vllm.worker import EXTRA, arguments_of

        self._count += 1
        name = str(self._count)
        arguments = arguments_of(prompt_length, sampling, self._eos_token_ids)
        tokens, features = list(text), None
        if pictures is not None:
            tokens, features = [*pictures.tokens, *text[prompt_length:]], list(pictures.features)
            arguments["extra_rows"] = pictures.extra_rows
        params = VllmParams(
            temperature=0.0,
            max_tokens=self.context_length,
            ignore_eos=True,
            detokenize=False,
            extra_args={EXTRA: arguments},
        )
        lora, now = self._adapters[adapter], time.time()
        request = EngineCoreRequest(name, tokens, features, params, None, now, lora, None, None)
        self._core.add_request(*self._core.preprocess_add_request(request))
        self._ids[key] = name  # only now, since a text that vLLM refuses is never dropped

    def step(
        self, wanted: Mapping[str, StepRequest], draft_steps: int = 0
    ) -> Mapping[str, StepResult]:
        names = {self._ids[key]: key for key in wanted}
        self._scheduler.wanted = {self._ids[key]: one for key, one in wanted.items()}
        self._scheduler.draft_steps = draft_steps
        outputs, executed = self._core.step()
        if draft_steps:  # vLLM's own loop fetches proposals here, and it is not used
            self._core.post_step(executed)
        grown = {
            one.request_id: one for group in outputs.values() for one in group.outputs if group
        }
        found: dict[str, StepResult] = {}
        for name, key in names.items():
            request, output = self._scheduler.requests.get(name), grown.get(name)
            if request is None and output is None:
                found[key] = StepResult(0, failure="vLLM has ended the text")
                continue
            computed = 0 if request is None else int(request.num_computed_tokens)
            if output is None:
                found[key] = StepResult(computed)
                continue
            targets, scores, failure = self._scheduler.rows[name]
            if failure and request is not None:
                # Its rows led to logits that are not finite, so no other request may share them as
                # a prefix.
                cache = self._scheduler.kv_cache_manager
                blocks = {block for group in cache.get_block_ids(name) for block in group}
                cache.evict_blocks(blocks)
            proposed = () if request is None else request.spec_token_ids
            guesses = tuple(proposed[: self.speculator.tokens])
            tokens = tuple(output.new_token_ids)
            found[key] = StepResult(
                computed=computed,
                tokens=tokens,
                targets=targets,
                scores=scores,
                failure=failure,
                guesses=guesses,
            )
        return found

    def drop(self, key: str) -> None:
        self._core.abort_requests([self._ids.pop(key)])

    def reset(self) -> None:
        """Empty vLLM's cache after a failed step.

        vLLM counts rows as computed when it has scheduled them, and lets other requests share them.
        So after a failed step its cache may contain rows that were never computed.
        """
        why = "its cache cannot be emptied"
        try:
            self._core.abort_requests(list(self._ids.values()))
            self._ids.clear()
            if self._core.reset_prefix_cache():
                return
        except Exception as error:  # vLLM has no exception class for this
            why = f"{type(error).__name__}: {error}"
        raise TargetLostError(f"vLLM failed in a step and cannot begin anew: {why}")

    def shut_down(self) -> None:
        """End vLLM's workers; a second call does nothing."""
        atexit.unregister(self.shut_down)
        with contextlib.suppress(Exception):  # they may have died already
            self._core.shutdown()


def _make_config(
    model: str, settings: VerifierConfig, flags: Sequence[str], adapters: int, max_drafts: int
) -> tuple[Any, Speculator]:
    """Return vLLM's configuration, and its own speculator."""
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except Exception as error:  # such as packages for CUDA beside torch for CPUs
        raise SetupError(
            f"vLLM cannot be imported: {type(error).__name__}: {error} (on a CPU: pip uninstall"
            " torchvision torchaudio torchcodec)"
        ) from error

    # ``auto`` is float32 on a CPU, as with the native engine, so that texts agree.
    auto = "float32" if current_platform.is_cpu() else "auto"
    limits = settings.limits
    ours = {
        "model": model,
        "dtype": auto if settings.dtype == "auto" else settings.dtype,
        "max_num_seqs": limits.max_sessions + 1,
        # vLLM cannot restrict sharing to some of the requests.
        "enable_prefix_caching": limits.share_prefixes is SharePrefixes.ALL,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "scheduler_cls": f"{_HERE}.scheduler.DraftScheduler",
        "worker_extension_cls": f"{_HERE}.worker.WorkerExtension",
        "spec_method": None,
        "spec_model": None,
        "spec_tokens": None,
    }
    if reads_pictures := settings.limits.picture_mib > 0 and has_processor(model):
        # The processor needs a tokenizer. Its results are kept by session, so vLLM keeps none.
        ours |= {"skip_tokenizer_init": False, "mm_processor_cache_gb": 0}
    if adapters:
        # All adapters may be in one step. The last place stays empty, since vLLM's kernels for CPUs
        # use its adapter for rows without one (vllm-project/vllm pull 48421).
        ours |= {"enable_lora": True, "max_loras": adapters + 1}
    if settings.max_model_len is not None:
        ours["max_model_len"] = settings.max_model_len
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vLLM's flags"))
    try:
        given = parser.parse_args(list(flags))
    except SystemExit:  # argparse has printed the reason
        raise SetupError(f"vLLM rejects the flags {' '.join(flags)}") from None
    speculation = read_speculation(
        given=given.speculative_config,
        method=given.spec_method,
        model=given.spec_model,
        tokens=given.spec_tokens,
        removed=removed_methods(check_install()),
    )
    if reads_pictures and not given.limit_mm_per_prompt:
        ours["limit_mm_per_prompt"] = {"image": limits.max_pictures}
    for name, value in ours.items():  # the model comes first: vLLM looks for its default one
        setattr(given, name, value)

    def create(speculative: Mapping[str, Any]) -> Any:
        given.speculative_config = dict(speculative)
        try:
            return EngineArgs.from_cli_args(given).create_engine_config()
        except Exception as error:  # vLLM has no exception class for this
            raise SetupError(f"vLLM refuses {model}: {error}") from error

    if speculation is None:
        none = {"method": "custom_class", "model": f"{_HERE}.worker.NoProposer", TOKENS: max_drafts}
        config, speculator = create(none), Speculator()
    else:
        for note in speculation.notes:
            _LOG.warning("%s", note)
        # vLLM completes the settings: it may choose the method and the number of tokens itself.
        own = create(speculation.settings).speculative_config
        speculator = describe_speculator(own)
        bound = draft_bound(own, speculator.tokens, max_drafts)
        config = create({**speculation.settings, TOKENS: bound})
        draft = config.speculative_config.draft_model_config
        if draft is not None and hasattr(draft.hf_config, "num_lookahead_tokens"):
            # The number of heads that are built and loaded, which the bound has overwritten.
            draft.hf_config.num_lookahead_tokens = speculator.tokens
    refuse_recurrent(model, config.model_config)
    return config, speculator


def refuse_recurrent(model: str, config: Any) -> None:
    """Raise ``SetupError`` for a model with recurrent layers.

    Their state cannot be rolled back behind rejected drafts: vLLM's own speculation made Mamba2
    wrong from the second token on.
    """
    if config.has_inner_state or config.is_hybrid:
        raise SetupError(
            f"{model}: {', '.join(config.architectures)} has recurrent layers, and no test has"
            " shown their texts exact with drafts on vLLM; use a model without recurrent layers"
        )


def _make_engine_core(config: Any, *, speculates: bool) -> Any:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import WorkerProc

    from edgespec.verifier.vllm.worker import run_worker

    # A serving process has threads, and a fork of it may hang.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    worker_main = WorkerProc.worker_main
    with temporary_folder() as folder:
        reason = folder / "reason"
        WorkerProc.worker_main = staticmethod(partial(run_worker, str(reason)))
        try:
            return EngineCore(config, Executor.get_class(config), log_stats=False)
        except Exception as error:  # a model, a driver or a lack of memory may raise anything
            why = reason.read_text() if reason.is_file() else f"{type(error).__name__}: {error}"
            draft = config.speculative_config.model
            beside = hint = ""
            if speculates and draft:
                beside = f" with the speculator {draft} beside it"
                hint = (
                    "; both models and the KV cache have to fit into what"
                    " --gpu-memory-utilization or --kv-cache-memory-bytes allows"
                )
            raise SetupError(
                f"vLLM cannot load {config.model_config.model}{beside}: {why}{hint}"
            ) from error
        finally:
            WorkerProc.worker_main = staticmethod(worker_main)
