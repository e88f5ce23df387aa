"""``edgespec doctor``: check this installation and its verifier, and say what to run."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from edgespec.cli import device
from edgespec.cli.device import LEAST_JUDGED
from edgespec.cli.main import FAILED
from edgespec.cli.options import DRAFT, VERIFIER_FLAGS, from_config, option
from edgespec.cli.running import fail, run
from edgespec.config import DEFAULT_ADDRESS, AgentConfig, ConfigError
from edgespec.config.common import installed_version, require_library
from edgespec.core.device.lead import describe_lead, find_case
from edgespec.core.ports import UntrustedPeerError
from edgespec.core.protocol.checks import make_one_line
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent, probe_verifiers, with_port
from edgespec.models.folders import BUNDLED_FOLDER
from edgespec.models.model_source import Purpose
from edgespec.models.onnx_packages import find_installed, mend
from edgespec.operating_system import (
    RUNS_VERIFIERS,
    VERIFIER_SYSTEMS,
    clock_step_s,
    list_lacks,
)
from edgespec.wire.access import load_tls_access

LIBRARIES = ("grpcio", "numpy", "protobuf", "tokenizers")
_MAX_PROBE_S = 600.0


class State(Enum):
    GOOD = "[green]ok[/]  "
    NOTE = "[yellow]note[/]"
    BAD = "[red]BAD[/] "


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. A check raises nothing; its finding says what it could not find out."""

    name: str
    state: State
    finding: str
    advice: str = ""
    """Command that mends the finding, or empty."""


def check_libraries() -> Check:
    found = (f"{name} {installed_version(name) or 'missing'}" for name in LIBRARIES)
    where = f"{platform.python_version()} on {platform.machine()}"
    return Check("python", State.GOOD, f"{where}; {', '.join(found)}")


def check_system() -> Check:
    """Check what this system lacks that edgespec uses elsewhere, and the step of its clock."""
    system = f"{platform.system()} {platform.release()}"
    if step_s := clock_step_s():
        finding = f"{system}: the clock of this Python has steps of {step_s * 1e3:.1f} ms, too"
        finding += " coarse for short round trips; use Python 3.13 or newer"
        return Check("system", State.NOTE, finding)
    lacks = list_lacks()
    if lacks:
        return Check("system", State.NOTE, f"{system}: without {'; '.join(lacks)}")
    return Check("system", State.GOOD, system)


def check_onnxruntime() -> Check:
    """Check that one distribution of onnxruntime is installed. Two overwrite each other's files."""
    found = find_installed()
    if len(found) == 1:
        return Check("onnxruntime", State.GOOD, f"{found[0]} {installed_version(found[0])}")
    finding = "not installed: this device cannot run a draft model"
    if found:
        finding = f"{' and '.join(found)} are installed together and overwrite each other"
    return Check("onnxruntime", State.BAD, finding, mend(found, "onnxruntime"))


def check_draft_step() -> Check:
    """Run one draft step of the bundled model."""
    name = "draft step"
    if importlib.util.find_spec("onnxruntime") is None:
        return Check(name, State.NOTE, "not tried, because onnxruntime is not installed")
    try:
        from edgespec.device.build import load_drafter

        drafter = load_drafter(AgentConfig())
        assert drafter is not None
        drafter.begin(1, SamplingParams())
        (best,) = drafter.step(0, (0,), 1)
        drafter.close()
    except Exception as error:  # a broken installation may raise anything
        advice = "pip install --force-reinstall 'edgespec[cpu]'"
        return Check(name, State.BAD, f"{type(error).__name__}: {error}", advice)
    return Check(name, State.GOOD, f"works (token {best.token} after token 0)")


def check_target() -> Check:
    """Check that this machine could run a verifier, and in which mode, which says how its outputs
    are kept independent of drafts."""
    name = "verifier here"
    if not RUNS_VERIFIERS:
        return Check(name, State.NOTE, VERIFIER_SYSTEMS)
    if installed_version("torch") is None or installed_version("transformers") is None:
        finding = (
            "torch or transformers is not installed: a verifier needs both, a device needs neither"
        )
        return Check(name, State.NOTE, finding, "pip install 'edgespec[server]'")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from edgespec.verifier.build import prefer_reproducible_products

        prefer_reproducible_products()
        import torch

        from edgespec.verifier.targets.torch_target import TorchTarget

        threads, gpus = torch.get_num_threads(), torch.cuda.device_count()
        folder = str(BUNDLED_FOLDER / Purpose.TARGET.value)
        target = TorchTarget(
            folder, name="bundled", vocabulary="", device="cpu", max_cached_tokens=1024
        )
        torch.set_num_threads(threads)
    except Exception as error:  # a broken installation may raise anything
        advice = "pip install --force-reinstall 'edgespec[server]'"
        return Check(name, State.BAD, f"{type(error).__name__}: {error}", advice)
    state = State.GOOD if target.canonical else State.NOTE
    where = f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "no GPU"
    runs = f"on the CPU the bundled target runs in float32 as {target.mode}"
    return Check(name, state, f"torch {torch.__version__}, {where}; {runs}")


async def check_verifier(address: str, config: AgentConfig) -> Check:
    """Connect to a verifier and ask for its description."""
    name = f"verifier at {with_port(address)}"
    (answer,) = (await probe_verifiers(replace(config, verifier=address))).values()
    if (served := answer.info) is None:
        error = answer.error
        port = with_port(address).rpartition(":")[2]
        is_untrusted = isinstance(error, UntrustedPeerError)
        is_refused = is_untrusted or (error is not None and not error.retryable)
        advice = "" if is_refused else f"edgespec verifier --port {port}"
        # The user may not need a verifier at the default address.
        state = State.NOTE if not is_refused and address == DEFAULT_ADDRESS else State.BAD
        return Check(name, state, answer.why.removeprefix(f"{name}: "), advice)
    model, limits = served.model, served.limits
    finding = f"serves {model.name}, context {model.context_length}, vocabulary {model.vocabulary}"
    if served.max_sessions:
        finding += (
            f"; {served.sessions} of {served.max_sessions} sessions, each with up to"
            f" {limits.max_nodes_outstanding} draft nodes ({limits.max_nodes_per_pass} per pass)"
            f" and a lease of {limits.lease_s:g} s"
        )
    if served.pass_us:
        finding += f"; a pass takes {served.pass_us / 1e3:.1f} ms"
    return Check(name, State.GOOD, finding)


async def check_lead(config: AgentConfig) -> Check:
    """Let this device draft for one short generation, and answer with what was measured whether its
    draft model helps (``core/device/lead.py``)."""
    name = "does this device help"
    lines: list[str] = []
    try:
        config, info = await device.choose_verifier(config)
        async with (
            asyncio.timeout(_TRIAL_TIMEOUT_S),
            build_agent(config, say=lines.append, target=info) as agent,
        ):
            async for _ in agent.generate(_TRIAL_PROMPT, _TRIAL):
                pass
            stats = agent.stats
    except TimeoutError:
        finding = f"not known: {_TRIAL.max_tokens} tokens took more than {_TRIAL_TIMEOUT_S:g} s"
        return Check(name, State.NOTE, finding)
    except Exception as error:  # a draft that does not fit, a verifier that refuses
        return Check(name, State.NOTE, f"not tried: {make_one_line(str(error))}")
    case = None if stats is None else find_case(stats.estimates)
    if stats is None or case is None:
        why = "" if stats is None else stats.counters.draft_failure
        return Check(name, State.NOTE, f"not known: {why or 'no draft step was timed'}")
    tried, hits = stats.counters.tried, stats.counters.hits
    if tried >= LEAST_JUDGED:
        case, source = replace(case, acceptance=hits / tried), f"right at {hits} of {tried} places"
    else:
        source = f"an acceptance of {case.acceptance:.2f} is assumed"
    from edgespec.models.translation import TRANSLATED

    translated = [line for line in lines if line.startswith(TRANSLATED)]
    found = (f"{describe_lead(case)} ({source} of a short generation)", *translated)
    return Check(name, State.GOOD, "; ".join(found))


_TRIAL_PROMPT: Final = "The lighthouse keeper wrote in his diary that"
_TRIAL: Final = SamplingParams(max_tokens=64, ignore_eos=True)
_TRIAL_TIMEOUT_S: Final = 60.0
_PROBE = option(
    "Only check whether the verifier serves, for a health check; wait at most this long",
    *("--probe",),
    metavar="SECONDS",
)


@from_config(AgentConfig, *VERIFIER_FLAGS, DRAFT)
def doctor(settings: AgentConfig, probe_s: Annotated[float | None, _PROBE] = None) -> None:
    """Check this installation and its verifier, and say what to run.

    If a verifier answers, this device drafts for one generation of 64 tokens there. From the
    measured times follows whether its draft model helps, and what would change that.

    The exit code is 1 if something that a device needs is broken; notes are about optional parts.
    With --probe, only the verifier's health service is checked, which needs no API key: the exit
    code is 0 if it serves, and 1 if it does not or has begun to drain.

    [dim]edgespec doctor --verifier gpu-box:7420 --ca ca.pem[/]
    """
    if probe_s is not None:
        for address in settings.verifiers:
            _probe(address, settings, probe_s)
        return
    found = [check_libraries(), check_system(), check_onnxruntime(), check_draft_step()]
    found.append(check_target())
    answers = [run(check_verifier(address, settings)) for address in settings.verifiers]
    found += answers
    if any(one.state is State.GOOD for one in answers):
        found.append(run(check_lead(settings)))
    console = Console(highlight=False, soft_wrap=True)
    for check in found:
        console.print(f"{check.state.value} {escape(check.name)}: {escape(check.finding)}")
        if check.advice:
            console.print(f"     run: [bold]{escape(check.advice)}[/]")
    if any(check.state is State.BAD for check in found):
        raise typer.Exit(FAILED)


def _probe(address: str, settings: AgentConfig, within_s: float) -> None:
    """End the command with exit code 1 unless the verifier's health service answers SERVING."""
    if not 0.0 < within_s <= _MAX_PROBE_S:
        raise ConfigError(f"--probe is {within_s:g}, but must be in (0, {_MAX_PROBE_S:g}]")
    with require_library("grpc", "edgespec"):
        from edgespec.wire.grpc_client import SERVING, check_health
    answer = asyncio.run(check_health(with_port(address), load_tls_access(settings.tls), within_s))
    typer.echo(answer)
    if answer != SERVING:
        fail(f"the verifier at {with_port(address)} is not serving: {answer}")
