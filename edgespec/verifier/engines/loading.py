"""From configuration to a target on vLLM, tested before it serves anybody."""

from __future__ import annotations

import os

from edgespec.config import VerifierConfig
from edgespec.config.setup_error import SetupError
from edgespec.core.ports import ModelInfo
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.models.folders import Role, model_info, resolve_model, weights_fingerprint
from edgespec.verifier.engines.adapters import served_adapters, split_adapters
from edgespec.verifier.engines.vllm.flags import refuse_our_flags
from edgespec.verifier.engines.vllm.install import check_install
from edgespec.verifier.engines.vllm.self_test import self_test
from edgespec.verifier.engines.vllm.target import VllmTarget


def vllm_target(config: VerifierConfig, name: str) -> VllmTarget:
    """The model of ``config`` on vLLM. Raises ``SetupError`` when vLLM is not there or of another
    version, cannot load the model, or does not say what it should in the self-test; and
    ``ValueError`` naming the file or the flag."""
    version = check_install()
    refuse_our_flags(config.engine_flags)
    adapters, flags = split_adapters(config.engine_flags, name)
    folder = resolve_model(config.model, Role.TARGET)
    info = model_info(folder)
    weights = weights_fingerprint(folder, info.vocabulary)
    _quiet(config.log_level)
    from edgespec.verifier.engines.vllm.core import MAX_DRAFTS, VllmCore, VllmOptions

    core = VllmCore(
        VllmOptions(
            str(folder),
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_sessions=config.limits.max_sessions,
            max_drafts=min(MAX_DRAFTS, config.limits.max_nodes_per_pass),
            share_prefixes=config.limits.share_prefixes is SharePrefixes.ALL,
            flags=flags,
            adapters=adapters,
        )
    )
    served = ModelInfo(
        name,
        info.vocabulary,
        info.vocabulary_size,
        core.context_length,
        info.eos_token_ids,
        f"{weights}-{core.number_format}",
    )
    mode = f"vLLM {version}, {core.number_format} (texts may differ where two tokens nearly tie)"
    target = VllmTarget(
        core,
        served,
        config.limits.max_sessions,
        mode=mode,
        max_nodes=core.max_drafts,
        max_rows=core.max_rows,
        adapters=served_adapters(served, adapters),
    )
    try:
        failures = self_test(target)
    except Exception as error:  # whatever a first step runs out of
        core.shut_down()
        raise SetupError(
            f"vLLM {version} fails in the self-test on {folder}: {type(error).__name__}: {error}"
        ) from error
    if failures:
        core.shut_down()
        raise SetupError(
            f"vLLM {version} does not pass the self-test on {folder}, so it would serve wrong"
            f" texts: {'; '.join(failures)}"
        )
    return target


def _quiet(log_level: str) -> None:
    """What vLLM reads once, when it is imported. Standard output is for the ready line, and nobody
    is told over a network that a verifier has started."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level.upper())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
