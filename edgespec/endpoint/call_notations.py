"""Notations of tool calls that are not JSON: XML elements, Python calls, and Gemma's own.

Each parser gets the whole text of a call and returns its name and arguments, or None for a text
that is no call. Notations without types take them from the tool's schema.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Final

Call = tuple[str, dict[str, Any]]
Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of the parameters, by the names of the tools."""

_FUNCTION: Final = re.compile(r"\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_ARGUMENT: Final = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)
_PYTHON_WORDS: Final = {"true": True, "false": False, "null": None}
_MAX_DEPTH: Final = 64
"""Limit on the nesting of values in Gemma's notation."""


def parse_xml_call(text: str, schemas: Schemas) -> Call | None:
    """Parse Qwen3-Coder's ``<function=NAME><parameter=KEY>VALUE</parameter>...</function>``."""
    if (match := _FUNCTION.fullmatch(text)) is None:
        return None
    return _typed_call(match[1].strip(), match[2], _PARAMETER, schemas)


def parse_glm_call(text: str, schemas: Schemas) -> Call | None:
    """Parse GLM's ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...``."""
    name, mark, rest = text.partition("<arg_key>")
    name = name.strip()
    if not name or "<" in name or "\n" in name:
        return None
    return _typed_call(name, mark + rest, _ARGUMENT, schemas)


def _typed_call(name: str, body: str, pattern: re.Pattern[str], schemas: Schemas) -> Call | None:
    arguments, at = dict[str, Any](), 0
    while at < len(body):
        if (match := pattern.match(body, at)) is None:
            return None
        key = match[1].strip()
        arguments[key] = _typed_value(match[2], key, schemas.get(name, {}))
        at = match.end()
    return name, arguments


def _typed_value(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a parameter: JSON, unless its schema wants text or has no type."""
    properties = schema.get("properties")
    own = properties.get(key) if isinstance(properties, dict) else None
    types = _types_of(own) if isinstance(own, dict) else set[str]()
    if not types or (types <= {"string"}):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        word = text.strip().lower()
        return {"true": True, "false": False, "none": None}.get(word, text)


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    types = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for name in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(name) or ():
            types |= _types_of(one) if isinstance(one, dict) else set()
    for value in schema.get("enum") or ():
        types.add("string" if isinstance(value, str) else "other")
    if "$ref" in schema:
        types.add("other")
    return types


# --- Python ---------------------------------------------------------------------------------------


class PythonEndFinder:
    """Incremental search for the end of the Python list that begins at ``start``."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth, self._quote = 0, ""

    def find(self, text: str) -> int | None:
        """Return the index behind the list, None if it is not complete, or -1 if a bracket
        closes that was not opened."""
        while self._at < len(text):
            character = text[self._at]
            if self._quote and character == "\\":
                if self._at + 1 == len(text):
                    return None
                self._at += 1
            elif self._quote:
                self._quote = "" if character == self._quote else self._quote
            elif character in "'\"":
                self._quote = character
            elif character in "[({":
                self._depth += 1
            elif character in "])}":
                self._depth -= 1
                if self._depth < 0:
                    return -1
                if not self._depth:
                    return self._at + 1
            self._at += 1
        return None


def parse_python_calls(text: str) -> list[Call] | None:
    """Parse the pythonic notation of Llama: ``[NAME(KEY=VALUE, ...), ...]``."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_python_call(one) for one in tree.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("an element of the list is no call with named arguments")
    arguments = dict[str, Any]()
    for one in node.keywords:
        if one.arg is None:
            raise ValueError("a call has ** in its arguments")
        arguments[one.arg] = _python_value(one.value)
    return ast.unparse(node.func), arguments


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _PYTHON_WORDS:
        return _PYTHON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        pairs = [(key, one) for key, one in zip(node.keys, node.values, strict=True) if key]
        return {str(_python_value(key)): _python_value(one) for key, one in pairs}
    value = ast.literal_eval(node)
    json.dumps(value)  # raises for a value that JSON lacks
    return value


# --- Gemma ----------------------------------------------------------------------------------------


def parse_gemma_call(text: str, quote: str) -> Call | None:
    """Parse Gemma's ``call:NAME{KEY:VALUE,...}``. Texts stand between two ``quote`` marks, and keys
    have none."""
    match = re.match(r"\s*call:\s*([^{\s]+)\s*(?={)", text)
    if match is None:
        return None
    reader = _GemmaReader(text, quote, match.end())
    try:
        arguments = reader.read_value(0)
        reader.skip_space()
    except ValueError:
        return None
    is_whole = reader.at == len(text) and isinstance(arguments, dict)
    return (match[1], arguments) if is_whole else None


class _GemmaReader:
    _SCALAR: Final = re.compile(r"[^,\[\]{}]*")

    def __init__(self, text: str, quote: str, at: int) -> None:
        self._text, self._quote, self.at = text, quote, at

    def skip_space(self) -> None:
        while self.at < len(self._text) and self._text[self.at] in " \t\r\n":
            self.at += 1

    def read_value(self, depth: int) -> Any:
        self.skip_space()
        if depth > _MAX_DEPTH:
            raise ValueError(f"the value is nested deeper than {_MAX_DEPTH}")
        if self._skip("{"):
            return dict(self._read_members("}", depth, has_keys=True))
        if self._skip("["):
            return [value for _, value in self._read_members("]", depth, has_keys=False)]
        if self._skip(self._quote):
            return self._read_until(self._quote)
        match = self._SCALAR.match(self._text, self.at)
        assert match is not None  # the pattern matches an empty text
        self.at = match.end()
        word = match[0].strip()
        return json.loads(word) if word else self._fail("a value is missing")

    def _read_members(self, end: str, depth: int, *, has_keys: bool) -> list[tuple[str, Any]]:
        members = list[tuple[str, Any]]()
        self.skip_space()
        while not self._skip(end):
            if members and not self._skip(","):
                self._fail("a comma is missing")
            self.skip_space()
            key = ""
            if has_keys:
                is_quoted = self._skip(self._quote)
                key = self._read_until(self._quote if is_quoted else ":").strip()
                if is_quoted and not self._skip(":"):
                    self._fail("a colon is missing")
            members.append((key, self.read_value(depth + 1)))
            self.skip_space()
        return members

    def _skip(self, text: str) -> bool:
        is_there = self._text.startswith(text, self.at)
        self.at += len(text) if is_there else 0
        return is_there

    def _read_until(self, mark: str) -> str:
        place = self._text.find(mark, self.at)
        if place < 0:
            self._fail(f"{mark} is missing")
        text, self.at = self._text[self.at : place], place + len(mark)
        return text

    def _fail(self, why: str) -> None:
        raise ValueError(why)
