"""``edgespec serve``: OpenAI's HTTP API in front of this device."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.cli.device import agent_settings
from edgespec.cli.running import reported, trace_to
from edgespec.cli.serve_install import FLAG, install_service
from edgespec.cli.serve_life import serve_until_stopped
from edgespec.cli.tls_options import WHERE
from edgespec.config.endpoint import LOGGED_CHARACTERS

_SERVICE = "The endpoint"
KEYS = {
    **options.AGENT_KEYS,
    "host": "endpoint.host",
    "port": "endpoint.port",
    "key_file": "endpoint.key_file",
    "insecure": "endpoint.insecure",
    "insecure_verifier": "insecure",
    "allow_origin": "endpoint.allow_origins",
    "max_concurrent": "endpoint.max_concurrent",
    "max_queue": "endpoint.max_queue",
    "max_tokens": "endpoint.default_max_tokens",
    "drain_s": "endpoint.drain_s",
    "log_prompts": "endpoint.log_prompts",
}
Host = Annotated[
    str | None,
    typer.Option("--host", help="Where to listen (default: 127.0.0.1)", rich_help_panel=_SERVICE),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        "-p",
        envvar="EDGESPEC_ENDPOINT_PORT",
        help="0: any (default: 7421)",
        rich_help_panel=_SERVICE,
    ),
]
KeyFile = Annotated[
    str | None,
    typer.Option(
        "--key-file",
        metavar="FILE",
        help="Clients must show the key in it; EDGESPEC_ENDPOINT_KEY wins over it",
        rich_help_panel=_SERVICE,
    ),
]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure/--no-insecure",
        help="Listen beyond this machine without a key",
        rich_help_panel=_SERVICE,
    ),
]
InsecureVerifier = Annotated[
    bool | None,
    typer.Option(
        "--insecure-verifier/--no-insecure-verifier",
        help="Send the verifier's key without TLS, too",
        rich_help_panel=WHERE,
    ),
]
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-origin",
        metavar="URL",
        help="Let web pages of this origin ask, such as https://chat.example; *: all; repeatable",
        rich_help_panel=_SERVICE,
    ),
]
MaxConcurrent = Annotated[
    int | None,
    typer.Option(
        "--max-concurrent", help="Texts beside each other (default: 8)", rich_help_panel=_SERVICE
    ),
]
MaxQueue = Annotated[
    int | None,
    typer.Option(
        "--max-queue",
        help="Requests that may wait; those beyond get 429 (default: 32)",
        rich_help_panel=_SERVICE,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        help="Of requests that do not say (default: a chat may fill the context)",
        rich_help_panel=_SERVICE,
    ),
]
DrainS = Annotated[
    float | None,
    typer.Option(
        "--drain-s",
        help="How long running requests may go on after SIGTERM (default: 5)",
        rich_help_panel=_SERVICE,
    ),
]
LogPrompts = Annotated[
    bool | None,
    typer.Option(
        "--log-prompts/--no-log-prompts",
        help=f"Write prompts and answers to the log, at most {LOGGED_CHARACTERS} characters of each"
        " (default: off, then no log has a word of them)",
        rich_help_panel=_SERVICE,
    ),
]

Install = Annotated[
    bool,
    typer.Option(
        FLAG,
        help="Write a systemd unit of this user that runs this very command, and start nothing",
        rich_help_panel=_SERVICE,
    ),
]


def serve(
    context: typer.Context,
    host: Host = None,
    port: Port = None,
    key_file: KeyFile = None,
    insecure: Insecure = None,
    allow_origin: AllowOrigin = None,
    max_concurrent: MaxConcurrent = None,
    max_queue: MaxQueue = None,
    max_tokens: MaxTokens = None,
    drain_s: DrainS = None,
    verifier: options.VerifierAddress = None,
    association: options.Association = None,
    model: options.TargetName = None,
    tls: options.Tls = None,
    ca: options.Ca = None,
    client_cert: options.ClientCert = None,
    client_key: options.ClientKey = None,
    server_name: options.ServerName = None,
    api_key_file: options.ApiKeyFile = None,
    insecure_verifier: InsecureVerifier = None,
    offline: options.OfflineOption = None,
    rtt_ms: options.RttMs = None,
    draft: options.Draft = None,
    draft_variant: options.DraftVariant = None,
    draft_bits: options.DraftBits = None,
    draft_lookup: options.DraftLookup = None,
    tokenizer: options.Tokenizer = None,
    policy: options.Policy = None,
    prefer: options.PreferOption = None,
    gamma: options.Gamma = None,
    width: options.Width = None,
    window: options.Window = None,
    run_ahead: options.RunAheadOption = None,
    draft_ms: options.DraftMs = None,
    memory_budget: options.MemoryBudget = None,
    provider: options.Provider = None,
    ladder: options.Ladder = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    trace: options.Trace = None,
    install: Install = False,
    log_prompts: LogPrompts = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
    config: options.Config = None,
    print_config: options.PrintConfig = False,
) -> None:
    """Serve OpenAI's HTTP API on this device, until Ctrl-C or SIGTERM.

    Programs that speak it (openai's clients, chat interfaces, editors) get the target's text from
    http://127.0.0.1:7421/v1, drafted here. A verifier that is not there yet is waited for. What a
    request does not say is as the sampling options here say. Beyond this machine a key is needed:
    EDGESPEC_ENDPOINT_KEY, or --key-file.

    [dim]edgespec serve --verifier gpu-box:7420 --ca ca.pem[/]

    [dim]edgespec serve --host 0.0.0.0 --key-file endpoint.key --allow-origin https://chat.example[/]
    """
    with reported():
        settings = agent_settings(context, KEYS)
        if install:
            install_service(settings, sys.argv[1:])
            return
        with trace_to(settings.trace, settings.trace_tokens) as tracer:
            asyncio.run(serve_until_stopped(settings, tracer))
