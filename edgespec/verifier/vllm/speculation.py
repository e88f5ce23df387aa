"""vLLM's own speculator: what of its settings is taken, what has no effect here, what is refused.

The settings are those of ``vllm serve``: ``--speculative-config``, or ``--spec-method``,
``--spec-model`` and ``--spec-tokens``. A method is refused only if its drafts cannot be verified
exactly here. A setting by which vLLM would choose or cut drafts is taken without effect, because
the verifier decides that, and two such decisions would cut the same drafts twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgespec.config.common import SetupError

FLAG: Final = "--speculative-config"
TOKENS: Final = "num_speculative_tokens"
MAX_TOKENS: Final = 128
"""Most tokens that a speculator may propose: vLLM's own rejection sampler has the same bound."""

METHODS: Final = (
    *("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"),
    *("dflash", "medusa", "custom_class"),
)
BLOCK_METHODS: Final = frozenset({"dflash", "medusa", "suffix", "custom_class"})
"""Methods that propose all their tokens in one run, whether they are all wanted or not."""
_REPLACED: Final = {
    "ngram_gpu": ("ngram", "ngram proposes the same tokens, as lists that can be verified here")
}
_RUNNER: Final = "vLLM's model runner whose drafts can be replaced"
REFUSED: Final = {
    "dspark": f"{_RUNNER} does not have it",
    "mlp_speculator": "neither of vLLM's model runners has it",
    "extract_hidden_states": "it proposes no tokens",
}

_NOT_EXACT: Final = "it accepts tokens that the target did not choose"
_LOSSY_METHODS: Final = ("synthetic", "fly")
_LOSSY_SETTINGS: Final = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
_WITHOUT_EFFECT: Final = {
    "num_speculative_tokens_per_batch_size": "the verifier sets the number in each step",
    "enable_adaptive_verification": "the verifier's price of a row cuts proposals",
    "rejection_sample_method": "the verifier's own sampling law judges all drafts alike",
    "draft_sample_method": "proposals are drawn with the noise that the target will use",
}


@dataclass(frozen=True, slots=True)
class Speculation:
    """Settings of a speculator, as vLLM is to get them."""

    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """Lines for the user: which settings have no effect, and why."""


@dataclass(frozen=True, slots=True)
class Speculator:
    """The speculator that vLLM made of the settings."""

    method: str = ""
    tokens: int = 0
    """Most tokens that it proposes behind a step; 0: there is none."""
    blocks: bool = False
    """True if it proposes them in one run."""


def read_speculation(
    given: object,
    method: str | None,
    model: str | None,
    tokens: int | None,
    removed: Mapping[str, str] | None = None,
) -> Speculation | None:
    """Return the speculator's settings, or None if no flag sets any.

    They come from ``--speculative-config``, and from the values of ``--spec-method``,
    ``--spec-model`` and ``--spec-tokens``. ``removed`` holds methods that this vLLM no longer has,
    with the reason. Raises ``SetupError`` that names what is missing or does not fit.
    """
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
            raise SetupError(f"{flag} and {FLAG} both set {name}")
        settings[name] = value
    if not settings:
        return None
    notes: list[str] = []
    if (named := settings.get("method")) is not None:
        if named in _REPLACED:
            settings["method"], why = _REPLACED[named]
            notes.append(f"{FLAG}: {settings['method']} takes the place of {named}: {why}")
        refuse_method(str(settings["method"]), removed or {})
    if (lossy := settings.get("rejection_sample_method")) in _LOSSY_METHODS:
        raise SetupError(f"{FLAG}: rejection_sample_method {lossy!r} is refused: {_NOT_EXACT}")
    for name in _LOSSY_SETTINGS:
        if settings.get(name):
            raise SetupError(f"{FLAG}: {name} is refused: {_NOT_EXACT}")
    for name, why in _WITHOUT_EFFECT.items():
        if settings.pop(name, None):
            notes.append(f"{FLAG}: {name} has no effect: {why}")
    count = settings.get(TOKENS)
    if count is not None and not (isinstance(count, int) and 1 <= count <= MAX_TOKENS):
        raise SetupError(f"{FLAG}: {TOKENS} is {count!r}, but must be 1 to {MAX_TOKENS}")
    return Speculation(settings, tuple(notes))


def refuse_method(method: str, removed: Mapping[str, str]) -> None:
    """Raise ``SetupError`` for a speculation method that is not supported, or that this vLLM no
    longer has. ``*_mtp`` count as ``mtp``."""
    if (method in METHODS or method.endswith("_mtp")) and method not in removed:
        return
    why = removed.get(method) or REFUSED.get(method, "vLLM does not have it")
    supported = [one for one in METHODS if one not in removed]
    raise SetupError(
        f"{FLAG}: the method {method!r} is not supported: {why}; supported are"
        f" {', '.join(supported)}"
    )


def describe_speculator(config: Any) -> Speculator:
    """Return the speculator of vLLM's ``SpeculativeConfig``, which may have chosen the method and
    the number of tokens by itself. Raises ``SetupError`` as ``refuse_method`` does."""
    refuse_method(config.method, {})
    tokens = int(config.num_speculative_tokens)
    if tokens > MAX_TOKENS:
        raise SetupError(f"{FLAG}: {TOKENS} is {tokens}, but at most {MAX_TOKENS}; set it")
    blocks = bool(config.parallel_drafting) or config.method in BLOCK_METHODS
    return Speculator(str(config.method), tokens, blocks)


def draft_bound(config: Any, tokens: int, longest_chain: int) -> int:
    """Return the number of tokens that bounds all drafts of a step, also a device's.

    ``config`` is vLLM's ``SpeculativeConfig`` of a speculator that proposes ``tokens``. With heads
    for several tokens (MTP) the bound has to be a multiple of their number.
    """
    draft = config.draft_model_config
    heads = 1 if draft is None else int(vars(draft.hf_config).get("n_predict") or 1)
    return -(-max(longest_chain, tokens) // heads) * heads
