"""``edgespec serve``: OpenAI's HTTP API in front of this device."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from edgespec.cli.options import DEVICE_FLAGS, LOG_FLAGS, SAMPLING_FLAGS, Flag, from_config
from edgespec.cli.running import set_up_logging, trace_to
from edgespec.cli.serve_install import FLAG, install_service
from edgespec.cli.serve_life import serve_until_stopped
from edgespec.config import AgentConfig

_SERVICE = "The endpoint"
_ENDPOINT_FLAGS = (
    Flag("endpoint.host", panel=_SERVICE),
    Flag("endpoint.port", ("--port", "-p"), environment="EDGESPEC_ENDPOINT_PORT", panel=_SERVICE),
    Flag("endpoint.key_file", metavar="FILE", panel=_SERVICE),
    Flag("endpoint.insecure", panel=_SERVICE),
    Flag("endpoint.allow_origins", ("--allow-origin",), metavar="URL", panel=_SERVICE),
    Flag("endpoint.default_max_tokens", ("--max-tokens", "-n"), panel=_SERVICE),
    Flag("endpoint.log_prompts", panel=_SERVICE),
)
Install = Annotated[
    bool,
    typer.Option(
        FLAG,
        help="Write a systemd unit of this user that runs this very command, and start nothing",
        rich_help_panel=_SERVICE,
    ),
]


@from_config(AgentConfig, *_ENDPOINT_FLAGS, *SAMPLING_FLAGS[1:3], *DEVICE_FLAGS, *LOG_FLAGS)
def serve(settings: AgentConfig, install: Install = False) -> None:
    """Serve OpenAI's HTTP API on this device, until Ctrl-C or SIGTERM.

    Programs that speak it (openai's clients, chat interfaces, editors) get the target's text from
    http://127.0.0.1:7421/v1, drafted here. A verifier that is not there yet is waited for. What a
    request does not say is as the sampling options here say. Beyond this machine a key is needed:
    EDGESPEC_ENDPOINT_KEY, or --key-file.

    [dim]edgespec serve --verifier gpu-box:7420 --ca ca.pem[/]

    [dim]edgespec serve --host 0.0.0.0 --key-file endpoint.key --allow-origin https://chat.example[/]
    """
    set_up_logging(settings.log_level, settings.log_format)
    if install:
        install_service(settings, sys.argv[1:])
        return
    with trace_to(settings.trace, settings.trace_tokens) as tracer:
        asyncio.run(serve_until_stopped(settings, tracer))
