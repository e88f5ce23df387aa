"""The committed protobuf code is what the generator makes of the .proto files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "edgespec" / "wire" / "pb"


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("protos_generate", ROOT / "protos/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_code_is_what_the_generator_writes(tmp_path: Path) -> None:
    generator = _generator()
    if reason := generator.unavailable():
        pytest.skip(reason)
    fresh = {path.name: path.read_text() for path in generator.generate(tmp_path)}
    committed = {path.name: path.read_text() for path in GENERATED.glob("*_pb2.py*")}
    assert fresh.keys() == committed.keys(), "run: python protos/generate.py"
    drifted = [name for name in fresh if fresh[name] != committed[name]]
    assert not drifted, "run: python protos/generate.py"


def test_every_field_number_of_a_hot_message_costs_one_byte() -> None:
    from edgespec.wire.pb import speculation_pb2 as pb

    for message in (pb.DeviceMessage, pb.VerifierMessage, pb.Draft, pb.Commit, pb.Received):
        assert all(field.number <= 15 for field in message.DESCRIPTOR.fields)


def test_every_enum_has_an_unspecified_zero() -> None:
    from edgespec.wire.pb import speculation_pb2 as pb

    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
