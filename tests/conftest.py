"""The common ground of all tests: a scrubbed environment, the shared data, the GPU mark.

No test needs a network, a download or a GPU. The environment is scrubbed before anything else is
imported, because some libraries read it once at import and keep its values.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import edgespec  # noqa: F401 # turns telemetry off in whatever a test imports first

if TYPE_CHECKING:
    from tests.kit.guarded import Pki

ROOT = Path(__file__).resolve().parent.parent
DATA_VARIABLE = "EDGESPEC_DATA"
# Folders of files that are not part of the project: public data, and two real models.
KEPT = (DATA_VARIABLE, "EDGESPEC_MODELS")


def _scrub() -> None:
    """Remove variables that a user's shell may set and a test must not see."""
    for name in list(os.environ):
        ours = name.startswith("EDGESPEC_") and name not in KEPT
        # gRPC uses proxies even for the loopback, which would send the tests' own streams away.
        if ours or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The models are this small and tests run side by side: threads that wait for one another would
    # only spin.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"


_scrub()
# A background job of a script ignores Ctrl-C, and its child processes inherit that. Tests that send
# a Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` ignores the end of a terminal in the same way.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Every run has the same examples: a failure is a fact about the code, not about the day. Explore
# with `pytest --hypothesis-profile=explore`.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep cached files of tests (exported graphs, for example) out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Undo a test's changes to the environment, so that order never matters."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Restore the thread count, which canonical mode of a torch target sets for the process."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 1
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(before)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of public traces and prompts, which are not part of the project:
    ``EDGESPEC_DATA``."""
    folder = (ROOT / os.environ.get(DATA_VARIABLE, "../shared/data")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set {DATA_VARIABLE}")
    return folder


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the toy model by the real daemon; yield its address."""
    from tests.kit.live_verifier import start_daemon

    with start_daemon() as (where, _):
        yield where


@pytest.fixture(scope="module")
def dead() -> Iterator[str]:
    """Yield an address of this machine where no server listens."""
    from tests.kit.live_verifier import occupy_address

    with occupy_address() as where:
        yield where


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers of any size be packed."""
    monkeypatch.setattr("edgespec.verifier.targets.linear_layers.LEAST_WEIGHTS", 1)


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Make certificates that no test changes."""
    from tests.kit.guarded import Pki

    return Pki(tmp_path_factory.mktemp("pki"))


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPU without ``-m gpu``, so that all other tests mean the same on every machine."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@cache
def _cuda_missing() -> str | None:
    """Return why GPU tests cannot run here, or None if they can. Imports torch, so call it late."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device, or not run with -m gpu"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := _cuda_missing()) is not None:
        pytest.skip(reason)
