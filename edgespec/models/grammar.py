"""Constraints read with llguidance: which tokens may come next in an output.

Theory of operation. A constraint is compiled once for a vocabulary, and each generation gets a copy
of the compiled one. Both are bounded. A step counts its work in the library's own units
(``STEP_BOUNDS``), and a generation that needs more fails with an error that names the limit. The
library bounds compiling less well: a JSON schema with ``allOf`` over 30 patterns takes unlimited
time and memory. So a new constraint is first tried in another process (``grammar_trial.py``), with
limits on its time and memory. Calls come from any thread.

The vocabulary is read from the tokenizer here (``GuidanceVocabulary``), not by the library, which
treats every added token of the form ``<...>`` as special. Only special tokens are separate from
text and never match the text of a constraint. Every other token, added or not, stands for the bytes
that decoded text shows for it. So a mask and its matcher agree on any text.

The copies of a compiled constraint share caches that the library fills while it reads texts, and a
copy that exceeds a limit can leave these broken for the others. So if a matcher fails, its output
is read again by a freshly compiled one. Only if that fails too, the output itself exceeds the
limit.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from edgespec.models.grammar_trial import (
    DATA_BYTES,
    ByteVocabulary,
    GrammarTrials,
    TrialFailedError,
)
from edgespec.models.model_source import Purpose, SourceKind, resolve_source
from edgespec.models.remote_tokenizer import RemoteTokenizer
from edgespec.models.tokenizer import TextTokenizer, TokenBytes, TokenizerError
from edgespec.models.toy import TOY_ALPHABET, TOY_EOS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_MAX_COMPILED: Final = 128
"""Number of compiled constraints that are kept, the most recently used ones."""
_MAX_COPIES: Final = 256
"""Number of generations that use one compiled constraint. They share its caches and the limit on
these; after that many the constraint is compiled again."""

_TRIAL_WITHIN_S: Final = 30.0
"""Seconds of the clock for a trial, on a busy machine. The limit on its processor time is lower."""
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
_LIMIT_OF_ERROR: Final = {
    "too many expressions constructed": "step_lexer_fuel",
    "too many states": "max_lexer_states",
    "Too many items": "step_max_items",
    "Current row has": "max_items_in_row",
    "initial lexer configuration": "initial_lexer_fuel",
    "grammar size": "max_grammar_size",
}
"""The limit in ``STEP_BOUNDS`` that an error of the library is about, by words in the error."""
_TOKEN_BY_ID: Final = "<["
"""Beginning of a token that a grammar names by its id."""
_MAX_RECOMPILE_S: Final = 0.02
"""A constraint that took longer to compile is not compiled again while a pass waits."""
_MASKS_KEPT: Final = 32

# White space as in printed JSON, with a limit, because a small model might never stop.
_JSON_STYLE: Final = {"whitespace_pattern": r"\n?[ \t]{0,16}"}


class GrammarReader:
    """Reader of constraints for one vocabulary. Its processes end with ``close``.

    Arguments: ``tokenizer`` is called once, for the first constraint. It returns the text of a
    ``tokenizer.json``, ``GuidanceVocabulary``, or any other argument of ``LLTokenizer``.
    ``most_bytes`` limits the data of a process that tries a constraint."""

    def __init__(self, tokenizer: Callable[[], Any], most_bytes: int = DATA_BYTES) -> None:
        self._make_tokenizer = tokenizer
        self.trials = GrammarTrials(most_bytes)
        self._tokenizer: LLTokenizer | None = None
        self._added: Mapping[str, int] = {}
        """Ids of added tokens that are text, by their text."""
        self._special: dict[str, Any] | None = None
        self._compiled: OrderedDict[Constraint, _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Do the work that the first constraint would otherwise wait for. Meanwhile the library
        blocks every other thread of this process (0.4 to 0.9 s for a vocabulary of 151,936 words).
        Raises what ``tokenizer`` raises."""
        if self.is_available:
            self._vocabulary()

    def close(self) -> None:
        """End the other processes. Trials that run fail."""
        self.trials.close()

    @property
    def is_available(self) -> bool:
        """Whether the library is installed."""
        return find_spec("llguidance") is not None

    def __call__(self, constraint: Constraint) -> Constraint:
        """Return the constraint with its ``matcher``. This may take long, so it must not run in an
        event loop. Raises ``ConstraintError`` with the fault of the constraint, or if the library
        is missing."""
        if not self.is_available:
            raise ConstraintError(
                f"a {constraint.kind.value} needs llguidance, which is not installed here:"
                " pip install 'edgespec[grammar]'"
            )
        with self._lock:
            compiled = self._compiled.get(constraint)
            if compiled is not None:
                self._compiled.move_to_end(constraint)
                compiled.copies += 1
        if compiled is None or compiled.copies > _MAX_COPIES or compiled.is_damaged:
            if compiled is None:
                with as_constraint_errors(constraint.kind):
                    grammar = self._grammar_of(constraint)
                    self._run_trial(constraint.kind, grammar)
            else:
                grammar = compiled.grammar
            tokens = self._load_tokenizer()
            named = frozenset(self._added.values()) if _TOKEN_BY_ID in grammar else frozenset()
            compiled = _Compiled(constraint.kind, grammar, tokens, named)
            with self._lock:
                self._compiled[replace(constraint, matcher=None)] = compiled
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return replace(constraint, matcher=partial(TextMatcher, compiled))

    def _load_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._tokenizer is None:
                made = self._make_tokenizer()
                if isinstance(made, str):
                    made = GuidanceVocabulary.from_json(made)
                if isinstance(made, GuidanceVocabulary):
                    self._added = made.added
                    made = TokenizerWrapper(made)
                self._tokenizer = LLTokenizer(made)
            return self._tokenizer

    def _grammar_of(self, constraint: Constraint) -> str:
        """Return the constraint in llguidance's own notation."""
        if constraint.kind is not ConstraintKind.GRAMMAR:
            return to_guidance_grammar(constraint)
        self._load_tokenizer()
        return to_guidance_grammar(constraint, self._added)

    def _run_trial(self, kind: ConstraintKind, grammar: str) -> None:
        """Compile a grammar in a process that may be killed. A grammar is tried on the vocabulary's
        special tokens and the 256 bytes; the other kinds need the bytes only."""
        vocabulary = self._vocabulary() if kind is ConstraintKind.GRAMMAR else None
        request = {"vocabulary": vocabulary, "grammar": grammar, "bounds": STEP_BOUNDS}
        try:
            why = self.trials.find_fault(request, _TRIAL_WITHIN_S)
        except TrialFailedError:
            raise ConstraintError(
                f"the {kind.value} cannot be used: to compile it takes more time or memory than is"
                " given"
            ) from None
        except OSError as error:
            raise ConstraintBusyError(f"a {kind.value} cannot be tried now: {error}") from error
        if why:
            raise _constraint_error(kind, why)

    def _vocabulary(self) -> dict[str, Any]:
        """Return the part of the vocabulary that a trial needs
        (``grammar_trial.bytes_and_special``)."""
        tokens = self._load_tokenizer()
        if self._special is None:
            ids = filter(tokens.is_special_token, range(tokens.vocab_size))
            named = {str(token): tokens.decode_str([token]) for token in ids}
            self._special = {
                "size": tokens.vocab_size,
                "end": tokens.eos_token,
                "special": {token: name for token, name in named.items() if name},
            }
        return self._special


@contextmanager
def as_constraint_errors(kind: ConstraintKind) -> Iterator[None]:
    """Convert any error of a library about a constraint into ``ConstraintError``.

    Libraries raise errors of every type here, up to ``PanicException``, which is not an
    ``Exception``. Their messages may quote the constraint, so they are for the client alone and
    never logged."""
    try:
        yield
    except (ConstraintError, MemoryError):
        raise
    except Exception as error:
        raise _constraint_error(kind, f"{type(error).__name__}: {error}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _constraint_error(kind, "the grammar library failed on it") from None


class _Compiled:
    """One constraint, compiled for one vocabulary. Any thread may copy it."""

    def __init__(
        self, kind: ConstraintKind, grammar: str, tokens: LLTokenizer, named_ids: Collection[int]
    ) -> None:
        """``named_ids`` are added tokens, other than special ones, that the grammar may name by
        their ids. Raises ``ConstraintError`` if the library refuses the grammar."""
        self.kind, self.grammar, self.copies = kind, grammar, 1
        self.named_ids = frozenset(named_ids)
        self.ends = tuple(tokens.eos_tokens)
        self._tokenizer = tokens
        self.is_damaged = False
        """Whether a copy has failed, so that further copies may fail without a fault of their
        own."""
        self._lock = threading.Lock()
        began_s = time.thread_time()
        self._matcher = self._compile()
        self._compile_s = time.thread_time() - began_s

    def copy(self) -> LLMatcher:
        """Return a matcher for an output that has not begun."""
        with self._lock:
            if self.is_damaged and self._compile_s <= _MAX_RECOMPILE_S:
                self._matcher, self.is_damaged = self._compile(), False
            return self._matcher.deep_copy()

    def compile_fresh(self) -> LLMatcher | None:
        """Return a matcher that shares nothing with others, to replace a copy that failed. None:
        compiling takes too long."""
        self.is_damaged = True
        return self._compile() if self._compile_s <= _MAX_RECOMPILE_S else None

    def _compile(self) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        with as_constraint_errors(self.kind):
            limits = LLParserLimits(**STEP_BOUNDS, verbose_errors=False)  # type: ignore[arg-type]
            matcher = LLMatcher(self._tokenizer, self.grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise _constraint_error(self.kind, matcher.get_error())
            return matcher


class TextMatcher:
    """A ``core.protocol.constraint.Matcher`` that uses llguidance's ``LLMatcher``.

    Raises ``ConstraintError`` that names the limit at which the library's matcher stops. The
    library may also stop without an error, by refusing a token that its own mask allows."""

    def __init__(self, compiled: _Compiled) -> None:
        self._compiled = compiled
        self._inner = compiled.copy()
        self._consumed: list[int] = []
        self._masks: OrderedDict[int, bytes] = OrderedDict()
        """The most recent masks, by the number of tokens before them."""
        self._was_renewed = False

    @property
    def can_end(self) -> bool:
        return self._inner.is_accepting()

    def mask(self) -> bytes:
        with as_constraint_errors(self._compiled.kind):
            mask = self._inner.compute_bitmask()
            if self._inner.is_error():
                self._replace_matcher()
                mask = self._inner.compute_bitmask()
                if self._inner.is_error():
                    raise self._limit_error()
        ends = [end for end in self._compiled.ends if allows(mask, end)]
        if ends:
            bits = bytearray(mask)
            for end in ends:
                bits[end >> 3] &= ~(1 << (end & 7))
            mask = bytes(bits)
        self._masks[len(self._consumed)] = mask
        if len(self._masks) > _MASKS_KEPT:
            self._masks.popitem(last=False)
        return mask

    def consume(self, tokens: Sequence[int]) -> int:
        token_list = list(tokens)
        with as_constraint_errors(self._compiled.kind):
            count = self._inner.try_consume_tokens(token_list)
            if self._has_failed(token_list, count):
                self._replace_matcher()
                count = self._inner.try_consume_tokens(token_list)
                if self._has_failed(token_list, count):
                    raise self._limit_error()
        self._consumed += token_list[:count]
        return count

    def rollback(self, count: int) -> None:
        kept = len(self._consumed) - count
        removed = self._consumed[kept:]
        with as_constraint_errors(self._compiled.kind):
            del self._consumed[kept:]
            if not self._compiled.named_ids.isdisjoint(removed):
                # The library removes the bytes of such a token's text, although it read others for
                # its id, and its masks are wrong from then on (llguidance 1.9.1).
                self._inner = self._compiled.copy()
                self._inner.try_consume_tokens(self._consumed)
            else:
                self._inner.rollback(count)
            for length in [one for one in self._masks if one > kept]:
                del self._masks[length]
            if self._inner.is_error():
                self._replace_matcher()

    def _has_failed(self, wanted: Sequence[int], count: int) -> bool:
        """Return whether the matcher failed at token ``count`` of ``wanted``."""
        if self._inner.is_error():
            return True
        if count == len(wanted):
            return False
        mask = self._masks.get(len(self._consumed)) if count == 0 else None
        if mask is None:
            mask = self._inner.compute_bitmask()
        return self._inner.is_error() or allows(mask, wanted[count])

    def _replace_matcher(self) -> None:
        """Replace the matcher by a freshly compiled one at the same place, once for an output."""
        fresh = None if self._was_renewed else self._compiled.compile_fresh()
        if fresh is None:
            raise self._limit_error()
        self._was_renewed = True
        failed, self._inner = self._inner, fresh
        if self._inner.try_consume_tokens(self._consumed) < len(self._consumed):
            self._inner = self._inner if self._inner.is_error() else failed
            raise self._limit_error()

    def _limit_error(self) -> ConstraintError:
        why = _shorten(self._inner.get_error())
        why = why or "it refused a token that its own mask allows"
        kind = self._compiled.kind.value
        return ConstraintError(
            f"the {kind} asks for too much work behind {len(self._consumed)} tokens: it is over"
            f" {_name_limit(why) or 'a limit'} of its library ({why});"
            " make it simpler, for instance with fewer repetitions inside one another"
        )


class GuidanceVocabulary:
    """A tokenizer's vocabulary under the names that llguidance uses.

    The library requires an end token. It gets one that no text contains, behind all ids of the
    tokenizer, since the model's own end tokens are handled elsewhere."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Iterable[int],
        added: Mapping[str, int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        """Make the vocabulary of any tokenizer.

        Args:
            tokens: Bytes of each id.
            special_ids: Ids of the special tokens.
            added: Ids of the added tokens, special or not, by their text.
            encode: Returns the ids of a text in which no special token is meant, or none at all
                where it fails."""
        special, size = frozenset(special_ids), len(tokens)
        self.tokens = [*tokens, b"<end of the text>"]
        self.eos_token_id = size
        self.special_token_ids = [*sorted(special), size]
        self.added = {text: number for text, number in added.items() if number not in special}
        self._encode = encode
        self._id_of_bytes: dict[bytes, int] | None = None
        self._max_token_bytes = 0

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, special_ids: Iterable[int]) -> GuidanceVocabulary:
        """Return the vocabulary of ``tokenizer``, and change its settings."""
        tokenizer.encode_special_tokens = True  # a constraint's text is never special
        tokenizer.no_padding()
        tokenizer.no_truncation()
        added = tokenizer.get_added_tokens_decoder()
        size = max([tokenizer.get_vocab_size(), *(number + 1 for number in added)])
        return cls(
            tokens=list(map(TokenBytes(tokenizer), range(size))),
            special_ids=special_ids,
            added={one.content: number for number, one in added.items()},
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        )

    @classmethod
    def from_remote(cls, tokenizer: RemoteTokenizer) -> GuidanceVocabulary:
        """Return the vocabulary of a tokenizer that another process holds."""

        def encode(text: str) -> Sequence[int]:
            try:
                return tokenizer.encode_plain(text)
            except TokenizerError:  # the longest matching tokens are used then
                return ()

        return cls(
            tokens=list(map(tokenizer.token_bytes, range(tokenizer.id_count))),
            special_ids=tokenizer.special_ids,
            added=tokenizer.added,
            encode=encode,
        )

    @classmethod
    def from_json(cls, text: str) -> GuidanceVocabulary:
        """Return the vocabulary in the text of a ``tokenizer.json``. Raises what the library
        ``tokenizers`` raises."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(text)
        added = tokenizer.get_added_tokens_decoder().items()
        return cls.from_tokenizer(tokenizer, [number for number, token in added if token.special])

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens that stand for exactly this text, as the tokenizer would encode it."""
        written = text if isinstance(text, bytes) else text.encode()
        try:
            shown = written.decode()
        except UnicodeDecodeError:
            return self._longest_tokens(written)
        # Some tokenizers put a space before a text, but not behind this character.
        for before in ("", "\x02"):
            ids = list(self._encode(before + shown))
            words = [self.tokens[token] for token in ids]
            while before and words and not words[0].endswith(b"\x02"):
                del ids[0], words[0]
            if before:
                del ids[:1], words[:1]
            if b"".join(words) == written and not set(ids) & set(self.special_token_ids):
                return ids
        return self._longest_tokens(written)

    def _longest_tokens(self, written: bytes) -> list[int]:
        """Return the longest matching tokens one after the other, up to a byte that no token
        has."""
        if self._id_of_bytes is None:
            special = frozenset(self.special_token_ids)
            words = [(word, i) for i, word in enumerate(self.tokens) if word and i not in special]
            self._id_of_bytes = dict(reversed(words))
            self._max_token_bytes = max(map(len, self._id_of_bytes), default=0)
        tokens: list[int] = []
        start = 0
        while start < len(written):
            for stop in range(min(len(written), start + self._max_token_bytes), start, -1):
                if (token := self._id_of_bytes.get(written[start:stop])) is not None:
                    tokens.append(token)
                    start = stop
                    break
            else:
                break
        return tokens


def make_letters_tokenizer(alphabet: str, end: int) -> Any:
    """Return a tokenizer for ``GrammarReader`` with a token for each letter; ``alphabet[end]`` ends
    a text."""
    from llguidance import TokenizerWrapper

    tokens = [letter.encode() for letter in alphabet]
    tokens[end] = b"<end>"
    return TokenizerWrapper(ByteVocabulary(tokens, end, [end]))


def to_guidance_grammar(constraint: Constraint, added: Mapping[str, int] | None = None) -> str:
    """Return the constraint in llguidance's own notation.

    Arguments: ``added`` are the ids of added tokens that are text, by their text; a grammar may
    name them like special ones. Raises ``ConstraintError``."""
    from llguidance import LLMatcher

    match constraint.kind:
        case ConstraintKind.GRAMMAR:
            lark = _bound_json_space(translate_gbnf(constraint.text), added or {})
            return LLMatcher.grammar_from_lark(lark)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(constraint.text)
        case ConstraintKind.TOKENS:
            raise ConstraintError("a list of tokens is no grammar")
        case ConstraintKind.JSON_SCHEMA:
            with as_constraint_errors(constraint.kind):
                try:
                    json.loads(constraint.text)
                    return LLMatcher.grammar_from_json_schema(
                        constraint.text,
                        defaults=_JSON_STYLE,  # type: ignore[arg-type]
                    )
                except (ValueError, RecursionError) as error:
                    raise _constraint_error(constraint.kind, str(error)) from None


_LARK_PARTS: Final = re.compile(
    r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/'
    r"|(?P<json>%json\s*)(?={)|(?P<name><[^<>\s]+>)"
)


def _bound_json_space(lark: str, added: Mapping[str, int]) -> str:
    """Return the grammar with white space in ``%json`` limited as in a schema, and with names of
    added tokens that are text replaced by their ids."""
    parts: list[str] = []
    at = 0
    while (match := _LARK_PARTS.search(lark, at)) is not None:
        parts.append(lark[at : match.start()])
        at = match.end()
        if match["json"]:
            parts.append(match[0])
            try:
                schema, at = json.JSONDecoder().raw_decode(lark, at)
            except (ValueError, RecursionError):
                continue  # the library reports the fault
            parts.append(json.dumps({"x-guidance": _JSON_STYLE, **schema}))
        elif match["name"] and match[0] in added:
            parts.append(f"<[{added[match[0]]}]>")
        else:
            parts.append(match[0])
    return "".join([*parts, lark[at:]])


_MAX_GBNF_CHARACTERS = 8192
"""Limit in characters. A grammar of this length takes up to 0.2 s to translate, and one of
twice the length four times as long."""


def translate_gbnf(text: str) -> str:
    """Return a grammar in Lark's notation. One in llama.cpp's notation (GBNF), whose rules are
    written with ``::=``, is translated. Raises ``ConstraintError``."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark, is_lark_syntax

    if "::=" not in text or is_lark_syntax(text):
        return text
    if len(text) > _MAX_GBNF_CHARACTERS:
        why = f"GBNF of {len(text)} characters, but at most {_MAX_GBNF_CHARACTERS} are translated"
        raise _constraint_error(ConstraintKind.GRAMMAR, why)
    try:
        return any_to_lark(text)
    except GbnfToLarkError as error:
        raise _constraint_error(ConstraintKind.GRAMMAR, f"not readable as GBNF: {error}") from None
    except Exception as error:  # Exception itself for a missing rule, and others
        why = str(error) if type(error) is Exception else f"{type(error).__name__}: {error}"
        raise _constraint_error(ConstraintKind.GRAMMAR, f"not readable as GBNF: {why}") from None


def _constraint_error(kind: ConstraintKind, why: str) -> ConstraintError:
    why = _shorten(why)
    if why.startswith("NoExtension"):
        why = "no text fits it"
    elif bound := _name_limit(why):
        why = f"it is over {bound} of its library ({why}); make it simpler"
    return ConstraintError(f"the {kind.value} cannot be used: {why}")


def _name_limit(why: str) -> str:
    """Return the limit that an error of the library is about, with its value, or an empty text."""
    name = next((name for words, name in _LIMIT_OF_ERROR.items() if words in why), None)
    return "" if name is None else f"the limit {name} of {STEP_BOUNDS[name]:,}"


def _shorten(text: str) -> str:
    words = " ".join(text.replace("<non-verbose/>", "").split())
    return words if len(words) <= _MAX_MESSAGE else words[:_MAX_MESSAGE] + " ..."


# The library is optional on either side. A verifier without it refuses constraints and names the
# package. A device without it drafts without the constraint, which costs speed and changes no
# token.
ReadConstraint = Callable[[Constraint], Constraint]
"""A function that returns the constraint with its matcher. Raises ``ConstraintError``."""
_DEVICE_BYTES: Final = 192 << 20
"""Limit on the data of a trial's process on a device. The memory limit of a service covers all its
processes together, so this one is low."""


def target_grammar_reader(reference: str) -> GrammarReader:
    """Return a reader for the target that ``reference`` names. Nothing is loaded before the first
    constraint or the call of ``warm_up``."""
    return GrammarReader(partial(_load_vocabulary, reference, Purpose.TARGET))


def device_grammar_reader(reference: str) -> ReadConstraint | None:
    """Return a reader for the tokenizer that ``reference`` names, or None if the library is not
    installed."""
    vocabulary = partial(_load_vocabulary, reference, Purpose.TEXTS)
    reader = GrammarReader(vocabulary, _DEVICE_BYTES)
    return reader if reader.is_available else None


def _load_vocabulary(reference: str, purpose: Purpose) -> Any:
    """Return a vocabulary for ``GrammarReader``. A tokenizer that a verifier lent stays in its own
    process. Raises ``ValueError`` naming the file."""
    source = resolve_source(reference, purpose)
    if source.kind is SourceKind.TOY:
        return make_letters_tokenizer(TOY_ALPHABET, TOY_EOS)
    if source.kind is SourceKind.LENT:
        lent = source.load_tokenizer()
        assert isinstance(lent, RemoteTokenizer)
        return GuidanceVocabulary.from_remote(lent)
    text = TextTokenizer(source.folder)
    return GuidanceVocabulary.from_tokenizer(text.copy_tokenizer(), text.special_ids)
