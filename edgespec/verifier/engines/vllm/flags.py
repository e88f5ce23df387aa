"""Which of vLLM's flags are not the user's to give, because the engine depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

OURS: Final = {
    "--model": "--model",
    "--dtype": "--dtype",
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--max-sessions",
    "--scheduler-cls": "",
    "--worker-extension-cls": "",
    "--speculative-config": "",
    "-sc": "",
    "--async-scheduling": "",
    "--enable-prefix-caching": "",
    "--skip-tokenizer-init": "",
    "--max-loras": "",
}
"""And the option of the verifier that says the same, if there is one."""


def refuse_our_flags(flags: Sequence[str]) -> None:
    """Raises ``ValueError`` naming the first flag that vLLM would be given twice."""
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name not in OURS:
            continue
        hint = f"use {OURS[name]}, before the --" if OURS[name] else "the engine needs its own"
        raise ValueError(f"flag {name} cannot be passed to vLLM: {hint}")
