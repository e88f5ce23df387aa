"""Compiles one grammar in a process of its own, which may run out of time or memory alone.

Run as a script: what to compile comes as JSON on standard input, ``{"tokenizer": a tokenizer.json's
text or "byte", "grammar": ..., "bounds": ...}``; what is wrong with it goes as a JSON string to
standard output, empty for nothing. A grammar that needs too much kills the process.
"""

from __future__ import annotations

import json
import os
import sys

_CPU_S = 4
_DATA_BYTES = 768 << 20
_STEPS = 16


def main() -> None:
    """Compile, and go a few steps: some grammars show only then what they cost."""
    import resource  # where there are limits to set

    os.nice(10)  # who generates goes first
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (_DATA_BYTES, _DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    asked = json.load(sys.stdin)
    limits = LLParserLimits(**asked["bounds"], verbose_errors=False)
    tokenizer = LLTokenizer(asked["tokenizer"])
    matcher = LLMatcher(tokenizer, asked["grammar"], log_level=0, limits=limits)
    for _ in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask or matcher.is_error():
            break
        matcher.try_consume_tokens([mask.bit_length() - 1])
    json.dump(matcher.get_error() if matcher.is_error() else "", sys.stdout)


if __name__ == "__main__":
    main()
