"""Conversion of text to token ids and back, token by token, and the model's own chat template.

A token may end in the middle of a UTF-8 character, so its text is not always known when it arrives.
``TextStream`` holds such bytes back and emits text that never has to be taken back: the emitted
text together with ``flush`` is the same however the tokens were grouped.

Chat templates are Jinja programs that come with the model, by the conventions of Hugging Face:
``chat_template.jinja`` or ``chat_template`` in ``tokenizer_config.json``, one or several named ones
(``tool_use`` is used if tools are given); ``messages``, ``tools``, ``add_generation_prompt`` and
the special tokens as variables; ``raise_exception``, ``strftime_now``, ``tojson`` without HTML
escapes, ``{% generation %}``, ``{% break %}``. They run in jinja2's immutable sandbox, and those
that do not come with edgespec in a process with limits (``text_worker.py``).
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from edgespec.core.protocol.checks import is_unicode
from edgespec.models import added_tokens
from edgespec.models.call_history import (
    THOUGHT,
    CallForm,
    find_call_form,
    find_thought_field,
    fit_calls,
    fit_thoughts,
)
from edgespec.models.folders import read_token_files
from edgespec.models.remembered_segments import RememberedSegments, find_marks
from edgespec.models.text_worker import TextRefusedError, TextWorker, TextWorkerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_MESSAGES = 4096
MAX_PROMPT_CHARACTERS = 1 << 24
_MAX_SOURCE = 1 << 20
"""Limit on the characters of a template. The longest public ones have some 30,000."""
DEFAULT, TOOL_USE = "default", "tool_use"
Message = Mapping[str, Any]
"""A message with at least ``role``. The template reads the rest."""

_RESERVED_NAMES = ("messages", "tools", "add_generation_prompt")


class TokenizerError(ValueError):
    """A tokenizer folder cannot be used. The message names the file and its fault."""


class ChatTemplateError(TokenizerError):
    """A template failed on these messages, or refuses them."""


class TemplateProgram(Protocol):
    """A compiled template."""

    def render(self, values: Mapping[str, Any]) -> str: ...


@dataclass(frozen=True)
class ChatTemplate:
    """One template, compiled at its first use."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    """The special tokens by name."""
    worker: TextWorker | None = field(default=None, compare=False, repr=False)
    """The worker that compiles and renders the template. None: this process does, which is only
    allowed for templates that come with edgespec."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        Tool calls in ``messages`` may have their arguments as an object or as JSON in a text, and
        ``content`` None or empty: the template gets the form that it reads. With
        ``continue_final_message`` the text ends with the content of the last message, which is to
        be continued, as in transformers. ``variables`` are further ones of the template, such as
        ``enable_thinking``. Raises ``ChatTemplateError``, also if a variable has a reserved name,
        and if the template does not write the content of a message to continue."""
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise ChatTemplateError(
                f"number of messages is {len(messages)}, but must be in [1, {MAX_MESSAGES}]"
            )
        for name in variables or ():
            if name in _RESERVED_NAMES:
                raise ChatTemplateError(f"{name!r} is no variable to be set for a chat template")
        sent = [dict(message) for message in messages]
        mark = _CONTINUATION_MARK if continue_final_message else ""
        if mark:
            sent[-1]["content"] = _with_end(sent[-1]["content"], mark)
        if self.reads_parts_only:
            sent = [_with_parts(message) for message in sent]
        values = {
            **self.tokens,
            **(variables or {}),
            "messages": fit_calls(self._fit_thoughts(sent), self._call_form_for(sent)),
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._compiled.render(values)
        except TokenizerError:
            raise
        except Exception as error:  # a template is a program that can raise anything
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        if mark:
            text = _cut_before(text, mark)
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template wrote {len(text)} characters, at most {MAX_PROMPT_CHARACTERS}"
            )
        if not is_unicode(text):
            raise ChatTemplateError("the messages hold half of a surrogate pair")
        return text

    @cached_property
    def call_form(self) -> CallForm:
        """The form in which the template reads the tool calls of earlier messages. Raises
        ``ChatTemplateError`` if finding it exceeds the limits on time or memory."""

        try:
            return find_call_form(self._render_probe)
        except TextWorkerError as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error

    def _render_probe(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        values = {"messages": messages, "tools": tools or None, "add_generation_prompt": True}
        return str(self._compiled.render({**self.tokens, **values}))

    @cached_property
    def reads_parts_only(self) -> bool:
        """Whether the template shows the content of a message only as a list of parts, as that of
        SmolVLM and some other vision models does. Raises ``ChatTemplateError``."""
        if "content" not in self.source or "type" not in self.source:
            return False
        return self._shows_probe([{"type": "text", "text": _PROBE}]) and not self._shows_probe(
            _PROBE
        )

    def _shows_probe(self, content: Any) -> bool:
        try:
            return _PROBE in self._render_probe([{"role": "user", "content": content}], ())
        except TextWorkerError as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        except Exception:  # a template is a program that can raise anything
            return False

    @cached_property
    def thought_field(self) -> str:
        """The field from which the template reads the thought of an earlier message; empty if it
        shows none. Raises ``ChatTemplateError``."""
        try:
            return find_thought_field(self._render_probe, self.call_form)
        except TextWorkerError as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error

    def _fit_thoughts(self, messages: Sequence[Message]) -> Sequence[Message]:
        if any(THOUGHT in message for message in messages):
            return fit_thoughts(messages, self.thought_field)
        return messages

    def _call_form_for(self, messages: Sequence[Message]) -> CallForm:
        """Return the form of calls. It is only determined for messages with calls, since that takes
        time."""
        if any(message.get("tool_calls") for message in messages):
            return self.call_form
        return CallForm()

    @property
    def knows_tools(self) -> bool:
        """Whether the template reads ``tools`` at all. Raises ``ChatTemplateError``."""
        return "tools" in self.variables

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of all variables that the template reads. Raises ``ChatTemplateError``."""
        try:
            if self.worker is not None:
                return frozenset(self.worker.call("variables", _check_source(self.source)))
            return template_variables(self.source)
        except TokenizerError:
            raise
        except Exception as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error

    @cached_property
    def _compiled(self) -> TemplateProgram:
        if self.worker is not None:
            return _RemoteProgram(self.source, self.worker)
        return compiled_template(self.source)


@dataclass(frozen=True, slots=True)
class _RemoteProgram:
    """A template that the process of ``worker`` compiles and renders."""

    source: str
    worker: TextWorker

    def render(self, values: Mapping[str, Any]) -> str:
        try:
            return str(self.worker.call("render", _check_source(self.source), values))
        except TextRefusedError as error:
            raise ChatTemplateError(str(error)) from None


def _check_source(source: str) -> str:
    if (length := len(source)) > _MAX_SOURCE:
        raise ChatTemplateError(
            f"the chat template has {length} characters, but at most {_MAX_SOURCE} are taken"
        )
    return source


# Mark that is rendered behind the content of a message to continue. The blank at its end shows
# whether the template strips contents.
_CONTINUATION_MARK = "edgespec-continues-here "


_PROBE = "edgespec-probe"


def _with_parts(message: Message) -> dict[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def _with_end(content: Any, end: str) -> Any:
    """Return the content of a message with ``end`` behind its last text."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": end}]
    return f"{content}{end}"


def _cut_before(text: str, mark: str) -> str:
    """Return ``text`` before ``mark``. Blanks before it are removed if the template strips
    contents. Raises ``ChatTemplateError`` if the template did not write the mark."""
    position = text.rfind(mark.rstrip())
    if position < 0:
        raise ChatTemplateError(
            "the last message cannot be continued: the chat template does not show its content"
        )
    return text[:position] if text.startswith(mark, position) else text[:position].rstrip()


class ChatTokenizer(Protocol):
    """A tokenizer with its model's chat template."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def find_new(self, text: str) -> list[str]:
        """Return the parts of ``text`` whose ids are not remembered from earlier texts, in their
        order. All of it where nothing is remembered."""

    def chat_template(self, *, tools: bool = False) -> ChatTemplate | None:
        """Return the model's template, with ``tools`` the one for tools if there is one; None: it
        has none."""

    @property
    def added(self) -> Mapping[str, int]:
        """Ids of the tokens that were added to the vocabulary, special or not, by their text."""

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is none, or if decoded
        text shows it."""

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token by itself, which may be a part of a character."""


def render_chat(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> str:
    """Return the prompt of a conversation by the model's own template. The template writes the
    special tokens itself, so ``encode`` must add none. Raises ``TokenizerError`` if there is no
    template, or if it refuses the messages."""
    if (template := tokenizer.chat_template()) is None:
        raise TokenizerError("tokenizer_config.json: there is no chat_template")
    return template.render(messages)


def prompt_encoder(tokenizer: ChatTokenizer, *, chat: bool) -> Callable[[str], list[int]]:
    """Return a function from a prompt to its tokens. With ``chat`` the prompt is the message of a
    user."""

    def encode(text: str) -> list[int]:
        if chat:
            text = render_chat(tokenizer, [{"role": "user", "content": text}])
        return tokenizer.encode(text, add_special_tokens=not chat)

    return encode


def read_chat_templates(
    folder: Path, config: Mapping[str, Any], tokens: Mapping[str, str]
) -> dict[str, ChatTemplate]:
    """Return the templates of a tokenizer folder by name.

    ``config`` is its ``tokenizer_config.json``, ``tokens`` are its special tokens by name. A
    separate file takes precedence over the entry there. Raises ``TokenizerError`` naming the
    file."""
    value = config.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(value, str):
        sources[DEFAULT] = value
    elif isinstance(value, list):  # several named ones: [{"name": .., "template": ..}]
        for entry in value:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                sources[str(entry.get("name"))] = entry["template"]
    files = {DEFAULT: folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            try:
                sources[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{path}: not readable: {error}") from error
    return {name: ChatTemplate(source, tokens) for name, source in sources.items()}


def compiled_template(source: str) -> TemplateProgram:
    """Return a template compiled for this process. Raises what jinja2 raises."""
    program: TemplateProgram = _make_environment().from_string(source)
    return program


def template_variables(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads. Raises what jinja2 raises."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(_make_environment().parse(source)))


@cache
def _make_environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}`` marks the assistant's output for training. Here it renders its
        body."""

        tags = {"generation"}  # noqa: RUF012 # jinja2 declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise ChatTemplateError(f"the chat template refuses the messages: {message}")

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        """Return JSON without jinja2's HTML escaping, which would change the prompt."""
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table from letter to byte. Printable Latin-1 stands for itself, and each other
    byte for one of the letters from U+0100 on, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenBytes:
    """The bytes that each token of a tokenizer stands for in the middle of a text.

    This is the one place where an id becomes bytes. A token of a byte-level vocabulary or of byte
    fallback may be a part of a character. Every other token is decoded by the tokenizer's own
    decoder, added tokens included. An id without a token has no bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._letters = byte_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_fallback = "ByteFallback" in kinds
        self._space_mark = _find_space_mark(tokenizer)
        self._decode: Callable[[list[str]], str] = (
            " ".join if tokenizer.decoder is None else tokenizer.decoder.decode
        )
        # Decoders may drop a space of the first or last token, so a token is decoded between two
        # others.
        self._tail = self._decode([_ANCHOR, _ANCHOR]).removeprefix(_ANCHOR)

    def __call__(self, token: int) -> bytes:
        """Return the bytes of one token id. Raises ``OverflowError`` for a number that cannot be an
        id."""
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if (letters := self._letters) is not None:
            if all(letter in letters for letter in written):
                return bytes(letters[letter] for letter in written)
            return str(written).encode()
        if self._has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(written)):
            return bytes((int(match[1], 16),))
        if (mark := self._space_mark) is not None:
            return str(written).replace(mark, " ").encode()
        text = self._decode([_ANCHOR, written, _ANCHOR])
        return text.removeprefix(_ANCHOR).removesuffix(self._tail).encode()


_ANCHOR: Final = "a"
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-Fa-f]{2})>")
_MAX_UNFINISHED_TOKENS = 4
"""Limit on the tokens of an unfinished character at the end of a prompt, one for each byte."""


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Return the types of the steps that a tokenizer's decoder has."""
    state = b"null" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
    kinds, pending = set[str](), [json.loads(state)]
    while pending:
        step = pending.pop()
        if isinstance(step, dict):
            kinds.add(str(step.get("type")))
            pending += step.get("decoders") or ()
    return kinds


def _without_first_space(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer of a ``tokenizer.json`` that leaves the beginning and
    the end of a text as they are. None if nothing is left of it."""
    if not isinstance(step, dict):
        return step
    match step.get("type"):
        case "Prepend" | "Strip":
            return None
        case "Metaspace":
            return {**step, "prepend_scheme": "never"}
        case "ByteLevel":
            return {**step, "add_prefix_space": False}
        case "Sequence":
            name = "normalizers" if "normalizers" in step else "pretokenizers"
            kept = [_without_first_space(one) for one in step[name]]
            return {**step, name: [one for one in kept if one is not None]}
        case _:
            return step


def _find_space_mark(tokenizer: Tokenizer) -> str | None:
    """Return the letter that stands for a space, if replacing it is all that the decoder does to a
    token in the middle of a text. That is so for SentencePiece, and a hundred times quicker than
    calling the decoder."""
    state = b"null" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
    step = json.loads(state) or {}
    marks = list[str]()
    for one in step.get("decoders", [step]):
        match one:
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "}:
                marks.append(mark)
            case {"type": "Metaspace", "replacement": str(mark)}:
                marks.append(mark)
            case {"type": "ByteFallback" | "Fuse"} | {"type": "Strip", "content": " "}:
                continue
            case _:
                return None
    return marks[0] if len(marks) == 1 else None


class TextTokenizer:
    """The tokenizer of a model folder: ``tokenizer.json``, and the files beside it that add tokens
    or name special ones (``added_tokens``). ``worker`` renders its chat templates; None: this
    process does."""

    def __init__(self, folder: Path, worker: TextWorker | None = None) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path}: not a readable tokenizer: {error}") from error
        # A file that was saved while training pads or truncates every text; a prompt must stay as
        # it is.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        files = read_token_files(folder)
        self._config = files.get(added_tokens.TOKENIZER_CONFIG, {})
        self._folder, self._worker = folder, worker
        self.special_texts = self._add_tokens(files)
        """Special tokens by their names, such as ``bos_token``."""
        self.special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )

    def _add_tokens(self, files: Mapping[str, Mapping[str, Any]]) -> Mapping[str, str]:
        """Add the tokens that the files beside ``tokenizer.json`` describe, and return the special
        tokens that they name. Raises ``TokenizerError``."""
        from tokenizers import AddedToken

        known = {
            number: added_tokens.AddedToken(
                *(one.content, one.special, one.single_word, one.lstrip, one.rstrip, one.normalized)
            )
            for number, one in self._tokenizer.get_added_tokens_decoder().items()
        }
        try:
            beside = added_tokens.read_added_tokens(files, known, self._folder)
        except added_tokens.AddedTokensError as error:
            raise TokenizerError(str(error)) from error
        self._tokenizer.add_tokens([AddedToken(**asdict(one)) for one in beside.added])
        return beside.named

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``. Special tokens written out in it are recognised.

        Without ``add_special_tokens`` the ids of a long text's segments are remembered
        (``remembered_segments.py``)."""
        if not add_special_tokens and not self._tokenizer.encode_special_tokens:
            return self._segments.encode(text)
        # Only the library's batch methods let other threads run meanwhile. This one omits the
        # offsets in the text, which are not needed.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encodings[0].ids)

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without tokens that begin or end a text."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [list(one.ids) for one in encodings]

    def find_new(self, text: str) -> list[str]:
        """Return the parts of ``text`` whose ids are not remembered from earlier texts, in their
        order."""
        return self._segments.find_new(text)

    @cached_property
    def marks(self) -> list[str]:
        """Texts before which a prompt can be cut without a change of its ids."""
        added = [
            added_tokens.AddedToken(
                content=one.content,
                special=one.special,
                single_word=one.single_word,
                lstrip=one.lstrip,
                rstrip=one.rstrip,
                normalized=one.normalized,
            )
            for one in self._tokenizer.get_added_tokens_decoder().values()
        ]
        sources = (one.source for one in self.templates.values())
        return find_marks(added, (*sources, *self.special_texts.values()))

    @cached_property
    def _segments(self) -> RememberedSegments:
        return RememberedSegments(self.marks, self.encode_many)

    @contextmanager
    def special_tokens_as_text(self) -> Iterator[None]:
        """Encode the names of special tokens as the plain text that they are, within this block.
        All threads that use this object are affected."""
        self._tokenizer.encode_special_tokens = True
        try:
            yield
        finally:
            self._tokenizer.encode_special_tokens = False

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence. Special tokens are left out unless
        ``skip_special_tokens`` is false. Raises ``OverflowError`` for a number that cannot be an
        id."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return str(text)

    def stream(self, prompt: Sequence[int] = ()) -> TextStream:
        """Return a decoder for a text that arrives in pieces and continues ``prompt``. It emits the
        difference between the decoded whole and the decoded prompt. A character that the prompt
        leaves unfinished is emitted when the text completes it."""
        return continue_stream(self, prompt)

    def chat_template(self, *, tools: bool = False) -> ChatTemplate | None:
        """Return the model's own template, or the one it has for tools; None: it has none."""
        templates = self.templates
        return (templates.get(TOOL_USE) if tools else None) or templates.get(DEFAULT)

    @property
    def id_count(self) -> int:
        """The largest token id plus one, added tokens included."""
        return int(max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1

    @cached_property
    def added(self) -> Mapping[str, int]:
        """Ids of the tokens that were added to the vocabulary, by their text."""
        decoder = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in decoder.items()}

    def first_token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token at the beginning of a text, where some decoders drop a
        space."""
        return self.decode([token]).encode()

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text, which no decoded text shows; None if
        there is none."""
        token_id = self._tokenizer.token_to_id(text)
        return int(token_id) if token_id in self.special_ids else None

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """A function that returns the bytes of one token by itself, which may be a part of a
        character."""
        return TokenBytes(self._tokenizer)

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text as a piece from the middle of a plain text: no space is put
        before its first word, nothing is added, and names of special tokens are letters."""
        cut = [self._cut_special_names(text) for text in texts]
        encodings = self._piece_tokenizer.encode_batch_fast(
            list(chain.from_iterable(cut)), add_special_tokens=False
        )
        ids = iter(encodings)
        return [list(chain.from_iterable(next(ids).ids for _ in parts)) for parts in cut]

    def _cut_special_names(self, text: str) -> list[str]:
        """Return the parts of ``text``, cut behind the first letter of each special token's name,
        so that none is recognised in a part."""
        parts, start = list[str](), 0
        for match in self._special_names.finditer(text):
            parts.append(text[start : match.start() + 1])
            start = match.start() + 1
        return [*parts, text[start:]]

    @cached_property
    def _special_names(self) -> re.Pattern[str]:
        decoder = self._tokenizer.get_added_tokens_decoder()
        names = sorted((decoder[one].content for one in self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or "(?!)")

    @cached_property
    def _piece_tokenizer(self) -> Tokenizer:
        """The library's tokenizer without spaces of its own. It is the same object where nothing
        has to be changed, because a large one takes hundreds of MiB."""
        from tokenizers import Tokenizer

        steps = (self._tokenizer.normalizer, self._tokenizer.pre_tokenizer)
        states = [None if step is None else json.loads(step.__getstate__()) for step in steps]
        if all(_without_first_space(state) == state for state in states):
            return self._tokenizer
        whole = json.loads(self._tokenizer.to_str())
        for part, state in zip(("normalizer", "pre_tokenizer"), states, strict=True):
            whole[part] = _without_first_space(state)
        return Tokenizer.from_str(json.dumps(whole))

    def copy_tokenizer(self) -> Tokenizer:
        """Return a copy of the library's own tokenizer, whose settings may be changed."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._tokenizer.to_str())

    @cached_property
    def templates(self) -> dict[str, ChatTemplate]:
        """All chat templates by name."""
        sources = read_chat_templates(self._folder, self._config, self.special_texts)
        return {name: replace(one, worker=self._worker) for name, one in sources.items()}


class TokenTexts(Protocol):
    """The part of a tokenizer that decoding token by token needs."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def first_token_bytes(self, token: int) -> bytes: ...


def continue_stream(tokenizer: TokenTexts, prompt: Sequence[int]) -> TextStream:
    """Return a decoder for a text that continues ``prompt`` (``TextTokenizer.stream``)."""
    stream = TextStream(tokenizer)
    own = [token for token in prompt if token not in tokenizer.special_ids]
    stream.push(own[-_MAX_UNFINISHED_TOKENS:])
    return stream


class TextStream:
    """Incremental decoder of one sequence: the bytes of its tokens as UTF-8. A byte that belongs to
    no character becomes U+FFFD. The first token is decoded as the library does at the beginning of
    a text, where some decoders drop a space."""

    def __init__(self, tokenizer: TokenTexts) -> None:
        self._shown_first, self._token_bytes = tokenizer.first_token_bytes, tokenizer.token_bytes
        self._special_ids = tokenizer.special_ids
        self._is_at_start = True
        self._characters = getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[int]) -> str:
        """Return the text that ``tokens`` complete, which may be empty."""
        return "".join(self._push_one(token) for token in tokens)

    def flush(self) -> str:
        """Return the text that was held back, with an unfinished character as U+FFFD. The stream
        begins again."""
        self._is_at_start = True
        text = self._characters.decode(b"", final=True)
        self._characters.reset()
        return text

    def _push_one(self, token: int) -> str:
        if token in self._special_ids:
            return ""
        written, is_first = self._token_bytes(token), self._is_at_start
        self._is_at_start = is_first and not written
        if is_first and written.startswith(b" "):
            at_start = self._shown_first(token)
            written = (
                written[len(written) - len(at_start) :] if written.endswith(at_start) else written
            )
        return self._characters.decode(written)
