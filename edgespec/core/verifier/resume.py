"""Whether an ``Open`` continues a session that is there, and what its device missed meanwhile.

The device's delivered tokens are the truth, and whoever shows the session's secret is its device.
"""

from __future__ import annotations

from collections.abc import Iterator
from hmac import compare_digest

from edgespec.core.protocol.messages import MAX_COMMIT_TOKENS, Commit, FinishReason, Open
from edgespec.core.protocol.prefix import CommittedPrefix
from edgespec.core.verifier.score_keeper import ScoreKeeper


def same_device(first: Open, later: Open) -> bool:
    """Whether both were sent by one device: they carry the same secret. A session that was opened
    without a secret belongs to whoever knows its id."""
    return compare_digest(first.session_secret, later.session_secret)


def same_generation(first: Open, later: Open, prefix: CommittedPrefix) -> bool:
    """Whether ``later`` asks for the rest of what ``first`` began: the same model, prompt,
    sampling, rule and way of running ahead, and no token that ``prefix`` has otherwise."""
    return (
        later.model == first.model
        and later.sampling == first.sampling
        and later.rule == first.rule
        and later.run_ahead is first.run_ahead
        and later.prompt == first.prompt
        and prefix.starts_with(later.prompt + later.committed)
    )


def missed_commits(
    prefix: CommittedPrefix, held: int, finish: FinishReason | None, scores: ScoreKeeper
) -> Iterator[Commit]:
    """What brings a device that holds ``held`` tokens up to date, in messages the wire can carry;
    the last one says how the generation ended, if it has. With the scores that are kept."""
    start = held
    while prefix.length - start > MAX_COMMIT_TOKENS:
        yield Commit(start, tuple(prefix.tokens[start : start + MAX_COMMIT_TOKENS]))
        start += MAX_COMMIT_TOKENS
    if start < prefix.length or finish is not None:
        logprobs = scores.of(start, prefix.length - start)
        yield Commit(start, tuple(prefix.tokens[start:]), finish=finish, logprobs=logprobs)
