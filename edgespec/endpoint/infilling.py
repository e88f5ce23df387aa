"""Prompts that ask a model to fill the gap between a prefix and a suffix (fill in the middle).

Models that were trained for it have three tokens: in front of the prefix, in front of the suffix,
and in front of the middle, which is the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from edgespec.endpoint.marks import TokenNames, deepseek_mark
from edgespec.endpoint.request_json import invalid_request

_TOKENS: Final = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder, Granite Code
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder's first version
    (deepseek_mark("fim begin"), deepseek_mark("fim hole"), deepseek_mark("fim end")),
    ("<PRE>", "<SUF>", "<MID>"),  # CodeLlama in its converted form
)


def infilling_prompt(
    names: TokenNames, encode: Callable[[str], list[int]], prefix: str, suffix: str
) -> list[int]:
    """Return the tokens of a prompt whose output stands between ``prefix`` and ``suffix``.

    ``encode`` returns the tokens of a text without any that begin a sequence. Raises ``ApiError``
    if the vocabulary has no tokens for it."""
    for marks in _TOKENS:
        ids = [names.added[mark] for mark in marks if mark in names.added]
        if len(ids) == len(marks):
            return [ids[0], *encode(prefix), ids[1], *encode(suffix), ids[2]]
    why = "this model's tokenizer has no tokens to fill a gap in front of it"
    raise invalid_request("suffix", f"suffix is given, but {why}", "unsupported_parameter")
