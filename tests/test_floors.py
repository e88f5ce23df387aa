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


CORE, PORTS, TELEMETRY, CONFIG = (
    f"edgespec.{name}" for name in ("core", "ports", "telemetry", "config")
)
WHOLE_FILE, BOUNDED_FILE = "edgespec.whole_file", "edgespec.bounded_file"
WORK_FOLDER = "edgespec.work_folder"
VLLM = "edgespec.engines.vllm"


def named(names: str) -> tuple[str, ...]:
    return tuple(f"edgespec.{name}" for name in names.split())


COMPOSED = named(
    "core ports telemetry config drafters targets engines transport models agent verifier "
    "export_cache draft_memory target_loading target_memory foreign_drafts model_drafter access "
    "setup_error many_verifiers constraint_readers row_cost_file thread_choice machine_key "
    "provider_choice"
)
# The rooms of the core: what both ends share, and what each has for itself.
FROZEN, PROTOCOL = f"{CORE}.statically_frozen", f"{CORE}.protocol"
ROOMS = (
    Floor(PROTOCOL, (FROZEN,), IMPURE, stdlib_only=True),
    Floor(f"{CORE}.device", (FROZEN, PROTOCOL), IMPURE, stdlib_only=True),
    Floor(f"{CORE}.verifier", (FROZEN, PROTOCOL), IMPURE, stdlib_only=True),
    Floor(f"{CORE}.network", (FROZEN, PROTOCOL), IMPURE, stdlib_only=True),
    Floor(f"{CORE}.association", (FROZEN, PROTOCOL), IMPURE, stdlib_only=True),
)
# The arms of a comparison are settings of the core's policies; reports and the simulator name them.
ARMS = "edgespec.benchmark.arms"
TOY_PARTS = ("constrained_rows", "request_checks", "toy_memory")
# The first floor that holds a module is its floor. The toys come before their packages: they are
# the simulator's models, so they keep its rules.
FLOORS = (
    *ROOMS,
    Floor(CORE, (), IMPURE, stdlib_only=True),
    Floor(PORTS, (CORE,), IMPURE, stdlib_only=True),
    Floor(TELEMETRY, (CORE,), HEAVY),
    Floor(WHOLE_FILE, (), HEAVY, stdlib_only=True),
    Floor(WORK_FOLDER, (), HEAVY, stdlib_only=True),
    Floor(BOUNDED_FILE, (), HEAVY, stdlib_only=True),
    Floor(CONFIG, (CORE, WHOLE_FILE, BOUNDED_FILE), HEAVY),
    Floor("edgespec.drafters.token_counts", (), HEAVY | IMPURE, stdlib_only=True),
    Floor(
        "edgespec.drafters.token_cache",
        (CORE, PORTS, "edgespec.drafters.token_counts"),
        HEAVY | IMPURE,
    ),
    Floor("edgespec.drafters.toy", (CORE, PORTS, "edgespec.drafters.token_cache"), HEAVY | IMPURE),
    # A guarded draft's window and governor are the simulator's too; a log is no harm to it.
    Floor("edgespec.drafters.draft_window", (), HEAVY | IMPURE, stdlib_only=True),
    Floor(
        "edgespec.drafters.guarded",
        (CORE, PORTS, "edgespec.drafters.twins"),
        HEAVY | (IMPURE - {"logging"}),
        stdlib_only=True,
    ),
    Floor("edgespec.drafters.twins", (PORTS,), HEAVY | IMPURE, stdlib_only=True),
    Floor(
        "edgespec.drafters.tree_rows",
        (CORE, PORTS, "edgespec.drafters.twins"),
        HEAVY | IMPURE,
    ),
    Floor("edgespec.targets.constrained_rows", (CORE, PORTS), HEAVY | IMPURE),
    Floor("edgespec.targets.toy_memory", (CORE, PORTS), HEAVY | IMPURE),
    Floor("edgespec.targets.request_checks", (CORE, PORTS), HEAVY | IMPURE),
    Floor(
        "edgespec.targets.toy",
        (CORE, PORTS, *(f"edgespec.targets.{part}" for part in TOY_PARTS)),
        HEAVY | IMPURE,
    ),
    # A device has no torch, not even to export a draft.
    Floor("edgespec.drafters", (CORE, PORTS), frozenset({"grpc", "torch", "transformers"})),
    Floor("edgespec.targets", (CORE, PORTS), frozenset({"grpc", "onnx", "onnxruntime"})),
    # Engines of others: what decides is pure, and their libraries are loaded late.
    Floor(f"{VLLM}.step", (CORE,), HEAVY | IMPURE, stdlib_only=True),
    Floor(f"{VLLM}.known_text", (CORE, f"{VLLM}.step"), HEAVY | IMPURE, stdlib_only=True),
    Floor(VLLM, (CORE, PORTS, *named("targets setup_error")), HEAVY - {"torch"}),
    Floor("edgespec.engines", (CORE, PORTS, CONFIG, VLLM, *named("models setup_error")), HEAVY),
    Floor("edgespec.transport", (CORE, PORTS, WHOLE_FILE, BOUNDED_FILE), HEAVY - {"grpc"}),
    Floor("edgespec.models", (CORE, PORTS), frozenset({"grpc"})),
    Floor("edgespec.agent", (CORE, PORTS, TELEMETRY), HEAVY),
    Floor("edgespec.verifier", (CORE, PORTS, TELEMETRY), HEAVY),
    # HTTP in front of an agent that is handed to it.
    Floor(
        "edgespec.endpoint",
        (
            *(CORE, PORTS, TELEMETRY, CONFIG),
            *("edgespec.agent", "edgespec.models.chat_template", "edgespec.__version__"),
        ),
        HEAVY,
    ),
    Floor("edgespec.report", (CORE, TELEMETRY, ARMS), HEAVY | {"asyncio", "numpy"}),
    Floor(ARMS, (CORE,), HEAVY | IMPURE, stdlib_only=True),
    # Measures agents it is handed; links, models and processes are the command line's.
    Floor(
        "edgespec.benchmark",
        (CORE, PORTS, TELEMETRY, WHOLE_FILE, "edgespec.agent", "edgespec.__version__"),
        HEAVY,
    ),
    Floor("edgespec.cli", ("edgespec", "edgespec_sim")),
    Floor(
        "edgespec.export_cache", (CORE, WORK_FOLDER, "edgespec.drafters", "edgespec.models"), HEAVY
    ),
    # A draft within a memory budget: measured, planned, exported, guarded.
    Floor(
        "edgespec.draft_memory",
        (
            *(CORE, PORTS, CONFIG, TELEMETRY),
            *named("drafters models export_cache setup_error thread_choice"),
        ),
        HEAVY - {"onnxruntime"},
    ),
    Floor("edgespec.constraint_readers", (CORE, "edgespec.models"), HEAVY),
    # Memory of a target's keys and values, from settings; torch comes late.
    Floor("edgespec.target_memory", (CORE, CONFIG, TELEMETRY, "edgespec.targets"), HEAVY),
    Floor(
        "edgespec.foreign_drafts",
        (
            *(CORE, PORTS, WHOLE_FILE),
            *named("drafters models export_cache machine_key thread_choice"),
        ),
        HEAVY,
    ),
    Floor(
        "edgespec.model_drafter",
        (
            *(CORE, CONFIG, PORTS, TELEMETRY),
            *named("draft_memory drafters export_cache foreign_drafts models setup_error"),
            *named("provider_choice thread_choice"),
        ),
        HEAVY,
    ),
    # Keys and certificates, from files to running parts.
    Floor(
        "edgespec.access",
        (CORE, PORTS, CONFIG, "edgespec.transport", "edgespec.setup_error"),
        HEAVY - {"grpc"},
    ),
    # Several verifiers behind one agent.
    Floor(
        "edgespec.many_verifiers",
        (CORE, PORTS, CONFIG, "edgespec.access", "edgespec.agent", "edgespec.transport"),
        HEAVY,
    ),
    Floor("edgespec.setup_error", (), HEAVY | IMPURE, stdlib_only=True),
    Floor("edgespec.row_cost_file", (CORE, CONFIG, WHOLE_FILE, "edgespec.machine_key"), HEAVY),
    # What was measured on a machine, and how many threads that comes to.
    Floor("edgespec.machine_key", (), HEAVY, stdlib_only=True),
    Floor(
        "edgespec.thread_choice",
        (CORE, PORTS, WHOLE_FILE, *named("export_cache machine_key")),
        HEAVY,
        stdlib_only=True,
    ),
    # On which provider of onnxruntime a draft runs.
    Floor(
        "edgespec.provider_choice",
        (
            *(CORE, PORTS, WHOLE_FILE),
            *named("drafters export_cache machine_key setup_error thread_choice"),
        ),
        HEAVY,
    ),
    # The composition root, and the Python API on top of it.
    # A target from settings; its libraries are loaded late.
    Floor(
        "edgespec.target_loading",
        (CORE, PORTS, CONFIG, *named("engines models setup_error target_memory targets")),
        HEAVY,
    ),
    Floor("edgespec.compose", COMPOSED, HEAVY),
    Floor("edgespec.api", (*COMPOSED, *named("compose borrowed_tokenizer borrowing_agent")), HEAVY),
    # Programs for other environments, which import nothing of ours.
    Floor("edgespec.exporters.scripts", (), HEAVY - {"torch", "transformers"}),
    Floor(
        "edgespec.exporters",
        (CORE, PORTS, *named("drafters models export_cache foreign_drafts setup_error")),
        HEAVY,
    ),
    # For commands that begin without a tokenizer.
    Floor("edgespec.borrowed_tokenizer", (*COMPOSED, "edgespec.compose"), HEAVY),
    Floor("edgespec.borrowing_agent", (*COMPOSED, *named("compose borrowed_tokenizer")), HEAVY),
    Floor(
        "edgespec_sim",
        (
            CORE,
            PORTS,
            TELEMETRY,
            CONFIG,
            ARMS,
            *named("drafters.draft_window drafters.guarded drafters.toy drafters.tree_rows"),
            "edgespec.targets.toy",
        ),
        HEAVY | REAL_WORLD,
    ),
    # Training alone needs torch; a trained policy runs in numpy, or in plain Python.
    Floor("edgespec_uara.masac", (CORE, "edgespec_sim", "edgespec_uara"), HEAVY - {"torch"}),
    Floor("edgespec_uara", (CORE, ARMS, "edgespec_sim"), HEAVY),
    Floor("edgespec.__main__", ("edgespec.cli",), HEAVY),
    # What is left: edgespec/__init__.py, which everyone loads.
    Floor("edgespec", (CORE, PORTS, "edgespec.api"), HEAVY),
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
        ("edgespec/core/x.py", "from edgespec.ports import Drafter"),
        ("edgespec/core/x.py", "from edgespec import config"),
        ("edgespec/core/device/x.py", "from edgespec.core.verifier.engine import VerifyEngine"),
        ("edgespec/core/verifier/x.py", "from edgespec.core.device.policy import MAX_GAMMA"),
        ("edgespec/core/protocol/x.py", "from edgespec.core.device import session"),
        ("edgespec/core/network/x.py", "import random"),
        *(("edgespec/core/x.py", f"import {name}") for name in sorted(IMPURE)),
        ("edgespec/ports.py", "import numpy"),
        ("edgespec/ports.py", "from edgespec import agent"),
        ("edgespec/config.py", "from edgespec.agent import device"),
        ("edgespec/telemetry/x.py", "import grpc.aio"),
        ("edgespec/drafters/x.py", "from edgespec.targets.x import T"),
        ("edgespec/drafters/x.py", "import grpc"),
        ("edgespec/drafters/x.py", "from transformers import AutoTokenizer"),
        ("edgespec/drafters/toy.py", "import onnxruntime"),
        ("edgespec/targets/x.py", "import onnxruntime as ort"),
        ("edgespec/targets/toy.py", "import torch"),
        ("edgespec/targets/x.py", "from edgespec.models import hub"),
        ("edgespec/transport/x.py", "from torch import nn"),
        ("edgespec/transport/x.py", "import edgespec.verifier.server"),
        ("edgespec/models/x.py", "from edgespec.transport import channel"),
        *(("edgespec/agent/x.py", f"import {name}") for name in sorted(HEAVY)),
        *(("edgespec/verifier/x.py", f"import {name}") for name in sorted(HEAVY)),
        ("edgespec/agent/x.py", "from edgespec.verifier import scheduler"),
        ("edgespec/verifier/x.py", "from edgespec.agent import device"),
        ("edgespec/verifier/x.py", "from edgespec.targets import toy"),
        ("edgespec/agent/x.py", "import importlib; importlib.import_module('torch')"),
        ("edgespec/agent/x.py", "from ..verifier import scheduler"),
        ("edgespec/agent/__init__.py", "from ..verifier import scheduler"),
        ("sim/edgespec_sim/x.py", "from edgespec.drafters.onnx import OnnxDrafter"),
        ("sim/edgespec_sim/x.py", "from edgespec.transport import loopback"),
        *(("sim/edgespec_sim/x.py", f"import {name}") for name in sorted(HEAVY | REAL_WORLD)),
        ("sim/edgespec_sim/x.py", "from edgespec_uara import world"),
        ("sim/edgespec_uara/x.py", "import torch"),
        ("sim/edgespec_uara/x.py", "from edgespec.agent.device import Device"),
        ("edgespec/__init__.py", "from edgespec.agent.device import Device"),
        ("edgespec/__init__.py", "import torch"),
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
        ("edgespec/ports.py", "from edgespec.core.protocol.messages import Uplink"),
        ("edgespec/drafters/onnx.py", "import onnxruntime"),
        ("edgespec/targets/torch.py", "import torch"),
        ("edgespec/transport/grpc_client.py", "import grpc"),
        ("edgespec/agent/x.py", "import asyncio"),
        ("edgespec/agent/x.py", "from edgespec import ports"),
        ("edgespec/cli/x.py", "from edgespec_sim import world"),
        ("sim/edgespec_sim/x.py", "from edgespec.drafters.toy import ToyDrafter"),
        ("sim/edgespec_sim/x.py", "import heapq, random"),
        ("sim/edgespec_uara/masac/x.py", "import torch"),
        ("sim/edgespec_uara/x.py", "from edgespec_uara.masac import learner"),
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
