"""Which stream belongs to which session: at most one each way."""

from __future__ import annotations


class StreamTable:
    """Streams are the driver's numbers, sessions are named by their keys."""

    def __init__(self) -> None:
        self._stream_of: dict[str, int] = {}
        self._key_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._stream_of)

    def stream(self, key: str) -> int | None:
        """The stream of a session, if it has one."""
        return self._stream_of.get(key)

    def key(self, stream: int) -> str | None:
        """The session of a stream, if it has one."""
        return self._key_of.get(stream)

    def join(self, stream: int, key: str) -> None:
        """From now on the two belong together; neither may belong to another."""
        assert key not in self._stream_of
        assert stream not in self._key_of
        self._stream_of[key], self._key_of[stream] = stream, key

    def part(self, key: str) -> int | None:
        """The session has no stream any more; the one that it had."""
        stream = self._stream_of.pop(key, None)
        if stream is not None:
            del self._key_of[stream]
        return stream
