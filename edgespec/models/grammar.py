"""Reads constraints with llguidance: what a text may go on with, token by token.

Theory of operation. A constraint is compiled once for a vocabulary, and each text gets a copy of
the compiled one. Both are bounded. A step counts its work in the library's own units
(``_STEP_BOUNDS``), and a text that needs more fails by name. To compile is not bounded that well by
the library (a JSON schema with ``allOf`` over 30 patterns takes for ever, and all memory), so what
was never read before is tried in another process first (``grammar_trial.py``), which has so much
time and memory and no more. Calls come from any thread.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from edgespec.core.protocol.constraint import (
    Constraint,
    ConstraintBusyError,
    ConstraintError,
    ConstraintKind,
    allows,
)
from edgespec.models.draft_sources import resolve_texts
from edgespec.models.folders import Role, resolve_model
from edgespec.models.grammar_trial import DATA_BYTES, GrammarTrials, TrialFailedError, Words
from edgespec.models.toy import TOY, TOY_ALPHABET, TOY_EOS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT: Final = 128
"""Compiled constraints, the ones used last."""
_MOST_COPIES: Final = 256
"""Texts of one compiled constraint, which share what it has learned and its bound on that; then it
is compiled again."""

_TRIAL_S: Final = 30.0
"""Of the clock, on a busy machine; of processor time a trial has less."""
_MAX_MESSAGE: Final = 400
STEP_BOUNDS: Final = {
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 30_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""llguidance's ``LLParserLimits``, at or below its defaults: about 10 ms for one mask at worst."""

# White space as in printed JSON, but never without end: a small model might not stop.
_JSON_STYLE: Final = {"whitespace_pattern": r"\n?[ \t]{0,16}"}


class GrammarReader:
    """Of one vocabulary. ``tokenizer`` is asked for once, when the first constraint comes: what
    ``LLTokenizer`` takes. A process that tries a constraint may have ``most_bytes`` of data. Call
    ``close`` in the end."""

    def __init__(self, tokenizer: Callable[[], Any], most_bytes: int = DATA_BYTES) -> None:
        self._make_tokenizer = tokenizer
        self.trials = GrammarTrials(most_bytes)
        self._tokenizer: LLTokenizer | None = None
        self._special: dict[str, Any] | None = None
        self._kept: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def get_ready(self) -> None:
        """Do all that the first constraint would have to wait for. Takes a while, in which the
        library keeps every other thread of this process waiting (of a vocabulary of 151,936 words
        0.4 to 0.9 s). Raises what ``tokenizer`` raises."""
        if self.available:
            self._vocabulary()

    def close(self) -> None:
        """End the other processes; what is being tried fails."""
        self.trials.close()

    @property
    def available(self) -> bool:
        """Whether the library is installed."""
        return find_spec("llguidance") is not None

    def __call__(self, constraint: Constraint) -> Constraint:
        """The same constraint, with its ``matcher``. Takes a while: not for an event loop. Raises
        ``ConstraintError`` saying what is wrong with it, or that the library is missing."""
        if not self.available:
            raise ConstraintError(
                f"a {constraint.kind.value} needs llguidance, which is not installed here:"
                " pip install 'edgespec[grammar]'"
            )
        with self._lock:
            found = self._kept.get(constraint)
            if found is not None:
                self._kept.move_to_end(constraint)
                found.copies += 1
        if found is None or found.copies > _MOST_COPIES:
            found = _Compiled(self._compile(constraint, known=found is not None))
            with self._lock:
                self._kept[replace(constraint, matcher=None)] = found
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
        compiled, ends = found, self._tokens().eos_tokens
        return replace(constraint, matcher=lambda: TextMatcher(compiled.matcher.deep_copy(), ends))

    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._make_tokenizer())
            return self._tokenizer

    def _compile(self, constraint: Constraint, *, known: bool) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        grammar = grammar_of(constraint)
        if not known:
            self._try(constraint.kind, grammar)
        limits = LLParserLimits(**STEP_BOUNDS, verbose_errors=False)  # type: ignore[arg-type]
        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(constraint.kind, matcher.get_error())
        return matcher

    def _try(self, kind: ConstraintKind, grammar: str) -> None:
        """Compile in a process that may be killed. Special tokens are those of the vocabulary, so
        that a grammar is tried on them; of all else 256 bytes are enough."""
        vocabulary = self._vocabulary() if kind is ConstraintKind.GRAMMAR else None
        asked = {"vocabulary": vocabulary, "grammar": grammar, "bounds": STEP_BOUNDS}
        try:
            why = self.trials.tried(asked, _TRIAL_S)
        except TrialFailedError:
            raise ConstraintError(
                f"the {kind.value} cannot be used: to compile it takes more time or memory than is"
                " given"
            ) from None
        except OSError as error:
            raise ConstraintBusyError(f"a {kind.value} cannot be tried now: {error}") from error
        if why:
            raise _refused(kind, why)

    def _vocabulary(self) -> dict[str, Any]:
        """What a trial has to know of it (``grammar_trial.bytes_and_special``)."""
        tokens = self._tokens()
        if self._special is None:
            ids = filter(tokens.is_special_token, range(tokens.vocab_size))
            named = {str(token): tokens.decode_str([token]) for token in ids}
            self._special = {
                "size": tokens.vocab_size,
                "end": tokens.eos_token,
                "special": {token: name for token, name in named.items() if name},
            }
        return self._special


@dataclass(slots=True)
class _Compiled:
    matcher: LLMatcher
    copies: int = 1


class TextMatcher:
    """``core.protocol.constraint.Matcher``; ``ends`` are the library's own end tokens, which a mask
    does not tell."""

    def __init__(self, inner: LLMatcher, ends: Sequence[int]) -> None:
        self._inner, self._ends = inner, tuple(ends)

    @property
    def accepting(self) -> bool:
        return self._inner.is_accepting()

    def mask(self) -> bytes:
        mask = self._inner.compute_bitmask()
        self._check()
        if not any([allows(mask, end) for end in self._ends]):
            return mask
        bits = bytearray(mask)
        for end in self._ends:
            bits[end >> 3] &= ~(1 << (end & 7))
        return bytes(bits)

    def consume(self, tokens: Sequence[int]) -> int:
        count = self._inner.try_consume_tokens(list(tokens))
        self._check()
        return count

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():
            raise ConstraintError(
                f"the grammar asks for too much work here: {_first_words(self._inner.get_error())}"
            )


def letters_tokenizer(alphabet: str, end: int) -> Any:
    """For ``GrammarReader``: each letter is a token, and ``alphabet[end]`` ends a text."""
    from llguidance import TokenizerWrapper

    tokens = [letter.encode() for letter in alphabet]
    tokens[end] = b"<end>"
    return TokenizerWrapper(Words(tokens, end, [end]))


def grammar_of(constraint: Constraint) -> str:
    """In llguidance's own notation. Raises ``ConstraintError`` for a schema that is no JSON."""
    from llguidance import LLMatcher

    match constraint.kind:
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_as_lark(constraint.text))
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.JSON_SCHEMA:
            try:
                json.loads(constraint.text)
                return LLMatcher.grammar_from_json_schema(
                    constraint.text,
                    defaults=_JSON_STYLE,  # type: ignore[arg-type]
                )
            except (ValueError, RecursionError) as error:
                raise _refused(constraint.kind, str(error)) from None


_MOST_GBNF = 8192
"""Characters: these take at most some 0.2 s to translate, and twice as many four times as long."""


def _as_lark(text: str) -> str:
    """A grammar in llama.cpp's notation (GBNF) is translated; its rules are written with ``::=``,
    which Lark has not. Raises ``ConstraintError``."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark, is_lark_syntax

    if "::=" not in text or is_lark_syntax(text):
        return text
    if len(text) > _MOST_GBNF:
        why = f"GBNF of {len(text)} characters, but at most {_MOST_GBNF} are translated"
        raise _refused(ConstraintKind.GRAMMAR, why)
    try:
        return any_to_lark(text)
    except (GbnfToLarkError, IndexError, RecursionError, ValueError) as error:
        raise _refused(ConstraintKind.GRAMMAR, f"not readable as GBNF: {error}") from None


def _refused(kind: ConstraintKind, why: str) -> ConstraintError:
    return ConstraintError(f"the {kind.value} cannot be used: {_first_words(why)}")


def _first_words(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _MAX_MESSAGE else words[:_MAX_MESSAGE] + " ..."


# The library is optional on either side. A verifier without it refuses constraints and names the
# package; a device without it lets its drafts guess freely, which costs speed and no text.
ReadConstraint = Callable[[Constraint], Constraint]
"""Gives the constraint its matcher. Raises ``ConstraintError``."""
_DEVICE_BYTES: Final = 192 << 20
"""Of data that such a process may have: a service with a memory budget ends where all its processes
together go far beyond it."""


def verifier_reader(reference: str) -> GrammarReader:
    """For the target that ``reference`` names. Nothing is loaded before the first constraint, or
    before it is told to get ready."""
    return GrammarReader(partial(_vocabulary, reference, Role.TARGET))


def device_reader(reference: str) -> ReadConstraint | None:
    """For the tokenizer that ``reference`` names; None where the library is not installed."""
    vocabulary = partial(_vocabulary, reference, Role.DRAFT)
    reader = GrammarReader(vocabulary, _DEVICE_BYTES)
    return reader if reader.available else None


def _vocabulary(reference: str, role: Role) -> Any:
    """What ``GrammarReader`` takes. Raises ``ValueError`` naming the file."""
    if reference == TOY:
        return letters_tokenizer(TOY_ALPHABET, TOY_EOS)
    resolved = resolve_model(reference, role) if role is Role.TARGET else resolve_texts(reference)
    return (resolved / "tokenizer.json").read_text(encoding="utf-8")
