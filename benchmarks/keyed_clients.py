"""Clients that mean harm to a verifier with TLS and keys, for ``service_drill.py``.

    python benchmarks/keyed_clients.py wrong-keys|flood PORT --folder FOLDER --key NAME --seconds 8

FOLDER holds ``ca.pem`` and the file ``NAME.key`` with the key of the flood. ``wrong-keys`` tries
another key with each call, forty calls at a time; ``flood`` plays some kinds of
``hostile_clients.py`` at once, all with the one key. It prints a JSON object with what became of
the calls and is gone, its streams open. The process is niced to 10.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from hostile_clients import KINDS, OVER, SERVICE, Client, again_and_again

FLOOD = ("stale-drafts", "wide-roots", "open-cancel", "info", "long-prompts", "no-open")
WRONG_KEY_CLIENTS = 40


class KeyedChannel:
    """A channel whose every call shows a key; for the clients of ``hostile_clients.py``."""

    def __init__(self, channel: Any, key: str) -> None:
        self._channel, self._metadata = channel, (("authorization", f"Bearer {key}"),)

    def stream_stream(self, *arguments: Any) -> Any:
        return functools.partial(self._channel.stream_stream(*arguments), metadata=self._metadata)

    def unary_unary(self, *arguments: Any) -> Any:
        return functools.partial(self._channel.unary_unary(*arguments), metadata=self._metadata)


async def try_keys(channel: Any, dice: random.Random, tally: Counter[str]) -> None:
    """Another wrong key each time, at both calls."""
    while True:
        keyed = KeyedChannel(channel, f"edgespec-{dice.randbytes(32).hex()}")
        try:
            if dice.random() < 0.5:
                await keyed.unary_unary(f"{SERVICE}Info", None, None)(b"")
            else:
                call = keyed.stream_stream(f"{SERVICE}Speculate", None, None)()
                while await call.read() is not grpc.aio.EOF:
                    pass
            tally["let in"] += 1
        except OVER as error:
            code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
            tally["other" if code is None else code.name] += 1


async def hostile(options: argparse.Namespace) -> None:
    """For its time; prints what became of it."""
    os.nice(10)
    folder, tally = options.folder, Counter[str]()
    roots = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    local = [("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.secure_channel(f"127.0.0.1:{options.port}", roots, options=local)
    work = []
    if options.what == "wrong-keys":
        for number in range(WRONG_KEY_CLIENTS):
            work.append(try_keys(channel, random.Random(number), tally))
    else:
        keyed: Any = KeyedChannel(channel, (folder / f"{options.key}.key").read_text())
        nowhere: Any = None  # these kinds need no link of their own
        for name in FLOOD:
            for number in range(KINDS[name].clients):
                dice = random.Random(f"{name} {number}")
                client = Client(nowhere, keyed, dice, tally, 4096)
                work.append(again_and_again(client, KINDS[name].act))
    with suppress(TimeoutError):
        async with asyncio.timeout(options.seconds):
            await asyncio.gather(*work)
    print(json.dumps(dict(tally)), flush=True)
    os._exit(0)  # its streams die with it


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("wrong-keys", "flood"))
    parser.add_argument("port", type=int)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--seconds", type=float, default=8.0)
    asyncio.run(hostile(parser.parse_args()))


if __name__ == "__main__":
    main()
