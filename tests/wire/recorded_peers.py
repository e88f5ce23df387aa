"""Streams of earlier versions, recorded between a device and a verifier, and a proxy that records
them.

``python -m tests.wire.recorded_peers VERIFIER FILE`` listens on a free port, prints its address,
passes everything on to the verifier, and writes the first stream that ends to the file. Device and
verifier may be of any version, since the proxy reads no message.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc.aio

DEVICE: Final = "device"
VERIFIER: Final = "verifier"
_SERVICE: Final = "edgespec.v1.Verifier"


@dataclass(frozen=True, slots=True)
class RecordedStream:
    """One stream between two peers. ``info``: the verifier's greeting, an ``InfoReply``.
    ``messages``: who sent each message, and its bytes, in the order in which the proxy had
    them."""

    info: bytes
    messages: tuple[tuple[str, bytes], ...]

    def of(self, sender: str) -> list[bytes]:
        """Return what one peer sent."""
        return [payload for who, payload in self.messages if who == sender]


def read_recording(path: Path) -> RecordedStream:
    """Return the stream in a file of the proxy."""
    data: Any = json.loads(path.read_text(encoding="utf-8"))
    return RecordedStream(
        info=bytes.fromhex(data["info"]),
        messages=tuple((who, bytes.fromhex(payload)) for who, payload in data["messages"]),
    )


def write_recording(path: Path, stream: RecordedStream) -> None:
    messages = [[who, payload.hex()] for who, payload in stream.messages]
    lines = ",\n  ".join(json.dumps(one) for one in messages)
    path.write_text(
        f'{{"info": "{stream.info.hex()}",\n "messages": [\n  {lines}]}}\n', encoding="utf-8"
    )


@asynccontextmanager
async def serve_methods(methods: dict[str, Any]) -> AsyncIterator[str]:
    """Serve methods of raw bytes under the verifier's service; yield the address. A method that is
    not among them is answered as one that an earlier version lacks: UNIMPLEMENTED."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.0)


async def record(verifier: str, path: Path) -> None:
    """Pass one stream on to the verifier at an address, and write it to ``path``."""
    messages: list[tuple[str, bytes]] = []
    infos: list[bytes] = []
    has_ended = asyncio.Event()
    async with grpc.aio.insecure_channel(verifier) as channel:
        call: Any = channel.stream_stream(f"/{_SERVICE}/Speculate", None, None)
        unary: Any = {
            name: channel.unary_unary(f"/{_SERVICE}/{name}", None, None)
            for name in ("Info", "Tokenizer")
        }

        async def pass_info(request: bytes, _: Any) -> bytes:
            infos.append(await unary["Info"](request))
            return infos[-1]

        async def pass_tokenizer(request: bytes, context: Any) -> bytes:
            try:
                return bytes(await unary["Tokenizer"](request))
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
                raise

        async def pass_stream(_: Any, context: Any) -> None:
            upstream = call()

            async def pass_up() -> None:
                while (payload := await context.read()) is not grpc.aio.EOF:
                    messages.append((DEVICE, payload))
                    await upstream.write(payload)
                await upstream.done_writing()

            passing = asyncio.create_task(pass_up())
            while (payload := await upstream.read()) is not grpc.aio.EOF:
                messages.append((VERIFIER, payload))
                await context.write(payload)
            passing.cancel()
            has_ended.set()

        methods: dict[str, Any] = {
            "Info": grpc.unary_unary_rpc_method_handler(pass_info),
            "Tokenizer": grpc.unary_unary_rpc_method_handler(pass_tokenizer),
            "Speculate": grpc.stream_stream_rpc_method_handler(pass_stream),
        }
        async with serve_methods(methods) as address:
            sys.stdout.write(f"{address}\n")
            sys.stdout.flush()
            await has_ended.wait()
    write_recording(path, RecordedStream(infos[-1], tuple(messages)))


if __name__ == "__main__":
    asyncio.run(record(sys.argv[1], Path(sys.argv[2])))
