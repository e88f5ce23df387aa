"""Reading a request's JSON: every mistake is an error that names the field and what it must be."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.endpoint.errors import ApiError, invalid

_SHOWN = 80
_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxlist, _shortened.maxdict = 6, _SHOWN, _SHOWN
_shortened.maxstring = _shortened.maxlong = 4 * _SHOWN


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a request. ``place`` is where it stands, such as ``messages[0].``; a field
    that is null counts as absent."""

    data: Mapping[str, Any]
    place: str = ""

    def name(self, field: str) -> str:
        return self.place + field

    def raw(self, field: str) -> Any:
        return self.data.get(field)

    def text(self, field: str) -> str | None:
        value = self.data.get(field)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(field, value, "text")
        return encodable(self.name(field), value)

    def flag(self, field: str) -> bool:
        """Absent: false."""
        value = self.data.get(field)
        if not isinstance(value, bool | None):
            raise self.wrong(field, value, "true or false")
        return bool(value)

    def number(self, field: str, low: float, high: float) -> float | None:
        value = self.data.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(field, value, "a number")
        if not low <= value <= high:
            raise self.wrong(field, value, f"in [{low:g}, {high:g}]")
        return float(value)

    def whole(self, field: str, low: int, high: int) -> int | None:
        value = self.data.get(field)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(field, value, "a whole number")
        if not low <= value <= high:
            raise self.wrong(field, value, f"in [{low}, {high}]")
        return value

    def sections(self, field: str, most: int | None = None) -> tuple[Fields, ...] | None:
        """A list of objects, at most ``most``."""
        value = self.data.get(field)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(field, value, "a list of objects")
        if most is not None and len(value) > most:
            name = self.name(field)
            raise invalid(name, f"{name} holds {len(value)} objects, but at most {most}")
        return tuple(self._section(f"{field}[{place}]", one) for place, one in enumerate(value))

    def section(self, field: str) -> Fields | None:
        value = self.data.get(field)
        return None if value is None else self._section(field, value)

    def one_of(self, field: str, known: Collection[str]) -> str | None:
        value = self.text(field)
        if value is not None and value not in known:
            raise self.wrong(field, value, f"one of {', '.join(known)}")
        return value

    def wrong(self, field: str, value: object, wanted: str) -> ApiError:
        """The error for a value that is not ``wanted``."""
        name = self.name(field)
        return invalid(name, f"{name} is {shown(value)}, but must be {wanted}")

    def _section(self, field: str, value: object) -> Fields:
        if not isinstance(value, dict):
            raise self.wrong(field, value, "an object")
        return Fields(value, f"{self.place}{field}.")


def encodable(name: str, text: str) -> str:
    """``text``, if UTF-8 can hold it. Raises ``ApiError`` for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(name, f"{name} holds half of a surrogate pair, which is no text") from None
    return text


def texts(fields: Fields, field: str, most: int) -> Sequence[str]:
    """A text, or a list of them; absent: none."""
    value = fields.raw(field)
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if isinstance(given, list) and len(given) > most:
        name = fields.name(field)
        raise invalid(name, f"{name} holds {len(given)} texts, but at most {most}")
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise fields.wrong(field, value, "text, or a list of texts")
    return tuple(encodable(fields.name(field), one) for one in given)


def shown(value: object) -> str:
    """A value in an error, in part if it is long: no more of it is written out than is shown."""
    text = _shortened.repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
