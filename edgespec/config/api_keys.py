"""API keys from the environment or a file.

No option takes a key, since other users of a machine can read its command lines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from edgespec.config.file_permissions import checked_path
from edgespec.config.files import TooLargeError, read_bytes
from edgespec.config.loading import ConfigError

MAX_KEY_CHARS: Final = 4096
"""Most characters of an API key, which travels as a header."""


def load_api_key(path: str, variable: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the API key in an environment variable, or else in a file.

    It is empty if the variable is not set and ``path`` is empty. Raises ``ConfigError`` naming the
    file or the variable if it holds no key."""
    source, key = variable, environment.get(variable, "").strip()
    if not key and path:
        source = path
        try:
            found = read_bytes(checked_path(path, secret=True), MAX_KEY_CHARS + len("\r\n"))
            key = found.decode("ascii").strip()
        except TooLargeError as error:
            raise ConfigError(f"{path}: holds no key: {error}") from None
        except OSError as error:
            why = f"{error.strerror or error}; name a file with the key, or set {variable}"
            raise ConfigError(f"{path}: {why}") from error
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: holds no key: it is not plain ASCII") from None
        if not key:
            raise ConfigError(f"{path}: holds no key")
    if len(key) > MAX_KEY_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
        wanted = f"one word of at most {MAX_KEY_CHARS} characters"
        raise ConfigError(f"{source}: holds no key, which is {wanted}")
    return key
