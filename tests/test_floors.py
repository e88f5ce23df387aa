"""Which part may import which, over the syntax tree: the architecture, as a test.

Oracle: every import in the product is looked up in ``FLOORS``, imports inside functions and under
``TYPE_CHECKING`` too (a name is a dependency, whenever it is loaded). Planted imports must be
found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.sources import PACKAGES, Module, imports, modules, parse, within

HEAVY = frozenset({"grpc", "onnx", "onnxruntime", "torch", "transformers"})
# What would let the outside world (time, chance, other threads) into a pure machine.
IMPURE = frozenset(
    "asyncio concurrent datetime logging multiprocessing os random secrets select selectors "
    "signal socket ssl subprocess threading time uuid".split()
)
# The simulator keeps its own clock; seeded ``random.Random`` and ``logging`` do it no harm.
REAL_WORLD = IMPURE - {"datetime", "logging", "os", "random"}


@dataclass(frozen=True, slots=True)
class Floor:
    """The rules of one package: which of our modules it may use, which libraries it may not."""

    package: str
    ours: tuple[str, ...]
    never: frozenset[str] = frozenset()
    stdlib_only: bool = False

    def violations(self, module: Module) -> Iterator[str]:
        said: set[tuple[str, int]] = set()
        for found in imports(module):
            top = found.name.partition(".")[0]
            reason = self._refuses(found.name)
            if reason and (top, found.line) not in said:
                said.add((top, found.line))
                yield (
                    f"{module.path}:{found.line}: {self.package} may not import {found.name}: "
                    + (reason)
                )

    def _refuses(self, name: str) -> str | None:
        top = name.partition(".")[0]
        if top in PACKAGES:
            # Nobody may lean on all of `edgespec`, its own top module included.
            own = () if self.package == "edgespec" else (self.package,)
            allowed = (*own, *self.ours)
            # `from edgespec.core import tree` also yields `edgespec.core`, and the bare
            # `edgespec` of `from edgespec import ports` says nothing by itself.
            fine = name == "edgespec" or any(within(name, ours) for ours in allowed)
            return None if fine else "it lies on another floor"
        if top in self.never:
            return "the library belongs to another floor"
        if self.stdlib_only and top not in sys.stdlib_module_names:
            return "standard library only"
        return None


def named(names: str) -> tuple[str, ...]:
    return tuple(f"edgespec.{name}" for name in names.split())


CORE, SAMPLING, CONFIG, TELEMETRY, MODELS, WIRE = named(
    "core sampling config telemetry models wire"
)
DEVICE, VERIFIER, ENDPOINT, BENCH = named("device verifier endpoint bench")
DRAFTERS, EXPORT, TARGETS = named("device.drafters device.export verifier.targets")
VLLM = f"{VERIFIER}.engines.vllm"
FROZEN, PROTOCOL = f"{CORE}.statically_frozen", f"{CORE}.protocol"
BELOW = (CORE, SAMPLING, CONFIG, TELEMETRY)
ENDS = (*BELOW, MODELS, WIRE)
# The arms of a comparison are settings of the core's policies; reports and the simulator name them.
ARMS = f"{BENCH}.arms"
# The toys are the simulator's models, so they keep its rules: no clock, no chance, no library.
TOYS = named(
    "device.drafters.toy device.drafters.token_cache verifier.targets.toy "
    "verifier.targets.pass_requests sampling.token_counts"
)
GUARDED = f"{DRAFTERS}.guarded"
# The first floor that holds a module is its floor.
FLOORS = (
    Floor(PROTOCOL, (FROZEN,), IMPURE, stdlib_only=True),
    # The rooms of the core: what both ends share, and what each has for itself.
    *(
        Floor(f"{CORE}.{room}", (FROZEN, PROTOCOL), IMPURE, stdlib_only=True)
        for room in ("device", "verifier", "association")
    ),
    Floor(CORE, (), IMPURE, stdlib_only=True),
    *(Floor(toy, (CORE, *TOYS), HEAVY | IMPURE) for toy in TOYS),
    # A guarded draft runs in the simulator too; a log is no harm to it.
    Floor(GUARDED, (CORE, *TOYS), HEAVY | (IMPURE - {"logging"}), stdlib_only=True),
    # One sampling law, on arrays for drafters, on tensors for targets.
    Floor(f"{SAMPLING}.tensors", (CORE, SAMPLING), HEAVY - {"torch"}),
    Floor(SAMPLING, (CORE,), HEAVY),
    Floor(TELEMETRY, (CORE,), HEAVY),
    Floor(CONFIG, (CORE,), HEAVY),
    Floor(MODELS, BELOW, frozenset({"grpc"})),
    Floor(WIRE, BELOW, HEAVY - {"grpc"}),
    # Programs for other environments, which import nothing of ours.
    Floor(f"{EXPORT}.scripts", (), HEAVY - {"torch", "transformers"}),
    # A device has no torch, not even to export a draft.
    Floor(
        DRAFTERS, (CORE, SAMPLING, f"{DEVICE}.export"), frozenset({"grpc", "torch", "transformers"})
    ),
    Floor(
        f"{DEVICE}.export", (*BELOW, MODELS, DEVICE), frozenset({"grpc", "torch", "transformers"})
    ),
    Floor(DEVICE, ENDS, HEAVY - {"onnxruntime"}),
    Floor(TARGETS, (CORE, SAMPLING), frozenset({"grpc", "onnx", "onnxruntime"})),
    # Engines of others: what decides is pure, and their libraries are loaded late.
    Floor(f"{VLLM}.target", (CORE, f"{TARGETS}.pass_requests"), HEAVY | IMPURE, stdlib_only=True),
    Floor(f"{VLLM}.loading", (*BELOW, MODELS, TARGETS, VLLM), HEAVY),
    Floor(VLLM, (*BELOW, TARGETS), HEAVY - {"torch"}),
    Floor(VERIFIER, ENDS, HEAVY),
    # HTTP in front of an agent that is handed to it.
    Floor(ENDPOINT, (*ENDS, DEVICE, "edgespec.__version__"), HEAVY),
    Floor(ARMS, (CORE,), HEAVY | IMPURE, stdlib_only=True),
    # Measures agents it is handed; links, models and processes are the command line's.
    Floor(BENCH, (*ENDS, DEVICE, VERIFIER, "edgespec.__version__"), HEAVY),
    Floor("edgespec.cli", ("edgespec", "edgespec_sim")),
    Floor("edgespec.api", (*ENDS, DEVICE), HEAVY),
    # The simulator's commands run its worlds in processes and know the real clock; it does not.
    Floor("edgespec_sim.commands", ("edgespec", "edgespec_sim"), HEAVY),
    Floor(
        "edgespec_sim.report", (CORE, TELEMETRY, ARMS, "edgespec_sim"), HEAVY | {"asyncio", "numpy"}
    ),
    Floor(
        "edgespec_sim",
        (CORE, TELEMETRY, CONFIG, ARMS, GUARDED, *TOYS),
        HEAVY | REAL_WORLD,
    ),
    # Training alone needs torch; a trained policy runs in numpy.
    Floor("edgespec_uara.masac", (CORE, "edgespec_sim", "edgespec_uara"), HEAVY - {"torch"}),
    Floor("edgespec_uara", (CORE, ARMS, "edgespec_sim"), HEAVY),
    Floor("edgespec.__main__", ("edgespec.cli", "edgespec_sim.commands"), HEAVY),
    # What is left: edgespec/__init__.py, which everyone loads.
    Floor("edgespec", (CORE, "edgespec.api"), HEAVY),
)


def floor_of(module: Module) -> Floor | None:
    return next((floor for floor in FLOORS if within(module.name, floor.package)), None)


def violations(module: Module) -> list[str]:
    floor = floor_of(module)
    return list(floor.violations(module)) if floor else []


def test_every_import_stays_on_its_floor() -> None:
    found = [violation for module in modules() for violation in violations(module)]
    assert not found, f"{len(found)} violations:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("edgespec/core/x.py", "import numpy"),
        ("edgespec/core/x.py", "from edgespec import config"),
        ("edgespec/core/device/x.py", "from edgespec.core.verifier.engine import VerifyEngine"),
        ("edgespec/core/verifier/x.py", "from edgespec.core.device.policy import MAX_GAMMA"),
        ("edgespec/core/protocol/x.py", "from edgespec.core.device import session"),
        *(("edgespec/core/x.py", f"import {name}") for name in sorted(IMPURE)),
        ("edgespec/device/drafters/x.py", "from edgespec.verifier.targets.x import T"),
        ("edgespec/wire/x.py", "import edgespec.verifier.server"),
        *(("edgespec/verifier/x.py", f"import {name}") for name in sorted(HEAVY)),
        ("edgespec/device/x.py", "from edgespec.verifier import scheduler"),
        ("edgespec/device/x.py", "import importlib; importlib.import_module('torch')"),
        ("edgespec/device/x.py", "from ..verifier import scheduler"),
        ("edgespec/device/__init__.py", "from ..verifier import scheduler"),
        *(("sim/edgespec_sim/x.py", f"import {name}") for name in sorted(HEAVY | REAL_WORLD)),
        ("sim/edgespec_uara/x.py", "import torch"),
        ("edgespec/__init__.py", "from edgespec.device.device import Device"),
    ],
)
def test_a_planted_import_is_found(path: str, line: str) -> None:
    for text in (line, f"def f():\n    {line}", f"if TYPE_CHECKING:\n    {line}"):
        assert len(violations(parse(path, text + "\n"))) == 1, text


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("edgespec/core/x.py", "import math"),
        ("edgespec/core/x.py", "from edgespec.core import tree"),
        ("edgespec/device/drafters/onnx.py", "import onnxruntime"),
        ("edgespec/wire/grpc_client.py", "import grpc"),
        ("edgespec/cli/x.py", "from edgespec_sim import world"),
        ("sim/edgespec_uara/masac/x.py", "import torch"),
        ("tests/x.py", "import torch, grpc, time"),
    ],
)
def test_a_permitted_import_passes(path: str, line: str) -> None:
    assert violations(parse(path, line + "\n")) == []


def test_every_product_module_has_a_floor() -> None:
    for module in modules():
        if any(within(module.name, package) for package in PACKAGES):
            floor = floor_of(module)
            assert floor is not None
            assert floor.package != "edgespec" or module.name == "edgespec", module.path
