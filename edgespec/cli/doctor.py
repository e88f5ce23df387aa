"""``edgespec doctor``: is this installation in order, and if not, what to run."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from edgespec.cli.options import VERIFIER_FLAGS, from_config
from edgespec.cli.running import FAILED, fail, run
from edgespec.config import DEFAULT_ADDRESS, DEFAULT_PORT, AgentConfig, ConfigError
from edgespec.config.common import needs
from edgespec.core.ports import UntrustedPeerError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import ask_verifiers, with_port
from edgespec.models.folders import BUNDLED_FOLDER, Role, check_folder, model_info
from edgespec.wire.access import device_credentials

MIN_PYTHON = (3, 11)
RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
"""Distributions of onnxruntime, which write the same files: one of them is installed."""

NEEDED = ("grpcio", "numpy", "protobuf", "tokenizers", "typer", "pyyaml")


class State(Enum):
    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    """What was looked at."""
    state: State
    finding: str
    advice: str = ""
    """A line to run."""


def python() -> Check:
    found = platform.python_version()
    state = State.GOOD if sys.version_info >= MIN_PYTHON else State.BAD
    wanted = ".".join(map(str, MIN_PYTHON))
    return Check("python", state, f"{found} on {platform.machine()} (needs {wanted} or newer)")


def packages() -> list[Check]:
    """The libraries every installation has."""
    versions = {name: version(name) for name in NEEDED}
    missing = [name for name, found in versions.items() if found is None]
    if missing:
        return [
            Check("packages", State.BAD, f"missing {', '.join(missing)}", "pip install edgespec")
        ]
    listed = ", ".join(f"{name} {found}" for name, found in versions.items())
    return [Check("packages", State.GOOD, listed)]


def one_onnxruntime() -> Check:
    """All its distributions write the same files, so with two installed neither is whole."""
    found = [name for name in RUNTIMES if version(name) is not None]
    if len(found) > 1:
        return Check(
            "onnxruntime",
            State.BAD,
            f"{' and '.join(found)} are installed together and overwrite each other",
            f"pip uninstall -y {' '.join(found)} && pip install 'edgespec[cpu]'",
        )
    if not found:
        advice = "pip install 'edgespec[cpu]'"
        return Check("onnxruntime", State.BAD, "not installed: nothing can be drafted here", advice)
    return Check("onnxruntime", State.GOOD, f"{found[0]} {version(found[0])}")


def onnx_session() -> Check:
    """One draft step of the bundled model."""
    name = "draft step"
    if importlib.util.find_spec("onnxruntime") is None:
        return Check(name, State.NOTE, "not tried: no onnxruntime")
    folder = BUNDLED_FOLDER / Role.DRAFT.value
    if not folder.is_dir():
        return Check(name, State.NOTE, "not tried: no bundled draft")
    try:
        from edgespec.device.drafters.onnx_drafter import OnnxDrafter

        drafter = OnnxDrafter(folder)
        drafter.begin(1, SamplingParams())
        (best,) = drafter.step(0, (0,), 1)
        drafter.close()
    except Exception as error:  # whatever a broken installation raises is the finding
        advice = "pip install --force-reinstall 'edgespec[cpu]'"
        return Check(name, State.BAD, f"{type(error).__name__}: {error}", advice)
    return Check(name, State.GOOD, f"works (token {best.token} after token 0)")


def bundled_models() -> list[Check]:
    """Both folders are whole, and share one vocabulary."""
    name = "bundled models"
    try:
        infos = []
        for role in Role:
            folder = BUNDLED_FOLDER / role.value
            check_folder(folder, role)
            infos.append(model_info(folder))
    except ValueError as error:
        return [Check(name, State.BAD, str(error), "pip install --force-reinstall edgespec")]
    target, draft = infos
    if target.vocabulary != draft.vocabulary:
        finding = f"vocabularies {target.vocabulary} and {draft.vocabulary} differ"
        return [Check(name, State.BAD, finding, "pip install --force-reinstall edgespec")]
    return [Check(name, State.GOOD, f"target and draft share vocabulary {target.vocabulary}")]


def torch() -> Check:
    """What the verifier needs; a device does without."""
    found = version("torch")
    if found is None or version("transformers") is None:
        finding = "torch or transformers is not installed: devices need neither, a verifier both"
        return Check("verifier", State.NOTE, finding, "pip install 'edgespec[server]'")
    try:
        import torch as library

        count = library.cuda.device_count()
        where = (
            f"{count} x {library.cuda.get_device_name(0)}" if count else "no GPU, runs on the CPU"
        )
    except Exception as error:  # whatever a broken installation raises is the finding
        advice = "pip install --force-reinstall 'edgespec[server]'"
        return Check("verifier", State.BAD, f"torch {found}: {error}", advice)
    return Check("verifier", State.GOOD, f"torch {found}, {where}")


def exactness() -> Check:
    """Whether a verifier on this CPU gives the same text whatever is drafted, and how."""
    name = "exact on this CPU"
    folder = BUNDLED_FOLDER / Role.TARGET.value
    if version("torch") is None or version("transformers") is None:
        return Check(name, State.NOTE, "not tried: no torch or transformers")
    if not folder.is_dir():
        return Check(name, State.NOTE, "not tried: no bundled target")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from edgespec.verifier.build import prefer_reproducible_products

        prefer_reproducible_products()
        import torch as library

        from edgespec.verifier.targets.torch_target import TorchTarget

        threads = library.get_num_threads()
        target = TorchTarget(
            str(folder), name="bundled", vocabulary="", device="cpu", max_cached_tokens=1024
        )
        library.set_num_threads(threads)
    except Exception as error:  # whatever a broken installation raises is the finding
        advice = "pip install --force-reinstall 'edgespec[server]'"
        return Check(name, State.BAD, f"{type(error).__name__}: {error}", advice)
    state = State.GOOD if target.exact else State.NOTE
    return Check(name, state, f"the bundled target runs in float32 as {target.mode}")


def free_port(port: int) -> Check:
    name = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            finding = f"taken ({error.strerror}); perhaps a verifier is running"
            return Check(name, State.NOTE, finding, f"edgespec verifier --port {port + 1}")
    return Check(name, State.GOOD, "free")


async def verifier(address: str, config: AgentConfig) -> Check:
    name = f"verifier at {with_port(address)}"
    (answer,) = (await ask_verifiers(replace(config, verifier=address))).values()
    if (served := answer.info) is None:
        error = answer.error
        port = with_port(address).rpartition(":")[2]
        refused = error is not None and not error.retryable
        refused = refused or isinstance(error, UntrustedPeerError)
        advice = "" if refused else f"edgespec verifier --port {port}"
        # Nobody asked for the one that would be at the usual place.
        state = State.NOTE if not refused and address == DEFAULT_ADDRESS else State.BAD
        return Check(name, state, answer.why.removeprefix(f"{name}: "), advice)
    model, limits = served.model, served.limits
    finding = f"serves {model.name}, context {model.context_length}, vocabulary {model.vocabulary}"
    if served.max_sessions:
        finding += (
            f"; {served.sessions} of {served.max_sessions} sessions, each with up to"
            f" {limits.max_nodes_outstanding} nodes ({limits.max_nodes_per_pass} a pass)"
            f" and a lease of {limits.lease_s:g} s"
        )
    if served.pass_us:
        finding += f"; a pass takes {served.pass_us / 1e3:.1f} ms"
    return Check(name, State.GOOD, finding)


def version(name: str) -> str | None:
    """Of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_MAX_PROBE_S = 600.0
_MARKS = {State.GOOD: "[green]ok[/]  ", State.NOTE: "[yellow]note[/]", State.BAD: "[red]BAD[/] "}


@from_config(AgentConfig, *VERIFIER_FLAGS, explains=False)
def doctor(
    settings: AgentConfig,
    probe_s: Annotated[
        float | None,
        typer.Option(
            "--probe",
            metavar="SECONDS",
            help="Only ask whether the verifier serves, and wait at most so long",
        ),
    ] = None,
) -> None:
    """Check this installation and its verifier, and say what to run.

    Exit code 1 if something a device needs is broken; notes are about what is optional. With
    --probe, a verifier's health service is asked, which needs no key: 0 if it serves, 1 if not. It
    says no from the moment a verifier begins to drain.

    [dim]edgespec doctor --verifier gpu-box:7420 --ca ca.crt[/]
    """
    if probe_s is not None:
        for address in settings.verifiers:
            _probe(address, settings, probe_s)
        return
    found = [
        python(),
        *packages(),
        one_onnxruntime(),
        onnx_session(),
        *bundled_models(),
        torch(),
        exactness(),
        free_port(DEFAULT_PORT),
    ]
    found += [run(verifier(address, settings)) for address in settings.verifiers]
    console = Console(highlight=False)
    for check in found:
        _print(console, check)
    if any(check.state is State.BAD for check in found):
        raise typer.Exit(FAILED)


def _probe(address: str, settings: AgentConfig, within_s: float) -> None:
    """Ends the command with exit code 1 unless the verifier says that it serves."""
    if not 0.0 < within_s <= _MAX_PROBE_S:
        raise ConfigError(f"--probe is {within_s:g}, but must be in (0, {_MAX_PROBE_S:g}]")
    with needs("grpc", "edgespec"):
        from edgespec.wire.grpc_client import SERVING, ask_health
    asking = ask_health(
        with_port(address),
        credentials=device_credentials(settings.tls),
        server_name=settings.tls.server_name,
        timeout_s=within_s,
    )
    answer = asyncio.run(asking)
    typer.echo(answer)
    if answer != SERVING:
        fail(f"the verifier at {with_port(address)} says {answer}", FAILED)


def _print(console: Console, check: Check) -> None:
    line = f"{_MARKS[check.state]} {escape(check.name)}: {escape(check.finding)}"
    console.print(line, soft_wrap=True)
    if check.advice:
        console.print(f"     run: [bold]{escape(check.advice)}[/]", soft_wrap=True)
