"""Pictures of a request: read from the fields of the APIs, fetched, and checked.

All APIs end in one form. In the messages a picture is the part ``{"type": "image"}`` of a content
that is a list, which is what chat templates of vision models read. The pictures themselves stand in
a list beside the messages, in the order of the parts.

A picture by its address on the web is fetched only where the operator allows it
(``endpoint.picture_urls``). A client then chooses what this device connects to, so only public
addresses are dialed: the addresses of a name are looked up once, checked, and the checked one is
dialed, for each redirect again. Size, time and redirects are bounded.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import SplitResult, urljoin, urlsplit

from edgespec.core.protocol.pictures import (
    MAX_PICTURES,
    PictureInput,
    PlacedPicture,
    check_picture,
    place_pictures,
    read_header,
)
from edgespec.endpoint.request_json import ApiError, Fields, invalid_request, shown_value

PICTURE_PART: Final = {"type": "image"}
"""A picture in the content of a message, for chat templates."""
_DATA: Final = "data:"
_WEB: Final = ("http://", "https://")
FETCH_WITHIN_S: Final = 10.0
"""Seconds that fetching one picture may take, redirects included."""
_MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_MAX_URL_CHARACTERS: Final = 4096
_PIECE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class SentPicture:
    """A picture as a request has it: its bytes, or its address on the web."""

    name: str
    """The field that holds it, for errors."""
    data: bytes = field(default=b"", repr=False)
    url: str = ""


def read_picture_url(name: str, url: str) -> SentPicture:
    """Return the picture of a ``data:`` URL, or of an address that has to be fetched. Raises
    ``ApiError`` that names the field."""
    if url.lower().startswith(_DATA):
        head, comma, body = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            shown = shown_value(url[:80])
            raise invalid_request(name, f"{name} is {shown}, but a data URL must be in base64")
        data = decode_base64(name, body)
        try:
            read_header(data)
        except ValueError as error:
            raise invalid_request(name, f"{name} {error}") from None
        return SentPicture(name, data)
    if url.lower().startswith(_WEB):
        if len(url) > _MAX_URL_CHARACTERS:
            why = f"has {len(url)} characters, but a URL may have at most {_MAX_URL_CHARACTERS}"
            raise invalid_request(name, f"{name} {why}")
        return SentPicture(name, url=url)
    shown = shown_value(url[:80])
    raise invalid_request(name, f"{name} is {shown}, but must be a data URL, http:// or https://")


def decode_base64(name: str, text: str) -> bytes:
    """Return the bytes of a text in base64, which may have line breaks. Raises ``ApiError``."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise invalid_request(name, f"{name} is no base64") from None


def read_picture_part(part: Fields) -> SentPicture:
    """Return the picture of a content part ``image_url`` of OpenAI's chat API. Raises
    ``ApiError``."""
    value = part.raw("image_url")
    name = part.name("image_url")
    url = value
    if isinstance(value, dict):
        inner = part.section("image_url")
        name, url = inner.name("url"), inner.text("url")
    if not isinstance(url, str) or not url:
        raise invalid_request(name, f"{name} is missing, but must be the URL of a picture")
    return read_picture_url(name, url)


def check_count(pictures: Sequence[SentPicture], most: int = MAX_PICTURES) -> None:
    """Raise ``ApiError`` if a request has more than ``most`` pictures."""
    if len(pictures) > most:
        name = pictures[most].name
        why = f"the request has {len(pictures)} pictures, but at most {most}"
        raise invalid_request(name, f"{name} is one too many: {why}")


def check_pictures(pictures: Sequence[SentPicture], bounds: PictureInput) -> None:
    """Raise ``ApiError`` for the first picture that a bound excludes."""
    check_count(pictures, bounds.max_count)
    for one in pictures:
        try:
            check_picture(one.data, bounds)
        except ValueError as error:
            raise invalid_request(one.name, f"{one.name} {error}") from None


def place_in_prompt(
    prompt: Sequence[int], pictures: Sequence[SentPicture], bounds: PictureInput
) -> tuple[PlacedPicture, ...]:
    """Return the pictures at their placeholders in ``prompt``. Raises ``ApiError``."""
    try:
        return place_pictures(prompt, [one.data for one in pictures], bounds)
    except ValueError as error:
        raise invalid_request("messages", str(error)) from None


def join_contents(separator: str, *contents: Any) -> Any:
    """Return the contents of messages, which are texts or lists of parts, as one, without empty
    ones. The result is a text if all are."""
    kept = [one for one in contents if one]
    if all(isinstance(one, str) for one in kept):
        return separator.join(kept)
    parts: list[dict[str, Any]] = []
    for one in kept:
        if parts:
            parts.append({"type": "text", "text": separator})
        parts += [{"type": "text", "text": one}] if isinstance(one, str) else one
    return parts


def take_pictures(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], tuple[SentPicture, ...]]:
    """Return messages as in OpenAI's chat API with ``PICTURE_PART`` in place of their pictures, and
    the pictures. Raises ``ApiError``."""
    taken: list[dict[str, Any]] = []
    pictures: list[SentPicture] = []
    for place, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            taken.append(dict(message))
            continue
        parts: list[Any] = []
        for part in Fields({"content": content}, f"messages[{place}].").sections("content"):
            if part.raw("type") == "image_url":
                pictures.append(read_picture_part(part))
                parts.append(PICTURE_PART)
            else:
                parts.append(part.data)
        taken.append({**message, "content": parts})
    check_count(pictures)
    return taken, tuple(pictures)


# --- pictures on the web ------------------------------------------------------------------------


class PictureUrlError(ValueError):
    """A picture cannot be fetched. The text is a predicate, without what the server answered."""


def fetch_pictures(
    pictures: Sequence[SentPicture], max_bytes: int, *, is_allowed: bool
) -> tuple[SentPicture, ...]:
    """Return the pictures, each address replaced by its bytes. This blocks, so call it in a
    thread. Raises ``ApiError``, for every address if ``is_allowed`` is False."""
    fetched: list[SentPicture] = []
    for one in pictures:
        if not one.url:
            fetched.append(one)
            continue
        if not is_allowed:
            why = "is an address on the web, which is not fetched here: send a data URL"
            setting = "or start the endpoint with --set endpoint.picture_urls=true"
            raise invalid_request(one.name, f"{one.name} {why}, {setting}")
        try:
            data = fetch(one.url, max_bytes)
        except PictureUrlError as error:
            raise invalid_request(one.name, f"{one.name} {error}") from None
        fetched.append(replace(one, data=data, url=""))
    return tuple(fetched)


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet, also where an IPv6 address
    stands for an IPv4 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if any(ip in network for network in _NAT64):
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF))
        if any(one is not None and not one.is_global for one in inner):
            return False
        if ip.ipv4_mapped is not None:
            return ip.ipv4_mapped.is_global and not ip.ipv4_mapped.is_multicast
    return ip.is_global and not ip.is_multicast


_NAT64: Final = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))


def fetch(
    url: str,
    max_bytes: int,
    *,
    is_public: Callable[[str], bool] = is_public,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """Return the bytes at an address on the web, at most ``max_bytes``. This blocks. Raises
    ``PictureUrlError``.

    Args:
        is_public: Whether an IP address may be dialed.
        clock: Seconds for the limit on the time.
    """
    until_s = clock() + FETCH_WITHIN_S
    for _ in range(_MAX_REDIRECTS + 1):
        parts = _split_url(url)
        try:
            connection = _connect(parts, is_public, until_s - clock())
            # The library forgets the socket of a response that ends with the connection.
            inner = connection.sock
            try:
                target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
                connection.request("GET", target, headers=headers)
                response = connection.getresponse()
                if response.status not in _REDIRECTS:
                    return _read_response(response, inner, max_bytes, until_s, clock)
                location = response.getheader("Location") or ""
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise PictureUrlError(f"cannot be fetched: {type(error).__name__}") from None
        url = urljoin(url, location)
    raise PictureUrlError(f"cannot be fetched: it has more than {_MAX_REDIRECTS} redirects")


def _split_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise PictureUrlError("is no URL that can be fetched") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise PictureUrlError("leads to an address that is neither http:// nor https://")
    if parts.username is not None or not url.isascii() or not url.isprintable() or " " in url:
        raise PictureUrlError("is a URL with a user's name or with characters that must be escaped")
    return parts


def _connect(
    parts: SplitResult, is_public: Callable[[str], bool], within_s: float
) -> http.client.HTTPConnection:
    """Return a connection to a checked address of the URL's host. Raises ``OSError``."""
    host, is_secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
    if not addresses or not all(map(is_public, addresses)):
        raise PictureUrlError(f"leads to {host!r}, which is no address of the public internet")
    if within_s <= 0.0:
        raise TimeoutError
    inner = socket.create_connection((addresses[0], port), timeout=within_s)
    try:
        if is_secure:
            context = ssl.create_default_context()
            inner = context.wrap_socket(inner, server_hostname=host)
    except BaseException:
        inner.close()
        raise
    connection = http.client.HTTPConnection(host, port, timeout=within_s)
    connection.sock = inner
    return connection


def _read_response(
    response: http.client.HTTPResponse,
    connection: socket.socket,
    max_bytes: int,
    until_s: float,
    clock: Callable[[], float],
) -> bytes:
    if response.status != 200:
        raise PictureUrlError(f"cannot be fetched: the server answers {response.status}")
    parts: list[bytes] = []
    size = 0
    while size <= max_bytes:
        left_s = until_s - clock()
        if left_s <= 0.0:
            raise PictureUrlError(f"cannot be fetched within {FETCH_WITHIN_S:g} s")
        connection.settimeout(left_s)
        # ``read1`` returns what has arrived, so that a slow server cannot stretch one call.
        piece = response.read1(_PIECE_BYTES)
        if not piece:
            return b"".join(parts)
        parts.append(piece)
        size += len(piece)
    raise PictureUrlError(f"has more than {max_bytes} bytes, which is the limit of one picture")


def explain_text_model(name: str, picture: SentPicture) -> ApiError:
    """Return the error for a picture that was sent to a model which reads text only."""
    why = f"is a picture, but the model {name!r} reads text only here"
    return invalid_request(picture.name, f"{picture.name} {why}", "unsupported_parameter")
