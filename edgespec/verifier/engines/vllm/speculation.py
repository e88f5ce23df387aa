"""vLLM's own speculator, as the flags behind ``--`` name it: which of its methods go together with
drafts of devices, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from edgespec.config.common import SetupError

FLAG: Final = "--speculative-config"
TOKENS: Final = "num_speculative_tokens"
METHODS: Final = ("ngram", "draft_model", "eagle", "eagle3", "mtp")

_OTHER_RUNNER: Final = "only vLLM's other model runner has it, whose drafts cannot be replaced here"
REFUSED: Final = {
    "suffix": "it cannot propose another number in each step, and it forgets the answers of"
    " sessions that a step leaves out",
    "medusa": "it cannot propose another number in each step",
    "mlp_speculator": "vLLM's model runner that drafts are put into does not have it",
    "dspark": _OTHER_RUNNER,
    "dflash": "it proposes a whole block in one pass, which would bound the drafts of devices",
    "ngram_gpu": "its proposals stay on the GPU; ngram makes the same",
    "extract_hidden_states": "it proposes nothing",
    "custom_class": "its proposals cannot be told apart from the engine's own",
}

# Settings that would decide what the verifier decides, or judge drafts by another law.
_OURS: Final = {
    "num_speculative_tokens_per_batch_size": "the verifier decides in each step how many",
    "parallel_drafting": "all tokens of one pass would bound the drafts of devices",
    "rejection_sample_method": "drafts are judged by the verifier's sampling law",
    "synthetic_acceptance_rates": "drafts are judged by the verifier's sampling law",
    "synthetic_acceptance_length": "drafts are judged by the verifier's sampling law",
    "enable_adaptive_verification": "drafts are judged by the verifier's sampling law",
    "draft_sample_method": "proposals follow the verifier's sampling law and its noise",
}


def read_speculation(
    given: object, method: str | None, model: str | None, tokens: int | None
) -> dict[str, Any] | None:
    """vLLM's settings of its speculator: those of ``--speculative-config`` and the values of
    ``--spec-method``, ``--spec-model`` and ``--spec-tokens``. None: none of them is there. Raises
    ``SetupError`` naming what is missing or does not fit."""
    if not isinstance(given, Mapping | None):
        raise SetupError(f"{FLAG} is {given!r}, but must be a JSON object")
    settings = {name.replace("-", "_"): value for name, value in (given or {}).items()}
    apart = {"method": method, "model": model, TOKENS: tokens}
    for flag, (name, value) in zip(
        ("--spec-method", "--spec-model", "--spec-tokens"), apart.items(), strict=True
    ):
        if value is None:
            continue
        if name in settings:
            raise SetupError(f"{flag} and {FLAG} both say {name}")
        settings[name] = value
    if not settings:
        return None
    if (named := settings.get("method")) is not None:
        refuse_method(str(named))
    for name, why in _OURS.items():
        if settings.get(name):
            raise SetupError(f"{FLAG} sets {name}, which does not fit: {why}")
    count = settings.get(TOKENS)
    if not isinstance(count, int) or count < 1:
        raise SetupError(f"{FLAG}: {TOKENS} is {count!r}, but must be 1 or more")
    return settings


def refuse_method(method: str) -> None:
    """Raises ``SetupError`` for a method of vLLM's that does not fit. ``deepseek_mtp`` and the like
    are ``mtp``."""
    if method in METHODS or method.endswith("_mtp"):
        return
    why = REFUSED.get(method, "vLLM 0.32 does not have it")
    raise SetupError(
        f"{FLAG}: the method {method!r} does not fit: {why}; known are {', '.join(METHODS)}"
    )


def bounded(settings: Mapping[str, Any], longest_chain: int) -> dict[str, Any]:
    """``settings`` for vLLM, whose number of tokens is no more than the bound of what one step
    looks at: drafts of devices too. How many are proposed is said in each step."""
    count = settings[TOKENS]
    bound = max(longest_chain, count)
    if str(settings.get("method") or "mtp").endswith("mtp"):
        # It has to be a multiple of what the head was trained for, as ``count`` is.
        bound = -(-bound // count) * count
    return {**settings, TOKENS: bound}
