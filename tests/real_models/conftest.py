"""Fixtures of the two real models. Each is loaded once for a module: half a gigabyte, and some
seconds of processor time, for each test process that runs tests of the module."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import real_models as real

CACHE = real.user_cache()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return real.find_model(real.SMOLLM2, CACHE)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    return real.find_model(real.GEMMA3, CACHE)


@pytest.fixture(scope="module")
def made(_private_cache: None) -> Iterator[Path]:
    """Make the folder of conversions and exports the cache of this process and of its children."""
    folder = real.conversions(CACHE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, made: Path) -> Iterator[real.RealModel]:
    yield real.load(smollm2_path, made)
    gc.collect()


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path, made: Path) -> Iterator[real.RealModel]:
    yield real.load(gemma3_path, made)
    gc.collect()
