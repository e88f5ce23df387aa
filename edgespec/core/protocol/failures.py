"""Descriptions of exceptions whose messages may quote a client."""

from __future__ import annotations

import traceback

MAX_CAUSES = 8


def describe_without_messages(error: BaseException) -> str:
    """Return the types and code locations of an exception and its causes, without their messages.

    A library's message may quote its input: a prompt, a grammar, a line of a key file. The source
    lines shown are the program's own."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain and len(chain) < MAX_CAUSES:
        chain.append(following)
        cause = following.__cause__
        if cause is None and not following.__suppress_context__:
            cause = following.__context__
        following = cause
    parts = [
        f"{''.join(traceback.format_tb(one.__traceback__))}{type(one).__module__}."
        f"{type(one).__qualname__} (its message is left out: it may quote a client)"
        for one in reversed(chain)
    ]
    return "\nwhich led to\n".join(parts)
