"""What a device lets a verifier commit: tokens that the request and the context have room for.

A verifier that sends more than was asked for, or ids that do not exist, breaks the protocol. What
it sent before the first such token is still the user's; nothing behind it is.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.core.protocol.messages import Commit, FinishReason, Open
from edgespec.core.statically_frozen import statically_frozen


def largest_id(vocabulary_size: int) -> int:
    """The last token id that a model may have whose draft's vocabulary is of this size.

    It is one hundredth beyond the draft's own: checkpoints of one tokenizer pad their tables to
    different sizes (Qwen2.5: 151,936 rows at 0.5B and 152,064 at 7B), and a padding row is a token
    like any other to the model that holds it.
    """
    return vocabulary_size + vocabulary_size // 100 - 1


@statically_frozen
class CommitBounds:
    """``context_length`` 0: no verifier has told its own yet. ``vocabulary_size`` 0: not known."""

    prompt_length: int
    max_tokens: int
    vocabulary_size: int = 0
    context_length: int = 0

    @classmethod
    def of(cls, request: Open, vocabulary_size: int) -> CommitBounds:
        return cls(len(request.prompt), request.sampling.max_tokens, vocabulary_size)

    @property
    def length(self) -> int:
        """Tokens that prompt and output may have together."""
        asked_for = self.prompt_length + self.max_tokens
        return min(asked_for, self.context_length) if self.context_length else asked_for

    def fitting(self, commit: Commit) -> tuple[Commit, str | None]:
        """The part of ``commit`` that is within the bounds, and what is wrong with the rest."""
        tokens, why = commit.tokens, None
        largest = largest_id(self.vocabulary_size) if self.vocabulary_size else None
        if largest is not None and tokens and max(tokens) > largest:
            wrong = next(token for token in tokens if token > largest)
            tokens = tokens[: tokens.index(wrong)]
            why = f"token id {wrong} is beyond the vocabulary of {self.vocabulary_size}"
        if commit.position + len(tokens) > self.length:
            tokens = tokens[: max(0, self.length - commit.position)]
            why = (
                f"tokens up to position {commit.position + len(commit.tokens)}, but {self._limit}"
                f" end at {self.length}"
            )
        if why is None:
            return commit, None
        commit = replace(commit, tokens=tokens, logprobs=commit.logprobs[: len(tokens)])
        return commit, f"the verifier broke the protocol: {why}"

    def told_apart(self, finish: FinishReason, generated: int) -> FinishReason:
        """The verifier has one word for a full output and a full context; the user gets two."""
        if finish is FinishReason.LENGTH and generated < self.max_tokens:
            return FinishReason.CONTEXT
        return finish

    @property
    def _limit(self) -> str:
        if self.length == self.prompt_length + self.max_tokens:
            return f"a prompt of {self.prompt_length} and max_tokens {self.max_tokens}"
        return "the context it announced"
