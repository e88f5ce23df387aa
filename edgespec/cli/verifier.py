"""``edgespec verifier``: the daemon that serves the target model."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Annotated

import typer

from edgespec.cli.options import Flag, from_config
from edgespec.cli.running import FAILED, say, set_up_logging, trace_to
from edgespec.cli.serving import serve
from edgespec.config import VerifierConfig

_SERVICE = "Whom it serves"
_FLAGS = (
    Flag("engine_flags", ("--engine-flags",), metavar="[-- FLAGS]", argument=True),
    Flag("model"),
    Flag("engine"),
    Flag("device"),
    Flag("quantize"),
    Flag("max_model_len"),
    Flag("limits.kv_budget", metavar="SIZE"),
    Flag("pacing.pass_ms"),
    Flag("host", panel=_SERVICE),
    Flag("port", ("--port", "-p"), panel=_SERVICE),
    Flag("keys", metavar="FILE", panel=_SERVICE),
    Flag("tls.cert", ("--tls-cert",), metavar="FILE", panel=_SERVICE),
    Flag("tls.key", ("--tls-key",), metavar="FILE", panel=_SERVICE),
    Flag("insecure", panel=_SERVICE),
    Flag("metrics_port", panel=_SERVICE),
)
WITH_PARENT = "--with-parent"
"""Ends the verifier with the process that holds the other end of its standard input."""
WithParent = Annotated[
    bool, typer.Option(WITH_PARENT, hidden=True, help="Stop when standard input ends")
]


@from_config(VerifierConfig, *_FLAGS)
def verifier(settings: VerifierConfig, with_parent: WithParent = False) -> None:
    """Serve a target model to devices, until Ctrl-C or SIGTERM.

    Prints one line when it is ready. To stop, it takes no new streams, lets the running ones go on
    for drain_s seconds and tells the rest, who come back when a verifier does; a second Ctrl-C ends
    at once. SIGHUP reads keys and certificates again. Without TLS it listens on this machine
    alone.

    [dim]edgespec verifier --model Qwen/Qwen3-8B[/]

    [dim]edgespec verifier --host 0.0.0.0 --tls-cert s.pem --tls-key s.key --keys keys.yaml[/]

    [dim]edgespec verifier --engine vllm --model Qwen/Qwen3-32B -- --tensor-parallel-size 4[/]
    """
    set_up_logging(settings.log_level, settings.log_format)
    with trace_to(settings.trace, settings.trace_tokens) as tracer:
        failure = asyncio.run(serve(settings, tracer, with_parent))
    _leave(failure)


def _leave(failure: str | None) -> None:
    """After a failure: end the process, and wait for no thread that may hang in the target."""
    if failure is None:
        return
    say(f"error: the verifier failed: {failure}")
    logging.shutdown()
    os._exit(FAILED)
