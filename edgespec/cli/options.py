"""Options that several commands share, and how they override the configuration file.

An option left out is None and leaves what the file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from edgespec.cli.tls_options import DEVICE_TLS_KEYS
from edgespec.cli.tls_options import WHERE as _WHERE
from edgespec.cli.tls_options import Ca as Ca
from edgespec.cli.tls_options import ClientCert as ClientCert
from edgespec.cli.tls_options import ClientKey as ClientKey
from edgespec.cli.tls_options import ServerName as ServerName
from edgespec.cli.tls_options import Tls as Tls
from edgespec.config import ConfigError, PolicyName, dump_config, load_config
from edgespec.core.device.offline import Offline
from edgespec.core.device.preference import Prefer
from edgespec.core.protocol.messages import RunAhead
from edgespec.wire.access import check_file_permissions

_Config = TypeVar("_Config")

_TEXT, _DRAFTING, _OUTPUT = "The text", "Drafting", "Output"

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="EDGESPEC_CONFIG", help="YAML file; options win over it"),
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the merged YAML and stop")]
Trace = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Write every event as JSON lines")
]
LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", envvar="EDGESPEC_LOG_LEVEL", help="debug, info, warning, error"),
]
LogFormat = Annotated[
    str | None,
    typer.Option(
        "--log-format", envvar="EDGESPEC_LOG_FORMAT", help="text, or json: one object a line"
    ),
]

# --- the verifier's -------------------------------------------------------------------------

MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        envvar="EDGESPEC_METRICS_PORT",
        help="Serve Prometheus metrics on this port, 0: any (default: nowhere)",
    ),
]
MetricsHost = Annotated[
    str | None, typer.Option("--metrics-host", help="Where to (default: 127.0.0.1)")
]

# --- the device's ---------------------------------------------------------------------------

VerifierAddress = Annotated[
    list[str] | None,
    typer.Option(
        "--verifier",
        envvar="EDGESPEC_VERIFIER",
        metavar="HOST:PORT",
        help="Where the verifier is (default: 127.0.0.1:7420); repeatable: one is chosen, and the "
        "text goes on at another when it fails",
        rich_help_panel=_WHERE,
    ),
]
Association = Annotated[
    str | None,
    typer.Option(
        "--association",
        metavar="NAME",
        help="How to choose among several: lowest-delay (default), most-compute, "
        "strongest-signal, random, listed (the first that answers), rendezvous (replicas: each "
        "conversation keeps to one), learned:FILE",
        rich_help_panel=_WHERE,
    ),
]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Ask for the target, or an adapter, by name (default: what is served)",
        rich_help_panel=_WHERE,
    ),
]
RttMs = Annotated[
    float | None,
    typer.Option("--rtt-ms", help="Emulate a link of this round trip", rich_help_panel=_WHERE),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="Holds the key for the verifier; EDGESPEC_API_KEY wins over it",
        rich_help_panel=_WHERE,
    ),
]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure/--no-insecure",
        help="Send the key without TLS, too",
        rich_help_panel=_WHERE,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        envvar="EDGESPEC_DRAFT",
        help="bundled, a folder, an .onnx file, a Hub id; lookup: guess from the text, without a "
        "model; none: only stream; toy, random: for tests",
        rich_help_panel=_DRAFTING,
    ),
]
DraftVariant = Annotated[
    str | None,
    typer.Option(
        "--draft-variant",
        metavar="NAME",
        help="Of several ONNX graphs: q4, int8, fp16, ... (default: auto, the fastest here)",
        rich_help_panel=_DRAFTING,
    ),
]
DraftBits = Annotated[
    int | None,
    typer.Option(
        "--draft-bits",
        metavar="N",
        help="Of a checkpoint that is exported to draft: 4, 8 or 32 (default: 4)",
        rich_help_panel=_DRAFTING,
    ),
]
DraftLookup = Annotated[
    bool | None,
    typer.Option(
        "--draft-lookup/--no-draft-lookup",
        help="Answer from the text where that is as good as the model (default: off)",
        rich_help_panel=_DRAFTING,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="Folder or Hub id (default: the draft's)", rich_help_panel=_DRAFTING
    ),
]
Policy = Annotated[
    PolicyName | None,
    typer.Option(
        "--policy",
        help="goodput (default): stream what is expected to save more than it costs; windowed: "
        "stream what is likeliest; pearl: pre- and post-verify; fixed: draft, send, wait; "
        "specdec++: as fixed, up to a guess that is unsure; bandit: as fixed, by the length that "
        "paid",
        rich_help_panel=_DRAFTING,
    ),
]
PreferOption = Annotated[
    Prefer | None,
    typer.Option(
        "--prefer",
        help="speed (default): draft whatever may save time; balanced, battery, data: rest where a "
        "draft step or a sent guess brings less than it costs",
        rich_help_panel=_DRAFTING,
    ),
]
Gamma = Annotated[
    int | None,
    typer.Option(
        "--gamma",
        help="Draft length of fixed and pearl (default: adapts)",
        rich_help_panel=_DRAFTING,
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        "--width", help="Guesses a step: 1 a chain, more a tree", rich_help_panel=_DRAFTING
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        "--window",
        help="Steps goodput and windowed may have outstanding (default: adapts)",
        rich_help_panel=_DRAFTING,
    ),
]
RunAheadOption = Annotated[
    RunAhead | None,
    typer.Option(
        "--run-ahead",
        help="May the verifier decode on when no draft is there?",
        rich_help_panel=_DRAFTING,
    ),
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        "--memory-budget",
        envvar="EDGESPEC_MEMORY_BUDGET",
        metavar="SIZE",
        help="What this process may take: 600MiB, 25% of the machine, or auto: what is free",
        rich_help_panel=_DRAFTING,
    ),
]
Provider = Annotated[
    str | None,
    typer.Option(
        "--provider",
        metavar="NAME",
        help="What the draft runs on: cpu (default), cuda, tensorrt, dml, coreml, openvino, or "
        "auto: the quickest, never one slower than the CPU",
        rich_help_panel=_DRAFTING,
    ),
]
Ladder = Annotated[
    bool | None,
    typer.Option(
        "--ladder/--no-ladder",
        help="Draft less on a low battery, a hot device or busy cores (default: off)",
        rich_help_panel=_DRAFTING,
    ),
]
OfflineOption = Annotated[
    Offline | None,
    typer.Option(
        "--offline",
        help="When no verifier can be reached: wait, or draft on alone (marked, on stderr) and "
        "have it checked when one is back",
        rich_help_panel=_WHERE,
    ),
]
DraftMs = Annotated[
    float | None,
    typer.Option(
        "--draft-ms", help="Emulate a slower device: time of a step", rich_help_panel=_DRAFTING
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "-t", help="0 is greedy (default: 0)", rich_help_panel=_TEXT),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Keep the k likeliest", rich_help_panel=_TEXT)
]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Keep this probability", rich_help_panel=_TEXT)
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Drop below this share of the best", rich_help_panel=_TEXT),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Above 1: repeat less", rich_help_panel=_TEXT),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option("--presence-penalty", help="Of tokens already said", rich_help_panel=_TEXT),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option("--frequency-penalty", help="Each time one was said", rich_help_panel=_TEXT),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=X", help="Adds X; repeatable", rich_help_panel=_TEXT),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Same seed, same text (default: 0)", rich_help_panel=_TEXT),
]
StopText = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End before this text; repeatable", rich_help_panel=_TEXT),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", help="At most (default: 256)", rich_help_panel=_TEXT),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        help="Go on past the model's end token",
        rich_help_panel=_TEXT,
    ),
]
Stats = Annotated[
    bool, typer.Option("--stats", help="Numbers at the end, on stderr", rich_help_panel=_OUTPUT)
]
Color = Annotated[
    bool | None,
    typer.Option(
        "--color/--no-color",
        help="Tell accepted from corrected tokens (default: on a terminal)",
        rich_help_panel=_OUTPUT,
    ),
]

ACCESS_KEYS: Mapping[str, str] = {
    **DEVICE_TLS_KEYS,
    "api_key_file": "api_key_file",
    "insecure": "insecure",
}
"""How a device is let in: those of every command that talks to a verifier."""
AGENT_KEYS: Mapping[str, str] = {
    "verifier": "verifier",
    "association": "association",
    "model": "model",
    "tokenizer": "tokenizer",
    "trace": "trace",
    "log_level": "log_level",
    "log_format": "log_format",
    "draft": "draft.model",
    "draft_variant": "draft.variant",
    "draft_bits": "draft.bits",
    "draft_lookup": "draft.lookup",
    "draft_ms": "draft.draft_ms",
    "memory_budget": "draft.memory_budget",
    "provider": "draft.provider",
    "ladder": "draft.ladder",
    "offline": "offline",
    "rtt_ms": "link.rtt_ms",
    **ACCESS_KEYS,
    "policy": "policy.name",
    "prefer": "policy.prefer",
    "gamma": "policy.gamma",
    "width": "policy.width",
    "window": "policy.window",
    "run_ahead": "policy.run_ahead",
    **{
        name: f"sampling.{name}"
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "seed",
            "stop",
            "max_tokens",
            "ignore_eos",
        )
    },
}


def configured(kind: type[_Config], context: typer.Context, keys: Mapping[str, str]) -> _Config:
    """The config of a command: its ``--config`` file with its options on top.

    Prints it and ends the command for ``--print-config``. Raises ``ConfigError``.
    """
    given: dict[str, Any] = {}
    for name, key in keys.items():
        value = context.params.get(name)
        if value is None or value in ([], ()):
            continue
        if name == "verifier" and len(value) == 1:
            (value,) = value
        given[key] = _biases(value) if name == "logit_bias" else value
    if (path := context.params.get("config")) is not None:
        check_file_permissions(path, secret=False)
    config = load_config(kind, path, given)
    if context.params.get("print_config"):
        typer.echo(dump_config(config), nl=False)
        raise typer.Exit
    return config


def _biases(texts: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise ConfigError(
                f"--logit-bias is {text!r}, but must be ID=X, such as 42=-1.5"
            ) from None
    return biases
