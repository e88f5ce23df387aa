"""A model's own chat template turns messages into the text of a prompt.

Templates are Jinja programs that come with the model, by the conventions of Hugging Face:
``chat_template.jinja`` or ``chat_template`` in ``tokenizer_config.json``, one or several named ones
(``tool_use`` is taken when tools are given); ``messages``, ``tools``, ``add_generation_prompt`` and
the special tokens as variables; ``raise_exception``, ``strftime_now``, ``tojson`` without HTML
escapes, ``{% generation %}``, ``{% break %}``. They run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jinja2 import Template

MAX_MESSAGES = 4096
MAX_PROMPT_CHARACTERS = 1 << 24
DEFAULT, TOOL_USE = "default", "tool_use"
Message = Mapping[str, Any]
"""At least ``role``; the rest is what the template reads."""
_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
_OURS = ("messages", "tools", "add_generation_prompt")


class TokenizerError(ValueError):
    """A tokenizer folder cannot be used; the message names the file and what is wrong with it."""


class ChatTemplateError(TokenizerError):
    """A template failed on these messages, or refuses them."""


@dataclass(frozen=True)
class ChatTemplate:
    """One template, compiled at its first use. ``tokens`` are the special ones by name."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    now: Callable[[], datetime] = datetime.now
    """What ``strftime_now`` formats."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. ``variables`` are further ones of the template, such as
        ``enable_thinking``. Raises ``ChatTemplateError``, also where it names one of ours."""
        check_messages(messages)
        for name in variables or ():
            if name in _OURS:
                raise ChatTemplateError(f"{name!r} is no variable to be set for a chat template")
        given = {
            **self.tokens,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._compiled.render(given)
        except TokenizerError:
            raise
        except Exception as error:  # a template is a program, and can fail like one
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise ChatTemplateError(
                f"the chat template wrote {len(text)} characters, at most {MAX_PROMPT_CHARACTERS}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ChatTemplateError("the messages hold half of a surrogate pair") from None
        return text

    @cached_property
    def knows_tools(self) -> bool:
        """Whether the template reads ``tools`` at all."""
        from jinja2 import meta

        try:
            tree = _environment(self.now).parse(self.source)
        except Exception as error:
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        return "tools" in meta.find_undeclared_variables(tree)

    @cached_property
    def _compiled(self) -> Template:
        template: Template = _environment(self.now).from_string(self.source)
        return template


class ChatTokenizer(Protocol):
    """A tokenizer that knows its model's way to chat."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def chat_template(self, *, tools: bool = False) -> ChatTemplate | None:
        """The model's template, the one for tools if it has such; None: it has none."""

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation; it writes the special tokens itself, so ``encode`` adds
        none. Raises ``TokenizerError``."""

    def special_id(self, text: str) -> int | None:
        """The id of the special token written so; None: there is none, or text shows it."""

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for by itself: perhaps a part of a character."""


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ``ChatTemplateError`` for none, or too many."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ChatTemplateError(
            f"number of messages is {len(messages)}, but must be in [1, {MAX_MESSAGES}]"
        )


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """The templates of a tokenizer folder by name; ``config`` is its ``tokenizer_config.json``.
    A file of its own wins over the entry there. Raises ``TokenizerError`` naming the file."""
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
    tokens = _special_texts(config)
    return {name: ChatTemplate(source, tokens) for name, source in sources.items()}


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, as far as there are any; a token is its text or an object with
    the text in it."""
    texts: dict[str, str] = {}
    for name in _TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def _environment(now: Callable[[], datetime]) -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}`` marks for trainers what the assistant said; here it is its body."""

        tags = {"generation"}  # noqa: RUF012 # declared so by jinja2

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise ChatTemplateError(f"the chat template refuses the messages: {message}")

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Without jinja2's HTML escaping, which would change the prompt."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment
