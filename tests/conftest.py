"""What every test stands on: a scrubbed environment, the shared data, the GPU mark.

No test needs a network, a download or a GPU. The environment is scrubbed before anything else is
imported, because some libraries read it once at import and keep what they saw.
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


def _scrub() -> None:
    """Remove what a user's shell may hold and a test must not see."""
    for name in list(os.environ):
        ours = name.startswith("EDGESPEC_") and name != DATA_VARIABLE
        # gRPC honours proxies even for loopback, which would send the tests' own streams away.
        if ours or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Of models this small, and of tests side by side: threads that wait for one another only spin,
    # on a busy machine until the time is up.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"


_scrub()
# A background job of a script ignores Ctrl-C, and so would all that is started here; tests of what
# a Ctrl-C does would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run: a failure is a fact about the code, not about the day. Explore
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
    """Keep what tests cache (exported graphs, say) out of the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Undo what a test did to the environment, so that order never matters."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """Canonical mode of a torch target sets their number for the process."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 1
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(before)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Public traces and prompts, which are not part of the project: ``EDGESPEC_DATA``."""
    folder = (ROOT / os.environ.get(DATA_VARIABLE, "../shared/data")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set {DATA_VARIABLE}")
    return folder


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the real daemon serves the toy model."""
    from tests.kit.live_verifier import daemon

    with daemon() as (where, _):
        yield where


@pytest.fixture(scope="module")
def dead() -> Iterator[str]:
    """An address of this machine where nobody is."""
    from tests.kit.live_verifier import nobody

    with nobody() as where:
        yield where


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any size are packed."""
    monkeypatch.setattr("edgespec.verifier.targets.linear_layers.LEAST_WEIGHTS", 1)


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Certificates that no test changes."""
    from tests.kit.guarded import Pki

    return Pki(tmp_path_factory.mktemp("pki"))


def pytest_configure(config: pytest.Config) -> None:
    """Only ``-m gpu`` sees a GPU, so that all other tests mean the same on every machine."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@cache
def _cuda_missing() -> str | None:
    """Why GPU tests cannot run here; None when they can. Imports torch, so ask late."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device, or not run with -m gpu"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := _cuda_missing()) is not None:
        pytest.skip(reason)
