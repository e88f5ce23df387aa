"""``edgespec verifier``: the daemon that serves the target model."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.cli.running import (
    FAILED,
    on_stopping_signals,
    reported,
    say,
    set_up_logging,
    trace_to,
)
from edgespec.cli.service_manager import ServiceManager
from edgespec.compose import SetupError, build_verifier, load_target, target_mode
from edgespec.config import VerifierConfig
from edgespec.ports import TargetModel
from edgespec.telemetry.trace import Tracer

KEYS = {
    "model": "model",
    "name": "name",
    "host": "host",
    "port": "port",
    "dtype": "dtype",
    "device": "device",
    "canonical": "canonical",
    "max_sessions": "limits.max_sessions",
    "max_model_len": "max_model_len",
    "pass_ms": "pacing.pass_ms",
    "trace": "trace",
    "log_level": "log_level",
}
WITH_PARENT = "--with-parent"
"""Ends the verifier with the process that holds the other end of its standard input."""
WithParent = Annotated[
    bool, typer.Option(WITH_PARENT, hidden=True, help="Stop when standard input ends")
]
_STREAMS_END_WITHIN_S = 3.0


def verifier(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            envvar="EDGESPEC_MODEL",
            help="bundled, a folder, a Hub id, toy (default: bundled)",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What devices ask for (default: the model's)")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="(default: 127.0.0.1)")] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", "-p", envvar="EDGESPEC_PORT", help="0: any (default: 7420)"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="auto (float32 on a CPU), float32, bfloat16, float16"),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:N")] = None,
    canonical: Annotated[
        bool | None,
        typer.Option(
            "--canonical/--no-canonical",
            help="Same bits under every schedule (default: on CPUs)",
        ),
    ] = None,
    max_sessions: Annotated[
        int | None, typer.Option("--max-sessions", help="(default: 64)")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Context in tokens (default: the model's)")
    ] = None,
    pass_ms: Annotated[
        float | None, typer.Option("--pass-ms", help="Emulate a slower target: time of a pass")
    ] = None,
    trace: options.Trace = None,
    log_level: options.LogLevel = None,
    config: options.Config = None,
    print_config: options.PrintConfig = False,
    with_parent: WithParent = False,
) -> None:
    """Serve a target model to devices, until Ctrl-C or SIGTERM.

    Prints one line when it is ready. Stopping tells the devices, who come back when a verifier
    does; a second Ctrl-C ends at once. The port is not encrypted and asks for no password: listen
    beyond this machine only on a network you trust.

    [dim]edgespec verifier --host 0.0.0.0 --port 7420[/]
    """
    with reported():
        settings = options.configured(VerifierConfig, context, KEYS)
        set_up_logging(settings.log_level)
        with trace_to(settings.trace) as tracer:
            failure = asyncio.run(_serve(settings, tracer, with_parent))
        _leave(failure)


def _leave(failure: str | None) -> None:
    """After a failure: end the process, and wait for no thread that may hang in the target."""
    if failure is None:
        return
    say(f"error: the verifier failed: {failure}")
    logging.shutdown()
    os._exit(FAILED)


async def _serve(config: VerifierConfig, tracer: Tracer, with_parent: bool) -> str | None:
    """Until somebody asks for the end, or the verifier fails: then why."""
    if not sys.stderr.isatty():  # a log file wants no progress bars
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    end = _End()
    on_stopping_signals(end.ask)
    if with_parent:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _read_stdin, end)
    check_free(config)
    say(f"loading {config.model} ...")
    target = await asyncio.to_thread(load_target, config)
    serving, server = build_verifier(config, target=target, tracer=tracer)
    await server.start()
    end.devices_know = True
    typer.echo(line := ready_line(config, server.port, target))
    manager = ServiceManager()
    manager.ready(line)
    alive = asyncio.ensure_future(manager.keep_alive())
    ends = [asyncio.ensure_future(event.wait()) for event in (end.asked, serving.broken)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    manager.stopping(f"stopping: {serving.why_broken or 'asked to'}")
    if not serving.broken.is_set():
        await serving.stop()
    await server.stop(_STREAMS_END_WITHIN_S)
    alive.cancel()
    return serving.why_broken


class _End:
    """The first request to stop is obeyed in order, the second at once.

    So is the first one while the model is still being loaded: nobody has to be told yet.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.devices_know = False

    def ask(self, number: int) -> None:
        if self.asked.is_set() or not self.devices_know:
            os._exit(128 + number)
        self.asked.set()
        say("stopping; the devices are told")


def _read_stdin(end: _End) -> None:
    """What comes means nothing; the end of it is the end of the process that started this one,
    even where that was killed and could not say so."""
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        end.ask(signal.SIGHUP)


def check_free(config: VerifierConfig) -> None:
    """Raises ``SetupError`` when the address cannot be had: said before a model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            why = error.strerror or str(error)
            hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
            raise SetupError(f"cannot listen on {config.address}: {why}{hint}") from error


def ready_line(config: VerifierConfig, port: int, target: TargetModel) -> str:
    host = config.address.rpartition(":")[0]
    return (
        f"edgespec verifier ready on {host}:{port}: {target.info.name},"
        f" {target_mode(target)}, context {target.info.context_length}"
    )
